"""The adversary of a policy: connects robust/, which knows tensors only, with policies and batches (SA-PPO)."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tailguard.optim.layout import FlatParameters
from tailguard.ppo.actions import Categorical, Gaussian
from tailguard.ppo.compiled.attack import CompiledObjective, RobustKL, View, compiled_actor
from tailguard.ppo.networks import RecurrentTrunk, State
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Batch
from tailguard.robust.attacks import DifferentiableObjective, Objective, Perturbed, divergence, frozen, low_value, toward
from tailguard.robust.bounds import certifiable, gaussian_kl_bound, largest_move
from tailguard.robust.config import SAPPOConfig
from tailguard.robust.regulariser import RobustRegulariser
from tailguard.validation import require

Features = Callable[[Tensor], Tensor]
# Observations whose certified bounds are averaged for the log; more would only cost time.
CERTIFIED = 512


class Adversary(RobustRegulariser):
    """The adversary of a policy. Observations in a batch are normalised, so its radius is in normalised units.

    :param policy: under attack.
    :param config: the settings.
    :param seed: of the searches.
    :param flat: the parameters of the policy, for compiled passes where they cover it; None leaves everything to torch.
    """

    def __init__(
        self, policy: DistributionalPolicy, config: SAPPOConfig, seed: int, flat: FlatParameters | None = None
    ) -> None:
        require(
            policy.observations.plain, "adversary", config, f"None for {policy.observation_space}: it moves a Box's numbers"
        )
        super().__init__(config, policy.own_size, policy.budget.features, seed)
        self.policy, self._flat = policy, flat
        self._mixed: tuple[Tensor, Perturbed] | None = None
        clean, self._attacked = (None if flat is None else compiled_actor(policy, flat) for _ in range(2))
        self._robust_kl = None if clean is None or self._attacked is None else RobustKL(clean, self._attacked, _box_of(policy))

    def seen(self, batch: Batch) -> Batch:
        """Return the batch for PPO's own loss: the clean one, or with ``mode="mix"`` one with some samples perturbed."""
        if self.config.mode == "regularise":
            return batch
        which = self.choose(batch.size).to(batch.weights.device)
        part = self._part(batch, which)
        with torch.no_grad():
            clean = self._dist_params(part)
        worst = self._search(part, clean)
        self._mixed = which, worst
        return dataclasses.replace(batch, obs=batch.obs.index_copy(batch.weights.dim() - 1, which, worst.inputs))

    def loss(self, batch: Batch, dist_params: Tensor | None, share: Tensor) -> Tensor:
        """Return SA-PPO's penalty for a part of a minibatch, to be added to PPO's loss.

        :param batch: clean.
        :param dist_params: the policy's distribution parameters for the batch that :meth:`seen` returned, with a gradient; None
            computes them for the chosen samples only.
        :param share: each sample's share of the minibatch.
        """
        mixed, self._mixed = self._mixed, None
        which = self.choose(batch.size).to(share.device) if mixed is None else mixed[0]
        part, axis = self._part(batch, which), share.dim() - 1
        seen = self._dist_params(part) if dist_params is None else dist_params.index_select(axis, which)
        if mixed is None:
            clean, worst = seen, self._search(part, seen)
            perturbed = self.policy.dist_params(_actor_features(self.policy, part, self.config.memory)(worst.inputs))
        else:
            clean, worst, perturbed = self._dist_params(part), mixed[1], seen
        return self.penalty(worst, clean, perturbed, self._kl, share, share.index_select(axis, which))

    def add_gradient(self, batch: Batch, share: Tensor) -> None:
        """Add the gradient of :meth:`loss` to the flat gradient; with ``mode="regularise"`` only.

        :param batch: clean.
        :param share: each sample's share of the minibatch.
        """
        if self._robust_kl is None or self._flat is None:
            self.loss(batch, None, share).backward()
            return
        which = self.choose(batch.size)
        part, chosen_share = self._part(batch, which), share.index_select(share.dim() - 1, which)
        clean, perturbed = self._robust_kl.clean, self._robust_kl.perturbed
        outputs = clean.forward(
            part.obs, View((part.actor_hidden, part.actor_cell), part.resets if part.resets.numel() else None)
        )
        view = self._view(part)
        worst = self._search(part, clean.dist_params(torch.from_numpy(outputs)).reshape(*chosen_share.shape, -1), view)
        perturbed.forward(worst.inputs, view)
        mass = float(chosen_share.sum())
        scale = float(share.sum()) / mass if mass > 0.0 else 0.0  # the chosen stand for all samples
        total = self._robust_kl.add_gradient(chosen_share, self.config.coefficient * scale, self._flat.gradient)
        self.record(worst, torch.tensor(total * scale), share, chosen_share > 0.0)

    def step_objective(self, kind: Literal["kl", "action"], inputs: Tensor, state: State) -> Objective:
        """Return the adversarial objective for the present inputs of some environments.

        :param kind: ``kl`` or ``action``, as in the settings.
        :param inputs: ``[B, D]``, clean.
        :param state: of the actor before them.
        """
        policy, action_dist = self.policy, self.policy.action_dist
        if self._attacked is not None:
            view = View(state)
            clean = self._attacked.dist_params(torch.from_numpy(self._attacked.forward(inputs, view).copy()))
            return CompiledObjective(self._attacked, self._goal(kind, clean), kind == "kl", view)
        with torch.no_grad():
            clean = policy.act(inputs, state)[0]

        def dist_params_of(perturbed: Tensor) -> Tensor:
            return policy.act(perturbed, state)[0]

        if kind == "kl":
            return divergence(dist_params_of, clean, action_dist.surprise)
        return toward(dist_params_of, action_dist.log_prob, least_likely_actions(policy, clean))

    def search(self, inputs: Tensor, objective: Objective, epsilon: float) -> Perturbed:
        """Return the worst inputs that the search finds within a radius, with constant parameters."""
        if isinstance(objective, DifferentiableObjective):
            return self.perturbation.attack(inputs, objective, epsilon)
        with frozen(self.policy.parameters()):
            return self.perturbation.attack(inputs, objective, epsilon)

    def certificate(self, batch: Batch) -> dict[str, float]:
        """Return bounds that hold for every perturbation of the present radius; empty for recurrent policies.

        The bound of the KL is that of a Gaussian whose standard deviation does not depend on the observation.
        """
        policy = self.policy
        if self.epsilon <= 0.0 or policy.recurrent or policy.features_extractor is not None or not certifiable(policy.actor):
            return {}
        with torch.no_grad():
            sample = batch.obs[:: -(-len(batch.obs) // CERTIFIED)].to(policy.device)
            moves = largest_move(policy.actor, sample, self.perturbation.radius(self.epsilon).to(sample))
            bounds = {"sa_ppo/certified_move": moves.mean().item()}
            if isinstance(policy.action_dist, Gaussian) and policy.log_std is not None:
                bounds["sa_ppo/certified_kl"] = gaussian_kl_bound(moves, policy.log_std).mean().item()
        return bounds

    def _kl(self, clean: Tensor, perturbed: Tensor) -> Tensor:
        """Return KL(clean || perturbed) of clipped means, without a gradient in a state-independent standard deviation.

        Means beyond the same end of the box are the same action. The standard deviation does not depend on the observation, and
        the cheapest way to a small KL would be a large one: actions that are all noise.
        """
        if self.policy.free_std:
            clean, perturbed = (
                torch.cat((self._box(mean), std.detach()), -1) for mean, std in (clean.chunk(2, -1), perturbed.chunk(2, -1))
            )
        return self.policy.action_dist.kl(clean, perturbed)

    def _box(self, mean: Tensor) -> Tensor:
        box = _box_of(self.policy)
        return mean if box is None else torch.maximum(torch.minimum(mean, box[1].to(mean)), box[0].to(mean))

    def _part(self, batch: Batch, which: Tensor) -> Batch:
        return dataclasses.replace(batch, targets=torch.empty(0), old_atoms=torch.empty(0)).take(which)

    def _dist_params(self, batch: Batch) -> Tensor:
        return self.policy.dist_params(_actor_features(self.policy, batch, "whole")(batch.obs))

    def _view(self, batch: Batch) -> View:
        """Return the context of the search: sequences as a whole, or every step after its clean history."""
        start, trunk = (batch.actor_hidden, batch.actor_cell), self.policy.actor_trunk
        if trunk is None:
            return View(start)
        if self.config.memory == "whole":
            return View(start, batch.resets, batch.weights)
        with torch.no_grad():
            return View(trunk.states_before(self.policy.encode_for_actor(batch.obs), batch.resets, start))

    def _search(self, batch: Batch, clean: Tensor, view: View | None = None) -> Perturbed:
        kind = self.config.objective
        if self._attacked is not None and kind != "value":
            goal = self._goal(kind, clean.detach())
            return self.perturb(batch.obs, CompiledObjective(self._attacked, goal, kind == "kl", view or self._view(batch)))
        with frozen(self.policy.parameters()):
            return self.perturb(batch.obs, self._objective(batch, clean))

    def _goal(self, kind: Literal["kl", "action"], clean: Tensor) -> Tensor:
        """Return the goal of the compiled objective: the mode to get away from, or the least likely actions to get to."""
        return self.policy.action_dist.mode(clean) if kind == "kl" else least_likely_actions(self.policy, clean)

    def _objective(self, batch: Batch, clean: Tensor) -> Objective:
        policy, scope = self.policy, self.config.memory
        if self.config.objective == "kl":
            features = _actor_features(policy, batch, scope)
            # Not the KL, which is minimal at the clean policy: half of all starts would climb towards more of the same choice.
            each = divergence(lambda inputs: policy.dist_params(features(inputs)), clean, policy.action_dist.surprise)
        elif self.config.objective == "action":
            features, target = _actor_features(policy, batch, scope), least_likely_actions(policy, clean.detach())
            each = toward(lambda inputs: policy.dist_params(features(inputs)), policy.action_dist.log_prob, target)
        else:
            features = _critic_features(policy, batch, scope)
            each = low_value(lambda inputs: values(policy, features(inputs)))
        if policy.recurrent and scope == "whole":  # a perturbed step changes all that follow: sequences are scored as a whole
            return lambda inputs: (batch.weights * each(inputs)).sum(0)
        return each


def values(policy: DistributionalPolicy, features: Tensor) -> Tensor:
    """Return the mean return over all critics, in normalised units, for trunk features ``[..., F]``."""
    atoms = policy.return_dist.atoms(policy.critic_outputs(features))
    return (atoms @ policy.return_dist.masses).mean(0)


def least_likely_actions(policy: DistributionalPolicy, dist_params: Tensor) -> Tensor:
    """Return the least likely alternatives of each row, or the end of the box farther from the mean."""
    action_dist = policy.action_dist
    if isinstance(action_dist, Categorical):
        return action_dist.mode(-dist_params)
    mean = action_dist.mode(dist_params)
    # Before a tanh, or in an unbounded box, one unit to the other side.
    low, high = _box_of(policy) or (torch.tensor(-1.0), torch.tensor(1.0))
    return torch.where(mean > 0.5 * (low + high).to(mean), low.to(mean), high.to(mean))


def _box_of(policy: DistributionalPolicy) -> tuple[Tensor, Tensor] | None:
    """Return the lower and upper ends where actions are clipped, flat; None where they are not."""
    gaussian = policy.action_dist
    if not isinstance(gaussian, Gaussian) or gaussian.squash:
        return None
    low, high = (torch.as_tensor(end.reshape(-1)) for end in (gaussian.low, gaussian.high))
    return (low, high) if bool(low.isfinite().all() and high.isfinite().all()) else None


def _actor_features(policy: DistributionalPolicy, batch: Batch, scope: str) -> Features:
    if policy.actor_trunk is None:
        return policy.encode_for_actor
    start = (batch.actor_hidden, batch.actor_cell)
    return _through(policy.actor_trunk, policy.encode_for_actor, batch, start, scope)


def _critic_features(policy: DistributionalPolicy, batch: Batch, scope: str) -> Features:
    if policy.shares_trunk:
        return _actor_features(policy, batch, scope)
    start = (batch.critic_hidden, batch.critic_cell)
    if policy.critic_trunk is None:
        return lambda inputs: policy.critic_features(policy.encode_for_critics(inputs), batch.resets, start)
    return _through(policy.critic_trunk, policy.encode_for_critics, batch, start, scope)


def _through(trunk: RecurrentTrunk, encode: Features, batch: Batch, start: State, scope: str) -> Features:
    """Return a function from perturbed sequences to features: each step after its clean history, or all steps perturbed."""
    if scope == "whole":
        return lambda inputs: trunk.sequence(encode(inputs), batch.resets, start)
    with torch.no_grad():
        before = trunk.states_before(encode(batch.obs), batch.resets, start)

    def step(inputs: Tensor) -> Tensor:
        features, _ = trunk.step(encode(inputs).flatten(0, 1), before)
        return features.reshape(*inputs.shape[:2], -1)

    return step
