"""The accounting kernel of the environments and of `simulate`: one account, one bar, every cost.

Notation, as in the identities that the tests check: units h, cash C, reference price p, equity V = C + sum(h p).
A trade of notional n = |d| p pays a fraction ``adverse`` of it through the price and ``fee`` on what changes hands at that
worse price, so

    cost(n) = n adverse + fee n (1 + side adverse),    side = +1 to buy, -1 to sell.

All amounts are float64. The kernel is written for one account and compiled by numba: a batch is a loop over accounts, so
an account in a batch and an account alone go through the same instructions and agree to the last bit. More than 400 lines,
because everything compiled, and every constant compiled into it, must stand in one file: numba's cache on disk notices a change
of a function's own file only.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from tailguard.jit import decorators

# Bars are one array [T, A, 14]. MARK is the last known close (0 before the first), IMPACT the price fraction per square root
# of units traded, YEARS the time since the bar before, FUNDING the rate that a long pays on its value. A missing bar is NaN.
# The rules that differ from asset to asset are columns too: fee, borrow rate, lot and limits of the weight.
OPEN, HIGH, LOW, CLOSE, VOLUME, MARK, IMPACT, YEARS, FUNDING, FEE, BORROW, LOT, LOWEST, HIGHEST = range(14)
BAR_FIELDS = 14
NO_TRADE = -1
# The price at which each kind of fill trades; `close` trades at the bar of the decision, the others one bar later.
TRADE_FIELDS = {"next_open": OPEN, "close": CLOSE, "next_close": CLOSE}

# Accounts are one array [B, 7 + 2 A]: cash, equity at the last close and at its peak, the costs of the last bar and its
# turnover as a share of equity, then the units held of each asset and the average price at which they were entered. One array
# each for bars and accounts, and not a tuple of arrays, because numba counts references on every access to an array in a
# tuple, which costs more than the arithmetic.
CASH, EQUITY, PEAK, FEES, SLIPPAGE, CARRY, TURNOVER, UNITS = range(8)

# Scratch space of the present account, [10, A]. TARGET is the target weight of a decision, ACTIVE_TARGET is NaN where it is not
# traded. The last four rows add up units and cash of purchases and sales, for `trade_bar`, which clears them.
HELD, ACTIVE_TARGET, TRADES, OPENS, WORST, TARGET, BOUGHT, PAID, SOLD, RECEIVED = range(10)
WORK_ROWS = 10

# A liquidated account keeps at least this share of its starting cash, so that the log of its equity exists.
RUIN_EQUITY = 1e-6
# Targets whose weights sum to at most 1 ask for no loan. Sums and balances are compared up to this share of equity.
ROUNDING = 1e-12
# A sale has square-root impact down to this share of the price.
DEEPEST = 0.5
# Newton's method below needs one step per sign change and a few for impact; it never needs this many.
MAX_NEWTON_STEPS = 64
# Rows of the integer array of a batch: the present bar, the bar at which the episode began, the bar at which it is cut.
NOW, BEGIN, END = range(3)
# Rows of the flags of a step.
TERMINATED, TRUNCATED, EFFECTIVE = range(3)


class KernelRules(NamedTuple):
    """The numbers of :class:`TradingRules` that the kernel needs, as plain scalars.

    ``assets`` is a tuple of one entry per asset. Its length is part of its type, so the kernel is compiled for that number of
    assets and the loops over them vanish, which makes a step a tenth faster.
    """

    spread: float
    participation: float
    min_trade: float
    stop_loss: float
    take_profit: float
    cash_rate: float
    loan_rate: float
    band: float
    ruin: float
    maintenance_margin: float
    cost_aware: bool
    assets: tuple[int, ...]


# Inlined, because a call that passes arrays costs ten times the arithmetic of these small functions.
# Their types are numba's business, so mypy sees functions of anything.
Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
compiled, inlined = cast(tuple[Decorate, Decorate], decorators())


@inlined
def adverse_fraction(notional, side, price, impact, rules):
    """Return the distance of the fill price from the reference price, as a fraction of it: spread + impact sqrt(Q).

    A sale that would push the price down by more than half follows the hyperbola that touches the square root there: it always
    earns something, and its cost stays convex.
    """
    if impact == 0.0:
        return rules.spread
    adverse = rules.spread + impact * math.sqrt(notional / price)
    if side < 0.0 and adverse > DEEPEST:
        touch = max(rules.spread, DEEPEST)
        adverse = 1.0 - (1.0 - touch) ** 2 / (1.0 - touch + adverse - touch)
    return adverse


@inlined
def trading_cost(notional, side, price, impact, fee, rules):
    """Return the cost in cash of trading `notional` >= 0."""
    adverse = adverse_fraction(notional, side, price, impact, rules)
    return notional * (adverse + fee * (1.0 + side * adverse))


@inlined
def marginal_cost(notional, side, price, impact, fee, rules):
    """Return the derivative of `trading_cost` with respect to the notional."""
    derivative = rules.spread  # of notional x adverse fraction
    if impact != 0.0:
        move = impact * math.sqrt(notional / price)
        derivative = rules.spread + 1.5 * move
        if side < 0.0 and rules.spread + move > DEEPEST:
            touch = max(rules.spread, DEEPEST)
            depth = 1.0 - touch + rules.spread + move - touch
            derivative = 1.0 - (1.0 - touch) ** 2 * (depth - 0.5 * move) / depth**2
    return derivative * (1.0 + side * fee) + fee


@inlined
def equity_after_costs(equity, bars, t, price_field, rules, work):
    """Return the equity V' left when every traded asset ends at its target weight of V' itself.

    V' + sum cost(|w V' - x|) = V is convex and increasing in V', and V is to the right of its root, so Newton's method
    from V falls monotonically onto it; with linear costs it ends after at most one step per asset.
    """
    left = equity
    for _ in range(MAX_NEWTON_STEPS):
        excess, derivative = left - equity, 1.0
        for a in range(len(rules.assets)):
            target = work[ACTIVE_TARGET, a]
            if math.isnan(target):
                continue
            price, impact, fee = bars[t, a, price_field], bars[t, a, IMPACT], bars[t, a, FEE]
            gap = target * left - work[HELD, a]
            side = math.copysign(1.0, gap)
            excess += trading_cost(abs(gap), side, price, impact, fee, rules)
            derivative += marginal_cost(abs(gap), side, price, impact, fee, rules) * side * target
        step = excess / derivative
        left -= step
        if step <= 1e-16 * equity:
            break
    return left


@compiled
def largest_purchase(cash, limit, price, impact, fee, rules):
    """Return the notional n <= limit with n + cost(n) = cash; Newton from the right, as above."""
    notional = limit
    for _ in range(MAX_NEWTON_STEPS):
        excess = notional + trading_cost(notional, 1.0, price, impact, fee, rules) - cash
        step = excess / (1.0 + marginal_cost(notional, 1.0, price, impact, fee, rules))
        notional -= step
        if step <= 1e-16 * limit:
            break
    return max(notional, 0.0)


@inlined
def cash_left(cash, bars, t, price_field, rules, work):
    """Return the cash after all planned trades."""
    left = cash
    for a in range(len(rules.assets)):
        trade = work[TRADES, a]
        side = math.copysign(1.0, trade)
        left -= trade
        if trade != 0.0:
            left -= trading_cost(abs(trade), side, bars[t, a, price_field], bars[t, a, IMPACT], bars[t, a, FEE], rules)
    return left


@compiled
def limit_purchases(cash, bars, t, price_field, rules, work):
    """Cut purchases to the cash after all sales: small orders are filled first, the largest bears the shortfall."""
    available = cash
    for a in range(len(rules.assets)):
        sold = -work[TRADES, a]
        if sold > 0.0:
            available += sold - trading_cost(sold, -1.0, bars[t, a, price_field], bars[t, a, IMPACT], bars[t, a, FEE], rules)
    available = max(available, 0.0)
    for a in np.argsort(work[TRADES]):
        bought = work[TRADES, a]
        if bought > 0.0:
            price, impact, fee = bars[t, a, price_field], bars[t, a, IMPACT], bars[t, a, FEE]
            total = bought + trading_cost(bought, 1.0, price, impact, fee, rules)
            if total > available:
                work[TRADES, a] = largest_purchase(available, bought, price, impact, fee, rules)
                total = available
            available -= total


@inlined
def execute(accounts, b, a, assets, trade, price, impact, rate, rules, work):
    """Execute one trade of signed notional `trade` in asset `a` of account `b`, with a fee of `rate`."""
    side = math.copysign(1.0, trade)
    amount = abs(trade)
    adverse = adverse_fraction(amount, side, price, impact, rules)
    slippage = amount * adverse
    fee = rate * amount * (1.0 + side * adverse)
    bought = trade / price
    before = accounts[b, UNITS + a]
    after = before + bought
    if abs(after) <= 1e-14 * abs(before):  # the rounding of (h p) / p must not leave a remainder of the position
        after = 0.0
    if after == 0.0:
        accounts[b, UNITS + assets + a] = 0.0
    elif before * bought >= 0.0:
        accounts[b, UNITS + assets + a] = (accounts[b, UNITS + assets + a] * before + price * bought) / after
    elif before * after < 0.0:
        accounts[b, UNITS + assets + a] = price
    accounts[b, UNITS + a] = after
    accounts[b, CASH] -= trade + slippage + fee
    accounts[b, FEES] += fee
    accounts[b, SLIPPAGE] += slippage
    if trade > 0.0:
        work[BOUGHT, a] += bought
        work[PAID, a] += amount + slippage
    else:
        work[SOLD, a] -= bought
        work[RECEIVED, a] += amount - slippage


@inlined
def whole_lots(bars, t, price_field, rules, work):
    """Cut trades to whole lots, and leave out those that are too small; a position may always be closed."""
    for a in range(len(rules.assets)):
        lot, trade = bars[t, a, LOT], work[TRADES, a]
        if lot > 0.0 and trade != 0.0:
            lots = math.floor(abs(trade) / (bars[t, a, price_field] * lot) * (1.0 + ROUNDING) + ROUNDING)
            whole = math.copysign(lots * lot * bars[t, a, price_field], trade)
            # Selling out must leave nothing: h p / (p lot) lots are whole up to rounding, and the rest is none.
            work[TRADES, a] = trade if abs(whole - trade) <= ROUNDING * abs(trade) else whole
        if abs(work[TRADES, a]) < rules.min_trade and work[ACTIVE_TARGET, a] != 0.0:
            work[TRADES, a] = 0.0


@compiled
def rebalance(accounts, b, bars, t, price_field, target, rules, work):
    """Trade account `b` towards weights `target` at an open or close (NaN: hold); an asset without a bar is not traded."""
    assets = len(rules.assets)
    equity = accounts[b, CASH]
    for a in range(assets):
        price = bars[t, a, price_field]
        work[HELD, a] = accounts[b, UNITS + a] * (bars[t, a, MARK] if math.isnan(price) else price)
        equity += work[HELD, a]
    asked, any_trade = 0.0, False
    for a in range(assets):
        work[ACTIVE_TARGET, a] = np.nan
        if not math.isnan(target[a]):
            limited_target = min(max(target[a], bars[t, a, LOWEST]), bars[t, a, HIGHEST])
            asked += limited_target
            if not math.isnan(bars[t, a, price_field]) and not abs(limited_target - work[HELD, a] / equity) < rules.band:
                work[ACTIVE_TARGET, a], any_trade = limited_target, True
    if any_trade and equity > 0.0:
        base = equity
        if rules.cost_aware:
            base = equity_after_costs(equity, bars, t, price_field, rules, work)
        for a in range(assets):
            work[TRADES, a] = 0.0
            if not math.isnan(work[ACTIVE_TARGET, a]):
                most = math.inf
                if rules.participation < math.inf:
                    most = rules.participation * bars[t, a, VOLUME] * bars[t, a, price_field]
                work[TRADES, a] = min(max(work[ACTIVE_TARGET, a] * base - work[HELD, a], -most), most)
        whole_lots(bars, t, price_field, rules, work)
        # Targets that sum to more than 1 ask for a loan; all others are limited to the cash in the account.
        limited = asked <= 1.0 + ROUNDING
        if limited and cash_left(accounts[b, CASH], bars, t, price_field, rules, work) < 0.0:
            limit_purchases(accounts[b, CASH], bars, t, price_field, rules, work)
            whole_lots(bars, t, price_field, rules, work)
        for a in range(assets):
            trade = work[TRADES, a]
            if trade != 0.0:
                execute(
                    accounts, b, a, assets, trade, bars[t, a, price_field], bars[t, a, IMPACT], bars[t, a, FEE], rules, work
                )
                accounts[b, TURNOVER] += abs(trade) / equity
        if limited and accounts[b, CASH] > -ROUNDING * equity:  # rounding below 0 at full investment is no loan
            accounts[b, CASH] = max(accounts[b, CASH], 0.0)


@inlined
def accrue(accounts, b, bars, t, rules):
    """Charge the carry since the bar before, on the positions held then: interest, loan, borrow of shorts, funding."""
    cash, years = accounts[b, CASH], bars[t, 0, YEARS]
    cost = -(rules.cash_rate if cash > 0.0 else rules.loan_rate) * cash * years
    for a in range(len(rules.assets)):
        value = accounts[b, UNITS + a] * bars[t - 1, a, MARK]
        if value < 0.0:
            cost -= bars[t, a, BORROW] * value * years
        cost += bars[t, a, FUNDING] * value
    accounts[b, CARRY] += cost
    accounts[b, CASH] -= cost


@inlined
def part_of_way(start, end):
    """Return where a line from `start` to `end` reaches 0, as a share of its length; 2 where it does not."""
    if start <= 0.0:
        return 0.0
    return start / (start - end) if end <= 0.0 else 2.0


@inlined
def path_to_ruin(accounts, b, last, rules, work):
    """Return the share of the move from the opens to the prices in row `last` of `work` that the account survives; above 1:
    all.

    Equity and gross exposure are linear in between, so the point where equity meets the larger of the ruin level and the
    maintenance margin is the solution of a linear equation.
    """
    start = end = accounts[b, CASH]
    gross_start = gross_end = 0.0
    for a in range(len(rules.assets)):
        units = accounts[b, UNITS + a]
        start += units * work[OPENS, a]
        end += units * work[last, a]
        gross_start += abs(units) * work[OPENS, a]
        gross_end += abs(units) * work[last, a]
    margin = rules.maintenance_margin
    survived = 2.0
    if start <= max(rules.ruin, margin * gross_start) or end <= max(rules.ruin, margin * gross_end):
        to_ruin = part_of_way(start - rules.ruin, end - rules.ruin)
        to_margin_call = part_of_way(start - margin * gross_start, end - margin * gross_end)
        survived = min(to_ruin, to_margin_call)
    return survived


@inlined
def stop_level(accounts, b, a, assets, rules):
    """Return the price of the stop-loss of a position."""
    side = math.copysign(1.0, accounts[b, UNITS + a])
    return accounts[b, UNITS + assets + a] * (1.0 - side * rules.stop_loss)


@compiled
def close_at_stops(accounts, b, a, bars, t, low, high, rules, work):
    """Close a position whose stop-loss or take-profit lies within [low, high], at that price or at a worse or better open.

    Where both do, the stop-loss is taken to come first.
    """
    assets, units, entry = len(rules.assets), accounts[b, UNITS + a], accounts[b, UNITS + len(rules.assets) + a]
    if units == 0.0:
        return
    side, opening = math.copysign(1.0, units), work[OPENS, a]
    stop = stop_level(accounts, b, a, assets, rules)
    goal = entry * (1.0 + side * rules.take_profit)
    worst, best = (low, high) if side > 0.0 else (high, low)
    price = 0.0
    if rules.stop_loss > 0.0 and side * (worst - stop) <= 0.0:
        price = opening if side * (opening - stop) <= 0.0 else stop
    elif rules.take_profit < math.inf and side * (best - goal) >= 0.0:
        price = opening if side * (opening - goal) >= 0.0 else goal
    if price > 0.0:
        equity = accounts[b, CASH]
        for other in range(assets):
            equity += accounts[b, UNITS + other] * work[OPENS, other]
        execute(accounts, b, a, assets, -units * price, price, bars[t, a, IMPACT], bars[t, a, FEE], rules, work)
        accounts[b, TURNOVER] += abs(units) * price / equity


@inlined
def play_bar(accounts, b, bars, t, trade_field, target, rules, start_cash, work):
    """Take account `b` through bar `t`: carry, gap, trade at the open, ruin and stops inside the bar, trade at the close.

    Inside a bar every long is valued at the low and every short at the high at once: exact for one asset, conservative
    for several. A ruined account is sold out at the worse of the open and the price at which it was ruined.

    :param trade_field: OPEN or CLOSE, the price at which `target` is traded; NO_TRADE for neither.
    :returns: True if the account was ruined.
    """
    assets = len(rules.assets)
    if t > 0:
        accrue(accounts, b, bars, t, rules)
    for a in range(assets):
        price = bars[t, a, OPEN]
        work[OPENS, a] = bars[t, a, MARK] if math.isnan(price) else price
        work[WORST, a] = work[OPENS, a]
    survived = path_to_ruin(accounts, b, OPENS, rules, work)
    stops = rules.stop_loss > 0.0 or rules.take_profit < math.inf
    if survived > 1.0:
        if stops:  # a gap beyond the stop is filled at the open
            for a in range(assets):
                if not math.isnan(bars[t, a, OPEN]):
                    close_at_stops(accounts, b, a, bars, t, work[OPENS, a], work[OPENS, a], rules, work)
        if trade_field == OPEN:
            rebalance(accounts, b, bars, t, trade_field, target, rules, work)  # a constant would be compiled anew
        for a in range(assets):
            units = accounts[b, UNITS + a]
            extreme = bars[t, a, LOW] if units > 0.0 else bars[t, a, HIGH]
            work[WORST, a] = work[OPENS, a] if math.isnan(extreme) else extreme
            if rules.stop_loss > 0.0 and units != 0.0:
                level = stop_level(accounts, b, a, assets, rules)
                work[WORST, a] = max(work[WORST, a], level) if units > 0.0 else min(work[WORST, a], level)
        survived = path_to_ruin(accounts, b, WORST, rules, work)
        if stops and survived > 1.0:
            for a in range(assets):
                if not math.isnan(bars[t, a, OPEN]):
                    close_at_stops(accounts, b, a, bars, t, bars[t, a, LOW], bars[t, a, HIGH], rules, work)
    if survived > 1.0 and trade_field == CLOSE:
        rebalance(accounts, b, bars, t, trade_field, target, rules, work)
        equity = accounts[b, CASH]
        for a in range(assets):
            work[OPENS, a] = work[WORST, a] = bars[t, a, MARK]
            equity += accounts[b, UNITS + a] * bars[t, a, MARK]
        if equity <= 0.0:  # the costs of the trade took the rest; the level of ruin is checked again at the next open
            survived = 0.0
    ruined = survived <= 1.0
    if ruined:
        for a in range(assets):
            price = work[OPENS, a] + survived * (work[WORST, a] - work[OPENS, a])
            units = accounts[b, UNITS + a]
            if units != 0.0:
                execute(accounts, b, a, assets, -units * price, price, bars[t, a, IMPACT], bars[t, a, FEE], rules, work)
        accounts[b, CASH] = max(accounts[b, CASH], RUIN_EQUITY * start_cash)
    return ruined


@inlined
def mark_to_market(accounts, b, bars, t, rules):
    """Set the equity at the last known prices."""
    equity = accounts[b, CASH]
    for a in range(len(rules.assets)):
        equity += accounts[b, UNITS + a] * bars[t, a, MARK]
    accounts[b, EQUITY] = equity
    accounts[b, PEAK] = max(accounts[b, PEAK], equity)


@compiled
def trade_bar(accounts, bars, t, trade_field, target, rules, start_cash, work):
    """Take one account through bar `t` as :func:`simulate_account` does, and leave its fills in `work`.

    :returns: True if the account was ruined.
    """
    for cost in range(FEES, UNITS):
        accounts[0, cost] = 0.0
    for row in range(BOUGHT, WORK_ROWS):
        work[row] = 0.0
    ruined = play_bar(accounts, 0, bars, t, trade_field, target, rules, start_cash, work)
    mark_to_market(accounts, 0, bars, t, rules)
    return ruined


@compiled
def simulate_account(bars, targets, same_bar, trade_field, rules, start_cash, history):
    """Run one account over all bars and keep its state after each; return the bar at which it was ruined, or -1."""
    steps, assets = len(targets), len(rules.assets)
    work = np.empty((WORK_ROWS, assets))
    for column in range(history.shape[1]):
        history[0, column] = 0.0
    history[0, CASH] = start_cash
    ruined_at = -1
    for t in range(steps):
        if t > 0:
            for column in range(history.shape[1]):  # a loop: a copy of a row would be compiled with its errors, for 2 s
                history[t, column] = 0.0 if FEES <= column < UNITS else history[t - 1, column]
        decided = t if same_bar else t - 1
        field = trade_field if decided >= 0 and ruined_at < 0 else NO_TRADE
        ruined = play_bar(history, t, bars, t, field, targets[max(decided, 0)], rules, start_cash, work)
        if ruined and ruined_at < 0:
            ruined_at = t
        mark_to_market(history, t, bars, t, rules)
    return ruined_at


@inlined
def _observe(obs, b, features, accounts, bars, t, rules):
    """Write the market's features, then the account: weights, unrealised gains and drawdown, as shares of equity."""
    width, assets, equity = features.shape[1], len(rules.assets), accounts[b, EQUITY]
    for f in range(width):
        obs[b, f] = features[t, f]
    for a in range(assets):
        units, mark = accounts[b, UNITS + a], bars[t, a, MARK]
        obs[b, width + a] = units * mark / equity
        obs[b, width + assets + a] = units * (mark - accounts[b, UNITS + assets + a]) / equity
    obs[b, width + 2 * assets] = equity / accounts[b, PEAK] - 1.0


@compiled
def observe_account(obs, features, accounts, bars, t, rules):
    """Write what an agent sees of bar `t` and of one account into `obs` ``[1, D]``, as :func:`step_accounts` does."""
    _observe(obs, 0, features, accounts, bars, t, rules)


@compiled
def step_accounts(
    actions, low, high, same_bar, trade_field, no_trade, bars, features, rules, start_cash,
    accounts, clock, work, obs, rewards, flags,
):  # fmt: skip
    """Step every account of the batch by one bar.

    :returns: the first account whose action is not finite (nothing is stepped then), or -1; the number of episodes that
        ended; the number of accounts that were not allowed to trade.
    """
    size, assets = len(actions), len(rules.assets)
    for b in range(size):
        for a in range(assets):
            if not math.isfinite(actions[b, a]):
                return b, 0, 0
    target = work[TARGET]
    endings, idle = 0, 0
    for b in range(size):
        exposure = 0.0
        for a in range(assets):
            action = min(max(actions[b, a], -1.0), 1.0)
            target[a] = low + 0.5 * (action + 1.0) * (high - low)
            exposure += abs(target[a])
        if exposure > high:
            for a in range(assets):
                target[a] *= high / exposure
        t = clock[NOW, b]
        may_trade = not no_trade[t]
        field = trade_field if may_trade else NO_TRADE
        for cost in range(FEES, UNITS):
            accounts[b, cost] = 0.0
        if same_bar:
            field = NO_TRADE
            if may_trade:
                rebalance(accounts, b, bars, t, trade_field, target, rules, work)
        t += 1
        before = accounts[b, EQUITY]
        ruined = play_bar(accounts, b, bars, t, field, target, rules, start_cash, work)
        mark_to_market(accounts, b, bars, t, rules)
        _observe(obs, b, features, accounts, bars, t, rules)
        rewards[b] = math.log(accounts[b, EQUITY] / before)
        clock[NOW, b] = t
        over = not ruined and t >= clock[END, b]
        flags[TERMINATED, b], flags[TRUNCATED, b], flags[EFFECTIVE, b] = ruined, over, may_trade
        endings += ruined or over
        idle += not may_trade
    return -1, endings, idle
