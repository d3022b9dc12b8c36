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
    """Compile into whoever calls it: see :func:`tailguard.optim.kernels.inlined`."""
    return cast(Function, numba.njit(inline="always", error_model="numpy", fastmath=FAST)(function))


# Floats in a cache line, to whose multiples rows are padded.
LINE = 16
# BLAS's limit for products that are not repacked, in multiplications.
SMALL = 1_000_000
TANH, RELU = 0, 1
ONE, HALF, QUARTER, ZERO = np.float32(1.0), np.float32(0.5), np.float32(0.25), np.float32(0.0)
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


@inlined
def _product(left: Floats, right: Floats, out: Floats) -> None:
    """``out = left @ right`` in even blocks of rows that BLAS takes as they are, where such blocks are worth having."""
    most = SMALL // max(right.shape[0] * right.shape[1], 1)
    if most < 8 or most >= len(left):
        np.dot(left, right, out)
        return
    blocks = -(-len(left) // most)
    rows = -(-len(left) // blocks)
    for first in range(0, len(left), rows):
        last = min(first + rows, len(left))
        np.dot(left[first:last], right, out[first:last])


@inlined
def _transpose(matrix: Floats, out: Floats) -> None:
    """``out = matrix.T`` in small squares, each of which stays in the fastest cache."""
    rows, columns = matrix.shape
    for top in range(0, rows, LINE):
        for left in range(0, columns, LINE):
            for j in range(left, min(left + LINE, columns)):
                for i in range(top, min(top + LINE, rows)):
                    out[j, i] = matrix[i, j]


@inlined
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
# The four gates of an environment stand side by side, ``[L, B, 4, H]`` in torch's order (input, forget, candidate, output), so
# that a step is one product and so is the gradient of all weights. Since sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, all four are
# kept as a tanh, and the halves inside are taken from the weights. Hidden and cell states are ``[L + 1, B, H]``: row 0 is the
# state before the first step, and all rows but the last are what the steps began with.


@inlined
def _sigmoid(tangent: Any) -> Any:
    return HALF * tangent + HALF


@inlined
def _sigmoid_slope(tangent: Any) -> Any:
    return QUARTER * (ONE - tangent * tangent)


@inlined
def _halve(weights: Floats) -> None:
    """What goes into the three gates with a sigmoid, in ``[M, 4, H]``."""
    for m in range(len(weights)):
        for gate in (0, 1, 3):
            for j in range(weights.shape[2]):
                weights[m, gate, j] *= HALF


@compiled
def pack_lstm(
    w_input: Floats, w_hidden: Floats, b_input: Floats, b_hidden: Floats, inward: Floats, recurrent: Floats, bias: Floats
) -> None:
    """Weights ``[D, 4 H]`` and ``[H, 4 H]``, and the bias of every environment ``[B, 4 H]``, for :func:`lstm_forward`."""
    size = w_hidden.shape[1]
    _transpose(w_input, inward)
    _transpose(w_hidden, recurrent)
    for b in range(len(bias)):
        for j in range(4 * size):
            bias[b, j] = b_input[j] + b_hidden[j]
    _halve(inward.reshape(len(inward), 4, size))
    _halve(recurrent.reshape(size, 4, size))
    _halve(bias.reshape(len(bias), 4, size))


@inlined
def _squash(gates: Floats, part: Floats, bias: Floats) -> None:
    """From what goes into the gates of a step to the gates, in place."""
    for j in range(len(gates)):
        gates[j] = _tanh(gates[j] + part[j] + bias[j])


@inlined
def _remember(gates: Floats, old: Floats, cell: Floats, hidden: Floats) -> None:
    """Cell and hidden states ``[B, H]`` after a step with these gates ``[B, 4, H]``."""
    for b in range(len(cell)):
        for j in range(cell.shape[1]):
            cell[b, j] = _sigmoid(gates[b, 1, j]) * old[b, j] + _sigmoid(gates[b, 0, j]) * gates[b, 2, j]
        for j in range(cell.shape[1]):
            hidden[b, j] = _sigmoid(gates[b, 3, j]) * _tanh(cell[b, j])


@compiled
def lstm_step(
    inputs: Floats,
    old_hidden: Floats,
    old_cell: Floats,
    inward: Floats,
    recurrent: Floats,
    bias: Floats,
    part: Floats,
    gates: Floats,
    cell: Floats,
    hidden: Floats,
) -> None:
    """One step of B environments, for acting; `part` and `gates`, ``[B, 4 H]``, are scratch."""
    _product(inputs, inward, gates)
    _product(old_hidden, recurrent, part)
    _squash(gates.reshape(gates.size), part.reshape(gates.size), bias.reshape(gates.size))
    _remember(gates.reshape(len(cell), 4, cell.shape[1]), old_cell, cell, hidden)


@compiled
def lstm_forward(
    inputs: Floats,
    resets: Floats,
    inward: Floats,
    recurrent: Floats,
    bias: Floats,
    part: Floats,
    gates: Floats,
    cells: Floats,
    hidden: Floats,
) -> None:
    """L steps: fill `gates`, and `cells` and `hidden` below row 0.

    :param part: ``[B, 4 H]``, scratch.
    :param gates: where no gradient is wanted, a few rows are enough, which are used again and again.
    """
    (rows, envs, n_inputs), (kept, _, _, size) = inputs.shape, gates.shape
    n, x, by_env = envs * 4 * size, inputs.reshape(rows * envs, n_inputs), gates.reshape(kept * envs, 4 * size)
    by_step, parts, shift = gates.reshape(kept, n), part.reshape(n), bias.reshape(n)
    together = min(max(SMALL // (n * n_inputs), 1), kept)  # steps whose inputs are one small product
    for first in range(0, rows, together):
        last, place = min(first + together, rows), first if kept == rows else 0
        _product(x[first * envs : last * envs], inward, by_env[place * envs : (place + last - first) * envs])
        for t in range(first, last):
            k = place + t - first
            _product(hidden[t], recurrent, part)
            _squash(by_step[k], parts, shift)
            _remember(gates[k], cells[t], cells[t + 1], hidden[t + 1])
            for b in range(envs):
                if resets[t, b] != ZERO:
                    gates[k, b], gates[k, b, 2] = -ONE, ZERO  # shut, with a slope of 0
                    cells[t + 1, b], hidden[t + 1, b] = ZERO, ZERO


@inlined
def _forget(gates: Floats, old: Floats, cell: Floats, slope: Floats, later: Floats, down: Floats, scratch: Floats) -> None:
    """The way back through :func:`_remember`, from the gates ``[B, 4, H]`` to the gradient of what went into them.

    A loop that writes to one gate and reads another is not vectorised, since over all environments the two overlap.

    :param slope: gradient of the hidden state from above, ``[B, H]``.
    :param later: that from the next step.
    :param down: gradient of the cell, first after the step, then before it.
    :param scratch: ``[3, H]``.
    """
    above, bent, through = scratch[0], scratch[1], scratch[2]
    for b in range(len(old)):
        for j in range(len(through)):
            above[j] = slope[b, j] + later[b, j]
        for j in range(len(through)):
            bent[j] = _tanh(cell[b, j])  # again: cheaper than to keep it
        for j in range(len(through)):
            leave = gates[b, 3, j]
            through[j] = down[b, j] + above[j] * _sigmoid(leave) * (ONE - bent[j] * bent[j])
            gates[b, 3, j] = above[j] * bent[j] * _sigmoid_slope(leave)
        for j in range(len(through)):
            keep = gates[b, 1, j]
            down[b, j] = through[j] * _sigmoid(keep)
            gates[b, 1, j] = through[j] * old[b, j] * _sigmoid_slope(keep)
        for j in range(len(through)):
            enter, candidate = gates[b, 0, j], gates[b, 2, j]
            above[j] = through[j] * candidate * _sigmoid_slope(enter)
            bent[j] = through[j] * _sigmoid(enter) * (ONE - candidate * candidate)
        for j in range(len(through)):
            gates[b, 0, j] = above[j]
        for j in range(len(through)):
            gates[b, 2, j] = bent[j]


@compiled
def lstm_backward(
    slopes: Floats, w_hidden: Floats, gates: Floats, cells: Floats, into_hidden: Floats, into_cell: Floats, into_bias: Floats
) -> None:
    """Replace `gates` by the gradient of what went into them, given that of the hidden states, `slopes`.

    At a blank all gates are shut, which stops every gradient of its own accord.

    :param slopes: ``[L, B, H]``.
    :param w_hidden: ``[4 H, H]``.
    :param into_hidden: ``[B, H]``; leaves as the gradient of the hidden state before the first step.
    :param into_cell: ``[B, H]``; leaves as that of the cell before it.
    :param into_bias: ``[4 H]``; leaves as that of the biases.
    """
    rows, envs, size = slopes.shape
    by_step, scratch = gates.reshape(rows, envs, 4 * size), np.empty((3, size), np.float32)
    into_hidden[:], into_cell[:] = ZERO, ZERO
    for t in range(rows - 1, -1, -1):
        _forget(gates[t], cells[t], cells[t + 1], slopes[t], into_hidden, into_cell, scratch)
        _product(by_step[t], w_hidden, into_hidden)
    columns_sum(gates.reshape(rows * envs, 4 * size), into_bias)


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
        _transpose(_rows_of(flat, at, n_out, n_in), weights)
        bias, y = flat[bias_at : bias_at + n_out], _rows_of(values, start, rows, n_out)
        _product(x, weights, y)
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


@inlined
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
            _product(slope, weights, into)
            for m in range(rows):
                one, y = into[m], x[m]
                if activation == TANH:
                    for j in range(n_in):
                        one[j] *= ONE - y[j] * y[j]
                else:
                    for j in range(n_in):
                        one[j] = one[j] if y[j] > ZERO else ZERO
        elif len(into_inputs) and not add:
            _product(slope, weights, into_inputs)
        elif len(into_inputs):
            into = _rows_of(scratch, _padded(n_in * n_out), rows, n_in)
            _product(slope, weights, into)
            for m in range(rows):
                total, one = into_inputs[m], into[m]
                for j in range(n_in):
                    total[j] += one[j]
        start = below
