"""Targets of a rollout: advantages by GAE for the policy, SR(lambda) atoms for the distributional critics.

Time limits (Pardo et al. 2018): after a termination the value is 0; after a truncation it is that of the true final
observation. ``next_values[t]`` and ``next_quantiles[t]`` therefore belong to the observation that step t led to, final
observations included, and never to the first observation of the next episode. Arrays are ``[T, B]``: T steps of B
environments. Both recursions run as compiled code on the CPU and add up in float64; results carry no gradient.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.jit import decorators
from tailguard.ppo.compiled.kernels import as_array
from tailguard.validation import require

compiled, _ = decorators()

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lam: float
) -> Tensor:
    """Return generalised advantage estimates (GAE, Schulman et al. 2016).

    delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = delta_t + gamma lam (1 - ended_t) A_{t+1},    ended = terminated or truncated

    The lambda-return that a scalar critic regresses on is A_t + V(s_t).

    :param rewards: ``[T, B]``, float32 or float64.
    :param values: ``[T, B]``, V(s_t).
    :param next_values: ``[T, B]``, V of the true next observation; may be anything where terminated.
    :param terminated: ``[T, B]``, bool.
    :param truncated: ``[T, B]``, bool.
    :param gamma: discount, in [0, 1].
    :param lam: lambda in [0, 1]. 0: one-step errors; 1: Monte Carlo with a bootstrap at the end.
    :return: ``[T, B]``, on the device and in the dtype of `rewards`.
    :raises ValueError: for a shape that differs, and for a NaN or an infinity, with its environment and step.
    """
    _check(rewards, terminated, truncated, gamma, lam)
    for name, tensor in (("values", values), ("next_values", next_values)):
        require(
            tensor.shape == rewards.shape, f"the shape of {name}", tuple(tensor.shape), f"{tuple(rewards.shape)}, as rewards"
        )
    _require_finite("rewards", rewards)
    _require_finite("values", values)
    _require_finite("next_values", next_values, unused=terminated)
    advantages = np.empty(rewards.shape)
    numbers = [as_array(tensor, torch.float64) for tensor in (rewards, values, next_values)]
    flags = [as_array(tensor, torch.bool) for tensor in (terminated, truncated)]
    gae_recursion(numbers[0], numbers[1], numbers[2], flags[0], flags[1], gamma, lam, advantages)
    return torch.from_numpy(advantages).to(rewards)


def sr_lambda_targets(
    rewards: Tensor,
    next_quantiles: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    generator: torch.Generator,
) -> Tensor:
    """Return sample-replacement SR(lambda) targets (Nam et al. 2021): atoms of the geometric mixture of n-step Bellman targets.

    Y_t[j] = r_t + gamma (1 - terminated_t) Z_{t+1}[j]
    Z_{t+1}[j] = Y_{t+1}[j] with probability lam, else theta_j(s_{t+1}); after an end and at the last step always theta_j.

    Every atom decides for itself and keeps its index, so atom j comes from theta_j of some later step, one atom per level.
    The expected distribution of Z_{t+1} is then the mixture of that of Y_{t+1}, with weight lam, and that of theta, whatever
    the order of Y_{t+1}, and the quantile loss is linear in the distribution of its target: nothing is biased. Drawing
    replacements at random would be right as well, but noisier; and an atom that keeps its index keeps its mass, so levels need
    not be uniform: pass their masses to the loss as `target_masses`. The mean over atoms and draws is the scalar lambda-return.

    :param rewards: ``[T, B]``, float32 or float64.
    :param next_quantiles: ``[T, B, N]``, theta of the true next observation; may be anything where terminated.
    :param terminated: ``[T, B]``, bool.
    :param truncated: ``[T, B]``, bool.
    :param gamma: discount, in [0, 1].
    :param lam: lambda in [0, 1]. 0: one-step distributional Bellman; 1: Monte Carlo with a bootstrap at the end.
    :param generator: of the draws that decide which atoms are replaced.
    :return: ``[T, B, N]``, atoms in no order, on the device and in the dtype of `next_quantiles`.
    :raises ValueError: for a shape that differs, and for a NaN or an infinity, with its environment and step.
    """
    _check(rewards, terminated, truncated, gamma, lam)
    legal = f"{tuple(rewards.shape)} as rewards, and N >= 1 quantiles"
    shape = next_quantiles.shape
    require(
        next_quantiles.ndim == 3 and shape[:2] == rewards.shape and shape[2] >= 1,
        "the shape of next_quantiles",
        tuple(shape),
        legal,
    )
    _require_finite("rewards", rewards)
    _require_finite("next_quantiles", next_quantiles, unused=terminated)
    draws = torch.rand(shape, generator=generator, device=generator.device)
    quantiles = next_quantiles.detach().cpu().contiguous().numpy()
    targets = np.empty_like(quantiles)
    flags = [as_array(tensor, torch.bool) for tensor in (terminated, truncated)]
    drawn = draws.cpu().numpy()
    sr_lambda_recursion(as_array(rewards, torch.float64), quantiles, flags[0], flags[1], gamma, lam, drawn, targets)
    return torch.from_numpy(targets).to(next_quantiles.device)


@compiled
def gae_recursion(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: Flags,
    truncated: Flags,
    gamma: float,
    lam: float,
    advantages: Floats,
) -> None:
    """Fill ``advantages[T, B]`` backwards in time; see :func:`gae`."""
    steps, envs = rewards.shape
    later = np.zeros(envs)
    for t in range(steps - 1, -1, -1):
        for b in range(envs):
            # Not a product with 0: unused values may be NaN.
            future = 0.0 if terminated[t, b] else next_values[t, b]
            carried = 0.0 if terminated[t, b] or truncated[t, b] else later[b]
            later[b] = rewards[t, b] + gamma * future - values[t, b] + gamma * lam * carried
            advantages[t, b] = later[b]


@compiled
def sr_lambda_recursion(
    rewards: Floats,
    next_quantiles: NDArray[Any],
    terminated: Flags,
    truncated: Flags,
    gamma: float,
    lam: float,
    draws: NDArray[np.float32],
    targets: NDArray[Any],
) -> None:
    """Fill ``targets[T, B, N]`` backwards in time; see :func:`sr_lambda_targets`."""
    steps, envs, atoms = next_quantiles.shape
    later = np.zeros((envs, atoms))
    for t in range(steps - 1, -1, -1):
        for b in range(envs):
            ended = t == steps - 1 or terminated[t, b] or truncated[t, b]
            keep = 0.0 if ended else lam
            for j in range(atoms):
                z = 0.0
                if not terminated[t, b]:
                    z = later[b, j] if draws[t, b, j] < keep else next_quantiles[t, b, j]
                later[b, j] = rewards[t, b] + gamma * z
                targets[t, b, j] = later[b, j]


def _check(rewards: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lam: float) -> None:
    require(rewards.ndim == 2, "the shape of rewards", tuple(rewards.shape), "(T, B), steps by environments")
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        require(flags.shape == rewards.shape, f"the shape of {name}", tuple(flags.shape), f"{tuple(rewards.shape)}, as rewards")
        require(flags.dtype == torch.bool, f"the dtype of {name}", flags.dtype, "torch.bool")
    require(0.0 <= gamma <= 1.0, "gamma", gamma, "in [0, 1]")
    require(0.0 <= lam <= 1.0, "lam", lam, "in [0, 1]")


def _require_finite(name: str, tensor: Tensor, unused: Tensor | None = None) -> None:
    """Raise on NaN and infinities in ``[T, B]`` or ``[T, B, N]``, naming the first by step, then by environment.

    :param unused: ``[T, B]``, True for entries that are not used.
    """
    require(
        tensor.dtype in (torch.float32, torch.float64), f"the dtype of {name}", tensor.dtype, "torch.float32 or torch.float64"
    )
    if math.isfinite(float(tensor.detach().sum())):  # then every term is, and a sum is ten times faster than a test of each
        return
    bad = ~torch.isfinite(tensor)
    if unused is not None:
        bad &= unused.reshape(unused.shape + (1,) * (tensor.ndim - 2)).logical_not()
    if bool(bad.any()):
        first = tuple(int(index) for index in bad.nonzero()[0])
        require(False, f"{name} of env {first[1]} at step {first[0]}", float(tensor.detach()[first]), "finite")
