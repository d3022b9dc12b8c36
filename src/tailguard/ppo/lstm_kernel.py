"""A layer of LSTM over whole sequences with resets, as torch's autograd sees the compiled one (fused_kernels.py).

The kernel works on float32 on the CPU. Everything else, and whoever asks for it, is served by ``torch.lstm`` (trunk.py),
against which this is tested.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tailguard.ppo import fused_kernels as kernels


class LstmBuffers(NamedTuple):
    """What the kernel fills in L steps of B environments.

    :param z: ``[L, B, W]``, hidden state and inputs of each step side by side, padded with 0.
    :param gates: ``[4, L, B, H]``; after the backward pass the gradient of what goes into them.
    :param cells: ``[L, B, H]``.
    :param hidden: ``[L, B, H]``.
    """

    z: Tensor
    gates: Tensor
    cells: Tensor
    hidden: Tensor

    @classmethod
    def empty(cls, rows: int, kept: int, envs: int, n_inputs: int, size: int) -> "LstmBuffers":
        """New buffers; `kept` is `rows` where a gradient will be wanted, else 1."""
        return cls(*map(torch.empty, cls.shapes(rows, kept, envs, n_inputs, size)))

    @staticmethod
    def shapes(rows: int, kept: int, envs: int, n_inputs: int, size: int) -> tuple[tuple[int, ...], ...]:
        """How large they are."""
        return (kept, envs, padded(n_inputs + size)), (4, kept, envs, size), (rows, envs, size), (rows, envs, size)


def padded(count: int) -> int:
    """Up to the next multiple of a cache line of floats."""
    return -(-count // kernels.LINE) * kernels.LINE


def lstm_layer(inputs: Tensor, blanks: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """L steps of one layer.

    :param inputs: ``[L, B, D]``, float32 on the CPU.
    :param blanks: ``[L, B, 1]``, 1 where the memory is wiped.
    :param hidden: ``[B, H]`` before the first step.
    :param cell: ``[B, H]`` before the first step.
    :param weights: of input and hidden state, ``[4 H, D]`` and ``[4 H, H]``, and the two biases, as ``nn.LSTM`` orders them.
    :return: hidden and cell states after each step, ``[L, B, H]``; gradients flow through the hidden ones.
    """
    return cast(tuple[Tensor, Tensor], _Layer.apply(inputs, blanks, hidden, cell, *weights))  # type: ignore[no-untyped-call]


def weight_gradients(gates: Tensor, z: Tensor, both: Tensor, into: Sequence[Any]) -> None:
    """From the gradient of what went into the gates to that of the weights.

    :param both: ``[4, H, W]``, scratch.
    :param into: arrays as the `weights` of :func:`lstm_layer`; filled.
    """
    rows = gates.flatten(1, 2)  # [4, L B, H]
    torch.bmm(rows.transpose(1, 2), z.flatten(0, 1).expand(4, -1, z.shape[-1]), out=both)
    kernels.unpack_lstm_gradient(both.flatten(0, 1).numpy(), rows.numpy(), *into)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        blanks: Tensor,
        hidden: Tensor,
        cell: Tensor,
        w_input: Tensor,
        w_hidden: Tensor,
        b_input: Tensor,
        b_hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (rows, envs, n_inputs), size = inputs.shape, w_hidden.shape[1]
        wanted = any(ctx.needs_input_grad)
        buffers = LstmBuffers.empty(rows, rows if wanted else 1, envs, n_inputs, size)
        packed = torch.empty(4, buffers.z.shape[-1], size), torch.empty(4, envs, size)
        kernels.pack_lstm(*_arrays(w_input, w_hidden, b_input, b_hidden, *packed))
        start = cell.contiguous()
        given = inputs, blanks.reshape(rows, envs), hidden, start
        kernels.lstm_forward(*_arrays(*(one.contiguous() for one in given), *packed, *buffers))
        ctx.save_for_backward(w_input, w_hidden, start, *(buffers if wanted else ()))
        ctx.mark_non_differentiable(buffers.cells)
        ctx.spent = False
        return buffers.hidden, buffers.cells

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        w_input, w_hidden, start, *saved = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError("the gradient of this sequence has been taken already; run it forward again to take another")
        ctx.spent = True  # the gates are overwritten
        buffers, size, n_inputs = LstmBuffers(*saved), w_hidden.shape[1], w_input.shape[1]
        into_hidden, into_cell = torch.empty(4, *start.shape), torch.empty_like(start)
        by_gate = w_hidden.contiguous().reshape(4, size, size)
        given = slopes.contiguous(), start, by_gate, buffers.gates, buffers.cells, into_hidden, into_cell
        kernels.lstm_backward(*_arrays(*given))
        into_inputs = None
        if ctx.needs_input_grad[0]:
            by_row = torch.bmm(buffers.gates.flatten(1, 2), w_input.reshape(4, size, n_inputs)).sum(0)
            into_inputs = by_row.view(*slopes.shape[:-1], n_inputs)
        if not any(ctx.needs_input_grad[4:]):  # an adversary moves inputs; their gradient is all it wants
            return into_inputs, None, into_hidden.sum(0), into_cell, None, None, None, None
        into = [torch.empty_like(w_input), torch.empty_like(w_hidden), start.new_empty(4 * size), start.new_empty(4 * size)]
        weight_gradients(buffers.gates, buffers.z, start.new_empty(4, size, buffers.z.shape[-1]), list(_arrays(*into)))
        return into_inputs, None, into_hidden.sum(0), into_cell, *into


def _arrays(*tensors: Tensor) -> Any:
    return (tensor.detach().numpy() for tensor in tensors)
