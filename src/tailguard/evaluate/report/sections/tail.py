"""Tail risk: the distribution of returns, and the calibration of the predicted tails."""

import math

import numpy as np

from tailguard.evaluate.record import Calibration, Evaluation
from tailguard.evaluate.report.charts import TIME, Axis, Chart, Mark, Panel, Rule, downsample, seconds, title_of
from tailguard.evaluate.report.formatting import chance, say
from tailguard.evaluate.report.page import Block, Html, ReportSection, table
from tailguard.evaluate.stats.series import Floats

BINS = 41
REACH = 1.4  # of the histogram, in multiples of the return that 1 % of bars exceed in size
SIZE = 0.05  # a prediction with a p-value below this is rejected
FEW = 5.0  # expected exceptions below which their count says little
Z = 1.96
MOST_PREDICTIONS, GRID = 1000, 801


def tail_section(evaluation: Evaluation) -> ReportSection:
    """Show the distribution of realised returns, and compare it with what was predicted."""
    blocks: list[Block] = [_distribution_chart(evaluation)]
    calibration, critic = evaluation.calibration, evaluation.critic_calibration
    if calibration is None:
        lead = "No tail was predicted, or over too few periods, so only realised returns are shown."
        headline = _realised_headline(evaluation)
    else:
        lead = "A predicted tail is worth something only if it is right. Below, predictions on unseen bars are compared with "
        lead += "realised returns."
        blocks += [_prediction_chart(calibration), _calibration_chart(calibration), _tests(calibration)]
        blocks += [_losses(calibration)] if calibration.losses else []
        headline = _calibration_headline(calibration)
    if critic is not None:
        blocks.append(_tests(critic))
    return ReportSection("tail", "Tail risk", headline, lead, blocks)


def _realised_headline(evaluation: Evaluation) -> str:
    worst = evaluation.statistics[evaluation.agent.name]["cvar_5"].value
    return f"The worst 5% of bars returned {say(worst, 'percent')} on average (CVaR)"


def _calibration_headline(calibration: Calibration) -> str:
    """State whether the whole distribution is rejected; if not, whether the lowest tail is."""
    if calibration.uniformity.p_value < SIZE:
        return f"{'Not calibrated: the' if not calibration.holds else 'The'} forecast predicted {_miscalibration(calibration)}"
    level = min(calibration.coverage)
    test = calibration.coverage[level]
    often = "more often than predicted" if test.exceptions > test.expected else "less often than predicted"
    if test.exact_p_value >= SIZE:
        often = "about as often as predicted"
    return f"Returns fell below the predicted {level:.0%} quantile {often}"


def _miscalibration(calibration: Calibration) -> str:
    """Describe a wrong distribution: a wrong median or a wrong width, whichever is the larger error in probability."""
    predicted = np.sort(calibration.quantiles, axis=1)
    low, middle, high = (_quantile_at(predicted, calibration.levels, level) for level in (0.25, 0.5, 0.75))
    inside = float(((calibration.outcomes >= low) & (calibration.outcomes <= high)).mean()) - 0.5
    below = float((calibration.outcomes < middle).mean()) - 0.5
    if abs(inside) >= abs(below):
        return "too wide a range of returns" if inside > 0.0 else "too narrow a range of returns"
    return "higher returns than were realised" if below > 0.0 else "lower returns than were realised"


def _distribution_chart(evaluation: Evaluation) -> Chart:
    agent, market = evaluation.agent.returns, evaluation.history(evaluation.market).returns
    reach = REACH * float(np.quantile(np.abs(agent), 0.99)) or 0.01
    edges = np.linspace(-reach, reach, BINS + 1)
    own = np.histogram(np.clip(agent, -reach, reach), edges)[0] / len(agent)
    other = np.histogram(market, edges)[0] / len(market)
    middle = (edges[1:] + edges[:-1]) / 2.0
    worst, worst_market = (evaluation.statistics[name]["cvar_5"].value for name in (evaluation.agent.name, evaluation.market))
    name, who = title_of(evaluation.market), evaluation.subject
    marks = [
        Mark("bars", edges, {"y": own}, who, "agent"),
        Mark("line", middle, {"y": other}, name, "market", options={"thin": True}),
    ]
    summary = f"The average return of the worst 5% of bars (CVaR) is {say(worst, 'percent')} for the {who} and "
    summary += f"{say(worst_market, 'percent')} for {name}."
    panel = Panel(
        "Share of bars by return per bar",
        marks,
        Axis("percent", label="return per bar"),
        Axis("percent", include=(0.0,), tight=True),
        260,
        [Rule("CVaR 5%", x=worst)],
    )
    title = f"The {who}'s worst 5% of bars return {say(worst, 'percent')} on average (CVaR)"
    beyond, beyond_market = (float((np.abs(values) > reach).mean()) for values in (agent, market))
    note = f"{say(beyond, 'percent')} of the {who}'s returns are beyond {say(reach, 'percent')} and counted in the "
    note += f"outermost bins. {say(beyond_market, 'percent')} of those of {name} are beyond it and not shown."
    return Chart("distribution", title, summary, [panel], note)


def _prediction_chart(calibration: Calibration) -> Chart:
    """Chart predicted quantiles over time with the outcomes."""
    times = seconds(calibration.times)
    low, high = calibration.levels[0], calibration.levels[-1]
    outer = (float(max(low, 0.05)), float(min(high, 0.95)))
    inner = (0.25, 0.75)
    shown = np.linspace(0, len(times) - 1, min(len(times), 260)).round().astype(int)
    predicted = np.sort(calibration.quantiles, axis=1)
    bands = [_quantile_at(predicted[shown], calibration.levels, level) for level in (*outer, *inner, 0.5)]
    dots = downsample(calibration.outcomes, 200)
    marks = [
        Mark(
            "band", times[shown], {"low": bands[0], "high": bands[1]}, f"predicted, {outer[0]:.0%} to {outer[1]:.0%}", "agent"
        ),
        Mark(
            "band",
            times[shown],
            {"low": bands[2], "high": bands[3]},
            "predicted, 25% to 75%",
            "agent",
            options={"strong": True},
        ),
        Mark("line", times[shown], {"y": bands[4]}, "predicted median", "agent", options={"thin": True}),
        Mark(
            "dots", times[dots], {"y": calibration.outcomes[dots]}, "realised", "market", options={"size": 2, "hollow": False}
        ),
    ]
    below = float((calibration.outcomes < _quantile_at(predicted, calibration.levels, outer[0])).mean())
    span = calibration.period or ("bar" if calibration.horizon == 1 else f"{calibration.horizon} bars")
    summary = f"{say(below, 'percent')} of the realised returns are below the predicted {outer[0]:.0%} quantile."
    if calibration.period and calibration.holds:
        worst = _quantile_at(predicted[-1:], calibration.levels, 0.05)[0]
        summary += f" The last prediction of the 5% quantile (value at risk) was {say(float(worst), 'percent')}."
    elif calibration.period:
        summary += " The prediction is not calibrated: do not rely on it."
    what = "Return" if calibration.period else "Discounted log return"
    panel = Panel(f"{what} over the next {span}", marks, TIME, Axis("percent", include=(0.0,)), 280)
    title = f"Predicted and realised return over the next {span}"
    note = f"{len(times):,} predictions, each made of bars before it."
    if len(dots) < len(times):
        note += " Only the lowest and highest return of each period is drawn, so extremes look more frequent than they are."
    return Chart("fan", title, summary, [panel], note)


def _calibration_chart(calibration: Calibration) -> Chart:
    effective = max(test.bars for test in calibration.coverage.values())
    panels = [_quantile_panel(calibration), _level_panel(calibration, effective), _transform_panel(calibration, effective)]
    gap = float(np.abs(calibration.realised - calibration.levels).max())
    p_value = calibration.uniformity.p_value
    summary = f"Realised and predicted levels differ by at most {say(gap, 'percent')}. Uniformity of the probability integral "
    summary += f"transforms is {'not ' if p_value >= SIZE else ''}rejected ({chance(p_value)})."
    note = f"Shaded: 95% range of a calibrated prediction, for {effective:,} returns over periods that do not overlap."
    word = "calibrated" if p_value >= SIZE else "not calibrated"
    return Chart("calibration", f"The predicted return distribution is {word}", summary, panels, note, columns=3)


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
        Mark("line", calibration.levels, {"y": calibration.realised - calibration.levels}, "realised minus predicted", "agent"),
        Mark("dots", calibration.levels, {"y": calibration.realised - calibration.levels}, "", "agent", options={"size": 2.5}),
    ]
    axes = Axis("percent", label="predicted level", tip="level", include=(0.0, 1.0)), Axis("percent", include=(0.0,))
    return Panel("Realised minus predicted level", marks, *axes, height=270)


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
    axes = Axis("percent", label="probability integral transform (PIT)"), Axis("number", include=(0.0,), tight=True)
    return Panel("Histogram of the PIT, flat if calibrated", marks, *axes, height=270, rules=[Rule("", y=1.0)])


def _tests(calibration: Calibration) -> Html:
    rows = []
    for level, test in sorted(calibration.coverage.items()):
        result = f"{test.exceptions} exceptions, {test.expected:.1f} expected"
        meaning = _test_result(test.exact_p_value, "returns fell below the predicted quantile as often as predicted")
        if test.expected < FEW and test.exact_p_value >= SIZE:
            meaning = "Inconclusive: too few exceptions are expected."
        rows.append([f"Kupiec, {level:.0%} tail", result, chance(test.exact_p_value), meaning])
    for level, shortfall in sorted(calibration.shortfall.items()):
        meaning = _test_result(shortfall.p_value, "losses in the tail were no larger than predicted")
        name, result = f"Acerbi-Szekely, {level:.0%} tail", f"Z2 = {say(shortfall.statistic)}"
        rows.append([name, result, chance(shortfall.p_value), meaning])
    distance = calibration.uniformity
    result = f"distance {say(distance.statistic, 'free')}"
    meaning = _test_result(distance.p_value, "the whole predicted distribution is right")
    rows.append(["Kolmogorov-Smirnov", result, chance(distance.p_value), meaning])
    whose = f"of the account over a {calibration.period}" if calibration.period else "of the critic, as it was trained"
    caption = f"Tests of the predicted return distribution {whose}. A p-value below 0.05 rejects the prediction."
    return table(["test", "result", "p-value", "meaning"], rows, caption, numbers_from=4)


def _losses(calibration: Calibration) -> Html:
    """Compare the pinball loss of the forecast with that of forecasts that anybody could make of the same positions."""
    tails = sorted(next(iter(calibration.losses.values())))
    rows = [[name, *(say(100.0 * losses[tail], "free") for tail in tails)] for name, losses in calibration.losses.items()]
    caption = "Mean pinball loss of the predicted quantiles, in percent of equity: lower is better."
    return table(["forecast", *(f"{tail:.0%} quantile" for tail in tails)], rows, caption, numbers_from=1)


def _test_result(p_value: float, claim: str) -> str:
    return f"{'Not rejected' if p_value >= SIZE else 'Rejected'}: {claim}."


def _quantile_at(predicted: Floats, levels: Floats, level: float) -> Floats:
    """Return a quantile ``[n]`` of each predicted distribution from its sorted quantiles ``[n, N]``, linear between levels."""
    place = float(np.interp(level, levels, np.arange(len(levels))))
    left = math.floor(place)
    right = min(left + 1, len(levels) - 1)
    result: Floats = predicted[:, left] * (1.0 - (place - left)) + predicted[:, right] * (place - left)
    return result


def mixture_quantiles(quantiles: Floats, levels: Floats) -> Floats:
    """Return the quantiles of the mixture of all predicted distributions, which the outcomes of many bars compare with.

    The mean of the distribution functions, each linear between its quantiles, is inverted on a grid.

    :param quantiles: ``[n, N]``; of more than a thousand predictions, a thousand evenly spaced ones are used.
    :param levels: ``[N]``, increasing.
    :return: ``[N]`` at the same levels.
    """
    chosen = np.linspace(0, len(quantiles) - 1, min(len(quantiles), MOST_PREDICTIONS)).round().astype(int)
    predicted = np.sort(quantiles[chosen], axis=1)
    grid = np.unique(np.quantile(predicted, np.linspace(0.0, 1.0, GRID)))
    below = np.mean([np.interp(grid, row, levels, left=0.0, right=1.0) for row in predicted], axis=0)
    return np.asarray(np.interp(levels, below, grid))
