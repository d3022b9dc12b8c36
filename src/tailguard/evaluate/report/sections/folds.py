"""Folds and seeds: whether the result repeats when the years or the random numbers change."""

import math

import numpy as np
import pandas as pd

from tailguard.evaluate import statistics
from tailguard.evaluate.record import AccountHistory, Evaluation
from tailguard.evaluate.report.blocks import Section
from tailguard.evaluate.report.figures import Chart, Dot, Row, Rows, Rule, figure_row
from tailguard.evaluate.report.formatting import capital, day, plain, say
from tailguard.evaluate.report.markup import Html, table
from tailguard.evaluate.report.series import title_of
from tailguard.evaluate.stats.series import Floats


def folds(evaluation: Evaluation) -> Section | None:
    """The Sharpe ratio of every fold and every seed."""
    if not len(evaluation.folds):
        return None
    spread = evaluation.sanity.dispersion
    headline = f"{len(evaluation.folds)} {'fold' if len(evaluation.folds) == 1 else 'folds'}, {len(evaluation.seeds)} training "
    headline += "seed" if len(evaluation.seeds) == 1 else "seeds"
    if spread is not None:
        headline = f"The training seeds lie between Sharpe {say(spread.worst)} and {say(spread.best)}"
    lead = (
        "Each fold trains on the past and is tested on what follows, after a gap. Seeds differ in their random numbers only: "
    )
    lead += "if they are further apart than the agent is ahead, there is no result."
    blocks = [_fold_chart(evaluation), _seed_chart(evaluation), _fold_table(evaluation)]
    return Section("folds", "Folds and seeds", headline, lead, [block for block in blocks if block is not None])


def within(track: AccountHistory, fold: pd.Series) -> Floats:
    """Returns of a track inside a fold's test, both ends included."""
    inside = (track.times >= fold["test_from"]) & (track.times <= fold["test_to"])
    returns: Floats = track.returns[inside]
    return returns


def _sharpe(evaluation: Evaluation, track: AccountHistory, fold: pd.Series) -> float:
    returns = within(track, fold)
    return statistics.sharpe(returns, evaluation.periods_per_year) if len(returns) > 1 else float("nan")


def _fold_chart(evaluation: Evaluation) -> Chart:
    market = evaluation.track(evaluation.market)
    name = title_of(market.name)
    rows, ahead, own = [], 0, []
    for _, fold in evaluation.folds.iterrows():
        agent, other = (_sharpe(evaluation, track, fold) for track in (evaluation.agent, market))
        ahead += agent > other
        own.append(agent)
        dots = [Dot("seed", _sharpe(evaluation, track, fold), "seed", True) for track in evaluation.seeds]
        dots = [Dot(name, other, "market"), *dots]
        label = f"{_year(fold['test_from'])} to {_year(fold['test_to'])}"
        rows.append(
            Row(label, f"{say(agent)} against {say(other)}", agent if np.isfinite(agent) else None, dots=dots, label="agent")
        )
    summary = f"The agent's Sharpe ratio by fold runs from {say(min(own))} to {say(max(own))}; "
    summary += f"it is ahead of {name} in {ahead} of {len(rows)}."
    panel = Rows(f"Sharpe ratio per year, by fold: agent, seeds and {name}", rows)
    title = f"Ahead of {name} in {ahead} of {len(rows)} {'fold' if len(rows) == 1 else 'folds'}"
    return Chart(
        "fold-rows",
        title,
        summary,
        [panel],
        "The agent trades the mean position of its seeds, so it need not lie in their middle.",
    )


def _seed_chart(evaluation: Evaluation) -> Chart | None:
    spread = evaluation.sanity.dispersion
    if spread is None:
        return None
    figures = {track.name: evaluation.statistics[track.name]["sharpe"] for track in evaluation.seeds}
    rows = [figure_row(capital(plain(name)), figure, "number", "seed", "Sharpe") for name, figure in figures.items()]
    rows.append(
        figure_row("Agent, all seeds", evaluation.statistics[evaluation.agent.name]["sharpe"], "number", "agent", "Sharpe")
    )
    ends = f"[{say(spread.interquartile_low)} to {say(spread.interquartile_high)}]"
    middle = f"interquartile mean {say(spread.interquartile_mean)} {ends}"
    summary = (
        f"Over {len(figures)} seeds the median Sharpe ratio is {say(spread.median)}, the middle half from {say(spread.low)} "
    )
    summary += f"to {say(spread.high)}; {middle}."
    market = evaluation.statistics[evaluation.market]["sharpe"].value
    rules = [Rule(title_of(evaluation.market), x=market)] if math.isfinite(market) else []
    panel = Rows("Sharpe ratio per year, all folds, with 95% intervals", rows, rules=rules)
    title = f"Median seed {say(spread.median)}, worst {say(spread.worst)}, best {say(spread.best)}"
    return Chart(
        "seed-rows", title, summary, [panel], capital(f"{middle}: the mean of the middle half of all folds and seeds.")
    )


def _year(time: pd.Timestamp) -> str:
    return f"{time:%b %Y}"


def _fold_table(evaluation: Evaluation) -> Html:
    market = title_of(evaluation.market)
    rows = []
    for _, fold in evaluation.folds.iterrows():
        agent, other = (within(track, fold) for track in (evaluation.agent, evaluation.track(evaluation.market)))
        rows.append(
            [
                str(fold["fold"]),
                f"{day(fold['train_from'])} to {day(fold['train_to'])}",
                f"{fold['embargo']:,} bars",
                f"{day(fold['test_from'])} to {day(fold['test_to'])}",
                f"{len(agent):,}",
                say(float(np.prod(1.0 + agent)) - 1.0, "percent"),
                say(float(np.prod(1.0 + other)) - 1.0, "percent"),
            ]
        )
    head = ["fold", "trained on", "gap", "tested on", "bars", "agent's return", f"{market}: return"]
    return table(
        head, rows, "What each fold saw. The gap keeps features and memory from reaching into the test.", numbers_from=4
    )
