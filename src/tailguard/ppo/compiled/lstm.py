"""A layer of LSTM over whole sequences with resets, as torch's autograd sees the compiled one (fused_kernels.py).

The kernel works on float32 on the CPU. Everything else, and whoever asks for it, is served by ``torch.lstm`` (trunk.py),
against which this is tested.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.ppo.compiled import kernels as kernels

Array = NDArray[np.float32]


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

    inward: Array
    recurrent: Array
    bias: Array
    part: Array

    @staticmethod
    def shapes(envs: int, n_inputs: int, size: int) -> tuple[tuple[int, ...], ...]:
        """How large they are."""
        return (n_inputs, 4 * size), (size, 4 * size), (envs, 4 * size), (envs, 4 * size)

    def fill(self, w_input: Array, w_hidden: Array, b_input: Array, b_hidden: Array) -> None:
        """From the weights as ``nn.LSTM`` has them."""
        kernels.pack_lstm(w_input, w_hidden, b_input, b_hidden, self.inward, self.recurrent, self.bias)


# Rows of gates in a pass without a gradient: few enough to stay in the cache.
FEW = 8


def padded(count: int) -> int:
    """Up to the next multiple of a cache line of floats."""
    return -(-count // kernels.LINE) * kernels.LINE


def lstm_layer(inputs: Tensor, resets: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """L steps of one layer.

    :param inputs: ``[L, B, D]``, float32 on the CPU.
    :param blanks: ``[L, B, 1]``, 1 where the memory is wiped.
    :param hidden: ``[B, H]`` before the first step.
    :param cell: ``[B, H]`` before the first step.
    :param weights: of input and hidden state, ``[4 H, D]`` and ``[4 H, H]``, and the two biases, as ``nn.LSTM`` orders them.
    :return: hidden and cell states after each step, ``[L, B, H]``; gradients flow through the hidden ones.
    """
    return cast(tuple[Tensor, Tensor], _Layer.apply(inputs, resets, hidden, cell, *weights))  # type: ignore[no-untyped-call]


class WeightGradients:
    """From the gradient of what went into the gates to that of the two weight matrices.

    One product for both: torch's BLAS, which is the faster one where a product is a long sum, likes it wide.

    :param buffers: of L steps of B environments, after the backward pass.
    :param scratch: of the shape that :meth:`scratch_shape` says.
    """

    def __init__(self, buffers: LstmBuffers, scratch: Tensor) -> None:
        size, before = buffers.hidden.shape[-1], buffers.hidden[:-1].flatten(0, 1)
        self._gates, self._before = buffers.gates.flatten(2).flatten(0, 1).T, before  # [4 H, L B], [L B, H]
        self._z, self._both = scratch[: len(before)], scratch[len(before) :]
        self._of_hidden, self._of_input = self._both[:, :size], self._both[:, size:]

    @staticmethod
    def scratch_shape(rows: int, envs: int, n_inputs: int, size: int) -> tuple[int, int]:
        """For both inputs of every step side by side, and below them the gradient of both matrices."""
        return rows * envs + 4 * size, size + n_inputs

    def fill(self, inputs: Tensor, into_input: Tensor, into_hidden: Tensor) -> None:
        """Fill the gradients of the weights.

        :param inputs: ``[L B, D]``.
        """
        torch.cat((self._before, inputs), dim=1, out=self._z)
        torch.mm(self._gates, self._z, out=self._both)
        into_input.copy_(self._of_input)
        into_hidden.copy_(self._of_hidden)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        resets: Tensor,
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
        packed.fill(*_arrays(*(one.contiguous() for one in (w_input, w_hidden, b_input, b_hidden))))
        buffers.cells[0], buffers.hidden[0] = cell, hidden
        given = _arrays(x, resets.reshape(rows, envs).contiguous())
        kernels.lstm_forward(*given, *packed, *_arrays(*buffers))  # type: ignore[call-arg]  # mypy cannot count them
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
        scratch = torch.empty(WeightGradients.scratch_shape(x.shape[0], x.shape[1], n_inputs, size))
        WeightGradients(buffers, scratch).fill(x.flatten(0, 1), *into)
        return into_inputs, None, *state_slopes, *into, into_bias, into_bias.clone()


def _arrays(*tensors: Tensor) -> Any:
    return (tensor.detach().numpy() for tensor in tensors)
