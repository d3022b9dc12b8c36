"""A small model of an account: weights and returns, without lots, margins, stops or carry.

Forecasts of an account's tail and the guard need its return bar by bar, and what it holds where it was told to hold (NaN). A
decision at the close of bar t is filled at the next open, so a bar is a gap with the old weights and a session with the new:

    1 + R_t = (1 + h gap_t) (1 - fee |x - h'|) (1 + x session_t),

with the fee of each asset, h the weights held over the gap, h' what they have become at the open, x the target. The distance
from :func:`tailguard.market.simulate` is tested. The guarded account is followed in the same loop that decides its exposure.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.jit import decorators
from tailguard.validation import require

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A model account loses at most this share in one step, so that the logarithm of its equity exists.
MOST_LOST = 0.99
# A predicted loss of a period that is smaller says nothing about the account: it was as good as flat.
LEAST_COUNTED = 1e-6
# The causes of an exposure, as numbers: none, no forecast, the forecast of a whole period, what is left of the limit.
FREE, NO_FORECAST, WHOLE_PERIOD, REST_OF_PERIOD = range(4)

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
compiled, inlined = cast(tuple[Decorate, Decorate], decorators())


class ModelAccount(NamedTuple):
    """An account over T bars.

    :param returns: ``[T]`` log returns of the bars.
    :param held: ``[T, A]`` weights after the decision at each close: the target, or what is held where that is NaN.
    """

    returns: Floats
    held: Floats


def trade_weights(gaps: Floats, returns: Floats, targets: Floats, fee: ArrayLike) -> ModelAccount:
    """Trade weights in an account that starts in cash.

    :param gaps: ``[T, A]`` log returns from the close before to the open.
    :param returns: ``[T, A]`` log returns from close to close.
    :param targets: ``[T, A]`` weights decided at each close; NaN holds.
    :param fee: share of the amount traded, of all assets or ``[A]`` of each.
    """
    return ModelAccount(*_trade(np.expm1(gaps), np.expm1(returns - gaps), np.ascontiguousarray(targets), fees_of(targets, fee)))


def fees_of(targets: Floats, fee: ArrayLike) -> Floats:
    """Return the fee of each asset ``[A]``.

    :param targets: ``[T, A]``.
    :param fee: one for all assets, or one for each.
    """
    fees = np.asarray(fee, np.float64)
    legal = f"one number, or one for each of {targets.shape[1]} assets"
    require(fees.ndim == 0 or fees.shape == targets.shape[1:], "the shape of fee", fees.shape, legal)
    return np.full(targets.shape[1], fees)


@inlined
def _bar(weights, gap, session, target, fees):
    """Take the weights through one bar, in place, and return its log return."""
    assets, growth, invested = len(weights), 1.0, 0.0
    for a in range(assets):
        growth += weights[a] * gap[a]
    growth = max(growth, 1.0 - MOST_LOST)
    paid = 0.0
    for a in range(assets):
        weights[a] *= (1.0 + gap[a]) / growth
        if not math.isnan(target[a]):
            paid += fees[a] * abs(target[a] - weights[a])
            weights[a] = target[a]
    growth *= max(1.0 - paid, 1.0 - MOST_LOST)
    for a in range(assets):
        invested += weights[a] * session[a]
    inside = max(1.0 + invested, 1.0 - MOST_LOST)
    for a in range(assets):
        weights[a] *= (1.0 + session[a]) / inside
    return math.log(growth * inside)


@compiled
def _trade(gaps, sessions, targets, fees):
    """Return log returns ``[T]`` and weights ``[T, A]`` after the decisions."""
    n, assets = targets.shape
    earned, held = np.zeros(n), np.zeros((n, assets))
    weights = np.zeros(assets)
    for t in range(n):
        if t:
            earned[t] = _bar(weights, gaps[t], sessions[t], targets[t - 1], fees)
        for a in range(assets):
            held[t, a] = weights[a] if math.isnan(targets[t, a]) else targets[t, a]
    return earned, held


@inlined
def _worst_mean(losses, count, level):
    """Return the mean of the worst share of the first `count` losses, which are sorted; a fraction counts as a fraction."""
    share = max(level * count, 1.0)
    whole = int(share)
    total = 0.0
    for i in range(whole):
        total += losses[count - 1 - i]
    if whole < count:
        total += (share - whole) * losses[count - 1 - whole]
    return total / share


@compiled
def trade_guarded(
    gaps, sessions, targets, held, whole, rest, own, following, fees, max_loss, level, start, reaction, rise, margin, trust
):  # fmt: skip
    """Decide the exposure k in [0, 1] at every close, and trade the account that holds k times the weights.

    :param gaps: ``[T, A]`` simple returns over the gaps.
    :param sessions: ``[T, A]`` simple returns from open to close.
    :param targets: ``[T, A]`` that were asked for; NaN holds.
    :param held: ``[T, A]`` weights of the account without a guard, after its decisions.
    :param whole: ``[T]`` predicted loss (CVaR, positive) of a whole period without a guard; NaN if there is no forecast.
    :param rest: ``[T]`` that of the rest of the period.
    :param own: ``[T]`` number of the period of each bar.
    :param following: ``[T]`` that of the next bar.
    :param fees: ``[A]`` shares of the amount traded.
    :param max_loss: the limit.
    :param level: share of periods that counts as worst.
    :param start: ``[T]`` multiple of the limit that a whole period may risk.
    :param reaction: ``[T]`` multiple of what is left of the limit that the rest of the period may risk.
    :param rise: exposure is raised only by more than this share of it.
    :param margin: a new exposure is this share below the largest that is allowed, so that it need not be lowered every day.
    :param trust: number of periods that the prediction counts for beside those that are over, and limits of what they change.
    :returns: guarded targets ``[T, A]``, exposure, period-to-date return, cause, and f, how far its own record of past
        periods moves what it may risk, by bar.
    """
    periods, least, most = trust
    n, assets = targets.shape
    guarded, exposure = np.full((n, assets), np.nan), np.zeros(n)
    to_date, cause, record = np.zeros(n), np.zeros(n, np.int64), np.ones(n)
    weights = np.zeros(assets)
    # Losses of the periods that are over, in units of what was predicted when they began; sorted.
    losses, over, predicted, achieved = np.zeros(n), 0, 0.0, 1.0
    factor, gained = 0.0, 0.0
    for t in range(n):
        ended, brought = False, 0.0
        if t:
            earned = _bar(weights, gaps[t], sessions[t], guarded[t - 1], fees)
            # A bar may come in a later period than it was expected in: then it is the first of that one.
            if own[t] != following[t - 1]:
                ended, brought, gained = own[t] > following[t - 1], gained, 0.0
            gained += earned
        if following[t] != own[t]:
            if t and own[t] == following[t - 1]:
                ended, brought = True, gained
            gained = 0.0
        if ended:
            if predicted > LEAST_COUNTED:
                loss, place = -math.expm1(brought) / predicted, over
                while place > 0 and losses[place - 1] > loss:
                    losses[place] = losses[place - 1]
                    place -= 1
                losses[place] = loss
                over += 1
                worst = max(_worst_mean(losses, over, level), 0.0)
                achieved = min(max((periods + over) / (periods + over * worst), least), most)
            predicted = 0.0
        record[t] = achieved
        to_date[t] = math.expm1(gained)
        allowed, why = 1.0, FREE
        if math.isnan(rest[t]) or math.isnan(whole[t]):
            allowed, why = 0.0, NO_FORECAST
        else:
            if achieved * start[t] * max_loss < whole[t]:
                allowed, why = achieved * start[t] * max_loss / whole[t], WHOLE_PERIOD
            # A return of r from here on makes (1 + to_date) (1 + r) - 1 of the period.
            left = achieved * reaction[t] * max(max_loss + to_date[t], 0.0) / (1.0 + to_date[t])
            if left < allowed * rest[t]:
                allowed, why = left / rest[t], REST_OF_PERIOD
        chosen = allowed if allowed == 1.0 else (1.0 - margin) * allowed
        moves = allowed < factor or chosen > factor * (1.0 + rise) or allowed == 1.0
        changed = moves and chosen != factor
        factor = chosen if moves else factor
        exposure[t], cause[t] = factor, why if factor < 1.0 else FREE
        if following[t] != own[t] and why != NO_FORECAST:
            predicted = factor * rest[t] / reaction[t]  # without `achieved`, which compares with this
        for a in range(assets):
            if changed or not math.isnan(targets[t, a]):
                guarded[t, a] = factor * held[t, a]
    return guarded, exposure, to_date, cause, record
