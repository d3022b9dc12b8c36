"""Standard normal numbers on the CPU in less than half the time of ``Tensor.normal_``, seeded by a torch.Generator.

Drawn with ``Tensor.normal_`` the noise would cost more than the rest of an optimizer's step. Every call takes one 64-bit key
from the generator, and SplitMix64 (Steele, Lea and Flood 2014) makes all words from that key and their index. Each 16 bits of
them choose one of 65,536 equally likely values, the quantiles of the normal distribution at (k + 1/2) / 65,536. The mean is 0,
the variance 1 (the table is divided by its own), the distribution function differs from the normal one by less than 1e-5, and
no number is beyond 4.4 standard deviations.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from tailguard.optim.kernels import normal_numbers

VALUES = 2**16
PER_WORD = 4  # 16 bits each


def _quantiles() -> Tensor:
    table = torch.special.ndtri((torch.arange(VALUES, dtype=torch.float64) + 0.5) / VALUES)
    return cast(Tensor, table / table.square().mean().sqrt()).float()


QUANTILES = _quantiles().numpy()


class NormalNumbers:
    """A source of float32 numbers that reuses its buffers, since allocating them anew costs as much as a pass over them."""

    def __init__(self) -> None:
        self._key = torch.empty(1, dtype=torch.int64)
        self._words = np.empty(0, np.uint64)
        self._numbers = torch.empty(0)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw independent numbers ``[count]`` on the generator's device, valid until the next call.

        :param count: at least 1.
        :param generator: advances by one word; on other devices than the CPU, by what PyTorch's own sampler takes.
        """
        if len(self._numbers) != count or self._numbers.device != generator.device:
            self._numbers = torch.empty(count, device=generator.device)
            self._words = np.empty(-(-count // PER_WORD), np.uint64)
        if generator.device.type != "cpu":
            return self._numbers.normal_(generator=generator)
        self._key.random_(-(2**63), None, generator=generator)  # this range alone uses all 64 bits
        normal_numbers(self._numbers.numpy(), self._words, self._key.numpy().view(np.uint64)[0], QUANTILES)
        return self._numbers
