"""What a policy for a tail sees of its budget, for acting: a row at a time, compiled. :class:`~tailguard.ppo.risk.Budget` says
what it means, and the tests that both agree; seventeen small tensor operations per step would cost more than the policy itself.
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, error_model="numpy")
def budget_rows(
    columns: NDArray[np.float32],
    caps: NDArray[np.float64],
    log_alphas: NDArray[np.float64],
    mean: float,
    std: float,
    limits: tuple[float, float, float, float],
    observed: bool,
    shown: NDArray[np.float32],
) -> None:
    """Fill `shown`, ``[B, F]``.

    :param columns: ``[B, 2 or 3]``: earned, discount, tail.
    :param caps: of each level; with one level there is no tail in the columns.
    :param log_alphas: of the levels, rising.
    :param mean: of the return.
    :param std: of the return.
    :param limits: reach, fine share, fine unit, and how near to a level counts as the level.
    :param observed: whether the budget is shown; the tail always is where there are several.
    """
    reach, fine, unit, near = limits
    levels = len(caps)
    low, high = log_alphas[0], log_alphas[levels - 1]
    for row in range(len(columns)):
        cap, place = caps[0], low
        if levels > 1:
            place = min(max(math.log(columns[row, 2]), low), high)
            above = 1
            while above < levels - 1 and place > log_alphas[above]:
                above += 1
            share = (place - log_alphas[above - 1]) / (log_alphas[above] - log_alphas[above - 1])
            if share < near:
                cap = caps[above - 1]
            elif share > 1.0 - near:
                cap = caps[above]
            else:
                cap = caps[above] * share + caps[above - 1] * (1.0 - share)
        column = 0
        if observed:
            budget = (cap - columns[row, 0]) / max(np.float64(columns[row, 1]), 1e-30)
            shown[row, 0] = min(max((budget - mean) / std, -reach), reach)
            shown[row, 1] = math.asinh(min(max(budget / std, -reach), reach) / fine) / unit
            column = 2
        if levels > 1:
            shown[row, column] = 2.0 * (place - low) / (high - low) - 1.0
