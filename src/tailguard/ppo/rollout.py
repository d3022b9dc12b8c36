"""A rollout: its storage, the steps that fill it, and the batch that is learnt from it.

Storage is ``[T, B, ...]``, preallocated and written in place. For training it is laid out once as sequences ``[L, B, ...]`` in
which every step is followed by the observation that it led to. Inside an episode that is the next step itself. Where an
episode ended it is the final observation, and after it comes a reset step that sets the recurrent state to 0 (see networks.py):

    s0 s1 s2 | final | reset | s0 s1 ...        one row of the sequence per observation

So the critic sees every observation once, with the recurrent state that belongs to it, in one call; the value after step i
stands at the position of step i plus one, ended or not; and final observations and resets are rows of weight 0 in the loss.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.actions import ActionDistribution, masked
from tailguard.ppo.config import CriticConfig
from tailguard.ppo.critic import aggregate_values
from tailguard.ppo.networks import RecurrentTrunk, State
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.quantiles import ascending
from tailguard.ppo.risk import FinishedReturns, RiskObjective
from tailguard.ppo.targets import gae, sr_lambda_targets

# ------------------------------------------------------------------------------------------------------------- storage


@dataclass(frozen=True)
class SequenceLayout:
    """The rows of a rollout's steps in its sequences.

    :param positions: ``[T, B]`` row of each step; the observation after it is one row below.
    :param places: ``[T B]`` the same in sequences whose rows and environments are one axis, ``[L B, ...]``.
    :param resets: ``[L, B, 1]`` 1 where the recurrent state is reset.
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
        sequences = values.new_zeros(len(self.resets), *values.shape[1:])
        sequences.flatten(0, 1).index_copy_(0, self.places, values.flatten(0, 1))
        return sequences

    def gather(self, sequences: Tensor, offset: int = 0) -> Tensor:
        """Read ``[T, B, ...]`` from sequences ``[L, B, ...]`` at the steps, or `offset` rows below them."""
        places = self.places + offset * sequences.shape[1] if offset else self.places
        return sequences.flatten(0, 1).index_select(0, places).view(*self.positions.shape, *sequences.shape[2:])

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return step and environment, ``[E]`` each, of the last step and of the last step of each episode."""
        followed = self.positions[1:] == self.positions[:-1] + 1
        last = followed.new_zeros(1, followed.shape[1])
        step, env = torch.cat((followed, last)).logical_not().nonzero(as_tuple=True)
        return step, env


class Rollout:
    """T steps of B environments, preallocated.

    :param n_steps: T.
    :param n_envs: B.
    :param obs_size: numbers per observation, D.
    :param action_dist: the distribution of the actions.
    :param obs_dtype: type of the numbers of an observation.
    """

    def __init__(
        self,
        n_steps: int,
        n_envs: int,
        obs_size: int,
        action_dist: ActionDistribution,
        obs_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.n_steps, self.n_envs, self.action_dist = n_steps, n_envs, action_dist
        self.obs = torch.zeros(n_steps + 1, n_envs, obs_size, dtype=obs_dtype)
        self.actions = torch.zeros(n_steps, n_envs, math.prod(action_dist.action_shape))
        self.dist_params = torch.zeros(n_steps, n_envs, action_dist.n_params)
        self.rewards = torch.zeros(n_steps, n_envs)
        self.terminated = torch.zeros(n_steps, n_envs, dtype=torch.bool)
        self.truncated = torch.zeros(n_steps, n_envs, dtype=torch.bool)
        self.period_ended = torch.zeros(n_steps, n_envs, dtype=torch.bool)
        self.part_period = torch.zeros(n_steps, n_envs, dtype=torch.bool)
        self.weights = torch.ones(n_steps, n_envs)
        self.starts_with_episode = torch.ones(n_envs, dtype=torch.bool)
        # Rows and arrays on the same memory: indexing a tensor takes several times as long, and this is done at every step.
        self._obs_rows, self._obs = self.obs.unbind(), self.obs.numpy()
        self._actions = self.actions.numpy()
        self._step_arrays = [tensor.numpy() for tensor in (self.rewards, self.terminated, self.truncated, self.weights)]
        self._finals: list[tuple[int, Tensor, Tensor]] = []
        self._states: list[State] = []
        self.filled, self.observed = 0, -1  # steps that are stored, and the last row that holds an observation
        self.evaluate: Callable[[], Experience] | None = None  # who evaluates a full rollout
        self.shaped: Callable[[Tensor], Tensor | dict[str, Tensor]] | None = None  # gives rows the shape of the space
        self._evaluated: Experience | None = None

    def reset(self, starts: NDArray[np.bool_] | None = None) -> None:
        """Make room for new steps; what is stored is overwritten one by one.

        :param starts: ``[B]`` true where the first step starts an episode; None: everywhere.
        """
        self.starts_with_episode = torch.ones(self.n_envs, dtype=torch.bool) if starts is None else torch.tensor(starts)
        self.filled, self.observed = 0, -1
        self._finals.clear()
        self._states.clear()
        self.weights.fill_(1.0)
        self.period_ended.fill_(False)
        self.part_period.fill_(False)
        self._evaluated = None

    def observe(self, obs: NDArray[Any]) -> Tensor:
        """Store the observation that the next action is for; after the last step the one that follows it."""
        row = self._obs[self.filled]
        row[:] = obs.reshape(row.shape)
        self.observed = self.filled
        return self._obs_rows[self.filled]

    def actions_now(self) -> NDArray[np.float32]:
        """Return a copy of the actions that were written last, for this step."""
        now: NDArray[np.float32] = self._actions[self.filled].copy()
        return now

    def add(self, step: StepArrays, state: State | None = None) -> None:
        """Store what the environments answered to the actions that :class:`Acting` has written, and move on to the next step.

        :param state: recurrent state of the actor after the step, ``[n_layers, B, H]`` twice; None where nobody needs it.
        """
        if self.filled == self.n_steps:
            raise ValueError(f"the rollout is full: it holds {self.n_steps} steps; call reset() first")
        t = self.filled
        rewards, terminated, truncated, weights = self._step_arrays
        rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
        if step.sample_weights is not None:
            weights[t] = step.sample_weights
        if step.period_ended is not None:
            self.period_ended[t] = torch.from_numpy(step.period_ended)
        if step.part_period is not None:
            self.part_period[t] = torch.from_numpy(step.part_period)
        if state is not None:
            self._states.append(state)
        if len(step.ended):
            # After a termination nobody looks at the final observation; whatever it holds must not get into an LSTM.
            cut = step.truncated[step.ended].reshape(-1, 1)
            finals = np.where(cut, step.final_obs.reshape(len(step.ended), -1), 0)
            self._finals.append((t, torch.tensor(step.ended), torch.tensor(finals, dtype=self.obs.dtype)))
        self.filled += 1

    def states_after_steps(self) -> State:
        """Return the actor's hidden and cell states after each step, before any is reset, ``[n_layers, T, B, H]`` each."""
        hidden, cells = (torch.stack(parts, dim=1) for parts in zip(*self._states, strict=True))
        return hidden, cells

    def ended_since_reset(self) -> NDArray[np.bool_]:
        """Return ``[B]`` true where an episode has ended in the steps stored so far."""
        return (self.terminated | self.truncated)[: self.filled].any(0).numpy()

    def starts(self) -> Tensor:
        """Return ``[T, B]`` true where a step starts an episode."""
        ended = (self.terminated | self.truncated)[:-1]
        return torch.cat((self.starts_with_episode.unsqueeze(0), ended))

    def return_starts(self) -> Tensor:
        """Return ``[T, B]`` true where a step starts an episode or a period; at the first step only episodes are known."""
        starts = self.starts()
        starts[1:] |= self.period_ended[:-1]
        return starts

    def return_ends(self) -> tuple[Tensor, Tensor]:
        """Return ``[T, B]`` twice: where returns end with a step, and where they are cut after it.

        The end of a period is an end of the return, like a termination: nothing that comes later counts. It is none of the
        sequence: recurrent states run through it.
        """
        return self.terminated | self.period_ended, self.truncated

    def sequence_layout(self) -> tuple[SequenceLayout, Tensor]:
        """Return the layout of this rollout and its observations in it, ``[L, B, D]``."""
        layout = SequenceLayout.of(self.terminated | self.truncated)
        following = self.obs[1:]
        if self._finals:
            following = following.clone()
            for t, ended, finals in self._finals:
                following[t, ended] = finals
        sequences = layout.spread(self.obs[:-1])
        sequences.flatten(0, 1).index_copy_(0, layout.places + self.n_envs, following.flatten(0, 1))
        return layout, sequences

    # What callbacks read from SB3's rollout buffer when a rollout has ended, beside `actions` and `rewards`. The critics see a
    # rollout once, after its last step; whoever asks first makes them look, and training takes what they said.

    def experience(self) -> "Experience":
        """Return what is learnt from the full rollout, evaluated once."""
        if self.filled < self.n_steps or self.evaluate is None:
            raise ValueError(f"values are known when a rollout has ended; it has {self.filled} of {self.n_steps} steps")
        if self._evaluated is None:
            self._evaluated = self.evaluate()
        return self._evaluated

    @property
    def values(self) -> NDArray[np.float32]:
        """``[T, B]`` mean returns that the critics predict, in raw units."""
        return self.experience().values.numpy()

    @property
    def returns(self) -> NDArray[np.float32]:
        """``[T, B]`` lambda-returns."""
        return self.experience().returns.numpy()

    @property
    def advantages(self) -> NDArray[np.float32]:
        """``[T, B]`` advantages of the mean return, not standardised."""
        return self.returns - self.values

    @property
    def observations(self) -> NDArray[Any] | dict[str, NDArray[Any]]:
        """``[T, B, ...]`` the observations that the actions were for; by key where the space is a Dict."""
        rows = self.obs[:-1].flatten(0, 1)
        parts = rows if self.shaped is None else self.shaped(rows)
        if isinstance(parts, dict):
            return {key: part.unflatten(0, (self.n_steps, self.n_envs)).numpy() for key, part in parts.items()}
        shaped: NDArray[Any] = parts.unflatten(0, (self.n_steps, self.n_envs)).numpy()
        return shaped

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """``[T, B]`` log-probabilities of the actions."""
        return self.action_dist.log_prob(self.dist_params, self.actions).numpy()

    @property
    def episode_starts(self) -> NDArray[np.float32]:
        """``[T, B]`` 1 where a step starts an episode."""
        return self.starts().float().numpy()

    @property
    def buffer_size(self) -> int:
        """Steps per environment, T."""
        return self.n_steps

    @property
    def pos(self) -> int:
        """The next step that will be stored."""
        return self.filled

    @property
    def full(self) -> bool:
        """True if all steps are stored."""
        return self.filled == self.n_steps

    def size(self) -> int:
        """Return the number of steps per environment that are stored."""
        return self.filled


class NotFinite(ValueError):
    """A value of an environment or of a model that is NaN or infinite."""


def finite(name: str, values: Any, step: int, envs: NDArray[np.intp] | None = None) -> NDArray[Any]:
    """Return the values ``[B, ...]``, or raise an error that names the first environment whose value is not finite."""
    array = np.asarray(values)
    if not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0]
        env = bad if envs is None else envs[bad]
        raise NotFinite(f"the {name} of env {env} at step {step} of the rollout is not finite: {array[bad]}")
    return array


# -------------------------------------------------------------------------------------------------------------- acting


class Acting:
    """The steps of a policy in a rollout, with torch's networks; ``compiled/acting.py`` has a faster way for most policies.

    :param policy: the policy; its weights stand still during a rollout.
    """

    def __init__(self, policy: DistributionalPolicy) -> None:
        self._policy, self._action_dist = policy, policy.action_dist

    def begin(self, rollout: Rollout) -> None:
        """Get ready for the first step of a rollout.

        The randomness of all its actions is drawn here, since that of a single step takes a good part as long.
        """
        self._noise = self._action_dist.noise(rollout.dist_params)
        self._noise_of_steps = self._noise.unbind()
        self._actions, self._dist_params = rollout.actions.numpy(), rollout.dist_params.numpy()

    def step(self, rollout: Rollout, obs: Tensor, state: State, masks: NDArray[np.bool_] | None = None) -> State:
        """Write the next row of actions and of the parameters of their distribution; return the recurrent state after it.

        :param obs: ``[B, obs_size]`` as the rollout has stored them.
        :param state: recurrent state before them, already reset where an episode starts.
        :param masks: ``[B, n_params]``, false for actions that are not possible now; None for none.
        """
        t = rollout.filled
        with torch.inference_mode():
            dist_params, state = self._policy.act(self._policy.acting_inputs(obs), state)
            dist_params = masked(self._action_dist, dist_params.cpu(), masks)
            self._actions[t] = self._action_dist.draw(dist_params, self._noise_of_steps[t]).numpy()
            self._dist_params[t] = dist_params.numpy()
        return state


class SdeActing(Acting):
    """Acting with gSDE: the noise of an action is a function of the state, the same one for some steps (Raffin et al. 2021).

    :param policy: with ``use_sde``.
    :param sample_freq: steps after which the function is drawn anew; -1 draws it at the start of a rollout only.
    """

    def __init__(self, policy: DistributionalPolicy, sample_freq: int) -> None:
        super().__init__(policy)
        self._sample_freq = sample_freq

    @override
    def begin(self, rollout: Rollout) -> None:
        self._actions, self._dist_params = rollout.actions.numpy(), rollout.dist_params.numpy()
        self._weights = self._draw(rollout.n_envs)

    @override
    def step(self, rollout: Rollout, obs: Tensor, state: State, masks: NDArray[np.bool_] | None = None) -> State:
        t = rollout.filled
        if self._sample_freq > 0 and t and t % self._sample_freq == 0:
            self._weights = self._draw(rollout.n_envs)
        with torch.inference_mode():
            features, state = self._policy.actor_features(self._policy.acting_inputs(obs), state)
            latent, mean = self._policy.latent(features)
            noise = torch.bmm(latent.unsqueeze(1), self._weights).squeeze(1)
            self._actions[t] = (mean + noise).cpu().numpy()
            self._dist_params[t] = self._policy.sde_params(latent, mean).cpu().numpy()
        return state

    def _draw(self, n_envs: int) -> Tensor:
        """Return the weights of the noise in each environment, ``[B, F, A]``."""
        with torch.no_grad():
            std = self._policy.sde_std()
            return std * torch.randn(n_envs, *std.shape).to(std)


# --------------------------------------------------------------------------------------------------------------- batch


EMPTY = torch.empty(0)
# The metadata of a field whose tensor has an axis of critics in front of the others.
PER_CRITIC = {"axes_in_front": 1}


@dataclass(frozen=True)
class Batch:
    """Steps to learn from: sequences ``[L, B, ...]`` of a recurrent policy, otherwise samples ``[M, ...]``.

    The sequences or samples stand along the last axis of `weights`. In every other tensor it is the same axis, or the next one
    where there is an axis of critics in front.

    :param obs: normalised observations.
    :param actions: actions taken.
    :param dist_params: parameters of the distribution that they were drawn from.
    :param advantages: advantages, standardised unless that is left to minibatches.
    :param weights: weights of the samples; 0 where there is nothing to learn.
    :param targets: target atoms of each critic, ``[K, ..., M]``.
    :param old_atoms: atoms that each critic predicted before the update, ``[K, ..., M]``; empty where nobody needs them.
    :param resets: ``[L, B, 1]``, 1 where the recurrent state is reset; empty without one, like all that follow.
    :param actor_hidden: hidden state of the actor before the first row, ``[n_layers, B, H]``.
    :param actor_cell: cell state of the actor before the first row.
    :param critic_hidden: hidden state of the critics before the first row.
    :param critic_cell: cell state of the critics before the first row.
    """

    obs: Tensor
    actions: Tensor
    dist_params: Tensor
    advantages: Tensor
    weights: Tensor
    targets: Tensor = field(metadata=PER_CRITIC)
    old_atoms: Tensor = field(metadata=PER_CRITIC)
    resets: Tensor = EMPTY
    actor_hidden: Tensor = EMPTY
    actor_cell: Tensor = EMPTY
    critic_hidden: Tensor = EMPTY
    critic_cell: Tensor = EMPTY

    @property
    def size(self) -> int:
        """Number of sequences, or of samples."""
        return self.weights.shape[-1]

    def features(self, policy: DistributionalPolicy) -> tuple[Tensor, Tensor]:
        """Return what the policy's trunks make of the observations: for the actor and for the critics."""
        actor, critic = policy.encode(self.obs)
        if policy.actor_trunk is not None:
            actor = policy.actor_trunk.sequence(actor, self.resets, (self.actor_hidden, self.actor_cell))
        if policy.shares_trunk:
            return actor, actor
        return actor, policy.critic_features(critic, self.resets, (self.critic_hidden, self.critic_cell))

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; itself if it is there."""
        if device == self.weights.device:
            return self
        return Batch(*(getattr(self, name).to(device) for name in AXES_IN_FRONT))

    def standardised(self) -> "Batch":
        """Return the batch with advantages of mean 0 and deviation 1; a single sample keeps its own."""
        if int((self.weights > 0.0).sum()) < 2:
            return self
        return dataclasses.replace(self, advantages=standardise(self.advantages, self.weights))

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator["Batch"]:
        """Yield all sequences or samples in random order, `size` at a time."""
        return self._parts(torch.randperm(self.size, generator=generator), size)

    def split(self, size: int) -> Iterator["Batch"]:
        """Yield parts of `size` sequences or samples each, in order."""
        return iter([self]) if size >= self.size else self._parts(torch.arange(self.size), size)

    def take(self, which: Tensor) -> "Batch":
        """Return some of the sequences or samples, in the order of `which`."""
        axis, chosen, which = self.weights.dim() - 1, {}, which.to(self.weights.device)
        for name, in_front in AXES_IN_FRONT.items():
            tensor: Tensor = getattr(self, name)
            chosen[name] = tensor.index_select(axis + in_front, which) if tensor.numel() else tensor
        return Batch(**chosen)

    def _parts(self, order: Tensor, size: int) -> Iterator["Batch"]:
        """Yield the sequences or samples in this order, `size` at a time, and what is left of them.

        Every tensor is put in order once and cut into contiguous parts ``[..., size, ...]``, which takes one copy of each.
        """
        whole = len(order) - len(order) % size
        parts = order[:whole].reshape(-1, size)
        indices: dict[tuple[int, ...], Tensor] = {}  # of all rows, by the axes in front of the sequences or samples
        by_field: list[tuple[Tensor, ...]] = []
        for name, in_front in AXES_IN_FRONT.items():
            tensor: Tensor = getattr(self, name)
            axis = self.weights.dim() - 1 + in_front
            if not tensor.numel():
                by_field.append((tensor,) * len(parts))
                continue
            lead = tuple(tensor.shape[:axis])
            if lead not in indices:
                rows = torch.arange(math.prod(lead)).unsqueeze(1) * tensor.shape[axis]
                indices[lead] = (rows + parts.unsqueeze(1)).flatten()
            chosen = tensor.flatten(0, axis).index_select(0, indices[lead])
            by_field.append(chosen.view(len(parts), *lead, size, *tensor.shape[axis + 1 :]).unbind())
        for tensors in zip(*by_field, strict=True):
            yield Batch(*tensors)
        if whole < len(order):
            yield self.take(order[whole:])


AXES_IN_FRONT: dict[str, int] = {each.name: each.metadata.get("axes_in_front", 0) for each in dataclasses.fields(Batch)}


@dataclass(frozen=True)
class Experience:
    """A rollout ready for training.

    :param batch: all of it, with raw targets.
    :param layout: the rows of its steps in the sequences of the batch.
    :param values: ``[T, B]`` mean returns from the states, by the critics together.
    :param per_critic: ``[K, T, B]`` mean returns by each critic.
    :param returns: ``[T, B]`` raw lambda-returns.
    :param weights: ``[T, B]`` sample weights.
    :param start_atoms: ``[K, M, N]`` raw atoms at the M starts of episodes and periods.
    :param critic_state_after: recurrent state of the critics after the last step; None where they have none of their own.
    :param finished: returns of the periods or episodes that ended, and the alphas of their tails; None for a neutral objective.
    """

    batch: Batch
    layout: SequenceLayout
    values: Tensor
    per_critic: Tensor
    returns: Tensor
    weights: Tensor
    start_atoms: Tensor
    critic_state_after: State | None
    finished: FinishedReturns | None

    def at_steps(self, rows: Tensor) -> Tensor:
        """Return ``[T, B]`` from one number for each row of the batch."""
        if rows.dim() == 1:
            return rows.reshape(self.weights.shape)
        steps = self.layout.gather(rows)  # [C, N B], where the steps of an environment were cut into N parts
        return cast(Tensor, steps.unflatten(1, (-1, self.weights.shape[1])).transpose(0, 1).flatten(0, 1))

    def normalised(self, policy: DistributionalPolicy) -> Batch:
        """Return the batch with targets in the units that the critics have now."""
        encode, batch = policy.return_scale.encode, self.batch
        return dataclasses.replace(batch, targets=encode(batch.targets), old_atoms=encode(batch.old_atoms))


# -------------------------------------------------------------------------------------------- from rollout to experience


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
    normalize_advantage: bool = True,
    keep_atoms: bool = False,
    sequence_length: int | None = None,
) -> Experience:
    """Evaluate the critics on every observation of the rollout in one call, then compute advantages and targets.

    :param gamma: discount of the returns that the critics predict.
    :param normalize_advantage: standardise the advantages.
    :param keep_atoms: keep what the critics predict now, which value clipping needs.
    :param sequence_length: steps of the sequences that a recurrent policy learns from, a divisor of T; None is T.
    """
    with torch.no_grad():
        layout, raw_obs = rollout.sequence_layout()
        obs = policy.inputs(raw_obs)
        atoms, critic_after = _atoms(policy, obs, layout, rollout, critic_state)  # [K, L, B, M]
        masses = policy.return_dist.masses.cpu()
        means = atoms @ masses
        per_critic = torch.stack([layout.gather(values) for values in means])
        values = aggregate_values(critic, means)
        now, after = layout.gather(values), layout.gather(values, offset=1)
        advantages = gae(rollout.rewards, now, after, *rollout.return_ends(), gamma, gae_lambda)
        returns = advantages + now
        finished = None
        if objective.config.objective != "neutral":
            columns = raw_obs[..., policy.own_size :]
            worth = aggregate_values(critic, objective.values(atoms, masses, columns))
            advantages = _risk_advantages(rollout, objective, layout, columns, worth, gamma, gae_lambda)
            finished = _finished_returns(rollout, objective, layout, columns, atoms, gamma)
        targets = _targets(rollout, atoms, returns, layout, critic, gamma, generator)
        standardised = standardise(advantages, rollout.weights) if normalize_advantage else advantages
        steps = (rollout.actions, rollout.dist_params, standardised, rollout.weights)
        old_atoms = torch.stack([layout.gather(each) for each in atoms]) if keep_atoms else EMPTY
        states = (*actor_state, *critic_state)
        learnt = LearntSteps(layout, obs, steps, targets, old_atoms, states)
        if policy.recurrent and sequence_length is not None and sequence_length < rollout.n_steps:
            learnt = _cut(policy, learnt, rollout.terminated | rollout.truncated, sequence_length)
        batch = _lay_out(policy, learnt)
        starts = rollout.return_starts()
        start_atoms = torch.stack([layout.gather(each)[starts] for each in atoms])
    return Experience(batch, learnt.layout, now, per_critic, returns, rollout.weights, start_atoms, critic_after, finished)


def _atoms(
    policy: DistributionalPolicy, obs: Tensor, layout: SequenceLayout, rollout: Rollout, critic_state: State
) -> tuple[Tensor, State | None]:
    """Return raw atoms at every row of the sequences, and the critics' recurrent state after the last step.

    The state is None where the critics have none of their own.
    """
    if policy.shares_trunk:
        return _acted_atoms(policy, cast(RecurrentTrunk, policy.actor_trunk), obs, layout, rollout), None
    encoded, resets = policy.encode_for_critics(obs), layout.resets.to(policy.device)
    if policy.critic_trunk is None:
        return policy.raw_atoms(policy.critic_features(encoded, resets, critic_state)), None
    features, after = policy.critic_trunk.sequence_and_states(encoded, resets, critic_state, layout.positions[-1])
    return policy.raw_atoms(features), after


def _acted_atoms(
    policy: DistributionalPolicy, trunk: RecurrentTrunk, obs: Tensor, layout: SequenceLayout, rollout: Rollout
) -> Tensor:
    """Return raw atoms of critics on the actor's trunk, which saw the steps when they were acted on.

    What is left to see are the observations after the ends. The atoms at resets are 0; nobody reads them.
    """
    hidden, cells = rollout.states_after_steps()
    step, env = layout.ends()
    below = layout.positions[step, env] + 1
    after, _ = trunk.step(policy.encode_for_actor(obs[below, env]), (hidden[:, step, env], cells[:, step, env]))
    atoms = policy.raw_atoms(torch.cat((hidden[-1].flatten(0, 1), after)))  # [K, T B + E, M]
    sequences = atoms.new_zeros(len(atoms), *layout.resets.shape[:2], atoms.shape[-1])
    places = torch.cat((layout.places, below * obs.shape[1] + env))
    sequences.flatten(1, 2).index_copy_(1, places, atoms)
    return sequences


def _risk_advantages(
    rollout: Rollout,
    objective: RiskObjective,
    layout: SequenceLayout,
    columns: Tensor,
    worth: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Return the advantages of a risk objective.

    :param columns: ``[L, B, 2 or 3]`` what was appended to the observations, as sequences.
    :param worth: ``[L, B]`` what the objective expects from each of them.
    """
    at_steps = layout.gather(columns)
    rewards = objective.rewards(rollout.rewards, at_steps)
    ends = rollout.return_ends()
    advantages = gae(rewards, layout.gather(worth), layout.gather(worth, offset=1), *ends, gamma, gae_lambda)
    return _same_scale(advantages, rollout.weights, at_steps[..., 2]) if objective.budget.alpha_conditioned else advantages


def _same_scale(advantages: Tensor, weights: Tensor, alphas: Tensor) -> Tensor:
    """Standardise the advantages of each tail by themselves, since those of a small tail would drown among the others."""
    scaled = advantages.clone()
    for alpha in alphas.unique():
        chosen = alphas == alpha
        scaled[chosen] = standardise(advantages[chosen], weights[chosen])
    return scaled


def standardise(advantages: Tensor, weights: Tensor) -> Tensor:
    """Return advantages of weighted mean 0 and weighted standard deviation 1."""
    total = weights.sum().clamp(min=1e-8)
    mean = (weights * advantages).sum() / total
    variance = (weights * (advantages - mean).square()).sum() / total
    return (advantages - mean) / (variance.sqrt() + 1e-8)


def _finished_returns(
    rollout: Rollout, objective: RiskObjective, layout: SequenceLayout, columns: Tensor, atoms: Tensor, gamma: float
) -> FinishedReturns:
    """Return the returns that ended here: a number each, and for truncated ones all atoms of their distribution.

    Returns of parts of periods are none: their spread is that of fewer bars, and the VaR would come out too small.
    """
    ended, truncated = rollout.return_ends()
    step, env = ((ended | truncated) & ~rollout.part_period).nonzero(as_tuple=True)
    rows = layout.positions[step, env]
    last = columns[rows, env].double()  # before the last step
    running_return, discount = last[:, 0], objective.budget.discount(last)
    total = running_return + discount * rollout.rewards[step, env]
    cut = (truncated & ~ended)[step, env]
    to_come = ascending(atoms[:, rows[cut] + 1, env[cut]]).mean(0)
    distributions = to_come * (gamma * discount[cut]).unsqueeze(-1) + total[cut].unsqueeze(-1)
    alphas = last[:, 2] if last.shape[-1] == 3 else torch.ones_like(total)
    return FinishedReturns(*(numbers.numpy() for numbers in (total[~cut], distributions, alphas[~cut], alphas[cut])))


def _targets(
    rollout: Rollout,
    atoms: Tensor,
    returns: Tensor,
    layout: SequenceLayout,
    critic: CriticConfig,
    gamma: float,
    generator: torch.Generator,
) -> Tensor:
    """Return raw target atoms for each critic, ``[K, T, B, M]``; each learns from its own predictions."""
    if critic.target == "lambda_return":
        return returns.expand(len(atoms), *returns.shape).unsqueeze(-1)
    following = [ascending(layout.gather(each, offset=1)) for each in atoms]
    ends = rollout.return_ends()
    return torch.stack(
        [sr_lambda_targets(rollout.rewards, each, *ends, gamma, critic.value_lambda, generator) for each in following]
    )


class LearntSteps(NamedTuple):
    """The steps of a rollout with all that a policy learns from them.

    :param layout: rows of the steps in sequences.
    :param obs: the networks' inputs, as sequences ``[L, B, D]``.
    :param steps: actions, distribution parameters, advantages and weights, ``[T, B, ...]`` each.
    :param targets: target atoms of each critic, ``[K, T, B, M]``.
    :param old_atoms: atoms that each critic predicts now, ``[K, T, B, M]``; empty where nobody needs them.
    :param states: hidden and cell states of actor and critics before the first row, ``[n_layers, B, H]`` each.
    """

    layout: SequenceLayout
    obs: Tensor
    steps: tuple[Tensor, ...]
    targets: Tensor
    old_atoms: Tensor
    states: tuple[Tensor, ...]


def _lay_out(policy: DistributionalPolicy, learnt: LearntSteps) -> Batch:
    """Return the steps as sequences, or as samples."""
    layout, obs, steps, targets, old_atoms, states = learnt
    if policy.recurrent:
        of_critics = [torch.stack([layout.spread(each) for each in x]) if x.numel() else x for x in (targets, old_atoms)]
        return Batch(*(obs, *map(layout.spread, steps), *of_critics, layout.resets, *(state.cpu() for state in states)))
    of_critics = [x.flatten(1, 2) if x.numel() else x for x in (targets, old_atoms)]
    return Batch(*(step.flatten(0, 1) for step in (layout.gather(obs), *steps)), *of_critics)


def _cut(policy: DistributionalPolicy, learnt: LearntSteps, dones: Tensor, length: int) -> LearntSteps:
    """Cut the steps of every environment into N parts of `length`, for minibatches that are smaller than its steps.

    Every part becomes a column of its own, ``[T, B] -> [length, N B]``, and begins with the recurrent state of its environment.

    :param dones: ``[T, B]``, true where a step ended an episode.
    """

    def cut(steps: Tensor) -> Tensor:
        return cast(Tensor, steps.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2))

    layout = SequenceLayout.of(cut(dones))
    targets, old_atoms = (
        torch.stack([cut(each) for each in x]) if x.numel() else x for x in (learnt.targets, learnt.old_atoms)
    )
    encoded = policy.encode(learnt.obs)
    states = [learnt.states[:2], learnt.states[2:]]
    for i, trunk in enumerate((policy.actor_trunk, policy.critic_trunk)):
        states[i] = states[0] if trunk is None else _states_at_parts(trunk, encoded[i], learnt.layout, states[i], length)
    return LearntSteps(
        layout,
        layout.spread(cut(learnt.layout.gather(learnt.obs))),
        tuple(map(cut, learnt.steps)),
        targets,
        old_atoms,
        (*states[0], *states[1]),
    )


def _states_at_parts(
    trunk: RecurrentTrunk, encoded: Tensor, layout: SequenceLayout, start: tuple[Tensor, ...], length: int
) -> tuple[Tensor, ...]:
    """Return the recurrent states with which parts of `length` steps begin, ``[n_layers, N B, H]`` twice."""
    rows, envs = layout.resets.shape[:2]
    before = trunk.states_before(encoded, layout.resets.to(encoded.device), (start[0], start[1]))
    first, env = layout.positions[::length], torch.arange(envs)  # [N, B], [B]
    return tuple(part.cpu().unflatten(1, (rows, envs))[:, first, env].flatten(1, 2) for part in before)
