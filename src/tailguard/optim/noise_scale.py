"""How large a batch has to be before its gradient is more signal than noise (McCandlish et al. 2018, appendix A).

The history of gradients mixes noise with drift: a gradient that grows steadily varies, too. Microbatches of one minibatch are
taken at the same weights and differ by noise alone. With K microbatches of b_k samples, B in all, and the minibatch gradient
G = sum_k (b_k / B) g_k:

    small = sum_k (b_k / B) |g_k|^2  has the expectation  |G_true|^2 + K tr(S) / B,
    big   = |G|^2                    has the expectation  |G_true|^2 +   tr(S) / B,

so tr(S) = B (small - big) / (K - 1) and |G_true|^2 = (K big - small) / (K - 1), both without bias. Their running means are kept
apart, because the mean of quotients would be biased. The noise scale tr(S) / |G_true|^2 is in samples.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tailguard.validation import require


class NoiseScale:
    """Running estimate of the noise scale from accumulated gradients.

    :param beta: memory of the running means, in (0, 1).
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.covariance = self.signal = (
            0.0  # running means with weights that sum to 1 - beta^t; the quotient needs no correction
        )
        self._before: list[Tensor] = []
        self._samples: list[float] = []
        self._squares: list[Tensor] = []

    @property
    def value(self) -> float | None:
        """tr(S) / |G_true|^2 in samples; None before the first minibatch, and where the signal is lost in the noise."""
        return self.covariance / self.signal if self.signal > 0.0 else None

    def add(self, gradients: Sequence[Tensor], samples: float) -> None:
        """Look at the accumulated gradient after the backward pass of a microbatch.

        :param gradients: accumulated so far, with every microbatch's mean gradient weighted by its share of the samples.
        :param samples: in this microbatch, above 0.
        """
        require(0.0 < samples < float("inf"), "samples", samples, "finite and above 0")
        own = list(torch._foreach_sub(list(gradients), self._before)) if self._before else list(gradients)
        self._squares.append(torch.stack(torch._foreach_norm(own)).double().square().sum())
        self._samples.append(float(samples))
        self._before = [one.clone() for one in gradients]

    def close(self) -> None:
        """End the minibatch: its last accumulated gradient is that of all. A minibatch of one microbatch says nothing."""
        if len(self._samples) > 1:
            batch, count = sum(self._samples), len(self._samples)
            # |own|^2 is (b_k / B)^2 |g_k|^2
            small = sum(float(square) * batch / n for square, n in zip(self._squares, self._samples, strict=True))
            big = float(torch.stack(torch._foreach_norm(self._before)).double().square().sum())
            self.covariance += (1.0 - self.beta) * (batch * (small - big) / (count - 1) - self.covariance)
            self.signal += (1.0 - self.beta) * ((count * big - small) / (count - 1) - self.signal)
        self.abandon()

    def abandon(self) -> None:
        """Forget the open minibatch: no step is taken with it."""
        self._before, self._samples, self._squares = [], [], []

    def state_dict(self) -> dict[str, float]:
        """The two running means; an open minibatch is not part of it."""
        return {"covariance": self.covariance, "signal": self.signal}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.covariance, self.signal = float(state["covariance"]), float(state["signal"])
        self.abandon()
