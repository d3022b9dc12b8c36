"""Noise of gradients: over their history, tensor by tensor, and within one minibatch.

**Over the history** (:class:`GradientStatistics`).

Three readings of "noisy", all of the form Var[x] over time, in units of E[x]^2:

``elementwise``: x is every element of the gradient. Summed over the elements of a tensor, Var is the trace of the gradient's
covariance and E[x]^2 the squared length of its expectation; the quotient is the noise scale of McCandlish et al. (2018) in
units of the batch. One running mean per element is enough: the sum of E[x^2] over elements is the running mean of one number.

``mean``: the stochastic variance of the layer-wise mean gradient, Var[E_spatial[grad]]: x is the mean of the gradient over its
tensor. O(1) memory per tensor. Limitation: noise that cancels inside a tensor is not seen. Anticorrelated elements (normalised
layers, symmetric filters, attention heads that complement each other) have a quiet mean however loud they are, and such layers
are scaled down too little; even independent noise is seen through its average only, n times smaller for n elements.

``norm``: x is the length of the tensor's gradient. O(1) memory. It does not see a gradient that turns without changing its
length, and calls pure noise in many dimensions quiet, since its length hardly varies.

Variance and squared expectation are without bias for any number of steps (Balles and Hennig 2018): a running mean over n
effective gradients has the variance s^2 / n itself, which is taken off.

**Within a minibatch** (:class:`NoiseScale`): the batch size at which a gradient is as much signal as noise, the noise scale of
McCandlish et al. (2018), appendix A. The history of gradients mixes noise with drift: a gradient that grows steadily varies,
too. Microbatches of one minibatch are taken at the same weights and differ by noise alone. With K microbatches of b_k samples,
B in all, and the minibatch gradient G = sum_k (b_k / B) g_k:

    small = sum_k (b_k / B) |g_k|^2  has the expectation  |G_true|^2 + K tr(S) / B,
    big   = |G|^2                    has the expectation  |G_true|^2 +   tr(S) / B,

so tr(S) = B (small - big) / (K - 1) and |G_true|^2 = (K big - small) / (K - 1), both without bias. Their running means are kept
apart, because the mean of quotients would be biased. The noise scale tr(S) / |G_true|^2 is in samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.optim import kernels
from tailguard.optim.config import Estimator
from tailguard.optim.layout import FlatBuffer, Heads, flat_array, flat_buffer, kernels_apply
from tailguard.validation import require

CODES: dict[str, int] = {"elementwise": kernels.ELEMENTWISE, "mean": kernels.MEAN, "norm": kernels.NORM}


class GradientStatistics:
    """Running means of P gradient tensors.

    :param heads: the tensors whose ``grad`` is measured; they are not kept.
    :param estimator: quantity x whose variance is measured.
    :param beta: decay of the running means, in (0, 1): about 1 / (1 - beta) gradients count.
    """

    def __init__(self, heads: Heads, estimator: Estimator, beta: float) -> None:
        self.estimator, self.beta = estimator, beta
        self.numel, count = heads.numel, len(heads.numel)
        self.table = np.zeros((count, 5))
        self.overall = np.zeros(5)  # running means of mean, spatial variance, norm and largest of the whole gradient, and of 1
        elements = int(self.numel.sum()) if estimator == "elementwise" else 0
        wide = any(parameter.dtype == torch.float64 for parameter in heads.parameters)
        self.mean = torch.zeros(elements, dtype=torch.float64 if wide else torch.float32)
        self.parts = np.zeros((count, 3))
        self.link(heads)

    def link(self, heads: Heads) -> None:
        """Measure other tensors of the same sizes from now on."""
        self.mean = self.mean.to(heads.parameters[0].device)
        self._head_of, self.head_parts = heads.head_of, np.zeros((len(heads.names), 3))
        self._sums, self._everyone = np.zeros((len(self.numel), 4)), np.arange(len(self.numel))
        self._seen: list[Tensor | None] = []
        self._flat: FlatBuffer | None = None
        self._evaluate()

    def update(self, parameters: Sequence[Tensor]) -> None:
        """Fold in the present gradients. Parameters without a gradient keep their statistics as they are.

        Fills ``parts[P, 3]``, for every tensor the variance of x, the square of its expectation, and the gradient's mean square
        as the scale of both, and ``head_parts[H, 3]``, their sums by head. They are sums over elements, but of one number for
        ``mean``. The estimates are without bias: the first two may fall below 0.

        On a device other than the CPU this waits once for the sums of all tensors.

        :raises ValueError: for a gradient that is not finite; the statistics are invalid then.
        """
        gradients = [parameter.grad for parameter in parameters]
        flat, present, rate = self._flat_gradients(gradients), self._everyone, 1.0 - self.beta
        if flat is not None and self.mean.dtype == torch.float32:
            kernels.measure(self._sums, flat.values, flat.starts, self.numel, self.mean.numpy(), np.float32(rate))
        else:
            present = np.array([k for k, gradient in enumerate(gradients) if gradient is not None], np.int64)
            if len(present) == 0:
                return
            measured = [gradient.detach() for gradient in gradients if gradient is not None]
            if kernels_apply([self.mean, *measured]):
                self._measure_one_by_one(measured, present)
            else:
                self._sums[present] = self._measure(measured, present)
        bad = kernels.fold(self.table, self.overall, self._sums, self.numel, present, CODES[self.estimator], rate)
        require(bad < 0, "the gradient of tensor number", bad, "finite: leave out scale_gradients() and the step without one")
        self._evaluate()

    @property
    def seen(self) -> NDArray[np.bool_]:
        """``[P]``, True for tensors that have had a gradient."""
        return self.table[:, kernels.MASS] > 0.0

    def overall_means(self) -> list[float]:
        """Return the running means of the whole gradient's mean, spatial variance, norm and largest element, bias-corrected."""
        *values, mass = self.overall.tolist()
        return [value / mass if mass > 0.0 else 0.0 for value in values]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was measured, as tensors and numbers under the audit reports' names."""
        elementwise = self.estimator == "elementwise"
        column = [torch.from_numpy(self.table[:, k].copy()) for k in range(5)]
        names = ("grad_mean_ema", "grad_var_ema", "grad_norm_ema", "grad_max_ema")
        return {
            "param_grad_mean_ema": self.mean.clone() if elementwise else column[kernels.FIRST],
            "param_grad_sq_ema": column[kernels.SECOND],
            "param_grad_energy_ema": column[kernels.ENERGY],
            "param_mass": column[kernels.MASS],
            "param_signal": column[kernels.SIGNAL],
            "param_numel": torch.from_numpy(self.numel.copy()),
            **dict(zip(names, self.overall[:4].tolist(), strict=True)),
            "grad_mass": float(self.overall[4]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, with the same estimator and tensors of the same sizes."""
        sizes = state["param_numel"].tolist()
        require(sizes == self.numel.tolist(), "param_numel", sizes, f"{self.numel.tolist()}, the sizes of the parameters")
        first = state["param_grad_mean_ema"]
        if self.estimator == "elementwise":
            self.mean.copy_(first)
            first = torch.zeros(len(self.table))
        columns = (first, *(state[f"param_{name}"] for name in ("grad_sq_ema", "grad_energy_ema", "mass", "signal")))
        self.table[:] = torch.stack([column.double().cpu() for column in columns], dim=1).numpy()
        self.overall[:] = [state[f"grad_{name}"] for name in ("mean_ema", "var_ema", "norm_ema", "max_ema", "mass")]
        self._evaluate()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without references to gradients."""
        return {**self.__dict__, "_seen": [], "_flat": None}

    # ---------------------------------------------------------------------------------------------------------------

    def _flat_gradients(self, gradients: list[Tensor | None]) -> FlatBuffer | None:
        """Return the buffer that all gradients share, if they do; looked for again only when one of them is another tensor."""
        if len(self._seen) != len(gradients) or any(old is not new for old, new in zip(self._seen, gradients, strict=True)):
            every = [gradient for gradient in gradients if gradient is not None]
            self._seen = gradients
            self._flat = flat_buffer(every) if len(every) == len(gradients) else None
        return self._flat

    def _measure_one_by_one(self, gradients: list[Tensor], present: NDArray[np.int64]) -> None:
        """Fill the sums of the present gradients, with one compiled pass for each."""
        mean, ends, begin_of_each = self.mean.numpy(), np.cumsum(self.numel), np.zeros(1, np.int64)
        for k, gradient in zip(present.tolist(), gradients, strict=True):
            row, own = slice(k, k + 1), mean[ends[k] - self.numel[k] : ends[k]]  # no running mean: an empty array
            kernels.measure(
                self._sums[row], flat_array(gradient), begin_of_each, self.numel[row], own, np.float32(1.0 - self.beta)
            )

    def _measure(self, gradients: list[Tensor], present: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sums ``[P', 4]`` of the present gradients, with operations on lists and one copy to the CPU."""
        gradients = [gradient.to(self.mean.dtype) for gradient in gradients]
        columns = [
            torch.stack([gradient.sum() for gradient in gradients]),
            torch.stack(torch._foreach_norm(gradients)).square(),
            torch.zeros(len(gradients), dtype=self.mean.dtype, device=self.mean.device),
            torch.stack([gradient.abs().max() for gradient in gradients]),
        ]
        if self.estimator == "elementwise":
            every = self.mean.split(self.numel.tolist())
            means = [every[k].view_as(gradient) for k, gradient in zip(present.tolist(), gradients, strict=True)]
            torch._foreach_lerp_(means, gradients, 1.0 - self.beta)
            columns[kernels.MEAN_SQUARES] = torch.stack(torch._foreach_norm(means)).square()
        return torch.stack(columns, dim=1).double().cpu().numpy()

    def _evaluate(self) -> None:
        kernels.evaluate(self.parts, self.head_parts, self.table, self._head_of, self.beta)


class NoiseScale:
    """Running estimate of the noise scale from accumulated gradients.

    :param beta: decay of the running means, in (0, 1).
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        # Running means with weights that sum to 1 - beta^t; their quotient needs no correction.
        self.covariance = self.signal = 0.0
        self._before: list[Tensor] = []
        self._samples: list[float] = []
        self._squares: list[Tensor] = []

    @property
    def value(self) -> float | None:
        """The noise scale tr(S) / |G_true|^2 in samples; None before the first minibatch and where no signal is found."""
        return self.covariance / self.signal if self.signal > 0.0 else None

    def add(self, gradients: Sequence[Tensor], samples: float) -> None:
        """Measure the accumulated gradient after the backward pass of a microbatch.

        :param gradients: accumulated so far, with every microbatch's mean gradient weighted by its share of the samples.
        :param samples: number of samples in this microbatch, above 0.
        """
        require(0.0 < samples < float("inf"), "samples", samples, "finite and above 0")
        own = list(torch._foreach_sub(list(gradients), self._before)) if self._before else list(gradients)
        self._squares.append(torch.stack(torch._foreach_norm(own)).double().square().sum())
        self._samples.append(float(samples))
        self._before = [gradient.clone() for gradient in gradients]

    def close(self) -> None:
        """End the minibatch, whose gradient is the last accumulated one. A minibatch of one microbatch is ignored."""
        if len(self._samples) > 1:
            batch, count = sum(self._samples), len(self._samples)
            # |own|^2 is (b_k / B)^2 |g_k|^2
            small = sum(float(square) * batch / n for square, n in zip(self._squares, self._samples, strict=True))
            big = float(torch.stack(torch._foreach_norm(self._before)).double().square().sum())
            self.covariance += (1.0 - self.beta) * (batch * (small - big) / (count - 1) - self.covariance)
            self.signal += (1.0 - self.beta) * ((count * big - small) / (count - 1) - self.signal)
        self.abandon()

    def abandon(self) -> None:
        """Discard the open minibatch: no step is taken with it."""
        self._before, self._samples, self._squares = [], [], []

    def state_dict(self) -> dict[str, float]:
        """Return the two running means; an open minibatch is not part of it."""
        return {"covariance": self.covariance, "signal": self.signal}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.covariance, self.signal = float(state["covariance"]), float(state["signal"])
        self.abandon()
