"""Between the adversary of robust/, which knows tensors, and the update, which knows policies and batches."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tailguard.ppo.actions import Categorical, Gaussian
from tailguard.ppo.compiled.attack import CompiledObjective, SteadyPair, View, compiled_actor
from tailguard.ppo.experience import Batch
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.trunk import LstmTrunk, State
from tailguard.robust.attacks import DifferentiableObjective, Objective, Perturbed, divergence, fear, frozen, toward
from tailguard.robust.bounds import certifiable, gaussian_kl_bound, largest_move
from tailguard.robust.config import SAPPOConfig
from tailguard.robust.regulariser import RobustRegulariser

Features = Callable[[Tensor], Tensor]
# Observations whose bounds are logged: a mean over more would cost time and tell no more.
CERTIFIED = 512


class Adversary(RobustRegulariser):
    """The adversary of a policy. Observations in a batch are normalised already, so its radius is in normalised units.

    :param policy: under attack.
    :param config: the settings.
    :param seed: of the searches.
    :param flat: the parameters of the policy, for compiled passes where they cover it; None leaves everything to torch.
    """

    def __init__(
        self, policy: DistributionalPolicy, config: SAPPOConfig, seed: int, flat: FlatParameters | None = None
    ) -> None:
        super().__init__(config, policy.own_size, policy.budget.features, seed)
        self.policy, self._flat = policy, flat
        self._mixed: tuple[Tensor, Perturbed] | None = None
        clean, self._moved = (None if flat is None else compiled_actor(policy, flat) for _ in range(2))
        self._pair = None if clean is None or self._moved is None else SteadyPair(clean, self._moved, _box_of(policy))

    def seen(self, batch: Batch) -> Batch:
        """The batch that PPO's own loss looks at: the clean one, or a mixture in which a share of the samples is perturbed."""
        if self.config.mode == "regularise":
            return batch
        which = self.choose(batch.size)
        part = self._part(batch, which)
        with torch.no_grad():
            clean = self._outputs(part)
        found = self._search(part, clean)
        self._mixed = which, found
        return batch._replace(obs=batch.obs.index_copy(batch.weights.dim() - 1, which, found.inputs))

    def loss(self, batch: Batch, outputs: Tensor | None, share: Tensor) -> Tensor:
        """What is added to PPO's loss of a part of a minibatch.

        :param batch: the clean one.
        :param outputs: what the policy says of the batch that :meth:`seen` returned; None where nobody has asked it with a
            gradient, and it is asked about the chosen samples only.
        :param share: each sample's share of the minibatch.
        """
        mixed, self._mixed = self._mixed, None
        which = self.choose(batch.size) if mixed is None else mixed[0]
        part, axis = self._part(batch, which), share.dim() - 1
        given = self._outputs(part) if outputs is None else outputs.index_select(axis, which)
        if mixed is None:
            clean, found = given, self._search(part, given)
            perturbed = self.policy.action_outputs(_actor_features(self.policy, part, self.config.memory)(found.inputs))
        else:
            clean, found, perturbed = self._outputs(part), mixed[1], given
        return self.penalty(found, clean, perturbed, self._kl, share, share.index_select(axis, which))

    def add_gradient(self, batch: Batch, share: Tensor) -> None:
        """Add the gradient of :meth:`loss` to the one that is there; with ``mode="regularise"`` only.

        :param batch: the clean one.
        :param share: each sample's share of the minibatch.
        """
        if self._pair is None or self._flat is None:
            self.loss(batch, None, share).backward()
            return
        which = self.choose(batch.size)
        part, some = self._part(batch, which), share.index_select(share.dim() - 1, which)
        clean, moved = self._pair.clean, self._pair.moved
        said = clean.forward(part.obs, View((part.actor_hidden, part.actor_cell), part.resets if part.resets.numel() else None))
        view = self._view(part)
        found = self._search(part, clean.described(torch.from_numpy(said)).reshape(*some.shape, -1), view)
        moved.forward(found.inputs, view)
        mass = float(some.sum())
        stands_for = float(share.sum()) / mass if mass > 0.0 else 0.0
        total = self._pair.gradient(some, self.config.coefficient * stands_for, self._flat.gradient)
        self.record(found, torch.tensor(total * stands_for), share, some > 0.0)

    def of_step(self, kind: Literal["kl", "action"], inputs: Tensor, state: State) -> Objective:
        """What to maximise by moving the present inputs of some environments.

        :param inputs: ``[B, D]``, clean.
        :param state: of the actor before them.
        """
        policy, law = self.policy, self.policy.distribution
        if self._moved is not None:
            view = View(state)
            clean = self._moved.described(torch.from_numpy(self._moved.forward(inputs, view).copy()))
            return CompiledObjective(self._moved, self._goal(kind, clean), kind == "kl", view)
        with torch.no_grad():
            clean = policy.act(inputs, state)[0]

        def outputs_of(moved: Tensor) -> Tensor:
            return policy.act(moved, state)[0]

        if kind == "kl":
            return divergence(outputs_of, clean, law.surprise)
        return toward(outputs_of, law.log_prob, unwanted_actions(policy, clean))

    def search(self, inputs: Tensor, objective: Objective, epsilon: float) -> Perturbed:
        """The worst inputs within a radius, with parameters that stand still."""
        if isinstance(objective, DifferentiableObjective):
            return self.perturbation.attack(inputs, objective, epsilon)
        with frozen(self.policy.parameters()):
            return self.perturbation.attack(inputs, objective, epsilon)

    def certificate(self, batch: Batch) -> dict[str, float]:
        """Bounds that no perturbation of the present radius can break; empty for policies with memory.

        The bound of the KL is that of a Gaussian whose deviation does not depend on the observation.
        """
        policy = self.policy
        if self.epsilon <= 0.0 or policy.recurrent or not certifiable(policy.actor):
            return {}
        with torch.no_grad():
            some = batch.obs[:: -(-len(batch.obs) // CERTIFIED)]
            moves = largest_move(policy.actor, some, self.perturbation.radius(self.epsilon).to(some))
            bounds = {"sa_ppo/certified_move": moves.mean().item()}
            if isinstance(policy.distribution, Gaussian) and policy.log_std is not None:
                bounds["sa_ppo/certified_kl"] = gaussian_kl_bound(moves, policy.log_std).mean().item()
        return bounds

    def _kl(self, clean: Tensor, perturbed: Tensor) -> Tensor:
        """KL(clean || perturbed) of what the environment gets, with no gradient in a deviation that is the same everywhere.

        Means beyond the same end of the box are one action. The deviation no observation moves, and the cheapest way to a small
        KL would be a large one: actions that are all noise.
        """
        if self.policy.free_std:
            clean, perturbed = (
                torch.cat((self._box(mean), std.detach()), -1) for mean, std in (clean.chunk(2, -1), perturbed.chunk(2, -1))
            )
        return self.policy.distribution.kl(clean, perturbed)

    def _box(self, mean: Tensor) -> Tensor:
        box = _box_of(self.policy)
        return mean if box is None else torch.maximum(torch.minimum(mean, box[1].to(mean)), box[0].to(mean))

    def _part(self, batch: Batch, which: Tensor) -> Batch:
        return batch._replace(targets=torch.empty(0), old_atoms=torch.empty(0)).take(which)

    def _outputs(self, batch: Batch) -> Tensor:
        return self.policy.action_outputs(_actor_features(self.policy, batch, "whole")(batch.obs))

    def _view(self, batch: Batch) -> View:
        """How the search looks at a batch: sequences as a whole, or every step after a history that was true."""
        start, trunk = (batch.actor_hidden, batch.actor_cell), self.policy.actor_trunk
        if trunk is None:
            return View(start)
        if self.config.memory == "whole":
            return View(start, batch.resets, batch.weights)
        with torch.no_grad():
            return View(trunk.states_before(batch.obs, batch.resets, start))

    def _search(self, batch: Batch, clean: Tensor, view: View | None = None) -> Perturbed:
        kind = self.config.objective
        if self._moved is not None and kind != "value":
            goal = self._goal(kind, clean.detach())
            return self.perturb(batch.obs, CompiledObjective(self._moved, goal, kind == "kl", view or self._view(batch)))
        with frozen(self.policy.parameters()):
            return self.perturb(batch.obs, self._objective(batch, clean))

    def _goal(self, kind: Literal["kl", "action"], clean: Tensor) -> Tensor:
        """What an adversary wants to get away from, or where it wants to get."""
        return self.policy.distribution.mode(clean) if kind == "kl" else unwanted_actions(self.policy, clean)

    def _objective(self, batch: Batch, clean: Tensor) -> Objective:
        policy, memory = self.policy, self.config.memory
        if self.config.objective == "kl":
            features = _actor_features(policy, batch, memory)
            # The KL itself has a valley at the clean policy: half of all starts would climb towards more of the same choice.
            each = divergence(lambda inputs: policy.action_outputs(features(inputs)), clean, policy.distribution.surprise)
        elif self.config.objective == "action":
            features, unwanted = _actor_features(policy, batch, memory), unwanted_actions(policy, clean.detach())
            each = toward(lambda inputs: policy.action_outputs(features(inputs)), policy.distribution.log_prob, unwanted)
        else:
            features = _critic_features(policy, batch, memory)
            each = fear(lambda inputs: values(policy, features(inputs)))
        if policy.recurrent and memory == "whole":  # a step's move changes all that follow: sequences are judged as a whole
            return lambda inputs: (batch.weights * each(inputs)).sum(0)
        return each


def values(policy: DistributionalPolicy, features: Tensor) -> Tensor:
    """The mean return by all critics together, in their own units, from trunk features ``[..., F]``."""
    atoms = policy.law.atoms(policy.critic_outputs(features))
    return (atoms @ policy.law.masses).mean(0)


def unwanted_actions(policy: DistributionalPolicy, outputs: Tensor) -> Tensor:
    """The action that each row likes least: the least likely choices, or the end of the box farther from the mean."""
    distribution = policy.distribution
    if isinstance(distribution, Categorical):
        return distribution.mode(-outputs)
    mean = distribution.mode(outputs)
    # Before a tanh, or in a box without ends, a unit to the other side points the way.
    low, high = _box_of(policy) or (torch.tensor(-1.0), torch.tensor(1.0))
    return torch.where(mean > 0.5 * (low + high).to(mean), low.to(mean), high.to(mean))


def _box_of(policy: DistributionalPolicy) -> tuple[Tensor, Tensor] | None:
    """Where actions are clipped, each end flat; None where they are not."""
    gaussian = policy.distribution
    if not isinstance(gaussian, Gaussian) or gaussian.squash:
        return None
    low, high = (torch.as_tensor(end.reshape(-1)) for end in (gaussian.low, gaussian.high))
    return (low, high) if bool(low.isfinite().all() and high.isfinite().all()) else None


def _actor_features(policy: DistributionalPolicy, batch: Batch, memory: str) -> Features:
    if policy.actor_trunk is None:
        return lambda inputs: inputs
    return _through(policy.actor_trunk, batch, (batch.actor_hidden, batch.actor_cell), memory)


def _critic_features(policy: DistributionalPolicy, batch: Batch, memory: str) -> Features:
    if policy.actor_trunk is None:
        return lambda inputs: inputs
    if policy.critic_trunk is None:
        return _actor_features(policy, batch, memory)
    return _through(policy.critic_trunk, batch, (batch.critic_hidden, batch.critic_cell), memory)


def _through(trunk: LstmTrunk, batch: Batch, start: State, memory: str) -> Features:
    """What a memory makes of perturbed sequences: of their last step only, or of all their steps."""
    if memory == "whole":
        return lambda inputs: trunk.sequence(inputs, batch.resets, start)
    with torch.no_grad():
        before = trunk.states_before(batch.obs, batch.resets, start)

    def step(inputs: Tensor) -> Tensor:
        features, _ = trunk.step(inputs.flatten(0, 1), before)
        return features.reshape(*inputs.shape[:2], -1)

    return step
