"""The six data sets of online portfolio selection: published wealth of simple strategies, through our accounting.

The data come with the package universal-portfolios, as prices relative to the day before the first. It asks for an older
pandas: ``pip install --no-deps universal-portfolios`` is enough here.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tailguard.market import simulate

# Final wealth of uniform buy-and-hold, the best stock, and uniform constant rebalancing, for 1 at the start.
PUBLISHED = {
    "nyse_o": (14.50, 54.14, 27.08),
    "nyse_n": (18.06, 83.51, 31.55),
    "tse": (1.61, 6.28, 1.60),
    "sp500": (1.34, 3.78, 1.65),
    "msci": (0.91, 1.50, 0.93),
    "djia": (0.76, 1.19, 0.81),
}


def load(name):
    package = importlib.util.find_spec("universal")
    if package is None:
        pytest.skip("universal-portfolios is not installed")
    prices = pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / f"{name}.csv")
    start = pd.DataFrame(1.0, index=[0], columns=prices.columns)
    prices = pd.concat([start, prices], ignore_index=True).set_index(pd.bdate_range("1962-07-03", periods=len(prices) + 1))
    fields = {symbol: pd.DataFrame(dict.fromkeys(("open", "high", "low", "close"), prices[symbol])) for symbol in prices}
    return pd.concat({symbol: table.assign(volume=0.0) for symbol, table in fields.items()}, axis=1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_simple_strategies_reach_the_published_wealth(name):
    bars = load(name)
    assets, rows = len(bars.columns) // 5, len(bars)
    hold = np.full((rows, assets), np.nan)
    hold[0] = 1.0 / assets
    rebalance = np.full((rows, assets), 1.0 / assets)
    held, rebalanced = (simulate(bars, weights, fee=0.0, fill="close").equity[-1] for weights in (hold, rebalance))
    best = -np.inf
    for asset in range(assets):
        alone = np.full((rows, assets), np.nan)
        alone[0] = np.eye(assets)[asset]
        best = max(best, simulate(bars, alone, fee=0.0, fill="close").equity[-1])
    assert (round(held, 2), round(best, 2), round(rebalanced, 2)) == PUBLISHED[name]
