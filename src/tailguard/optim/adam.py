"""torch's Adam, whose step on float32 memory of the CPU is one compiled pass."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tailguard.optim import kernels
from tailguard.optim.fused import fits, flat_array, rounded
from tailguard.optim.pieces import Piece, Piecewise
from tailguard.validation import require


class Adam(Piecewise, torch.optim.Adam):
    """``torch.optim.Adam`` with its plain options, state and all; the step is faster where a parameter is one large tensor.

    A step of torch's costs more for what surrounds it than for the arithmetic.

    :param params: contiguous float32 tensors in memory of the CPU, as :func:`tailguard.optim.fused.fits` says.
    :param options: ``lr``, ``betas``, ``eps`` and ``weight_decay`` of torch's.
    """

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as torch's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for option in ("amsgrad", "maximize", "capturable", "differentiable"):
                require(not group[option], option, group[option], "False; torch.optim.Adam knows it")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter.detach(), parameter.grad, self.state[parameter], group, self.pieces(parameter))
        return loss

    def _move(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], pieces: Sequence[Piece]
    ) -> None:
        if not fits([parameter, gradient]):
            raise ValueError("this Adam needs contiguous float32 tensors on the CPU; torch.optim.Adam takes any")
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        step, (beta1, beta2) = state["step"].item() + 1.0, group["betas"]
        state["step"].fill_(step)
        # m / w1 / (sqrt(v / w2) + eps) with both corrections moved out of the loop
        root = math.sqrt(1.0 - beta2**step)
        size = float(group["lr"]) * root / (1.0 - beta1**step)
        numbers = rounded(1.0 - beta1, beta2, 1.0 - beta2, group["eps"] * root, group["weight_decay"])
        weights, slope = flat_array(parameter), flat_array(gradient)
        first, second = flat_array(state["exp_avg"]), flat_array(state["exp_avg_sq"])
        for span, factor in pieces:
            kernels.adam(weights[span], slope[span], first[span], second[span], np.float32(factor * size), *numbers)
