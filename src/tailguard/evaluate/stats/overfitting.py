"""Does picking the best trial pick anything? Combinatorially symmetric cross-validation of Bailey et al. (2017)."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from tailguard.evaluate.stats.series import ROUNDING, Floats, require_finite
from tailguard.validation import require

SPLITS_AT_ONCE = 1024  # bounds the memory for thousands of trials


@dataclass(frozen=True)
class Overfitting:
    """What became of the winners of one half of the data in the other half, over all ways to halve it.

    :param probability: PBO, the share of halvings whose winner is at or below the median of the other half. About 0.5 where
        all trials are equally good (or bad), towards 0 where the best trial really is the best. Below 0.2 is wanted.
    :param loss: share of halvings whose winner has a Sharpe ratio of at most 0 in the other half.
    :param slope: change of the winner's Sharpe ratio in the other half per change of the one that it won with; 0 where the
        winning ratio never differs.
    :param logits: ln(omega / (1 - omega)) of each halving, omega the winner's rank in the other half over N + 1.
    """

    probability: float
    loss: float
    slope: float
    logits: Floats


def overfitting(returns: ArrayLike, blocks: int = 16) -> Overfitting:
    """Probability of backtest overfitting (PBO) of choosing the trial with the best Sharpe ratio.

    :param returns: ``[T, N]``, all trials (at least 2) over the same bars, discarded ones included.
    :param blocks: contiguous blocks that the halves are put together from, even, from 2 to 20; 16 make 12,870 halves. At
        least two bars each.
    """
    values = np.asarray(returns, dtype=np.float64)
    require(values.ndim == 2 and values.shape[1] >= 2, "returns", values.shape, "of shape [T, N] with at least 2 trials")
    require_finite("returns", values)
    require(2 <= blocks <= 20 and blocks % 2 == 0, "blocks", blocks, "even, from 2 to 20")
    require(len(values) >= 2 * blocks, "the number of bars", len(values), f"at least 2 per block, {2 * blocks}")

    centres = values.mean(axis=0)
    pieces = np.array_split(values - centres, blocks)
    sizes = np.array([len(piece) for piece in pieces], dtype=np.float64)
    sums = np.stack([piece.sum(axis=0) for piece in pieces])  # [blocks, N]
    squares = np.stack([(piece**2).sum(axis=0) for piece in pieces])
    halves = np.array(list(combinations(range(blocks), blocks // 2)))
    inside = np.zeros((len(halves), blocks))
    np.put_along_axis(inside, halves, 1.0, axis=1)

    omegas, won, kept = [], [], []
    for chosen in np.array_split(inside, max(len(inside) // SPLITS_AT_ONCE, 1)):
        before = _sharpes(chosen, sizes, sums, squares, centres)  # [C, N]
        after = _sharpes(1.0 - chosen, sizes, sums, squares, centres)
        winners = before.argmax(axis=1)[:, None]
        mine = np.take_along_axis(after, winners, axis=1)
        ranks = (after < mine).sum(axis=1) + ((after == mine).sum(axis=1) + 1.0) / 2.0
        omegas.append(ranks / (values.shape[1] + 1.0))
        won.append(np.take_along_axis(before, winners, axis=1)[:, 0])
        kept.append(mine[:, 0])
    omega, best, later = np.concatenate(omegas), np.concatenate(won), np.concatenate(kept)
    logits = np.log(omega / (1.0 - omega))
    spread = float(best.var())
    slope = float(((best - best.mean()) * (later - later.mean())).mean()) / spread if spread > 0.0 else 0.0
    return Overfitting(float((logits <= 0.0).mean()), float((later <= 0.0).mean()), slope, logits)


def _sharpes(chosen: Floats, sizes: Floats, sums: Floats, squares: Floats, centres: Floats) -> Floats:
    """Sharpe ratios ``[C, N]`` of the blocks that ``chosen[C, blocks]`` marks with 1; 0 where nothing moves."""
    n = (chosen @ sizes)[:, None]
    total = chosen @ sums
    variance = (chosen @ squares - total**2 / n) / (n - 1.0)
    moves = variance > ROUNDING**2
    return np.where(moves, (centres + total / n) / np.sqrt(np.where(moves, variance, 1.0)), 0.0)
