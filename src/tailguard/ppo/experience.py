"""From a rollout to what is trained on: values, advantages, targets, laid out for minibatches."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.quantiles import mean_of
from tailguard.ppo.rollout import Rollout, Strips
from tailguard.ppo.targets import gae, sr_lambda_targets
from tailguard.ppo.trunk import State


class Rows(NamedTuple):
    """What is known of each step, in strips ``[L, B, ...]`` (memory) or as samples ``[M, ...]`` (none).

    :param obs: normalised observations.
    :param actions: actions taken.
    :param outputs: what described their distribution then.
    :param log_probs: their log-probability then.
    :param advantages: normalised advantages.
    :param weights: 0 where there is nothing to learn.
    """

    obs: Tensor
    actions: Tensor
    outputs: Tensor
    log_probs: Tensor
    advantages: Tensor
    weights: Tensor

    def select(self, axis: int, index: Tensor) -> "Rows":
        """Some of the environments (axis 1) or samples (axis 0)."""
        return Rows(*(tensor.index_select(axis, index) for tensor in self))


class Memory(NamedTuple):
    """What sequences need besides their rows.

    :param blanks: where memory is wiped, ``[L, B, 1]``.
    :param actor: memory of the actor before the first row.
    :param critic: memory of the critics before the first row.
    """

    blanks: Tensor
    actor: State
    critic: State

    def select(self, envs: Tensor) -> "Memory":
        """Some of the environments."""
        states = ((h.index_select(1, envs), c.index_select(1, envs)) for h, c in (self.actor, self.critic))
        return Memory(self.blanks.index_select(1, envs), *states)


class Batch(NamedTuple):
    """A minibatch.

    :param rows: its steps.
    :param targets: normalised target atoms, ``[K, ..., N]``.
    :param memory: for sequences; None for samples.
    """

    rows: Rows
    targets: Tensor
    memory: Memory | None

    def evaluate(self, policy: DistributionalPolicy) -> tuple[Tensor, Tensor]:
        """What the policy says about this batch now: outputs for the action distribution, and quantiles ``[K, ..., N]``."""
        actor = critic = self.rows.obs
        if policy.actor_trunk is not None and self.memory is not None:
            actor = critic = policy.actor_trunk.sequence(self.rows.obs, self.memory.blanks, self.memory.actor)
            if policy.critic_trunk is not None:
                critic = policy.critic_trunk.sequence(self.rows.obs, self.memory.blanks, self.memory.critic)
        return policy.action_outputs(actor), policy.quantiles(critic)

    def select(self, index: Tensor) -> "Batch":
        """Some of the sequences or samples."""
        axis = 0 if self.memory is None else 1
        memory = None if self.memory is None else self.memory.select(index)
        return Batch(self.rows.select(axis, index), self.targets.index_select(axis + 1, index), memory)

    def split(self, size: int) -> list["Batch"]:
        """Parts of `size` sequences or samples each."""
        n = self.rows.obs.shape[0 if self.memory is None else 1]
        return [self] if size >= n else [self.select(part) for part in torch.arange(n).split(size)]


@dataclass(frozen=True)
class Experience:
    """A rollout ready for training.

    :param batch: all of it, with raw targets.
    :param values: ``[T, B]`` raw values of the states.
    :param per_critic: ``[K, T, B]`` the same by each critic.
    :param returns: ``[T, B]`` raw lambda-returns.
    :param weights: ``[T, B]`` sample weights.
    :param start_quantiles: ``[K, M, N]`` raw quantiles at the starts of episodes.
    :param critic_state_after: memory of the critics after the last step; None where they have none of their own.
    """

    batch: Batch
    values: Tensor
    per_critic: Tensor
    returns: Tensor
    weights: Tensor
    start_quantiles: Tensor
    critic_state_after: State | None


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
) -> Experience:
    """Evaluate the critics on every observation of the rollout in one call, then advantages and targets."""
    with torch.no_grad():
        layout, raw_obs = rollout.strips()
        obs = policy.normalizer(raw_obs)
        features, critic_after = _critic_features(policy, obs, layout, actor_state, critic_state)
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
            rows = Rows(obs, *(layout.spread(step) for step in steps))
            memory = Memory(layout.blanks, actor_state, critic_state)
            batch = Batch(rows, torch.stack([layout.spread(one) for one in targets]), memory)
        else:
            rows = Rows(layout.gather(obs).flatten(0, 1), *(step.flatten(0, 1) for step in steps))
            batch = Batch(rows, targets.flatten(1, 2), None)
        starts = torch.zeros_like(rollout.terminated)
        starts[1:] = (rollout.terminated | rollout.truncated)[:-1]
        start_quantiles = torch.stack([layout.gather(one)[starts] for one in quantiles])
        critic_values = torch.stack([layout.gather(one) for one in per_critic])
    return Experience(batch, now, critic_values, returns, weights, start_quantiles, critic_after)


def aggregate_value(per_critic: Tensor, critic: CriticConfig) -> Tensor:
    """One value from the critics' means ``[K, ...]``."""
    return per_critic.mean(0) if critic.aggregate == "mean" else per_critic.min(0).values


def _critic_features(
    policy: DistributionalPolicy, obs: Tensor, layout: Strips, actor_state: State, critic_state: State
) -> tuple[Tensor, State | None]:
    if policy.actor_trunk is None:
        return obs, None
    if policy.critic_trunk is None:  # shared: the actor's memory is the critics' too, and acting has carried it along
        return policy.actor_trunk.sequence(obs, layout.blanks, actor_state), None
    return policy.critic_trunk.sequence_and_states(obs, layout.blanks, critic_state, layout.positions[-1])


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
