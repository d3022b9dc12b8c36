"""Where a hyperparameter lives: the checks on its value, and the unit interval on which ranges are searched."""

import math

from tailguard.population.config import HyperparamConfig, Value
from tailguard.validation import require


def bounds(config: HyperparamConfig) -> tuple[float, float]:
    """The ends of a range."""
    if config.min_value is None or config.max_value is None:
        raise ValueError(f"{config.name} is a choice and has no bounds")
    return config.min_value, config.max_value


def require_legal(config: HyperparamConfig, value: Value) -> None:
    """Refuse a value that the search could not have produced: of another type, out of bounds, or not among the choices."""
    if config.values is not None:
        known = any(type(choice) is type(value) and choice == value for choice in config.values)
        require(known, config.name, value, f"one of {list(config.values)}")
        return
    kind = int if config.is_integer else float
    hint = "an int" if config.is_integer else "a float; set is_integer if it counts something"
    require(type(value) is kind, config.name, value, hint)
    low, high = bounds(config)
    require(low <= float(value) <= high, config.name, value, f"within {low} and {high}")


def legal(config: HyperparamConfig, x: float) -> int | float:
    """The nearest value of a range: within its bounds whatever rounding did, and whole if it counts something."""
    low, high = bounds(config)
    clipped = min(max(x, low), high)
    return round(clipped) if config.is_integer else clipped


def to_unit(config: HyperparamConfig, value: float) -> float:
    """The place of a value on the scale of the search: in [0, 1]."""
    start, end = _ends(config)
    return min(max((_scaled(config, value) - start) / (end - start), 0.0), 1.0)


def from_unit(config: HyperparamConfig, unit: float) -> int | float:
    """The value at a place in [0, 1]; the inverse of :func:`to_unit` up to rounding."""
    start, end = _ends(config)
    scaled = start + unit * (end - start)
    base = math.exp(scaled) if config.is_log_scale else scaled
    return legal(config, 1.0 - base if config.is_one_minus else base)


def _scaled(config: HyperparamConfig, x: float) -> float:
    base = 1.0 - x if config.is_one_minus else x
    return math.log(base) if config.is_log_scale else base


def _ends(config: HyperparamConfig) -> tuple[float, float]:
    low, high = bounds(config)
    if config.is_integer:  # cells of one around every whole number: uniform draws give each its full share
        low, high = low - 0.5, high + 0.5
    return _scaled(config, low), _scaled(config, high)
