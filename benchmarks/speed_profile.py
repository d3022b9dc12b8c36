"""Processor time of an iteration by part: the compiled passes and the Python between them.

Times each pass of one of speed.py's engines with the process clock, which itself takes about a microsecond a call.
"""

import argparse
import time
from collections import defaultdict

import torch
from speed import ENGINES, ENVS, STEPS

from tailguard.optim import adam
from tailguard.ppo import algorithm, diagnostics, loss, rollout, update
from tailguard.ppo.actions import Gaussian
from tailguard.ppo.compiled import kernels
from tailguard.ppo.compiled import update as compiled_update
from tailguard.ppo.compiled.acting import CompiledActing
from tailguard.ppo.rollout import Acting

PASSES = [
    (kernels, "pack_lstm"),
    (kernels, "lstm_forward"),
    (kernels, "lstm_step"),
    (kernels, "lstm_backward"),
    (kernels, "mlp_forward"),
    (kernels, "mlp_backward"),
    (kernels, "lstm_weight_gradients"),
    (kernels, "pack_mlp"),
    (kernels, "mlp_weight_gradients"),
    (kernels, "draw_gaussian"),
    (compiled_update, "mean_loss"),
    (compiled_update, "quantile_loss"),
    (compiled_update, "policy_rows"),
    (loss, "policy_rows"),
    (compiled_update.CompiledGradient, "gradient"),
    (CompiledActing, "step"),
    (Acting, "step"),
    (Gaussian, "to_env"),
    (rollout.Rollout, "add"),
    (rollout.Rollout, "sequence_layout"),
    (algorithm, "step_with_arrays"),
    (algorithm, "finite"),
    (algorithm, "prepare"),
    (update, "_norm"),
    (update.Update, "gradient"),
    (update.Update, "step"),
    (adam.Adam, "_move"),
    (diagnostics.EpisodeReturns, "add"),
    (algorithm.DistributionalPPO, "collect_rollouts"),
    (algorithm.DistributionalPPO, "train"),
]


class Clock:
    """Counts the calls of functions, and the time inside them less that of the other functions it measures."""

    def __init__(self) -> None:
        self.calls, self.seconds, self._inner = defaultdict(int), defaultdict(float), []

    def watch(self, owner, name) -> None:
        function, label = getattr(owner, name), f"{owner.__name__.removeprefix('tailguard.')}.{name}"

        def timed(*args, **options):
            self._inner.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **options)
            finally:
                taken = time.process_time() - start
                self.calls[label] += 1
                self.seconds[label] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine", choices=[n for n in ENGINES if n.startswith("Tailguard")], default="Tailguard, shared LSTM, compiled"
    )
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, clock = ENGINES[options.engine](), Clock()
    model.learn(2 * STEPS * ENVS)
    for owner, name in PASSES:
        clock.watch(owner, name)
    start = time.process_time()
    for _ in range(options.rounds):
        model.learn(STEPS * ENVS, reset_num_timesteps=False)
    whole = time.process_time() - start
    print(f"{options.engine}: {1e3 * whole / options.rounds:.1f} ms of processor time per iteration\n")
    print("| pass | calls | ms, without those below it | share |\n|---|---|---|---|")
    for name in sorted(clock.seconds, key=clock.seconds.__getitem__, reverse=True):
        seconds = clock.seconds[name]
        ms = 1e3 * seconds / options.rounds
        print(f"| {name} | {clock.calls[name] / options.rounds:.0f} | {ms:.2f} | {seconds / whole:.1%} |")


if __name__ == "__main__":
    main()
