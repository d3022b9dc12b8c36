"""The operators that change hyperparameters. Bounds are always kept, counts stay whole, choices move to a neighbour."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from tailguard.population.config import HyperparamConfig, Value
from tailguard.population.space import bounds, from_unit, legal, to_unit

SMALLEST_SHARE = 0.01  # of the range: what a factor acts on at least, where a range reaches 0 and products would stick there


def resample(config: HyperparamConfig, rng: np.random.Generator) -> Value:
    """A fresh draw: uniform over the choices, or over the range on the scale of the search."""
    if config.values is not None:
        return config.values[int(rng.integers(len(config.values)))]
    return from_unit(config, float(rng.random()))


def perturb(config: HyperparamConfig, value: Value, rng: np.random.Generator) -> Value:
    """A step from `value`: to a neighbouring choice, by the factor up or down, or by Gaussian noise."""
    if config.values is not None:
        return _neighbour(config.values, value, rng)
    x = float(value)
    if config.perturbation_noise is not None:
        draw = float(rng.standard_normal())
        up = draw > 0.0
        unit = to_unit(config, x) + config.perturbation_noise * draw
        moved = from_unit(config, min(max(unit, 0.0), 1.0))
    else:
        up = bool(rng.integers(2))
        moved = legal(config, _multiplied(config, x, up))
    if config.is_integer and moved == value:  # too small a step for a count would never move it
        moved = legal(config, x + 1.0 if up else x - 1.0)
    return moved


def explore(
    configs: tuple[HyperparamConfig, ...],
    values: Mapping[str, Value],
    method: Literal["perturb", "resample", "both"],
    rng: np.random.Generator,
) -> dict[str, Value]:
    """New hyperparameters from old ones.

    :param configs: what is searched.
    :param values: the old ones, one per config.
    :param method: see :class:`~tailguard.population.config.PBTConfig`.
    :param rng: the only source of randomness.
    """
    result: dict[str, Value] = {}
    for config in configs:
        fresh = method == "resample" or (method == "both" and float(rng.random()) < config.resample_probability)
        result[config.name] = resample(config, rng) if fresh else perturb(config, values[config.name], rng)
    return result


def _neighbour(choices: tuple[Value, ...], value: Value, rng: np.random.Generator) -> Value:
    place = next(i for i, choice in enumerate(choices) if type(choice) is type(value) and choice == value)
    beside = [i for i in (place - 1, place + 1) if 0 <= i < len(choices)]
    return choices[beside[int(rng.integers(len(beside)))]]


def _multiplied(config: HyperparamConfig, x: float, up: bool) -> float:
    """Times the factor, or over it; on 1 - x where that is searched."""
    low, high = bounds(config)
    base, start, end = (1.0 - x, 1.0 - high, 1.0 - low) if config.is_one_minus else (x, low, high)
    smallest = SMALLEST_SHARE * (end - start)
    if start <= 0.0 <= end and abs(base) < smallest:
        base += (config.perturbation_factor - 1.0) * (smallest if up else -smallest)
    else:
        base = base * config.perturbation_factor if up else base / config.perturbation_factor
    return 1.0 - base if config.is_one_minus else base
