"""A layer of LSTM over whole sequences with resets, compiled for the small batches that PPO has.

With z_t = [x_t, 1, h_{t-1}] and W = [W_input, b, W_hidden] a step is

    i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of the four parts of W z_t
    c_t = f c_{t-1} + i g        h_t = o tanh(c_t)        and c_t = h_t = 0 at a blank.

All z stand in one buffer ``[L + 1, B, D + 1 + H]``, into which h_t is written where step t + 1 reads it. So a step is one small
matrix product and one pass over its result, and the gradient of all weights is one large product, with nothing copied.

Numba compiles this at its first use and keeps it on disk; matrix products are BLAS's. The kernel works on float32 on the CPU.
Everything else, and whoever asks for it, is served by ``torch.lstm`` (trunk.py), against which this is tested.
"""

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float32]

# Vector code needs sums in any order and division without a check for 0; NaN and infinities keep their meaning.
_compile = numba.njit(cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})
_inline = numba.njit(inline="always", error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})

# ln 2 in two parts; the first has few digits, so that its product with a small integer is exact.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(np.log(2.0) - 0.693359375)
LOG2_E = np.float32(1.0 / np.log(2.0))
HALF, ONE, TWO = np.float32(0.5), np.float32(1.0), np.float32(2.0)
# Taylor's 1 / k! for k = 2 .. 7: on |r| <= ln(2) / 2 the rest is below the precision of float32.
C2, C3, C4, C5, C6, C7 = (np.float32(1.0 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
# tanh is 1 in float32 from here on.
FLAT = np.float32(10.0)


@_inline
def _tanh(x: Any) -> Any:
    """tanh(x) = e / (e + 2) with e = exp(2 x) - 1, found as 2^n (exp(r) - 1) + (2^n - 1): exact near 0 as well."""
    y = min(max(x, -FLAT), FLAT) * TWO
    n = np.floor(y * LOG2_E + HALF)
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    series = ((((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2) * r + ONE) * r
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2^n by its bits
    e = power * series + (power - ONE)
    return e / (e + TWO)


@_compile
def _advance(raw: Any, gate: Any, old: Any, cell: Any, flat: Any, hidden: Any, slope: Any, shift: Any) -> None:
    """One step of one environment from `raw`, what goes into its gates.

    Short loops on purpose: each touches few enough arrays for the compiler to check that they do not overlap, and to use
    vector instructions.
    """
    size = len(cell)
    for j in range(4 * size):
        gate[j] = _tanh(raw[j] * slope[j]) * slope[j] + shift[j]
    for j in range(size):
        cell[j] = gate[size + j] * old[j] + gate[j] * gate[2 * size + j]
    for j in range(size):
        flat[j] = _tanh(cell[j])
    for j in range(size):
        hidden[j] = gate[3 * size + j] * flat[j]


@_compile
def _gate_shapes(size: int) -> Any:
    """Three sigmoids and a tanh in one: slope tanh(slope x) + shift, since sigmoid(x) = tanh(x / 2) / 2 + 1 / 2."""
    slope, shift = np.full(4 * size, HALF), np.full(4 * size, HALF)
    slope[2 * size : 3 * size], shift[2 * size : 3 * size] = ONE, np.float32(0.0)
    return slope, shift


def _forward(z: Array, weights: Array, blanks: Array, start: Array, gates: Array, cells: Array, squashed: Array) -> None:
    """Fill the hidden part of `z`, the four activated `gates`, the `cells` and their tanh, `squashed`, row by row."""
    rows, envs, size = cells.shape
    inputs = z.shape[2] - size
    product = np.empty((envs, 4 * size), np.float32)
    slope, shift = _gate_shapes(size)
    for t in range(rows):
        np.dot(z[t], weights, product)
        before = start if t == 0 else cells[t - 1]
        for b in range(envs):
            gate, cell, flat, hidden = gates[t, b], cells[t, b], squashed[t, b], z[t + 1, b, inputs:]
            if blanks[t, b] != 0.0:
                gate[:], cell[:], flat[:], hidden[:] = 0.0, 0.0, 0.0, 0.0
            else:
                _advance(product[b], gate, before[b], cell, flat, hidden, slope, shift)


def _backward(
    slopes: Array,
    w_hidden: Array,
    blanks: Array,
    start: Array,
    gates: Array,
    cells: Array,
    squashed: Array,
    into_hidden: Array,
    into_cell: Array,
) -> None:
    """Replace the activated `gates` by the gradient of what went into them, given that of the outputs, `slopes`.

    `into_hidden` and `into_cell` come in as 0 and leave as the gradient of the state before the first step.
    """
    rows, envs, size = cells.shape
    for t in range(rows - 1, -1, -1):
        before = start if t == 0 else cells[t - 1]
        for b in range(envs):
            if blanks[t, b] != 0.0:  # its gates are 0, and so is their gradient
                into_cell[b] = 0.0
                continue
            gate, old, flat, slope = gates[t, b], before[b], squashed[t, b], slopes[t, b]
            carried, cell_slope = into_hidden[b], into_cell[b]
            for j in range(size):
                i, f, g, o = gate[j], gate[size + j], gate[2 * size + j], gate[3 * size + j]
                above = carried[j] + slope[j]
                through = cell_slope[j] + above * o * (ONE - flat[j] * flat[j])
                gate[j] = through * g * i * (ONE - i)
                gate[size + j] = through * old[j] * f * (ONE - f)
                gate[2 * size + j] = through * i * (ONE - g * g)
                gate[3 * size + j] = above * flat[j] * o * (ONE - o)
                cell_slope[j] = through * f
        np.dot(gates[t], w_hidden, into_hidden)


_forward_compiled = cast(Callable[..., None], _compile(_forward))
_backward_compiled = cast(Callable[..., None], _compile(_backward))


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
        z = inputs.new_empty(rows + 1, envs, n_inputs + 1 + size)
        z[:-1, :, :n_inputs] = inputs
        z[:-1, :, n_inputs] = 1.0
        z[0, :, n_inputs + 1 :] = hidden
        weights = torch.cat((w_input.t(), (b_input + b_hidden).unsqueeze(0), w_hidden.t()))
        gates = inputs.new_empty(rows, envs, 4 * size)
        cells, squashed = inputs.new_empty(rows, envs, size), inputs.new_empty(rows, envs, size)
        start, blanks = cell.contiguous(), blanks.reshape(rows, envs).contiguous()
        _forward_compiled(*(tensor.numpy() for tensor in (z, weights, blanks, start, gates, cells, squashed)))
        ctx.save_for_backward(z, w_input, w_hidden, blanks, start, gates, cells, squashed)
        ctx.mark_non_differentiable(cells)
        ctx.spent = False
        return z[1:, :, n_inputs + 1 :], cells

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        z, w_input, w_hidden, blanks, start, gates, cells, squashed = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError("the gradient of this sequence has been taken already; run it forward again to take another")
        ctx.spent = True  # the gates are overwritten
        into_hidden, into_cell = torch.zeros_like(start), torch.zeros_like(start)
        arrays = (slopes.contiguous(), w_hidden.detach(), blanks, start, gates, cells, squashed, into_hidden, into_cell)
        _backward_compiled(*(tensor.numpy() for tensor in arrays))
        flat, n_inputs = gates.flatten(0, 1), w_input.shape[1]
        into_inputs = (flat @ w_input).reshape(*gates.shape[:2], n_inputs) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[4:]):  # an adversary moves inputs; their gradient is all it wants
            return into_inputs, None, into_hidden, into_cell, None, None, None, None
        into_weights = z[:-1].flatten(0, 1).t() @ flat  # [D + 1 + H, 4 H]
        into_bias = into_weights[n_inputs]
        into_input_weights, into_hidden_weights = into_weights[:n_inputs].t(), into_weights[n_inputs + 1 :].t()
        return into_inputs, None, into_hidden, into_cell, into_input_weights, into_hidden_weights, into_bias, into_bias
