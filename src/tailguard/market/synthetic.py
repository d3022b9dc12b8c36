"""Synthetic price series with a known distribution.

The close-to-close log returns are drawn first and have the known distribution. The rest of each bar is then filled in as a
Brownian motion pinned to the two closes, so that the bars look like bars and add no information about the returns to come.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tailguard.validation import require

LARGEST_LOG_PRICE = 700.0  # the exponential of more than 709 is no longer a float


def random_walk(
    n_bars: int,
    *,
    volatility: float = 0.01,
    drift: float = 0.0,
    overnight_share: float = 0.3,
    start: float = 100.0,
    freq: str = "1D",
    seed: int,
) -> pd.DataFrame:
    """Draw a geometric random walk: the past bars do not predict the next return.

    The log returns are independent, normal(drift - volatility^2 / 2, volatility). The subtracted half variance is
    what the exponential adds on average, so that E[close_{t+1} / close_t] = exp(drift), exactly 1 without drift.

    :param n_bars: the number of bars.
    :param volatility: the standard deviation of the log return of one bar.
    :param drift: the logarithm of the expected price ratio of one bar.
    :param overnight_share: the share of a bar's variance that falls between the previous close and the open.
    :param start: the close before the first bar.
    :param freq: the distance of the bars, as pandas writes it.
    :param seed: the seed of the random numbers.
    """
    return ar1_returns(
        n_bars,
        rho=0.0,
        volatility=volatility,
        drift=drift,
        overnight_share=overnight_share,
        start=start,
        freq=freq,
        seed=seed,
    )


def ar1_returns(
    n_bars: int,
    *,
    rho: float,
    volatility: float = 0.01,
    drift: float = 0.0,
    overnight_share: float = 0.3,
    start: float = 100.0,
    freq: str = "1D",
    seed: int,
) -> pd.DataFrame:
    """Draw prices with autocorrelated log returns: trending for rho > 0, reverting for rho < 0.

    With mu = drift - volatility^2 / 2 the log returns are a stationary AR(1),
    r_{t+1} - mu = rho (r_t - mu) + volatility sqrt(1 - rho^2) eps, so that each is normal(mu, volatility) and the best
    forecast from all past closes is mu + rho (r_t - mu).

    :param n_bars: the number of bars.
    :param rho: the correlation of neighbouring log returns.
    :param volatility: the standard deviation of the log return of one bar.
    :param drift: the logarithm of the expected price ratio of one bar.
    :param overnight_share: the share of a bar's variance that falls between the previous close and the open.
    :param start: the close before the first bar.
    :param freq: the distance of the bars, as pandas writes it.
    :param seed: the seed of the random numbers.
    """
    require(n_bars >= 1, "n_bars", n_bars, "at least 1")
    require(-1.0 < rho < 1.0, "rho", rho, "between -1 and 1, both excluded")
    require(0.0 <= volatility < np.inf, "volatility", volatility, "finite and not negative")
    require(bool(np.isfinite(drift)), "drift", drift, "finite")
    require(0.0 <= overnight_share <= 1.0, "overnight_share", overnight_share, "between 0 and 1")
    require(0.0 < start < np.inf, "start", start, "finite and positive")

    rng = np.random.default_rng(seed)
    innovation = volatility * np.sqrt(1.0 - rho**2)
    deviations = innovation * rng.standard_normal(n_bars)
    deviations[0] = volatility * rng.standard_normal()
    if rho != 0.0:
        for t in range(1, n_bars):
            deviations[t] += rho * deviations[t - 1]
    log_returns = drift - volatility**2 / 2.0 + deviations
    return _bars(log_returns, float(innovation), overnight_share, start, freq, rng)


def _bars(
    log_returns: NDArray[np.float64],
    volatility: float,
    overnight_share: float,
    start: float,
    freq: str,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """Fill the bars between given closes with a pinned Brownian motion.

    :param log_returns: the close-to-close log returns, the first one from `start`.
    :param volatility: the standard deviation of the free Brownian motion over one bar.
    :param overnight_share: the part of the bar, counted in variance, that passes before the open.
    :param start: the close before the first bar.
    :param freq: the distance of the bars, as pandas writes it.
    :param rng: the random numbers.
    """
    n_bars = len(log_returns)
    log_close = np.log(start) + np.cumsum(log_returns)
    previous = np.concatenate([[np.log(start)], log_close[:-1]])

    # A Brownian motion pinned at both ends has this mean and standard deviation at the fraction of time of the open.
    bridge_std = volatility * np.sqrt(overnight_share * (1.0 - overnight_share))
    log_open = previous + overnight_share * log_returns + bridge_std * rng.standard_normal(n_bars)

    # The extremes of the pinned motion from open to close, by inverting their distribution functions; -ln U is a
    # standard exponential. Each of the two has its exact distribution; their dependence is left out.
    session_variance = volatility**2 * (1.0 - overnight_share)
    middle, distance = (log_open + log_close) / 2.0, log_close - log_open
    log_high = middle + np.sqrt(distance**2 + 2.0 * session_variance * rng.standard_exponential(n_bars)) / 2.0
    log_low = middle - np.sqrt(distance**2 + 2.0 * session_variance * rng.standard_exponential(n_bars)) / 2.0

    largest = float(np.abs([log_high, log_low]).max())
    require(largest < LARGEST_LOG_PRICE, "the largest |log price|", largest, "below 700: shorten or calm the series")
    open_, close = np.exp(log_open), np.exp(log_close)
    return pd.DataFrame(
        {
            "open": open_,
            # Rounding may put an extreme one digit inside the open or the close.
            "high": np.maximum(np.exp(log_high), np.maximum(open_, close)),
            "low": np.minimum(np.exp(log_low), np.minimum(open_, close)),
            "close": close,
            "volume": 1e6 * np.exp(0.3 * rng.standard_normal(n_bars)),
        },
        index=pd.date_range("2000-01-01", periods=n_bars, freq=freq, unit="ns", name="time"),
    )
