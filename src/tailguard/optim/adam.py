"""torch's Adam with its step as one compiled pass over float32 memory of the CPU."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tailguard.optim import kernels
from tailguard.optim.layout import as_float32, flat_array, kernels_apply
from tailguard.optim.step_scaling import WHOLE, RangeScaledOptimizer
from tailguard.validation import require


class Adam(RangeScaledOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with the same state, faster where a parameter is one large tensor.

    A step of torch's spends more time on overhead than on arithmetic.

    :param params: contiguous float32 tensors on the CPU, see :func:`tailguard.optim.layout.kernels_apply`.
    :param options: ``lr``, ``betas``, ``eps`` and ``weight_decay`` of torch's Adam.
    """

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, as torch's Adam does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for option in ("amsgrad", "maximize", "capturable", "differentiable"):
                require(not group[option], option, group[option], "False; use torch.optim.Adam for it")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
        if not kernels_apply([parameter, gradient]):
            raise ValueError("this Adam needs contiguous float32 tensors on the CPU; torch.optim.Adam takes any")
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        step, (beta1, beta2) = state["step"].item() + 1.0, group["betas"]
        state["step"].fill_(step)
        # m / w1 / (sqrt(v / w2) + eps) with both corrections moved out of the loop
        root = math.sqrt(1.0 - beta2**step)
        size = float(group["lr"]) * root / (1.0 - beta1**step)
        numbers = as_float32(1.0 - beta1, beta2, 1.0 - beta2, group["eps"] * root, group["weight_decay"])
        tensors = parameter.detach(), gradient, state["exp_avg"], state["exp_avg_sq"]
        weights, grad, first, second = map(flat_array, tensors)
        for span, factor in self.scaled_ranges.get(parameter, WHOLE):
            kernels.adam(weights[span], grad[span], first[span], second[span], np.float32(factor * size), *numbers)
