"""Action distributions against torch.distributions, numerical integration and the law of large numbers."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import distributions as td

from tailguard.ppo.actions import Categorical, CensoredGaussian, Gaussian, action_distribution

SIZE = 3
COUNTS = [2, 5, 3]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def box(size=SIZE, low=-1.0, high=1.0):
    return spaces.Box(low, high, (size,))


def gaussian_params(rows, seed=0):
    """Means of order 1, standard deviations from about e^-2 to e."""
    return torch.cat((random(rows, SIZE, seed=seed), random(rows, SIZE, seed=seed + 1) * 0.7 - 0.3), dim=-1)


def reference_gaussian(dist_params):
    mean, log_std = dist_params.chunk(2, dim=-1)
    return td.Independent(td.Normal(mean, log_std.exp()), 1)


def reference_categoricals(dist_params):
    return [td.Categorical(logits=logits) for logits in dist_params.split(COUNTS, dim=-1)]


# Every kind, with dist_params for it: properties that all of them have.

KINDS = {
    "gaussian": (Gaussian(box(), squash=False), gaussian_params),
    "squashed": (Gaussian(box(), squash=True), gaussian_params),
    "censored": (CensoredGaussian(box()), gaussian_params),
    "discrete": (action_distribution(spaces.Discrete(4)), lambda rows, seed=0: 2.0 * random(rows, 4, seed=seed)),
    "multi": (action_distribution(spaces.MultiDiscrete(COUNTS)), lambda rows, seed=0: 2.0 * random(rows, 10, seed=seed)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_kl_of_a_distribution_with_itself_is_zero_and_otherwise_positive(kind):
    action_dist, dist_params = KINDS[kind]
    old, new = dist_params(200, seed=0), dist_params(200, seed=7)
    torch.testing.assert_close(action_dist.kl(old, old), torch.zeros(200, dtype=torch.float64))
    assert (action_dist.kl(old, new) > 0.0).all()


@every_kind
def test_the_gradient_of_kl_is_zero_where_nothing_moved_and_else_that_of_differences(kind):
    action_dist, dist_params = KINDS[kind]
    old, new = dist_params(3), dist_params(3, seed=7).requires_grad_()
    still = old.clone().requires_grad_()
    action_dist.kl(old, still).sum().backward()
    torch.testing.assert_close(still.grad, torch.zeros_like(old))
    assert torch.autograd.gradcheck(lambda moved: action_dist.kl(old, moved), (new,))


@every_kind
def test_kl_is_the_mean_log_ratio_under_the_old_distribution(kind):
    action_dist, dist_params = KINDS[kind]
    torch.manual_seed(0)
    old, new = dist_params(1).expand(200_000, -1), (dist_params(1) + 0.3 * dist_params(1, seed=7)).expand(200_000, -1)
    actions = action_dist.sample(old)
    ratios = action_dist.log_prob(old, actions) - action_dist.log_prob(new, actions)
    error = 4.0 * ratios.std() / math.sqrt(len(ratios))
    assert abs(ratios.mean() - action_dist.kl(old, new)[0]) < error


@every_kind
def test_leading_dimensions_are_free(kind):
    action_dist, dist_params = KINDS[kind]
    flat, other = dist_params(6), dist_params(6, seed=3)
    actions = action_dist.mode(other)
    assert actions.shape == (6, *action_dist.action_shape)
    deep, deep_other, deep_actions = (x.reshape(2, 3, -1) for x in (flat, other, actions))
    assert action_dist.sample(deep).shape == deep_actions.shape
    torch.testing.assert_close(action_dist.log_prob(deep, deep_actions).flatten(), action_dist.log_prob(flat, actions))
    torch.testing.assert_close(action_dist.entropy(deep).flatten(), action_dist.entropy(flat))
    torch.testing.assert_close(action_dist.kl(deep, deep_other).flatten(), action_dist.kl(flat, other))


@every_kind
def test_the_same_seed_draws_the_same_actions(kind):
    action_dist, dist_params = KINDS[kind]
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(action_dist.sample(dist_params(50)))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# Gaussian.


def test_gaussian_is_torchs():
    action_dist, dist_params, new = Gaussian(box(), squash=False), gaussian_params(100), gaussian_params(100, seed=5)
    actions = 2.0 * random(100, SIZE, seed=9)
    reference = reference_gaussian(dist_params)
    torch.testing.assert_close(action_dist.log_prob(dist_params, actions), reference.log_prob(actions))
    torch.testing.assert_close(action_dist.entropy(dist_params), reference.entropy())
    torch.testing.assert_close(action_dist.kl(dist_params, new), td.kl_divergence(reference, reference_gaussian(new)))
    assert torch.equal(action_dist.mode(dist_params), dist_params[:, :SIZE])


@pytest.mark.parametrize("squash", [False, True])
def test_gaussian_samples_follow_the_distribution(squash):
    action_dist = Gaussian(box(1), squash=squash)
    torch.manual_seed(0)
    samples = action_dist.sample(torch.tensor([[0.4, -0.7]]).expand(20_000, -1))[:, 0].numpy()
    assert stats.kstest(samples, "norm", args=(0.4, math.exp(-0.7))).pvalue > 0.01


def test_components_are_drawn_independently():
    torch.manual_seed(0)
    samples = Gaussian(box(), squash=False).sample(torch.zeros(50_000, 2 * SIZE)).numpy()
    assert np.abs(np.corrcoef(samples.T) - np.eye(SIZE)).max() < 0.02


# Censored Gaussian: what lies beyond an end counts as the end.


@pytest.mark.parametrize(("mean", "log_std"), [(0.3, -0.5), (2.0, 0.3), (-4.0, 0.2), (0.9, -2.0)])
def test_the_censored_distribution_is_that_of_clipped_draws(mean, log_std):
    """Ends have the mass beyond them, all masses make 1, and entropy is that of ends and density together."""
    action_dist, dist_params = CensoredGaussian(box(1)), torch.tensor([mean, log_std], dtype=torch.float64)
    normal = stats.norm(mean, math.exp(log_std))

    def log_prob(action):
        return action_dist.log_prob(dist_params, torch.tensor([action], dtype=torch.float64)).item()

    assert log_prob(1.0) == log_prob(7.0) == pytest.approx(normal.logsf(1.0))
    assert log_prob(-1.0) == log_prob(-7.0) == pytest.approx(normal.logcdf(-1.0))
    assert log_prob(0.2) == pytest.approx(normal.logpdf(0.2))
    ends = [math.exp(log_prob(end)) for end in (-1.0, 1.0)]
    inside, _ = integrate.quad(lambda action: math.exp(log_prob(action)), -0.999999, 0.999999)
    assert sum(ends) + inside == pytest.approx(1.0, abs=1e-5)
    disorder, _ = integrate.quad(lambda action: -normal.pdf(action) * normal.logpdf(action), -1.0, 1.0)
    assert action_dist.entropy(dist_params).item() == pytest.approx(disorder - sum(p * math.log(p) for p in ends))


def test_censoring_keeps_the_expected_gradient_and_takes_noise_out_of_it():
    """Reward a clipped action by its square, where most draws lie beyond the end."""
    mean_and_std = torch.tensor([2.5, 0.2], dtype=torch.float64).expand(400_000, -1)
    torch.manual_seed(0)
    actions = CensoredGaussian(box(1)).sample(mean_and_std)
    rewards, gradients = actions.clamp(-1.0, 1.0).square().squeeze(-1), []
    for action_dist in (Gaussian(box(1), squash=False), CensoredGaussian(box(1))):
        dist_params = mean_and_std.clone().requires_grad_()
        (rewards * action_dist.log_prob(dist_params, actions)).sum().backward()
        gradients.append(dist_params.grad)
    plain, censored = gradients
    error = (plain - censored).std(0) / math.sqrt(len(actions))
    assert ((plain - censored).mean(0).abs() < 4.0 * error).all()
    assert (censored.var(0) < 0.5 * plain.var(0)).all()


def test_far_beyond_an_end_an_adversary_of_censored_actions_still_sees_a_way():
    """Or an attack would end where it began, and an agent would look sturdier than it is."""
    action_dist, dist_params = CensoredGaussian(box(1)), torch.tensor([[30.0, 0.0]], dtype=torch.float64)
    for divergence, seen in ((action_dist.kl, False), (action_dist.surprise, True), (action_dist.sharp_kl, True)):
        moved = (dist_params - torch.tensor([[1.0, 0.0]])).requires_grad_()
        divergence(dist_params, moved).sum().backward()
        assert bool(moved.grad[0, 0].abs() > 1e-6) is seen


@pytest.mark.parametrize(
    ("space", "squash", "message"),
    [
        (spaces.Box(-np.inf, 1.0, (1,)), False, "censored needs a bounded action space"),
        (spaces.Box(-1.0, 1.0, (1,)), True, "choose squash_output or censored"),
        (spaces.Discrete(3), False, "censored is for actions in a box"),
    ],
    ids=["unbounded", "squashed", "discrete"],
)
def test_censoring_needs_a_box_with_ends(space, squash, message):
    with pytest.raises(ValueError, match=message):
        action_distribution(space, squash, censored=True)


# Squashed Gaussian: the stored action is the one before tanh, its density that of the one after.


def test_squashed_density_is_torchs():
    action_dist, dist_params = Gaussian(box(), squash=True), gaussian_params(100)
    mean, log_std = dist_params.chunk(2, dim=-1)
    tanh = td.TransformedDistribution(td.Normal(mean, log_std.exp()), td.TanhTransform())
    before = random(100, SIZE, seed=9)
    expected = tanh.log_prob(before.tanh()).sum(-1)
    torch.testing.assert_close(action_dist.log_prob(dist_params, before), expected)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.2, -1.0), (-0.5, 0.7)])
def test_squashed_density_integrates_to_one(mean, log_std):
    action_dist, dist_params = Gaussian(box(1), squash=True), torch.tensor([mean, log_std], dtype=torch.float64)

    def density(squashed):
        before = torch.tensor([math.atanh(squashed)], dtype=torch.float64)
        return math.exp(action_dist.log_prob(dist_params, before))

    total, _ = integrate.quad(density, -1.0, 1.0, limit=200)
    assert total == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("before", [-300.0, -20.0, 0.0, 20.0, 300.0])
def test_squashed_log_prob_is_finite_and_smooth_at_the_ends(before):
    actions = torch.tensor([before], requires_grad=True)
    log_prob = Gaussian(box(1), squash=True).log_prob(torch.tensor([0.0, 2.0]), actions)
    log_prob.backward()
    assert log_prob.isfinite()
    assert actions.grad.isfinite().all()


def test_squashed_kl_is_that_of_the_gaussians_below():
    """A bijection changes no KL."""
    old, new = gaussian_params(20), gaussian_params(20, seed=5)
    torch.testing.assert_close(Gaussian(box(), squash=True).kl(old, new), Gaussian(box(), squash=False).kl(old, new))


def test_squashing_needs_bounds():
    with pytest.raises(ValueError, match="squash needs a bounded action space"):
        action_distribution(spaces.Box(-np.inf, np.inf, (2,)), squash=True)


# What the environment gets.


@given(low=st.floats(-1e3, 1e3, width=32), high=st.floats(-1e3, 1e3, width=32), raw=st.floats(-50.0, 50.0, width=32))
@example(low=-1.0, high=float(np.float32(0.1)), raw=30.0)
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("squash", [False, True])
def test_the_environment_gets_actions_inside_its_box(squash, low, high, raw):
    assume(low < high)
    space = spaces.Box(np.float32(low), np.float32(high), (1,), np.float32)
    action = Gaussian(space, squash).to_env(np.array([[raw]], np.float32))
    assert space.contains(action[0])


def test_clipping_changes_only_what_is_outside():
    action_dist = Gaussian(spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 2.0], np.float32)), squash=False)
    got = action_dist.to_env(np.array([[0.25, 3.0], [-4.0, -1.0]], np.float32))
    assert got.tolist() == [[0.25, 2.0], [-1.0, 0.0]]


def test_squashing_maps_the_line_onto_the_box():
    action_dist = Gaussian(spaces.Box(2.0, 6.0, (1,)), squash=True)
    got = action_dist.to_env(np.array([[-30.0], [0.0], [math.atanh(0.5)], [30.0]]))
    np.testing.assert_allclose(got[:, 0], [2.0, 4.0, 5.0, 6.0], rtol=1e-6)


def test_a_box_keeps_its_shape():
    action_dist = action_distribution(spaces.Box(-1.0, 1.0, (2, 3)))
    assert action_dist.n_params == 12
    assert action_dist.action_shape == (2, 3)
    assert action_dist.to_env(np.linspace(-2.0, 2.0, 12).reshape(2, 6)).shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("space", "chosen", "expected"),
    [
        (spaces.Discrete(3), [[0.0], [2.0]], [0, 2]),
        (spaces.Discrete(3, start=-1), [[0.0], [2.0]], [-1, 1]),
        (spaces.MultiDiscrete([2, 4]), [[0.0, 3.0], [1.0, 0.0]], [[0, 3], [1, 0]]),
        (spaces.MultiDiscrete([2, 4], start=[10, -3]), [[0.0, 3.0], [1.0, 0.0]], [[10, 0], [11, -3]]),
    ],
    ids=["discrete", "discrete start", "multi", "multi start"],
)
def test_choices_become_the_integers_of_the_space(space, chosen, expected):
    actions = action_distribution(space).to_env(np.array(chosen, np.float32))
    assert actions.tolist() == expected
    assert all(space.contains(action) for action in actions)


# Categorical.


def test_categorical_is_torchs():
    action_dist = action_distribution(spaces.MultiDiscrete(COUNTS))
    dist_params, new = 2.0 * random(100, 10), 2.0 * random(100, 10, seed=5)
    parts, new_parts = reference_categoricals(dist_params), reference_categoricals(new)
    torch.manual_seed(0)
    actions = action_dist.sample(dist_params)
    log_prob = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(action_dist.log_prob(dist_params, actions), log_prob)
    torch.testing.assert_close(action_dist.entropy(dist_params), sum(part.entropy() for part in parts))
    kl = sum(td.kl_divergence(old, part) for old, part in zip(parts, new_parts, strict=True))
    torch.testing.assert_close(action_dist.kl(dist_params, new), kl)
    assert action_dist.mode(dist_params)[:, 1].tolist() == dist_params[:, 2:7].argmax(-1).tolist()


def test_a_single_choice_is_torchs():
    action_dist, dist_params = action_distribution(spaces.Discrete(4)), 2.0 * random(50, 4)
    reference, actions = td.Categorical(logits=dist_params), torch.arange(50.0).remainder(4).unsqueeze(-1)
    torch.testing.assert_close(action_dist.log_prob(dist_params, actions), reference.log_prob(actions[:, 0]))
    torch.testing.assert_close(action_dist.entropy(dist_params), reference.entropy())


def test_categorical_samples_follow_the_distribution_choice_by_choice():
    action_dist, dist_params = Categorical([4, 3], single=False, start=np.zeros(2, np.int64)), random(1, 7)
    torch.manual_seed(0)
    samples = action_dist.sample(dist_params.expand(20_000, -1)).long()
    probabilities = [part.softmax(-1)[0] for part in dist_params.split([4, 3], dim=-1)]
    joint = torch.outer(*probabilities).flatten()
    counts = torch.bincount(samples[:, 0] * 3 + samples[:, 1], minlength=12)
    assert stats.chisquare(counts.numpy(), 20_000 * joint.numpy()).pvalue > 0.01


def test_nearly_impossible_choices_are_not_drawn_and_break_nothing():
    action_dist, dist_params = action_distribution(spaces.Discrete(3)), torch.tensor([[0.0, -200.0, 0.0]])
    torch.manual_seed(0)
    assert (action_dist.sample(dist_params.expand(10_000, -1)) != 1.0).all()
    assert action_dist.entropy(dist_params).item() == pytest.approx(math.log(2.0))
    assert action_dist.kl(dist_params, dist_params).item() == 0.0


@pytest.mark.parametrize(
    "space",
    [spaces.MultiBinary((3, 2)), spaces.MultiDiscrete([[2, 2], [2, 2]]), spaces.Dict({"a": spaces.Discrete(2)})],
    ids=["multi binary", "matrix", "dict"],
)
def test_other_spaces_are_refused_by_name(space):
    with pytest.raises(
        ValueError, match="actions must be a Box, Discrete, or one-dimensional MultiDiscrete or MultiBinary space"
    ):
        action_distribution(space)
