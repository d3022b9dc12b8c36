"""How far two ways of computing the same number may be apart, from the size of its sums and not from one machine."""

import math

import numpy as np


def rounding(terms, dtype=np.float32):
    """Return the difference to allow between two orders of adding `terms` numbers, relative to the size of the sum.

    Each addition rounds by up to half an epsilon, in either direction: a random walk, whose length is the root of the number of
    terms. Four standard deviations, with a step of a whole epsilon, since the factors of a product are rounded as well.
    """
    return 4.0 * float(np.finfo(dtype).eps) * math.sqrt(terms)
