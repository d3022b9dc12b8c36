"""Series of returns and equity: checks that every statistic makes, and conversions between the two."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard.validation import require

Floats = NDArray[np.float64]

# A return is a ratio of two equities minus 1, so rounding leaves this much of a return of 0.
ROUNDING = 64.0 * float(np.finfo(np.float64).eps)


def as_series(name: str, values: ArrayLike, at_least: int) -> Floats:
    """Return a series ``[T]`` as an array, checked.

    :param name: what to call it in an error.
    :param values: one number per bar.
    :param at_least: the fewest entries that the statistic is defined for.
    :raises ValueError: if it is not one-dimensional, too short, or holds NaN or infinity.
    """
    series = np.asarray(values, dtype=np.float64)
    legal = f"one-dimensional with at least {at_least} entries"
    require(series.ndim == 1 and len(series) >= at_least, name, series.shape, legal)
    require_finite(name, series)
    return series


def require_finite(name: str, values: Floats) -> None:
    """Refuse NaN and infinity, naming the first of them and where it stands."""
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        place = ", ".join(str(int(position)) for position in wrong[0])
        require(False, f"{name}[{place}]", float(values[tuple(wrong[0])]), "finite")


def as_columns(name: str, series: Mapping[str, ArrayLike], at_least: int) -> Floats:
    """Return several series of one length as ``[T, S]``, in the order of the mapping.

    :param name: what to call the mapping in an error.
    :param series: from names to one number per bar, over the same bars.
    :param at_least: the fewest bars.
    """
    require(len(series) >= 1, name, dict(series), "a mapping with at least one series")
    columns = [as_series(f"{name}[{key!r}]", values, at_least) for key, values in series.items()]
    lengths = {key: len(column) for key, column in zip(series, columns, strict=True)}
    require(len(set(lengths.values())) == 1, f"the lengths of {name}", lengths, "equal: they are compared bar by bar")
    return np.ascontiguousarray(np.stack(columns, axis=1))


def as_equity(equity: ArrayLike) -> Floats:
    """Return an equity curve ``[T]`` as an array, checked: at least 2 entries, all positive (a ruined account ends above 0)."""
    values = np.asarray(equity, dtype=np.float64)
    require(values.ndim == 1 and len(values) >= 2, "equity", values.shape, "one-dimensional with at least 2 entries")
    legal = "finite and positive everywhere"
    require(bool(((values > 0.0) & (values < np.inf)).all()), "equity", float(values.min()), legal)
    return values


def returns_of(equity: ArrayLike) -> Floats:
    """Return the simple returns per bar ``[T - 1]`` of an equity curve ``[T]``.

    :param equity: ``[T]``, what the account is worth at each bar; positive.
    """
    values = as_equity(equity)
    return values[1:] / values[:-1] - 1.0


def equity_of(returns: ArrayLike) -> Floats:
    """Return the equity curve ``[T + 1]`` that starts at 1 and earns these simple returns.

    :param returns: ``[T]``, each above -1.
    """
    values = as_series("returns", returns, 1)
    require_solvent("returns", values)
    return np.concatenate([[1.0], np.cumprod(1.0 + values)])


def require_solvent(name: str, returns: Floats) -> None:
    """Refuse a return of -1 or less: it leaves no equity to continue with."""
    lowest = float(returns.min())
    require(lowest > -1.0, f"the lowest of {name}", lowest, "above -1: the equity would be gone")


def require_periods(periods: float) -> None:
    """Refuse an impossible number of bars per year."""
    require(0.0 < periods < np.inf, "periods", periods, "finite and positive, the number of bars per year")
