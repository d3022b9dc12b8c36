"""Matrix products in tiles: against float64, and the same bits however the work is cut."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from isa import AVX2

from tailguard.ppo.compiled import kernels
from tolerance import rounding

# Around the heights of tiles (6, 8), the widths of panels (16, 32), blocks of rows (48) and four panels at once; a single one.
SHAPES = [(1, 1, 1), (1, 5, 129), (1, 64, 256), (3, 7, 31), (6, 64, 33), (8, 17, 64), (49, 2, 16), (101, 40, 15), (13, 300, 70)]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(left, right):
    out = np.full((len(left), right.shape[1]), np.nan, np.float32)
    packed = np.full(kernels.packed_shape(*right.shape), np.nan, np.float32)
    kernels.product(left, right, packed, out)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_product(shape):
    rows, depth, columns = shape
    left, right = numbers(rows, depth), numbers(depth, columns, seed=1)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    scale = np.abs(left).astype(np.float64) @ np.abs(right)
    assert (np.abs(product(left, right) - exact) <= rounding(depth) * scale).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_the_others(shape):
    rows, depth, columns = shape
    left, right = numbers(rows, depth), numbers(depth, columns, seed=1)
    whole = product(left, right)
    for cut in {1, rows // 2, rows - 1} - {0, rows}:
        assert np.array_equal(np.concatenate((product(left[:cut], right), product(left[cut:], right))), whole)


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_the_address_of_an_array_does_not_matter(shift):
    left, right = numbers(9, 20), numbers(20, 50, seed=1)
    whole = product(left, right)
    memory = np.empty(left.size + shift, np.float32)
    moved = memory[shift:].reshape(left.shape)
    moved[:] = left
    assert np.array_equal(product(moved, right), whole)


PROGRAM = """
import hashlib, numpy as np
from tailguard.ppo.compiled import kernels
rng = np.random.default_rng(0)
left, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((19, 70), (70, 45)))
out, packed = np.empty((19, 45), np.float32), np.empty(kernels.packed_shape(70, 45), np.float32)
kernels.product(left, right, packed, out)
print(hashlib.sha256(out.tobytes()).hexdigest())
"""


def test_the_width_of_vectors_does_not_matter(tmp_path):
    """Compiled for AVX2, whatever this CPU has."""
    isa = {name: value for name, value in AVX2.items() if name.startswith("NUMBA")}
    environment = {**os.environ, **isa, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((19, 70), (70, 45)))
    assert run.stdout.strip() == hashlib.sha256(product(left, right).tobytes()).hexdigest()
