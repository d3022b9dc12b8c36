"""From a rollout to what is trained on: values, advantages, targets, laid out for minibatches."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.quantiles import mean_of
from tailguard.ppo.rollout import Rollout, Strips
from tailguard.ppo.scaling import ReturnScale
from tailguard.ppo.targets import gae, sr_lambda_targets
from tailguard.ppo.trunk import State


class Batch(NamedTuple):
    """A minibatch: sequences ``[L, B, ...]`` with memory, samples ``[M, ...]`` without.

    :param obs: normalised observations.
    :param actions: actions taken.
    :param outputs: what described their distribution then.
    :param log_probs: their log-probability then.
    :param advantages: normalised advantages.
    :param weights: 0 where there is nothing to learn.
    :param targets: normalised target atoms, ``[K, ..., N]``.
    :param blanks: where memory is wiped, ``[L, B, 1]``.
    :param actor_state: memory of the actor before the first row.
    :param critic_state: memory of the critics before the first row.
    """

    obs: Tensor
    actions: Tensor
    outputs: Tensor
    log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    targets: Tensor
    blanks: Tensor | None
    actor_state: State | None
    critic_state: State | None

    def evaluate(self, policy: DistributionalPolicy) -> tuple[Tensor, Tensor]:
        """What the policy says about this batch now: outputs for the action distribution, and quantiles ``[K, ..., N]``."""
        actor = critic = self.obs
        if policy.actor_trunk is not None and self.blanks is not None and self.actor_state is not None:
            actor = critic = policy.actor_trunk.sequence(self.obs, self.blanks, self.actor_state)
            if policy.critic_trunk is not None and self.critic_state is not None:
                critic = policy.critic_trunk.sequence(self.obs, self.blanks, self.critic_state)
        return policy.action_outputs(actor), policy.quantiles(critic)

    def split(self, size: int) -> list["Batch"]:
        """Parts of `size` sequences or samples each."""
        axis = 0 if self.blanks is None else 1
        n = self.obs.shape[axis]
        if size >= n:
            return [self]
        return [self._part(torch.arange(start, start + size), axis) for start in range(0, n, size)]

    def _part(self, rows: Tensor, axis: int) -> "Batch":
        cut = [tensor.index_select(axis, rows) for tensor in self[:6]]
        blanks = None if self.blanks is None else self.blanks.index_select(1, rows)
        states = [None if state is None else _columns(state, rows) for state in (self.actor_state, self.critic_state)]
        return Batch(*cut, self.targets.index_select(axis + 1, rows), blanks, *states)


@dataclass(frozen=True)
class Experience:
    """A rollout ready for training.

    :param layout: where its steps stand in the strips.
    :param rows: per-step numbers in strips ``[L, B, ...]`` (memory) or flat ``[T B, ...]`` (none): obs, actions, outputs,
        log-probabilities, advantages, weights.
    :param targets: raw target atoms, ``[K, ..., N]``, laid out alike.
    :param values: ``[T, B]`` raw values of the states.
    :param returns: ``[T, B]`` raw lambda-returns.
    :param step_weights: ``[T, B]``.
    """

    layout: Strips
    rows: tuple[Tensor, ...]
    targets: Tensor
    values: Tensor
    returns: Tensor
    step_weights: Tensor
    actor_state: State
    critic_state: State
    recurrent: bool

    def encode_targets(self, scale: ReturnScale) -> Tensor:
        """Targets in the critics' units."""
        return scale.encode(self.targets)

    def sequences(self, envs: Tensor, targets: Tensor) -> Batch:
        """The whole strips of some environments."""
        picked = [row.index_select(1, envs) for row in self.rows]
        states = (_columns(self.actor_state, envs), _columns(self.critic_state, envs))
        return Batch(*picked, targets.index_select(2, envs), self.layout.blanks.index_select(1, envs), *states)

    def samples(self, chosen: Tensor, targets: Tensor) -> Batch:
        """Single steps, whatever their order."""
        picked = [row.index_select(0, chosen) for row in self.rows]
        return Batch(*picked, targets.index_select(1, chosen), None, None, None)


def prepare(
    policy: DistributionalPolicy,
    rollout: Rollout,
    actor_state: State,
    critic_state: State,
    critic: CriticConfig,
    levels: Tensor,
    gamma: float,
    gae_lambda: float,
    generator: torch.Generator,
) -> tuple[Experience, State]:
    """Evaluate the critics on every observation of the rollout in one call, then advantages and targets.

    :returns: the experience, and the critics' memory after the last step.
    """
    with torch.no_grad():
        layout, raw_obs = rollout.strips()
        obs = policy.normalizer(raw_obs)
        features, critic_after = _critic_features(policy, obs, layout, actor_state, critic_state, rollout)
        quantiles = policy.return_scale.decode(policy.quantiles(features))  # [K, L, B, N]
        per_critic = mean_of(quantiles, levels)
        values = aggregate_value(per_critic, critic)
        now, after = layout.gather(values), layout.gather(values, offset=1)
        advantages = gae(rollout.rewards, now, after, rollout.terminated, rollout.truncated, gamma, gae_lambda)
        returns = advantages + now
        targets = _targets(rollout, quantiles, returns, layout, critic, gamma, generator)
        weights = rollout.weights
        log_probs = policy.distribution.log_prob(rollout.outputs, rollout.actions)
        advantages = _standardise(advantages, weights)
        steps = (rollout.actions, rollout.outputs, log_probs, advantages, weights)
        if policy.recurrent:
            rows = (obs, *(layout.spread(step) for step in steps))
            targets = torch.stack([layout.spread(one) for one in targets])
        else:
            rows = (layout.gather(obs).flatten(0, 1), *(step.flatten(0, 1) for step in steps))
            targets = targets.flatten(1, 2)
    experience = Experience(layout, rows, targets, now, returns, weights, actor_state, critic_state, policy.recurrent)
    return experience, critic_after


def aggregate_value(per_critic: Tensor, critic: CriticConfig) -> Tensor:
    """One value from the critics' means ``[K, ...]``."""
    return per_critic.mean(0) if critic.aggregate == "mean" else per_critic.min(0).values


def _critic_features(
    policy: DistributionalPolicy, obs: Tensor, layout: Strips, actor_state: State, critic_state: State, rollout: Rollout
) -> tuple[Tensor, State]:
    if policy.actor_trunk is None:
        return obs, critic_state
    if policy.critic_trunk is None:  # shared: the actor's memory is the critics' too, and acting has carried it along
        return policy.actor_trunk.sequence(obs, layout.blanks, actor_state), critic_state
    last = layout.positions[-1]
    features, after = policy.critic_trunk.sequence_and_states(obs, layout.blanks, critic_state, last)
    keep = (~(rollout.terminated[-1] | rollout.truncated[-1])).float().reshape(1, -1, 1)
    return features, (after[0] * keep, after[1] * keep)


def _targets(
    rollout: Rollout,
    quantiles: Tensor,
    returns: Tensor,
    layout: Strips,
    critic: CriticConfig,
    gamma: float,
    generator: torch.Generator,
) -> Tensor:
    """Raw target atoms for each critic, ``[K, T, B, N]``; each learns from its own predictions."""
    if critic.target == "lambda_return":
        return returns.expand(len(quantiles), *returns.shape).unsqueeze(-1)
    next_quantiles = [layout.gather(one, offset=1).sort(dim=-1).values for one in quantiles]
    ends = (rollout.terminated, rollout.truncated)
    return torch.stack(
        [sr_lambda_targets(rollout.rewards, one, *ends, gamma, critic.value_lambda, generator) for one in next_quantiles]
    )


def _standardise(advantages: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum().clamp(min=1e-8)
    mean = (weights * advantages).sum() / total
    variance = (weights * (advantages - mean).square()).sum() / total
    return (advantages - mean) / (variance.sqrt() + 1e-8)


def _columns(state: State, envs: Tensor) -> State:
    return state[0].index_select(1, envs), state[1].index_select(1, envs)
