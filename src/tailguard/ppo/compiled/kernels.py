"""Compiled kernels on float32 arrays: LSTM over sequences with resets, feed-forward heads, parameters of Gaussians.

Everything compiled that calls each other lives in this one file, because numba's cache on disk looks at the file of a function
only. Three facts shape the code. BLAS multiplies small matrices twice as fast where they are contiguous, begin at a multiple of
64 bytes and have rows of whole cache lines, and where a product is small enough not to be repacked: so weights are copied
into such arrays, transposed, once per pass, and long products are made in blocks of rows. The compiler uses vector
instructions in a loop only where it can check that the arrays in it do not overlap, which it gives up for more than a few: so
loops are short. And an array that is allocated anew costs as much as a pass over it: so callers bring all of them.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.jit import SHARE_DIVISIONS, decorators

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

compiled, inlined = decorators(SHARE_DIVISIONS)

# Floats in a cache line; rows are padded to multiples of it.
LINE = 16
# The most multiplications of a product that BLAS does not repack.
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


def as_array(tensor: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Return a tensor as compiled code needs it: detached, on the CPU, contiguous, of one dtype."""
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


@inlined
def _tanh(x: Any) -> Any:
    """Return the hyperbolic tangent in a dozen operations that vectorise; NaN stays NaN."""
    y = REACH if x > REACH else (-REACH if x < -REACH else x)
    u = y * y
    above = (((P4 * u + P3) * u + P2) * u + P1) * u + P0
    below = (((Q4 * u + Q3) * u + Q2) * u + Q1) * u + ONE
    return y * above / below


@inlined
def _product(left: Floats, right: Floats, out: Floats) -> None:
    """Compute ``out = left @ right`` in even blocks of rows that BLAS does not repack, where such blocks are worth having."""
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
    """Compute ``out = matrix.T`` in small squares, each of which stays in the fastest cache."""
    rows, columns = matrix.shape
    for top in range(0, rows, LINE):
        for left in range(0, columns, LINE):
            for j in range(left, min(left + LINE, columns)):
                for i in range(top, min(top + LINE, rows)):
                    out[j, i] = matrix[i, j]


@inlined
def columns_sum(matrix: Floats, out: Floats) -> None:
    """Sum the columns of ``[M, N]``, four rows at a time."""
    whole = len(matrix) // 4 * 4
    out[:] = ZERO
    for m in range(0, whole, 4):
        row0, row1, row2, row3 = matrix[m], matrix[m + 1], matrix[m + 2], matrix[m + 3]
        for j in range(len(out)):
            out[j] += (row0[j] + row1[j]) + (row2[j] + row3[j])
    for m in range(whole, len(matrix)):
        row = matrix[m]
        for j in range(len(out)):
            out[j] += row[j]


# ------------------------------------------------------------------------------------------------------------------ LSTM
#
# The four gates of an environment stand side by side, ``[L, B, 4, H]`` in torch's order (input, forget, candidate, output), so
# that a step is one product and so is the gradient of all weights. Since sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, all four are
# kept as a tanh, and the halves inside are taken from the weights. Hidden and cell states are ``[L + 1, B, H]``: row 0 is the
# state before the first step, and all rows but the last are the states before the steps.


@inlined
def _sigmoid(tangent: Any) -> Any:
    return HALF * tangent + HALF


@inlined
def _sigmoid_grad(tangent: Any) -> Any:
    return QUARTER * (ONE - tangent * tangent)


@inlined
def _halve(weights: Floats) -> None:
    """Halve the weights of the three gates with a sigmoid, in ``[M, 4, H]``."""
    for m in range(len(weights)):
        for gate in (0, 1, 3):
            for j in range(weights.shape[2]):
                weights[m, gate, j] *= HALF


@compiled
def pack_lstm(
    w_input: Floats, w_hidden: Floats, b_input: Floats, b_hidden: Floats, inward: Floats, recurrent: Floats, bias: Floats
) -> None:
    """Fill weights ``[D, 4 H]`` and ``[H, 4 H]``, and the bias of every environment ``[B, 4 H]``, for :func:`lstm_forward`."""
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
def _activate_gates(gates: Floats, part: Floats, bias: Floats) -> None:
    """Turn the pre-activations of a step into its gates, in place."""
    for j in range(len(gates)):
        gates[j] = _tanh(gates[j] + part[j] + bias[j])


@inlined
def _lstm_cell(gates: Floats, old: Floats, cell: Floats, hidden: Floats) -> None:
    """Compute cell and hidden states ``[B, H]`` after a step with these gates ``[B, 4, H]``: c = f c + i g, h = o tanh(c)."""
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
    """Run one step of B environments, for acting; `part` and `gates`, ``[B, 4 H]``, are scratch."""
    _product(inputs, inward, gates)
    _product(old_hidden, recurrent, part)
    _activate_gates(gates.reshape(gates.size), part.reshape(gates.size), bias.reshape(gates.size))
    _lstm_cell(gates.reshape(len(cell), 4, cell.shape[1]), old_cell, cell, hidden)


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
    """Run L steps: fill `gates`, and `cells` and `hidden` below row 0.

    :param resets: ``[L, B]``, not 0 at reset steps, after which both states are 0.
    :param part: ``[B, 4 H]``, scratch.
    :param gates: where no gradient is needed, a few rows are enough, which are used again and again.
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
            _activate_gates(by_step[k], parts, shift)
            _lstm_cell(gates[k], cells[t], cells[t + 1], hidden[t + 1])
            for b in range(envs):
                if resets[t, b] != ZERO:
                    gates[k, b], gates[k, b, 2] = -ONE, ZERO  # closed, with a derivative of 0
                    cells[t + 1, b], hidden[t + 1, b] = ZERO, ZERO


@inlined
def _lstm_cell_backward(
    gates: Floats, old: Floats, cell: Floats, grad_output: Floats, grad_hidden: Floats, grad_cell: Floats, scratch: Floats
) -> None:
    """Replace the gates ``[B, 4, H]`` of :func:`_lstm_cell` by the gradient of their pre-activations.

    A loop that writes to one gate and reads another is not vectorised, since over all environments the two overlap.

    :param grad_output: gradient of the hidden state from the layer above, ``[B, H]``.
    :param grad_hidden: gradient of the hidden state from the next step, ``[B, H]``.
    :param grad_cell: gradient of the cell state, first after the step, then before it, ``[B, H]``.
    :param scratch: ``[3, H]``.
    """
    total, tanh_cell, through = scratch[0], scratch[1], scratch[2]
    for b in range(len(old)):
        for j in range(len(through)):
            total[j] = grad_output[b, j] + grad_hidden[b, j]
        for j in range(len(through)):
            tanh_cell[j] = _tanh(cell[b, j])  # again: cheaper than to keep it
        for j in range(len(through)):
            leave = gates[b, 3, j]
            through[j] = grad_cell[b, j] + total[j] * _sigmoid(leave) * (ONE - tanh_cell[j] * tanh_cell[j])
            gates[b, 3, j] = total[j] * tanh_cell[j] * _sigmoid_grad(leave)
        for j in range(len(through)):
            keep = gates[b, 1, j]
            grad_cell[b, j] = through[j] * _sigmoid(keep)
            gates[b, 1, j] = through[j] * old[b, j] * _sigmoid_grad(keep)
        for j in range(len(through)):
            enter, candidate = gates[b, 0, j], gates[b, 2, j]
            total[j] = through[j] * candidate * _sigmoid_grad(enter)
            tanh_cell[j] = through[j] * _sigmoid(enter) * (ONE - candidate * candidate)
        for j in range(len(through)):
            gates[b, 0, j] = total[j]
        for j in range(len(through)):
            gates[b, 2, j] = tanh_cell[j]


@compiled
def lstm_backward(
    grad_output: Floats,
    w_hidden: Floats,
    gates: Floats,
    cells: Floats,
    grad_hidden: Floats,
    grad_cell: Floats,
    grad_bias: Floats,
) -> None:
    """Replace `gates` by the gradient of their pre-activations, given that of the hidden states, `grad_output`.

    At a reset step all gates are closed, which stops every gradient of its own accord.

    :param grad_output: ``[L, B, H]``.
    :param w_hidden: ``[4 H, H]``.
    :param grad_hidden: ``[B, H]``, filled with the gradient of the hidden state before the first step.
    :param grad_cell: ``[B, H]``, filled with that of the cell state before it.
    :param grad_bias: ``[4 H]``, filled with that of each of the two biases.
    """
    rows, envs, size = grad_output.shape
    by_step, scratch = gates.reshape(rows, envs, 4 * size), np.empty((3, size), np.float32)
    grad_hidden[:], grad_cell[:] = ZERO, ZERO
    for t in range(rows - 1, -1, -1):
        _lstm_cell_backward(gates[t], cells[t], cells[t + 1], grad_output[t], grad_hidden, grad_cell, scratch)
        _product(by_step[t], w_hidden, grad_hidden)
    columns_sum(gates.reshape(rows * envs, 4 * size), grad_bias)


# ----------------------------------------------------------------------------------------------------------------- heads


@inlined
def _rows_of(buffer: Any, start: int, rows: int, columns: int) -> Any:
    return buffer[start : start + rows * columns].reshape(rows, columns)


@inlined
def _padded(count: int) -> int:
    return (count + LINE - 1) // LINE * LINE


@compiled
def mlp_forward(flat: Floats, table: Integers, activation: int, inputs: Floats, values: Floats, scratch: Floats) -> None:
    """Run a feed-forward head on the rows of `inputs` ``[M, n]``.

    :param flat: all parameters.
    :param table: a row for each layer: where its weights and its bias begin, how many inputs and outputs it has.
    :param values: the outputs of all layers one after the other, ``[M, n]`` each, each at a multiple of a cache line.
    :param scratch: as large as the largest layer's weights.
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
def _outer(grad_outputs: Floats, inputs: Floats, out: Floats, scratch: Floats) -> None:
    """Compute ``out = grad_outputs.T @ inputs``, in blocks of rows whose products are added up in `scratch`."""
    n_out, n_in = out.shape
    rows = max(SMALL // (n_in * n_out), LINE)
    part = _rows_of(scratch, 0, n_out, n_in)
    out[:] = ZERO
    for first in range(0, len(grad_outputs), rows):
        last = min(first + rows, len(grad_outputs))
        np.dot(grad_outputs[first:last].T, inputs[first:last], part)
        for i in range(n_out):
            total, added = out[i], part[i]
            for j in range(n_in):
                total[j] += added[j]


@compiled
def mlp_backward(
    flat: Floats,
    gradient: Floats,
    table: Integers,
    activation: int,
    inputs: Floats,
    values: Floats,
    grad_values: Floats,
    grad_inputs: Floats,
    add: bool,
    scratch: Floats,
) -> None:
    """Write the gradient of a head's parameters into `gradient`, which is laid out as `flat`.

    :param grad_values: as `values`; the gradient of the last layer's outputs is given, those of the others are filled in.
    :param grad_inputs: ``[M, n]``, filled with the gradient of the inputs; of no rows where it is not needed.
    :param add: add to `grad_inputs` instead of overwriting it.
    """
    rows, last = len(inputs), len(table) - 1
    start = 0
    for layer in range(last):
        start += _padded(rows * table[layer, 3])
    for layer in range(last, -1, -1):
        at, bias_at, n_in, n_out = table[layer]
        grad = _rows_of(grad_values, start, rows, n_out)
        below = start if layer == 0 else start - _padded(rows * n_in)
        x = inputs if layer == 0 else _rows_of(values, below, rows, n_in)
        _outer(grad, x, _rows_of(gradient, at, n_out, n_in), scratch)
        columns_sum(grad, gradient[bias_at : bias_at + n_out])
        weights = _rows_of(scratch, 0, n_out, n_in)
        weights[:] = _rows_of(flat, at, n_out, n_in)
        if layer > 0:
            grad_below = _rows_of(grad_values, below, rows, n_in)
            _product(grad, weights, grad_below)
            for m in range(rows):
                row, y = grad_below[m], x[m]
                if activation == TANH:
                    for j in range(n_in):
                        row[j] *= ONE - y[j] * y[j]
                else:
                    for j in range(n_in):
                        row[j] = row[j] if y[j] > ZERO else ZERO
        elif len(grad_inputs) and not add:
            _product(grad, weights, grad_inputs)
        elif len(grad_inputs):
            grad_below = _rows_of(scratch, _padded(n_in * n_out), rows, n_in)
            _product(grad, weights, grad_below)
            for m in range(rows):
                total, added = grad_inputs[m], grad_below[m]
                for j in range(n_in):
                    total[j] += added[j]
        start = below


@compiled
def activation_backward(values: Floats, activation: int, grad_values: Floats) -> None:
    """Multiply ``grad_values[M, n]`` by the derivative of the activation whose outputs are ``values[M, n]``."""
    for m in range(len(values)):
        y, grad = values[m], grad_values[m]
        if activation == RELU:
            for j in range(len(y)):
                grad[j] = grad[j] if y[j] > ZERO else ZERO
        else:
            for j in range(len(y)):
                grad[j] *= ONE - y[j] * y[j]


# ------------------------------------------------------------------------------------ Gaussians with a free log_std
#
# Rows of distribution parameters: means beside log standard deviations ``[A]`` that are the same in every row.


@inlined
def _fill_gaussian_params(means: Floats, log_std: Floats, dist_params: Floats) -> None:
    size = means.shape[1]
    for m in range(len(means)):
        for a in range(size):
            dist_params[m, a], dist_params[m, size + a] = means[m, a], log_std[a]


@compiled
def gaussian_params(means: Floats, log_std: Floats, dist_params: Floats) -> None:
    """Fill ``dist_params[M, 2 A] = [means, log_std]``."""
    _fill_gaussian_params(means, log_std, dist_params)


@compiled
def draw_gaussian(means: Floats, log_std: Floats, noise: Floats, dist_params: Floats, actions: Floats) -> None:
    """Fill a row of a rollout: ``dist_params = [means, log_std]`` and ``actions = means + exp(log_std) noise``."""
    _fill_gaussian_params(means, log_std, dist_params)
    for a in range(len(log_std)):
        std = np.exp(log_std[a])
        for b in range(len(means)):
            actions[b, a] = means[b, a] + std * noise[b, a]


@compiled
def gaussian_params_backward(grad_dist_params: Floats, grad_means: Floats, grad_log_std: Floats) -> None:
    """Fill the gradient of the means, and that of the log standard deviations, which is a sum over all rows."""
    size = grad_means.shape[1]
    for a in range(size):
        total = 0.0
        for m in range(len(grad_dist_params)):
            grad_means[m, a] = grad_dist_params[m, a]
            total += grad_dist_params[m, size + a]
        grad_log_std[a] = total
