"""The closed form of the policy's loss against autograd of the formulas in actions.py, in double precision."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.ppo.actions import ActionDistribution, action_distribution
from tailguard.ppo.loss import MEASURES, Coefficients, policy_loss

DISTRIBUTIONS = {
    "one": action_distribution(spaces.Box(-1.0, 1.0, (1,))),
    "two": action_distribution(spaces.Box(-1.0, 1.0, (2,))),
    "three squashed": action_distribution(spaces.Box(-1.0, 1.0, (3,)), squash=True),
    "two censored": action_distribution(spaces.Box(-1.0, np.array([1.0, 0.2], np.float32)), censored=True),
    "discrete": action_distribution(spaces.Discrete(4)),
    "single": action_distribution(spaces.Discrete(1)),
    "multi": action_distribution(spaces.MultiDiscrete([3, 1, 2])),
}
every_distribution = pytest.mark.parametrize("action_dist", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
gaussian_and_discrete = pytest.mark.parametrize(
    "action_dist", [DISTRIBUTIONS["two"], DISTRIBUTIONS["discrete"]], ids=["gaussian", "discrete"]
)

ALL = Coefficients(0.2, 0.01, 0.5)
ONLY_SURROGATE = Coefficients(0.2, 0.0, 0.0)


def reference(action_dist, dist_params, old, actions, advantages, weights, coefficients):
    """The sum in the head of surrogate.py, written down in tensors; MEASURES in their order."""
    log_ratio = action_dist.log_prob(dist_params, actions) - action_dist.log_prob(old, actions)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - coefficients.clip, 1.0 + coefficients.clip)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    entropy, kl = action_dist.entropy(dist_params), action_dist.kl(old, dist_params)
    loss = (weights * (surrogate - coefficients.entropy * entropy + coefficients.kl * kl)).sum()
    outside = ((ratio - 1.0).abs() > coefficients.clip).to(weights)
    each = (surrogate, entropy, kl, log_ratio.expm1() - log_ratio, outside)
    return loss, torch.stack([(weights * one).sum() for one in each])


def samples(action_dist, *shape, seed=0, spread=1.0, moved=0.3):
    """Outputs of a policy that has moved somewhat since the actions were drawn; every sample has its own spread."""
    torch.manual_seed(seed)
    old = spread * torch.randn(*shape, action_dist.n_params)
    actions = action_dist.sample(old)
    dist_params = old + moved * torch.randn_like(old)
    advantages, weights = torch.randn(*shape), torch.rand(*shape) / math.prod(shape)
    return dist_params, old, actions, advantages, weights


def with_gradient(function, action_dist, dist_params, *rest, double):
    dtype = torch.float64 if double else torch.float32
    leaf = dist_params.detach().to(dtype).requires_grad_()
    loss, measures = function(action_dist, leaf, *(part.to(dtype) if isinstance(part, torch.Tensor) else part for part in rest))
    loss.backward()
    return loss.detach().double(), measures.detach().double(), leaf.grad.double()


def check(action_dist, *arguments, atol=1e-6, rtol=1e-5):
    mine = with_gradient(policy_loss, action_dist, *arguments, double=False)
    exact = with_gradient(reference, action_dist, *arguments, double=True)
    for name, one, truth in zip(("loss", "measures", "gradient"), mine, exact, strict=True):
        torch.testing.assert_close(one, truth, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}")
    return mine


@pytest.mark.parametrize("shape", [(64,), (9, 7), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("coefficients", [ALL, ONLY_SURROGATE, Coefficients(0.05, 0.3, 0.0), Coefficients(1.5, 0.0, 2.0)])
@every_distribution
def test_loss_measures_and_gradient_are_autograds(action_dist, coefficients, shape):
    check(action_dist, *samples(action_dist, *shape), coefficients)


@given(seed=st.integers(0, 10_000), moved=st.floats(0.0, 1.0), clip=st.floats(0.01, 3.0), spread=st.floats(0.01, 1.5))
@settings(max_examples=30, deadline=None)
@every_distribution
def test_loss_and_gradient_are_autograds_wherever_the_policy_has_gone(action_dist, seed, moved, clip, spread):
    arguments = samples(action_dist, 12, seed=seed, moved=moved, spread=spread)
    exact = with_gradient(reference, action_dist, *arguments, Coefficients(clip, 0.1, 0.1), double=True)
    mine = with_gradient(policy_loss, action_dist, *arguments, Coefficients(clip, 0.1, 0.1), double=False)
    size = max(float(exact[2].abs().max()), float(exact[0].abs()), 1.0)  # ratios may be huge; rounding is relative to them
    torch.testing.assert_close(mine[0], exact[0], atol=1e-5 * size, rtol=0.0)
    torch.testing.assert_close(mine[2], exact[2], atol=1e-5 * size, rtol=0.0)


# Every corner of the clipping. A single choice of two with equal old logits: the ratio is twice the new probability.


def coin(ratio, advantage, coefficients=ONLY_SURROGATE):
    action_dist = action_distribution(spaces.Discrete(2))
    logit = torch.tensor(math.log(ratio / (2.0 - ratio)))
    dist_params = torch.stack((logit, torch.zeros(()))).reshape(1, 2).requires_grad_()
    loss, measures = policy_loss(
        action_dist, dist_params, torch.zeros(1, 2), torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1), coefficients
    )
    loss.backward()
    return loss.item(), dist_params.grad[0], dict(zip(MEASURES, measures.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ratio", "advantage", "counts", "outside"),
    [
        (1.0, 2.0, 1.0, False),
        (1.1, 2.0, 1.1, False),
        (1.5, 2.0, 1.2, True),  # good and more likely already: nothing to gain
        (1.5, -2.0, 1.5, True),  # bad and more likely: the whole ratio counts
        (0.5, 2.0, 0.5, True),  # good and less likely
        (0.5, -2.0, 0.8, True),  # bad and less likely already
    ],
)
def test_a_ratio_counts_up_to_the_clip_where_moving_on_would_pay(ratio, advantage, counts, outside):
    loss, grad, measures = coin(ratio, advantage)
    assert loss == pytest.approx(-counts * advantage)
    assert measures["clip_fraction"] == outside
    # d ratio / d logit = ratio (1 - p) with p = ratio / 2
    expected = -advantage * ratio * (1.0 - ratio / 2.0) if counts == ratio else 0.0
    assert grad.tolist() == pytest.approx([expected, -expected], abs=1e-6)
    assert measures["approx_kl"] == pytest.approx(ratio - 1.0 - math.log(ratio), abs=1e-6)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_an_advantage_of_zero_teaches_nothing(ratio):
    loss, grad, _ = coin(ratio, 0.0)
    assert loss == 0.0
    assert not grad.any()


@every_distribution
def test_where_nothing_has_moved_the_gradient_is_the_policy_gradient(action_dist):
    """The first step of an update clips nothing and reports nothing, up to the rounding of one number in float32."""
    _, old, actions, advantages, weights = samples(action_dist, 200)
    dist_params = old.clone().requires_grad_()
    loss, measures = policy_loss(action_dist, dist_params, old, actions, advantages, weights, Coefficients(1e-6, 0.0, 3.0))
    loss.backward()
    found = dict(zip(MEASURES, measures.tolist(), strict=True))
    assert (found["kl"], found["clip_fraction"]) == (0.0, 0.0)
    assert 0.0 <= found["approx_kl"] < 1e-12  # k3 is half the square of the log ratio, which is known to 1e-6
    assert loss.item() == pytest.approx(-(weights.double() * advantages.double()).sum().item(), rel=1e-6, abs=1e-9)
    # The policy gradient: -w A grad log p, and the penalty has none.
    log_prob = action_dist.log_prob(leaf := old.double().requires_grad_(), actions.double())
    expected = torch.autograd.grad((-weights.double() * advantages.double() * log_prob).sum(), leaf)[0]
    torch.testing.assert_close(dist_params.grad.double(), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("action_dist", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_where_nothing_has_moved_the_ratio_is_exactly_one(action_dist):
    _, old, actions, _, weights = samples(action_dist, 200)
    _, measures = policy_loss(action_dist, old, old, actions, torch.ones(200), weights, ONLY_SURROGATE)
    assert dict(zip(MEASURES, measures.tolist(), strict=True))["approx_kl"] == 0.0


# Weights.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_distribution
def test_rows_of_weight_zero_are_not_looked_at_whatever_they_hold(action_dist, bad):
    arguments = list(samples(action_dist, 10))
    nothing = torch.zeros(10, dtype=torch.bool)
    nothing[[0, 4, 9]] = True
    arguments[4][nothing] = 0.0
    clean = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    for part in arguments[:4]:
        part[nothing] = bad
    garbled = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    kept = with_gradient(policy_loss, action_dist, *(part[~nothing] for part in arguments), ALL, double=False)
    for one, other in zip(clean, garbled, strict=True):
        assert torch.equal(one, other)
    assert not garbled[2][nothing].any()
    assert torch.equal(garbled[0], kept[0])
    assert torch.equal(garbled[2][~nothing], kept[2])


@gaussian_and_discrete
def test_what_is_not_finite_in_a_row_that_counts_is_seen(action_dist):
    """The guard that skips a step looks at the loss and the gradient."""
    for part in range(2):
        arguments = samples(action_dist, 5)
        arguments[part][2, 0] = math.nan
        loss, _, grad = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
        assert loss.isnan()
        assert not grad.isfinite().all()
    arguments = samples(action_dist, 5)
    arguments[3][2] = math.nan
    assert with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)[0].isnan()


@every_distribution
def test_no_weight_at_all_is_no_loss(action_dist):
    *arguments, weights = samples(action_dist, 6)
    loss, measures, grad = with_gradient(policy_loss, action_dist, *arguments, torch.zeros_like(weights), ALL, double=False)
    assert loss == 0.0
    assert not measures.any()
    assert not grad.any()


@gaussian_and_discrete
def test_the_loss_is_a_sum_over_samples_with_their_weights(action_dist):
    """Microbatches rely on it: parts with the same weights add up, and a weight of 2 is the sample twice."""
    arguments = samples(action_dist, 12)
    whole = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    parts = [with_gradient(policy_loss, action_dist, *(x[a : a + 4] for x in arguments), ALL, double=False) for a in (0, 4, 8)]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    torch.testing.assert_close(sum(part[1] for part in parts), whole[1])
    assert torch.equal(torch.cat([part[2] for part in parts]), whole[2])
    twice = with_gradient(policy_loss, action_dist, *arguments[:4], 2.0 * arguments[4], ALL, double=False)
    torch.testing.assert_close(twice[0], 2.0 * whole[0])
    assert torch.equal(twice[2], 2.0 * whole[2])


# Where numbers are large.


@pytest.mark.parametrize("size", [50.0, 1e3, 1e6])
@pytest.mark.parametrize("action_dist", [DISTRIBUTIONS["discrete"], DISTRIBUTIONS["multi"]], ids=["discrete", "multi"])
def test_certain_choices_stay_finite(action_dist, size):
    """Logits so far apart that probabilities underflow: entropy 0, and the likely action is no surprise."""
    torch.manual_seed(0)
    old = size * torch.randn(20, action_dist.n_params)
    arguments = (old + 0.01 * torch.randn_like(old), old, action_dist.mode(old), torch.randn(20), torch.full((20,), 0.05))
    loss, measures, grad = check(action_dist, *arguments, ALL, atol=1e-5)
    assert loss.isfinite()
    assert measures.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_a_shift_of_all_logits_changes_nothing(shift):
    action_dist = DISTRIBUTIONS["discrete"]
    dist_params, old, *rest = samples(action_dist, 30)
    dist_params, old = ((16.0 * x).round() / 16.0 for x in (dist_params, old))  # so that the shift itself is exact in float32
    plain = with_gradient(policy_loss, action_dist, dist_params, old, *rest, ALL, double=False)
    moved = with_gradient(policy_loss, action_dist, dist_params + shift, old + shift, *rest, ALL, double=False)
    for one, other in zip(plain, moved, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("log_std", [-20.0, -5.0, 2.0, 20.0, 80.0])
def test_very_small_and_very_large_spreads_stay_exact(log_std):
    """In double precision inside: float32 would overflow from e^44 on, where its squares leave the range."""
    action_dist = DISTRIBUTIONS["two"]
    torch.manual_seed(0)
    old = torch.cat((torch.randn(40, 2), log_std + 0.1 * torch.randn(40, 2)), dim=-1)
    standard = torch.randn(40, 2)
    actions = old[:, :2] + old[:, 2:].exp() * standard
    shift = torch.cat((0.1 * old[:, 2:].exp() * torch.randn(40, 2), 0.1 * torch.randn(40, 2)), dim=-1)
    arguments = (old + shift, old, actions, torch.randn(40), torch.full((40,), 0.025))
    mine = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    exact = with_gradient(reference, action_dist, *arguments, ALL, double=True)
    # A mean and an action that differ by e^-20 in float32 are told apart to 2^-24 of the mean.
    rounding = max(1e-5, 2.0**-24 * math.exp(-log_std))
    for one, truth in zip(mine, exact, strict=True):
        torch.testing.assert_close(one, truth, atol=20.0 * rounding * max(1.0, float(truth.abs().max())), rtol=20.0 * rounding)


def test_a_ratio_beyond_all_bounds_is_clipped_where_it_is_good_and_seen_where_it_is_bad():
    action_dist = DISTRIBUTIONS["one"]
    dist_params, old = torch.tensor([[0.0, -8.0]]), torch.tensor([[1.0, -8.0]])  # log ratio e^16 / 2
    actions, one = torch.zeros(1, 1), torch.ones(1)
    loss, _, grad = with_gradient(policy_loss, action_dist, dist_params, old, actions, one, one, ONLY_SURROGATE, double=False)
    assert loss.item() == pytest.approx(-1.2)
    assert not grad.any()
    loss, _, _ = with_gradient(policy_loss, action_dist, dist_params, old, actions, -one, one, ONLY_SURROGATE, double=False)
    assert loss == math.inf


# The tensors that come in.


@gaussian_and_discrete
def test_tensors_that_are_not_contiguous_are_read_as_they_are(action_dist):
    arguments = samples(action_dist, 6, 5)
    plain = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in arguments]
    assert not any(x.is_contiguous() for x in strided)
    doubled = [torch.stack((x, x), dim=-1)[..., 0] for x in arguments]
    for other in (strided, doubled):
        for one, two in zip(plain, with_gradient(policy_loss, action_dist, *other, ALL, double=False), strict=True):
            assert torch.equal(one, two)


@gaussian_and_discrete
def test_double_precision_comes_out_as_it_came_in(action_dist):
    arguments = samples(action_dist, 8)
    single = with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    dist_params = arguments[0].double().requires_grad_()
    loss, measures = policy_loss(action_dist, dist_params, *(part.double() for part in arguments[1:]), ALL)
    loss.backward()
    assert loss.dtype == measures.dtype == dist_params.grad.dtype == torch.float64
    torch.testing.assert_close(dist_params.grad, single[2], atol=0.0, rtol=1e-6)


@gaussian_and_discrete
def test_gradient_goes_to_the_outputs_alone_and_scales_with_what_comes_from_above(action_dist):
    dist_params, *rest = samples(action_dist, 8)
    rest = [part.requires_grad_() for part in rest]
    grads = []
    for factor in (1.0, -2.5, 0.0):
        leaf = dist_params.clone().requires_grad_()
        loss, measures = policy_loss(action_dist, leaf, *rest, ALL)
        assert not measures.requires_grad
        (factor * loss).backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[1], -2.5 * grads[0])
    assert not grads[2].any()
    assert all(part.grad is None for part in rest)


@gaussian_and_discrete
def test_nothing_that_comes_in_is_changed(action_dist):
    arguments = samples(action_dist, 8)
    before = [part.clone() for part in arguments]
    with_gradient(policy_loss, action_dist, *arguments, ALL, double=False)
    assert all(torch.equal(one, other) for one, other in zip(arguments, before, strict=True))


@gaussian_and_discrete
def test_the_graph_can_be_walked_twice_and_needs_no_gradient(action_dist):
    dist_params, *rest = samples(action_dist, 8)
    leaf = dist_params.clone().requires_grad_()
    loss, _ = policy_loss(action_dist, leaf, *rest, ALL)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    assert torch.equal(leaf.grad, 2.0 * once)
    with torch.no_grad():
        assert torch.equal(policy_loss(action_dist, dist_params, *rest, ALL)[0], loss.detach())


def test_a_distribution_without_a_closed_form_is_refused():
    class Other(ActionDistribution):
        sample = noise = draw = mode = log_prob = entropy = kl = to_env = to_sb3 = None

    with pytest.raises(TypeError, match="no closed form for Other"):
        policy_loss(Other(), *samples(DISTRIBUTIONS["one"], 3), ALL)


def test_every_alternative_of_a_large_choice_finds_its_own_logit():
    """Every alternative once, the first and the last among them."""
    action_dist = action_distribution(spaces.Discrete(1000))
    dist_params, old, _, advantages, weights = samples(action_dist, 1000)
    actions = torch.from_numpy(np.arange(1000, dtype=np.float32)).reshape(-1, 1)
    check(action_dist, dist_params, old, actions, advantages, weights, ALL)
