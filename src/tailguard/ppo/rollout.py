"""A rollout: what happened, in the order in which it happened, one strip per environment.

Storage is ``[T, B, ...]``, preallocated and written in place. For training it is laid out once as strips ``[L, B, ...]`` in
which every step is followed by the observation that it led to. Inside an episode that is the next step itself. Where an
episode ended it is the final observation, and after it comes a blank that wipes the memory (see trunk.py):

    s0 s1 s2 | final | blank | s0 s1 ...        one row of the strip per observation

So the critic sees every observation once, with the state of memory that belongs to it, in one call; the value after step i
stands at the position of step i plus one, ended or not; and final observations and blanks are rows of weight 0 in the loss.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.trunk import State


@dataclass(frozen=True)
class SequenceLayout:
    """Where the steps of a rollout stand in its strips.

    :param positions: ``[T, B]`` row of each step; the observation after it is one row below.
    :param places: ``[T B]`` the same in strips whose rows and environments are one axis, ``[L B, ...]``.
    :param blanks: ``[L, B, 1]`` 1 where the memory is wiped.
    """

    positions: Tensor
    places: Tensor
    resets: Tensor

    @classmethod
    def of(cls, dones: Tensor) -> "SequenceLayout":
        """Lay out a rollout whose steps ended episodes where `dones` ``[T, B]`` is true."""
        steps = torch.arange(len(dones)).unsqueeze(1)
        ended_before = torch.zeros(dones.shape, dtype=torch.long)
        ended_before[1:] = dones[:-1].long().cumsum(0)
        positions = steps + 2 * ended_before
        length = int(positions[-1].max()) + 2  # the observation after the last step
        resets = torch.zeros(length, dones.shape[1], 1)
        ended = dones[:-1]
        rows = positions[:-1][ended] + 2
        resets[rows, torch.nonzero(ended)[:, 1]] = 1.0
        n_envs = dones.shape[1]
        return cls(positions, (positions * n_envs + torch.arange(n_envs)).reshape(-1), resets)

    def spread(self, values: Tensor) -> Tensor:
        """Put ``[T, B, ...]`` values at their steps; 0 everywhere else."""
        strips = values.new_zeros(len(self.resets), *values.shape[1:])
        strips.flatten(0, 1).index_copy_(0, self.places, values.flatten(0, 1))
        return strips

    def gather(self, strips: Tensor, offset: int = 0) -> Tensor:
        """Read ``[T, B, ...]`` from strips ``[L, B, ...]`` at the steps, or `offset` rows below them."""
        places = self.places + offset * strips.shape[1] if offset else self.places
        return strips.flatten(0, 1).index_select(0, places).view(*self.positions.shape, *strips.shape[2:])

    def ends(self) -> tuple[Tensor, Tensor]:
        """Step and environment, ``[E]`` each, of the steps that no other follows: the last, and the last of each episode."""
        followed = self.positions[1:] == self.positions[:-1] + 1
        last = followed.new_zeros(1, followed.shape[1])
        step, env = torch.cat((followed, last)).logical_not().nonzero(as_tuple=True)
        return step, env


class Rollout:
    """T steps of B environments, preallocated.

    :param n_steps: T.
    :param n_envs: B.
    :param obs_size: D.
    :param action_size: numbers per stored action.
    :param n_outputs: numbers that describe an action distribution.
    """

    def __init__(self, n_steps: int, n_envs: int, obs_size: int, action_size: int, n_outputs: int) -> None:
        self.n_steps, self.n_envs = n_steps, n_envs
        self.obs = torch.zeros(n_steps + 1, n_envs, obs_size)
        self.actions = torch.zeros(n_steps, n_envs, action_size)
        self.outputs = torch.zeros(n_steps, n_envs, n_outputs)
        self.rewards = torch.zeros(n_steps, n_envs)
        self.terminated = torch.zeros(n_steps, n_envs, dtype=torch.bool)
        self.truncated = torch.zeros(n_steps, n_envs, dtype=torch.bool)
        self.weights = torch.ones(n_steps, n_envs)
        self.starts_with_episode = torch.ones(n_envs, dtype=torch.bool)
        # Rows and arrays on the same memory: indexing a tensor takes several times as long, and this is done at every step.
        self._obs_rows, self._obs = self.obs.unbind(), self.obs.numpy()
        self._actions = self.actions.numpy()
        answers = self.rewards, self.terminated, self.truncated, self.weights
        self._rows = [tensor.numpy() for tensor in answers]
        self._finals: list[tuple[int, Tensor, Tensor]] = []
        self._memory: list[State] = []
        self.filled = 0

    def reset(self, starts: NDArray[np.bool_] | None = None) -> None:
        """Make room for new steps; what is stored is overwritten one by one.

        :param starts: ``[B]`` where the first step begins an episode; None: everywhere.
        """
        self.starts_with_episode = torch.ones(self.n_envs, dtype=torch.bool) if starts is None else torch.tensor(starts)
        self.filled = 0
        self._finals.clear()
        self._memory.clear()
        self.weights.fill_(1.0)

    def observe(self, obs: NDArray[Any]) -> Tensor:
        """Store the observation that the next action is for; after the last step the one that follows it."""
        row = self._obs[self.filled]
        row[:] = obs.reshape(row.shape)
        return self._obs_rows[self.filled]

    def actions_now(self) -> NDArray[np.float32]:
        """A copy of the actions that were written last, for this step."""
        now: NDArray[np.float32] = self._actions[self.filled].copy()
        return now

    def add(self, step: StepArrays, memory: State | None = None) -> None:
        """Store what the environments answered to the actions that stand there already (acting.py), and go on to the next.

        :param memory: of the actor after the step, ``[n_layers, B, H]`` twice; None where nobody will ask for it.
        """
        if self.filled == self.n_steps:
            raise ValueError(f"the rollout is full: it holds {self.n_steps} steps; call reset() first")
        t = self.filled
        rewards, terminated, truncated, weights = self._rows
        rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
        if step.sample_weights is not None:
            weights[t] = step.sample_weights
        if memory is not None:
            self._memory.append(memory)
        if len(step.ended):
            # After a termination nobody looks at the final observation; whatever it holds must not get into the memory.
            cut = step.truncated[step.ended].reshape(-1, 1)
            finals = np.where(cut, step.final_obs.reshape(len(step.ended), -1), 0.0)
            self._finals.append((t, torch.tensor(step.ended), torch.tensor(finals, dtype=torch.float32)))
        self.filled += 1

    def memory_after_steps(self) -> State:
        """The actor's hidden and cell states after each step, before any is wiped, ``[n_layers, T, B, H]`` each."""
        hidden, cells = (torch.stack(parts, dim=1) for parts in zip(*self._memory, strict=True))
        return hidden, cells

    def ended_since_reset(self) -> NDArray[np.bool_]:
        """``[B]`` where an episode has ended in the steps stored so far."""
        return (self.terminated | self.truncated)[: self.filled].any(0).numpy()

    def starts(self) -> Tensor:
        """``[T, B]`` where a step begins an episode."""
        ended = (self.terminated | self.truncated)[:-1]
        return torch.cat((self.starts_with_episode.unsqueeze(0), ended))

    def strips(self) -> tuple[SequenceLayout, Tensor]:
        """The layout of this rollout and its observations in it, ``[L, B, D]``."""
        layout = SequenceLayout.of(self.terminated | self.truncated)
        following = self.obs[1:]
        if self._finals:
            following = following.clone()
            for t, ended, finals in self._finals:
                following[t, ended] = finals
        strips = layout.spread(self.obs[:-1])
        strips.flatten(0, 1).index_copy_(0, layout.places + self.n_envs, following.flatten(0, 1))
        return layout, strips


class NotFinite(ValueError):
    """An environment, or a model, has said something that is no number."""


def finite(name: str, values: Any, step: int, envs: NDArray[np.intp] | None = None) -> NDArray[Any]:
    """The values ``[B, ...]``, or an error that names the first environment whose value is not finite."""
    array = np.asarray(values)
    if not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0]
        env = bad if envs is None else envs[bad]
        raise NotFinite(f"the {name} of env {env} at step {step} of the rollout is not finite: {array[bad]}")
    return array
