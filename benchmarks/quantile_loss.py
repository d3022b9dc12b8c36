"""The cost of the critic's loss and targets on the CPU: one thread, medians, forward and backward. Prints markdown tables.

The contenders: the pairwise definition in eager torch with its [B, N, N] tensors; the same loss from sorted targets with
`searchsorted` and prefix sums in torch (kappa = 0 only), which needs no such tensor; and `quantile_huber_loss`. They take
turns, so that a busy machine slows all of them. CPU time of the thread, so that it does not count what others compute.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from tailguard.ppo.quantiles import quantile_huber_loss, uniform_levels
from tailguard.ppo.targets import gae, sr_lambda_targets

BATCH = 1024
SIZES = (32, 51, 101)
STEPS, ENVS, ATOMS = 128, 64, 32


def pairwise(pred, target, levels, kappa):
    u = target.unsqueeze(-2) - pred.unsqueeze(-1)
    size = u.abs()
    huber = size if kappa == 0.0 else torch.where(size <= kappa, 0.5 * u * u, kappa * (size - 0.5 * kappa)) / kappa
    return ((levels.unsqueeze(-1) - (u.detach() < 0).float()).abs() * huber).mean(-1).mean(-1)


class SortedPinball(torch.autograd.Function):
    """theta (F(theta) - tau) - (sum of the targets below theta) / M, around the mean of the targets."""

    @staticmethod
    def forward(ctx, pred, target, levels):
        """Return the loss of each row and keep its gradient."""
        centre = target.mean(-1, keepdim=True)
        ordered, theta = target.sort(-1).values - centre, pred - centre
        below = torch.searchsorted(ordered, theta)
        sums = torch.nn.functional.pad(ordered.cumsum(-1), (1, 0))
        slope = below / target.shape[-1] - levels
        ctx.save_for_backward(slope)
        return (theta * slope - sums.gather(-1, below) / target.shape[-1]).mean(-1)

    @staticmethod
    def backward(ctx, grad):
        """To the predictions only."""
        (slope,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * slope / slope.shape[-1], None, None


def medians(jobs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Milliseconds of each job, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for round_ in range(repetitions + 3):
        for name, job in jobs.items():
            job()  # the one before has filled the caches with its own
            start = time.thread_time()
            job()
            if round_ >= 3:
                times[name].append(1e3 * (time.thread_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def loss_rows(repetitions: int):
    for n in SIZES:
        generator = torch.Generator().manual_seed(n)
        pred = torch.randn(BATCH, n, generator=generator, requires_grad=True)
        target, levels = torch.randn(BATCH, n, generator=generator), uniform_levels(n)

        def gradient(loss, *args, pred=pred, target=target, levels=levels):
            return torch.autograd.grad(loss(pred, target, levels, *args).sum(), pred)[0]

        for kappa in (0.0, 1.0):
            jobs = {
                "pairwise": lambda g=gradient, k=kappa: g(pairwise, k),
                "ours": lambda g=gradient, k=kappa: g(quantile_huber_loss, k),
            }
            if kappa == 0.0:
                jobs["sorted"] = lambda g=gradient: g(SortedPinball.apply)
            expected = jobs["pairwise"]()
            for job in jobs.values():
                torch.testing.assert_close(job(), expected, rtol=1e-5, atol=1e-6)
            ms = medians(jobs, repetitions)
            by_sorting = f"{ms['sorted']:.2f}" if "sorted" in ms else ""
            ratio = ms["pairwise"] / ms["ours"]
            yield f"| {n} | {kappa:g} | {ms['pairwise']:.2f} | {by_sorting} | {ms['ours']:.2f} | {ratio:.0f}x |"


def target_rows(repetitions: int):
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = (torch.randn(STEPS, ENVS, generator=generator) for _ in range(3))
    terminated, truncated = (torch.rand(STEPS, ENVS, generator=generator) < 0.005 for _ in range(2))
    quantiles = torch.randn(STEPS, ENVS, ATOMS, generator=generator)
    jobs = {
        "gae": lambda: gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95),
        "sr_lambda_targets": lambda: sr_lambda_targets(rewards, quantiles, terminated, truncated, 0.99, 0.95, generator),
        "of which random numbers": lambda: torch.rand(quantiles.shape, generator=generator),
    }
    yield from (f"| {name} | {ms:.3f} |" for name, ms in medians(jobs, repetitions).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=40)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, B = {BATCH}, float32\n")
    print("| N = M | kappa | pairwise, eager (ms) | sorted, torch (ms) | quantile_huber_loss (ms) | pairwise / ours |")
    print("|---|---|---|---|---|---|", *loss_rows(repetitions), sep="\n")
    print(f"\n| T = {STEPS}, B = {ENVS}, N = {ATOMS} | ms |", "|---|---|", *target_rows(repetitions), sep="\n")


if __name__ == "__main__":
    main()
