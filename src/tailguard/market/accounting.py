"""Accounting of any target weights over a whole series, on the kernel of the environments."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tailguard.market.bars import PRICES, YEAR, DataError, iterate_symbols
from tailguard.market.kernel import (
    BAR_FIELDS,
    BORROW,
    CARRY,
    CASH,
    CLOSE,
    EQUITY,
    FEE,
    FEES,
    FUNDING,
    HIGHEST,
    IMPACT,
    LOT,
    LOWEST,
    MARK,
    SLIPPAGE,
    TRADE_FIELDS,
    TURNOVER,
    UNITS,
    VOLUME,
    YEARS,
    KernelRules,
    simulate_account,
)
from tailguard.market.rules import TradingRules
from tailguard.validation import build, require

Floats = NDArray[np.float64]


def bar_array(bars: pd.DataFrame, rules: TradingRules) -> Floats:
    """Lay the bars out for the kernel; a bar with a price that is not positive and finite counts as missing."""
    if len(bars) == 0:
        raise DataError("no bars: the table has no rows")
    tables = list(iterate_symbols(bars))
    rules.require_assets([symbol for symbol, _ in tables])
    array = np.zeros((len(bars), len(tables), BAR_FIELDS))
    for column, (symbol, table) in enumerate(tables):
        prices = table[list(PRICES)].to_numpy(dtype=np.float64)
        there = (np.isfinite(prices) & (prices > 0)).all(axis=1)
        array[:, column, : CLOSE + 1] = np.where(there[:, None], prices, np.nan)
        array[:, column, VOLUME] = np.where(there, np.nan_to_num(table["volume"].to_numpy(dtype=np.float64)), 0.0)
        array[:, column, MARK] = pd.Series(array[:, column, CLOSE]).ffill().fillna(0.0).to_numpy()
        for rule, used in (("impact", rules.impact > 0.0), ("participation", rules.participation is not None)):
            if used and there.any() and not array[:, column, VOLUME].any():
                raise ValueError(f"{rule} needs volumes and {symbol or 'the table'} has none; leave {rule} out or add a volume")
        array[:, column, IMPACT] = _impact_coefficient(array[:, column], rules)
        own = rules.of_asset(symbol)
        array[:, column, FEE], array[:, column, BORROW], array[:, column, LOT] = own.fee, own.borrow_rate, own.lot
        array[:, column, LOWEST], array[:, column, HIGHEST] = own.min_weight, own.max_weight
        if "funding" in table.columns:
            funding = table["funding"].fillna(0.0).to_numpy(dtype=np.float64)
            require(bool(np.isfinite(funding).all()), "funding", float(funding[~np.isfinite(funding)][:1].sum()), "finite")
            array[:, column, FUNDING] = funding
    array[1:, :, YEARS] = (np.diff(bars.index.to_numpy()) / YEAR.to_timedelta64())[:, None]
    return array


def empty_accounts(size: int, assets: int) -> Floats:
    """Return accounts with nothing in them."""
    return np.zeros((size, UNITS + 2 * assets))


def _impact_coefficient(bars: Floats, rules: TradingRules) -> Floats:
    """Return the square-root impact Y sigma sqrt(Q / volume) as a factor of sqrt(Q), from bars before the fill only.

    Daily volatility and daily volume give the same number as those of one bar: the bars per day cancel.
    """
    if rules.impact == 0.0:
        return np.zeros(len(bars))
    marks = pd.Series(bars[:, CLOSE]).ffill()  # NaN, not 0, before a symbol's first bar
    returns = pd.Series(np.log(marks.to_numpy(dtype=np.float64))).diff()
    window = rules.impact_window
    sigma = returns.rolling(window, min_periods=2).std().shift(1)
    volume = pd.Series(bars[:, VOLUME]).rolling(window, min_periods=1).mean().shift(1)
    coefficient = (rules.impact * sigma / volume**0.5).replace([np.inf, -np.inf], np.nan)
    return coefficient.ffill().fillna(0.0).to_numpy(dtype=np.float64)


def kernel_rules(rules: TradingRules, assets: int) -> KernelRules:
    """Return the scalars of `rules`, for accounts that trade this number of assets."""
    return KernelRules(
        spread=rules.half_spread + rules.slippage,
        participation=math.inf if rules.participation is None else rules.participation,
        min_trade=rules.min_trade,
        stop_loss=rules.stop_loss or 0.0,
        take_profit=math.inf if rules.take_profit is None else rules.take_profit,
        cash_rate=rules.cash_rate,
        loan_rate=max(rules.loan_rate, rules.cash_rate),
        band=rules.band,
        ruin=rules.bankruptcy * rules.cash,
        maintenance_margin=rules.maintenance_margin,
        cost_aware=rules.sizing == "cost_aware",
        assets=(0,) * assets,
    )


class SimulationResult(NamedTuple):
    """An account over a whole series, one entry per bar, measured at the close after any trade of that bar.

    :param equity: ``[T]`` cash plus positions.
    :param units: units held, ``[T]`` for one symbol, ``[T, A]`` for several.
    :param cash: ``[T]``.
    :param costs: ``[T]`` trading costs of the bar: fees plus slippage.
    :param fees: ``[T]`` fees alone.
    :param slippage: ``[T]`` half-spread, slippage and impact.
    :param carry: ``[T]`` borrow, loan and funding paid, minus interest earned.
    :param turnover: ``[T]`` traded notional as a share of equity; a liquidation is not counted.
    :param weights: value held as a share of equity, shaped as ``units``.
    :param ruined_at: the bar at which the account was liquidated, None if it never was.
    """

    equity: Floats
    units: Floats
    cash: Floats
    costs: Floats
    fees: Floats
    slippage: Floats
    carry: Floats
    turnover: Floats
    weights: Floats
    ruined_at: int | None


def simulate(
    bars: pd.DataFrame,
    target_weights: ArrayLike,
    *,
    fee: float,
    slippage: float = 0.0,
    fill: str = "next_open",
    cash: float = 1.0,
    sizing: str = "cost_aware",
    **rules: Any,
) -> SimulationResult:
    """Trade any target weights over a whole series, with the accounting of the environments.

    Weights at bar t are decided at its close and filled at the next open by default. Purchases never need a loan
    unless the weights themselves ask for one by summing to more than 1.

    :param bars: a table from :func:`tailguard.market.load_bars`, one symbol or several.
    :param target_weights: ``[T]`` or ``[T, A]``, shares of equity; NaN holds the position as it is.
    :param fee: per side, as a fraction of the amount traded (0.001 is 10 basis points).
    :param slippage: adverse price move per side, as a fraction of the price.
    :param fill: ``next_open``, ``close`` (the close at which it was decided) or ``next_close``.
    :param cash: starting cash of the account.
    :param sizing: ``cost_aware`` (the weight holds after costs) or ``pre_cost`` (a share of equity before costs).
    :param rules: any other field of :class:`tailguard.market.TradingRules`; here an account is ruined, by default, only
        when its equity is gone (``bankruptcy=0``).
    :raises ValueError: for shapes that do not fit, infinite weights, or rules that are impossible.
    """
    named = {"fee": fee, "slippage": slippage, "fill": fill, "cash": cash, "sizing": sizing}
    checked = build(TradingRules, {"bankruptcy": 0.0, **rules, **named})
    return simulate_bars(bar_array(bars, checked), target_weights, checked)


def simulate_bars(array: Floats, target_weights: ArrayLike, rules: TradingRules) -> SimulationResult:
    """Do what :func:`simulate` does, for bars that are laid out already: many accounts on the same bars need that only once.

    :param array: from :func:`bar_array` with rules of the same impact.
    :param target_weights: ``[T]`` or ``[T, A]``; NaN holds.
    :param rules: costs, fills and limits.
    """
    steps, assets = array.shape[:2]
    weights = np.asarray(target_weights, dtype=np.float64)
    targets = weights[:, None] if weights.ndim == 1 else weights
    if targets.shape != (steps, assets):
        raise ValueError(f"target_weights must have the shape {(steps, assets)} of the bars, got {weights.shape}")
    if np.isinf(targets).any():
        raise ValueError("target_weights must be finite, or NaN to hold; got an infinite weight")
    rules.require_affordable(float(np.nansum(np.abs(targets), axis=1).max(initial=0.0)))
    history = empty_accounts(steps, assets)
    ruined_at = simulate_account(
        array, np.ascontiguousarray(targets), rules.fill == "close", TRADE_FIELDS[rules.fill],
        kernel_rules(rules, assets), rules.cash, history,
    )  # fmt: skip
    units = history[:, UNITS : UNITS + assets]
    exposure = units * array[:, :, MARK] / history[:, EQUITY, None]
    single = weights.ndim == 1
    return SimulationResult(
        equity=history[:, EQUITY],
        units=units[:, 0] if single else units,
        cash=history[:, CASH],
        costs=history[:, FEES] + history[:, SLIPPAGE],
        fees=history[:, FEES],
        slippage=history[:, SLIPPAGE],
        carry=history[:, CARRY],
        turnover=history[:, TURNOVER],
        weights=exposure[:, 0] if single else exposure,
        ruined_at=None if ruined_at < 0 else int(ruined_at),
    )
