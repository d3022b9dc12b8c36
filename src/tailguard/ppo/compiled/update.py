"""The gradient of a minibatch in compiled passes from end to end, for the networks that most agents have.

It computes what ``Update`` computes with torch's autograd, in the same order and with the same metrics: trunks, heads, the
policy's loss (loss.py), the critics' loss, and back. ``applies.py`` says when it applies.

The critics' loss (quantiles.py, critic.py) with its gradient is one pass over the samples::

    mean:       sum_m w_m (v_m - y_m)^2
    quantiles:  sum_m w_m mean_i sum_j p_j u (tau_i - 1{u < 0}),   u = y_mj - q_mi

The second is quantile regression with the pinball loss, kappa = 0: tau S - S_below with S the mean of u and S_below that of
min(u, 0), and the gradient in q_i is the mass of the targets below it times 1 - tau less the mass above it times tau. Targets
that equal q_i count in neither. Samples of weight 0 are skipped. Every target meets every quantile: a search in sorted ones is
slower, since its steps cannot be predicted, and a vector unit does eight pairs meanwhile.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tailguard.jit import REORDER_SUMS, decorators
from tailguard.optim.layout import FlatParameters
from tailguard.ppo.compiled import kernels
from tailguard.ppo.compiled.networks import CompiledLstm, CompiledMlp, Workspace
from tailguard.ppo.compiled.threads import Threads
from tailguard.ppo.critic import QuantileReturns
from tailguard.ppo.loss import Coefficients, policy_rows
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Batch

Array = NDArray[np.float32]
EMPTY: Array = np.empty((0, 0), np.float32)
ZERO, ONE = np.float32(0.0), np.float32(1.0)
# Targets that are looked at together, which spares three of four passes over the sums.
TOGETHER, LINE = 4, kernels.LINE

compiled, inlined = decorators(REORDER_SUMS)


@compiled
def mean_loss(values: Array, targets: Array, weights: Array, scale: float, grad_values: Array) -> float:
    """Return the squared loss of ``values[M, 1]`` against ``targets[M, 1]``; fill its gradient times `scale`."""
    total = 0.0
    for m in range(len(weights)):
        error = values[m, 0] - targets[m, 0]
        grad_values[m, 0] = np.float32(2.0 * scale) * weights[m] * error if weights[m] != ZERO else ZERO
        if weights[m] != ZERO:
            total += weights[m] * np.float64(error) * error
    return total


@inlined
def _padded(values: Array, multiple: int) -> Array:
    """Return the values followed by zeros up to the next multiple of `multiple`."""
    longer = np.zeros(-(-len(values) // multiple) * multiple, np.float32)
    for i in range(len(values)):  # a copy of arrays would be compiled with all that it may raise, for a second
        longer[i] = values[i]
    return longer


@inlined
def _count(y: Array, p: Array, q: Array, below: Array, negative: Array, above: Array) -> None:
    """Add up for each q the mass of the targets below it, p min(y - q, 0), and the mass of the targets above it."""
    for j in range(0, len(y), TOGETHER):
        y0, y1, y2, y3 = y[j], y[j + 1], y[j + 2], y[j + 3]
        p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
        for i in range(len(q)):
            u0, u1, u2, u3 = y0 - q[i], y1 - q[i], y2 - q[i], y3 - q[i]
            low0, low1 = p0 if u0 < ZERO else ZERO, p1 if u1 < ZERO else ZERO
            low2, low3 = p2 if u2 < ZERO else ZERO, p3 if u3 < ZERO else ZERO
            below[i] += (low0 + low1) + (low2 + low3)
            negative[i] += (low0 * u0 + low1 * u1) + (low2 * u2 + low3 * u3)
        for i in range(len(q)):
            high0, high1 = p0 if y0 > q[i] else ZERO, p1 if y1 > q[i] else ZERO
            high2, high3 = p2 if y2 > q[i] else ZERO, p3 if y3 > q[i] else ZERO
            above[i] += (high0 + high1) + (high2 + high3)


@compiled
def quantile_loss(
    quantiles: Array, targets: Array, masses: Array, levels: Array, weights: Array, scale: float, grad_quantiles: Array
) -> float:
    """Return the pinball loss of ``quantiles[M, N]`` for ``targets[M, J]`` of masses ``[J]``; fill its scaled gradient."""
    (rows, n), whole, total = quantiles.shape, masses.sum(), 0.0
    p, q = _padded(masses, TOGETHER), _padded(quantiles[0], LINE)  # targets of no mass, quantiles that nobody reads
    y, below, negative, above = np.zeros_like(p), np.empty_like(q), np.empty_like(q), np.empty_like(q)
    for m in range(rows):
        weight, grad = weights[m], grad_quantiles[m]
        if weight == ZERO:
            grad[:] = ZERO
            continue
        below[:], negative[:], above[:], mean = ZERO, ZERO, ZERO, ZERO
        for i in range(n):
            q[i] = quantiles[m, i]
        for j in range(len(masses)):
            y[j] = targets[m, j]
            mean += p[j] * y[j]
        _count(y, p, q, below, negative, above)
        share, loss = np.float32(scale / n) * weight, ZERO
        for i in range(n):
            grad[i] = share * ((ONE - levels[i]) * below[i] - levels[i] * above[i])
        for i in range(n):
            loss += levels[i] * (mean - whole * q[i]) - negative[i]
        total += np.float64(weight) * loss / n
    return total


@compiled
def add_mean_error(
    quantiles: Array, targets: Array, masses: Array, target_masses: Array, weights: Array, scale: float, grad_quantiles: Array
) -> float:
    """Return the squared error of the mean of ``quantiles[M, N]``; add its gradient times `scale`."""
    total = 0.0
    for m in range(len(weights)):
        if weights[m] == ZERO:
            continue
        error = ZERO
        for i in range(len(masses)):
            error += masses[i] * quantiles[m, i]
        for j in range(len(target_masses)):
            error -= target_masses[j] * targets[m, j]
        pull = np.float32(2.0 * scale) * weights[m] * error
        for i in range(len(masses)):
            grad_quantiles[m, i] += pull * masses[i]
        total += weights[m] * np.float64(error) * error
    return total


class Rows(NamedTuple):
    """A minibatch as arrays: M samples, or those of sequences ``[L, B]`` one row after the other, M = L B.

    :param obs: ``[M, D]``, or ``[L, B, D]`` for a recurrent policy.
    :param actions: ``[M, A]``.
    :param dist_params: ``[M, n]`` of the policy that acted.
    :param advantages: ``[M]``.
    :param share: ``[M]``, each sample's share of the minibatch.
    :param targets: ``[K, M, J]``.
    :param resets: ``[L, B]``, 1 at reset steps.
    :param states: hidden and cell states of actor and critics before the first row, ``[B, H]`` each; none without LSTM.
    """

    obs: Array
    actions: Array
    dist_params: Array
    advantages: Array
    share: Array
    targets: Array
    resets: Array
    states: list[Array]

    @classmethod
    def of(cls, batch: Batch, total_weight: float) -> "Rows":
        """Return views of the batch's tensors, and the share of each sample in the total weight."""
        weights, targets, resets = batch.weights.numpy(), batch.targets.numpy(), batch.resets.numpy()
        states = batch.actor_hidden, batch.actor_cell, batch.critic_hidden, batch.critic_cell
        m = weights.size
        return cls(
            batch.obs.numpy(),
            batch.actions.numpy().reshape(m, -1),
            batch.dist_params.numpy().reshape(m, -1),
            batch.advantages.numpy().reshape(m),
            np.divide(weights.reshape(m), np.float32(total_weight), dtype=np.float32),
            targets.reshape(len(targets), m, -1),
            resets.reshape(weights.shape) if resets.size else EMPTY,
            [state.numpy()[0] for state in states if state.numel()],
        )


class CompiledGradient:
    """The gradient of PPO's loss, written into the flat gradient, for policies for which :func:`update_applies`.

    :param policy: to learn.
    :param flat: its parameters and their gradients.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters) -> None:
        self._policy, self._threads = policy, Threads(policy.threads)
        workspaces = [Workspace() for _ in range(policy.threads)]  # one for all, or one each for what runs side by side
        of_actor, of_critics = workspaces[0], workspaces[-1]
        self._actor_trunk = self._critic_trunk = None
        if policy.actor_trunk is not None:
            divided = self._threads if policy.critic_trunk is None else None
            self._actor_trunk = CompiledLstm(flat, "actor_trunk", policy.actor_trunk.hidden_size, of_actor, divided)
        if policy.critic_trunk is not None:
            self._critic_trunk = CompiledLstm(flat, "critic_trunk", policy.critic_trunk.hidden_size, of_critics)
        self._actor = CompiledMlp(flat, "actor", policy.actor, of_actor)
        named = {f"critics.{k}": head for k, head in enumerate(policy.critics) if isinstance(head, nn.Sequential)}
        self._critics = [CompiledMlp(flat, name, head, of_critics) for name, head in named.items()]
        self._log_std = None if policy.log_std is None else policy.log_std.detach().numpy()
        self._grad_log_std = flat.gradient[flat.slices["log_std"]].numpy() if policy.log_std is not None else None
        self._shared_grad = EMPTY
        return_dist = policy.return_dist
        self._levels = return_dist.levels.numpy() if isinstance(return_dist, QuantileReturns) else None
        self._mean_coef = return_dist.mean_coef if isinstance(return_dist, QuantileReturns) else 0.0
        self._masses = return_dist.masses.numpy()

    def gradient(self, batch: Batch, total_weight: float, coefficients: Coefficients, vf_coef: float) -> list[float]:
        """Fill the gradient of a minibatch's loss; return the policy's metrics and the critics' loss.

        :param total_weight: the sum of the minibatch's weights.
        :param vf_coef: weight of the critics' loss.
        """
        rows = Rows.of(batch, total_weight)
        shared = self._actor_trunk if self._critic_trunk is None else None
        features, grads = rows.obs, (EMPTY, EMPTY)
        if shared is not None:
            features = shared.forward(rows.obs, rows.resets, *rows.states[:2])
            grads = shared.grad_features, self._grad_of_critics(shared.grad_features)
        measures, critic_loss = self._threads.run(
            partial(self._actor_pass, rows, features, grads[0], coefficients),
            partial(self._critic_pass, rows, features, grads[1], vf_coef),
        )
        if shared is not None:
            np.add(*grads, out=grads[0])
            shared.backward()
        return [*measures.tolist(), critic_loss]

    def _grad_of_critics(self, like: Array) -> Array:
        """Return scratch for the critics' part of the gradient of shared features."""
        if self._shared_grad.shape != like.shape:
            self._shared_grad = np.empty_like(like)
        return self._shared_grad

    def _actor_pass(self, rows: Rows, features: Array, grad_features: Array, coefficients: Coefficients) -> NDArray[np.float64]:
        """Fill the gradient of the actor, but for a trunk that it shares; return the metrics of its loss."""
        own = self._actor_trunk if self._critic_trunk is not None else None
        if own is not None:
            features, grad_features = own.forward(rows.obs, rows.resets, *rows.states[:2]), own.grad_features
        measures = self._policy_loss(rows, features, coefficients)
        self._actor.backward(grad_features)
        if own is not None:
            own.backward()
        return measures

    def _critic_pass(self, rows: Rows, features: Array, grad_features: Array, vf_coef: float) -> float:
        """Fill the gradient of the critics, but for a trunk that they share; return their loss."""
        own, total = self._critic_trunk, 0.0
        if own is not None:
            features, grad_features = own.forward(rows.obs, rows.resets, *rows.states[2:]), own.grad_features
        for k, head in enumerate(self._critics):
            total += self._critic_loss(head, features, rows.targets[k], rows.share, vf_coef / len(self._critics))
            head.backward(grad_features, add=k > 0)
        if own is not None:
            own.backward()
        return total / len(self._critics)

    def _policy_loss(self, rows: Rows, features: Array, coefficients: Coefficients) -> NDArray[np.float64]:
        """Run the actor's head and its loss: return the metrics, and fill the gradient of the head's outputs."""
        raw = self._actor.forward(features)
        dist_params, grad_dist_params = raw, self._actor.grad_outputs
        if self._log_std is not None:
            dist_params, grad_dist_params = (np.empty(rows.dist_params.shape, np.float32) for _ in range(2))
            kernels.gaussian_params(raw, self._log_std, dist_params)
        samples = rows.dist_params, rows.actions, rows.advantages, rows.share
        measures = policy_rows(self._policy.action_dist, dist_params, *samples, coefficients, grad_dist_params)
        if self._grad_log_std is not None:
            kernels.gaussian_params_backward(grad_dist_params, self._actor.grad_outputs, self._grad_log_std)
        return measures

    def _critic_loss(self, head: CompiledMlp, features: Array, targets: Array, share: Array, scale: float) -> float:
        """Return the loss of one critic; fill the gradient of its outputs, times `scale`."""
        outputs = head.forward(features)
        if self._levels is None:
            return mean_loss(outputs, targets, share, scale, head.grad_outputs)
        masses = self._masses if targets.shape[1] > 1 else np.ones(1, np.float32)
        loss: float = quantile_loss(outputs, targets, masses, self._levels, share, scale, head.grad_outputs)
        if self._mean_coef:
            means = outputs, targets, self._masses, masses
            loss += self._mean_coef * add_mean_error(*means, share, scale * self._mean_coef, head.grad_outputs)
        return loss
