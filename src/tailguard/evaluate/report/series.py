"""Tracks as lines: what several sections draw alike."""

import numpy as np

from tailguard.evaluate.record import AccountHistory, Evaluation
from tailguard.evaluate.report.downsample import keep
from tailguard.evaluate.report.figures import Axis, Color, Mark, seconds
from tailguard.evaluate.report.formatting import plain
from tailguard.evaluate.stats.series import Floats

OWN_MIX = "own_mix"  # the baseline that tells timing from mere exposure
TITLES = {OWN_MIX: "constant mix", "own_permuted": "own positions permuted"}
TIME = Axis(kind="time")
LOG_FROM = 3.0  # a range beyond this factor is drawn on a logarithmic axis


def color_of(evaluation: Evaluation, name: str) -> Color:
    """The role of a track: few colours, each with one meaning on the whole page."""
    if name == evaluation.agent.name:
        return "agent"
    if name == evaluation.market:
        return "market"
    if name == OWN_MIX:
        return "third"
    return "seed" if name in {track.name for track in evaluation.seeds} else "other"


def title_of(name: str) -> str:
    """A track's name on the page, for readers who do not know the record."""
    return TITLES.get(name, plain(name))


def line(evaluation: Evaluation, track: AccountHistory, values: Floats) -> Mark:
    """One number per bar of a track, thinned.

    :param values: ``[n]``, or ``[n + 1]`` with the start, which is drawn at the first time.
    """
    color = color_of(evaluation, track.name)
    values = values[-len(track.times) :]
    at = keep(values)
    options = {"keep": True} if color == "agent" else {"thin": True} if color in ("other", "seed") else {}
    shown = color in ("agent", "market", "third")
    name = title_of(track.name)
    return Mark("line", seconds(track.times)[at], {"y": values[at]}, name, color, shown, options)


def value_axis(lines: list[Mark]) -> Axis:
    """Multiples of the starting equity, logarithmic where they differ by much."""
    reach = np.concatenate([np.asarray(one.columns["y"], dtype=np.float64) for one in lines])
    wide = float(reach.max() / reach.min()) > LOG_FROM
    return Axis("multiple", "log" if wide else "linear", include=(1.0,))


def behind_first(evaluation: Evaluation, tracks: list[AccountHistory]) -> list[AccountHistory]:
    """In the order of drawing: scenery first, the agent on top."""
    order = ("other", "seed", "third", "market", "agent")
    return sorted(tracks, key=lambda track: order.index(color_of(evaluation, track.name)))
