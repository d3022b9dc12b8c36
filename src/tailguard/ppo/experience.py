"""From a rollout to what is trained on: values, advantages, targets, laid out for minibatches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.risk import Finished, RiskObjective
from tailguard.ppo.rollout import Rollout, SequenceLayout
from tailguard.ppo.targets import gae, sr_lambda_targets
from tailguard.ppo.trunk import LstmTrunk, State


class Batch(NamedTuple):
    """Steps to learn from: strips ``[L, B, ...]`` with memory, samples ``[M, ...]`` without.

    :param obs: normalised observations.
    :param actions: actions taken.
    :param outputs: what described their distribution then.
    :param advantages: normalised advantages.
    :param weights: 0 where there is nothing to learn.
    :param targets: target atoms, ``[K, ..., M]``.
    :param old_atoms: the critics' predictions then, ``[K, ..., M]``; empty where nobody needs them.
    :param blanks: where memory is wiped, ``[L, B, 1]``; empty without memory, like all that follows.
    :param actor_hidden: memory of the actor before the first row, ``[n_layers, B, H]``.
    :param actor_cell: its other half.
    :param critic_hidden: memory of the critics before the first row.
    :param critic_cell: its other half.
    """

    obs: Tensor
    actions: Tensor
    outputs: Tensor
    advantages: Tensor
    weights: Tensor
    targets: Tensor
    old_atoms: Tensor
    resets: Tensor
    actor_hidden: Tensor
    actor_cell: Tensor
    critic_hidden: Tensor
    critic_cell: Tensor

    @property
    def size(self) -> int:
        """Number of sequences, or of samples."""
        return self.weights.shape[-1]

    def features(self, policy: DistributionalPolicy) -> tuple[Tensor, Tensor]:
        """What the policy's trunks make of the observations: for the actor and for the critics."""
        if policy.actor_trunk is None:
            return self.obs, self.obs
        actor = policy.actor_trunk.sequence(self.obs, self.resets, (self.actor_hidden, self.actor_cell))
        if policy.critic_trunk is None:
            return actor, actor
        return actor, policy.critic_trunk.sequence(self.obs, self.resets, (self.critic_hidden, self.critic_cell))

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator["Batch"]:
        """All sequences or samples in random order, `size` at a time."""
        yield from self._deal(torch.randperm(self.size, generator=generator), size)

    def split(self, size: int) -> Iterator["Batch"]:
        """Parts of `size` sequences or samples each, in order."""
        yield from [self] if size >= self.size else self._deal(torch.arange(self.size), size)

    def take(self, which: Tensor) -> "Batch":
        """Some of the sequences or samples, in the order of `which`."""
        tensors = zip(self, self._axes(), strict=True)
        return Batch(*(tensor.index_select(axis, which) if tensor.numel() else tensor for tensor, axis in tensors))

    def _axes(self) -> tuple[int, ...]:
        """Along which axis the sequences or samples of each tensor stand."""
        rank = self.weights.dim()
        return (rank - 1,) * 5 + (rank,) * 2 + (1,) * 5

    def _deal(self, order: Tensor, size: int) -> Iterator["Batch"]:
        """Every tensor is put in order once and cut into contiguous parts: a copy each, instead of one for each part."""
        parts = order.reshape(-1, size)
        places: dict[tuple[int, ...], Tensor] = {}  # of all rows, by the axes that stand before the sequences or samples
        dealt = [_dealt(tensor, axis, parts, places) for tensor, axis in zip(self, self._axes(), strict=True)]
        yield from (Batch(*part) for part in zip(*dealt, strict=True))


def _dealt(tensor: Tensor, axis: int, parts: Tensor, places: dict[tuple[int, ...], Tensor]) -> tuple[Tensor, ...]:
    """Contiguous parts ``[..., size, ...]`` of a tensor ``[..., B, ...]``, for ``parts[P, size]``."""
    if not tensor.numel():
        return (tensor,) * len(parts)
    lead = tuple(tensor.shape[:axis])
    if lead not in places:
        rows = torch.arange(math.prod(lead)).unsqueeze(1) * tensor.shape[axis]
        places[lead] = (rows + parts.unsqueeze(1)).flatten()
    chosen = tensor.flatten(0, axis).index_select(0, places[lead])
    return chosen.view(len(parts), *lead, parts.shape[1], *tensor.shape[axis + 1 :]).unbind()


@dataclass(frozen=True)
class Experience:
    """A rollout ready for training.

    :param batch: all of it, with raw targets.
    :param layout: where its steps stand in strips.
    :param values: ``[T, B]`` mean returns from the states, by the critics together.
    :param per_critic: ``[K, T, B]`` mean returns by each critic.
    :param returns: ``[T, B]`` raw lambda-returns.
    :param weights: ``[T, B]`` sample weights.
    :param start_atoms: ``[K, M, N]`` raw atoms at the M starts of episodes.
    :param critic_state_after: memory of the critics after the last step; None where they have none of their own.
    :param finished: returns of the episodes that ended, and the tails they were played for; None for a neutral objective.
    """

    batch: Batch
    layout: SequenceLayout
    values: Tensor
    per_critic: Tensor
    returns: Tensor
    weights: Tensor
    start_atoms: Tensor
    critic_state_after: State | None
    finished: Finished | None

    def at_steps(self, rows: Tensor) -> Tensor:
        """From one number for each row of the batch to ``[T, B]``."""
        return self.layout.gather(rows) if rows.dim() == 2 else rows.reshape(self.weights.shape)

    def normalised(self, policy: DistributionalPolicy) -> Batch:
        """The batch with targets in the units that the critics have now."""
        encode = policy.return_scale.encode
        return self.batch._replace(targets=encode(self.batch.targets), old_atoms=encode(self.batch.old_atoms))


def prepare(
    policy: DistributionalPolicy,
    rollout: Rollout,
    actor_state: State,
    critic_state: State,
    *,
    critic: CriticConfig,
    objective: RiskObjective,
    gamma: float,
    gae_lambda: float,
    generator: torch.Generator,
) -> Experience:
    """Evaluate the critics on every observation of the rollout in one call, then advantages and targets."""
    with torch.no_grad():
        layout, raw_obs = rollout.strips()
        obs = policy.inputs(raw_obs)
        atoms, critic_after = _atoms(policy, obs, layout, rollout, critic_state)  # [K, L, B, M]
        means = atoms @ policy.law.masses
        per_critic = torch.stack([layout.gather(one) for one in means])
        values = critic.aggregate_values(means)
        now, after = layout.gather(values), layout.gather(values, offset=1)
        ends = (rollout.terminated, rollout.truncated)
        advantages = gae(rollout.rewards, now, after, *ends, gamma, gae_lambda)
        returns = advantages + now
        finished = None
        if not objective.neutral:
            columns = raw_obs[..., policy.own_size :]
            worth = critic.aggregate_values(objective.values(atoms, policy.law.masses, columns))
            advantages = _risk_advantages(rollout, objective, layout, columns, worth, gamma, gae_lambda)
            finished = _finished_returns(rollout, layout, columns, atoms, gamma)
        targets = _targets(rollout, atoms, returns, layout, critic, gamma, generator)
        steps = (rollout.actions, rollout.outputs, _standardise(advantages, rollout.weights), rollout.weights)
        old_atoms = torch.stack([layout.gather(one) for one in atoms]) if critic.clip_range is not None else torch.empty(0)
        batch = _lay_out(policy, layout, obs, steps, targets, old_atoms, (*actor_state, *critic_state))
        starts = rollout.starts()
        start_atoms = torch.stack([layout.gather(one)[starts] for one in atoms])
    return Experience(batch, layout, now, per_critic, returns, rollout.weights, start_atoms, critic_after, finished)


def _risk_advantages(
    rollout: Rollout,
    objective: RiskObjective,
    layout: SequenceLayout,
    columns: Tensor,
    worth: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Advantages of the objective.

    :param columns: ``[L, B, 2 or 3]`` what was appended to the observations, as strips.
    :param worth: ``[L, B]`` what the objective expects from each of them.
    """
    at_steps = layout.gather(columns)
    rewards = objective.rewards(rollout.rewards, at_steps)
    ends = (rollout.terminated, rollout.truncated)
    advantages = gae(rewards, layout.gather(worth), layout.gather(worth, offset=1), *ends, gamma, gae_lambda)
    return _same_scale(advantages, rollout.weights, at_steps[..., 2]) if objective.budget.dial else advantages


def _same_scale(advantages: Tensor, weights: Tensor, alphas: Tensor) -> Tensor:
    """Advantages of each tail in its own unit: those of a small one are a fraction of those of a large one, and would drown."""
    scaled = advantages.clone()
    for alpha in alphas.unique():
        chosen = alphas == alpha
        scaled[chosen] = _standardise(advantages[chosen], weights[chosen])
    return scaled


def _finished_returns(rollout: Rollout, layout: SequenceLayout, columns: Tensor, atoms: Tensor, gamma: float) -> Finished:
    """The returns of episodes that ended here: a number each, and for those that were cut off all atoms of their law."""
    step, env = (rollout.terminated | rollout.truncated).nonzero(as_tuple=True)
    rows = layout.positions[step, env]
    last = columns[rows, env].double()  # before the last step
    earned, discount = last[:, 0], last[:, 1]
    total = earned + discount * rollout.rewards[step, env]
    cut = (rollout.truncated & ~rollout.terminated)[step, env]
    to_come = atoms[:, rows[cut] + 1, env[cut]].sort(-1).values.mean(0)
    laws = to_come * (gamma * discount[cut]).unsqueeze(-1) + total[cut].unsqueeze(-1)
    alphas = last[:, 2] if last.shape[-1] == 3 else torch.ones_like(total)
    return Finished(*(one.numpy() for one in (total[~cut], laws, alphas[~cut], alphas[cut])))


def _lay_out(
    policy: DistributionalPolicy,
    layout: SequenceLayout,
    obs: Tensor,
    steps: tuple[Tensor, ...],
    targets: Tensor,
    old_atoms: Tensor,
    states: tuple[Tensor, ...],
) -> Batch:
    """What belongs to steps ``[T, B, ...]`` as strips, beside `obs` which are strips already; or all as samples."""
    if policy.recurrent:
        of_critics = [torch.stack([layout.spread(one) for one in x]) if x.numel() else x for x in (targets, old_atoms)]
        return Batch._make([obs, *map(layout.spread, steps), *of_critics, layout.resets, *states])
    of_critics = [x.flatten(1, 2) if x.numel() else x for x in (targets, old_atoms)]
    of_steps = [step.flatten(0, 1) for step in (layout.gather(obs), *steps)]
    return Batch._make([*of_steps, *of_critics, *[torch.empty(0)] * 5])


def _atoms(
    policy: DistributionalPolicy, obs: Tensor, layout: SequenceLayout, rollout: Rollout, critic_state: State
) -> tuple[Tensor, State | None]:
    """Raw atoms at every row of the strips, and the critics' memory after the last step; None where it is not their own."""
    if policy.actor_trunk is None:
        return policy.raw_atoms(obs), None
    if policy.critic_trunk is None:
        return _acted_atoms(policy, policy.actor_trunk, obs, layout, rollout), None
    features, after = policy.critic_trunk.sequence_and_states(obs, layout.resets, critic_state, layout.positions[-1])
    return policy.raw_atoms(features), after


def _acted_atoms(
    policy: DistributionalPolicy, trunk: LstmTrunk, obs: Tensor, layout: SequenceLayout, rollout: Rollout
) -> Tensor:
    """A shared trunk saw the steps when they were acted on; what is left to see are the observations after the ends.

    The atoms at blanks are 0; nobody reads them.
    """
    hidden, cells = rollout.memory_after_steps()
    step, env = layout.ends()
    below = layout.positions[step, env] + 1
    after, _ = trunk.step(obs[below, env], (hidden[:, step, env], cells[:, step, env]))
    atoms = policy.raw_atoms(torch.cat((hidden[-1].flatten(0, 1), after)))  # [K, T B + E, M]
    strips = atoms.new_zeros(len(atoms), *layout.resets.shape[:2], atoms.shape[-1])
    places = torch.cat((layout.places, below * obs.shape[1] + env))
    strips.flatten(1, 2).index_copy_(1, places, atoms)
    return strips


def _targets(
    rollout: Rollout,
    atoms: Tensor,
    returns: Tensor,
    layout: SequenceLayout,
    critic: CriticConfig,
    gamma: float,
    generator: torch.Generator,
) -> Tensor:
    """Raw target atoms for each critic, ``[K, T, B, M]``; each learns from its own predictions."""
    if critic.target == "lambda_return":
        return returns.expand(len(atoms), *returns.shape).unsqueeze(-1)
    following = [layout.gather(one, offset=1).sort(dim=-1).values for one in atoms]
    ends = (rollout.terminated, rollout.truncated)
    return torch.stack(
        [sr_lambda_targets(rollout.rewards, one, *ends, gamma, critic.value_lambda, generator) for one in following]
    )


def _standardise(advantages: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum().clamp(min=1e-8)
    mean = (weights * advantages).sum() / total
    variance = (weights * (advantages - mean).square()).sum() / total
    return (advantages - mean) / (variance.sqrt() + 1e-8)
