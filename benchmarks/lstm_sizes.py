"""The compiled LSTM against torch's (oneDNN), forwards and backwards: ``python benchmarks/lstm_sizes.py``.

One layer, 32 inputs, 128 steps and two resets in each sequence, one thread. Milliseconds of processor time, the fastest of
rounds in turn. A ratio above 1: the compiled one is faster.
"""

import argparse
import time

import torch

from tailguard.ppo.networks import LstmTrunk

STEPS, INPUTS = 128, 32


def seconds(tasks, rounds):
    """The fastest of some rounds of each task, in turn."""
    best = [float("inf")] * len(tasks)
    for _ in range(rounds):
        for k, task in enumerate(tasks):
            start = time.thread_time()
            task()
            best[k] = min(best[k], time.thread_time() - start)
    return best


def learning(trunk, inputs, resets, state, grad_output):
    def task():
        for parameter in trunk.parameters():
            parameter.grad = None
        (trunk.sequence(inputs, resets, state) * grad_output).sum().backward()

    return task


def compare(size, sequences, rounds):
    trunks = [LstmTrunk(INPUTS, size, compiled=compiled) for compiled in (True, False)]
    inputs, resets = torch.randn(STEPS, sequences, INPUTS), torch.zeros(STEPS, sequences, 1)
    resets[STEPS // 3], resets[2 * STEPS // 3] = 1.0, 1.0
    state, grad_output = trunks[0].initial_state(sequences), torch.randn(STEPS, sequences, size)
    return seconds([learning(trunk, inputs, resets, state, grad_output) for trunk in trunks], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| hidden size | sequences | compiled, ms | torch, ms | ratio |\n|---|---|---|---|---|")
    for size in options.sizes:
        for sequences in options.sequences:
            own, torchs = compare(size, sequences, options.rounds)
            print(f"| {size} | {sequences} | {1e3 * own:.2f} | {1e3 * torchs:.2f} | {torchs / own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
