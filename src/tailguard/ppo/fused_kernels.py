"""Compiled networks: LSTM over sequences with resets, and feed-forward heads, forwards and backwards, on flat float32 memory.

Everything compiled that calls each other lives in this one file, because numba's cache on disk looks at the file of a function
only. Three facts shape the code. BLAS multiplies small matrices twice as fast where they are contiguous, begin at a multiple of
64 bytes and have rows of whole cache lines, and where a product is small enough not to be repacked: so weights are copied
into such memory, transposed, once per pass, and long products are made in blocks of rows. The compiler uses vector
instructions in a loop only where it can check that the arrays in it do not overlap, which it gives up for more than a few: so
loops are short. And memory that is allocated anew costs as much as a pass over it: so callers bring all of it.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered and divisions shared, which vector code needs; NaN and infinities keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: Function) -> Function:
    """Compile for vector units, and keep it on disk."""
    return cast(Function, numba.njit(cache=True, error_model="numpy", fastmath=FAST)(function))


def inlined(function: Function) -> Function:
    """Compile into every function that calls it."""
    return cast(Function, numba.njit(inline="always", error_model="numpy", fastmath=FAST)(function))


# Floats in a cache line, to whose multiples rows are padded.
LINE = 16
# BLAS's limit for products that are not repacked, in multiplications.
SMALL = 1_000_000
TANH, RELU = 0, 1
ONE, HALF, ZERO = np.float32(1.0), np.float32(0.5), np.float32(0.0)
# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9: the rational function of these degrees with the smallest largest relative error
# (2e-8; the rest, 3e-7 in all, is rounding). Beyond 9, tanh is 1 in float32.
REACH = np.float32(9.0)
P0, P1, P2, P3, P4 = (
    np.float32(c)
    for c in (0.9999999794766474, 0.13381024303356806, 0.0034955865511567884, 2.060905730364038e-05, 1.3354628955466512e-08)
)
Q1, Q2, Q3, Q4 = (
    np.float32(c) for c in (0.46714339901074864, 0.025876976163773754, 0.0003285632276974693, 7.776544521771374e-07)
)


@inlined
def _tanh(x: Any) -> Any:
    """The hyperbolic tangent in a dozen operations that vectorise; NaN stays NaN."""
    y = REACH if x > REACH else (-REACH if x < -REACH else x)
    u = y * y
    above = (((P4 * u + P3) * u + P2) * u + P1) * u + P0
    below = (((Q4 * u + Q3) * u + Q2) * u + Q1) * u + ONE
    return y * above / below


@compiled
def product(left: Floats, right: Floats, out: Floats) -> None:
    """``out = left @ right`` in blocks of rows that BLAS takes as they are, where such blocks are worth having."""
    rows = SMALL // max(right.shape[0] * right.shape[1], 1)
    if rows < 8 or rows >= len(left):
        np.dot(left, right, out)
        return
    for first in range(0, len(left), rows):
        last = min(first + rows, len(left))
        np.dot(left[first:last], right, out[first:last])


@compiled
def _transpose(matrix: Floats, scale: np.float32, out: Floats) -> None:
    """``out = scale * matrix.T`` in small squares, each of which stays in the fastest cache."""
    rows, columns = matrix.shape
    for top in range(0, rows, LINE):
        for left in range(0, columns, LINE):
            for j in range(left, min(left + LINE, columns)):
                for i in range(top, min(top + LINE, rows)):
                    out[j, i] = scale * matrix[i, j]


@compiled
def columns_sum(matrix: Floats, out: Floats) -> None:
    """Sums of the columns of ``[M, N]``, four rows at a time."""
    whole = len(matrix) // 4 * 4
    out[:] = ZERO
    for m in range(0, whole, 4):
        one, two, three, four = matrix[m], matrix[m + 1], matrix[m + 2], matrix[m + 3]
        for j in range(len(out)):
            out[j] += (one[j] + two[j]) + (three[j] + four[j])
    for m in range(whole, len(matrix)):
        row = matrix[m]
        for j in range(len(out)):
            out[j] += row[j]


# ------------------------------------------------------------------------------------------------------------------ LSTM
#
# The four gates stand in planes of their own, ``[4, L, B, H]`` in torch's order (input, forget, candidate, output), so that all
# environments of a step are one contiguous loop. z = [h, x, 0], ``[L, B, W]``, has both inputs of a step side by side.


@compiled
def pack_lstm(w_input: Floats, w_hidden: Floats, b_input: Floats, b_hidden: Floats, weights: Floats, bias: Floats) -> None:
    """Weights ``[4, W, H]``, and the bias of every environment ``[4, B, H]``, for :func:`lstm_forward`.

    sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, and the halves inside are taken here.
    """
    size, inputs = w_hidden.shape[1], w_input.shape[1]
    for gate in range(4):
        first, last = gate * size, (gate + 1) * size
        half = ONE if gate == 2 else HALF
        _transpose(w_hidden[first:last], half, weights[gate, :size])
        _transpose(w_input[first:last], half, weights[gate, size : size + inputs])
        weights[gate, size + inputs :] = ZERO
        for b in range(bias.shape[1]):
            for j in range(size):
                bias[gate, b, j] = half * (b_input[first + j] + b_hidden[first + j])


@compiled
def _open(gate: Floats, bias: Floats) -> None:
    """From what goes into a gate, halved, to the gate, in place."""
    for j in range(len(gate)):
        gate[j] = _tanh(gate[j] + bias[j]) * HALF + HALF


@compiled
def _beside(left: Floats, right: Floats, out: Floats) -> None:
    """Copy two matrices side by side; explicit loops are faster than assignments here."""
    size, width = left.shape[1], right.shape[1]
    for b in range(len(out)):
        one, other, row, rest = left[b], right[b], out[b, :size], out[b, size : size + width]
        for j in range(size):
            row[j] = one[j]
        for j in range(width):
            rest[j] = other[j]


@compiled
def lstm_forward(
    inputs: Floats,
    blanks: Floats,
    first_hidden: Floats,
    first_cell: Floats,
    weights: Floats,
    bias: Floats,
    z: Floats,
    gates: Floats,
    cells: Floats,
    hidden: Floats,
) -> None:
    """L steps: fill `z`, the activated `gates`, and ``[L, B, H]`` each `cells` and `hidden`.

    Where no gradient is wanted, `z` and `gates` may have a single row, which is used again and again.
    """
    rows, envs, size = cells.shape
    n, several = envs * size, len(z) == rows
    planes, cell_rows, hidden_rows = gates.reshape(4, len(z), n), cells.reshape(rows, n), hidden.reshape(rows, n)
    shift, start = bias.reshape(4, n), first_cell.reshape(n)
    z[:, :, size + inputs.shape[2] :] = ZERO
    for t in range(rows):
        k = t if several else 0
        _beside(first_hidden if t == 0 else hidden[t - 1], inputs[t], z[k])
        for gate in range(4):
            product(z[k], weights[gate], gates[gate, k])
        enter, keep, candidate, leave = planes[0, k], planes[1, k], planes[2, k], planes[3, k]
        _open(enter, shift[0])
        _open(keep, shift[1])
        _open(leave, shift[3])
        by = shift[2]
        for j in range(len(by)):
            candidate[j] = _tanh(candidate[j] + by[j])
        old, cell, out = start if t == 0 else cell_rows[t - 1], cell_rows[t], hidden_rows[t]
        for j in range(len(old)):
            cell[j] = keep[j] * old[j] + enter[j] * candidate[j]
        for j in range(len(old)):
            out[j] = leave[j] * _tanh(cell[j])
        for b in range(envs):
            if blanks[t, b] != ZERO:
                gates[:, k, b], cells[t, b], hidden[t, b] = ZERO, ZERO, ZERO


@compiled
def lstm_backward(
    slopes: Floats,
    first_cell: Floats,
    w_hidden: Floats,
    gates: Floats,
    cells: Floats,
    into_hidden: Floats,
    into_cell: Floats,
) -> None:
    """Replace the activated `gates` by the gradient of what went into them, given that of the hidden states, `slopes`.

    At a blank all gates are 0, which stops every gradient of its own accord.

    :param w_hidden: ``[4, H, H]``.
    :param into_hidden: ``[4, B, H]``; leaves as the parts, by gate, of the gradient of the hidden state before the first step.
    :param into_cell: ``[B, H]``; leaves as the gradient of the cell before it.
    """
    rows, envs, size = cells.shape
    into_hidden[:], into_cell[:] = ZERO, ZERO
    n = envs * size
    planes, cell_rows, slope_rows = gates.reshape(4, rows, n), cells.reshape(rows, n), slopes.reshape(rows, n)
    start, down, parts = first_cell.reshape(n), into_cell.reshape(n), into_hidden.reshape(4, n)
    one, two, three, four = parts[0], parts[1], parts[2], parts[3]
    above, through, flat = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    for t in range(rows - 1, -1, -1):
        slope, cell, old = slope_rows[t], cell_rows[t], start if t == 0 else cell_rows[t - 1]
        enter, keep, candidate, leave = planes[0, t], planes[1, t], planes[2, t], planes[3, t]
        for j in range(len(old)):
            above[j] = slope[j] + ((one[j] + two[j]) + (three[j] + four[j]))
        for j in range(len(old)):
            flat[j] = _tanh(cell[j])  # again: cheaper than to keep it
        for j in range(len(old)):
            through[j] = down[j] + above[j] * leave[j] * (ONE - flat[j] * flat[j])
        for j in range(len(old)):
            leave[j] *= above[j] * flat[j] * (ONE - leave[j])
        for j in range(len(old)):
            down[j] = through[j] * keep[j]
            keep[j] *= through[j] * old[j] * (ONE - keep[j])
        for j in range(len(old)):
            i, g = enter[j], candidate[j]
            enter[j] = through[j] * g * i * (ONE - i)
            candidate[j] = through[j] * i * (ONE - g * g)
        for gate in range(4):
            product(gates[gate, t], w_hidden[gate], into_hidden[gate])


@compiled
def unpack_lstm_gradient(
    both: Floats, gates: Floats, into_input: Floats, into_hidden: Floats, into_bias: Floats, into_other: Floats
) -> None:
    """Spread the gradient ``[4 H, W]`` of both weight matrices side by side, and find that of the biases, ``[4 H]``."""
    size, inputs = into_hidden.shape[1], into_input.shape[1]
    for i in range(4 * size):
        row, one, other = both[i], into_hidden[i], into_input[i]
        for j in range(size):
            one[j] = row[j]
        for j in range(inputs):
            other[j] = row[size + j]
    for gate in range(4):
        columns_sum(gates[gate], into_bias[gate * size : (gate + 1) * size])
    into_other[:] = into_bias


# ----------------------------------------------------------------------------------------------------------------- heads


@inlined
def _rows_of(buffer: Any, start: int, rows: int, columns: int) -> Any:
    return buffer[start : start + rows * columns].reshape(rows, columns)


@inlined
def _padded(count: int) -> int:
    return (count + LINE - 1) // LINE * LINE


@compiled
def mlp_forward(flat: Floats, table: Integers, activation: int, inputs: Floats, values: Floats, scratch: Floats) -> None:
    """A head on the rows of `inputs` ``[M, n]``.

    :param flat: all parameters.
    :param table: a row for each layer: where its weights and its bias begin, how many inputs and outputs it has.
    :param values: the outputs of all layers one after the other, ``[M, n]`` each, each at a multiple of a cache line.
    :param scratch: room for the largest layer's weights.
    """
    rows, start, x = len(inputs), 0, inputs
    for layer in range(len(table)):
        at, bias_at, n_in, n_out = table[layer]
        weights = _rows_of(scratch, 0, n_in, n_out)
        _transpose(_rows_of(flat, at, n_out, n_in), ONE, weights)
        bias, y = flat[bias_at : bias_at + n_out], _rows_of(values, start, rows, n_out)
        product(x, weights, y)
        if layer == len(table) - 1:
            for m in range(rows):
                row = y[m]
                for j in range(n_out):
                    row[j] += bias[j]
        elif activation == TANH:
            for m in range(rows):
                row = y[m]
                for j in range(n_out):
                    row[j] = _tanh(row[j] + bias[j])
        else:
            for m in range(rows):
                row = y[m]
                for j in range(n_out):
                    value = row[j] + bias[j]
                    row[j] = ZERO if value < ZERO else value
        x, start = y, start + _padded(rows * n_out)


@compiled
def beside_constant(left: Floats, constant: Floats, out: Floats) -> None:
    """``out = [left, constant]``, the same constants ``[A]`` in every row."""
    size = left.shape[1]
    for m in range(len(left)):
        for a in range(size):
            out[m, a], out[m, size + a] = left[m, a], constant[a]


@compiled
def draw_gaussian(means: Floats, log_std: Floats, noise: Floats, outputs: Floats, actions: Floats) -> None:
    """The row of a rollout: ``outputs = [means, log_std]`` and ``actions = means + exp(log_std) noise``."""
    beside_constant(means, log_std, outputs)
    for a in range(len(log_std)):
        std = np.exp(log_std[a])
        for b in range(len(means)):
            actions[b, a] = means[b, a] + std * noise[b, a]


@compiled
def apart_from_constant(slopes: Floats, into_left: Floats, into_constant: Floats) -> None:
    """The way back: the gradient of `left`, and that of the constants, which is a sum over all rows."""
    size = into_left.shape[1]
    for a in range(size):
        total = 0.0
        for m in range(len(slopes)):
            into_left[m, a] = slopes[m, a]
            total += slopes[m, size + a]
        into_constant[a] = total


@compiled
def _outer(slopes: Floats, inputs: Floats, out: Floats, scratch: Floats) -> None:
    """``out = slopes.T @ inputs``, in blocks of rows whose products are added up in `scratch`."""
    n_out, n_in = out.shape
    rows = max(SMALL // (n_in * n_out), LINE)
    part = _rows_of(scratch, 0, n_out, n_in)
    out[:] = ZERO
    for first in range(0, len(slopes), rows):
        last = min(first + rows, len(slopes))
        np.dot(slopes[first:last].T, inputs[first:last], part)
        for i in range(n_out):
            total, one = out[i], part[i]
            for j in range(n_in):
                total[j] += one[j]


@compiled
def mlp_backward(
    flat: Floats,
    gradient: Floats,
    table: Integers,
    activation: int,
    inputs: Floats,
    values: Floats,
    slopes: Floats,
    into_inputs: Floats,
    add: bool,
    scratch: Floats,
) -> None:
    """Write the gradient of a head's parameters into `gradient`, which is laid out as `flat`.

    :param slopes: as `values`; the gradient of the last layer's outputs stands in it already, the others are filled in.
    :param into_inputs: ``[M, n]``, the gradient of the inputs; of no rows if nobody wants it.
    :param add: add to what stands there.
    """
    rows, last = len(inputs), len(table) - 1
    start = 0
    for layer in range(last):
        start += _padded(rows * table[layer, 3])
    for layer in range(last, -1, -1):
        at, bias_at, n_in, n_out = table[layer]
        slope = _rows_of(slopes, start, rows, n_out)
        below = start if layer == 0 else start - _padded(rows * n_in)
        x = inputs if layer == 0 else _rows_of(values, below, rows, n_in)
        _outer(slope, x, _rows_of(gradient, at, n_out, n_in), scratch)
        columns_sum(slope, gradient[bias_at : bias_at + n_out])
        weights = _rows_of(scratch, 0, n_out, n_in)
        weights[:] = _rows_of(flat, at, n_out, n_in)
        if layer > 0:
            into = _rows_of(slopes, below, rows, n_in)
            product(slope, weights, into)
            for m in range(rows):
                one, y = into[m], x[m]
                if activation == TANH:
                    for j in range(n_in):
                        one[j] *= ONE - y[j] * y[j]
                else:
                    for j in range(n_in):
                        one[j] = one[j] if y[j] > ZERO else ZERO
        elif len(into_inputs) and not add:
            product(slope, weights, into_inputs)
        elif len(into_inputs):
            into = _rows_of(scratch, _padded(n_in * n_out), rows, n_in)
            product(slope, weights, into)
            for m in range(rows):
                total, one = into_inputs[m], into[m]
                for j in range(n_in):
                    total[j] += one[j]
        start = below
