"""The optimizers and the gradient scaler: what they measure, whether it holds, what they cost. `make bench-optim`.

gradients   what each estimator of noise reports for five kinds of gradients whose noise is known
quadratic   measured against predicted decrease of a noisy quadratic per step, with the factor 1 / (1 + V)
digits      labels of sklearn's digits permuted every 750 steps: who keeps learning (Elsayed and Mahmood 2024, in small)
speed       time of a step on one flat tensor of 100,000 weights, as a multiple of PyTorch's fused Adam
"""

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from tailguard.optim import UPGD, AdaptiveUPGD, VarianceGradientScaler
from tailguard.optim.adam import Adam
from tailguard.optim.layout import FlatParameters

# ---------------------------------------------------------------------------------------------------------- gradients

ELEMENTS, HISTORY = 100, 400


def five_gradients(generator: torch.Generator) -> dict[str, tuple[Callable[[], torch.Tensor], float]]:
    """Name, a gradient anew in each call, and the true variance over the squared mean, summed over elements."""
    means = torch.randn(ELEMENTS, generator=generator)
    means /= means.square().mean().sqrt()

    def normal(n: int, std: float) -> torch.Tensor:
        return std * torch.randn(n, generator=generator)

    def cancelling() -> torch.Tensor:
        z = normal(ELEMENTS // 2, 2.0)
        return torch.cat([z, -z])

    return {
        "constant +-0.5": (lambda: torch.tensor([0.5, -0.5]).repeat(ELEMENTS // 2), 0.0),
        "[z, -z], std 2": (cancelling, float("inf")),
        "0.5 + [z, -z], std 2": (lambda: 0.5 + cancelling(), 16.0),
        "0.5 + independent, std 0.5": (lambda: 0.5 + normal(ELEMENTS, 0.5), 1.0),
        "means of RMS 1 + independent, std 0.1": (lambda: means + normal(ELEMENTS, 0.1), 0.01),
    }


def gradients_table(seeds: int) -> None:
    names = list(five_gradients(torch.Generator()))
    print(f"V = variance / squared mean after {HISTORY} steps with beta 0.99, {ELEMENTS} elements, median of {seeds} seeds\n")
    print("| gradient | true | elementwise | mean | norm |\n|---|---|---|---|---|")
    for name in names:
        found: dict[str, list[float]] = {"elementwise": [], "mean": [], "norm": []}
        for seed in range(seeds):
            draw, truth = five_gradients(torch.Generator().manual_seed(seed))[name]
            params = [nn.Parameter(torch.zeros(ELEMENTS))]
            scalers = {kind: VarianceGradientScaler(params, estimator=kind) for kind in found}  # type: ignore[arg-type]
            for _ in range(HISTORY):
                params[0].grad = draw()
                for scaler in scalers.values():
                    scaler.step()
            for kind, scaler in scalers.items():
                found[kind].append(scaler.get_normalized_variance())
        cells = " | ".join(f"{np.median(values):.4g}" for values in found.values())
        print(f"| {name} | {truth:.3g} | {cells} |")


# ---------------------------------------------------------------------------------------------------------- quadratic


def quadratic_table(draws: int) -> None:
    """L = h |x|^2 / 2 at a fixed x: without noise the step 1 / h is best and lowers L to 0; with noise 1 / (1 + V) of it is."""
    n, h, generator = 1000, 2.0, torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator)
    loss, gradient = h * float(x.square().sum()) / 2.0, h * x
    print(f"\nL = h |x|^2 / 2, h = {h}, {n} dimensions, {draws} steps from the same x; decrease as a share of L\n")
    print("| true V | measured V | factor | predicted 1 / (1 + V) | measured | difference | without the factor |")
    print("|---|---|---|---|---|---|---|")
    for v in (0.1, 0.3, 1.0, 3.0):
        std = (v * float(gradient.square().mean())) ** 0.5
        param = nn.Parameter(x.clone())
        optimizer = torch.optim.SGD([param], lr=1.0 / h)
        scaler = VarianceGradientScaler([param], warmup_steps=300, min_scaling_factor=1e-3)
        scaler.attach(optimizer)
        decrease, plain, factors = [], [], []
        for step in range(300 + draws):
            with torch.no_grad():
                param.copy_(x)
            param.grad = gradient + std * torch.randn(n, generator=generator)
            raw = x - param.grad / h
            factor = scaler.scale_gradients()
            optimizer.step()
            scaler.step()
            if step >= 300:
                factors.append(factor)
                decrease.append(1.0 - h * float(param.detach().square().sum()) / 2.0 / loss)
                plain.append(1.0 - h * float(raw.square().sum()) / 2.0 / loss)
        predicted, measured = 1.0 / (1.0 + v), float(np.mean(decrease))
        row = f"| {v:g} | {scaler.get_normalized_variance():.3f} | {np.mean(factors):.3f} | {predicted:.3f} | {measured:.3f} "
        print(f"{row}| {measured / predicted - 1.0:+.1%} | {np.mean(plain):.3f} |")


# ------------------------------------------------------------------------------------------------------------- digits

TASK_STEPS, TASKS, QUARTERS = 750, 80, 4
PLAIN = {"weight_decay": 0.0, "beta_utility": 0.9}
LEARNERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "Adam 0.001": lambda p: torch.optim.Adam(p, lr=0.001, fused=True),
    "SGD 0.03": lambda p: torch.optim.SGD(p, lr=0.03, fused=True),
    "SGD 0.05": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "UPGD 0.05, sigma 0.001": lambda p: UPGD(p, lr=0.05, sigma=0.001, **PLAIN),
    "UPGD 0.05, sigma 0": lambda p: UPGD(p, lr=0.05, sigma=0.0, **PLAIN),
    "UPGD 0.05, sigma 0, reference gate": lambda p: UPGD(p, lr=0.05, sigma=0.0, gate="reference", **PLAIN),
    "AdaptiveUPGD 0.001, sigma 0.001": lambda p: AdaptiveUPGD(p, lr=0.001, sigma=0.001, **PLAIN),
}


def digit_gradient(weights: list[np.ndarray], gradients: list[np.ndarray], image: np.ndarray, label: int) -> int:
    """Fill the gradient of the cross-entropy of a network with ReLU for one image; returns the label that it would give.

    By hand, because for a batch of one autograd would take most of the time. Weights and biases in turn, as in nn.Sequential.
    """
    first = np.maximum(weights[0] @ image + weights[1], 0.0)
    second = np.maximum(weights[2] @ first + weights[3], 0.0)
    outputs = weights[4] @ second + weights[5]
    delta = np.exp(outputs - outputs.max())
    delta /= delta.sum()
    delta[label] -= 1.0
    for layer, below in ((4, second), (2, first), (0, image)):
        np.multiply(delta[:, None], below, out=gradients[layer])
        gradients[layer + 1][:] = delta
        if layer:
            delta = (delta @ weights[layer]) * (below > 0.0)
    return int(outputs.argmax())


def digit_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))


def online_accuracy(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], seed: int, tasks: int = TASKS) -> list[float]:
    """Share of digits that are named rightly before they are learnt from, one at a time, in each quarter of the run."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    model = digit_network()
    flat = FlatParameters(model)
    optimizer = make([flat.tensor])
    weights = [param.detach().numpy() for param in model.parameters()]
    gradients = [param.grad.numpy() for param in model.parameters()]
    hits = np.zeros(tasks * TASK_STEPS)
    for step, row in enumerate(rng.integers(len(images), size=len(hits))):
        if step % TASK_STEPS == 0:
            permuted = rng.permutation(10)[labels]
        hits[step] = digit_gradient(weights, gradients, images[row], permuted[row]) == permuted[row]
        optimizer.step()
    return [float(quarter.mean()) for quarter in np.split(hits, QUARTERS)]


def digits_table(seeds: int, learner: str) -> None:
    print(f"\nDigits with permuted labels: {TASKS} tasks of {TASK_STEPS} steps, MLP 64-100-50-10, batch 1; online accuracy\n")
    print("| learner | " + " | ".join(f"seed {seed}, by quarter" for seed in range(seeds)) + " | last quarter, mean |")
    print("|---|" + "---|" * (seeds + 1))
    for name, make in LEARNERS.items():
        if learner not in name:
            continue
        runs = [online_accuracy(make, seed) for seed in range(seeds)]
        cells = " | ".join(" ".join(f"{accuracy:.3f}" for accuracy in run) for run in runs)
        print(f"| {name} | {cells} | {np.mean([run[-1] for run in runs]):.3f} |", flush=True)


# -------------------------------------------------------------------------------------------------------------- speed

TENSORS, SIDE = 10, 100
HEADS = {"trunk": range(4), "actor": range(4, 6), "critics": range(6, 10)}


class Subject:
    """101,000 weights in 20 tensors, views of a flat one or not, with gradients, an optimizer and perhaps a scaler."""

    def __init__(
        self,
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        scaler: dict[str, object] | None = None,
        flat: bool = True,
    ):
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(TENSORS))
        if flat:
            self.flat = FlatParameters(self.layers)
            self.flat.gradient.normal_()
        else:
            for parameter in self.layers.parameters():
                parameter.grad = torch.randn_like(parameter)
        self.optimizer = make([self.flat.tensor] if flat else list(self.layers.parameters()))
        self.scaler = None
        if scaler is not None:
            heads = {head: [p for i in own for p in self.layers[i].parameters()] for head, own in HEADS.items()}
            self.scaler = VarianceGradientScaler(heads, warmup_steps=0, **scaler)  # type: ignore[arg-type]
            self.scaler.attach(self.optimizer)

    def idle(self) -> "Subject":
        """Measure a step after 2,000 steps in which half of the weights had the gradient 0, as behind ReLUs that are off."""
        self.step()
        self.flat.gradient[::2] = 0.0
        for _ in range(2000):
            self.step()
        return self

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.scale_gradients()
            self.optimizer.step()
            self.scaler.step()


def adam(p: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=1e-4, fused=True)


def own_adam(p: list[torch.Tensor]) -> torch.optim.Optimizer:
    return Adam(p, lr=1e-4)


SUBJECTS: dict[str, tuple[Callable[[], Subject], float | None]] = {
    "Adam, fused": (lambda: Subject(adam), None),
    "Adam of this project": (lambda: Subject(own_adam), None),
    "Adam of this project, with VGS elementwise": (lambda: Subject(own_adam, {}), 1.3),
    "Adam, fused, with VGS elementwise": (lambda: Subject(adam, {}), 1.3),
    "Adam, fused, 20 tensors": (lambda: Subject(adam, flat=False), None),
    "Adam, fused, 20 tensors, with VGS elementwise": (lambda: Subject(adam, {}, flat=False), None),
    "Adam, fused, with VGS elementwise, monitoring only": (lambda: Subject(adam, {"alpha": 0.0}), None),
    "Adam, fused, with VGS mean": (lambda: Subject(adam, {"estimator": "mean"}), None),
    "UPGD, sigma 0": (lambda: Subject(lambda p: UPGD(p, sigma=0.0)), None),
    "UPGD, noise": (lambda: Subject(lambda p: UPGD(p)), None),
    "UPGD, adaptive noise": (lambda: Subject(lambda p: UPGD(p, adaptive_noise=True)), None),
    "AdaptiveUPGD, sigma 0": (lambda: Subject(lambda p: AdaptiveUPGD(p, sigma=0.0)), 2.0),
    "AdaptiveUPGD, noise": (lambda: Subject(lambda p: AdaptiveUPGD(p)), 3.5),
    "AdaptiveUPGD, adaptive noise": (lambda: Subject(lambda p: AdaptiveUPGD(p, adaptive_noise=True)), 3.5),
    "AdaptiveUPGD, adaptive noise, with VGS elementwise": (
        lambda: Subject(lambda p: AdaptiveUPGD(p, adaptive_noise=True), {}),
        None,
    ),
    "AdaptiveUPGD, sigma 0, foreach": (lambda: Subject(lambda p: AdaptiveUPGD(p, sigma=0.0, implementation="foreach")), None),
    "Adam, fused, half of the gradients 0": (lambda: Subject(adam).idle(), None),
    "AdaptiveUPGD, sigma 0, half of the gradients 0": (lambda: Subject(lambda p: AdaptiveUPGD(p, sigma=0.0)).idle(), None),
    "normal_ alone, for comparison": (lambda: _Draw(), None),
}


class _Draw(Subject):
    def __init__(self) -> None:
        self.numbers = torch.empty(TENSORS * SIDE * (SIDE + 1))

    def step(self) -> None:
        self.numbers.normal_()


def speed_table(rounds: int) -> None:
    subjects = {name: make() for name, (make, _) in SUBJECTS.items()}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds + 3):
        for name, subject in subjects.items():
            start = time.perf_counter()
            for _ in range(50):
                subject.step()
            if turn >= 3:
                times[name].append((time.perf_counter() - start) / 50.0 * 1e6)
    print(f"\nOne step on {TENSORS * SIDE * (SIDE + 1):,} weights in one flat tensor, {rounds} rounds of 50 steps in turn\n")
    print("| optimizer | microseconds, median | of fused Adam | goal |\n|---|---|---|---|")
    base = np.array(times["Adam, fused"])
    for name, (_, goal) in SUBJECTS.items():
        own = np.array(times[name])
        print(f"| {name} | {np.median(own):.0f} | {np.median(own / base):.2f} | {f'<= {goal}' if goal else ''} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one of gradients, quadratic, digits, speed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--learner", default="", help="digits: only the learners whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only == "digits":
        torch.set_flush_denormal(True)  # Adam of PyTorch is several times slower on denormal moments, which this network makes
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread\n")
    tables = {
        "gradients": lambda: gradients_table(5 * options.seeds),
        "quadratic": lambda: quadratic_table(2000),
        "speed": lambda: speed_table(options.rounds),
        "digits": lambda: digits_table(options.seeds, options.learner),
    }
    for name, table in tables.items():
        if options.only in ("", name):
            table()


if __name__ == "__main__":
    main()
