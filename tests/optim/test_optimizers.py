"""UPGD, AdaptiveUPGD and UPGDW as optimizers: their formulas by hand, what they reduce to, and the manners of torch.optim."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD

CLASSES = [UPGD, AdaptiveUPGD, UPGDW]
IMPLEMENTATIONS = ["single", "foreach", "fused"]


def parameters(shapes=((7, 5), (3,), (130,)), dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)).to(param)


def run(make, params, steps, scale=1.0):
    optimizer = make(params)
    for step in range(steps):
        set_gradients(params, step, scale)
        optimizer.step()
    return optimizer


def values(params):
    return torch.cat([param.detach().double().flatten() for param in params])


# ---------------------------------------------------------------------------------------------------------- formulas


def by_hand(weights, gradients, lr, decay, beta, betas=None, eps=0.0):
    """The definition in numpy, for lists of arrays over time; a gradient of None leaves the tensor out of that step."""
    weights = [w.copy() for w in weights]
    utility, first, second = ([np.zeros_like(w) for w in weights] for _ in range(3))
    steps = [0] * len(weights)
    for at_once in gradients:
        here = [i for i, g in enumerate(at_once) if g is not None]
        for i in here:
            steps[i] += 1
            utility[i] = beta * utility[i] + (1 - beta) * (-at_once[i] * weights[i])
        corrected = {i: utility[i] / (1 - beta ** steps[i]) for i in here}
        low = min(c.min() for c in corrected.values())
        high = max(c.max() for c in corrected.values())
        for i in here:
            direction = at_once[i]
            if betas is not None:
                first[i] = betas[0] * first[i] + (1 - betas[0]) * at_once[i]
                second[i] = betas[1] * second[i] + (1 - betas[1]) * at_once[i] ** 2
                mean, square = first[i] / (1 - betas[0] ** steps[i]), second[i] / (1 - betas[1] ** steps[i])
                direction = mean / (np.sqrt(square) + eps)
            normalised = (corrected[i] - low) / (high - low)
            protection = 1 / (1 + np.exp(-2 * (normalised - 0.5)))
            weights[i] = (1 - lr * decay) * weights[i] - lr * 2 * (1 - protection) * direction
    return weights


@pytest.mark.parametrize("implementation", ["single", "foreach"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_by_hand(implementation, adaptive):
    """R063, R064: utility -grad * weight, its running mean, one bias correction for it and its range; absent gradients."""
    params = parameters(dtype=torch.float64)
    start = [param.detach().numpy().copy() for param in params]
    settings = {"lr": 0.1, "weight_decay": 0.05, "beta_utility": 0.9, "sigma": 0.0, "implementation": implementation}
    if adaptive:
        settings |= {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
    optimizer = (AdaptiveUPGD if adaptive else UPGD)(params, **settings)
    gradients = []
    for step in range(6):
        set_gradients(params, step)
        if step % 2:
            params[1].grad = None
        gradients.append([None if param.grad is None else param.grad.numpy().copy() for param in params])
        optimizer.step()
    expected = by_hand(start, gradients, 0.1, 0.05, 0.9, (0.8, 0.95) if adaptive else None, 1e-3)
    for param, value in zip(params, expected, strict=True):
        np.testing.assert_allclose(param.detach().numpy(), value, rtol=1e-7, atol=1e-8)  # the gate's relative epsilon is 1e-8


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "options",
    [
        {"sigma": 0.0},
        {"sigma": 0.1},
        {"sigma": 0.1, "adaptive_noise": True},
        {"sigma": 0.1, "adaptive_noise": True, "instant_noise_scale": False, "maximize": True},
        {"sigma": 0.1, "gate": "none"},
    ],
)
def test_implementations_agree(cls, options):
    """With noise, absent gradients and groups of their own; float32, hence a few units in the last place."""
    results = []
    for implementation in IMPLEMENTATIONS:
        params = parameters()
        groups = [{"params": params[:1], "beta_utility": 0.5}, {"params": params[1:], "weight_decay": 0.1}]
        generator = torch.Generator().manual_seed(0)
        optimizer = cls(groups, lr=0.01, implementation=implementation, generator=generator, **options)
        for step in range(12):
            set_gradients(params, step)
            if step % 3 == 0:
                params[1].grad = None
            optimizer.step()
        results.append(values(params))
    assert (results[0] - values(parameters())).abs().max() > 0.01
    torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=2e-6)
    torch.testing.assert_close(results[2], results[0], rtol=0.0, atol=2e-6)


def test_auto_takes_what_fits():
    """float64 cannot be fused, the reference gate neither; float32 is fused to the last bit."""
    runs = {}
    for implementation in ("auto", "fused", "foreach"):
        params = parameters()
        run(lambda p: AdaptiveUPGD(p, lr=0.01, sigma=0.0, implementation=implementation), params, 5)  # noqa: B023
        runs[implementation] = values(params)
    assert torch.equal(runs["auto"], runs["fused"])
    assert not torch.equal(runs["auto"], runs["foreach"])
    wide = parameters(dtype=torch.float64)
    run(lambda p: UPGD(p, lr=0.01), wide, 2)
    with pytest.raises(ValueError, match=r"implementation is 'fused'.*float32"):
        run(lambda p: UPGD(p, implementation="fused"), wide, 1)
    with pytest.raises(ValueError, match="implementation is 'fused'"):
        UPGD(parameters(), implementation="fused", gate="reference")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_upgd_without_gate_is_sgd(implementation):
    ours, theirs = parameters(), parameters()
    run(lambda p: UPGD(p, lr=0.05, weight_decay=0.0, sigma=0.0, gate="none", implementation=implementation), ours, 20)
    run(lambda p: torch.optim.SGD(p, lr=0.05), theirs, 20)
    if implementation == "single":
        assert torch.equal(values(ours), values(theirs))
    torch.testing.assert_close(values(ours), values(theirs), rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("implementation", ["single", "foreach"])
@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (lambda p, **o: UPGD(p, lr=0.05, weight_decay=0.0, **o), lambda p: torch.optim.SGD(p, lr=0.05)),
        (
            lambda p, **o: AdaptiveUPGD(p, lr=0.01, weight_decay=0.0, beta1=0.8, beta2=0.99, eps=1e-5, **o),
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-5),
        ),
        (lambda p, **o: UPGDW(p, lr=0.01, weight_decay=0.1, **o), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_reductions(make, reference, implementation):
    """Without gate and noise: SGD, Adam and AdamW to 1e-7, over 50 steps."""
    ours, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    run(lambda p: make(p, sigma=0.0, gate="none", implementation=implementation), ours, 50)
    run(reference, theirs, 50)
    assert (values(ours) - values(parameters(dtype=torch.float64))).abs().max() > 0.1
    torch.testing.assert_close(values(ours), values(theirs), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize(("cls", "reference"), [(AdaptiveUPGD, torch.optim.Adam), (UPGDW, torch.optim.AdamW)])
def test_fused_reductions_to_adam(cls, reference):
    """float32: one step is a few units in the last place of the weights, which are below 4, away from PyTorch's."""
    ours, theirs = parameters(), parameters()
    run(lambda p: cls(p, lr=0.01, weight_decay=0.0, sigma=0.0, gate="none", implementation="fused"), ours, 3)
    run(lambda p: reference(p, lr=0.01, weight_decay=0.0), theirs, 3)
    torch.testing.assert_close(values(ours), values(theirs), rtol=0.0, atol=6e-7)


# The weights after 12 steps of the authors' own code, mohmdelsayed/upgd@b75e90a: the class UPGD of its README and
# core/run/rl/adaupgd.py, run in float64 with PyTorch 2.13 on the weights and gradients of test_reference_trajectory.
REFERENCE = {
    UPGD: [
        0.8149009699973297,
        -1.6061420482908226,
        0.4925670635937222,
        2.5665012273704857,
        -1.3060322944256453,
        0.22510913371720992,
        1.5113016765932066,
    ],
    AdaptiveUPGD: [
        0.6126389897218254,
        -1.523111761748275,
        0.15597195061171953,
        2.9186986213359387,
        -1.2589575657154606,
        0.1735242043911687,
        1.7846274690758346,
    ],
}


@pytest.mark.parametrize("implementation", ["single", "foreach"])
@pytest.mark.parametrize("cls", [UPGD, AdaptiveUPGD])
def test_reference_trajectory(cls, implementation):
    """gate="reference" is the authors' published code."""
    start = [[[1.0, -2.0], [0.5, 3.0]], [-1.5, 0.25, 2.0]]
    params = [nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in start]
    settings = {"lr": 0.1, "weight_decay": 0.01, "beta_utility": 0.9, "sigma": 0.0}
    if cls is AdaptiveUPGD:
        settings |= {"beta1": 0.8, "beta2": 0.95, "eps": 1e-5}
    optimizer = cls(params, gate="reference", implementation=implementation, **settings)
    for step in range(12):
        for i, param in enumerate(params):
            place = torch.arange(param.numel(), dtype=torch.float64).reshape(param.shape)
            param.grad = torch.sin(1.0 + 2.0 * step + 3.0 * place + 5.0 * i)
        optimizer.step()
    np.testing.assert_allclose(values(params).numpy(), REFERENCE[cls], rtol=1e-6)


# -------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("cls", CLASSES)
def test_noise_comes_from_the_generator(cls):
    """Equal generators, equal weights; the global generator is left alone."""
    before = torch.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        params = parameters()
        run(lambda p: cls(p, lr=0.01, sigma=0.1, generator=torch.Generator().manual_seed(seed)), params, 3)  # noqa: B023
        runs.append(values(params))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("adaptive_noise", [False, True])
def test_no_sigma_draws_nothing(cls, adaptive_noise):
    before = torch.get_rng_state()
    optimizer = run(lambda p: cls(p, sigma=0.0, adaptive_noise=adaptive_noise), parameters(), 3)
    assert torch.equal(before, torch.get_rng_state())
    assert optimizer.generator is None
    assert "generator" not in optimizer.state_dict()


@pytest.mark.parametrize("seed", [0, 1])
def test_an_own_generator_is_seeded_from_the_global_one(seed):
    runs = []
    for _ in range(2):
        torch.manual_seed(seed)
        params = parameters()
        run(lambda p: UPGD(p, lr=0.01), params, 2)
        runs.append(values(params))
    assert torch.equal(*runs)


def noise_of(cls, gradient, **options):
    """The noise that a first step adds to its direction, in units of the direction, with the gate off and no weights."""
    param = nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient
    optimizer = cls([param], lr=1.0, weight_decay=0.0, gate="none", generator=torch.Generator().manual_seed(0), **options)
    optimizer.step()
    direction = gradient.sign() if cls is not UPGD else gradient  # Adam's first direction
    return (-param.detach() - direction).double(), optimizer


@pytest.mark.parametrize("cls", [UPGD, AdaptiveUPGD])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("size", [1_000, 30_000])
def test_adaptive_noise_is_in_units_of_the_direction(cls, scale, size):
    """R073: standard deviation max(sigma * RMS, min_noise_std), free of the number of weights."""
    gradient = scale * torch.randn(size, generator=torch.Generator().manual_seed(1))
    noise, optimizer = noise_of(cls, gradient, sigma=0.3, adaptive_noise=True)
    rms = gradient.double().square().mean().sqrt().item() if cls is UPGD else 1.0
    assert noise.std().item() == pytest.approx(0.3 * rms, rel=4.0 / math.sqrt(2 * size))
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["grad_norm_ema"].item() == pytest.approx(rms, rel=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adaptive_noise_has_a_floor(implementation):
    """R073."""
    options = {"sigma": 0.3, "adaptive_noise": True, "min_noise_std": 0.02, "implementation": implementation}
    noise, _ = noise_of(UPGD, torch.zeros(10_000), **options)
    assert noise.std().item() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("cls", [UPGD, AdaptiveUPGD])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_fixed_noise_is_sigma(cls, scale):
    gradient = scale * torch.randn(30_000, generator=torch.Generator().manual_seed(1))
    noise, _ = noise_of(cls, gradient, sigma=30.0)
    assert noise.std().item() == pytest.approx(30.0, rel=0.02)


def test_lagging_noise_follows_the_running_mean():
    """instant_noise_scale=False: after a gradient of 1 and one of 0 the level is noise_beta."""
    param = nn.Parameter(torch.zeros(20_000))
    options = {"sigma": 0.5, "adaptive_noise": True, "noise_beta": 0.75, "instant_noise_scale": False, "gate": "none"}
    optimizer = UPGD([param], lr=1.0, weight_decay=0.0, generator=torch.Generator().manual_seed(0), **options)
    param.grad = torch.ones(20_000)
    optimizer.step()
    before = param.detach().clone()
    param.grad = torch.zeros(20_000)
    optimizer.step()
    assert (param.detach() - before).std().item() == pytest.approx(0.5 * 0.75, rel=0.02)


def test_the_gate_holds_noise_back_too():
    """The most useful weight of two is moved by noise 2 (1 - sigmoid(1)) times as far, the other by 2 sigmoid(1)."""
    generator, moves = torch.Generator().manual_seed(0), []
    for _ in range(2_000):
        param = nn.Parameter(torch.tensor([1.0, -1.0]))
        param.grad = torch.tensor([-1e-6, -1e-6])  # utilities 1e-6 and -1e-6
        UPGD([param], lr=1.0, weight_decay=0.0, sigma=1.0, generator=generator).step()
        moves.append(param.detach() - torch.tensor([1.0, -1.0]))
    share = 1.0 / (1.0 + math.exp(-1.0))
    spread = torch.stack(moves).std(0)
    torch.testing.assert_close(spread, torch.tensor([2.0 * (1.0 - share), 2.0 * share]), rtol=0.07, atol=0.0)


# ---------------------------------------------------------------------------------------------- manners of torch.optim


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parameters_without_gradient_are_skipped(cls, implementation):
    """R061: no state, no decay, no noise."""
    params = parameters()
    set_gradients(params, 0)
    params[1].grad = None
    before = [param.detach().clone() for param in params]
    optimizer = cls(params, lr=0.1, sigma=0.1, implementation=implementation)
    optimizer.step()
    assert params[1] not in optimizer.state
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize("cls", CLASSES)
def test_a_step_without_any_gradient_does_nothing(cls):
    optimizer = cls(parameters(), sigma=0.1)
    optimizer.step()
    assert not optimizer.state
    assert optimizer.generator is None


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("warm", [False, True])
def test_zero_gradients_do_no_harm(cls, implementation, warm):
    """R062: finite weights after 100 steps of gradient 0, and a utility that decays by beta in each."""
    params = parameters()
    optimizer = cls(params, lr=0.1, weight_decay=0.0, sigma=0.0, beta_utility=0.9, implementation=implementation)
    if warm:
        set_gradients(params, 0)
        optimizer.step()
    utility = [optimizer.state[param]["avg_utility"].clone() for param in params] if warm else None
    for param in params:
        param.grad = torch.zeros_like(param)
    for _ in range(100):
        optimizer.step()
    assert all(param.isfinite().all() for param in params)
    for i, param in enumerate(params):
        expected = utility[i] * 0.9**100 if warm else torch.zeros_like(param)
        torch.testing.assert_close(optimizer.state[param]["avg_utility"], expected, rtol=1e-4, atol=0.0)


def test_idle_weights_leave_no_denormal_numbers():
    """Weights whose gradient stays 0: the fused running means end at 0 and not among denormals, which are slow."""
    (param,) = parameters(((1000,),))
    set_gradients([param], 0)
    optimizer = AdaptiveUPGD([param], sigma=0.0, beta_utility=0.9, beta2=0.9, implementation="fused")
    optimizer.step()
    param.grad[500:] = 0.0
    for _ in range(1500):
        optimizer.step()
        for key in ("avg_utility", "first_moment", "sec_moment"):
            size = optimizer.state[param][key].abs()
            assert ((size == 0.0) | (size > torch.finfo(torch.float32).tiny)).all()
    assert (optimizer.state[param]["first_moment"][500:] == 0.0).all()
    assert (optimizer.state[param]["first_moment"][:500] != 0.0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gradient_that_is_not_a_number_is_seen(implementation):
    """It makes weights NaN as in any optimizer; nothing turns it into 0 on the way."""
    (param,) = parameters(((100,),))
    set_gradients([param], 0)
    param.grad[7] = math.nan
    AdaptiveUPGD([param], lr=0.01, sigma=0.0, implementation=implementation).step()
    assert param[7].isnan()


@pytest.mark.parametrize("cls", CLASSES)
def test_state_keys(cls):
    """R071."""
    optimizer = run(lambda p: cls(p, adaptive_noise=True), parameters(), 2)
    moments = {"first_moment", "sec_moment"} if cls is not UPGD else set()
    for state in optimizer.state_dict()["state"].values():
        assert set(state) == {"step", "avg_utility", "grad_norm_ema"} | moments
        assert state["step"] == 2


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("way", ["torch.save", "pickle", "deepcopy"])
def test_training_continues_bit_identically(cls, way):
    """R071: through a file that weights_only=True can read, through a pickle, and as a copy."""
    params = parameters()
    make = {"lr": 0.01, "sigma": 0.1, "adaptive_noise": True, "instant_noise_scale": False}
    optimizer = run(lambda p: cls(p, generator=torch.Generator().manual_seed(5), **make), params, 7)
    if way == "torch.save":
        buffer = io.BytesIO()
        torch.save({"weights": [param.detach() for param in params], "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        others = [nn.Parameter(weight) for weight in saved["weights"]]
        other = cls(others, **make)
        other.load_state_dict(saved["optimizer"])
    else:
        copied = pickle.loads(pickle.dumps(optimizer)) if way == "pickle" else copy.deepcopy(optimizer)
        other, others = copied, copied.param_groups[0]["params"]
        assert (other.gate, other.implementation) == (optimizer.gate, optimizer.implementation)
    for step in range(7, 12):
        for each, weights in ((optimizer, params), (other, others)):
            set_gradients(weights, step)
            each.step()
    assert torch.equal(values(params), values(others))


def test_a_loaded_state_is_a_copy():
    source = run(lambda p: AdaptiveUPGD(p, lr=0.01), parameters(), 2)
    params = parameters()
    other = AdaptiveUPGD(params, lr=0.01)
    other.load_state_dict(source.state_dict())
    before = copy.deepcopy(source.state_dict()["state"])
    set_gradients(params, 9)
    other.step()
    for key, state in source.state_dict()["state"].items():
        assert torch.equal(state["avg_utility"], before[key]["avg_utility"])
        assert torch.equal(state["first_moment"], before[key]["first_moment"])


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_billion_steps(cls, implementation):
    """R072: the counter does not overflow, and the bias corrections are 1."""
    params = parameters()
    optimizer = run(lambda p: cls(p, lr=0.01, sigma=0.0, implementation=implementation), params, 1)
    states = [optimizer.state[param] for param in params]
    for state in states:
        state["step"] = 10**9
    before = [param.detach().double() for param in params]
    set_gradients(params, 1)
    optimizer.step()
    assert [state["step"] for state in states] == [10**9 + 1] * len(params)
    low = min(state["avg_utility"].min().double() for state in states)
    high = max(state["avg_utility"].max().double() for state in states)
    decay = optimizer.param_groups[0]["weight_decay"]
    for param, state, start in zip(params, states, before, strict=True):
        share = 1.0 - torch.tanh((state["avg_utility"].double() - (low + high) / 2.0) / (high - low))
        direction = param.grad.double()
        if cls is not UPGD:
            direction = state["first_moment"].double() / (state["sec_moment"].double().sqrt() + 1e-8)
        torch.testing.assert_close(param.double(), (1.0 - 0.01 * decay) * start - 0.01 * share * direction, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("cls", CLASSES)
def test_maximize_is_descent_on_the_negative(cls):
    up, down = parameters(), parameters()
    run(lambda p: cls(p, lr=0.01, sigma=0.0, maximize=True), up, 5)
    run(lambda p: cls(p, lr=0.01, sigma=0.0), down, 5, scale=-1.0)
    assert torch.equal(values(up), values(down))


def test_closure_is_called_with_gradients_on():
    param = nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = UPGD([param], lr=0.1, weight_decay=0.0, sigma=0.0, gate="none")

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum() / 2.0
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.5
    torch.testing.assert_close(param.detach(), torch.tensor([2.7, -3.6]))


def test_learning_rate_schedulers_act():
    params = parameters()
    optimizer = AdaptiveUPGD(params, lr=0.1, sigma=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)
    set_gradients(params, 0)
    optimizer.step()
    scheduler.step()
    before = values(params)
    optimizer.step()
    assert torch.equal(values(params), before)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_gate_compares_all_groups(cls):
    """One group or three, in any order: the same steps."""
    together, apart = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    run(lambda p: cls(p, lr=0.01, sigma=0.0), together, 5)
    run(lambda p: cls([{"params": [param]} for param in reversed(p)], lr=0.01, sigma=0.0), apart, 5)
    torch.testing.assert_close(values(together), values(apart), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("cls", CLASSES)
def test_groups_have_their_own_settings(cls):
    params = parameters()
    before = [param.detach().clone() for param in params]
    groups = [{"params": params[:1], "lr": 0.0}, {"params": params[1:]}]
    run(lambda _: cls(groups, lr=0.01, sigma=0.0), params, 2)
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])


@pytest.mark.parametrize("cls", CLASSES)
def test_half_precision_and_mixed_types(cls):
    params = [*parameters(((5,),), torch.bfloat16), *parameters(((4,),), torch.float64)]
    run(lambda p: cls(p, lr=0.01), params, 3)
    assert all(param.isfinite().all() for param in params)


def test_empty_tensors_are_left_out():
    params = [nn.Parameter(torch.empty(0)), *parameters()]
    optimizer = run(lambda p: UPGD(p, lr=0.01), params, 2)
    assert params[0] not in optimizer.state


def test_strided_parameters():
    """A weight that is no contiguous memory is moved in place all the same."""
    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    strided, dense = nn.Parameter(base.clone().t()), nn.Parameter(base.clone().t().contiguous())
    for param in (strided, dense):
        param.grad = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)
        AdaptiveUPGD([param], lr=0.01, sigma=0.0).step()
    torch.testing.assert_close(strided.detach(), dense.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", CLASSES)
def test_complex_and_sparse_are_rejected(cls):
    with pytest.raises(ValueError, match=r"complex64.*real"):
        cls([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = cls([param])
    param.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match=r"sparse.*dense"):
        optimizer.step()
    assert param not in optimizer.state or not optimizer.state[param]


@pytest.mark.parametrize(
    ("cls", "bad"),
    [
        (UPGD, {"lr": -1.0}),
        (UPGD, {"lr": math.nan}),
        (UPGD, {"weight_decay": -0.1}),
        (UPGD, {"sigma": -0.1}),
        (UPGD, {"beta_utility": 1.0}),
        (UPGD, {"noise_beta": 1.0}),
        (UPGD, {"min_noise_std": -1.0}),
        (UPGD, {"gate": "other"}),
        (UPGD, {"implementation": "other"}),
        (AdaptiveUPGD, {"beta1": 1.0}),
        (AdaptiveUPGD, {"beta2": -0.1}),
        (AdaptiveUPGD, {"eps": 0.0}),
    ],
)
def test_impossible_settings_are_refused(cls, bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} is .*but it must be"):
        cls(parameters(), **bad)


def test_a_group_is_checked_too():
    optimizer = UPGD(parameters())
    with pytest.raises(ValueError, match="sigma is -1"):
        optimizer.add_param_group({"params": parameters(((2,),)), "sigma": -1.0})


def test_defaults():
    """The defaults are the paper's and the audit reports'."""
    assert UPGD(parameters()).defaults["lr"] == 1e-5
    adaptive, w = AdaptiveUPGD(parameters()).defaults, UPGDW(parameters()).defaults
    assert (adaptive["weight_decay"], adaptive["sigma"], adaptive["adaptive_noise"]) == (0.001, 0.001, False)
    assert (w["lr"], w["weight_decay"], w["beta_utility"]) == (1e-4, 0.01, 0.999)
    assert UPGDW(parameters(), betas=(0.5, 0.6)).defaults["beta_utility"] == 0.6
    assert UPGDW(parameters(), beta_utility=0.3).defaults["beta_utility"] == 0.3


@pytest.mark.parametrize(
    ("make", "power"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.01), 1),
        (lambda p: UPGD(p, lr=0.01, weight_decay=0.0, sigma=0.0), 1),
        (lambda p: AdaptiveUPGD(p, lr=0.01, weight_decay=0.0, sigma=0.0, eps=1e-12), 0),
        (lambda p: UPGDW(p, lr=0.01, weight_decay=0.0, sigma=0.0, eps=1e-12), 0),
    ],
    ids=["SGD", "UPGD", "AdaptiveUPGD", "UPGDW"],
)
def test_what_a_scaled_gradient_does(make, power):
    """A gradient times c: steps of UPGD times c with an unchanged gate, steps of the others unchanged."""
    moves = []
    for scale in (1.0, 0.125):
        params = parameters(dtype=torch.float64)
        set_gradients(params, 0, scale)
        before = values(params)
        make(params).step()
        moves.append(values(params) - before)
    torch.testing.assert_close(moves[1], moves[0] * 0.125**power, rtol=1e-6, atol=0.0)
