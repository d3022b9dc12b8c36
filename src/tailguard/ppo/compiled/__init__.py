"""Compiled passes over the standard networks: everything here is written twice, for speed, and tested against torch."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def as_array(tensor: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Return a tensor as compiled code needs it: detached, on the CPU, contiguous, of one dtype."""
    return tensor.detach().to("cpu", dtype).contiguous().numpy()
