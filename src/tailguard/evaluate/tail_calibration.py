"""Out-of-sample calibration of the predicted tail of an account: what is shown as its tail, compared with what came.

At the first decision of every period the distribution of the period's return was predicted from what was known then
(:mod:`tailguard.market.account_tail`). Periods do not overlap, so the outcomes are compared one by one. The pinball loss of two
rivals on the same positions stands beside that of the forecast: the past returns of the positions as they are held (historical
simulation), and a normal distribution with an exponentially weighted variance (EWMA, RiskMetrics' 0.94).
"""

from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import ndtri

from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.critic_calibration import FEWEST_OUTCOMES, TAILS, compare
from tailguard.evaluate.record import Calibration
from tailguard.evaluate.stats import risk_tests
from tailguard.evaluate.stats.series import Floats
from tailguard.market.account_tail import AccountTail
from tailguard.market.tail_forecast import LEVELS
from tailguard.market.volatility import measure

FORECAST, HISTORICAL, EWMA = "forecast", "historical simulation", "EWMA"
HISTORY = 1000  # bars of historical simulation
EWMA_DECAY = 0.94


def calibrate_tail(window: BacktestWindow, targets: Floats) -> Calibration | None:
    """Compare the predicted tail of an account with the returns of its periods.

    :param window: where it was traded.
    :param targets: ``[n, assets]`` weights that were traded, after any guard.
    :return: None if there are too few whole periods.
    """
    tail = window.tail(targets)
    rows = np.flatnonzero(tail.rows.restarts & np.isfinite(tail.outcomes) & (tail.quantiles[:, 0] < 0.0))
    rows = rows[rows >= window.span[0]]
    if len(rows) < FEWEST_OUTCOMES:
        return None
    times = pd.DatetimeIndex(window.bars.index[rows])
    bars = int(np.median(tail.rows.to_go[rows]))
    calibration = compare(bars, times, tail.outcomes[rows], tail.quantiles[rows], LEVELS)
    return replace(calibration, period=tail.period.words, losses=_losses(window, tail, rows))


def _losses(window: BacktestWindow, tail: AccountTail, rows: np.ndarray) -> dict[str, dict[float, float]]:
    """Return the mean pinball loss of the forecast and of its rivals, by tail."""
    returns = measure(window.bars.iloc[: window.span[1]]).returns
    forecast = np.stack([tail.value_at_risk(level)[rows] for level in TAILS], axis=1)
    historical = np.stack([_historical(returns, tail.held[t], t, int(tail.rows.to_go[t])) for t in rows])
    ewma = np.stack([_ewma(returns, tail.held[t], t, int(tail.rows.to_go[t])) for t in rows])
    levels, outcomes = np.array(TAILS), tail.outcomes[rows]
    return {
        name: dict(zip(TAILS, risk_tests.pinball_loss(outcomes, predicted, levels).tolist(), strict=True))
        for name, predicted in ((FORECAST, forecast), (HISTORICAL, historical), (EWMA, ewma))
    }


def _historical(returns: Floats, weights: Floats, row: int, bars: int) -> Floats:
    """Return quantiles of the returns that these weights would have had over past periods of as many bars."""
    total = np.concatenate([[0.0], np.cumsum(returns[max(row + 1 - HISTORY, 0) : row + 1] @ weights)])
    past = total[bars:] - total[:-bars] if len(total) > bars else np.zeros(1)
    return np.asarray(np.expm1(np.quantile(past, TAILS)))


def _ewma(returns: Floats, weights: Floats, row: int, bars: int) -> Floats:
    """Return quantiles of a normal distribution whose variance is an exponential average of squared returns."""
    past = returns[max(row + 1 - HISTORY, 0) : row + 1] @ weights
    ages = EWMA_DECAY ** np.arange(len(past))[::-1]
    return np.asarray(np.expm1(np.sqrt((ages @ past**2) / ages.sum() * bars) * ndtri(TAILS)))
