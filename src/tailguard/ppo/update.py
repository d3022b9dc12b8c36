"""The gradient of PPO's loss on a minibatch, compiled or by autograd, and the optimizer step with it."""

import math
import warnings
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tailguard.optim.kernels import sum_of_squares
from tailguard.optim.layout import FlatParameters
from tailguard.optim.vgs import VarianceGradientScaler
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.compiled.applies import update_applies
from tailguard.ppo.compiled.update import CompiledGradient
from tailguard.ppo.config import CriticConfig
from tailguard.ppo.critic import critic_errors
from tailguard.ppo.loss import MEASURES, Coefficients, policy_loss
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Batch

# Measurements of every minibatch, before the norms of its gradient.
LOSSES = (*MEASURES, "value_loss")
LOSS_TERMS = ("policy_gradient_loss", "entropy", "kl", "value_loss")  # what the loss is made of
KL = LOSSES.index("approx_kl")
ACCUMULATE = "torch::autograd::AccumulateGrad"  # the node of a graph that adds to the gradient of a tensor


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of the loss during one update.

    :param policy: clip range, and weights of entropy and KL.
    :param vf_coef: weight of the critics' loss.
    :param microbatch: sequences or samples per backward pass; a minibatch of more is split.
    :param compiled: take the compiled gradient and not autograd's; see :func:`update_applies`.
    :param value_clip: how far a prediction may move, in standard deviations of the return; None does not clip.
    """

    policy: Coefficients
    vf_coef: float
    microbatch: int
    compiled: bool
    value_clip: float | None = None


class Update:
    """The gradient steps of a policy along PPO's loss.

    :param policy: with its optimizer over the one tensor of `flat`.
    :param flat: its parameters and their gradients.
    :param critic: settings of the critics.
    :param vgs: shortens steps where gradients are noisy; disabled, it does nothing.
    :param adversary: perturbs observations and adds to the loss what that does to the policy; None where there is none.
    """

    def __init__(
        self,
        policy: DistributionalPolicy,
        flat: FlatParameters,
        critic: CriticConfig,
        vgs: VarianceGradientScaler,
        adversary: Adversary | None = None,
    ) -> None:
        self.policy, self.flat, self.critic, self.vgs, self.adversary = policy, flat, critic, vgs, adversary
        self.compiled: CompiledGradient | None = None
        if update_applies(policy, clips_values=critic.clip_range is not None):
            self.compiled = CompiledGradient(policy, flat)
        spans = [flat.span(prefix) for prefix in policy.critic_prefixes()]
        self._measured = [*(flat.gradient[span] for span in spans), flat.gradient]
        self._frozen: list[slice] = []
        self._connected = False  # whether it was checked that every parameter gets a gradient

    def gradient(self, batch: Batch, total_weight: float, settings: UpdateSettings) -> Tensor:
        """Fill the gradient of a minibatch; return its :data:`LOSSES`, the norms of the critics' gradients and that of all.

        :param total_weight: sum of the minibatch's weights, above 0.
        """
        self.flat.zero_grad()
        if self.vgs.config.enabled:
            self.vgs.noise_scale.abandon()  # what is left of a minibatch that was skipped
        if settings.compiled and self.compiled is not None:
            self._frozen = []
            losses = self.compiled.gradient(batch, total_weight, settings.policy, settings.vf_coef)
            if self.adversary is not None and self.adversary.active:
                self.adversary.add_gradient(batch, batch.weights / total_weight)
        else:
            self._frozen = self.flat.frozen_spans()
            losses = self._autograd(batch, total_weight, settings)
        return torch.tensor([*losses, *map(_norm, self._measured)])

    def step(self, norm: float, max_grad_norm: float) -> None:
        """Take one step of the optimizer: gradients measured and scaled (VGS), then clipped.

        :param norm: L2 norm of the whole gradient.
        """
        if self.vgs.config.enabled:
            self.vgs.scale_gradients()
            norm = _norm(self.flat.gradient)
        if norm + 1e-6 > max_grad_norm:
            self.flat.gradient.mul_(max_grad_norm / (norm + 1e-6))
        kept = [(values[span], values[span].clone()) for span in self._frozen for values in self._moved_values()]
        self.policy.optimizer.step()
        for values, before in kept:  # an optimizer follows old momentum where there is no gradient
            values.copy_(before)
        if self.vgs.config.enabled:
            self.vgs.step()

    def _moved_values(self) -> list[Tensor]:
        """Return the flat parameters, and what the optimizer remembers of each of them."""
        state = (value for of_parameter in self.policy.optimizer.state.values() for value in of_parameter.values())
        shape = self.flat.tensor.shape
        return [self.flat.tensor.data, *(value for value in state if isinstance(value, Tensor) and value.shape == shape)]

    def _warn_of_unconnected(self, loss: Tensor) -> None:
        """Name the parameters that the loss does not depend on: they would never learn."""
        reached = _leaves(loss)
        named = self.policy.named_parameters()
        silent = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in reached]
        if silent:
            warnings.warn(
                f"these parameters do not take part in the loss and never learn: {', '.join(silent)}. Put networks before the "
                "policy into a features_extractor_class, and freeze what shall stay (requires_grad_(False))",
                stacklevel=2,
            )
        self._connected = True

    def _autograd(self, batch: Batch, total_weight: float, settings: UpdateSettings) -> list[float]:
        """Accumulate the gradient over the microbatches of a minibatch; return the :data:`LOSSES`."""
        measures, several = torch.zeros(len(LOSSES)), settings.microbatch < batch.size
        for part in batch.split(settings.microbatch):
            loss, measured = self._loss(part.to(self.policy.device), total_weight, settings)
            if not self._connected:
                self._warn_of_unconnected(loss)
            loss.backward()
            measures += measured.cpu()
            samples = part.weights.sum().item()
            if several and samples > 0.0 and self.vgs.config.enabled:
                self.vgs.observe_microbatch(samples)
        return measures.tolist()

    def _loss(self, batch: Batch, total_weight: float, settings: UpdateSettings) -> tuple[Tensor, Tensor]:
        """Return the loss of a part of a minibatch, as its share of the minibatch's loss, and what to log of it."""
        adversary = self.adversary if self.adversary is not None and self.adversary.active else None
        seen = batch if adversary is None else adversary.seen(batch)
        actor_features, critic_features = seen.features(self.policy)
        share = batch.weights / total_weight
        dist_params = self.policy.dist_params(actor_features)
        policy, measures = policy_loss(
            self.policy.action_dist, dist_params, batch.dist_params, batch.actions, batch.advantages, share, settings.policy
        )
        old_atoms = batch.old_atoms if batch.old_atoms.numel() else None
        outputs = self.policy.critic_outputs(critic_features)
        errors = critic_errors(settings.value_clip, self.policy.return_dist, outputs, batch.targets, old_atoms)
        critic = (share * errors).sum() / len(errors)
        loss = policy + settings.vf_coef * critic
        if adversary is not None:
            loss = loss + adversary.loss(batch, dist_params, share)
        return loss, torch.cat((measures, critic.detach().reshape(1)))


def _leaves(loss: Tensor) -> set[int]:
    """Return the identities of the tensors that the graph of a loss ends in."""
    seen, leaves, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATE:
            leaves.add(id(cast(Any, node).variable))
        waiting.extend(following for following, _ in node.next_functions)
    return leaves


def _norm(gradient: Tensor) -> float:
    """Return the L2 norm of a flat float32 gradient, rounded to float32."""
    return float(np.float32(math.sqrt(sum_of_squares(gradient.cpu().numpy()))))
