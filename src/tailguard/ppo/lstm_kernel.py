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

    :param gates: ``[L, B, 4, H]``; after the backward pass the gradient of what goes into them. Fewer rows than L where no
        gradient is wanted.
    :param cells: ``[L + 1, B, H]``, before the first step and after each.
    :param hidden: the same.
    """

    gates: Tensor
    cells: Tensor
    hidden: Tensor

    @staticmethod
    def shapes(rows: int, kept: int, envs: int, size: int) -> tuple[tuple[int, ...], ...]:
        """How large they are, with `kept` rows of gates."""
        return (kept, envs, 4, size), (rows + 1, envs, size), (rows + 1, envs, size)


class PackedWeights(NamedTuple):
    """The weights as the kernel wants them, and its scratch.

    :param inward: ``[D, 4 H]``.
    :param recurrent: ``[H, 4 H]``.
    :param bias: ``[B, 4 H]``, the same for every environment.
    :param part: ``[B, 4 H]``.
    """

    inward: Any
    recurrent: Any
    bias: Any
    part: Any

    @staticmethod
    def shapes(envs: int, n_inputs: int, size: int) -> tuple[tuple[int, ...], ...]:
        """How large they are."""
        return (n_inputs, 4 * size), (size, 4 * size), (envs, 4 * size), (envs, 4 * size)


# Rows of gates in a pass without a gradient: few enough to stay in the cache.
FEW = 8


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


def weight_gradients(gates: Tensor, inputs: Tensor, hidden: Tensor, both: Tensor, into: Sequence[Tensor]) -> None:
    """From the gradient of what went into the gates to that of the two weight matrices.

    One product for both: torch's BLAS, which is the faster one where a product is a long sum, likes it wide.

    :param both: ``[L B + 4 H, H + D]``, scratch.
    :param into: the gradients of the weights of input and hidden state; filled.
    """
    rows, size = gates.flatten(2).flatten(0, 1), hidden.shape[-1]  # [L B, 4 H]
    z, gradient = both[: len(rows)], both[len(rows) :]
    torch.cat((hidden[:-1].flatten(0, 1), inputs.flatten(0, 1)), dim=1, out=z)
    torch.mm(rows.T, z, out=gradient)
    into[0].copy_(gradient[:, size:])
    into[1].copy_(gradient[:, :size])


def scratch_shape(rows: int, envs: int, n_inputs: int, size: int) -> tuple[int, int]:
    """What :func:`weight_gradients` needs for L steps of B environments."""
    return rows * envs + 4 * size, size + n_inputs


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
        wanted, x = any(ctx.needs_input_grad), inputs.contiguous()
        shapes = LstmBuffers.shapes(rows, rows if wanted else min(FEW, rows), envs, size)
        buffers = LstmBuffers(*map(torch.empty, shapes))
        packed = PackedWeights(*_arrays(*map(torch.empty, PackedWeights.shapes(envs, n_inputs, size))))
        kernels.pack_lstm(*_arrays(*(one.contiguous() for one in (w_input, w_hidden, b_input, b_hidden))), *packed[:3])
        buffers.cells[0], buffers.hidden[0] = cell, hidden
        kernels.lstm_forward(*_arrays(x, blanks.reshape(rows, envs).contiguous()), *packed, *_arrays(*buffers))
        ctx.save_for_backward(w_input, w_hidden, x, *(buffers if wanted else ()))
        after = buffers.hidden[1:], buffers.cells[1:]
        ctx.mark_non_differentiable(after[1])
        ctx.spent = False
        return after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        w_input, w_hidden, x, *saved = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError("the gradient of this sequence has been taken already; run it forward again to take another")
        ctx.spent = True  # the gates are overwritten
        buffers, size, n_inputs = LstmBuffers(*saved), w_hidden.shape[1], w_input.shape[1]
        state_slopes = torch.empty(2, *buffers.cells.shape[1:]).unbind()
        into_bias = torch.empty(4 * size)
        given = slopes.contiguous(), w_hidden.contiguous(), buffers.gates, buffers.cells, *state_slopes, into_bias
        kernels.lstm_backward(*_arrays(*given))
        into_inputs = None
        if ctx.needs_input_grad[0]:
            into_inputs = (buffers.gates.flatten(2).flatten(0, 1) @ w_input).view(*slopes.shape[:-1], n_inputs)
        if not any(ctx.needs_input_grad[4:]):  # an adversary moves inputs; their gradient is all it wants
            return into_inputs, None, *state_slopes, None, None, None, None
        into = torch.empty_like(w_input), torch.empty_like(w_hidden)
        weight_gradients(buffers.gates, x, buffers.hidden, torch.empty(scratch_shape(*x.shape, size)), into)
        return into_inputs, None, *state_slopes, *into, into_bias, into_bias.clone()


def _arrays(*tensors: Tensor) -> Any:
    return (tensor.detach().numpy() for tensor in tensors)
