"""The gradient of a minibatch in compiled passes from end to end, for the networks that most agents have.

It computes what ``Update`` computes with torch's autograd, in the same order and with the same measures: trunks, heads, the
policy's loss, the critics' loss, and back. What it does not cover goes the other way; :func:`compiled_gradient` is the one
place where that is decided, once per model.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tailguard.ppo.actions import Categorical
from tailguard.ppo.compiled import losses as losses
from tailguard.ppo.compiled.networks import CompiledLstm, CompiledMlp, Memory, has_kernel
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.experience import Batch
from tailguard.ppo.loss import Coefficients, policy_rows
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy
from tailguard.ppo.return_distribution import MeanReturn, QuantileReturns

Array = NDArray[np.float32]
NOTHING: Array = np.empty((0, 0), np.float32)


def compiled_gradient(policy: DistributionalPolicy, flat: FlatParameters, critic: CriticConfig) -> "CompiledGradient | None":
    """The compiled gradient for this policy, or None where torch has to find it.

    Covered: float32 on the CPU; LSTM trunks of one layer, or none; heads with tanh or ReLU; any actions but those with a
    state-dependent std; critics of one number, or of quantiles with kappa = 0; no clipping of the critics.
    """
    plain = type(policy) in (DistributionalPolicy, RecurrentDistributionalPolicy)  # a subclass may compute something else
    in_memory = flat.tensor.dtype == torch.float32 and flat.tensor.is_cpu
    trunks = [one for one in (policy.actor_trunk, policy.critic_trunk) if one is not None]
    heads = [policy.actor, *policy.critics]
    actions = isinstance(policy.distribution, Categorical) or policy.free_std
    law = policy.law
    learnt = type(law) is MeanReturn or (type(law) is QuantileReturns and law.kappa == 0.0)
    covered = (
        policy.compiled
        and plain
        and in_memory
        and all(trunk.n_layers == 1 for trunk in trunks)
        and all(isinstance(head, nn.Sequential) and has_kernel(head) for head in heads)
        and actions
        and learnt
        and critic.clip_range is None
    )
    return CompiledGradient(policy, flat) if covered else None


class Rows(NamedTuple):
    """A minibatch as arrays: M samples, or those of strips ``[L, B]`` one row after the other, M = L B.

    :param obs: ``[M, D]``, or ``[L, B, D]`` with memory.
    :param actions: ``[M, A]``.
    :param outputs: ``[M, n]``.
    :param advantages: ``[M]``.
    :param share: ``[M]``, each sample's share of the minibatch.
    :param targets: ``[K, M, J]``.
    :param blanks: ``[L, B]``.
    :param memory: hidden and cell states of actor and critics before the first row, ``[B, H]`` each; empty without memory.
    """

    obs: Array
    actions: Array
    outputs: Array
    advantages: Array
    share: Array
    targets: Array
    resets: Array
    memory: list[Array]

    @classmethod
    def of(cls, batch: Batch, total_weight: float) -> "Rows":
        """On the same memory, but for the shares of the samples, whose weights have this sum."""
        obs, actions, outputs, advantages, weights, targets, _, resets, *states = (one.numpy() for one in batch)
        m = weights.size
        return cls(
            obs,
            actions.reshape(m, -1),
            outputs.reshape(m, -1),
            advantages.reshape(m),
            np.divide(weights.reshape(m), np.float32(total_weight), dtype=np.float32),
            targets.reshape(len(targets), m, -1),
            resets.reshape(weights.shape) if resets.size else NOTHING,
            [state[0] for state in states if state.size],
        )


class CompiledGradient:
    """Writes the gradient of PPO's loss into the flat gradient; made by :func:`compiled_gradient`.

    :param policy: that it covers.
    :param flat: its parameters and their gradients.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters) -> None:
        self._policy = policy
        memory = Memory()
        self._actor_trunk, self._critic_trunk = (
            None if trunk is None else CompiledLstm(flat, name, trunk.hidden_size, memory)
            for name, trunk in (("actor_trunk", policy.actor_trunk), ("critic_trunk", policy.critic_trunk))
        )
        self._actor = CompiledMlp(flat, "actor", policy.actor, memory)
        named = {f"critics.{k}": head for k, head in enumerate(policy.critics) if isinstance(head, nn.Sequential)}
        self._critics = [CompiledMlp(flat, name, head, memory) for name, head in named.items()]
        self._log_std = None if policy.log_std is None else policy.log_std.detach().numpy()
        self._log_std_slope = flat.gradient[flat.slices["log_std"]].numpy() if policy.log_std is not None else None
        law = policy.law
        self._levels = law.levels.numpy() if isinstance(law, QuantileReturns) else None
        self._masses = law.masses.numpy()

    def is_needed_whole(self) -> bool:
        """Whether everything is learnt, and nobody has hung a hook on a parameter: only autograd leaves out and calls."""
        return all(one.requires_grad and not one._backward_hooks for one in self._policy.parameters())

    def gradient(self, batch: Batch, total_weight: float, coefficients: Coefficients, vf_coef: float) -> list[float]:
        """Fill the gradient of a minibatch's loss; returns the policy's measures and the critics' loss.

        :param total_weight: the sum of the minibatch's weights.
        :param vf_coef: weight of the critics' loss.
        """
        rows = Rows.of(batch, total_weight)
        actor, critic = self._actor_trunk, self._critic_trunk
        features, into = rows.obs, NOTHING
        if actor is not None:
            features, into = actor.forward(rows.obs, rows.resets, *rows.memory[:2]), actor.into_features
        measures = self._policy_loss(rows, features, coefficients)
        self._actor.backward(into)
        if critic is not None and actor is not None:
            actor.backward()
            features, into = critic.forward(rows.obs, rows.resets, *rows.memory[2:]), critic.into_features
        critic_loss = 0.0
        for k, head in enumerate(self._critics):
            critic_loss += self._critic_loss(head, features, rows.targets[k], rows.share, vf_coef / len(self._critics))
            head.backward(into, add=k > 0 or critic is None)
        last = critic or actor
        if last is not None:
            last.backward()
        return [*measures.tolist(), critic_loss / len(self._critics)]

    def _policy_loss(self, rows: "Rows", features: Array, coefficients: Coefficients) -> NDArray[np.float64]:
        """Outputs of the actor, and what its loss says of them."""
        raw = self._actor.forward(features)
        outputs, slopes = raw, self._actor.into_outputs
        if self._log_std is not None:
            outputs, slopes = np.empty(rows.outputs.shape, np.float32), np.empty(rows.outputs.shape, np.float32)
            losses.beside_constant(raw, self._log_std, outputs)
        given = rows.outputs, rows.actions, rows.advantages, rows.share
        measures = policy_rows(self._policy.distribution, outputs, *given, coefficients, slopes)
        if self._log_std_slope is not None:
            losses.apart_from_constant(slopes, self._actor.into_outputs, self._log_std_slope)
        return measures

    def _critic_loss(self, head: CompiledMlp, features: Array, wanted: Array, share: Array, scale: float) -> float:
        """The loss of one critic; its gradient, times `scale`, is ready for the way back."""
        outputs = head.forward(features)
        if self._levels is None:
            return losses.mean_loss(outputs, wanted, share, scale, head.into_outputs)
        masses = self._masses if wanted.shape[1] > 1 else np.ones(1, np.float32)
        return losses.quantile_loss(outputs, wanted, masses, self._levels, share, scale, head.into_outputs)
