"""What a second thread is worth to one agent, and that it changes no bit: ``python benchmarks/threads.py``.

On work W (work.py), seed 0, each agent alone. `wall`: ratio of the times of an iteration, medians; on a machine that others use
as well, two threads wait for a core most of the time. `critical path`: the same for processor time, where of two tasks that run
side by side only the longer one counts; what a second core would give without any waiting.
"""

import argparse
import time

import numpy as np
import torch
from speed import DEEP, ENVS, LSTM, SCALAR, SHARED, STEPS, ours

from tailguard.ppo.compiled.threads import Threads

CASES = {
    "separate LSTMs": ("MlpLstmPolicy", SCALAR, LSTM),
    "separate LSTMs, twin critics of 32 quantiles": ("MlpLstmPolicy", {}, LSTM),
    "shared LSTM": ("MlpLstmPolicy", SCALAR, SHARED),
    "MLP": ("MlpPolicy", SCALAR, {"net_arch": DEEP}),
}


class Timed(Threads):
    """Counts the processor time that the longer one of two tasks takes, beyond what the caller spends itself."""

    beyond = 0.0

    def run(self, here, beside):
        spent = [0.0, 0.0]

        def timed(k, task):
            start = time.thread_time()
            result = task()
            spent[k] = time.thread_time() - start
            return result

        results = super().run(lambda: timed(0, here), lambda: timed(1, beside))
        if self.count > 1:
            Timed.beyond += max(spent) - spent[0]
        return results


def measure(case, threads, rounds):
    """Return seconds and critical path of an iteration, and the parameters at the end."""
    policy, critic, networks = CASES[case]
    model = ours(policy, critic, **networks, threads=threads)
    gradient = model.update.compiled
    gradient._threads = timed = Timed(threads)
    if gradient._actor_trunk is not None and gradient._critic_trunk is None:
        gradient._actor_trunk._threads = timed
    model.learn(STEPS * ENVS)
    wall, path = [], []
    for _ in range(rounds):
        Timed.beyond, start, cpu = 0.0, time.perf_counter(), time.thread_time()
        model.learn(STEPS * ENVS, reset_num_timesteps=False)
        wall.append(time.perf_counter() - start)
        path.append(time.thread_time() - cpu + Timed.beyond)
    return np.median(wall), np.median(path), torch.cat([p.detach().reshape(-1) for p in model.policy.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| agent | wall, one / two threads | critical path, one / two threads | same bits |\n|---|---|---|---|")
    for case in CASES:
        (wall1, path1, one), (wall2, path2, two) = (measure(case, threads, rounds) for threads in (1, 2))
        print(f"| {case} | {wall1 / wall2:.2f} | {path1 / path2:.2f} | {'yes' if torch.equal(one, two) else 'no'} |")


if __name__ == "__main__":
    main()
