"""A return distribution as quantiles: their levels, the quantile Huber loss that learns them, and CVaR.

Notation: quantiles q_i at levels tau_i, i = 0..N-1. Every level owns a cell of [0, 1], and the quantile function is constant
on it, so the distribution is discrete: atom q_i with the mass p_i of its cell. All measures below are exact for that
distribution. Returns: the lower tail is the bad one, CVaR_a = (1 / a) times the integral of the quantile function over [0, a].
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.jit import REORDER_SUMS, decorators
from tailguard.ppo.compiled.kernels import as_array
from tailguard.validation import require

compiled, _ = decorators(REORDER_SUMS)

# Tolerance of the last edge, which should be 1, when cells are rebuilt from float32 levels: errors of 1e-7 add up.
EDGE_TOLERANCE = 1e-4
# Tolerance of the sum of given probabilities, which should be 1.
MASS_TOLERANCE = 1e-3
# Used for kappa = 0: the loss is the pinball loss except where |u| is below it. Products with a much smaller one would be
# denormal numbers, which are slow.
PINBALL_KAPPA = 2.0**-64
# Targets are padded to a multiple of this, which the vector loop of the compiled loss takes at a time.
LANES = 32


def uniform_levels(n: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the midpoints of `n` equal cells, ``(i + 1/2) / n``, which minimise the 1-Wasserstein error (QR-DQN).

    :param n: number of levels, at least 1.
    :param dtype: of the result; torch's default when None.
    :return: ``[n]``.
    """
    require(n >= 1, "n", n, "at least 1")
    return _midpoints(torch.linspace(0.0, 1.0, n + 1, dtype=torch.float64), dtype)


def tail_levels(n: int, alpha: float, n_tail: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the midpoints of `n_tail` equal cells in ``[0, alpha]`` and ``n - n_tail`` equal cells in ``[alpha, 1]``.

    A CVaR at `alpha` then rests on `n_tail` levels instead of ``alpha n``.

    :param n: number of levels.
    :param alpha: where the tail ends, in (0, 1).
    :param n_tail: number of levels in the tail, from 1 to ``n - 1``. More than 5 buy little and are noisy to learn.
    :param dtype: of the result; torch's default when None.
    :return: ``[n]``.
    """
    require(0.0 < alpha < 1.0, "alpha", alpha, "in (0, 1)")
    require(1 <= n_tail < n, "n_tail", n_tail, f"from 1 to n - 1 = {n - 1}")
    tail = torch.linspace(0.0, alpha, n_tail + 1, dtype=torch.float64)
    body = torch.linspace(alpha, 1.0, n - n_tail + 1, dtype=torch.float64)
    return _midpoints(torch.cat([tail, body[1:]]), dtype)


def level_masses(levels: Tensor) -> Tensor:
    """Return the probability mass of the cell of each level.

    The cells are the partition of [0, 1] whose midpoints the levels are, if there is one: uniform and tail-placed levels get
    back exactly the cells they were made from. There is at most one, e_0 = 0, e_{i+1} = 2 tau_i - e_i, and it must end at 1.
    Levels that are no such midpoints own the points nearest to them: edges half-way between neighbours.

    :param levels: ``[N]``, increasing, in (0, 1).
    :return: ``[N]``, positive, summing to 1.
    """
    require(levels.ndim == 1 and len(levels) >= 1, "levels", tuple(levels.shape), "of shape (N,) with N >= 1")
    tau = levels.detach().to(torch.float64)
    inside = bool(((tau > 0.0) & (tau < 1.0)).all()) and bool((tau.diff() > 0.0).all())
    require(inside, "levels", levels.tolist(), "strictly increasing and inside (0, 1)")
    ends = tau.new_tensor([0.0, 1.0])
    # The recursion in closed form: (-1)^i e_i is a running sum of -2 (-1)^i tau_i.
    signs = 1.0 - 2.0 * (torch.arange(len(tau), device=tau.device) % 2)
    edges = torch.cat([ends[:1], 2.0 * signs * (signs * tau).cumsum(0)])
    is_partition = bool((edges.diff() > 0.0).all()) and abs(float(edges[-1]) - 1.0) <= EDGE_TOLERANCE
    inner = edges[1:-1] if is_partition else (tau[1:] + tau[:-1]) / 2.0
    return torch.cat([ends[:1], inner, ends[1:]]).diff().to(levels.dtype)


def cvar(quantiles: Tensor, alpha: float | Tensor, levels: Tensor | None = None) -> Tensor:
    """Return CVaR_alpha of the piecewise-constant quantile function, exactly: the mean of the worst share `alpha`.

    Outputs of a network may cross, so they are sorted first, each with its mass. The gradient with respect to a quantile is
    its weight in the tail. Continuous and nondecreasing in `alpha`; at 1 it is the mean.

    :param quantiles: ``[..., N]``, in any order.
    :param alpha: in (0, 1], a number or a tensor that broadcasts to ``[...]``.
    :param levels: ``[N]``; uniform when None. See :func:`level_masses` for the cells.
    :return: ``[...]``.
    """
    require(quantiles.is_floating_point(), "quantiles.dtype", quantiles.dtype, "a floating-point type")
    shape = tuple(quantiles.shape)
    require(len(shape) >= 1 and shape[-1] >= 1, "quantiles", shape, "of shape (..., N) with N >= 1")
    n = shape[-1]
    if levels is None:
        return cvar_categorical(torch.full_like(quantiles, 1.0 / n), quantiles, alpha)
    require(levels.shape == (n,), "levels", tuple(levels.shape), f"of shape ({n},), one per quantile")
    return cvar_categorical(level_masses(levels.double()).to(quantiles).expand_as(quantiles), quantiles, alpha)


def ascending(atoms: Tensor) -> Tensor:
    """Return ``[..., N]`` atoms in ascending order, NaN last, without a gradient.

    On the CPU by NumPy, which has vector code for short rows: torch takes 15 times as long for 32 atoms in random order.
    """
    if not atoms.is_cpu:
        return atoms.detach().sort(-1).values
    return torch.from_numpy(np.sort(atoms.detach().numpy(), axis=-1))


def cvar_categorical(probs: Tensor, atoms: Tensor, alpha: float | Tensor) -> Tensor:
    """Return CVaR_alpha of a categorical distribution, exactly: (E[X; X < VaR] + (alpha - P(X < VaR)) VaR) / alpha.

    That is a mean of the sorted atoms with the weights clip(alpha - mass below, 0, mass) / alpha.

    :param probs: ``[..., K]``, nonnegative, summing to 1.
    :param atoms: ``[K]`` or ``[..., K]``, in any order.
    :param alpha: in (0, 1], a number or a tensor that broadcasts to ``[...]``.
    :return: ``[...]``.
    """
    legal = f"of shape {tuple(probs.shape[-1:])} or {tuple(probs.shape)}"
    require(atoms.shape in (probs.shape, probs.shape[-1:]), "atoms", tuple(atoms.shape), legal)
    _check_masses("probs", probs)
    share = torch.as_tensor(alpha, dtype=probs.dtype, device=probs.device)
    require(bool(((share > 0.0) & (share <= 1.0)).all()), "alpha", alpha, "in (0, 1]")
    share = share.unsqueeze(-1)
    atoms, order = atoms.expand_as(probs).sort(-1)
    masses = probs.gather(-1, order)
    below = masses.cumsum(-1) - masses
    return (torch.minimum((share - below).clamp(min=0.0), masses) / share * atoms).sum(-1)


def equal_mass_atoms(values: Tensor, masses: Tensor, m: int) -> Tensor:
    """Return `m` atoms of mass 1/m: the means of the quantile function over ``[k/m, (k+1)/m]``.

    The mean is kept, and so is every CVaR at a multiple of 1/m. Sorted values of equal masses come back unchanged for m = N.

    :param values: ``[..., N]``, in any order.
    :param masses: ``[N]`` or ``[..., N]``, summing to 1.
    :param m: number of atoms, at least 1.
    :return: ``[..., m]``, sorted.
    """
    require(m >= 1, "m", m, "at least 1")
    # In float64, because differences of running sums lose digits.
    ordered, order = values.double().sort(-1)
    weights = masses.double().expand_as(ordered).gather(-1, order)
    weights = weights / weights.sum(-1, keepdim=True)
    edges = _running_sum(weights)  # [..., N + 1]
    integral = _running_sum(weights * ordered)  # of the quantile function from 0 to each edge
    grid = torch.linspace(0.0, 1.0, m + 1, dtype=ordered.dtype, device=ordered.device)
    grid = grid.expand(*ordered.shape[:-1], m + 1).contiguous()
    cell = torch.searchsorted(edges[..., 1:-1].contiguous(), grid, right=True)
    upto = integral.gather(-1, cell) + (grid - edges.gather(-1, cell)) * ordered.gather(-1, cell)
    return (upto.diff(dim=-1) * m).to(values.dtype)


def cumulative_gaps(base: Tensor, log_gaps: Tensor) -> Tensor:
    """Return quantiles that cannot cross: ``base`` and base + cumsum(exp(log_gaps)).

    Gaps are exponentials, so that rescaling the return by s rescales a head exactly: weights and bias of the base by s, the
    bias of the gaps plus log s.

    :param base: ``[...]``, the lowest quantile.
    :param log_gaps: ``[..., N - 1]``.
    :return: ``[..., N]``, increasing.
    """
    base = base.unsqueeze(-1)
    return torch.cat([base, base + log_gaps.exp().cumsum(-1)], dim=-1)


def quantile_huber_loss(
    pred: Tensor, target: Tensor, levels: Tensor, kappa: float, target_masses: Tensor | None = None
) -> Tensor:
    """Return the quantile Huber loss (QR-DQN, Dabney et al. 2018) of every quantile against every target atom of its row.

    With u = target_j - pred_i:   mean_i sum_j p_j |tau_i - 1{u < 0}| L_kappa(u) / kappa,
    L_kappa(u) = u^2 / 2 where |u| <= kappa, else kappa (|u| - kappa / 2).

    kappa = 0 is the limit, the pinball loss u (tau - 1{u < 0}), whose minimiser is the quantile. Any other kappa pulls the
    tails inward: in units of one standard deviation, kappa = 1 puts the 5 % quantile of a Gaussian where 9.5 % is. Where
    pred_i equals target_j the gradient of that pair is 0. The cost is O(N M) time per row without an N x M tensor: loss and
    gradient are one pass of compiled code. Tensors on another device are copied to the CPU and back.

    :param pred: ``[..., N]``, float32 or float64; the only argument with a gradient.
    :param target: ``[..., M]``, atoms in any order, constants.
    :param levels: ``[N]``, in (0, 1).
    :param kappa: half-width of the quadratic zone in units of the target, >= 0.
    :param target_masses: ``[M]`` or ``[..., M]``, the masses p_j; 1 / M when None.
    :return: ``[...]``, one loss per row.
    """
    _check_loss_arguments(pred, target, levels, kappa)
    n, m = pred.shape[-1], target.shape[-1]
    if target_masses is None:
        masses = target.new_full((1, m), 1.0 / m)
    else:
        legal = f"of shape ({m},) or {tuple(target.shape)}"
        require(target_masses.shape in (target.shape, target.shape[-1:]), "target_masses", tuple(target_masses.shape), legal)
        _check_masses("target_masses", target_masses)
        masses = target_masses.reshape(-1, m)
    loss = _QuantileHuber.apply(pred.reshape(-1, n), target.reshape(-1, m), masses, levels, kappa)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss).reshape(pred.shape[:-1])


class _QuantileHuber(torch.autograd.Function):
    """Rows ``[B, N]`` against rows ``[B, M]``; the gradient is computed together with the loss."""

    @staticmethod
    def forward(ctx: Any, pred: Tensor, target: Tensor, masses: Tensor, levels: Tensor, kappa: float) -> Tensor:
        arrays = [as_array(tensor, pred.dtype) for tensor in (pred, target, masses, levels)]
        dtype = arrays[0].dtype.type
        loss, grad_pred = np.empty(len(pred), dtype), np.empty(pred.shape, dtype)
        pairwise_loss(arrays[0], arrays[1], arrays[2], arrays[3], dtype(max(kappa, PINBALL_KAPPA)), loss, grad_pred)
        ctx.save_for_backward(torch.from_numpy(grad_pred).to(pred.device))
        return torch.from_numpy(loss).to(pred.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_pred,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * grad_pred, None, None, None, None


@compiled
def pairwise_loss(
    pred: NDArray[Any],
    target: NDArray[Any],
    masses: NDArray[Any],
    levels: NDArray[Any],
    kappa: Any,
    loss: NDArray[Any],
    grad_pred: NDArray[Any],
) -> None:
    """Fill ``loss[B]`` and its gradient ``grad_pred[B, N]``; masses are one row for all or a row each.

    With q = clip(u, -kappa, kappa) both zones of the Huber loss are L_kappa(u) = q (u - q / 2), with derivative q in u.
    """
    (rows, n), m = pred.shape, target.shape[1]
    number = levels.dtype.type  # literals would turn float32 into float64
    zero, half, one = number(0.0), number(0.5), number(1.0)
    scale = one / (kappa * number(n))
    width = (m + LANES - 1) // LANES * LANES
    y, p = np.zeros(width, target.dtype), np.zeros(width, target.dtype)  # padded with atoms of no mass
    for b in range(rows):
        y[:m] = target[b]
        p[:m] = masses[min(b, len(masses) - 1)]
        total = zero
        for i in range(n):
            theta, above, below = pred[b, i], levels[i], one - levels[i]
            value, pull = zero, zero
            for j in range(width):
                u = y[j] - theta
                q = min(max(u, -kappa), kappa)
                weighted = p[j] * (below if u < zero else above) * q
                value += weighted * (u - half * q)
                pull -= weighted
            grad_pred[b, i] = pull * scale
            total += value
        loss[b] = total * scale


def _midpoints(edges: Tensor, dtype: torch.dtype | None) -> Tensor:
    return ((edges[1:] + edges[:-1]) / 2.0).to(dtype or torch.get_default_dtype())


def _running_sum(values: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, .. N entries."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


def _check_masses(name: str, masses: Tensor) -> None:
    masses = masses.detach()
    require(bool((masses >= 0.0).all()), name, float(masses.min()), "nonnegative everywhere")
    sums = masses.sum(-1).flatten()
    wrong = sums[(sums - 1.0).abs() > MASS_TOLERANCE]
    require(len(wrong) == 0, f"the sum of {name}", wrong[:1].tolist(), "1")


def _check_loss_arguments(pred: Tensor, target: Tensor, levels: Tensor, kappa: float) -> None:
    rows = tuple(pred.shape[:-1])
    require(pred.ndim >= 1 and pred.shape[-1] >= 1, "pred", tuple(pred.shape), "of shape (..., N) with N >= 1")
    legal = f"of shape {(*rows, 'M')} with M >= 1, the rows of pred"
    same_rows = target.ndim == pred.ndim and target.shape[:-1] == rows and target.shape[-1] >= 1
    require(same_rows, "target", tuple(target.shape), legal)
    require(levels.shape == pred.shape[-1:], "levels", tuple(levels.shape), f"of shape ({pred.shape[-1]},), one per prediction")
    require(bool(((levels > 0.0) & (levels < 1.0)).all()), "levels", levels.tolist(), "inside (0, 1)")
    require(pred.dtype in (torch.float32, torch.float64), "pred.dtype", pred.dtype, "torch.float32 or torch.float64")
    require(target.dtype == pred.dtype, "target.dtype", target.dtype, f"{pred.dtype}, as pred")
    require(not target.requires_grad, "target.requires_grad", True, "False: targets are constants, detach them")
    require(0.0 <= kappa < float("inf"), "kappa", kappa, "finite and >= 0")
