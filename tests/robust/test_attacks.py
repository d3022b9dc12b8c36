"""Attacks against closed forms, and properties that hold for any gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from tailguard.robust import PerturbationConfig, StatePerturbation
from tailguard.robust.attacks import divergence, frozen, low_value, toward

D = 6


def linear_policy(seed, log_std=-0.3):
    """mu = w x, with its w and its objective KL = (mu(x') - mu(x))^2 / (2 sigma^2) about given inputs."""
    w = torch.randn(D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    variance = math.exp(2.0 * log_std)

    def about(x):
        return divergence(lambda moved: (moved @ w).unsqueeze(-1), (x @ w).unsqueeze(-1), lambda a, b: kl(a, b, variance))

    return w, variance, about


def kl(old, new, variance):
    return (old - new).square().sum(-1) / (2.0 * variance)


def inputs(seed=1, n=5):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("method", ["pgd", "fgsm"])
@pytest.mark.parametrize("steps", [3, 5, 10])
def test_a_linear_policy_is_moved_as_far_as_it_can_be(method, steps):
    """The largest KL over the ball is (eps ||w||_1)^2 / (2 sigma^2) in L-inf and (eps ||w||_2)^2 / (2 sigma^2) in L2."""
    w, variance, about = linear_policy(0)
    x = inputs()
    for norm, dual in (("linf", 1.0), ("l2", 2.0)):
        attack = StatePerturbation(PerturbationConfig(epsilon=0.1, steps=steps, method=method, norm=norm), D)
        found = attack.attack(x, about(x))
        expected = (0.1 * w.norm(p=dual)) ** 2 / (2.0 * variance)
        # A walk in L2 turns towards w geometrically; one with the length of the ball is there at once.
        exact = norm == "linf" or method == "fgsm"
        torch.testing.assert_close(found.gain, expected.expand(5), rtol=1e-9 if exact else 0.05, atol=0.0)
        assert (found.gain <= expected * (1.0 + 1e-9)).all()
        torch.testing.assert_close(found.gain, about(x)(found.inputs), rtol=1e-12, atol=0.0)


def test_small_steps_do_not_cross_the_ball_and_the_default_step_does():
    """From a start near one side the far corner is up to 2 eps away: K steps of eps / K cannot always reach it."""
    w, variance, about = linear_policy(0)
    x = inputs(n=200)
    best = (0.1 * w.norm(p=1.0)) ** 2 / (2.0 * variance)
    gains = {}
    for size in (None, 1.0 / 10):
        config = PerturbationConfig(epsilon=0.1, steps=10, step_size=size)
        gains[size] = StatePerturbation(config, D).attack(x, about(x)).gain
    assert (gains[None] > 0.999999 * best).all()
    assert (gains[0.1] < 0.99 * best).any()


def test_without_a_random_start_the_search_for_a_kl_finds_nothing():
    _, _, about = linear_policy(0)
    x = inputs()
    for method in ("pgd", "fgsm"):
        found = StatePerturbation(PerturbationConfig(random_start=False, method=method), D).attack(x, about(x))
        assert torch.equal(found.move, torch.zeros_like(x))
        assert torch.equal(found.gain, torch.zeros(5, dtype=torch.float64))


def test_critic_and_target_attacks_reach_their_corners():
    w, _, _ = linear_policy(3)
    x = inputs()
    attack = StatePerturbation(PerturbationConfig(epsilon=0.2), D)
    lowest = attack.attack(x, low_value(lambda moved: moved @ w))
    torch.testing.assert_close(lowest.inputs @ w, x @ w - 0.2 * w.abs().sum())
    target = (x @ w + 100.0).unsqueeze(-1)
    log_prob = lambda out, a: -(out - a).square().sum(-1)  # noqa: E731
    nearer = attack.attack(x, toward(lambda moved: (moved @ w).unsqueeze(-1), log_prob, target))
    torch.testing.assert_close(nearer.inputs @ w, x @ w + 0.2 * w.abs().sum())


@settings(max_examples=60, deadline=None)
@given(
    norm=st.sampled_from(["linf", "l2"]),
    method=st.sampled_from(["pgd", "fgsm"]),
    keep=st.booleans(),
    size=st.sampled_from([1e-30, 1.0, 1e20, 3e38, math.inf, math.nan]),
    step=st.sampled_from([None, 0.1, 50.0]),
    seed=st.integers(0, 1000),
)
def test_no_gradient_leads_out_of_the_ball(norm, method, keep, size, step, seed):
    generator = torch.Generator().manual_seed(seed)
    x, direction = torch.randn(4, D, generator=generator), torch.randn(4, D, generator=generator) * size
    config = PerturbationConfig(epsilon=0.3, norm=norm, method=method, keep_best=keep, step_size=step, restarts=2)
    found = StatePerturbation(config, D, generator=generator).attack(x, lambda moved: (moved * direction).sum(-1))
    order = math.inf if norm == "linf" else 2.0
    assert (found.move.norm(p=order, dim=-1) <= 0.3 + 1e-6).all()
    assert found.inputs.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 6), norm=st.sampled_from(["linf", "l2"]))
def test_the_best_point_is_never_worse_than_the_start_or_the_last_one(seed, steps, norm):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(7, D)
    objective = divergence(net, net(x), lambda a, b: (a - b).square().sum(-1))
    gains = {}
    for keep in (True, False):
        config = PerturbationConfig(epsilon=0.5, steps=steps, norm=norm, keep_best=keep)
        attack = StatePerturbation(config, D, generator=torch.Generator().manual_seed(seed))
        gains[keep] = objective(attack.attack(x, objective).inputs).detach()
    start = StatePerturbation(config, D, generator=torch.Generator().manual_seed(seed)).random(x).inputs
    assert (gains[True] >= gains[False] - 1e-6).all()
    assert (gains[True] >= objective(start).detach() - 1e-6).all()


def test_restarts_only_help():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(50, D)
    objective = divergence(net, net(x), lambda a, b: (a - b).square().sum(-1))
    for keep in (True, False):
        gains = [
            StatePerturbation(PerturbationConfig(epsilon=1.0, steps=2, restarts=n, keep_best=keep), D).attack(x, objective)
            for n in (1, 8)
        ]
        one, eight = (objective(found.inputs).detach() for found in gains)
        assert (eight >= one - 1e-6).all()
        assert (eight > one + 1e-3).any()


def test_masked_and_scaled_features_keep_to_their_own_radius():
    _, _, about = linear_policy(0)
    x = inputs()
    config = PerturbationConfig(epsilon=0.1, perturbable=(0, 2, 3), feature_scale=(1.0, 1.0, 0.5, 2.0, 1.0, 1.0))
    found = StatePerturbation(config, D).attack(x, about(x))
    radii = torch.tensor([0.1, 0.0, 0.05, 0.2, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found.move.abs(), radii.expand(5, D), rtol=1e-6, atol=0.0)
    l2 = StatePerturbation(config.model_copy(update={"norm": "l2"}), D).attack(x, about(x))
    assert torch.equal(l2.move[:, [1, 4, 5]], torch.zeros(5, 3, dtype=torch.float64))
    assert ((l2.move[:, [0, 2, 3]] / radii[[0, 2, 3]]).norm(dim=-1) <= 1.0 + 1e-6).all()
    assert StatePerturbation(config, D, extra=1).radius()[-1] == 0.0


def test_every_sample_may_have_a_radius_of_its_own():
    w, variance, about = linear_policy(0)
    x, epsilon = inputs(n=3), torch.tensor([[0.0], [0.1], [0.4]], dtype=torch.float64)
    gain = StatePerturbation(PerturbationConfig(), D).attack(x, about(x), epsilon).gain
    expected = (epsilon.squeeze(-1) * w.norm(p=1.0)) ** 2 / (2.0 * variance)
    torch.testing.assert_close(gain, expected, rtol=1e-6, atol=1e-15)


def test_a_number_for_each_sequence_keeps_sequences_whole():
    """An objective over whole sequences [L, B] gives one number for each of the B, and their moves are kept together."""
    x = torch.zeros(4, 3, D)
    met = []

    def objective(moved):
        met.append(moved.detach().clone())
        return torch.sin(40.0 * moved).sum((0, 2))

    found = StatePerturbation(PerturbationConfig(epsilon=1.0, steps=5), D).attack(x, objective)
    for b in range(3):
        best = max(met, key=lambda moved: float(torch.sin(40.0 * moved[:, b]).sum()))
        torch.testing.assert_close(found.inputs[:, b], best[:, b])


def test_an_attack_leaves_no_trace():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).eval()
    x = torch.randn(5, D)
    x.requires_grad_()
    before, modes = torch.get_rng_state(), [module.training for module in net.modules()]
    with frozen(net.parameters()):
        found = StatePerturbation(PerturbationConfig(), D).attack(x, low_value(lambda moved: net(moved).squeeze(-1)))
        assert not any(parameter.requires_grad for parameter in net.parameters())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert x.grad is None
    assert not found.inputs.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in net.modules()] == modes


def test_parameters_that_were_frozen_before_stay_so_and_errors_thaw_the_others():
    net = nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="inside"), frozen(net.parameters()):
        raise RuntimeError("inside")
    assert net.weight.requires_grad
    assert not net.bias.requires_grad


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epsilon": -0.1}, "greater than or equal to 0"),
        ({"steps": 0}, "greater than 0"),
        ({"perturbable": ()}, "at least one"),
        ({"perturbable": (1, 1)}, "different columns"),
        ({"norm": "l1"}, "linf"),
        ({"epsilon": math.nan}, "finite number"),
        ({"speed": 1}, "Extra inputs"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        PerturbationConfig(**values)


def test_columns_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"perturbable.*below 6"):
        StatePerturbation(PerturbationConfig(perturbable=(6,)), D)
    with pytest.raises(ValueError, match=r"feature_scale.*6 numbers"):
        StatePerturbation(PerturbationConfig(feature_scale=(1.0,)), D)
    with pytest.raises(ValueError, match=r"inputs.*ends in 6"):
        StatePerturbation(PerturbationConfig(), D).attack(torch.zeros(2, 5), lambda moved: moved.sum(-1))
