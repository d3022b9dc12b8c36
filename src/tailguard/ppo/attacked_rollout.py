"""Rollouts in which some environments are played on attacked observations.

What the policy is shown is what it acts on, what is stored and what the critics value: after the last step of a rollout and
after an episode that was cut, too, since an adversary would have been there as well. The environments, and the observations
with which the next rollout begins, stay true; so do the statistics by which observations are normalised, or the adversary
would widen its own ball.
"""

import numpy as np
import torch
from torch import Tensor

from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.rollout import Rollout
from tailguard.ppo.scaling import ObservationNormalizer
from tailguard.ppo.trunk import State


def attacked_rollout(adversary: Adversary | None, horizon: int, rollout: Rollout) -> "AttackedRollout | None":
    """The adversary's part in the rollout that is about to begin; None where it has none.

    :param horizon: updates of the whole training.
    """
    if adversary is None or adversary.config.rollouts == 0.0:
        return None
    epsilon = adversary.epsilon_of_rollout(horizon)
    return AttackedRollout(adversary, epsilon, rollout) if epsilon > 0.0 else None


class AttackedRollout:
    """Shows the last environments of a rollout moved observations; made by :func:`attacked_rollout`.

    :param adversary: of the policy that plays.
    :param epsilon: radius of its ball.
    :param rollout: where the observations are stored.
    """

    def __init__(self, adversary: Adversary, epsilon: float, rollout: Rollout) -> None:
        self.adversary, self.policy, self.epsilon = adversary, adversary.policy, epsilon
        objectives = adversary.config.rollout_objectives
        self.objective = objectives[adversary.updates % len(objectives)]
        self.rollout = rollout
        self.first = rollout.n_envs - max(round(adversary.config.rollouts * rollout.n_envs), 1)
        self._true = rollout.obs[:, self.first :].clone()
        # Of the steps, that each environment is attacked at; from 1 on it is all of them.
        attacked = rollout.n_envs - self.first
        mixed = adversary.config.rollout_presence == "mixed"
        self._share = 2.0 * self._drawn(attacked) if mixed else torch.ones(attacked, 1)
        self._length, self._moves = 0.0, 0

    def show(self, row: Tensor, state: State) -> None:
        """Move the observations that the next action is for, in their place in the rollout.

        :param row: ``[B, obs_size]``, what :meth:`Rollout.observe` returned.
        :param state: of the actor before them.
        """
        mine = row[self.first :]
        self._true[self.rollout.filled] = mine
        mine[:, : self.policy.own_size] += self._found(mine, _some(state, slice(self.first, None)), self._share)

    def show_finals(self, step: StepArrays, state: State) -> StepArrays:
        """The step with moved final observations where an episode of an attacked environment was cut.

        :param state: of the actor after the step, as the episode leaves it.
        """
        cut = np.flatnonzero((step.ended >= self.first) & step.truncated[step.ended])
        if not len(cut):
            return step
        finals = np.array(step.final_obs, np.float32).reshape(len(step.ended), -1)
        envs = torch.as_tensor(step.ended[cut])
        moves = self._found(torch.from_numpy(finals[cut]), _some(state, envs), self._share[envs - self.first])
        finals[cut, : self.policy.own_size] += moves.numpy()
        return step._replace(final_obs=finals.reshape(step.final_obs.shape))

    def true_observations(self) -> Tensor:
        """``[T, B, D]``, what the environments observed, in their own columns."""
        true = self.rollout.obs[:-1].clone()
        true[:, self.first :] = self._true[:-1]
        return true[..., : self.policy.own_size]

    def metrics(self) -> dict[str, float]:
        """What the rollout has met."""
        rewards = self.rollout.rewards
        found = {
            "sa_ppo/rollout_share": 1.0 - self.first / self.rollout.n_envs,
            "sa_ppo/rollout_perturbation_norm": self._length / max(self._moves, 1),
            "sa_ppo/rollout_reward_attacked": rewards[:, self.first :].mean().item(),
        }
        return found | ({"sa_ppo/rollout_reward_clean": rewards[:, : self.first].mean().item()} if self.first else {})

    def _drawn(self, n: int) -> Tensor:
        """``[n, 1]``, evenly between 0 and 1."""
        return torch.rand(n, 1, generator=self.adversary.generator)

    def _found(self, obs: Tensor, state: State, share: Tensor) -> Tensor:
        """How far the adversary moves raw observations ``[n, obs_size]``, in their own units and columns.

        :param share: ``[n, 1]``, how likely it moves each at all.
        """
        adversary, own = self.adversary, self.policy.own_size
        with torch.inference_mode(False), torch.no_grad():
            inputs = self.policy.inputs(obs)
            memory = state[0].clone(), state[1].clone()  # inference tensors have no part in a gradient
            goal = adversary.of_step(self.objective, inputs, memory)
            struck = self._drawn(len(obs)) < share
            move = adversary.search(inputs, goal, self.epsilon).move[:, :own] * struck
            self._length += adversary.perturbation.lengths(move).sum().item()
            self._moves += int(struck.sum())
            normalizer = self.policy.normalizer
            return move * normalizer.units() if isinstance(normalizer, ObservationNormalizer) else move


def _some(state: State, envs: slice | Tensor) -> State:
    """The memory of some environments; nothing where there is none."""
    return (state[0][:, envs], state[1][:, envs]) if state[0].numel() else state
