"""The relevance of features: how much each one has said about the returns that followed, and how loudly it may speak.

A few thousand bars cannot tell thirty weak predictors apart: an agent that listens to all of them mostly learns noise. Columns
are therefore weighted before it sees them, by the t-statistic of each one's covariance with the next return:

    w = max(FLOOR, 1 - (threshold / t)^2),

the shrinkage of the non-negative garrote (Breiman 1995) for one predictor at a time, as in sure independence screening
(Fan and Lv 2008). What has said nothing is left audible, at FLOOR, since a feature may matter in ways that no covariance shows.

Whether anything can be predicted at all is a question of its own. A linear forecast that was fitted to other rows answers it:
its covariance with the returns of held-out rows (the information coefficient, times their deviations) has a t-statistic that is
far more telling than that of an account, since an account earns a part of what could be forecast and pays for it.

Both look at returns in units of the volatility that was forecast for them. A turbulent month says less about a mean than a calm
one, and weighting by the inverse variance is what generalised least squares does: raw returns let the turbulent months decide.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.market.bars import iterate_symbols
from tailguard.market.rules import Fill
from tailguard.market.volatility import forecast_variance, measure

Floats = NDArray[np.float64]
FLOOR = 0.1
# Returns beyond this many standard deviations are cut: one crash must not decide what matters.
OUTLIER = 4.0
# Penalty of the linear forecast, per row: as if each coefficient had been seen to be 0 by a column of variance 0.1. Columns at
# FLOOR have variance 0.01, so that they hardly count.
PENALTY = 0.1
NEXT_BAR = np.array([1])  # horizon of the forecasts of volatility


def fill_returns(bars: pd.DataFrame, fill: Fill) -> Floats:
    """Return ``[T, assets]`` log returns between the fill of a decision at each close and the fill of the next decision.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param fill: when orders are filled, see :class:`tailguard.market.rules.TradingRules`.
    :returns: NaN where one of the two prices is missing, as for the last rows.
    """
    price, delay = ("open", 1) if fill == "next_open" else ("close", 0 if fill == "close" else 1)
    prices = np.stack([table[price].to_numpy(dtype=np.float64) for _, table in iterate_symbols(bars)], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(prices)
    earned: Floats = np.full_like(logs, np.nan)
    earned[: -1 - delay] = np.diff(logs[delay:], axis=0)
    return np.where(np.isfinite(earned), earned, np.nan)


def bar_volatility(bars: pd.DataFrame) -> Floats:
    """Return ``[T, assets]`` the volatility of the next bar that was forecast at each close.

    Closes before the first forecast have the first one, so that no row is lost; a series that never moves has a unit of 1.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    """
    variance = forecast_variance(measure(bars), NEXT_BAR)[:, :, 0]
    forecast = pd.DataFrame(np.sqrt(np.where(variance > 0.0, variance, np.nan)))
    return forecast.bfill().fillna(1.0).to_numpy()


def volatility_scaled(bars: pd.DataFrame, fill: Fill) -> Floats:
    """Return the returns of :func:`fill_returns` in units of :func:`bar_volatility`.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param fill: see :func:`fill_returns`.
    """
    scaled: Floats = fill_returns(bars, fill) / bar_volatility(bars)
    return scaled


def relevance_weights(values: Floats, earned: Floats, threshold: float) -> Floats:
    """Return the weight of each column, in [FLOOR, 1].

    :param values: ``[N, n, F]`` features of N instruments; N is 1 for features that all assets share.
    :param earned: ``[n, assets]`` returns that follow; NaN where unknown. Shared features matter if they matter for any asset,
        those of a pool if they matter for the instruments together.
    :param threshold: t-statistic below which a column has the smallest weight. For A assets its square grows by 2 ln(A), since
        the largest of A statistics is larger by chance.
    """
    assets = earned.shape[1]
    if len(values) > 1:
        largest = np.abs(t_statistics(values, earned))
    else:
        largest = np.max([np.abs(t_statistics(values, earned[:, [asset]])) for asset in range(assets)], axis=0)
    bar = threshold**2 + 2.0 * np.log(1.0 if len(values) > 1 else assets)
    weights: Floats = np.maximum(FLOOR, 1.0 - bar / np.maximum(largest**2, 1e-12))
    return weights


class HeldOutForecast(NamedTuple):
    """A linear forecast of rows that it was not fitted to.

    :param forecast: ``[m, assets]`` in units of `scale`, of the difference to the mean.
    :param outcome: ``[m, assets]`` what followed, in the same units; 0 where unknown.
    :param scale: ``[assets]`` standard deviation of the returns that it was fitted to.
    """

    forecast: Floats
    outcome: Floats
    scale: Floats

    @property
    def products(self) -> Floats:
        """Forecasts times outcomes ``[m]``, added up over the assets, which move together; see :func:`t_of_products`."""
        return np.asarray((self.forecast * self.outcome).sum(axis=1))


def held_out_forecast(values: Floats, earned: Floats, unseen: Floats, unseen_earned: Floats) -> HeldOutForecast:
    """Fit a linear forecast to some rows, and forecast others.

    :param values: ``[N, n, F]`` features, weighted by relevance. N is 1 for features that all assets share, each of which then
        has coefficients of its own; the instruments of a pool have them in common.
    :param earned: ``[n, assets]`` returns that follow; NaN where unknown.
    :param unseen: ``[N, m, F]`` features of other rows.
    :param unseen_earned: ``[m, assets]`` returns that follow those.
    """
    assets = earned.shape[1]
    known = np.isfinite(earned)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, earned, 0.0).sum(axis=0) / count
    spread = np.sqrt(np.where(known, np.square(earned - mean), 0.0).sum(axis=0) / count)
    scale = np.where(spread > 0.0, spread, 1.0)
    # An unknown return counts as the mean.
    target, outcome = (np.nan_to_num(np.clip((part - mean) / scale, -OUTLIER, OUTLIER)) for part in (earned, unseen_earned))
    groups = [list(range(assets))] if len(values) > 1 else [[asset] for asset in range(assets)]
    forecast: Floats = np.zeros(outcome.shape)
    for group in groups:
        columns = np.concatenate(values[: len(group)])  # [instruments * n, F]
        centre = columns.mean(axis=0)
        columns = columns - centre
        moments = columns.T @ columns / len(columns) + PENALTY * np.eye(columns.shape[1])
        covariances = columns.T @ target[:, group].T.ravel() / len(columns)
        coefficients = np.linalg.solve(moments, covariances)
        for number, asset in enumerate(group):
            forecast[:, asset] = (unseen[number] - centre) @ coefficients
    return HeldOutForecast(forecast, outcome, scale)


def calibrated(forecasts: Sequence[HeldOutForecast]) -> float:
    """Return the factor with which forecasts explain best what followed (Mincer and Zarnowitz 1969): 1 if they are right.

    It is never negative: forecasts that point the wrong way are worth nothing.

    :param forecasts: of one or several blocks of held-out rows.
    """
    explained = sum(float(part.products.sum()) for part in forecasts)
    squares = sum(float(np.square(part.forecast).sum()) for part in forecasts)
    return max(explained / squares, 0.0) if squares > 1e-12 else 0.0


def t_of_products(products: Floats) -> float:
    """Return the t-statistic of forecasts times returns, robust to changing volatility (White 1980); 0 if nothing was forecast.

    :param products: of :class:`HeldOutForecast`, from one or several blocks of held-out rows.
    """
    error = float(np.sqrt(np.square(products).sum()))
    return float(products.sum()) / error if error > 1e-12 else 0.0


def t_statistics(values: Floats, earned: Floats) -> Floats:
    """Return the t-statistic of the covariance of each column with the returns, robust to changing volatility (White 1980).

    Instruments move together, so that the products of one time are added up and count as one observation.

    :param values: ``[N, n, F]``.
    :param earned: ``[n, N]``; NaN where unknown.
    :returns: ``[F]``; 0 for a column that does not move.
    """
    products = np.zeros(values.shape[1:])
    for columns, returns in zip(values, earned.T, strict=True):
        known = np.isfinite(returns)
        if known.sum() > 1 and returns[known].std() > 0.0:
            target = (returns[known] - returns[known].mean()) / returns[known].std()
            centred = columns[known] - columns[known].mean(axis=0)
            products[known] += centred * np.clip(target, -OUTLIER, OUTLIER)[:, None]
    error = np.sqrt(np.square(products).sum(axis=0))
    statistics: Floats = np.divide(products.sum(axis=0), error, out=np.zeros(values.shape[2]), where=error > 1e-9)
    return statistics
