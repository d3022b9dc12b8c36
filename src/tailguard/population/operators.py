"""The two operators of population-based training (Jaderberg et al. 2017): who copies whom (exploit), and how a copy's
hyperparameters change (explore).

Exploit: one random draw per member decides its opponent, which is also its source. Explore: bounds are always kept, counts
stay whole, choices move to a neighbour.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from scipy.special import stdtr

from tailguard.population.config import HyperparamConfig, PBTConfig, Value
from tailguard.population.member import PopulationMember, recent_scores
from tailguard.validation import require

ROUNDING = 1e-9  # 100 * 0.07 is a little more than 7
SMALLEST_SHARE = 0.01  # of the range: what a factor acts on at least, where a range reaches 0 and products would stick there

# ------------------------------------------------------------------------------------------------------------------- exploit


def truncation_size(members: int, ratio: float) -> int:
    """Return how many members truncation replaces: the share rounded up, at least one, at most half.

    :param members: size of the population.
    :param ratio: share to replace, in (0, 0.5].
    """
    return min(max(1, math.ceil(members * ratio - ROUNDING)), members // 2)


def welch_p_value(better: Sequence[float], worse: Sequence[float]) -> float:
    """Return the p-value of Welch's t-test of mean(better) > mean(worse), with unequal variances.

    :param better: two or more evaluations.
    :param worse: two or more evaluations.
    :return: in [0, 1]. Without any spread a lead is certain (0) and equality proves nothing (1).
    """
    for name, scores in (("better", better), ("worse", worse)):
        require(len(scores) >= 2, f"number of evaluations in {name}", len(scores), "at least 2")
    size = float(np.abs([*better, *worse]).max())
    if size == 0.0:
        return 1.0
    first, second = (
        np.asarray(better) / size,
        np.asarray(worse) / size,
    )  # squares of tiny or huge scores would under- or overflow
    lead = float(first.mean() - second.mean())
    variances = float(first.var(ddof=1)) / len(first), float(second.var(ddof=1)) / len(second)
    total = sum(variances)
    if total == 0.0:
        return 0.0 if lead > 0.0 else 1.0
    freedom = 1.0 / ((variances[0] / total) ** 2 / (len(first) - 1) + (variances[1] / total) ** 2 / (len(second) - 1))
    return float(stdtr(freedom, -lead / math.sqrt(total)))


def choose_sources(
    config: PBTConfig, targets: Sequence[PopulationMember], contenders: Sequence[PopulationMember], rng: np.random.Generator
) -> dict[int, int]:
    """Choose the source of each target that is to copy. A broken target always gets one, if there is any contender.

    :param config: the method and its settings.
    :param targets: members about which to decide, by id. Broken ones may be among them.
    :param contenders: members that may be copied; all alive, with a finite performance.
    :param rng: drawn from once per target that meets an opponent.
    :return: target -> source, in the order of the targets.
    """
    if config.exploit_method == "truncation":
        return _truncate(config, targets, contenders, rng)
    sources: dict[int, int] = {}
    for target in targets:
        opponents = [member for member in contenders if member is not target]
        if not opponents:
            continue
        opponent = opponents[int(rng.integers(len(opponents)))]
        if target.broken or _beats(config, opponent, target):
            sources[target.member_id] = opponent.member_id
    return sources


def merit(config: PBTConfig, member: PopulationMember) -> float:
    """Return the performance with a sign such that higher is better; minus infinity for broken members."""
    if member.broken or member.performance is None:
        return -math.inf
    return member.performance if config.metric_mode == "max" else -member.performance


def _truncate(
    config: PBTConfig, targets: Sequence[PopulationMember], contenders: Sequence[PopulationMember], rng: np.random.Generator
) -> dict[int, int]:
    everyone = {member.member_id: member for member in (*contenders, *targets)}
    ranked = sorted(everyone.values(), key=lambda member: (-merit(config, member), member.member_id))
    size = truncation_size(len(ranked), config.truncation_ratio)
    able = {member.member_id for member in contenders}
    best = [member.member_id for member in ranked[:size] if member.member_id in able]
    worst = {member.member_id for member in ranked[len(ranked) - size :]}
    replaced = [target for target in targets if target.broken or target.member_id in worst]
    return {target.member_id: best[int(rng.integers(len(best)))] for target in replaced if best}


def _beats(config: PBTConfig, opponent: PopulationMember, target: PopulationMember) -> bool:
    if config.exploit_method == "binary_tournament":
        return merit(config, opponent) > merit(config, target)
    sign = 1.0 if config.metric_mode == "max" else -1.0
    ours, theirs = ([sign * score for score in recent_scores(m, config.t_test_window)] for m in (target, opponent))
    # Fewer than two evaluations have no variance: no evidence, no copy.
    return min(len(ours), len(theirs)) >= 2 and welch_p_value(theirs, ours) < config.t_test_level


# ------------------------------------------------------------------------------------------------------------------- explore


def resample(config: HyperparamConfig, rng: np.random.Generator) -> Value:
    """Draw a fresh value: uniform over the choices, or over the range on the scale of the search."""
    if config.values is not None:
        return config.values[int(rng.integers(len(config.values)))]
    return config.from_unit(float(rng.random()))


def perturb(config: HyperparamConfig, value: Value, rng: np.random.Generator) -> Value:
    """Take a step from `value`: to a neighbouring choice, by the factor up or down, or by Gaussian noise."""
    if config.values is not None:
        return _neighbour(config.values, value, rng)
    x = float(value)
    if config.perturbation_noise is not None:
        draw = float(rng.standard_normal())
        up = draw > 0.0
        unit = config.to_unit(x) + config.perturbation_noise * draw
        moved = config.from_unit(min(max(unit, 0.0), 1.0))
    else:
        up = bool(rng.integers(2))
        moved = config.nearest_legal(_multiplied(config, x, up))
    if config.is_integer and moved == value:  # too small a step for a count would never move it
        moved = config.nearest_legal(x + 1.0 if up else x - 1.0)
    return moved


def explore(
    configs: tuple[HyperparamConfig, ...],
    values: Mapping[str, Value],
    method: Literal["perturb", "resample", "both"],
    rng: np.random.Generator,
) -> dict[str, Value]:
    """Return new hyperparameters made from old ones.

    :param configs: the hyperparameters that are searched.
    :param values: the old values, one per config.
    :param method: see :class:`~tailguard.population.config.PBTConfig`.
    :param rng: the only source of randomness.
    """
    result: dict[str, Value] = {}
    for config in configs:
        fresh = method == "resample" or (method == "both" and float(rng.random()) < config.resample_probability)
        result[config.name] = resample(config, rng) if fresh else perturb(config, values[config.name], rng)
    return result


def _neighbour(choices: tuple[Value, ...], value: Value, rng: np.random.Generator) -> Value:
    index = next(i for i, choice in enumerate(choices) if type(choice) is type(value) and choice == value)
    neighbours = [i for i in (index - 1, index + 1) if 0 <= i < len(choices)]
    return choices[neighbours[int(rng.integers(len(neighbours)))]]


def _multiplied(config: HyperparamConfig, x: float, up: bool) -> float:
    """Multiply x by the factor, or divide by it; on 1 - x for ``is_one_minus``."""
    low, high = config.bounds
    base, start, end = (1.0 - x, 1.0 - high, 1.0 - low) if config.is_one_minus else (x, low, high)
    smallest = SMALLEST_SHARE * (end - start)
    if start <= 0.0 <= end and abs(base) < smallest:
        base += (config.perturbation_factor - 1.0) * (smallest if up else -smallest)
    else:
        base = base * config.perturbation_factor if up else base / config.perturbation_factor
    return 1.0 - base if config.is_one_minus else base
