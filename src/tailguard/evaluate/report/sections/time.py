"""How steady it was: rolling figures, years and regimes."""

import math

import numpy as np

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Block, Section, Tabs
from tailguard.evaluate.report.downsample import keep
from tailguard.evaluate.report.figures import Axis, Chart, Color, Dot, Mark, Panel, Row, Rows, finite, seconds
from tailguard.evaluate.report.formatting import capital, duration, plain, say, slug
from tailguard.evaluate.report.markup import Html, table
from tailguard.evaluate.report.series import TIME, title_of
from tailguard.evaluate.stats.series import Floats

FEWEST = 40  # bars below which nothing rolls
KINDS = {"year": "By year", "volatility": "By volatility of the market"}


def steadiness(evaluation: Evaluation) -> Section | None:
    """Rolling Sharpe ratio, volatility and beta, then years and regimes."""
    panes: dict[str, list[Block]] = {}
    if len(evaluation.agent.returns) >= FEWEST:
        panes["Rolling"] = [_rolling(evaluation)]
    regimes = evaluation.sanity.regimes
    for kind in dict.fromkeys(regimes["kind"]) if len(regimes) else []:
        panes[KINDS.get(kind, capital(plain(kind)))] = [_regimes(evaluation, kind), _regime_table(evaluation, kind)]
    if not panes:
        return None
    lead = "Skill should not hang on one lucky stretch. Single years are weak evidence either way: they have few bars."
    return Section("steadiness", "Over time", _headline(evaluation), lead, [Tabs("steadiness-tabs", "Which stretches", panes)])


def _headline(evaluation: Evaluation) -> str:
    regimes = evaluation.sanity.regimes
    years = regimes[regimes["kind"] == "year"] if len(regimes) else regimes
    if not len(years):
        return "How steady it was"
    ahead = int((years["agent_sharpe"] > years["market_sharpe"]).sum())
    return f"Ahead of {title_of(evaluation.market)} by Sharpe ratio in {ahead} of {len(years)} calendar years"


def window_of(bars: int, periods: float) -> int:
    """Half a year, but never more than a quarter of the test nor fewer than ten bars."""
    return int(min(max(round(periods / 2.0), 10), max(bars // 4, 10)))


def rolling(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation (ddof 1) of each stretch of `window` bars, ``[n - window + 1]``."""
    stretches = np.lib.stride_tricks.sliding_window_view(values, window)
    return stretches.mean(axis=1), stretches.std(axis=1, ddof=1)


def _rolling(evaluation: Evaluation) -> Chart:
    periods, agent = evaluation.periods_per_year, evaluation.agent
    market = evaluation.track(evaluation.market)
    window = window_of(len(agent.returns), periods)
    times = seconds(agent.times)[window - 1 :]
    name = title_of(market.name)
    (mean, deviation), (market_mean, market_deviation) = (rolling(track.returns, window) for track in (agent, market))
    ratio, market_ratio = _ratio(mean, deviation, periods), _ratio(market_mean, market_deviation, periods)
    error = 1.96 * np.sqrt((1.0 + ratio**2 / periods / 2.0) / window * periods)
    grid = np.linspace(0, len(times) - 1, min(len(times), 300)).round().astype(int)
    sharpe = [
        Mark(
            "band", times[grid], {"low": (ratio - error)[grid], "high": (ratio + error)[grid]}, "agent, 95% interval", "agent"
        ),
        _line(times, market_ratio, name, "market"),
        _line(times, ratio, "agent", "agent"),
    ]
    noise = [
        _line(times, market_deviation * math.sqrt(periods), name, "market"),
        _line(times, deviation * math.sqrt(periods), "agent", "agent"),
    ]
    beta = [_line(times, _beta(agent.returns, market.returns, window), "agent", "agent", False)]
    panels = [
        Panel("Sharpe ratio per year", sharpe, TIME, Axis(include=(0.0,)), 260, hide_x=True),
        Panel("Volatility per year", noise, TIME, Axis("percent", include=(0.0,), tight=True), 160, hide_x=True),
        Panel(f"Beta to {name}", beta, TIME, Axis(include=(0.0,)), 160),
    ]
    above = float((ratio > market_ratio).mean())
    length = duration(window / periods)
    summary = (
        f"Over stretches of {window:,} bars the agent's Sharpe ratio runs from {say(ratio.min())} to {say(ratio.max())} and is "
    )
    summary += f"above that of {name} in {say(above, 'percent')} of them."
    note = f"Each point looks back over {window:,} bars ({length}). The interval takes bars as independent (Lo 2002)."
    return Chart(
        "rolling", f"Above {name} in {say(above, 'percent')} of all stretches of {length}", summary, panels, note, shared=True
    )


def _line(times: Floats, values: Floats, name: str, color: Color, label: bool = True) -> Mark:
    at = keep(values)
    return Mark("line", times[at], {"y": values[at]}, name, color, label)


def _ratio(mean: Floats, deviation: Floats, periods: float) -> Floats:
    return np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 1e-12) * math.sqrt(periods)


def _beta(agent: Floats, market: Floats, window: int) -> Floats:
    (product, _), (own, _), (other, deviation) = (rolling(values, window) for values in (agent * market, agent, market))
    covariance = (product - own * other) * window / (window - 1.0)
    return np.divide(covariance, deviation**2, out=np.zeros_like(covariance), where=deviation > 1e-12)


def _regimes(evaluation: Evaluation, kind: str) -> Chart:
    chosen = evaluation.sanity.regimes[evaluation.sanity.regimes["kind"] == kind]
    name = title_of(evaluation.market)
    rows = [
        Row(
            capital(str(one["regime"])),
            f"{say(one['agent_sharpe'])} against {say(one['market_sharpe'])}",
            finite(float(one["agent_sharpe"])),
            color="agent",
            dots=[Dot(name, float(one["market_sharpe"]), "market", True)],
            label="agent",
        )
        for one in chosen.to_dict("records")
    ]
    ahead = chosen[chosen["agent_sharpe"] > chosen["market_sharpe"]]
    what = {"year": "calendar years", "volatility": "kinds of market"}.get(kind, "regimes")
    title = f"Ahead of {name} in {len(ahead)} of {len(chosen)} {what}"
    best, worst = (chosen.iloc[int(pick)] for pick in (chosen["agent_sharpe"].argmax(), chosen["agent_sharpe"].argmin()))
    times = "" if kind == "year" else " times"
    summary = f"The agent's Sharpe ratio is highest in {best['regime']}{times} ({say(best['agent_sharpe'])}) and lowest in "
    summary += f"{worst['regime']}{times} ({say(worst['agent_sharpe'])})."
    panel = Rows(f"Sharpe ratio per year, agent against {name}", rows)
    note = (
        "Terciles of the market's recent volatility."
        if kind == "volatility"
        else "Parts of years at the ends count as they are."
    )
    return Chart(f"regimes-{slug(kind)}", title, summary, [panel], note)


def _regime_table(evaluation: Evaluation, kind: str) -> Html:
    chosen = evaluation.sanity.regimes[evaluation.sanity.regimes["kind"] == kind]
    rows = [
        [
            capital(str(one["regime"])),
            say(one["bars"], "count"),
            say(one["agent_return"], "percent"),
            say(one["market_return"], "percent"),
            say(one["agent_sharpe"]),
            say(one["market_sharpe"]),
            say(one["agent_max_drawdown"], "percent"),
            say(one["exposure"], "percent"),
        ]
        for one in chosen.to_dict("records")
    ]
    market = title_of(evaluation.market)
    head = [
        kind,
        "bars",
        "agent's return",
        f"{market}: return",
        "agent's Sharpe",
        f"{market}: Sharpe",
        "agent's deepest fall",
        "exposure",
    ]
    return table(head, rows, "The same in numbers. Stretches this short have wide intervals; none is claimed.")
