"""Freshly compiled code and code out of numba's cache give the same bits."""

import os
import subprocess
import sys

# The quantile loss is where it showed: sums that may be reordered, in a function that had a compiled helper.
PROGRAM = """
import hashlib
import numpy as np
from tailguard.optim import kernels
from tailguard.ppo.compiled.update import quantile_loss

rng = np.random.default_rng(0)
quantiles, targets = (rng.standard_normal((64, n)).astype(np.float32) for n in (32, 64))
masses, levels, weights = (rng.random(n).astype(np.float32) for n in (64, 32, 64))
grads = np.empty_like(quantiles)
loss = quantile_loss(quantiles, targets, masses, levels, weights, 0.0137, grads)
sums, mean = np.zeros((1, 4)), np.zeros(64 * 64, np.float32)
kernels.measure(sums, targets.ravel(), np.zeros(1, np.int64), np.array([64 * 64]), mean, np.float32(0.01))
print(hashlib.sha256(grads.tobytes() + sums.tobytes() + mean.tobytes()).hexdigest(), loss)
"""


def test_fresh_code_and_cached_code_agree(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert list(tmp_path.rglob("*.nbc"))  # the second run had something to read
    assert runs[0] == runs[1]
