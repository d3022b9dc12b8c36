"""The compiled part of option hedging: Black-Scholes values of a book, paths, and the step of a batch.

Everything that is compiled together stands in one file, see ``tailguard.jit``.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tailguard.envs.hedging_state import Floats
from tailguard.jit import decorators, separate

Ints = NDArray[np.int64]

# Columns of an account: all amounts of money but the spot are discounted to the first date. HEDGE is the holding of a delta
# hedger: minus the book's delta.
SPOT, VARIANCE, HOLDING, MARK, SETTLED, HEDGE, GAMMA, PNL, COST, TURNOVER = range(10)
ACCOUNT_FIELDS = 10
# Columns of the integers of an account: the present date, and the bar that a bootstrapped path stands at.
DATE, CURSOR = range(2)
# Columns of a leg: +1 call or -1 put, quantity, strike, date of expiry, level of the knock-out, +1 if it lies below the spot,
# -1 above, 0 if there is none.
SIGN, QUANTITY, STRIKE, EXPIRY, LEVEL, SIDE = range(6)
LEG_FIELDS = 6
# Kinds of processes, and the columns of their parameters.
NORMAL_SHOCKS, TRINOMIAL_SHOCKS, HESTON, BOOTSTRAP = range(4)
KIND, DRIFT, VOLATILITY, LONG_RUN, REVERSION, VOL_OF_VARIANCE, CORRELATION, BLOCK = range(8)
PROCESS_FIELDS = 8
# Columns of the terms: years between dates, number of dates, rate, proportional and fixed cost, 1 if the last holding is sold
# at a cost.
STEP, DATES, RATE, PROPORTIONAL, FIXED, FINAL = range(6)
TERM_FIELDS = 6

# Broadie, Glasserman and Kou (1997): a barrier that is monitored at dates only acts like a continuous one that lies farther
# away by this many standard deviations of a step, -zeta(1/2) / sqrt(2 pi).
MONITORING_SHIFT = 0.5825971579390106
BUMP = 1e-4  # relative bump of the spot for the delta and gamma of barriers
NO_TRADE = 1e-12  # units; a smaller trade is none, and pays no fixed cost
GAUSS_HERMITE = math.sqrt(3.0)  # the outer nodes of the normal distribution's three-point rule, of weight 1/6 each
QUADRATIC_UP_TO = 1.5  # Andersen (2008): psi up to which the next variance is the square of a normal

compiled, inlined = decorators()
called = separate()


# ------------------------------------------------------------------------------------------------------------------- values


@inlined
def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x * math.sqrt(0.5))


@inlined
def _vanilla(sign: float, spot: float, strike: float, years: float, sigma: float, rate: float) -> tuple[float, float, float]:
    """Return Black-Scholes value, delta and gamma."""
    spread = sigma * math.sqrt(years)
    d1 = (math.log(spot / strike) + rate * years) / spread + 0.5 * spread
    in_the_money = _cdf(sign * d1)
    value = sign * (spot * in_the_money - strike * math.exp(-rate * years) * _cdf(sign * (d1 - spread)))
    gamma = math.exp(-0.5 * d1 * d1) / (math.sqrt(2.0 * math.pi) * spot * spread)
    return value, sign * in_the_money, gamma


@called
def _knock_out(
    sign: float, side: float, level: float, spot: float, strike: float, years: float, sigma: float, rate: float
) -> float:
    """Return the value of a knock-out option by Reiner and Rubinstein's formulas, the barrier monitored continuously.

    A, B, C and D are their terms in the notation of Haug's handbook.
    """
    if side * (spot - level) <= 0.0:
        return 0.0
    spread = sigma * math.sqrt(years)
    mu = rate / (sigma * sigma) - 0.5
    shift, discounted = (1.0 + mu) * spread, strike * math.exp(-rate * years)
    reflected_spot = spot * (level / spot) ** (2.0 * (mu + 1.0))
    reflected_strike = discounted * (level / spot) ** (2.0 * mu)
    x1, x2 = math.log(spot / strike) / spread + shift, math.log(spot / level) / spread + shift
    y1, y2 = math.log(level * level / (spot * strike)) / spread + shift, math.log(level / spot) / spread + shift
    a = sign * (spot * _cdf(sign * x1) - discounted * _cdf(sign * (x1 - spread)))
    b = sign * (spot * _cdf(sign * x2) - discounted * _cdf(sign * (x2 - spread)))
    c = sign * (reflected_spot * _cdf(side * y1) - reflected_strike * _cdf(side * (y1 - spread)))
    d = sign * (reflected_spot * _cdf(side * y2) - reflected_strike * _cdf(side * (y2 - spread)))
    if sign == side:  # a down-and-out call or an up-and-out put
        return float(a - c if side * (strike - level) > 0.0 else b - d)
    return float(a - b + c - d if side * (strike - level) > 0.0 else 0.0)


@inlined
def _leg_greeks(leg: Floats, spot: float, years: float, sigma: float, rate: float, step: float) -> tuple[float, float, float]:
    """Return value, delta and gamma of one unit of a leg."""
    sign, strike, side = leg[SIGN], leg[STRIKE], leg[SIDE]
    if side == 0.0:
        return _vanilla(sign, spot, strike, years, sigma, rate)
    level = leg[LEVEL] * math.exp(-side * MONITORING_SHIFT * sigma * math.sqrt(step))
    up, down = spot * (1.0 + BUMP), spot * (1.0 - BUMP)
    above = _knock_out(sign, side, level, up, strike, years, sigma, rate)
    value = _knock_out(sign, side, level, spot, strike, years, sigma, rate)
    below = _knock_out(sign, side, level, down, strike, years, sigma, rate)
    return value, (above - below) / (up - down), (above - 2.0 * value + below) / (spot * BUMP) ** 2


@inlined
def _mean_variance(process: Floats, variance: float, years: float) -> float:
    """Return the expected average variance over the coming years."""
    if process[KIND] != HESTON:
        return float(process[VOLATILITY] ** 2)
    decay = process[REVERSION] * years
    return float(process[LONG_RUN] + (variance - process[LONG_RUN]) * (1.0 - math.exp(-decay)) / decay)


@inlined
def _book_greeks(
    legs: Floats,
    alive: NDArray[np.bool_],
    process: Floats,
    terms: Floats,
    date: int,
    spot: float,
    variance: float,
    added_variance: float,
) -> tuple[float, float, float]:
    """Return value, delta and gamma of the legs that are alive, at the variance that is expected until their expiry."""
    value, delta, gamma = 0.0, 0.0, 0.0
    for k in range(len(legs)):
        if alive[k]:
            years = (legs[k, EXPIRY] - date) * terms[STEP]
            sigma = math.sqrt(max(_mean_variance(process, variance, years) + added_variance, 1e-12))
            v, d, g = _leg_greeks(legs[k], spot, years, sigma, terms[RATE], terms[STEP])
            value += legs[k, QUANTITY] * v
            delta += legs[k, QUANTITY] * d
            gamma += legs[k, QUANTITY] * g
    return value, delta, gamma


@compiled
def book_greeks(
    legs: Floats,
    alive: NDArray[np.bool_],
    process: Floats,
    terms: Floats,
    dates: Ints,
    spots: Floats,
    variances: Floats,
    added_variances: Floats,
    greeks: Floats,
) -> None:
    """Fill `greeks` ``[B, 3]`` with Black-Scholes value, delta and gamma of the book in each of B states.

    :param legs: ``[L, 6]``.
    :param alive: ``[B, L]``.
    :param process: ``[8]``.
    :param terms: ``[6]``.
    :param dates: ``[B]``.
    :param spots: ``[B]``.
    :param variances: ``[B]``; only Heston's process looks at them.
    :param added_variances: ``[B]``, added to the squared volatility, for Leland's correction.
    """
    for i in range(len(spots)):
        value, delta, gamma = _book_greeks(legs, alive[i], process, terms, dates[i], spots[i], variances[i], added_variances[i])
        greeks[i, 0], greeks[i, 1], greeks[i, 2] = value, delta, gamma


# -------------------------------------------------------------------------------------------------------------------- paths


@inlined
def _heston_step(
    process: Floats, step: float, spot: float, variance: float, along: float, across: float, uniform: float
) -> tuple[float, float]:
    """Return spot and variance after a step by Andersen's quadratic-exponential scheme, with his martingale correction.

    :param along: standard normal draw of the variance.
    :param across: standard normal draw of the price that is independent of it.
    :param uniform: draw of the variance where it comes near to 0.
    """
    theta, kappa, xi, rho = process[LONG_RUN], process[REVERSION], process[VOL_OF_VARIANCE], process[CORRELATION]
    decay = math.exp(-kappa * step)
    mean = theta + (variance - theta) * decay
    spread = variance * xi**2 * decay * (1.0 - decay) / kappa + theta * xi**2 * (1.0 - decay) ** 2 / (2.0 * kappa)
    psi = spread / mean**2
    common = 0.5 * step * (kappa * rho / xi - 0.5)
    k1, k2, k3 = common - rho / xi, common + rho / xi, 0.5 * step * (1.0 - rho**2)
    a = k2 + 0.5 * k3
    k0 = -rho * kappa * theta * step / xi  # without the correction
    if psi <= QUADRATIC_UP_TO:
        b2 = 2.0 / psi - 1.0 + math.sqrt(2.0 / psi) * math.sqrt(2.0 / psi - 1.0)
        scale = mean / (1.0 + b2)
        new = scale * (math.sqrt(b2) + along) ** 2
        if 2.0 * a * scale < 1.0:
            k0 = -a * b2 * scale / (1.0 - 2.0 * a * scale) + 0.5 * math.log(1.0 - 2.0 * a * scale) - (k1 + 0.5 * k3) * variance
    else:
        zero = (psi - 1.0) / (psi + 1.0)
        beta = (1.0 - zero) / mean
        new = 0.0 if uniform <= zero else math.log((1.0 - zero) / (1.0 - uniform)) / beta
        if a < beta:
            k0 = -math.log(zero + beta * (1.0 - zero) / (beta - a)) - (k1 + 0.5 * k3) * variance
    move = process[DRIFT] * step + k0 + k1 * variance + k2 * new + math.sqrt(k3 * (variance + new)) * across
    return spot * math.exp(move), new


@inlined
def _next_price(process: Floats, returns: Floats, step: float, account: Floats, clock: Ints, uniforms: Floats) -> None:
    """Move spot and variance of an account to the next date.

    :param uniforms: ``[3]`` draws from (0, 1).
    """
    kind = process[KIND]
    # Box and Muller (1958): two independent normals.
    radius, angle = math.sqrt(-2.0 * math.log(uniforms[0])), 2.0 * math.pi * uniforms[1]
    if kind == HESTON:
        along, across = radius * math.cos(angle), radius * math.sin(angle)
        account[SPOT], account[VARIANCE] = _heston_step(
            process, step, account[SPOT], account[VARIANCE], along, across, uniforms[2]
        )
    elif kind == BOOTSTRAP:
        clock[CURSOR] = (clock[CURSOR] + 1) % len(returns)
        if uniforms[0] < 1.0 / process[BLOCK]:
            clock[CURSOR] = int(uniforms[1] * len(returns))
        account[SPOT] *= math.exp(returns[clock[CURSOR]])
    else:
        spread = process[VOLATILITY] * math.sqrt(step)
        if kind == TRINOMIAL_SHOCKS:
            shock = -GAUSS_HERMITE if uniforms[2] < 1.0 / 6.0 else (GAUSS_HERMITE if uniforms[2] > 5.0 / 6.0 else 0.0)
            growth = math.log((2.0 + math.cosh(spread * GAUSS_HERMITE)) / 3.0)  # of E[exp(spread shock)]: the drift is exact
        else:
            shock, growth = radius * math.cos(angle), 0.5 * spread**2
        account[SPOT] *= math.exp(process[DRIFT] * step - growth + spread * shock)


# --------------------------------------------------------------------------------------------------------------------- steps


@inlined
def _trade_cost(terms: Floats, units: float, spot: float) -> float:
    return float(terms[PROPORTIONAL] * abs(units) * spot + (terms[FIXED] if abs(units) > NO_TRADE else 0.0))


@inlined
def _settle(legs: Floats, alive: NDArray[np.bool_], date: int, spot: float) -> float:
    """Knock legs out, take those that expire out of the book, and return their payoffs."""
    paid = 0.0
    for k in range(len(legs)):
        if alive[k] and legs[k, SIDE] * (spot - legs[k, LEVEL]) <= 0.0 and legs[k, SIDE] != 0.0:
            alive[k] = False
        if alive[k] and date >= legs[k, EXPIRY]:
            paid += legs[k, QUANTITY] * max(legs[k, SIGN] * (spot - legs[k, STRIKE]), 0.0)
            alive[k] = False
    return paid


@compiled
def begin(
    rows: NDArray[np.bool_],
    legs: Floats,
    process: Floats,
    terms: Floats,
    start: Floats,
    cursors: Ints,
    accounts: Floats,
    clocks: Ints,
    alive: NDArray[np.bool_],
) -> None:
    """Start an episode in the copies in `rows` ``[B]``: no holding, all legs alive, the book marked at its premium.

    :param start: ``[3]``: spot, variance, premium.
    :param cursors: ``[B]`` bars at which bootstrapped paths begin.
    """
    for i in range(len(rows)):
        if not rows[i]:
            continue
        accounts[i] = 0.0
        accounts[i, SPOT], accounts[i, VARIANCE], accounts[i, MARK] = start[0], start[1], start[2]
        alive[i] = True
        clocks[i, DATE], clocks[i, CURSOR] = 0, cursors[i]
        _, delta, gamma = _book_greeks(legs, alive[i], process, terms, 0, start[0], start[1], 0.0)
        accounts[i, HEDGE], accounts[i, GAMMA] = -delta, gamma


@compiled
def advance(
    targets: Floats,
    legs: Floats,
    process: Floats,
    terms: Floats,
    returns: Floats,
    uniforms: Floats,
    accounts: Floats,
    clocks: Ints,
    alive: NDArray[np.bool_],
    rewards: Floats,
    ended: NDArray[np.bool_],
) -> None:
    """Trade every copy to its target, move the price to the next date, and mark the book.

    :param targets: ``[B]`` units of the underlying.
    :param returns: log returns that paths are bootstrapped from; empty for the other processes.
    :param uniforms: ``[B, 3]`` draws from (0, 1).
    :param rewards: ``[B]``, filled: change of the discounted hedged value less costs.
    :param ended: ``[B]``, filled: True at the last date.
    """
    for i in range(len(targets)):
        account, clock = accounts[i], clocks[i]
        date, spot, held = clock[DATE], account[SPOT], targets[i]
        discount = math.exp(-terms[RATE] * terms[STEP] * date)
        next_discount = math.exp(-terms[RATE] * terms[STEP] * (date + 1))
        units = held - account[HOLDING]
        cost = discount * _trade_cost(terms, units, spot)
        account[TURNOVER] += abs(units)
        account[HOLDING] = held
        _next_price(process, returns, terms[STEP], account, clock, uniforms[i])
        clock[DATE] = date + 1
        account[SETTLED] += next_discount * _settle(legs, alive[i], date + 1, account[SPOT])
        value, delta, gamma = _book_greeks(legs, alive[i], process, terms, date + 1, account[SPOT], account[VARIANCE], 0.0)
        ended[i] = date + 1 == terms[DATES]
        if ended[i]:
            cost += terms[FINAL] * next_discount * _trade_cost(terms, held, account[SPOT])
            account[TURNOVER] += terms[FINAL] * abs(held)
        mark = account[SETTLED] + next_discount * value
        rewards[i] = mark - account[MARK] + held * (next_discount * account[SPOT] - discount * spot) - cost
        account[MARK], account[HEDGE], account[GAMMA] = mark, -delta, gamma
        account[PNL] += rewards[i]
        account[COST] += cost


@compiled
def observe(
    legs: Floats,
    process: Floats,
    terms: Floats,
    start: Floats,
    limit: float,
    accounts: Floats,
    clocks: Ints,
    alive: NDArray[np.bool_],
    farthest: float,
    observations: NDArray[np.float32],
) -> None:
    """Fill `observations` ``[B, D]``; :class:`tailguard.envs.OptionHedging` names the columns."""
    life = terms[DATES] * terms[STEP]
    spread = math.sqrt(_mean_variance(process, start[1], life) * life)
    step_spread = spread / math.sqrt(terms[DATES])
    for i in range(len(accounts)):
        account = accounts[i]
        observations[i, 0] = 1.0 - clocks[i, DATE] / terms[DATES]
        observations[i, 1] = account[HOLDING] / limit
        observations[i, 2] = min(max(account[HEDGE] / limit, -farthest), farthest)
        observations[i, 3] = min(max(account[GAMMA] * account[SPOT] * step_spread / limit, -farthest), farthest)
        column = 4
        if process[KIND] == HESTON:
            observations[i, column] = min(math.sqrt(account[VARIANCE] / process[LONG_RUN]), farthest)
            column += 1
        for k in range(len(legs)):
            moneyness = math.log(account[SPOT] / legs[k, STRIKE]) / spread
            observations[i, column] = min(max(moneyness, -farthest), farthest)
            column += 1
            if legs[k, SIDE] != 0.0:
                observations[i, column] = 1.0 if alive[i, k] else 0.0
                column += 1
