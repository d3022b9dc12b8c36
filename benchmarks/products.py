"""Small matrix products: our tiles (compiled/kernels.py) against OpenBLAS through numba and torch's BLAS.

``[M, K] x [K, N]`` in float32, one thread, the right factor packed beforehand as it is during a pass. Microseconds, the fastest
of many repetitions, and GFLOP/s. Shapes: a recurrent step forwards and backwards for 1, 4, 8 and 64 sequences of LSTM 64 and
256, layers of 64 for a minibatch of 1,024, and one product of LSTM 512.
"""

import argparse
import time

import numba
import numpy as np
import torch

from tailguard.ppo.compiled import kernels

SHAPES = [
    *((m, k, n) for m in (1, 4, 8, 64) for k, n in ((64, 256), (256, 64), (256, 1024), (1024, 256))),
    *((1024, k, n) for k, n in ((96, 256), (64, 64), (64, 32))),
    (8, 512, 2048),
]


@numba.njit(error_model="numpy")
def ours(times, left, packed, zeros, out):
    for _ in range(times):
        kernels._product(left, packed, zeros, 0, out)


@numba.njit(error_model="numpy")
def openblas(times, left, right, out):
    for _ in range(times):
        np.dot(left, right, out)


def torchs(times, left, right, out):
    for _ in range(times):
        torch.mm(left, right, out=out)


def contestants(m, k, n):
    """Our product, that of OpenBLAS and torch's for one shape, each as a function of how often to compute it."""
    left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    packed, zeros = torch.empty(kernels.packed_shape(k, n)).numpy(), np.zeros(n, np.float32)
    arrays = left.numpy(), right.numpy(), out.numpy()
    kernels.pack(arrays[1], packed)
    return (
        lambda times: ours(times, arrays[0], packed, zeros, arrays[2]),
        lambda times: openblas(times, *arrays),
        lambda times: torchs(times, left, right, out),
    )


def fastest(repetitions, product, times, now=time.perf_counter):
    """Seconds of a product, the least of some repetitions: others may use this machine."""
    product(1)
    seconds = []
    for _ in range(repetitions):
        start = now()
        product(times)
        seconds.append((now() - start) / times)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    print(f"vectors of {kernels.LANES} floats\n")
    print(
        "| M | K | N | ours, us | GFLOP/s | OpenBLAS, us | GFLOP/s | torch, us | GFLOP/s |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for m, k, n in SHAPES:
        flops = 2 * m * k * n
        times = max(1, min(2000, 10_000_000 // flops))
        found = [fastest(repetitions, product, times) for product in contestants(m, k, n)]
        cells = " | ".join(f"{1e6 * seconds:.2f} | {1e-9 * flops / seconds:.0f}" for seconds in found)
        print(f"| {m} | {k} | {n} | {cells} |")


if __name__ == "__main__":
    main()
