"""Features by functions of installed packages, and the test that they do not look ahead.

A package declares a function from bars to features in the entry-point group :data:`GROUP`; a configuration names it. Only what
is installed can be named: a configuration, or the run of a stranger, cannot bring code along.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

import numpy as np
import pandas as pd

from tailguard.validation import require

GROUP = "tailguard.features"
CUTS = 8  # times at which the future is replaced, to see whether a function looks ahead
SAME = 1e-9


class LookAheadError(ValueError):
    """Raised for a function whose results depend on bars that come after them."""


def load_function(name: str) -> Callable[[pd.DataFrame], pd.DataFrame | pd.Series]:
    """Return the function that an installed package declares under a name.

    :raises ValueError: if there is none, with those that there are.
    """
    declared = entry_points(group=GROUP)
    known = ", ".join(sorted(declared.names)) or f"that of an installed package: none has entry points in the group {GROUP}"
    require(name in declared.names, "features.functions", name, f"one of {known}" if declared.names else known)
    function: Callable[[pd.DataFrame], pd.DataFrame | pd.Series] = declared[name].load()
    return function


def function_features(bars: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the features that a function computes of one symbol's bars, with its name before theirs.

    :raises ValueError: if the result does not have a row of numbers for each bar.
    """
    result = load_function(name)(bars.copy())
    require(
        isinstance(result, pd.DataFrame | pd.Series), f"the result of {name}", type(result).__name__, "a DataFrame or a Series"
    )
    table = result.to_frame(name) if isinstance(result, pd.Series) else result.add_prefix(f"{name}.")
    require(table.index.equals(bars.index), f"the index of the result of {name}", len(table), f"that of the {len(bars)} bars")
    return table.astype(np.float64).replace([np.inf, -np.inf], np.nan)


def require_causal_function(bars: pd.DataFrame, name: str) -> None:
    """Raise for a function whose features of a bar change when later bars do, or from one call to the next.

    :param bars: of one symbol.
    :param name: of the function.
    """
    computed = function_features(bars, name)
    require(_same(computed, function_features(bars, name)), f"the function {name}", "random", "deterministic")
    generator = np.random.default_rng(0)
    for cut in np.sort(generator.integers(len(bars) // 4, len(bars) - 1, CUTS)):
        other = function_features(replace_bars(bars, cut + 1, generator), name)
        if not _same(computed.iloc[: cut + 1], other.iloc[: cut + 1]):
            raise LookAheadError(
                f"the function {name} looks ahead: its features up to {bars.index[cut]} change when only later bars do"
            )


def replace_bars(bars: pd.DataFrame, first: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return the bars with others from a row on: in another order, times a random walk.

    :param bars: a table from :func:`tailguard.market.load_bars`.
    :param first: row from which on they are others.
    :param generator: of the random numbers.
    """
    other = bars.copy()
    later = generator.permutation(np.arange(first, len(bars)))
    scale = np.exp(np.cumsum(generator.normal(0.0, 0.05, len(later))))
    other.iloc[first:] = bars.iloc[later].to_numpy() * scale[:, None]
    return other


def _same(table: pd.DataFrame, other: pd.DataFrame) -> bool:
    return list(table.columns) == list(other.columns) and bool(
        np.isclose(table.to_numpy(), other.to_numpy(), SAME, SAME, equal_nan=True).all()
    )
