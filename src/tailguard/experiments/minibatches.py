"""The cut of a rollout into minibatches."""

import math


def minibatch_size(samples: int, most: int) -> int:
    """Return the largest number of samples up to `most` that cuts a rollout into equal minibatches.

    :param samples: in a rollout, at least 1.
    :param most: in a minibatch; below 1 it is one.
    """
    divisors = (k for low in range(1, math.isqrt(samples) + 1) if samples % low == 0 for k in (low, samples // low))
    return max(k for k in divisors if k <= max(most, 1))
