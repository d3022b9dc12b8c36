"""Whether the critics' laws come true: what they predicted at the start of episodes against what the episodes returned.

The probability integral transform of a return, the mass that was predicted at or below it, is uniform on [0, 1] when the
prediction is right. A mean above 1/2 is pessimism; more than a share a below a is a lower tail that is worse than predicted.
Kupiec's test says whether the count of returns below the predicted 5 % quantile can be chance.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailguard.coverage import kupiec_p_value, kupiec_ratio


class EpisodeEnd(NamedTuple):
    """An episode that ended in a rollout.

    :param step: of the rollout.
    :param env: its environment.
    :param earned: its return; None when it was cut off.
    """

    step: int
    env: int
    earned: float | None


# Fewer finished episodes than this say nothing about a law.
ENOUGH_EPISODES = 20


class Calibration:
    """Remembers what was predicted at the start of every running episode, and compares when it ends.

    Episodes that are cut off are left out: their return is not known.

    :param n_envs: B.
    :param window: comparisons to remember.
    :param tail: the tail whose breaches are counted.
    """

    def __init__(self, n_envs: int, window: int, tail: float) -> None:
        self.tail = tail
        self.pending: list[NDArray[np.float32] | None] = [None] * n_envs
        self.transforms: deque[float] = deque(maxlen=window)
        self.scores: deque[float] = deque(maxlen=window)

    def follow(self, starts: Tensor, ends: Sequence[EpisodeEnd], atoms: Tensor, masses: Tensor) -> None:
        """Go through a rollout.

        :param starts: ``[T, B]`` where an episode begins with the step.
        :param ends: the episodes that ended.
        :param atoms: ``[S, M]`` the law that was predicted at each of the S starts, in the order of the steps; sorted.
        :param masses: ``[M]``.
        """
        weights, laws = masses.numpy(), atoms.numpy()
        events = [(step, 0, i, env) for i, (step, env) in enumerate(starts.nonzero().tolist())]
        events += [(end.step, 1, i, end.env) for i, end in enumerate(ends)]
        for _, is_end, i, env in sorted(events):  # an episode begins before its first step and ends after its last
            if is_end:
                self._compare(self.pending[env], ends[i].earned, weights)
            self.pending[env] = None if is_end else laws[i]

    def forget(self, envs: NDArray[np.bool_]) -> None:
        """What was predicted for the running episodes of these environments no longer belongs to them."""
        self.pending = [None if gone else atoms for gone, atoms in zip(envs.tolist(), self.pending, strict=True)]

    def _compare(self, atoms: NDArray[np.float32] | None, earned: float | None, masses: NDArray[np.float32]) -> None:
        if atoms is None or earned is None:
            return
        # An atom that is hit counts half: predictions and returns may both be discrete.
        self.transforms.append(float(masses[atoms < earned].sum() + 0.5 * masses[atoms == earned].sum()))
        self.scores.append(pinball_score(atoms, masses, earned))

    def metrics(self) -> dict[str, float]:
        """What to log; nothing before there are enough episodes."""
        n = len(self.transforms)
        if n < ENOUGH_EPISODES:
            return {}
        transforms = np.array(self.transforms)
        breaches = int((transforms < self.tail).sum())
        return {
            "calibration/pit_mean": float(transforms.mean()),
            "calibration/breaches": breaches / n,
            "calibration/kupiec_p": kupiec(breaches, n, self.tail),
            "calibration/pinball": float(np.mean(self.scores)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings, in plain numbers."""
        pending = [None if atoms is None else atoms.tolist() for atoms in self.pending]
        return {"pending": pending, "transforms": list(self.transforms), "scores": list(self.scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.pending = [None if atoms is None else np.array(atoms, np.float32) for atoms in state["pending"]]
        self.transforms = deque(state["transforms"], maxlen=self.transforms.maxlen)
        self.scores = deque(state["scores"], maxlen=self.scores.maxlen)


def pinball_score(atoms: NDArray[np.float32], masses: NDArray[np.float32], earned: float) -> float:
    """The continuous ranked probability score of a discrete law, E|X - y| - E|X - X'| / 2; it is least for the true law.

    Twice the pinball loss averaged over all levels.

    :param atoms: ``[M]``, sorted.
    :param masses: ``[M]``.
    :param earned: y.
    """
    upto = np.cumsum(masses) - 0.5 * masses
    spread = 2.0 * float(masses @ ((2.0 * upto - 1.0) * atoms))  # E|X - X'| from sorted atoms
    return float(masses @ np.abs(atoms - earned)) - 0.5 * spread


def kupiec(breaches: int, n: int, expected: float) -> float:
    """The p-value of Kupiec's test that `breaches` in `n` happen with probability `expected`."""
    return kupiec_p_value(float(kupiec_ratio(breaches, n, expected)))
