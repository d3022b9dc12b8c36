"""torch's Adam, whose step on float32 memory of the CPU is one compiled pass."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tailguard.optim import kernels
from tailguard.optim.fused import fits, flat_array


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` in everything, state included; only its step is faster where a parameter is one large tensor.

    A step of torch's costs as much for what surrounds it as for the arithmetic. It is still left to torch where a parameter
    lies elsewhere than in contiguous float32 memory of the CPU, in the first step, which makes the state, with a closure, and for
    the options amsgrad, maximize, capturable and differentiable.
    """

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, as torch's."""
        if closure is not None or not all(self._is_plain(group) for group in self.param_groups):
            return super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _move(parameter.detach(), parameter.grad, self.state[parameter], group)
        return None

    def _is_plain(self, group: dict[str, Any]) -> bool:
        """Whether the compiled pass does the same as torch for all parameters of the group."""
        if any(group[option] for option in ("amsgrad", "maximize", "capturable", "differentiable")):
            return False
        pairs = [(one, one.grad) for one in group["params"] if one.grad is not None]
        return all(len(self.state[one]) == 3 and fits([one, grad]) for one, grad in pairs)


def _move(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    step, (beta1, beta2) = state["step"].item() + 1.0, group["betas"]
    state["step"].fill_(step)
    # m / w1 / (sqrt(v / w2) + eps) with both corrections moved out of the loop
    root = math.sqrt(1.0 - beta2**step)
    size = float(group["lr"]) * root / (1.0 - beta1**step)
    numbers = (1.0 - beta1, beta2, 1.0 - beta2, size, group["eps"] * root, group["weight_decay"])
    arrays = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
    kernels.adam(*map(flat_array, arrays), *map(np.float32, numbers))
