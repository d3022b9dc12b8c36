"""Compiled kernels on float32 arrays: matrix products, LSTM over sequences with resets, feed-forward heads, Gaussians.

Everything compiled that calls each other lives in this one file, because numba's cache on disk looks at the file of a function
only. Some facts shape the code. The compiler uses vector instructions in a loop only where it can check that the arrays in it
do not overlap, which it gives up for more than a few: so loops are short. And an array that is allocated anew costs as much as
a pass over it: so callers bring all of them. An array is copied to a part of another by a loop, since an assignment is compiled
together with the text of all that it may raise, which takes a second or two.

**Products** are our own: on the sizes of these networks those of BLAS reach anything from a tenth to all of the CPU's speed, by
shape and instruction set, and ours nearly all of it from eight rows on (benchmarks/products.py). A *tile* is a few
rows times a panel of columns, whose sums stay in registers; the right factor is *packed* into such panels beforehand. Each
number of a product is one sum in the order of the inner index, each term added by a multiply-add of one rounding: so results
depend neither on the tiles nor on the vector width, on how many rows there are, on where arrays begin, nor on which thread
takes which rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from tailguard.jit import SHARE_DIVISIONS, decorators, separate

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

compiled, inlined = decorators(SHARE_DIVISIONS)
called = separate(SHARE_DIVISIONS)

# Floats in a cache line; parts of larger arrays begin at multiples of it.
LINE = 16
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


# -------------------------------------------------------------------------------------------------------------- products

# What the registers hold: tiles of up to `TALLEST` rows by a panel of two vectors, in 32 registers of 16 floats (AVX-512) or
# in 16 registers of 8 (AVX2).
LANES, TALLEST = (16, 8) if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else (8, 6)
PANEL = 2 * LANES
# Rows that are multiplied by one panel after the other, so that both stay in the fastest cache; whole tiles of either height.
BLOCK = 48
# Rows of a long sum over samples that are packed together.
CHUNK = 128
# Columns of a matrix from which on its rows lie apart by so much that few of them fit the fastest cache.
WIDE = 512
# A product of fewer columns than this is a dot product for each of its numbers.
NARROW = 5
# The distance between the rows of one row that is added to all.
SAME = 0

_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _fma(module: ir.Module) -> ir.Function:
    name = f"llvm.fma.v{LANES}f32"
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), name)


def _emit_tile(function: ir.Function, rows: int, panels: int) -> None:
    """Write the body of a tile: for each row, ``out = initial + sum over k of left[k] * right[k, :]``, with sums in registers.

    numba's loops cannot say this: the compiler does not keep an array in registers.
    """
    left, left_row, left_inner, right, right_panel, initial, initial_row, out, out_row, depth = function.args
    module, builder = function.module, ir.IRBuilder(function.append_basic_block("entry"))
    fma, cells = _fma(module), [(row, vector) for row in range(rows) for vector in range(2 * panels)]

    def vector_at(base: ir.Value, offset: ir.Value) -> ir.Value:
        return builder.bitcast(builder.gep(base, [offset]), _VECTOR.as_pointer())

    def at(row: int, stride: ir.Value, vector: int) -> ir.Value:
        return builder.add(builder.mul(_INT(row), stride), _INT(vector * LANES))

    sums = {cell: builder.alloca(_VECTOR) for cell in cells}
    for row, vector in cells:
        builder.store(builder.load(vector_at(initial, at(row, initial_row, vector)), align=4), sums[row, vector])
    with cgutils.for_range(builder, depth) as loop:
        here = builder.mul(loop.index, _INT(PANEL))
        factors = []
        for vector in range(2 * panels):
            in_panel = builder.add(here, _INT(vector % 2 * LANES))
            offset = builder.add(builder.mul(_INT(vector // 2), right_panel), in_panel)
            factors.append(builder.load(vector_at(right, offset), align=4))
        inner = builder.mul(loop.index, left_inner)
        for row in range(rows):
            number = builder.load(builder.gep(left, [builder.add(builder.mul(_INT(row), left_row), inner)]))
            undefined = ir.Constant(_VECTOR, ir.Undefined)
            first = builder.insert_element(undefined, number, ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            everywhere = builder.shuffle_vector(first, undefined, zeros)
            for vector, factor in enumerate(factors):
                total = builder.call(fma, [everywhere, factor, builder.load(sums[row, vector])])
                builder.store(total, sums[row, vector])
    for row, vector in cells:
        builder.store(builder.load(sums[row, vector]), vector_at(out, at(row, out_row, vector)), align=4)
    builder.ret_void()


# Whole panels at once for a single row, whose sums in one panel would wait for one another.
ABREAST = 4


def _call(context: Any, builder: Any, signature: Any, arguments: Any, name: str, emit: Any) -> None:
    """Call an internal function of the module, which is written where it is first needed.

    Arrays become the addresses of their numbers. An array is followed by the index that its part begins at: a slice would
    cost several times as much as an addition, and there are many for each product.
    """
    values, kinds, given = [], [], list(zip(signature.args, arguments, strict=True))
    while given:
        kind, value = given.pop(0)
        if isinstance(kind, types.Array):
            _, start = given.pop(0)
            value = builder.gep(context.make_array(kind)(context, builder, value).data, [start])
        values.append(value)
        kinds.append(_FLOAT.as_pointer() if isinstance(kind, types.Array) else _INT)
    builder.call(_internal(builder.module, name, kinds, emit), values)


def _internal(module: ir.Module, name: str, kinds: list[ir.Type], emit: Any) -> ir.Function:
    """Return a function of a module, which is written where it is first needed."""
    if name not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
        function.linkage = "internal"
        function.attributes.add("noinline")  # merged with others, a tile would run out of registers
        emit(function)
    return module.globals[name]


def _emit_product(function: ir.Function) -> None:
    """Write the body of a product: blocks of rows, panels, tiles."""
    left, left_row, left_inner, rows, right, depth, initial, initial_row, out, out_row, columns = function.args
    module, builder = function.module, ir.IRBuilder(function.append_basic_block("entry"))
    kinds = [left.type, _INT, _INT, right.type, _INT, initial.type, _INT, out.type, _INT, _INT]
    edge = builder.alloca(_FLOAT, size=_INT(TALLEST * PANEL))
    first, start = builder.alloca(_INT), builder.alloca(_INT)
    whole, width = builder.sdiv(columns, _INT(PANEL)), builder.srem(columns, _INT(PANEL))
    panel_size = builder.mul(depth, _INT(PANEL))

    def cell(base: ir.Value, row: ir.Value, stride: ir.Value, column: ir.Value) -> ir.Value:
        return builder.gep(base, [builder.add(builder.mul(row, stride), column)])

    def tile(height: ir.Value, right: ir.Value, y: ir.Value, y_row: ir.Value, z: ir.Value, z_row: ir.Value) -> None:
        x, end = cell(left, builder.load(first), left_row, _INT(0)), builder.append_basic_block()
        switch = builder.switch(height, end)
        for count in range(1, TALLEST + 1):
            block = builder.append_basic_block()
            switch.add_case(_INT(count), block)
            with builder.goto_block(block):
                multiply = _internal(module, f"tile_{count}_1", kinds, partial(_emit_tile, rows=count, panels=1))
                builder.call(multiply, [x, left_row, left_inner, right, _INT(0), y, y_row, z, z_row, depth])
                builder.branch(end)
        builder.position_at_end(end)

    with cgutils.for_range_slice(builder, _INT(0), rows, _INT(BLOCK), _INT) as (top, _):
        left_over = builder.sub(rows, top)
        count = builder.select(builder.icmp_signed("<", left_over, _INT(BLOCK)), left_over, _INT(BLOCK))
        tiles = builder.sdiv(builder.add(count, _INT(TALLEST - 1)), _INT(TALLEST))
        builder.store(_INT(0), start)
        with builder.if_then(builder.icmp_signed("==", count, _INT(1))):
            several = builder.sdiv(whole, _INT(ABREAST))
            with cgutils.for_range(builder, several) as loop:
                panel = builder.mul(loop.index, _INT(ABREAST))
                column = builder.mul(panel, _INT(PANEL))
                x, y = cell(left, top, left_row, _INT(0)), cell(initial, top, initial_row, column)
                z = cell(out, top, out_row, column)
                panels = builder.gep(right, [builder.mul(panel, panel_size)])
                row = _internal(module, f"tile_1_{ABREAST}", kinds, partial(_emit_tile, rows=1, panels=ABREAST))
                builder.call(row, [x, _INT(0), left_inner, panels, panel_size, y, _INT(0), z, _INT(0), depth])
            builder.store(builder.mul(several, _INT(ABREAST)), start)

        @contextmanager
        def each_tile() -> Iterator[ir.Value]:
            builder.store(top, first)
            with cgutils.for_range(builder, tiles) as loop:
                rest = builder.sub(builder.add(top, count), builder.load(first))
                height = builder.sdiv(rest, builder.sub(tiles, loop.index))  # as even as possible
                yield height
                builder.store(builder.add(builder.load(first), height), first)

        with cgutils.for_range_slice(builder, builder.load(start), whole, _INT(1), _INT) as (panel, _):
            panels, column = builder.gep(right, [builder.mul(panel, panel_size)]), builder.mul(panel, _INT(PANEL))
            with each_tile() as height:
                at = builder.load(first)
                y, z = cell(initial, at, initial_row, column), cell(out, at, out_row, column)
                tile(height, panels, y, initial_row, z, out_row)
        with builder.if_then(builder.icmp_signed(">", width, _INT(0))):
            panels, column = builder.gep(right, [builder.mul(whole, panel_size)]), builder.mul(whole, _INT(PANEL))
            with each_tile() as height:
                at = builder.load(first)
                with cgutils.for_range(builder, height) as loop:
                    row = builder.add(at, loop.index)
                    _copy(builder, cell(initial, row, initial_row, column), cell(edge, loop.index, _INT(PANEL), _INT(0)), width)
                tile(height, panels, edge, _INT(PANEL), edge, _INT(PANEL))
                with cgutils.for_range(builder, height) as loop:
                    row = builder.add(at, loop.index)
                    _copy(builder, cell(edge, loop.index, _INT(PANEL), _INT(0)), cell(out, row, out_row, column), width)
    builder.ret_void()


def _copy(builder: ir.IRBuilder, source: ir.Value, to: ir.Value, count: ir.Value) -> None:
    with cgutils.for_range(builder, count) as loop:
        builder.store(builder.load(builder.gep(source, [loop.index])), builder.gep(to, [loop.index]))


def _multiply_code(
    _: Any,
    left: Any,
    left_at: Any,
    left_row: Any,
    left_inner: Any,
    rows: Any,
    packed: Any,
    packed_at: Any,
    depth: Any,
    initial: Any,
    initial_at: Any,
    initial_row: Any,
    out: Any,
    out_at: Any,
    out_row: Any,
    columns: Any,
) -> Any:
    """Compute ``out = initial + left @ packed`` for some rows of contiguous arrays, each from an index on.

    `left_row` is the distance between the rows of `left`, `left_inner` that between the numbers of a row, `depth` the inner
    size, `initial_row` the distance between the rows of `initial`, ``SAME`` for one row that is added to all. `initial` may be
    `out`.
    """
    size = types.intp
    arguments = (left, size, size, size, size, packed, size, size, initial, size, size, out, size, size, size)

    def call(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _call(context, builder, signature, values, "product", _emit_product)
        return context.get_dummy_value()

    return types.void(*arguments), call


_multiply: Any = intrinsic(_multiply_code)


def packed_shape(depth: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of a packed right factor ``[K, N]``: panels of columns, the last one filled up with zeros."""
    return -(-columns // PANEL), depth, PANEL


@inlined
def _panel(columns: int) -> int:
    return (columns + PANEL - 1) // PANEL


@called
def _pack(matrix: Floats, packed: Floats) -> None:
    """Pack ``[K, N]``."""
    depth, columns = matrix.shape
    for panel in range(len(packed)):
        left = panel * PANEL
        width = min(PANEL, columns - left)
        for k in range(depth):
            row, to = matrix[k, left : left + width], packed[panel, k]
            for j in range(width):
                to[j] = row[j]
            for j in range(width, PANEL):
                to[j] = ZERO


@called
def _pack_transposed(matrix: Floats, factors: Floats, packed: Floats) -> None:
    """Pack the transpose of ``[N, K]``, each row times a factor."""
    columns, depth = matrix.shape
    for panel in range(len(packed)):
        left = panel * PANEL
        width = min(PANEL, columns - left)
        rows, by = matrix[left : left + width], factors[left : left + width]
        for k in range(depth):
            to = packed[panel, k]
            for j in range(width):
                to[j] = by[j] * rows[j, k]
            for j in range(width, PANEL):
                to[j] = ZERO


@compiled
def pack(matrix: Floats, packed: Floats) -> None:
    """Pack a right factor ``[K, N]``."""
    _pack(matrix, packed)


@inlined
def _product(left: Floats, packed: Floats, initial: Floats, initial_row: int, out: Floats) -> None:
    """Compute ``out = initial + left @ packed`` of ``left[M, K]`` and a packed ``[K, N]``."""
    rows, depth = left.shape
    columns = out.shape[1]
    _multiply(left, 0, depth, 1, rows, packed, 0, depth, initial, 0, initial_row, out, 0, columns, columns)


@compiled
def product(left: Floats, right: Floats, packed: Floats, out: Floats) -> None:
    """Compute ``out = left @ right`` of ``[M, K]`` and ``[K, N]``; `packed` is scratch for the right one."""
    _pack(right, packed)
    _product(left, packed, np.zeros(out.shape[1], np.float32), SAME, out)


@called
def _narrow_product(left: Floats, weights: Floats, bias: Floats, out: Floats) -> None:
    """Compute ``out = left @ weights.T + bias`` of ``left[M, K]`` and few rows of ``weights[N, K]``."""
    for m in range(len(left)):
        x = left[m]
        for n in range(len(weights)):
            w, total = weights[n], ZERO
            for k in range(len(x)):
                total += x[k] * w[k]
            out[m, n] = total + bias[n]


@called
def _add_outer(
    left: Floats, right: Floats, samples: tuple[int, int], first: int, last: int, packed: Floats, zeros: Floats, out: Floats
) -> None:
    """Add to rows `first` to `last` of `out` those of ``left.T @ right``, summed over some samples; the first ones begin it.

    :param left: ``[M, I]``; `right`: ``[M, J]``.
    :param packed: scratch for the samples of the right one; `zeros`: at least J.
    """
    (top, end), n_left, n_right = samples, left.shape[1], right.shape[1]
    depth = end - top
    _pack(right[top:end], packed[: _panel(n_right) * depth * PANEL].reshape(_panel(n_right), depth, PANEL))
    # The rows of a wide matrix drive each other out of the fastest cache: their parts are copied together.
    apart = n_left >= WIDE
    step = BLOCK if apart else last - first
    block = np.empty((depth, step) if apart else (0, 0), np.float32)
    for begin in range(first, last, step):
        count, at = min(step, last - begin), begin * n_right
        for k in range(len(block)):
            row, to = left[top + k, begin : begin + count], block[k]
            for j in range(count):
                to[j] = row[j]
        rows, row_at, row_stride = (block, 0, step) if apart else (left, top * n_left + begin, n_left)
        initial, initial_at, initial_row = (zeros, 0, 0) if top == 0 else (out.reshape(out.size), at, n_right)
        _multiply(
            rows, row_at, 1, row_stride, count, packed, 0, depth, initial, initial_at, initial_row, out, at, n_right, n_right
        )


@inlined
def _packed_samples(columns: int) -> Floats:
    """Return scratch for the samples of a right factor that are packed together."""
    return np.empty(_panel(columns) * CHUNK * PANEL, np.float32)


# ---------------------------------------------------------------------------------------------------------- elementwise


@inlined
def _tanh(x: Any) -> Any:
    """Return the hyperbolic tangent in a dozen operations that vectorise; NaN stays NaN."""
    y = REACH if x > REACH else (-REACH if x < -REACH else x)
    u = y * y
    above = (((P4 * u + P3) * u + P2) * u + P1) * u + P0
    below = (((Q4 * u + Q3) * u + Q2) * u + Q1) * u + ONE
    return y * above / below


@inlined
def _flat(array: Any) -> Any:
    return array.reshape(array.size)


@inlined
def _activate(values: Floats, activation: int) -> None:
    if activation == TANH:
        for j in range(len(values)):
            values[j] = _tanh(values[j])
    else:
        for j in range(len(values)):
            values[j] = ZERO if values[j] < ZERO else values[j]


@inlined
def _times_derivative(grad: Floats, values: Floats, activation: int) -> None:
    """Multiply a gradient by the derivative of the activation whose outputs are `values`."""
    if activation == TANH:
        for j in range(len(grad)):
            grad[j] *= ONE - values[j] * values[j]
    else:
        for j in range(len(grad)):
            grad[j] = grad[j] if values[j] > ZERO else ZERO


@inlined
def _add_columns(matrix: Floats, samples: tuple[int, int], first: int, last: int, out: Floats) -> None:
    """Add the columns `first` to `last` of some rows of ``[M, N]``, four rows at a time."""
    (top, end), sums = samples, out[first:last]
    whole = top + (end - top) // 4 * 4
    for m in range(top, whole, 4):
        row0, row1 = matrix[m, first:last], matrix[m + 1, first:last]
        row2, row3 = matrix[m + 2, first:last], matrix[m + 3, first:last]
        for j in range(len(sums)):
            sums[j] += (row0[j] + row1[j]) + (row2[j] + row3[j])
    for m in range(whole, end):
        row = matrix[m, first:last]
        for j in range(len(sums)):
            sums[j] += row[j]


# ------------------------------------------------------------------------------------------------------------------ LSTM
#
# The four gates of an environment stand side by side, ``[L, B, 4, H]`` in torch's order (input, forget, candidate, output), so
# that a step is one product and so is the gradient of all weights. Since sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, all four are
# kept as a tanh, and the halves inside are taken from the weights. Hidden and cell states are ``[L + 1, B, H]``: row 0 is the
# state before the first step, and all rows but the last are the states before the steps.


@compiled
def pack_lstm(
    w_input: Floats, w_hidden: Floats, b_input: Floats, b_hidden: Floats, inward: Floats, recurrent: Floats, bias: Floats
) -> None:
    """Pack the weights ``[4 H, D]`` and ``[4 H, H]``, and add up the biases ``[4 H]``, for :func:`lstm_forward`."""
    size = w_hidden.shape[1]
    factors = np.full(4 * size, HALF)
    factors[2 * size : 3 * size] = ONE
    _pack_transposed(w_input, factors, inward)
    _pack_transposed(w_hidden, factors, recurrent)
    for j in range(4 * size):
        bias[j] = factors[j] * (b_input[j] + b_hidden[j])


class _Lanes:
    """Arithmetic on vectors of numbers, for bodies that numba's loops cannot say: one pass over many arrays in registers."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def number(self, x: Any) -> ir.Constant:
        return ir.Constant(_VECTOR, [float(x)] * LANES)

    def load(self, pointer: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def product(self, *factors: ir.Value) -> ir.Value:
        return reduce(self.builder.fmul, factors)

    def add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a b + c, rounded once."""
        return self.builder.call(_fma(self.builder.module), [a, b, c])

    def polynomial(self, u: ir.Value, *coefficients: Any) -> ir.Value:
        """Return a polynomial, the highest power first."""
        return reduce(lambda total, c: self.add(total, u, self.number(c)), coefficients[1:], self.number(coefficients[0]))

    def tanh(self, x: ir.Value) -> ir.Value:
        """Return what :func:`_tanh` does."""
        builder, reach = self.builder, (self.number(REACH), self.number(-REACH))
        y = builder.select(builder.fcmp_ordered(">", x, reach[0]), reach[0], x)
        y = builder.select(builder.fcmp_ordered("<", x, reach[1]), reach[1], y)
        u = builder.fmul(y, y)
        above = builder.fmul(y, self.polynomial(u, P4, P3, P2, P1, P0))
        return builder.fdiv(above, self.polynomial(u, Q4, Q3, Q2, Q1, ONE))

    def sigmoid(self, tangent: ir.Value) -> ir.Value:
        return self.add(tangent, self.number(HALF), self.number(HALF))

    def one_less_square(self, x: ir.Value) -> ir.Value:
        return self.add(self.builder.fneg(x), x, self.number(ONE))


def _emit_cells(function: ir.Function, body: Any, n_gates: int) -> None:
    """Write a pass over the units of some environments, a vector at a time; what is left of H goes through a copy.

    :param body: of one vector, given the addresses of its four gates in each array ``[B, 4, H]`` and in others ``[B, H]``.
    :param n_gates: how many of the arrays are gates.
    """
    *arrays, envs, size = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    count = 3 * n_gates + len(arrays)
    copies = builder.alloca(_FLOAT, size=_INT(count * LANES))
    padded = [builder.gep(copies, [_INT(part * LANES)]) for part in range(count)]
    whole, left = builder.sdiv(size, _INT(LANES)), builder.srem(size, _INT(LANES))
    lanes = _Lanes(builder)
    with cgutils.for_range(builder, envs) as env:
        row = builder.mul(env.index, size)
        of_gates = [builder.add(builder.mul(row, _INT(4)), builder.mul(_INT(k), size)) for k in range(4)]
        parts = [builder.gep(gates, [at]) for gates in arrays[:n_gates] for at in of_gates]
        parts += [builder.gep(other, [row]) for other in arrays[n_gates:]]
        with cgutils.for_range(builder, whole) as loop:
            at = builder.mul(loop.index, _INT(LANES))
            body(lanes, *(builder.gep(part, [at]) for part in parts))
        with builder.if_then(builder.icmp_signed(">", left, _INT(0))):
            at = builder.mul(whole, _INT(LANES))
            ends = [builder.gep(part, [at]) for part in parts]
            for copy, end in zip(padded, ends, strict=True):
                lanes.store(lanes.number(0.0), copy)
                _copy(builder, end, copy, left)
            body(lanes, *padded)
            for copy, end in zip(padded, ends, strict=True):
                _copy(builder, copy, end, left)
    builder.ret_void()


def _cell_body(lanes: _Lanes, *at: ir.Value) -> None:
    """Compute a step: c = f c + i g, h = o tanh(c).

    `at`: pre-activations and four gates, cell states before it, cell and hidden states after it.
    """
    enter, keep, candidate, leave = (lanes.tanh(lanes.load(gate)) for gate in at[:4])
    old, cell, hidden = at[8:]
    entered = lanes.product(lanes.sigmoid(enter), candidate)
    after = lanes.add(lanes.sigmoid(keep), lanes.load(old), entered)
    for value, to in zip((enter, keep, candidate, leave), at[4:8], strict=True):
        lanes.store(value, to)
    lanes.store(after, cell)
    lanes.store(lanes.product(lanes.sigmoid(leave), lanes.tanh(after)), hidden)


def _cell_backward_body(lanes: _Lanes, *at: ir.Value) -> None:
    """Replace the gates by the gradient of their pre-activations, and the gradient of the cell state by that before the step.

    `at`: four gates, cell states before and after the step, gradients of the hidden and the cell state after it.
    """
    enter, keep, candidate, leave, old, cell, total, through = map(lanes.load, at)
    tanh_cell, quarter = lanes.tanh(cell), lanes.number(QUARTER)  # again: cheaper than to keep it
    by_hidden = lanes.product(total, lanes.sigmoid(leave))
    through = lanes.add(by_hidden, lanes.one_less_square(tanh_cell), through)
    grads = (
        lanes.product(through, candidate, quarter, lanes.one_less_square(enter)),
        lanes.product(through, old, quarter, lanes.one_less_square(keep)),
        lanes.product(through, lanes.sigmoid(enter), lanes.one_less_square(candidate)),
        lanes.product(total, tanh_cell, quarter, lanes.one_less_square(leave)),
    )
    for grad, to in zip(grads, at[:4], strict=True):
        lanes.store(grad, to)
    lanes.store(lanes.product(through, lanes.sigmoid(keep)), at[7])


def _cells(name: str, body: Any, gates: list[Any], others: list[Any]) -> Any:
    """Return signature and code of an intrinsic: a pass over the units of some environments."""

    def call(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _call(context, builder, signature, values, name, partial(_emit_cells, body=body, n_gates=len(gates)))
        return context.get_dummy_value()

    parts = [kind for array in [*gates, *others] for kind in (array, types.intp)]
    return types.void(*parts, types.intp, types.intp), call


def _lstm_cell_code(
    _: Any,
    before: Any,
    before_at: Any,
    gates: Any,
    gates_at: Any,
    old: Any,
    old_at: Any,
    cell: Any,
    cell_at: Any,
    hidden: Any,
    hidden_at: Any,
    envs: Any,
    size: Any,
) -> Any:
    """Run :func:`_cell_body` on gates ``[B, 4, H]`` and states ``[B, H]`` in contiguous arrays, each from an index on."""
    return _cells("lstm_cell", _cell_body, [before, gates], [old, cell, hidden])


_lstm_cell: Any = intrinsic(_lstm_cell_code)


def _lstm_cell_backward_code(
    _: Any,
    gates: Any,
    gates_at: Any,
    old: Any,
    old_at: Any,
    cell: Any,
    cell_at: Any,
    grad_hidden: Any,
    grad_hidden_at: Any,
    grad_cell: Any,
    grad_cell_at: Any,
    envs: Any,
    size: Any,
) -> Any:
    """Run :func:`_cell_backward_body` likewise."""
    return _cells("lstm_cell_backward", _cell_backward_body, [gates], [old, cell, grad_hidden, grad_cell])


_lstm_cell_backward: Any = intrinsic(_lstm_cell_backward_code)


@compiled
def lstm_step(
    inputs: Floats,
    old_hidden: Floats,
    old_cell: Floats,
    inward: Floats,
    recurrent: Floats,
    bias: Floats,
    gates: Floats,
    cell: Floats,
    hidden: Floats,
) -> None:
    """Run one step of B environments, for acting; `gates`, ``[B, 4, H]``, are scratch."""
    envs, n, (_, size) = len(gates), bias.size, cell.shape
    by_env = gates.reshape(envs, n)
    _product(inputs, inward, bias, SAME, by_env)
    _product(old_hidden, recurrent, by_env, n, by_env)
    _lstm_cell(gates, 0, gates, 0, old_cell, 0, cell, 0, hidden, 0, envs, size)


@called
def _parts_between_resets(resets: Floats, first: int, last: int) -> Integers:
    """Return row, environment and length of each part between resets, ``[P, 3]``, the longest first.

    None where few rows would be gained: the parts of a few environments run side by side, since a product of some rows takes
    hardly longer than that of a single one.
    """
    rows = len(resets)
    starting, longest, total = np.zeros(rows + 2, np.int64), 0, 0  # how many parts have a length; then where they begin
    for b in range(first, last):
        start = 0
        for t in range(rows + 1):
            if t == rows or resets[t, b] != ZERO:
                starting[t - start] += 1
                longest, start, total = max(longest, t - start), t + 1, total + 1
    if last - first >= TALLEST or 4 * longest > 3 * rows:
        return np.empty((0, 3), np.int64)
    parts, at = np.empty((total, 3), np.int64), 0
    for length in range(rows, -1, -1):
        starting[length], at = at, at + starting[length]
    for b in range(first, last):
        start = 0
        for t in range(rows + 1):
            if t == rows or resets[t, b] != ZERO:
                place = starting[t - start]
                starting[t - start] += 1
                parts[place, 0], parts[place, 1], parts[place, 2] = start, b, t - start
                start = t + 1
    return parts


@inlined
def _gather(rows: Floats, parts: Integers, count: int, step: int, to: Floats) -> None:
    """Copy the rows ``[L, B, n]`` of the first parts at a step of theirs into the rows of `to`."""
    for p in range(count):
        row, out = rows[parts[p, 0] + step, parts[p, 1]], to[p]
        for j in range(len(out)):
            out[j] = row[j]


@inlined
def _scatter(rows: Floats, parts: Integers, count: int, step: int, to: Floats) -> None:
    """Copy rows back to where :func:`_gather` takes them from."""
    for p in range(count):
        row, out = rows[p], to[parts[p, 0] + step, parts[p, 1]]
        for j in range(len(row)):
            out[j] = row[j]


@inlined
def _longer(parts: Integers, step: int, count: int) -> int:
    """Return how many parts are longer than `step`, given that at most `count` are."""
    while count > 0 and parts[count - 1, 2] <= step:
        count -= 1
    return count


@called
def _forward_by_parts(
    inputs: Floats,
    inward: Floats,
    recurrent: Floats,
    bias: Floats,
    parts: Integers,
    gates: Floats,
    cells: Floats,
    hidden: Floats,
) -> None:
    """Run :func:`lstm_forward` on all parts side by side."""
    (rows, envs, n_inputs), size, count, n = inputs.shape, cells.shape[2], len(parts), bias.size
    x, before, out = np.empty((count, n_inputs), np.float32), np.empty((count, n), np.float32), np.empty((count, n), np.float32)
    h, c, by_env = np.empty((count, size), np.float32), np.empty((count, size), np.float32), gates.reshape(rows, envs, n)
    active = count
    for k in range(rows):
        active = _longer(parts, k, active)
        if active == 0:
            break
        if k == 0:
            _gather(hidden, parts, active, 0, h)
            _gather(cells, parts, active, 0, c)
        _gather(inputs, parts, active, k, x)
        _multiply(x, 0, n_inputs, 1, active, inward, 0, n_inputs, bias, 0, SAME, before, 0, n, n)
        _multiply(h, 0, size, 1, active, recurrent, 0, size, before, 0, n, before, 0, n, n)
        _lstm_cell(before, 0, out, 0, c, 0, c, 0, h, 0, active, size)
        _scatter(out, parts, active, k, by_env)
        _scatter(c, parts, active, k + 1, cells)
        _scatter(h, parts, active, k + 1, hidden)


@called
def _backward_by_parts(
    grad_output: Floats,
    packed: Floats,
    parts: Integers,
    gates: Floats,
    cells: Floats,
    grad_hidden: Floats,
    grad_cell: Floats,
) -> None:
    """Run :func:`lstm_backward` on all parts side by side."""
    (rows, envs, size), count = grad_output.shape, len(parts)
    n, by_env = 4 * size, gates.reshape(rows, envs, 4 * size)
    gate, old, cell = np.empty((count, n), np.float32), np.empty((count, size), np.float32), np.empty((count, size), np.float32)
    output, grad = np.empty((count, size), np.float32), np.empty((count, size), np.float32)
    through, active = np.zeros((count, size), np.float32), 0
    for k in range(parts[0, 2] - 1, -1, -1):
        before = active
        while active < count and parts[active, 2] > k:
            active += 1
        _gather(grad_output, parts, active, k, output)
        for p in range(before, active):  # the last steps of parts
            for j in range(size):
                grad[p, j] = output[p, j]
        _gather(by_env, parts, active, k, gate)
        _gather(cells, parts, active, k, old)
        _gather(cells, parts, active, k + 1, cell)
        _lstm_cell_backward(gate, 0, old, 0, cell, 0, grad, 0, through, 0, active, size)
        _scatter(gate, parts, active, k, by_env)
        if k > 0:
            _gather(grad_output, parts, active, k - 1, output)
        else:
            output[:] = ZERO
        _multiply(gate, 0, n, 1, active, packed, 0, n, output, 0, size, grad, 0, size, size)
    for p in range(active):
        if parts[p, 0] == 0:
            for j in range(size):
                grad_hidden[parts[p, 1], j], grad_cell[parts[p, 1], j] = grad[p, j], through[p, j]


@inlined
def _close_reset(resets: Floats, first: int, last: int, t: int, k: int, gates: Floats, cells: Floats, hidden: Floats) -> None:
    """Write what a reset step leaves behind, where step t, of row k of the gates, is one."""
    for b in range(first, last):
        if resets[t, b] != ZERO:
            gates[k, b], gates[k, b, 2] = -ONE, ZERO  # closed, with a derivative of 0
            cells[t + 1, b], hidden[t + 1, b] = ZERO, ZERO


@compiled
def lstm_forward(
    inputs: Floats,
    resets: Floats,
    inward: Floats,
    recurrent: Floats,
    bias: Floats,
    first: int,
    last: int,
    gates: Floats,
    cells: Floats,
    hidden: Floats,
) -> None:
    """Run L steps of the environments `first` to `last`: fill `gates`, and `cells` and `hidden` below row 0.

    :param resets: ``[L, B]``, not 0 at reset steps, after which both states are 0.
    :param gates: where no gradient is needed, fewer rows are enough, which are used again and again.
    """
    (rows, envs, n_inputs), (kept, _, _, size) = inputs.shape, gates.shape
    n, count = 4 * size, last - first
    parts = _parts_between_resets(resets, first, last)
    if len(parts) and kept == rows:
        for t in range(rows):
            _close_reset(resets, first, last, t, t, gates, cells, hidden)
        _forward_by_parts(inputs, inward, recurrent, bias, parts, gates, cells, hidden)
        return
    # The inputs of some steps are one product, where they are rows without gaps.
    together = max(BLOCK // envs, 1) if count == envs else 1
    before = np.empty(together * count * n, np.float32)  # stays in the cache, as `gates` do not
    for top in range(0, rows, together):
        end = min(top + together, rows)
        x, samples = (top * envs + first) * n_inputs, (end - top) * count
        _multiply(inputs, x, n_inputs, 1, samples, inward, 0, n_inputs, bias, 0, SAME, before, 0, n, n)
        for t in range(top, end):
            k, z = t % kept, (t - top) * count * n
            old, to, at = (t * envs + first) * size, ((t + 1) * envs + first) * size, (k * envs + first) * n
            _multiply(hidden, old, size, 1, count, recurrent, 0, size, before, z, n, before, z, n, n)
            _lstm_cell(before, z, gates, at, cells, old, cells, to, hidden, to, count, size)
            _close_reset(resets, first, last, t, k, gates, cells, hidden)


@compiled
def lstm_backward(
    grad_output: Floats,
    resets: Floats,
    packed: Floats,
    first: int,
    last: int,
    gates: Floats,
    cells: Floats,
    grad_hidden: Floats,
    grad_cell: Floats,
) -> None:
    """Replace `gates` by the gradient of their pre-activations in the environments `first` to `last`.

    At a reset step all gates are closed, which stops every gradient of its own accord.

    :param grad_output: gradient of the hidden states, ``[L, B, H]``.
    :param resets: ``[L, B]``, not 0 at reset steps.
    :param packed: the weights of the hidden state, ``[4 H, H]``, packed.
    :param grad_hidden: ``[B, H]``, filled with the gradient of the hidden state before the first step.
    :param grad_cell: ``[B, H]``, filled with that of the cell state before it.
    """
    rows, envs, size = grad_output.shape
    n, count, at, zeros = 4 * size, last - first, first * size, np.zeros(size, np.float32)
    parts = _parts_between_resets(resets, first, last)
    if len(parts):
        grad_hidden[first:last], grad_cell[first:last] = ZERO, ZERO
        _backward_by_parts(grad_output, packed, parts, gates, cells, grad_hidden, grad_cell)
        for t in range(rows):
            for b in range(first, last):
                if resets[t, b] != ZERO:
                    gates[t, b] = ZERO
        return
    for b in range(first, last):
        for j in range(size):
            grad_hidden[b, j], grad_cell[b, j] = grad_output[rows - 1, b, j], ZERO
    for t in range(rows - 1, -1, -1):
        gate, old, cell = (t * envs + first) * n, (t * envs + first) * size, ((t + 1) * envs + first) * size
        _lstm_cell_backward(gates, gate, cells, old, cells, cell, grad_hidden, at, grad_cell, at, count, size)
        if t > 0:
            above = ((t - 1) * envs + first) * size
            _multiply(gates, gate, n, 1, count, packed, 0, n, grad_output, above, size, grad_hidden, at, size, size)
        else:
            _multiply(gates, gate, n, 1, count, packed, 0, n, zeros, 0, SAME, grad_hidden, at, size, size)


@compiled
def lstm_weight_gradients(
    grad_gates: Floats,
    inputs: Floats,
    hidden: Floats,
    first: int,
    last: int,
    grad_w_input: Floats,
    grad_w_hidden: Floats,
    grad_b_input: Floats,
    grad_b_hidden: Floats,
) -> None:
    """Fill the gradients of weights and biases, given that of the gates' pre-activations, ``[L B, 4 H]``.

    :param inputs: ``[L B, D]``.
    :param hidden: before each step, ``[L B, H]``.
    :param first: of the pre-activations whose weights to take, up to `last`.
    """
    most, rows = max(inputs.shape[1], hidden.shape[1]), len(grad_gates)
    packed, zeros, grad_b_input[first:last] = _packed_samples(most), np.zeros(most, np.float32), ZERO
    for top in range(0, rows, CHUNK):  # for all of them, while the cache holds the samples
        samples = top, min(top + CHUNK, rows)
        _add_outer(grad_gates, inputs, samples, first, last, packed, zeros, grad_w_input)
        _add_outer(grad_gates, hidden, samples, first, last, packed, zeros, grad_w_hidden)
        _add_columns(grad_gates, samples, first, last, grad_b_input)
    for j in range(first, last):
        grad_b_hidden[j] = grad_b_input[j]


# ----------------------------------------------------------------------------------------------------------------- heads


@inlined
def _rows_of(buffer: Any, start: int, rows: int, columns: int) -> Any:
    return buffer[start : start + rows * columns].reshape(rows, columns)


@inlined
def _padded(count: int) -> int:
    return (count + LINE - 1) // LINE * LINE


@inlined
def _layer_of(packed: Any, start: int, n_in: int, n_out: int) -> Any:
    size = _panel(n_out) * n_in * PANEL
    return packed[start : start + size].reshape(_panel(n_out), n_in, PANEL)


@compiled
def pack_mlp(flat: Floats, table: Integers, packed: Floats) -> None:
    """Pack the weights of all layers of a head one after the other, for :func:`mlp_forward`."""
    start = 0
    for layer in range(len(table)):
        at, _, n_in, n_out = table[layer]
        to = _layer_of(packed, start, n_in, n_out)
        _pack_transposed(_rows_of(flat, at, n_out, n_in), np.ones(n_out, np.float32), to)
        start += to.size


@compiled
def mlp_forward(flat: Floats, table: Integers, activation: int, packed: Floats, inputs: Floats, values: Floats) -> None:
    """Run a feed-forward head on the rows of `inputs` ``[M, n]``.

    :param flat: all parameters.
    :param table: a row for each layer: where its weights and its bias begin, how many inputs and outputs it has.
    :param packed: filled by :func:`pack_mlp`.
    :param values: the outputs of all layers one after the other, ``[M, n]`` each, each at a multiple of a cache line.
    """
    rows = len(inputs)
    for top in range(0, rows, BLOCK):  # through all layers, while the cache holds them
        end, start, packed_at, x = min(top + BLOCK, rows), 0, 0, inputs
        for layer in range(len(table)):
            at, bias_at, n_in, n_out = table[layer]
            weights, bias = _layer_of(packed, packed_at, n_in, n_out), flat[bias_at : bias_at + n_out]
            y = _rows_of(values, start, rows, n_out)
            if n_out < NARROW:
                _narrow_product(x[top:end], _rows_of(flat, at, n_out, n_in), bias, y[top:end])
            else:
                _product(x[top:end], weights, bias, SAME, y[top:end])
            if layer < len(table) - 1:
                _activate(_flat(y[top:end]), activation)
            x, start, packed_at = y, start + _padded(rows * n_out), packed_at + weights.size


@compiled
def mlp_backward(
    flat: Floats,
    table: Integers,
    activation: int,
    inputs: Floats,
    values: Floats,
    grad_values: Floats,
    grad_inputs: Floats,
    add: bool,
    scratch: Floats,
) -> None:
    """Fill the gradients of the outputs of a head's layers, given those of the last one.

    :param grad_values: as `values`.
    :param grad_inputs: ``[M, n]``, filled with the gradient of the inputs; of no rows where it is not needed.
    :param add: add to `grad_inputs` instead of overwriting it.
    :param scratch: as large as the packed weights of the largest layer.
    """
    rows, above = len(inputs), 0
    for layer in range(len(table) - 1):
        above += _padded(rows * table[layer, 3])
    for layer in range(len(table) - 1, -1, -1):
        at, _, n_in, n_out = table[layer]
        grad = _rows_of(grad_values, above, rows, n_out)
        weights, zeros = _layer_of(scratch, 0, n_out, n_in), np.zeros(n_in, np.float32)
        if layer > 0 or len(grad_inputs):
            _pack(_rows_of(flat, at, n_out, n_in), weights)
        if layer > 0:
            above -= _padded(rows * n_in)
            grad_below, y = _rows_of(grad_values, above, rows, n_in), _rows_of(values, above, rows, n_in)
            for top in range(0, rows, BLOCK):
                end = min(top + BLOCK, rows)
                _product(grad[top:end], weights, zeros, SAME, grad_below[top:end])
                _times_derivative(_flat(grad_below[top:end]), _flat(y[top:end]), activation)
        elif len(grad_inputs) and add:
            _product(grad, weights, grad_inputs, n_in, grad_inputs)
        elif len(grad_inputs):
            _product(grad, weights, zeros, SAME, grad_inputs)


@compiled
def mlp_weight_gradients(table: Integers, inputs: Floats, values: Floats, grad_values: Floats, gradient: Floats) -> None:
    """Write the gradient of a head's parameters into `gradient`, given that of the outputs of all layers.

    :param gradient: laid out as the parameters.
    """
    rows, start, x = len(inputs), 0, inputs
    for layer in range(len(table)):
        at, bias_at, n_in, n_out = table[layer]
        grad, packed = _rows_of(grad_values, start, rows, n_out), _packed_samples(n_in)
        of_weights, of_biases = _rows_of(gradient, at, n_out, n_in), gradient[bias_at : bias_at + n_out]
        zeros, of_biases[:] = np.zeros(n_in, np.float32), ZERO
        for top in range(0, rows, CHUNK):
            samples = top, min(top + CHUNK, rows)
            _add_outer(grad, x, samples, 0, n_out, packed, zeros, of_weights)
            _add_columns(grad, samples, 0, n_out, of_biases)
        x, start = _rows_of(values, start, rows, n_out), start + _padded(rows * n_out)


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
