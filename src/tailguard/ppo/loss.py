"""PPO's policy loss with its gradient in closed form: clipped surrogate, entropy bonus and KL penalty (Schulman et al. 2017).

    loss = sum_m w_m [ -min(r_m A_m, clip(r_m, 1 - e, 1 + e) A_m) - c_entropy H_m + c_kl KL(old_m || new_m) ]
    r_m = exp(log p_new(a_m) - log p_old(a_m))

One pass of compiled code over the samples instead of some sixty small tensor operations and their backward passes; at PPO's
sizes those cost more than the network. The formulas are those of actions.py, against whose autograd this is tested.
"""

import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.jit import decorators
from tailguard.ppo.actions import HALF_LOG_TAU, MASKED, ActionDistribution, Categorical, Gaussian
from tailguard.ppo.compiled.kernels import as_array

Array = NDArray[np.float32]
compiled, inlined = decorators()

# Weighted sums over the samples, by their place in the array of totals.
MEASURES = ("policy_gradient_loss", "entropy", "kl", "approx_kl", "clip_fraction")


class Coefficients(NamedTuple):
    """The coefficients of the loss.

    :param clip: clip range of the probability ratio, e; 0.2 is usual.
    :param entropy: weight of the entropy bonus, c_entropy.
    :param kl: weight of the KL penalty, c_kl.
    """

    clip: float
    entropy: float
    kl: float


def policy_loss(
    action_dist: ActionDistribution,
    dist_params: Tensor,
    old_dist_params: Tensor,
    actions: Tensor,
    advantages: Tensor,
    weights: Tensor,
    coefficients: Coefficients,
) -> tuple[Tensor, Tensor]:
    """Return the loss of some samples; those of weight 0 are skipped.

    :param action_dist: the family of the distribution parameters.
    :param dist_params: ``[..., n_params]``, of the policy now; the only argument with a gradient.
    :param old_dist_params: ``[..., n_params]``, of the policy that took the actions.
    :param actions: ``[..., A]``.
    :param advantages: ``[...]``.
    :param weights: ``[...]``, each sample's share of the minibatch.
    :param coefficients: clip range, and weights of entropy and KL.
    :return: the loss, and the weighted sums of :data:`MEASURES`.
    """
    loss = _PolicyLoss.apply(action_dist, dist_params, old_dist_params, actions, advantages, weights, coefficients)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], loss)


def policy_rows(
    action_dist: ActionDistribution,
    dist_params: Array,
    old_dist_params: Array,
    actions: Array,
    advantages: Array,
    weights: Array,
    coefficients: Coefficients,
    grad_dist_params: Array,
) -> NDArray[np.float64]:
    """Fill the gradient of the loss of M rows in `dist_params`, and return the weighted sums of :data:`MEASURES`."""
    samples = dist_params, old_dist_params, actions, advantages, weights
    clip, entropy_coef, kl_coef = map(float, coefficients)
    totals = np.zeros(len(MEASURES))
    grad_dist_params.fill(0.0)
    if isinstance(action_dist, Gaussian):
        gaussian_loss(*samples, action_dist.edges, clip, entropy_coef, kl_coef, grad_dist_params, totals)
    elif isinstance(action_dist, Categorical):
        counts = np.array(action_dist.counts)
        categorical_loss(*samples, counts, clip, entropy_coef, kl_coef, grad_dist_params, totals)
    else:
        raise TypeError(f"no closed form for {type(action_dist).__name__}")
    return totals


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        action_dist: ActionDistribution,
        dist_params: Tensor,
        old_dist_params: Tensor,
        actions: Tensor,
        advantages: Tensor,
        weights: Tensor,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor]:
        rows = [x.reshape(-1, x.shape[-1]) for x in (dist_params, old_dist_params, actions)]
        new, old, taken, advantage, weight = (
            as_array(x, torch.float32) for x in (*rows, advantages.reshape(-1), weights.reshape(-1))
        )
        grad_dist_params = np.empty(new.shape, np.float32)
        totals = policy_rows(action_dist, new, old, taken, advantage, weight, coefficients, grad_dist_params)
        ctx.save_for_backward(torch.from_numpy(grad_dist_params).reshape(dist_params.shape).to(dist_params))
        measures = torch.from_numpy(totals).to(dist_params)
        ctx.mark_non_differentiable(measures)
        loss = totals[0] - coefficients.entropy * totals[1] + coefficients.kl * totals[2]
        return dist_params.new_tensor(loss), measures

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_dist_params,) = ctx.saved_tensors
        return None, grad * grad_dist_params, None, None, None, None, None


@inlined
def _surrogate(log_ratio: float, advantage: float, weight: float, clip: float, totals: Any) -> float:
    """Add one sample to the totals; return the derivative of its clipped surrogate in the log-probability."""
    growth = math.expm1(log_ratio)
    ratio = 1.0 + growth
    free, clipped = ratio * advantage, min(max(ratio, 1.0 - clip), 1.0 + clip) * advantage
    totals[0] -= weight * min(free, clipped)
    totals[3] += weight * (growth - log_ratio)  # Schulman's k3: unbiased and never negative
    if abs(ratio - 1.0) > clip:
        totals[4] += weight
    return -free if free <= clipped else 0.0


@inlined
def _tail(z: float) -> tuple[float, float]:
    """Return log Phi(z) and its derivative, phi(z) / Phi(z), for the standard normal."""
    if z < -20.0:  # where Phi is about to underflow, the first terms of its series
        return -0.5 * z * z - math.log(-z) - HALF_LOG_TAU + math.log1p(-1.0 / (z * z)), -z / (1.0 - 1.0 / (z * z))
    beyond = 0.5 * math.erfc(abs(z) * math.sqrt(0.5))
    log_mass = math.log1p(-beyond) if z > 0.0 else math.log(beyond)
    return log_mass, math.exp(-0.5 * z * z - HALF_LOG_TAU - log_mass)


@inlined
def _censored(
    action: float,
    mean: float,
    log_std: float,
    inverse: float,
    old_mean: float,
    old_log_std: float,
    old_inverse: float,
    edges: Any,
    by_mean: Any,
    by_log_std: Any,
) -> tuple[float, float, float]:
    """Return log-ratio, entropy and KL of one component censored at the edges; fill their derivatives."""
    low, high = (edges[0] - mean) * inverse, (edges[1] - mean) * inverse
    old_low, old_high = (edges[0] - old_mean) * old_inverse, (edges[1] - old_mean) * old_inverse
    log_low, ratio_low = _tail(low)
    log_high, ratio_high = _tail(-high)
    old_log_low, _ = _tail(old_low)
    old_log_high, _ = _tail(-old_high)
    if action <= edges[0]:
        log_ratio, by_mean[0], by_log_std[0] = log_low - old_log_low, -ratio_low, -low * ratio_low
    elif action >= edges[1]:
        log_ratio, by_mean[0], by_log_std[0] = log_high - old_log_high, ratio_high, high * ratio_high
    else:
        standard, old_standard = (action - mean) * inverse, (action - old_mean) * old_inverse
        by_mean[0], by_log_std[0] = standard, standard**2 - 1.0
        log_ratio = 0.5 * (old_standard**2 - standard**2) + old_log_std - log_std

    at_low, at_high, mass, _, square = _inside(low, high, log_low, log_high)
    level = log_std + HALF_LOG_TAU
    entropy = level * mass + 0.5 * square - math.exp(log_low) * log_low - math.exp(log_high) * log_high
    from_low = -at_low * (log_low + 1.0 + level + 0.5 * low * low)
    from_high = at_high * (log_high + 1.0 + level + 0.5 * high * high)
    by_mean[1], by_log_std[1] = -from_low - from_high, mass - low * from_low - high * from_high

    _, _, mass, first, square = _inside(old_low, old_high, old_log_low, old_log_high)
    p_low, p_high, away = math.exp(old_log_low), math.exp(old_log_high), (old_mean - mean) * inverse
    growth = inverse / old_inverse
    distance = growth**2 * square + 2.0 * growth * away * first + away**2 * mass
    ends = p_low * (old_log_low - log_low) + p_high * (old_log_high - log_high)
    kl = ends + (log_std - old_log_std) * mass + 0.5 * (distance - square)
    by_mean[2] = p_low * ratio_low - p_high * ratio_high - growth * first - away * mass
    by_log_std[2] = p_low * low * ratio_low - p_high * high * ratio_high + mass - distance
    return log_ratio, entropy, kl


@inlined
def _inside(low: float, high: float, log_low: float, log_high: float) -> tuple[float, float, float, float, float]:
    """Return the densities at both ends, and the integrals of 1, t and t^2 between them for a standard normal t."""
    at_low, at_high = math.exp(-0.5 * low * low - HALF_LOG_TAU), math.exp(-0.5 * high * high - HALF_LOG_TAU)
    mass = 1.0 - math.exp(log_low) - math.exp(log_high)
    return at_low, at_high, mass, at_low - at_high, mass - (high * at_high - low * at_low)


@compiled
def gaussian_loss(
    dist_params: Array,
    old: Array,
    actions: Array,
    advantages: Array,
    weights: Array,
    edges: NDArray[np.float64],
    clip: float,
    entropy_coef: float,
    kl_coef: float,
    grad_dist_params: Array,
    totals: NDArray[np.float64],
) -> None:
    """Compute the loss of Gaussian actions, plain, squashed (tanh's part of the density cancels in the ratio) or censored."""
    size = actions.shape[1]
    censored = np.isfinite(edges).any()
    inverse = np.empty(size)
    # Derivatives of the log-probability, the entropy and the KL: in the mean, in units of sigma, and in log sigma.
    by_mean, by_log_std = np.zeros((3, size)), np.ones((3, size))
    # Most often all samples share their standard deviations: computing their exponentials once saves half of the time.
    old_inverse, known, old_known = np.empty(size), np.full(size, np.nan), np.full(size, np.nan)
    for m in range(len(dist_params)):
        weight = weights[m]
        if weight == 0.0:
            continue
        log_ratio, entropy, kl = 0.0, 0.0, 0.0
        for a in range(size):
            # In float64, or the two densities would be rounded differently and their ratio would never be exactly 1.
            action, mean, old_mean = np.float64(actions[m, a]), np.float64(dist_params[m, a]), np.float64(old[m, a])
            log_std, old_log_std = np.float64(dist_params[m, size + a]), np.float64(old[m, size + a])
            if log_std != known[a]:
                known[a], inverse[a] = log_std, math.exp(-log_std)
            if old_log_std != old_known[a]:
                old_known[a], old_inverse[a] = old_log_std, math.exp(-old_log_std)
            if censored:
                box, d_mean, d_log_std = edges[:, a], by_mean[:, a], by_log_std[:, a]
                log_ratio_a, entropy_a, kl_a = _censored(
                    action, mean, log_std, inverse[a], old_mean, old_log_std, old_inverse[a], box, d_mean, d_log_std
                )
            else:
                standard, old_standard = (action - mean) * inverse[a], (action - old_mean) * old_inverse[a]
                away = (mean - old_mean) * inverse[a]
                spread = (inverse[a] / old_inverse[a]) ** 2 + away**2
                by_mean[0, a], by_log_std[0, a] = standard, standard**2 - 1.0
                by_mean[2, a], by_log_std[2, a] = away, 1.0 - spread
                log_ratio_a = 0.5 * (old_standard**2 - standard**2) + old_log_std - log_std
                entropy_a, kl_a = log_std + HALF_LOG_TAU + 0.5, 0.5 * (spread - 1.0) - old_log_std + log_std
            log_ratio += log_ratio_a
            entropy += entropy_a
            kl += kl_a
        totals[1] += weight * entropy
        totals[2] += weight * kl
        d_log_prob = _surrogate(log_ratio, advantages[m], weight, clip, totals)
        for a in range(size):
            grad_mean = d_log_prob * by_mean[0, a] - entropy_coef * by_mean[1, a] + kl_coef * by_mean[2, a]
            grad_log_std = d_log_prob * by_log_std[0, a] - entropy_coef * by_log_std[1, a] + kl_coef * by_log_std[2, a]
            grad_dist_params[m, a], grad_dist_params[m, size + a] = weight * inverse[a] * grad_mean, weight * grad_log_std


@compiled
def categorical_loss(
    dist_params: Array,
    old: Array,
    actions: Array,
    advantages: Array,
    weights: Array,
    counts: NDArray[np.int64],
    clip: float,
    entropy_coef: float,
    kl_coef: float,
    grad_dist_params: Array,
    totals: NDArray[np.float64],
) -> None:
    """Compute the loss of categorical actions; the parameters are the logits of all choices side by side.

    What was masked when the action was taken is masked now: it has the same logit, and no gradient.
    """
    logits = np.empty(dist_params.shape[1], dist_params.dtype)
    logs, old_logs = np.empty(dist_params.shape[1]), np.empty(dist_params.shape[1])
    probs, old_probs = np.empty(dist_params.shape[1]), np.empty(dist_params.shape[1])
    entropies = np.empty(len(counts))
    for m in range(len(dist_params)):
        weight = weights[m]
        if weight == 0.0:
            continue
        for j in range(len(logits)):
            logits[j] = old[m, j] if old[m, j] <= MASKED else dist_params[m, j]
        log_ratio, kl, first = 0.0, 0.0, 0
        for k in range(len(counts)):
            last = first + counts[k]
            _softmax(logits, first, last, logs, probs)
            _softmax(old[m], first, last, old_logs, old_probs)
            chosen = first + int(actions[m, k])
            log_ratio += logs[chosen] - old_logs[chosen]
            entropies[k] = 0.0
            for j in range(first, last):
                entropies[k] -= probs[j] * logs[j]
                kl += old_probs[j] * (old_logs[j] - logs[j])
            first = last
        totals[1] += weight * entropies.sum()
        totals[2] += weight * kl
        d_log_prob = _surrogate(log_ratio, advantages[m], weight, clip, totals)
        first = 0
        for k in range(len(counts)):
            chosen = first + int(actions[m, k])
            for j in range(first, first + counts[k]):
                by_log_prob = (1.0 if j == chosen else 0.0) - probs[j]
                by_entropy = -probs[j] * (logs[j] + entropies[k])
                by_kl = probs[j] - old_probs[j]
                grad_dist_params[m, j] = weight * (d_log_prob * by_log_prob - entropy_coef * by_entropy + kl_coef * by_kl)
            first += counts[k]


@inlined
def _softmax(logits: Any, first: int, last: int, logs: Any, probs: Any) -> None:
    """Fill the probabilities of the choice between `first` and `last`, and their logarithms."""
    top = logits[first]
    for j in range(first + 1, last):
        top = max(top, logits[j])
    total = 0.0
    for j in range(first, last):
        probs[j] = math.exp(logits[j] - top)
        total += probs[j]
    shift = top + math.log(total)
    for j in range(first, last):
        probs[j] /= total
        logs[j] = logits[j] - shift
