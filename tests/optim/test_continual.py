"""Learning one task after the other, with the experiment of benchmarks/optim.py in small."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tailguard.optim.layout import FlatParameters


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "optim.py"
    specification = importlib.util.spec_from_file_location("benchmarks_optim", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_gradient_of_the_experiment_is_autograds(benchmark):
    torch.manual_seed(0)
    model = benchmark.digit_network()
    flat = FlatParameters(model)
    image = np.random.default_rng(0).random(64, np.float32)
    outputs = model(torch.from_numpy(image))
    nn.functional.cross_entropy(outputs, torch.tensor(3)).backward()
    expected = flat.gradient.clone()
    weights = [param.detach().numpy() for param in model.parameters()]
    gradients = [param.grad.numpy() for param in model.parameters()]
    assert benchmark.digit_gradient(weights, gradients, image, 3) == outputs.argmax().item()
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-4, atol=1e-6)


def test_upgd_keeps_learning_where_adam_does_not(benchmark):
    """Twelve permutations of the digits' labels. The whole experiment has eighty: UPGD ends above .95, Adam below .75."""
    accuracy = {
        name: benchmark.online_accuracy(benchmark.LEARNERS[name], 0, tasks=12) for name in ("Adam 0.001", "UPGD 0.05, sigma 0")
    }
    assert accuracy["UPGD 0.05, sigma 0"][-1] > 0.84
    assert accuracy["Adam 0.001"][-1] < 0.78
