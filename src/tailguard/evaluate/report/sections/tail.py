"""The distribution of returns, and whether the critic knew its own tail."""

import math

import numpy as np

from tailguard.evaluate.record import Calibration, Evaluation
from tailguard.evaluate.report.blocks import Block, Section
from tailguard.evaluate.report.downsample import keep
from tailguard.evaluate.report.figures import Axis, Chart, Mark, Panel, Rule, seconds
from tailguard.evaluate.report.formatting import chance, say
from tailguard.evaluate.report.markup import Html, table
from tailguard.evaluate.report.series import TIME, title_of
from tailguard.evaluate.stats.series import Floats

BINS = 41
REACH = 1.4  # of the histogram, in units of a move that one bar in a hundred exceeds
SIZE = 0.05  # below this p-value a prediction is called wrong
FEW = 5.0  # expected exceptions below which their count says little
Z = 1.96
MOST_LAWS, GRID = 1000, 801


def tail(evaluation: Evaluation) -> Section:
    """Returns as they came, and as they were predicted."""
    blocks: list[Block] = [_distribution(evaluation)]
    lead = "The agent is trained to look after its worst outcomes, so it has to know them. "
    calibration = evaluation.calibration
    if calibration is None:
        lead += "This record holds no predictions of a critic, so that only what came can be shown."
        worst = evaluation.statistics[evaluation.agent.name]["cvar_5"].value
        return Section("tail", "Tail risk", f"The worst bar in twenty lost {say(-worst, 'percent')} on average", lead, blocks)
    lead += "Below, what its critic predicted on unseen bars is held against what came."
    blocks += [_fan(calibration), _calibrated(calibration), _tests(calibration)]
    return Section("tail", "Tail risk", _headline(calibration), lead, blocks)


def _headline(calibration: Calibration) -> str:
    """The whole law first; if nothing speaks against it, the lowest tail, which the agent's objective rests on."""
    if calibration.uniformity.p_value < SIZE:
        return f"The critic expected {_error(calibration)}"
    level = min(calibration.coverage)
    test = calibration.coverage[level]
    if test.exact_p_value >= SIZE:
        return f"The predicted {level:.0%} tail was hit about as often as it should be"
    direction = "more" if test.exceptions > test.expected else "less"
    return f"The predicted {level:.0%} tail was hit {direction} often than it should be"


def _error(calibration: Calibration) -> str:
    """How a wrong law was wrong: off its middle, or of the wrong width, whichever is the larger error in probability."""
    law = np.sort(calibration.quantiles, axis=1)
    low, middle, high = (_between(law, calibration.levels, level) for level in (0.25, 0.5, 0.75))
    inside = float(((calibration.outcomes >= low) & (calibration.outcomes <= high)).mean()) - 0.5
    below = float((calibration.outcomes < middle).mean()) - 0.5
    if abs(inside) >= abs(below):
        return "wider outcomes than came" if inside > 0.0 else "narrower outcomes than came"
    return "better outcomes than came" if below > 0.0 else "worse outcomes than came"


def _distribution(evaluation: Evaluation) -> Chart:
    agent, market = evaluation.agent.returns, evaluation.track(evaluation.market).returns
    reach = REACH * float(np.quantile(np.abs(agent), 0.99)) or 0.01
    edges = np.linspace(-reach, reach, BINS + 1)
    own = np.histogram(np.clip(agent, -reach, reach), edges)[0] / len(agent)
    other = np.histogram(market, edges)[0] / len(market)
    middle = (edges[1:] + edges[:-1]) / 2.0
    figures = evaluation.statistics[evaluation.agent.name]
    worst, worst_market = figures["cvar_5"].value, evaluation.statistics[evaluation.market]["cvar_5"].value
    name = title_of(evaluation.market)
    marks = [
        Mark("bars", edges, {"y": own}, "agent", "agent"),
        Mark("line", middle, {"y": other}, name, "market", options={"thin": True}),
    ]
    summary = f"The worst 5% of the agent's bars return {say(worst, 'percent')} on average, "
    summary += f"those of {name} {say(worst_market, 'percent')}."
    panel = Panel(
        "Share of the bars, by return per bar",
        marks,
        Axis("percent", label="return per bar"),
        Axis("percent", include=(0.0,), tight=True),
        260,
        [Rule("CVaR 5%", x=worst)],
    )
    title = f"The worst bar in twenty costs {say(-worst, 'percent')} on average"
    beyond, beyond_market = (float((np.abs(values) > reach).mean()) for values in (agent, market))
    note = (
        f"{say(beyond, 'percent')} of the agent's returns are beyond {say(reach, 'percent')} and stand in the outermost bins; "
    )
    note += f"of those of {name}, {say(beyond_market, 'percent')} are beyond and not shown."
    return Chart("distribution", title, summary, [panel], note)


def _fan(calibration: Calibration) -> Chart:
    """Bands over time: outcomes should leave the outer band as often as it says."""
    times = seconds(calibration.times)
    low, high = calibration.levels[0], calibration.levels[-1]
    outer = (float(max(low, 0.05)), float(min(high, 0.95)))
    inner = (0.25, 0.75)
    shown = np.linspace(0, len(times) - 1, min(len(times), 260)).round().astype(int)
    law = np.sort(calibration.quantiles[shown], axis=1)
    bands = [_between(law, calibration.levels, level) for level in (*outer, *inner, 0.5)]
    dots = keep(calibration.outcomes, 200)
    marks = [
        Mark(
            "band", times[shown], {"low": bands[0], "high": bands[1]}, f"predicted, {outer[0]:.0%} to {outer[1]:.0%}", "agent"
        ),
        Mark(
            "band",
            times[shown],
            {"low": bands[2], "high": bands[3]},
            "predicted, middle half",
            "agent",
            options={"strong": True},
        ),
        Mark("line", times[shown], {"y": bands[4]}, "predicted median", "agent", options={"thin": True}),
        Mark(
            "dots", times[dots], {"y": calibration.outcomes[dots]}, "what came", "market", options={"size": 2, "hollow": False}
        ),
    ]
    below = float(
        (calibration.outcomes < _between(np.sort(calibration.quantiles, axis=1), calibration.levels, outer[0])).mean()
    )
    span = "bar" if calibration.horizon == 1 else f"{calibration.horizon} bars"
    summary = f"{say(below, 'percent')} of the outcomes fell below the predicted {outer[0]:.0%} quantile."
    panel = Panel(f"Return over the next {span}, log", marks, TIME, Axis("percent", include=(0.0,)), 280)
    title = f"What the critic expected of the next {span}, and what came"
    note = f"{len(times):,} predictions on bars that the critic had never seen."
    if len(dots) < len(times):
        note += " Of the outcomes, the lowest and highest of each stretch are shown: extremes look more frequent than they are."
    return Chart("fan", title, summary, [panel], note)


def _calibrated(calibration: Calibration) -> Chart:
    effective = max(test.bars for test in calibration.coverage.values())
    panels = [_quantile_panel(calibration), _level_panel(calibration, effective), _transform_panel(calibration, effective)]
    gap = float(np.abs(calibration.realised - calibration.levels).max())
    p_value = calibration.uniformity.p_value
    summary = f"Realised and predicted levels differ by at most {say(gap, 'percent')}; the transforms are "
    summary += f"{'compatible with' if p_value >= SIZE else 'not'} uniform, {chance(p_value)}."
    note = f"Shaded: where a right prediction would lie in 95 of 100 cases, for {effective:,} outcomes that do not overlap."
    word = "well" if p_value >= SIZE else "not well"
    return Chart("calibration", f"The predicted law is {word} calibrated", summary, panels, note, columns=3)


def _quantile_panel(calibration: Calibration) -> Panel:
    realised = np.quantile(calibration.outcomes, calibration.levels)
    predicted = mixture_quantiles(calibration.quantiles, calibration.levels)
    ends = np.array([min(predicted.min(), realised.min()), max(predicted.max(), realised.max())])
    marks = [
        Mark("line", ends, {"y": ends}, "", "other", options={"dash": True}),
        Mark("dots", predicted, {"y": realised}, "realised quantile", "agent"),
    ]
    axes = Axis("percent", label="predicted quantile", tip="predicted"), Axis("percent")
    return Panel("Realised against predicted quantiles", marks, *axes, height=270)


def _level_panel(calibration: Calibration, effective: int) -> Panel:
    levels = np.linspace(0.0, 1.0, 41)
    error = Z * np.sqrt(levels * (1.0 - levels) / effective)
    marks = [
        Mark("band", levels, {"low": -error, "high": error}, "", "other"),
        Mark("line", calibration.levels, {"y": calibration.realised - calibration.levels}, "below it too often by", "agent"),
        Mark("dots", calibration.levels, {"y": calibration.realised - calibration.levels}, "", "agent", options={"size": 2.5}),
    ]
    axes = Axis("percent", label="predicted level", tip="level", include=(0.0, 1.0)), Axis("percent", include=(0.0,))
    return Panel("Share of outcomes below, minus the level", marks, *axes, height=270)


def _transform_panel(calibration: Calibration, effective: int) -> Panel:
    bins = 20 if effective >= 400 else 10
    edges = np.linspace(0.0, 1.0, bins + 1)
    density = np.histogram(calibration.transforms, edges)[0] * bins / len(calibration.transforms)
    error = Z * math.sqrt((bins - 1.0) / effective)
    ends = np.array([0.0, 1.0])
    marks = [
        Mark("bars", edges, {"y": density}, "density", "agent"),
        Mark("band", ends, {"low": np.full(2, max(1.0 - error, 0.0)), "high": np.full(2, 1.0 + error)}, "", "fourth"),
    ]
    axes = Axis("percent", label="probability transform"), Axis("number", include=(0.0,), tight=True)
    return Panel("Probability transforms, flat if right", marks, *axes, height=270, rules=[Rule("", y=1.0)])


def _tests(calibration: Calibration) -> Html:
    rows = []
    for level, test in sorted(calibration.coverage.items()):
        found = f"{test.exceptions} exceptions, {test.expected:.1f} expected"
        meaning = _judged(test.exact_p_value, "the tail was hit as often as predicted")
        if test.expected < FEW and test.exact_p_value >= SIZE:
            meaning = "Too few exceptions are expected to tell."
        rows.append([f"Kupiec, {level:.0%} tail", found, chance(test.exact_p_value), meaning])
    for level, shortfall in sorted(calibration.shortfall.items()):
        meaning = _judged(shortfall.p_value, "losses in the tail were no larger than predicted")
        name, found = f"Acerbi-Szekely, {level:.0%} tail", f"Z2 = {say(shortfall.statistic)}"
        rows.append([name, found, chance(shortfall.p_value), meaning])
    distance = calibration.uniformity
    found = f"distance {say(distance.statistic, 'free')}"
    rows.append(["Kolmogorov-Smirnov", found, chance(distance.p_value), _judged(distance.p_value, "the whole law is right")])
    caption = "Tests of the predicted law. A p-value below 0.05 speaks against the prediction."
    return table(["test", "found", "chance", "what it means"], rows, caption, numbers_from=4)


def _judged(p_value: float, claim: str) -> str:
    return f"Nothing speaks against it: {claim}." if p_value >= SIZE else f"Rejected: that {claim}."


def _between(law: Floats, levels: Floats, level: float) -> Floats:
    """A quantile of each predicted law, linear between its levels. ``[n, N]`` sorted gives ``[n]``."""
    place = float(np.interp(level, levels, np.arange(len(levels))))
    left = math.floor(place)
    right = min(left + 1, len(levels) - 1)
    result: Floats = law[:, left] * (1.0 - (place - left)) + law[:, right] * (place - left)
    return result


def mixture_quantiles(quantiles: Floats, levels: Floats) -> Floats:
    """Quantiles of all predicted laws together, which is what outcomes of many bars have to be compared with.

    The mean of the laws' distribution functions, each linear between its quantiles, turned around on a grid.

    :param quantiles: ``[n, N]``; of more than a thousand laws, a thousand evenly spaced ones are used.
    :param levels: ``[N]``, increasing.
    :return: ``[N]`` at the same levels.
    """
    chosen = np.linspace(0, len(quantiles) - 1, min(len(quantiles), MOST_LAWS)).round().astype(int)
    laws = np.sort(quantiles[chosen], axis=1)
    grid = np.unique(np.quantile(laws, np.linspace(0.0, 1.0, GRID)))
    below = np.mean([np.interp(grid, law, levels, left=0.0, right=1.0) for law in laws], axis=0)
    found: Floats = np.interp(levels, below, grid)
    return found
