"""Stability of the result over time, market regimes, walk-forward folds and training seeds."""

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.evaluate import statistics
from tailguard.evaluate.record import AccountHistory, Evaluation
from tailguard.evaluate.report.charts import (
    TIME,
    Axis,
    Chart,
    ChartRow,
    Color,
    Dot,
    Mark,
    Panel,
    RowPanel,
    Rule,
    downsample,
    estimate_row,
    finite_or_none,
    seconds,
    title_of,
)
from tailguard.evaluate.report.formatting import capital, day, duration, readable, say, slug
from tailguard.evaluate.report.page import Block, Html, ReportSection, Tabs, table
from tailguard.evaluate.stats.series import Floats

FEWEST = 40  # bars below which nothing rolls
KINDS = {"year": "By year", "volatility": "By market volatility"}
REGIMES = {"calm": "low volatility", "usual": "medium volatility", "stormy": "high volatility"}  # by name in the record


def time_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the rolling Sharpe ratio, volatility and beta, then calendar years and volatility regimes."""
    panes: dict[str, list[Block]] = {}
    if len(evaluation.agent.returns) >= FEWEST:
        panes["Rolling"] = [_rolling_chart(evaluation)]
    regimes = evaluation.sanity.regimes
    for kind in dict.fromkeys(regimes["kind"]) if len(regimes) else []:
        panes[KINDS.get(kind, capital(readable(kind)))] = [_regime_chart(evaluation, kind), _regime_table(evaluation, kind)]
    if not panes:
        return None
    lead = "Skill should not depend on one lucky period. A single year has few bars and is weak evidence either way."
    return ReportSection(
        "steadiness", "Over time", _time_headline(evaluation), lead, [Tabs("steadiness-tabs", "Periods", panes)]
    )


def _time_headline(evaluation: Evaluation) -> str:
    regimes = evaluation.sanity.regimes
    years = regimes[regimes["kind"] == "year"] if len(regimes) else regimes
    if not len(years):
        return "The result over time"
    ahead = int((years["agent_sharpe"] > years["market_sharpe"]).sum())
    return f"A higher Sharpe ratio than {title_of(evaluation.market)} in {ahead} of {len(years)} calendar years"


def window_of(bars: int, periods: float) -> int:
    """Return the length of a rolling window: half a year, but at most a quarter of the test and at least ten bars."""
    return int(min(max(round(periods / 2.0), 10), max(bars // 4, 10)))


def rolling(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Return the mean and standard deviation (ddof 1) of each window of `window` bars, ``[n - window + 1]``."""
    windows = pd.Series(values).rolling(window)  # updated bar by bar: half a year of minutes fits no table of windows
    mean, deviation = (part.to_numpy(dtype=np.float64)[window - 1 :] for part in (windows.mean(), windows.std(ddof=1)))
    return mean, deviation


def _rolling_chart(evaluation: Evaluation) -> Chart:
    periods, agent, who = evaluation.periods_per_year, evaluation.agent, evaluation.subject
    market = evaluation.history(evaluation.market)
    window = window_of(len(agent.returns), periods)
    times = seconds(agent.times)[window - 1 :]
    name = title_of(market.name)
    (mean, deviation), (market_mean, market_deviation) = (rolling(history.excess, window) for history in (agent, market))
    ratio, market_ratio = _annual_ratio(mean, deviation, periods), _annual_ratio(market_mean, market_deviation, periods)
    error = 1.96 * np.sqrt((1.0 + ratio**2 / periods / 2.0) / window * periods)
    grid = np.linspace(0, len(times) - 1, min(len(times), 300)).round().astype(int)
    band = {"low": (ratio - error)[grid], "high": (ratio + error)[grid]}
    sharpe = [
        Mark("band", times[grid], band, f"{who}, 95% interval", "agent"),
        _rolling_line(times, market_ratio, name, "market"),
        _rolling_line(times, ratio, who, "agent"),
    ]
    volatility = [
        _rolling_line(times, market_deviation * math.sqrt(periods), name, "market"),
        _rolling_line(times, deviation * math.sqrt(periods), who, "agent"),
    ]
    beta = [_rolling_line(times, _rolling_beta(agent.excess, market.excess, window), who, "agent", False)]
    panels = [
        Panel("Sharpe ratio", sharpe, TIME, Axis(include=(0.0,)), 260, hide_x=True),
        Panel("Annual volatility", volatility, TIME, Axis("percent", include=(0.0,), tight=True), 160, hide_x=True),
        Panel(f"Beta to {name}", beta, TIME, Axis(include=(0.0,)), 160, hide_x=agent.traded),
    ]
    if agent.traded:
        gross, net = (rolling(values, window)[0] for values in (np.abs(agent.weights).sum(axis=1), agent.weights.sum(axis=1)))
        exposure = [_rolling_line(times, net, "net", "agent"), _rolling_line(times, gross, "long or short", "fourth")]
        panels.append(Panel("Average exposure, share of the account", exposure, TIME, Axis("percent", include=(0.0,)), 160))
    above = float((ratio > market_ratio).mean())
    length = duration(window / periods)
    summary = f"In rolling windows of {window:,} bars, the {who}'s Sharpe ratio ranges from {say(ratio.min())} to "
    summary += f"{say(ratio.max())} and is above that of {name} in {say(above, 'percent')} of them."
    note = f"Each point covers the last {window:,} bars ({length}). The interval assumes independent bars (Lo 2002)."
    title = f"A higher Sharpe ratio than {name} in {say(above, 'percent')} of all windows of {length}"
    return Chart("rolling", title, summary, panels, note, shared=True)


def _rolling_line(times: Floats, values: Floats, name: str, color: Color, label: bool = True) -> Mark:
    at = downsample(values)
    return Mark("line", times[at], {"y": values[at]}, name, color, label)


def _annual_ratio(mean: Floats, deviation: Floats, periods: float) -> Floats:
    return np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 1e-12) * math.sqrt(periods)


def _rolling_beta(agent: Floats, market: Floats, window: int) -> Floats:
    (product, _), (own, _), (other, deviation) = (rolling(values, window) for values in (agent * market, agent, market))
    covariance = (product - own * other) * window / (window - 1.0)
    return np.divide(covariance, deviation**2, out=np.zeros_like(covariance), where=deviation > 1e-12)


def _regime_chart(evaluation: Evaluation, kind: str) -> Chart:
    chosen = evaluation.sanity.regimes[evaluation.sanity.regimes["kind"] == kind]
    name, who = title_of(evaluation.market), evaluation.subject
    rows = [
        ChartRow(
            capital(_regime_title(regime["regime"])),
            f"{say(regime['agent_sharpe'])} against {say(regime['market_sharpe'])}",
            finite_or_none(float(regime["agent_sharpe"])),
            color="agent",
            dots=[Dot(name, float(regime["market_sharpe"]), "market", True)],
            label=who,
        )
        for regime in chosen.to_dict("records")
    ]
    ahead = chosen[chosen["agent_sharpe"] > chosen["market_sharpe"]]
    what = {"year": "calendar years", "volatility": "volatility regimes"}.get(kind, "regimes")
    title = f"A higher Sharpe ratio than {name} in {len(ahead)} of {len(chosen)} {what}"
    best, worst = (chosen.iloc[int(pick)] for pick in (chosen["agent_sharpe"].argmax(), chosen["agent_sharpe"].argmin()))
    times = "times of " if kind == "volatility" else ""
    summary = f"The {who}'s Sharpe ratio is highest in {times}{_regime_title(best['regime'])} ({say(best['agent_sharpe'])}) "
    summary += f"and lowest in {times}{_regime_title(worst['regime'])} ({say(worst['agent_sharpe'])})."
    panel = RowPanel(f"Sharpe ratio, {who} against {name}", rows)
    note = "The first and the last year may be incomplete."
    if kind == "volatility":
        note = "Terciles of the market's volatility over the month before each bar."
    return Chart(f"regimes-{slug(kind)}", title, summary, [panel], note)


def _regime_title(name: str) -> str:
    return REGIMES.get(str(name), str(name))


def _regime_table(evaluation: Evaluation, kind: str) -> Html:
    chosen = evaluation.sanity.regimes[evaluation.sanity.regimes["kind"] == kind]
    rows = [
        [
            capital(_regime_title(regime["regime"])),
            say(regime["bars"], "count"),
            say(regime["agent_return"], "percent"),
            say(regime["market_return"], "percent"),
            say(regime["agent_sharpe"]),
            say(regime["market_sharpe"]),
            say(regime["agent_max_drawdown"], "percent"),
            say(regime["exposure"], "percent"),
        ]
        for regime in chosen.to_dict("records")
    ]
    market, who = title_of(evaluation.market), evaluation.subject
    head = [
        kind,
        "bars",
        f"{who}: return",
        f"{market}: return",
        f"{who}: Sharpe ratio",
        f"{market}: Sharpe ratio",
        f"{who}: maximum drawdown",
        f"{who}: exposure",
    ]
    return table(head, rows, "The same in numbers. Periods this short have wide confidence intervals, which are not computed.")


def instruments_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the results of every instrument of a pool; None without one."""
    if evaluation.instruments is None:
        return None
    pool = evaluation.instruments.sort_values("sharpe", ascending=False)
    rows = [
        [
            str(row["symbol"]),
            say(row["sharpe"]),
            say(row["market_sharpe"]),
            say(row["growth"], "percent"),
            say(row["turnover"], "multiple"),
        ]
        for row in pool.to_dict("records")
    ]
    ahead = int((pool["sharpe"] > pool["market_sharpe"]).sum())
    lead = "One policy trades all instruments, and the portfolio gives each the same share. Here each is traded alone with the "
    lead += "whole account; the verdict is on the portfolio."
    head = ["instrument", "Sharpe ratio", "held: Sharpe ratio", "log growth per year", "turnover per year"]
    headline = f"A higher Sharpe ratio than holding in {ahead} of {len(pool)} instruments"
    return ReportSection("instruments", "Instruments", headline, lead, [table(head, rows, "Instruments of the pool.")])


def folds_section(evaluation: Evaluation) -> ReportSection | None:
    """Show the Sharpe ratio of every walk-forward fold and every training seed."""
    if not len(evaluation.folds):
        return None
    spread = evaluation.sanity.dispersion
    headline = f"{len(evaluation.folds)} {'fold' if len(evaluation.folds) == 1 else 'folds'}, {len(evaluation.seeds)} training "
    headline += "seed" if len(evaluation.seeds) == 1 else "seeds"
    if spread is not None:
        headline = f"The Sharpe ratios of the training seeds lie between {say(spread.worst)} and {say(spread.best)}"
    lead = "Each fold trains on past bars and is tested on later ones, after a gap (embargo). Seeds differ only in their "
    lead += "random numbers: where they differ by more than the agent's lead, the lead may be chance."
    blocks = [_fold_chart(evaluation), _dispersion_chart(evaluation), _fold_table(evaluation)]
    return ReportSection("folds", "Folds and seeds", headline, lead, [block for block in blocks if block is not None])


def _inside(history: AccountHistory, fold: pd.Series) -> NDArray[np.bool_]:
    """Return which bars of an account lie inside the test of a fold, both ends included."""
    return np.asarray((history.times >= fold["test_from"]) & (history.times <= fold["test_to"]))


def fold_sharpe(evaluation: Evaluation, history: AccountHistory, fold: pd.Series) -> float:
    """Return the annual Sharpe ratio of an account inside the test of a fold; NaN for a single bar."""
    excess = history.excess[_inside(history, fold)]
    return statistics.sharpe(excess, evaluation.periods_per_year) if len(excess) > 1 else float("nan")


def _fold_chart(evaluation: Evaluation) -> Chart:
    market = evaluation.history(evaluation.market)
    name = title_of(market.name)
    rows, ahead, own = [], 0, []
    for _, fold in evaluation.folds.iterrows():
        agent, other = (fold_sharpe(evaluation, history, fold) for history in (evaluation.agent, market))
        ahead += agent > other
        own.append(agent)
        dots = [Dot("seed", fold_sharpe(evaluation, history, fold), "seed", True) for history in evaluation.seeds]
        dots = [Dot(name, other, "market"), *dots]
        label = f"{fold['test_from']:%b %Y} to {fold['test_to']:%b %Y}"
        rows.append(ChartRow(label, f"{say(agent)} against {say(other)}", finite_or_none(agent), dots=dots, label="agent"))
    summary = f"The agent's Sharpe ratio ranges from {say(min(own))} to {say(max(own))} over the folds and is higher than that "
    summary += f"of {name} in {ahead} of {len(rows)}."
    panel = RowPanel(f"Sharpe ratio by fold: agent, seeds and {name}", rows)
    title = f"A higher Sharpe ratio than {name} in {ahead} of {len(rows)} {'fold' if len(rows) == 1 else 'folds'}"
    note = "The agent trades the average position of its seeds, so its Sharpe ratio need not be the average of theirs."
    return Chart("fold-rows", title, summary, [panel], note)


def _dispersion_chart(evaluation: Evaluation) -> Chart | None:
    spread = evaluation.sanity.dispersion
    if spread is None:
        return None
    estimates = {history.name: evaluation.statistics[history.name]["sharpe"] for history in evaluation.seeds}
    rows = [
        estimate_row(capital(readable(name)), estimate, "number", "seed", "Sharpe ratio")
        for name, estimate in estimates.items()
    ]
    own = evaluation.statistics[evaluation.agent.name]["sharpe"]
    rows.append(estimate_row("Agent, all seeds", own, "number", "agent", "Sharpe ratio"))
    ends = f"[{say(spread.interquartile_low)} to {say(spread.interquartile_high)}]"
    middle = f"interquartile mean {say(spread.interquartile_mean)} {ends}"
    summary = f"The median Sharpe ratio of {len(estimates)} seeds is {say(spread.median)}, their interquartile range "
    summary += f"{say(spread.low)} to {say(spread.high)}; {middle}."
    market = evaluation.statistics[evaluation.market]["sharpe"].value
    rules = [Rule(title_of(evaluation.market), x=market)] if math.isfinite(market) else []
    panel = RowPanel("Sharpe ratio over all folds, with 95% intervals", rows, rules=rules)
    title = f"Sharpe ratio of the median seed {say(spread.median)}, worst {say(spread.worst)}, best {say(spread.best)}"
    note = capital(f"{middle}: the mean of the middle half of the Sharpe ratios of all folds and seeds.")
    return Chart("seed-rows", title, summary, [panel], note)


def _fold_table(evaluation: Evaluation) -> Html:
    market = title_of(evaluation.market)
    rows = []
    for _, fold in evaluation.folds.iterrows():
        histories = (evaluation.agent, evaluation.history(evaluation.market))
        agent, other = (history.returns[_inside(history, fold)] for history in histories)
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
    head = ["fold", "trained on", "embargo", "tested on", "test bars", "agent: return", f"{market}: return"]
    caption = "Training and test spans. The embargo keeps training bars out of the features and recurrent state of the test."
    return table(head, rows, caption, numbers_from=4)
