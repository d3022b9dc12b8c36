"""Rollouts in which the policy sees attacked observations in some environments.

The policy acts on perturbed observations, and they are what is stored and what the critics value: after the last step of a
rollout and after a truncated episode, too, since an adversary would have been there as well. The environments, and the
observations with which the next rollout begins, stay true; so do the statistics by which observations are normalised, or the
adversary would widen its own ball.
"""

import numpy as np
import torch
from torch import Tensor

from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.networks import State
from tailguard.ppo.rollout import Rollout
from tailguard.ppo.scaling import ObservationNormalizer


def attacked_rollout(adversary: Adversary | None, horizon: int, rollout: Rollout) -> "AttackedRollout | None":
    """Return the attack on the rollout that is about to begin; None where there is none.

    :param horizon: number of updates of the whole training.
    """
    if adversary is None or adversary.config.rollouts == 0.0:
        return None
    epsilon = adversary.epsilon_of_rollout(horizon)
    return AttackedRollout(adversary, epsilon, rollout) if epsilon > 0.0 else None


class AttackedRollout:
    """An attack on the observations of the last environments of a rollout; made by :func:`attacked_rollout`.

    :param adversary: adversary of the policy that acts.
    :param epsilon: radius of its ball.
    :param rollout: the rollout that the observations are stored in.
    """

    def __init__(self, adversary: Adversary, epsilon: float, rollout: Rollout) -> None:
        self.adversary, self.policy, self.epsilon = adversary, adversary.policy, epsilon
        objectives = adversary.config.rollout_objectives
        self.objective = objectives[adversary.updates % len(objectives)]
        self.rollout = rollout
        self.first = rollout.n_envs - max(round(adversary.config.rollouts * rollout.n_envs), 1)
        self._true = rollout.obs[:, self.first :].clone()
        # The probability that a step of each environment is attacked; from 1 on all steps are.
        attacked = rollout.n_envs - self.first
        mixed = adversary.config.rollout_presence == "mixed"
        self._probability = 2.0 * self._uniform(attacked) if mixed else torch.ones(attacked, 1)
        self._length, self._moves = 0.0, 0

    def perturb(self, row: Tensor, state: State) -> None:
        """Perturb the observations that the next action is for, in their place in the rollout.

        :param row: ``[B, obs_size]``, what :meth:`Rollout.observe` returned.
        :param state: recurrent state of the actor before them.
        """
        attacked = row[self.first :]
        self._true[self.rollout.filled] = attacked
        state = _state_of(state, slice(self.first, None))
        attacked[:, : self.policy.own_size] += self._perturbation(attacked, state, self._probability)

    def perturb_finals(self, step: StepArrays, state: State) -> StepArrays:
        """Return the step with perturbed final observations where an episode of an attacked environment was truncated.

        :param state: recurrent state of the actor after the step, as the episode leaves it.
        """
        cut = np.flatnonzero((step.ended >= self.first) & step.truncated[step.ended])
        if not len(cut):
            return step
        finals = np.array(step.final_obs, np.float32).reshape(len(step.ended), -1)
        envs = torch.as_tensor(step.ended[cut])
        probability = self._probability[envs - self.first]
        moves = self._perturbation(torch.from_numpy(finals[cut]), _state_of(state, envs), probability)
        finals[cut, : self.policy.own_size] += moves.numpy()
        return step._replace(final_obs=finals.reshape(step.final_obs.shape))

    def true_observations(self) -> Tensor:
        """Return what the environments observed, ``[T, B, D]``, in their own columns."""
        true = self.rollout.obs[:-1].clone()
        true[:, self.first :] = self._true[:-1]
        return true[..., : self.policy.own_size]

    def metrics(self) -> dict[str, float]:
        """Return the share of attacked environments, the size of the perturbations, and the rewards with and without them."""
        rewards = self.rollout.rewards
        metrics = {
            "sa_ppo/rollout_share": 1.0 - self.first / self.rollout.n_envs,
            "sa_ppo/rollout_perturbation_norm": self._length / max(self._moves, 1),
            "sa_ppo/rollout_reward_attacked": rewards[:, self.first :].mean().item(),
        }
        return metrics | ({"sa_ppo/rollout_reward_clean": rewards[:, : self.first].mean().item()} if self.first else {})

    def _uniform(self, n: int) -> Tensor:
        """Draw ``[n, 1]`` numbers evenly between 0 and 1."""
        return torch.rand(n, 1, generator=self.adversary.generator)

    def _perturbation(self, obs: Tensor, state: State, probability: Tensor) -> Tensor:
        """Return how far the adversary moves raw observations ``[n, obs_size]``, in their own units and columns.

        :param probability: ``[n, 1]``, that each is moved at all.
        """
        adversary, own = self.adversary, self.policy.own_size
        with torch.inference_mode(False), torch.no_grad():
            inputs = self.policy.inputs(obs).to(self.policy.device)
            start = state[0].clone(), state[1].clone()  # inference tensors have no part in a gradient
            goal = adversary.step_objective(self.objective, inputs, start)
            struck = self._uniform(len(obs)) < probability
            move = adversary.search(inputs, goal, self.epsilon).move[:, :own].cpu() * struck
            self._length += adversary.perturbation.lengths(move).sum().item()
            self._moves += int(struck.sum())
            normalizer = self.policy.normalizer
            return move * normalizer.units() if isinstance(normalizer, ObservationNormalizer) else move


def _state_of(state: State, envs: slice | Tensor) -> State:
    """Return the recurrent state of some environments; empty for a policy without one."""
    return (state[0][:, envs], state[1][:, envs]) if state[0].numel() else state
