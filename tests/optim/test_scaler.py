"""VarianceGradientScaler: its measurements, its factor, and how it is saved."""

import copy
import io
import logging
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailguard.optim import VarianceGradientScaler
from tailguard.optim.config import VGSConfig
from tailguard.optim.layout import FlatParameters

ESTIMATORS = ["elementwise", "mean", "norm"]


def tensors(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def flat_tensors(*sizes):
    """Return tensors as views of one flat tensor, with gradients that are views of another."""
    module = nn.ParameterList(tensors(*sizes))
    flat = FlatParameters(module)
    return list(module.parameters()), flat


def feed(scaler, gradients):
    for at_once in gradients:
        for param, gradient in zip(scaler.parameters, at_once, strict=True):
            if gradient is None or param.grad is None:
                param.grad = None if gradient is None else gradient.clone()
            else:
                param.grad.copy_(gradient)
        scaler.step()


def random_gradients(steps, *sizes, seed=0, mean=0.3, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [[mean + std * torch.randn(size, generator=generator) for size in sizes] for _ in range(steps)]


# -------------------------------------------------------------------------------------------------------- statistics


def by_definition(gradients, beta, estimator):
    """Variance and squared mean of x from explicit weights beta^(t - i), for one tensor ``[t, n]``, in float64."""
    g = np.stack([gradient.double().numpy() for gradient in gradients])
    x = {"elementwise": g, "mean": g.mean(1, keepdims=True), "norm": np.linalg.norm(g, axis=1, keepdims=True)}[estimator]
    weights = beta ** np.arange(len(x) - 1, -1, -1.0)
    weights /= weights.sum()
    rho = np.sum(weights**2)
    mean, square = weights @ x, weights @ x**2
    variance = (square - mean**2) / (1.0 - rho)
    return variance.sum(), (mean**2 - rho * variance).sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_statistics_by_definition(estimator, flat):
    """Each tensor's variance and squared mean, at several times, against the sums that define them."""
    sizes, beta = (5, 200, 33), 0.9
    gradients = random_gradients(12, *sizes)
    params = flat_tensors(*sizes)[0] if flat else tensors(*sizes)
    scaler = VarianceGradientScaler(params, beta=beta, estimator=estimator)
    for step in range(12):
        feed(scaler, gradients[step : step + 1])
        if step in (1, 4, 11):
            for k in range(3):
                expected = by_definition([at_once[k] for at_once in gradients[: step + 1]], beta, estimator)
                np.testing.assert_allclose(scaler._statistics.parts[k, :2], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [2, 3, 10, 60])
def test_estimates_have_no_bias(steps):
    """200,000 elements with mean 0.3 and variance 1: both are found whatever the number of steps."""
    (param,) = tensors(200_000)
    scaler = VarianceGradientScaler([param], beta=0.95)
    feed(scaler, random_gradients(steps, 200_000))
    variance, signal, scale = scaler._statistics.parts[0] / 200_000
    assert variance == pytest.approx(1.0, abs=0.015)
    assert signal == pytest.approx(0.09, abs=0.015)
    assert scale == pytest.approx(1.09, abs=0.02)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_gradient_says_nothing(estimator):
    scaler = VarianceGradientScaler(tensors(50), estimator=estimator, warmup_steps=0)
    assert scaler.get_normalized_variance() == 0.0
    feed(scaler, random_gradients(1, 50))
    assert scaler.get_normalized_variance() == 0.0
    assert scaler.get_scaling_factor() == 1.0


def five_gradients(case, steps, generator):
    """The gradients of algorithms.md, section G: 100 elements."""
    pattern = torch.tensor([0.5, -0.5]).repeat(50)
    means = torch.randn(100, generator=generator)
    for _ in range(steps):
        z = 2.0 * torch.randn(50, generator=generator)
        yield {
            "constant": pattern,
            "anticorrelated": torch.cat([z, -z]),
            "anticorrelated about 0.5": 0.5 + torch.cat([z, -z]),
            "independent about 0.5": 0.5 + 0.5 * torch.randn(100, generator=generator),
            "heterogeneous": means / means.square().mean().sqrt() + 0.1 * torch.randn(100, generator=generator),
        }[case]


def averages(case, estimator, repetitions=15):
    """Variance and squared mean per element (of the one number for ``mean``, of the whole for ``norm``), mean over runs."""
    found = []
    for seed in range(repetitions):
        generator = torch.Generator().manual_seed(seed)
        scaler = VarianceGradientScaler(tensors(100), estimator=estimator)
        feed(scaler, [[gradient] for gradient in five_gradients(case, 400, generator)])
        found.append(scaler._statistics.parts[0, :2] / (100 if estimator == "elementwise" else 1))
    return np.mean(found, axis=0)


@pytest.mark.parametrize(
    ("case", "variance", "signal"),
    [
        ("constant", 0.0, 0.25),
        ("anticorrelated", 4.0, 0.0),
        ("anticorrelated about 0.5", 4.0, 0.25),
        ("independent about 0.5", 0.25, 0.25),
        ("heterogeneous", 0.01, 1.0),
    ],
)
def test_elementwise_is_right_for_all_five_gradients(case, variance, signal):
    """R054, R056: to 5 %, and 0 where it is 0."""
    measured = averages(case, "elementwise")
    assert measured[0] == pytest.approx(variance, rel=0.05, abs=1e-4)
    assert measured[1] == pytest.approx(signal, rel=0.05, abs=0.01)


@pytest.mark.parametrize(
    ("case", "seen"),
    [("constant", 0.0), ("anticorrelated", 0.0), ("anticorrelated about 0.5", 0.0), ("independent about 0.5", 0.0025)],
)
def test_mean_sees_only_the_mean(case, seen):
    """R053, R059: the variance of the mean of 100 elements; noise that cancels is not seen, other noise 100 times too small."""
    assert averages(case, "mean")[0] == pytest.approx(seen, rel=0.1, abs=1e-6)


def test_norm_sees_only_the_length():
    """R055: noise in 100 dimensions hardly changes the length, whose variance is about sigma^2, not 100 sigma^2."""
    variance, signal = averages("anticorrelated", "norm")
    assert variance == pytest.approx(2.0 * 4.0 * 0.5, rel=0.25)  # of sqrt(2) times a chi of 50 degrees and scale 2
    assert signal == pytest.approx(2.0 * 4.0 * 50.0, rel=0.05)
    assert averages("constant", "norm")[0] == pytest.approx(0.0, abs=1e-4)


def test_correlated_noise_is_seen_by_all():
    """R056, case A: the same noise on every element."""
    generator = torch.Generator().manual_seed(0)
    means = torch.linspace(0.5, 0.7, 100)
    gradients = [[means + 0.5 * torch.randn((), generator=generator)] for _ in range(400)]
    found = {}
    for estimator in ESTIMATORS:
        scaler = VarianceGradientScaler(tensors(100), estimator=estimator)
        feed(scaler, gradients)
        found[estimator] = scaler.get_normalized_variance()
    assert found["mean"] == pytest.approx(0.25 / 0.36, rel=0.35)
    assert found["elementwise"] == pytest.approx(found["mean"], rel=0.05)
    assert found["norm"] > 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e4])
def test_no_scale(estimator, scale):
    """An absolute epsilon would call small gradients quiet."""
    gradients = random_gradients(50, 100, 20)
    found = []
    for factor in (1.0, scale):
        scaler = VarianceGradientScaler(tensors(100, 20), estimator=estimator)
        feed(scaler, [[factor * gradient for gradient in at_once] for at_once in gradients])
        found.append(scaler.get_normalized_variance())
    assert found[0] > 1e-3
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_pure_noise_reaches_the_floor_and_no_noise_the_ceiling():
    quiet, loud = (VarianceGradientScaler(tensors(1000), warmup_steps=0, min_scaling_factor=0.01) for _ in range(2))
    feed(quiet, [[torch.linspace(-1.0, 1.0, 1000)]] * 50)
    feed(loud, random_gradients(200, 1000, mean=0.0))
    assert quiet.get_scaling_factor() == pytest.approx(1.0, abs=1e-4)
    assert loud.get_scaling_factor() == pytest.approx(0.01, abs=0.01)


def test_drift_counts_as_variance_in_time():
    """A noiseless gradient that grows from 1 to 2: the history cannot tell drift from noise."""
    scaler = VarianceGradientScaler(tensors(10), beta=0.9)
    feed(scaler, [[torch.full((10,), 1.0 + step / 50.0)] for step in range(50)])
    assert scaler.get_normalized_variance() > 1e-3


def test_heads_are_measured_apart():
    """One quiet head and one loud head, each alone and together."""
    quiet, loud = tensors(100), tensors(60, 40)
    generator = torch.Generator().manual_seed(0)
    together = VarianceGradientScaler({"quiet": quiet, "loud": loud}, warmup_steps=0, min_scaling_factor=1e-3)
    alone = VarianceGradientScaler(loud, warmup_steps=0, min_scaling_factor=1e-3)
    for _ in range(100):
        quiet[0].grad = 1.0 + 0.1 * torch.randn(100, generator=generator)
        for param in loud:
            param.grad = 1.0 + 5.0 * torch.randn(param.shape, generator=generator)
        together.step()
        alone.step()
    assert together.heads == ("quiet", "loud")
    factors = together.factors()
    assert factors[0] == pytest.approx(1.0 / 1.01, rel=0.01)
    assert factors[1] == pytest.approx(1.0 / 26.0, rel=0.3)
    assert factors[1] == alone.get_scaling_factor()
    assert together.get_scaling_factor() == min(factors)
    assert together.get_normalized_variance() == max(together.normalized_variances())


def test_aggregates():
    """``ratio`` weighs tensors by their size, ``percentile`` takes the 90th percentile of their own quotients."""
    sizes = [1000] + [50] * 10
    gradients = random_gradients(100, *sizes)
    for at_once in gradients:
        at_once[0] = 1.0 + 0.1 * (at_once[0] - 0.3)
    scalers = {kind: VarianceGradientScaler(tensors(*sizes), aggregate=kind) for kind in ("ratio", "percentile")}
    for scaler in scalers.values():
        feed(scaler, gradients)
    parts = scalers["ratio"]._statistics.parts
    own = np.maximum(parts[:, 0], 0.0) / np.maximum(parts[:, 1], 1e-8 * parts[:, 2])
    assert scalers["ratio"].get_normalized_variance() == pytest.approx(parts[:, 0].sum() / parts[:, 1].sum())
    assert scalers["percentile"].get_normalized_variance() == pytest.approx(np.quantile(own, 0.9))


def test_tensors_without_gradient_keep_their_statistics():
    """Steps without a gradient are as if they had not been; a tensor that never had one does not count."""
    gradients = random_gradients(20, 30, 40)
    every = VarianceGradientScaler(tensors(40, 7), aggregate="percentile")
    feed(every, [[at_once[1], None] for at_once in gradients])
    gaps = VarianceGradientScaler(tensors(40, 7), aggregate="percentile")
    for at_once in gradients:
        feed(gaps, [[at_once[1], None], [None, None]])
    assert every.get_normalized_variance() > 0.1
    assert gaps.get_normalized_variance() == every.get_normalized_variance()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_flat_buffer_changes_nothing(estimator):
    sizes = (40, 3, 129)
    params, flat = flat_tensors(*sizes)
    heads = {"a": [params[2]], "b": params[:2]}
    separate = tensors(*sizes)
    scalers = [
        VarianceGradientScaler(heads, estimator=estimator, warmup_steps=0),
        VarianceGradientScaler({"a": [separate[2]], "b": separate[:2]}, estimator=estimator, warmup_steps=0),
    ]
    for gradients in random_gradients(30, *sizes):
        flat.zero_grad()
        for param, other, gradient in zip(params, separate, gradients, strict=True):
            param.grad.add_(gradient)
            other.grad = gradient
        factors = [scaler.apply() for scaler in scalers]
        for scaler in scalers:
            scaler.step()
        assert factors[0] == pytest.approx(factors[1], rel=1e-4)
        for param, other in zip(params, separate, strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-7)
    assert min(factors[0]) < 0.98
    assert scalers[0].metrics() == pytest.approx(scalers[1].metrics(), rel=1e-4, abs=1e-6)


def test_a_flat_buffer_is_found_again_after_gradients_were_replaced():
    params, flat = flat_tensors(30, 20)
    scaler, plain = VarianceGradientScaler(params), VarianceGradientScaler(tensors(30, 20))
    for step, gradients in enumerate(random_gradients(20, 30, 20)):
        if step % 2:
            flat.zero_grad()
        else:
            for param in params:
                param.grad = torch.zeros_like(param)
        for param, other, gradient in zip(params, plain.parameters, gradients, strict=True):
            param.grad.copy_(gradient)
            other.grad = gradient
        scaler.step()
        plain.step()
    assert scaler.get_normalized_variance() == pytest.approx(plain.get_normalized_variance(), rel=1e-4)


def test_float64_parameters():
    gradients = random_gradients(20, 30)
    wide = VarianceGradientScaler(tensors(30, dtype=torch.float64))
    feed(wide, [[gradient.double() for gradient in at_once] for at_once in gradients])
    narrow = VarianceGradientScaler(tensors(30))
    feed(narrow, gradients)
    assert wide.get_normalized_variance() == pytest.approx(narrow.get_normalized_variance(), rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_a_gradient_that_is_not_finite_is_refused(bad, flat):
    params = flat_tensors(4, 100)[0] if flat else tensors(4, 100)
    for param in params:
        param.grad = param.grad if flat else torch.zeros_like(param)
    params[1].grad[70] = bad
    with pytest.raises(ValueError, match=r"the gradient of tensor number is 1.*finite"):
        VarianceGradientScaler(params).scale_gradients()


# ---------------------------------------------------------------------------------------------------------- scaling


@pytest.mark.parametrize("options", [{"warmup_steps": 7}, {"warmup_steps": 0, "enabled": False}])
def test_no_scaling_in_warm_up_or_when_disabled(options):
    """R046: gradients are bit-identical."""
    scaler = VarianceGradientScaler(tensors(50), **options)
    for gradients in random_gradients(7, 50):
        scaler.parameters[0].grad = gradients[0].clone()
        assert scaler.get_scaling_factor() == 1.0
        assert scaler.scale_gradients() == 1.0
        assert torch.equal(scaler.parameters[0].grad, gradients[0])
        scaler.step()
    if scaler.config.enabled:
        factor = scaler.get_scaling_factor()
        assert factor < 0.9
        assert scaler.scale_gradients() == factor
        torch.testing.assert_close(scaler.parameters[0].grad, factor * gradients[0])


@settings(deadline=None)
@given(st.floats(0.0, 100.0), st.floats(1e-4, 1.0), st.integers(0, 1000))
def test_factor_formula(alpha, floor, seed):
    """R047: 1 / (1 + alpha V) within [floor, 1], the audit reports' floor of 1e-4 included."""
    scaler = VarianceGradientScaler(tensors(20), alpha=alpha, warmup_steps=0, min_scaling_factor=floor)
    generator = torch.Generator().manual_seed(seed)
    mean = float(torch.rand((), generator=generator)) * 3.0
    feed(scaler, random_gradients(10, 20, seed=seed, mean=mean))
    factor = scaler.get_scaling_factor()
    assert floor <= factor <= 1.0
    assert factor == pytest.approx(min(max(1.0 / (1.0 + alpha * scaler.get_normalized_variance()), floor), 1.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("limit", [1e-3, 0.1, 1e9])
def test_statistics_are_of_raw_gradients(estimator, limit):
    """R043: in the audit reports' order of calls, statistics know nothing of the factor and of clipping."""
    gradients = random_gradients(30, 100, 10)
    params = tensors(100, 10)
    scaler = VarianceGradientScaler(params, estimator=estimator, warmup_steps=3, alpha=10.0)
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler.attach(optimizer)
    scaled = []
    for at_once in gradients:
        optimizer.zero_grad()
        for param, gradient in zip(params, at_once, strict=True):
            param.grad = gradient.clone()
        scaled.append(scaler.scale_gradients())
        nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()
        scaler.step()
    raw = VarianceGradientScaler(tensors(100, 10), estimator=estimator)
    feed(raw, gradients)
    assert min(scaled) < 0.9
    assert scaler.normalized_variances() == raw.normalized_variances()


def test_the_factor_does_not_know_the_gradient_that_it_scales():
    """It comes from the steps before: the same history, two different gradients now, one factor."""
    factors = []
    for last in (torch.zeros(50), torch.full((50,), 1e3)):
        scaler = VarianceGradientScaler(tensors(50), warmup_steps=0)
        feed(scaler, random_gradients(10, 50))
        scaler.parameters[0].grad = last.clone()
        factors.append(scaler.scale_gradients())
    assert factors[0] == factors[1] < 1.0


def test_one_scaling_for_many_microbatches():
    """R044, R045: four backward passes and one scaling give the factor times the gradient of the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    inputs, targets = torch.randn(32, 5), torch.randn(32, 1)
    scaler = VarianceGradientScaler(model.parameters(), warmup_steps=2)
    for _ in range(6):
        noisy = targets + torch.randn(32, 1)
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), noisy).backward()
        whole = [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
        for part in torch.arange(32).split(8):
            (nn.functional.mse_loss(model(inputs[part]), noisy[part]) / 4.0).backward()
        factor = scaler.scale_gradients()
        scaler.step()
    assert factor < 1.0
    for param, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(param.grad, factor * gradient)


def test_scaling_twice_is_an_error():
    """R045: once per optimizer step, not once per microbatch."""
    scaler = VarianceGradientScaler(tensors(5))
    scaler.parameters[0].grad = torch.ones(5)
    scaler.scale_gradients()
    with pytest.raises(RuntimeError, match="called twice"):
        scaler.scale_gradients()
    scaler.step()
    scaler.scale_gradients()


def test_statistics_are_taken_once_per_step():
    """With scale_gradients() before it, step() counts; without it, step() measures."""
    gradients = random_gradients(10, 30)
    full, only_step = VarianceGradientScaler(tensors(30)), VarianceGradientScaler(tensors(30))
    for at_once in gradients:
        full.parameters[0].grad = at_once[0].clone()
        full.scale_gradients()
        full.step()
    feed(only_step, gradients)
    assert full.step_count == only_step.step_count == 10
    assert full.get_normalized_variance() == only_step.get_normalized_variance()


# ------------------------------------------------------------------------------------------------------------ state

SEED_KEYS = {
    "enabled",
    "beta",
    "alpha",
    "eps",
    "warmup_steps",
    "step_count",
    "param_grad_mean_ema",
    "param_grad_sq_ema",
    "param_numel",
    "grad_mean_ema",
    "grad_var_ema",
    "grad_norm_ema",
    "grad_max_ema",
    "vgs_version",
}


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_state_round_trip(estimator, flat):
    """R048, R052: the audit reports' keys; tensors, numbers and strings alone; what follows is bit-identical."""
    sizes, gradients = (30, 8), random_gradients(20, 30, 8)
    make = (lambda: flat_tensors(*sizes)[0]) if flat else (lambda: tensors(*sizes))
    scaler = VarianceGradientScaler(make(), estimator=estimator, beta=0.9, warmup_steps=3, alpha=0.7, aggregate="percentile")
    feed(scaler, gradients[:10])
    state = scaler.state_dict()
    assert set(state) >= SEED_KEYS
    assert all(isinstance(value, (torch.Tensor, bool, int, float, str)) for value in state.values())
    other = VarianceGradientScaler(make())
    other.load_state_dict(through_a_file(state))
    assert other.config == scaler.config
    assert other.step_count == 10
    for each in (scaler, other):
        feed(each, gradients[10:])
    assert other.factors() == scaler.factors()
    assert other.metrics() == scaler.metrics()
    again = other.state_dict()
    assert set(again) == set(state)
    for key, value in scaler.state_dict().items():
        assert torch.equal(again[key], value) if isinstance(value, torch.Tensor) else again[key] == value


def test_a_state_is_a_copy():
    scaler = VarianceGradientScaler(tensors(5))
    feed(scaler, random_gradients(3, 5))
    state = scaler.state_dict()
    before = copy.deepcopy(state)
    feed(scaler, random_gradients(3, 5, seed=1))
    assert torch.equal(state["param_grad_mean_ema"], before["param_grad_mean_ema"])
    assert torch.equal(state["param_grad_sq_ema"], before["param_grad_sq_ema"])


@pytest.mark.parametrize("version", [None, "1.0", "2.0", "3.2"])
def test_an_older_state_is_taken_with_a_warning(version, caplog):
    """R049: its settings count, its statistics do not. The state is the one of seed 003."""
    scaler = VarianceGradientScaler(tensors(5), warmup_steps=0)
    feed(scaler, random_gradients(5, 5))
    old = {"enabled": True, "beta": 0.95, "alpha": 0.1, "eps": 1e-8, "warmup_steps": 7, "step_count": 500}
    old |= {"param_grad_mean_ema": torch.zeros(1), "param_grad_sq_ema": torch.zeros(1), "param_numel": torch.tensor([5])}
    old |= {"grad_mean_ema": 0.1, "grad_var_ema": 0.1, "grad_norm_ema": 0.1, "grad_max_ema": 0.1}
    if version is not None:
        old["vgs_version"] = version
    with caplog.at_level(logging.WARNING):
        scaler.load_state_dict(old)
    assert f"version {version or '1.0'} is older than 4.0" in caplog.text
    assert (scaler.config.beta, scaler.config.alpha, scaler.config.warmup_steps) == (0.95, 0.1, 7)
    assert scaler.step_count == 0
    assert scaler.get_normalized_variance() == 0.0
    assert scaler.metrics()["vgs/grad_norm_ema"] == 0.0


def test_a_newer_state_is_refused():
    scaler = VarianceGradientScaler(tensors(5))
    for version, reason in (("5.0", "newer release"), ("new", "numbers and dots")):
        with pytest.raises(ValueError, match=f"vgs_version is '{version}'.*{reason}"):
            scaler.load_state_dict({**scaler.state_dict(), "vgs_version": version})


def test_a_state_of_other_parameters_is_refused_and_changes_nothing():
    scaler, other = VarianceGradientScaler(tensors(5)), VarianceGradientScaler(tensors(6), beta=0.5)
    feed(scaler, random_gradients(3, 5))
    before = scaler.metrics()
    with pytest.raises(ValueError, match=r"param_numel is \[6\].*\[5\]"):
        scaler.load_state_dict(other.state_dict())
    assert scaler.metrics() == before
    assert scaler.config.beta == 0.99


@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_pickle_holds_no_parameters(copied):
    """R050, R051: nothing of the old model is in it; linked to new parameters it continues as before."""
    gradients = random_gradients(20, 30, 8)
    params = tensors(30, 8)
    scaler = VarianceGradientScaler(params, warmup_steps=2)
    scaler.attach(torch.optim.Adam(params))
    feed(scaler, gradients[:10])
    assert not {"_parameters", "_logger"} & set(scaler.__getstate__())
    assert b"Parameter" not in pickle.dumps(scaler)
    other = copied(scaler)
    assert other._parameters is None
    for use in (other.scale_gradients, other.step, other.factors, lambda: other.attach(torch.optim.Adam(params))):
        with pytest.raises(RuntimeError, match=r"call update_parameters\(\)"):
            use()
    new = tensors(30, 8)
    other.update_parameters(iter(new))
    assert [id(param) for param in other.parameters] == [id(param) for param in new]
    for each in (scaler, other):
        feed(each, gradients[10:])
    assert other.factors() == scaler.factors()


def test_parameters_of_other_sizes_reset_the_statistics(caplog):
    scaler = VarianceGradientScaler(tensors(30), warmup_steps=0)
    feed(scaler, random_gradients(10, 30))
    scaler.update_parameters(tensors(31))
    assert "are reset" in caplog.text
    assert scaler.step_count == 0
    assert scaler.get_normalized_variance() == 0.0


def test_the_same_tensors_in_other_heads_keep_their_statistics():
    params = tensors(30, 8)
    scaler = VarianceGradientScaler(params, warmup_steps=0)
    feed(scaler, random_gradients(10, 30, 8))
    apart = scaler._statistics.parts.copy()
    scaler.update_parameters({"a": params[:1], "b": params[1:]})
    assert scaler.normalized_variances() == pytest.approx(list(apart[:, 0] / apart[:, 1]))


# ---------------------------------------------------------------------------------------------------------- settings


def test_metrics_have_the_names_of_the_seeds():
    scaler = VarianceGradientScaler({"actor": tensors(50), "critics": tensors(20)})
    gradients = random_gradients(40, 50, 20)
    feed(scaler, gradients)
    metrics = scaler.metrics()
    spatial = ("grad_norm_ema", "grad_mean_ema_spatial", "grad_var_ema_spatial", "grad_max_ema")
    stochastic = tuple(f"stochastic_var_{name}" for name in ("p10", "p50", "p90", "mean"))
    heads = tuple(f"{name}_{head}" for name in ("scaling_factor", "normalized_variance") for head in ("actor", "critics"))
    common = ("scaling_factor", "normalized_variance", "step_count", "warmup_active")
    assert set(metrics) == {f"vgs/{name}" for name in common + spatial + stochastic + heads}
    assert metrics["vgs/step_count"] == 40.0
    assert metrics["vgs/warmup_active"] == 1.0
    assert metrics["vgs/stochastic_var_mean"] == pytest.approx(1.0, rel=0.15)
    whole = torch.stack([torch.cat(at_once) for at_once in gradients]).double().numpy()
    weights = 0.99 ** np.arange(39, -1, -1.0)
    weights /= weights.sum()
    assert metrics["vgs/grad_mean_ema_spatial"] == pytest.approx(weights @ whole.mean(1), rel=1e-5)
    assert metrics["vgs/grad_var_ema_spatial"] == pytest.approx(weights @ whole.var(1), rel=1e-5)
    assert metrics["vgs/grad_norm_ema"] == pytest.approx(weights @ np.linalg.norm(whole, axis=1), rel=1e-5)
    assert metrics["vgs/grad_max_ema"] == pytest.approx(weights @ np.abs(whole).max(1), rel=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        {"beta": 1.0},
        {"beta": 0.0},
        {"alpha": -0.1},
        {"eps": 0.0},
        {"warmup_steps": -1},
        {"estimator": "spatial"},
        {"aggregate": "max"},
        {"min_scaling_factor": 0.0},
        {"min_scaling_factor": 1.1},
        {"action": "lr"},
    ],
)
def test_impossible_settings_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        VarianceGradientScaler(tensors(2), **bad)


def test_impossible_parameters_are_refused():
    (param,) = tensors(2)
    for given_, reason in (([], "at least one"), ({}, "at least one"), ({"a": [param], "b": []}, "'b'")):
        with pytest.raises(ValueError, match=reason):
            VarianceGradientScaler(given_)
    with pytest.raises(ValueError, match="a tensor twice"):
        VarianceGradientScaler({"a": [param], "b": [param]})


def test_a_config_says_the_same():
    config = VGSConfig(alpha=0.3, estimator="norm", action="step")
    assert VarianceGradientScaler.from_config(tensors(2), config).config == config
    assert VarianceGradientScaler(tensors(2)).config == VGSConfig()
