"""Who copies whom. One random draw per member decides its opponent, which is also its source."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtr

from tailguard.population.config import PBTConfig
from tailguard.population.member import PopulationMember, recent_scores
from tailguard.validation import require

ROUNDING = 1e-9  # 100 * 0.07 is a little more than 7


def truncation_size(members: int, ratio: float) -> int:
    """How many members truncation replaces: the share rounded up, at least one, at most half.

    :param members: how many there are.
    :param ratio: the share, in (0, 0.5].
    """
    return min(max(1, math.ceil(members * ratio - ROUNDING)), members // 2)


def welch_p_value(better: Sequence[float], worse: Sequence[float]) -> float:
    """Probability of so large a lead by chance: Welch's test of mean(better) > mean(worse), unequal variances.

    :param better: two or more evaluations.
    :param worse: two or more evaluations.
    :return: in [0, 1]. Without any spread a lead is certain (0) and equality proves nothing (1).
    """
    for name, scores in (("better", better), ("worse", worse)):
        require(len(scores) >= 2, f"number of evaluations in {name}", len(scores), "at least 2")
    size = float(np.abs([*better, *worse]).max())
    if size == 0.0:
        return 1.0
    first, second = np.asarray(better) / size, np.asarray(worse) / size  # squares of tiny or huge scores would leave the floats
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
    """The source of each target that is to copy. A broken target always gets one, if there is any contender.

    :param config: the method and its settings.
    :param targets: members about which to decide, by id. Broken ones may be among them.
    :param contenders: members that may be copied; all alive, with a finite performance.
    :param rng: asked once per target that meets an opponent.
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
    """The performance where higher is better; minus infinity for broken members."""
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
    doomed = [target for target in targets if target.broken or target.member_id in worst]
    return {target.member_id: best[int(rng.integers(len(best)))] for target in doomed if best}


def _beats(config: PBTConfig, opponent: PopulationMember, target: PopulationMember) -> bool:
    if config.exploit_method == "binary_tournament":
        return merit(config, opponent) > merit(config, target)
    sign = 1.0 if config.metric_mode == "max" else -1.0
    ours, theirs = ([sign * score for score in recent_scores(m, config.t_test_window)] for m in (target, opponent))
    # Fewer than two evaluations have no spread to judge by: no evidence, no copy.
    return min(len(ours), len(theirs)) >= 2 and welch_p_value(theirs, ours) < config.t_test_level
