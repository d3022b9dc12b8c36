"""The noise scale from microbatches."""

import pytest
import torch
from torch import nn

from tailguard.optim import VarianceGradientScaler
from tailguard.optim.gradient_statistics import NoiseScale


def minibatch(scale, gradients, sizes):
    """Feed the gradients of single microbatches as an accumulating optimizer would see them."""
    total = sum(sizes)
    accumulated = torch.zeros_like(gradients[0])
    for gradient, size in zip(gradients, sizes, strict=True):
        accumulated = accumulated + size / total * gradient
        scale.add([accumulated[:7], accumulated[7:]], size)
    scale.close()


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (4, 8, 20), (1, 31)])
def test_estimate(sizes):
    """Samples with mean mu and variance sigma^2 in n dimensions: tr(S) = n sigma^2, noise scale n sigma^2 / |mu|^2."""
    generator = torch.Generator().manual_seed(0)
    mu, sigma, n = torch.linspace(-0.5, 0.5, 50), 2.0, 50
    scale = NoiseScale(0.999)
    for _ in range(4000):
        gradients = [mu + sigma / size**0.5 * torch.randn(n, generator=generator) for size in sizes]
        minibatch(scale, gradients, sizes)
    weight = 1.0 - 0.999**4000
    assert scale.covariance / weight == pytest.approx(n * sigma**2, rel=0.05)
    assert scale.signal / weight == pytest.approx(mu.square().sum().item(), rel=0.15)
    assert scale.value == pytest.approx(n * sigma**2 / mu.square().sum().item(), rel=0.15)


def test_drift_is_not_noise():
    """A noiseless gradient that grows: variance in time, none between microbatches."""
    (param,) = parameters = [nn.Parameter(torch.zeros(10))]
    scaler = VarianceGradientScaler(parameters, beta=0.9)
    for step in range(50):
        param.grad = torch.zeros(10)
        for _ in range(4):
            param.grad += (1.0 + step / 50.0) / 4.0
            scaler.observe_microbatch(16)
        scaler.scale_gradients()
        scaler.step()
    assert scaler.get_normalized_variance() > 1e-3
    assert scaler.noise_scale.value == pytest.approx(0.0, abs=1e-5)
    assert scaler.metrics()["vgs/noise_scale"] == scaler.noise_scale.value


def test_noise_of_a_real_model():
    """Per-sample gradients of a linear regression: the trace and the mean by brute force."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 3, generator=generator)
    targets = inputs @ torch.tensor([1.0, 2.0, 3.0]) + torch.randn(4096, generator=generator)
    weight = nn.Parameter(torch.zeros(3))
    per_sample = ((inputs @ weight.detach() - targets)[:, None] * inputs).double()
    truth = (per_sample.var(0).sum() / per_sample.mean(0).square().sum()).item()
    scaler = VarianceGradientScaler([weight], beta=0.995)
    for _ in range(600):
        rows = torch.randperm(4096, generator=generator)[:32]
        weight.grad = None
        for part in rows.split(8):
            (((inputs[part] @ weight - targets[part]).square().mean() / 2.0) * len(part) / 32).backward()
            scaler.observe_microbatch(len(part))
        scaler.scale_gradients()
        scaler.step()
    assert scaler.noise_scale.value == pytest.approx(truth, rel=0.15)


def test_one_microbatch_says_nothing():
    scale = NoiseScale(0.9)
    assert scale.value is None
    minibatch(scale, [torch.ones(9)], [4])
    assert scale.value is None
    assert "vgs/noise_scale" not in VarianceGradientScaler([nn.Parameter(torch.ones(2))]).metrics()


def test_state_round_trip():
    gradients = [torch.ones(9), 2.0 * torch.ones(9)]
    scale, other = NoiseScale(0.9), NoiseScale(0.9)
    minibatch(scale, gradients, (4, 4))
    other.load_state_dict(scale.state_dict())
    assert other.value == scale.value is not None
    for each in (scale, other):
        minibatch(each, gradients[::-1], (2, 6))
    assert other.state_dict() == scale.state_dict()


@pytest.mark.parametrize("samples", [0, -1, float("nan")])
def test_impossible_samples(samples):
    with pytest.raises(ValueError, match="samples"):
        NoiseScale(0.9).add([torch.ones(2)], samples)
