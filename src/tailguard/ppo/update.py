"""The gradient steps of one update: PPO's loss on minibatches, its gradient scaled and clipped, and the KL that may stop it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.optim.vgs import VarianceGradientScaler
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.compiled.update import CompiledGradient, compiled_gradient
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.diagnostics import gradient_norm, gradient_norms
from tailguard.ppo.experience import Batch
from tailguard.ppo.loss import MEASURES, Coefficients, policy_loss
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.schedules import KLControl
from tailguard.validation import require

# What is measured of every minibatch, before the norms of its gradient.
LOSSES = (*MEASURES, "value_loss")
KL = LOSSES.index("approx_kl")


@dataclass(frozen=True)
class UpdateSettings:
    """How an update goes; read anew for each, so that a change from outside counts at once.

    :param n_epochs: passes over the batch.
    :param minibatch: sequences or samples per step.
    :param microbatch: sequences or samples per backward pass.
    :param max_grad_norm: gradients are scaled down to this norm.
    :param vf_coef: weight of the critics' loss.
    :param policy: clip range, and weights of entropy and KL.
    """

    n_epochs: int
    minibatch: int
    microbatch: int
    max_grad_norm: float
    vf_coef: float
    policy: Coefficients


class UpdateLog(NamedTuple):
    """What happened in an update.

    :param minibatches: of each, its :data:`LOSSES`, the norm of each critic's gradient and that of all.
    :param epochs: passes in which a step was taken, the last one not counted when the KL stopped it.
    :param warnings: names of what went wrong.
    """

    minibatches: list[Tensor]
    epochs: int
    warnings: set[str]


class Update:
    """Moves a policy along the gradient of PPO's loss.

    :param policy: with its optimizer over the one tensor of `flat`.
    :param flat: its parameters and their gradients.
    :param critic: how the critics learn.
    :param vgs: shortens steps where gradients are noisy; disabled, it does nothing.
    :param kl: may stop the update.
    :param adversary: perturbs observations and adds to the loss what that does to the policy; None where there is none.
    """

    def __init__(
        self,
        policy: DistributionalPolicy,
        flat: FlatParameters,
        critic: CriticConfig,
        vgs: VarianceGradientScaler,
        kl: KLControl,
        adversary: Adversary | None = None,
    ) -> None:
        self.policy, self.flat, self.critic, self.vgs, self.kl = policy, flat, critic, vgs, kl
        self.fused = compiled_gradient(policy, flat, critic)
        self.adversary = adversary
        self.critic_spans = [flat.span(f"critics.{k}.") for k in range(critic.n_critics)]

    def run(self, everything: Batch, settings: UpdateSettings, generator: torch.Generator) -> UpdateLog:
        """All gradient steps; fewer when the KL says stop.

        :param generator: shuffles.
        """
        log: list[Tensor] = []
        warnings: set[str] = set()
        epochs = 0
        fused = self._fused_now(settings)
        for _ in range(settings.n_epochs):
            before = len(log)
            for batch in everything.shuffled(settings.minibatch, generator):
                total_weight = float(batch.weights.sum())
                if not total_weight:  # nothing to learn from; a step would only follow old momentum
                    warnings.add("warn/empty_batch")
                    continue
                metrics = self._gradient(batch, total_weight, settings, fused)
                values = metrics.tolist()
                if not all(map(math.isfinite, values)):  # a step with it would make every weight NaN
                    warnings.add("warn/non_finite_gradient")
                    continue
                log.append(metrics)
                if self.kl.should_stop(values[KL]):
                    return UpdateLog(log, epochs, warnings)
                self._step(values[-1], settings.max_grad_norm)
            if len(log) == before:
                warnings.add("warn/empty_epoch")
            else:
                epochs += 1
        return UpdateLog(log, epochs, warnings)

    def _step(self, norm: float, max_grad_norm: float) -> None:
        """One step of the optimizer with the gradient of this norm: measured, scaled, clipped."""
        if self.vgs.config.enabled:
            self.vgs.scale_gradients()
            norm = gradient_norm(self.flat.gradient)
        if norm + 1e-6 > max_grad_norm:
            self.flat.gradient.mul_(max_grad_norm / (norm + 1e-6))
        self.policy.optimizer.step()
        self.vgs.step()

    def _fused_now(self, settings: UpdateSettings) -> CompiledGradient | None:
        """The compiled gradient, unless microbatches, a mixed batch, frozen parameters or hooks need torch's."""
        adversary = self._present_adversary()
        mixed = adversary is not None and adversary.config.mode == "mix"
        whole = settings.microbatch >= settings.minibatch and not mixed
        return self.fused if self.fused is not None and whole and self.fused.is_needed_whole() else None

    def _present_adversary(self) -> Adversary | None:
        """The adversary, unless this update goes without."""
        return self.adversary if self.adversary is not None and self.adversary.active else None

    def _gradient(
        self, batch: Batch, total_weight: float, settings: UpdateSettings, fused: CompiledGradient | None = None
    ) -> Tensor:
        """Accumulate the gradient of a minibatch; returns its losses, the norms of the critics' gradients and that of all."""
        self.flat.zero_grad()
        self.vgs.noise_scale.abandon()  # what is left of a minibatch that was skipped
        if fused is not None:
            losses = fused.gradient(batch, total_weight, settings.policy, settings.vf_coef)
            if (adversary := self._present_adversary()) is not None:
                adversary.add_gradient(batch, batch.weights / total_weight)
            return torch.tensor([*losses, *gradient_norms(self.flat.gradient, self.critic_spans)])
        measures, several = torch.zeros(len(LOSSES)), settings.microbatch < settings.minibatch
        for part in batch.split(settings.microbatch):
            loss, measured = self._loss(part, total_weight, settings)
            loss.backward()
            measures += measured
            samples = part.weights.sum().item()
            if several and samples > 0.0 and self.vgs.config.enabled:
                self.vgs.observe_microbatch(samples)
        return torch.cat((measures, torch.tensor(gradient_norms(self.flat.gradient, self.critic_spans))))

    def _loss(self, batch: Batch, total_weight: float, settings: UpdateSettings) -> tuple[Tensor, Tensor]:
        """The loss of a part of a minibatch, as its share of the minibatch's loss, and what to log of it."""
        adversary = self._present_adversary()
        seen = batch if adversary is None else adversary.seen(batch)
        actor_features, critic_features = seen.features(self.policy)
        share = batch.weights / total_weight
        outputs = self.policy.action_outputs(actor_features)
        policy, measures = policy_loss(
            self.policy.distribution, outputs, batch.outputs, batch.actions, batch.advantages, share, settings.policy
        )
        old_atoms = batch.old_atoms if batch.old_atoms.numel() else None
        errors = self.critic.errors(self.policy.law, self.policy.critic_outputs(critic_features), batch.targets, old_atoms)
        critic = (share * errors).sum() / len(errors)
        loss = policy + settings.vf_coef * critic
        if adversary is not None:
            loss = loss + adversary.loss(batch, outputs, share)
        return loss, torch.cat((measures, critic.detach().reshape(1)))


def require_fitting(name: str, size: int, total: int, unit: int) -> None:
    """Refuse a batch size that does not fit, with the nearest that does.

    :param total: what is to be cut into batches of `size`.
    :param unit: steps that cannot be torn apart: a sequence, or a single one.
    """
    fits = size >= 1 and size % unit == 0 and total % size == 0
    legal = [n for n in range(unit, total + 1, unit) if total % n == 0]
    nearest = min(legal, key=lambda n: abs(n - size), default=total)
    what = "samples" if unit == 1 else "whole sequences"
    require(fits, name, size, f"a divisor of {total} made of {what} of {unit}; the nearest is {nearest}")
