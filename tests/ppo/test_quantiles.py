"""Quantile levels, the quantile loss and measures of a distribution, against closed forms and the definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tailguard.ppo.config import CriticConfig
from tailguard.ppo.critic import quantile_levels
from tailguard.ppo.quantiles import (
    ascending,
    cumulative_gaps,
    cvar,
    cvar_categorical,
    equal_mass_atoms,
    level_masses,
    quantile_huber_loss,
    tail_levels,
    uniform_levels,
)

GAUSSIAN_CVAR = {0.01: -2.665214, 0.05: -2.062713, 0.1: -1.754983, 0.25: -1.271106}


def double(values):
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def quantiles_of(distribution, n):
    return double(distribution.ppf((np.arange(n) + 0.5) / n))


def pairwise_loss(pred, target, levels, kappa, masses=None):
    """The definition, with the tensor of all pairs."""
    u = target.unsqueeze(-2) - pred.unsqueeze(-1)
    weight = (levels.unsqueeze(-1) - (u < 0).to(u.dtype)).abs()
    size = u.abs()
    huber = size if kappa == 0 else torch.where(size <= kappa, u * u / 2, kappa * (size - kappa / 2)) / kappa
    masses = torch.full_like(target, 1 / target.shape[-1]) if masses is None else masses.expand_as(target)
    return (weight * huber * masses.unsqueeze(-2)).sum(-1).mean(-1)


def with_gradient(loss, pred, *args):
    pred = pred.clone().requires_grad_()
    value = loss(pred, *args)
    (gradient,) = torch.autograd.grad(value.sum(), pred)
    return value.detach(), gradient


def fixed_points(sample, levels, kappa):
    """Where the gradient of the loss is 0, by bisection of all levels at once."""
    low = torch.full_like(levels, float(sample.min()))
    high = torch.full_like(levels, float(sample.max()))
    for _ in range(60):
        middle = (low + high) / 2
        _, gradient = with_gradient(quantile_huber_loss, middle, sample, levels, kappa)
        low, high = torch.where(gradient < 0, middle, low), torch.where(gradient < 0, high, middle)
    return (low + high) / 2


class TestLevels:
    def test_uniform_levels_are_midpoints(self):
        torch.testing.assert_close(uniform_levels(4), torch.tensor([0.125, 0.375, 0.625, 0.875]))
        assert uniform_levels(3).dtype == torch.get_default_dtype()

    @pytest.mark.parametrize("n", [1, 2, 32, 51, 101, 200])
    def test_uniform_levels_have_equal_masses(self, n):
        torch.testing.assert_close(level_masses(uniform_levels(n, torch.float64)), double([1 / n] * n), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(level_masses(uniform_levels(n)), torch.full((n,), 1 / n), rtol=1e-3, atol=0)

    @pytest.mark.parametrize(("n", "alpha", "n_tail"), [(24, 0.05, 8), (32, 0.2, 5), (10, 0.9, 1), (2, 0.01, 1), (16, 0.5, 12)])
    def test_tail_levels_get_their_own_cells(self, n, alpha, n_tail):
        expected = double([alpha / n_tail] * n_tail + [(1 - alpha) / (n - n_tail)] * (n - n_tail))
        levels = tail_levels(n, alpha, n_tail, torch.float64)
        torch.testing.assert_close(level_masses(levels), expected, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(level_masses(levels.float()), expected.float(), rtol=2e-3, atol=0)
        assert int((levels < alpha).sum()) == n_tail

    def test_levels_that_are_no_midpoints_own_what_is_nearest(self):
        torch.testing.assert_close(level_masses(double([0.1, 0.2, 0.9])), double([0.15, 0.40, 0.45]))
        torch.testing.assert_close(level_masses(double([0.02, 0.05, 0.1, 0.5])), double([0.035, 0.04, 0.225, 0.7]))
        torch.testing.assert_close(level_masses(double([0.3])), double([1.0]))

    @given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=40))
    def test_midpoints_of_any_partition_give_the_partition(self, sizes):
        masses = np.array(sizes) / np.sum(sizes)
        edges = np.concatenate([[0], np.cumsum(masses)])
        torch.testing.assert_close(level_masses(double((edges[1:] + edges[:-1]) / 2)), double(masses), rtol=1e-8, atol=1e-12)

    def test_impossible_levels_are_refused(self):
        for bad in ([0.5, 0.4], [0.5, 0.5], [0.0, 0.5], [0.5, 1.0], [float("nan")], []):
            with pytest.raises(ValueError, match="levels"):
                level_masses(double(bad))
        with pytest.raises(ValueError, match="n is 0"):
            uniform_levels(0)
        with pytest.raises(ValueError, match=r"alpha is 1\.0"):
            tail_levels(8, 1.0, 4)
        with pytest.raises(ValueError, match="n_tail is 8, but it must be from 1 to n - 1 = 7"):
            tail_levels(8, 0.1, 8)

    def test_cumulative_gaps_never_cross(self):
        quantiles = cumulative_gaps(normal(5), normal(5, 31, seed=1) * 3)
        assert quantiles.shape == (5, 32)
        assert bool((quantiles.diff(dim=-1) > 0).all())

    def test_cumulative_gaps_rescale_exactly(self):
        base, gaps = normal(5), normal(5, 7, seed=1)
        torch.testing.assert_close(cumulative_gaps(3 * base, gaps + math.log(3)), 3 * cumulative_gaps(base, gaps))


class TestCVaR:
    # Errors of the piecewise-constant rule on N(0, 1), in percent: algorithms.md E.1.
    @pytest.mark.parametrize(
        ("alpha", "n", "percent"),
        [
            (0.01, 21, 25.7),
            (0.01, 51, 12.4),
            (0.01, 101, 3.4),
            (0.05, 21, 5.2),
            (0.05, 32, 4.3),
            (0.05, 51, 2.4),
            (0.05, 101, 1.0),
            (0.1, 21, 3.3),
        ],
    )
    def test_discretisation_error_is_the_known_one(self, alpha, n, percent):
        measured = float(cvar(quantiles_of(stats.norm, n), alpha))
        assert 100 * (1 - measured / GAUSSIAN_CVAR[alpha]) == pytest.approx(percent, abs=0.1)

    @pytest.mark.parametrize(("n", "percent"), [(21, 5.2), (32, 4.3), (51, 2.4), (101, 1.0)])
    def test_the_error_that_levels_alone_cause(self, n, percent):
        """Of the CVaR .05 of a normal distribution with exact quantiles: evenly spaced, and with five levels in the tail."""
        even, tail = (quantile_levels(CriticConfig(num_quantiles=n, tail_quantiles=k)).double() for k in (0, 5))
        errors = [1 - float(cvar(double(stats.norm.ppf(x.numpy())), 0.05, x)) / GAUSSIAN_CVAR[0.05] for x in (even, tail)]
        assert 100 * errors[0] == pytest.approx(percent, abs=0.1)
        # Five cells of 0.01 are the lowest five of 100 even ones.
        assert 1 - errors[1] == pytest.approx(float(cvar(quantiles_of(stats.norm, 100), 0.05)) / GAUSSIAN_CVAR[0.05], abs=1e-6)

    @pytest.mark.parametrize("alpha", GAUSSIAN_CVAR)
    def test_gaussian(self, alpha):
        assert float(cvar(quantiles_of(stats.norm, 20_001), alpha)) == pytest.approx(GAUSSIAN_CVAR[alpha], rel=5e-4)

    @pytest.mark.parametrize(("df", "expected"), [(4, -3.2029), (3, -3.8743)])
    def test_student(self, df, expected):
        assert float(cvar(quantiles_of(stats.t(df), 400_001), 0.05)) == pytest.approx(expected, rel=2e-3)

    @pytest.mark.parametrize("alpha", [0.003, 0.05, 0.5, 0.77, 1.0])
    def test_uniform(self, alpha):
        assert float(cvar(quantiles_of(stats.uniform, 2001), alpha)) == pytest.approx(alpha / 2, abs=3e-4)

    def test_few_levels_in_the_tail_beat_many_uniform_ones(self):
        levels = tail_levels(24, 0.05, 8, torch.float64)
        quantiles = double(stats.norm.ppf(levels.numpy()))
        assert abs(float(cvar(quantiles, 0.05, levels)) / GAUSSIAN_CVAR[0.05] - 1) < 0.007
        assert abs(float(cvar(quantiles_of(stats.norm, 101), 0.05)) / GAUSSIAN_CVAR[0.05] - 1) > 0.009

    def test_partial_cells(self):
        quantiles = double([1.0, 2.0, 3.0, 4.0])
        for alpha, expected in ((0.1, 1.0), (0.25, 1.0), (0.375, 4 / 3), (0.5, 1.5), (1.0, 2.5)):
            assert float(cvar(quantiles, alpha)) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("levels", [None, tail_levels(16, 0.2, 6, torch.float64), double(np.linspace(0.01, 0.7, 16))])
    def test_at_one_it_is_the_mean(self, levels):
        quantiles = normal(7, 16)
        mean = quantiles.mean(-1) if levels is None else quantiles @ level_masses(levels)
        torch.testing.assert_close(cvar(quantiles, 1.0, levels), mean, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("levels", [None, tail_levels(16, 0.2, 6, torch.float64)])
    def test_continuous_and_nondecreasing_in_alpha(self, levels):
        alphas = torch.linspace(1e-4, 1.0, 20_001, dtype=torch.float64)
        values = cvar(normal(16).expand(len(alphas), 16), alphas, levels)
        assert bool((values.diff() >= -1e-12).all())
        # |d CVaR / d alpha| = (VaR - CVaR) / alpha, so no step is larger than that times the step of alpha.
        assert bool((values.diff() <= 6.0 / alphas[:-1] * (alphas[1] - alphas[0])).all())

    @given(st.integers(0, 2**20), st.floats(1e-3, 1.0), st.floats(-100, 100), st.floats(1e-3, 100))
    def test_translation_scaling_and_order(self, seed, alpha, shift, scale):
        quantiles = normal(9, seed=seed)
        value = cvar(quantiles, alpha)
        torch.testing.assert_close(cvar(scale * quantiles + shift, alpha), scale * value + shift, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(cvar(quantiles.flip(-1), alpha), value)
        assert float(value) <= float(quantiles.sort().values[min(8, int(alpha * 9))]) + 1e-12

    def test_crossed_quantiles_keep_their_masses(self):
        levels = tail_levels(4, 0.1, 2, torch.float64)
        shuffled, masses = double([3.0, 1.0, 4.0, 2.0]), level_masses(levels)
        torch.testing.assert_close(cvar(shuffled, 0.3, levels), cvar_categorical(masses, shuffled, 0.3))

    def test_gradient_is_the_weights(self):
        quantiles = double([4.0, 1.0, 3.0, 2.0]).requires_grad_()
        cvar(quantiles, 0.6).backward()
        torch.testing.assert_close(quantiles.grad, double([0.0, 0.25, 0.1, 0.25]) / 0.6)
        assert torch.autograd.gradcheck(lambda q: cvar(q, 0.37), normal(3, 6).requires_grad_())

    def test_alpha_per_row_and_leading_shapes(self):
        quantiles = normal(2, 3, 8)
        alphas = double([[0.1, 0.2, 1.0], [0.5, 0.05, 0.7]])
        values = cvar(quantiles, alphas)
        assert values.shape == (2, 3)
        for row in range(2):
            for column in range(3):
                assert float(values[row, column]) == pytest.approx(
                    float(cvar(quantiles[row, column], float(alphas[row, column])))
                )
        torch.testing.assert_close(cvar(quantiles, alphas[0])[1], cvar(quantiles[1], alphas[0]))

    def test_nan_is_not_hidden(self):
        assert math.isnan(float(cvar(double([1.0, float("nan"), 2.0]), 0.1)))

    def test_impossible_values_are_refused(self):
        for alpha in (0.0, -0.1, 1.0001, float("nan"), torch.tensor([0.5, 0.0])):
            with pytest.raises(ValueError, match=r"alpha is .* in \(0, 1\]"):
                cvar(normal(2, 4), alpha)
        with pytest.raises(ValueError, match=r"levels is \(5,\).*shape \(4,\)"):
            cvar(normal(2, 4), 0.5, uniform_levels(5))
        with pytest.raises(ValueError, match="floating-point"):
            cvar(torch.arange(4), 0.5)


class TestCategorical:
    PROBS, ATOMS = double([0.1, 0.2, 0.3, 0.4]), double([-2.0, 0.0, 1.0, 5.0])

    @pytest.mark.parametrize(
        ("alpha", "expected"),
        [
            (0.05, -2.0),  # below the mass of the first atom
            (0.1, -2.0),  # exactly its mass
            (0.2, -1.0),  # VaR = 0, half of its mass
            (0.3, -2 / 3),  # the cumulated mass ends exactly at VaR
            (0.45, (-0.2 + 0.15) / 0.45),
            (1.0, -0.2 + 0.3 + 2.0),
        ],
    )
    def test_by_hand(self, alpha, expected):
        assert float(cvar_categorical(self.PROBS, self.ATOMS, alpha)) == pytest.approx(expected, rel=1e-12)

    def test_order_of_atoms_and_shapes(self):
        probs = torch.softmax(normal(5, 4), -1)
        order = torch.tensor([2, 0, 3, 1])
        value = cvar_categorical(probs, self.ATOMS, 0.3)
        assert value.shape == (5,)
        torch.testing.assert_close(cvar_categorical(probs[:, order], self.ATOMS[order], 0.3), value)
        torch.testing.assert_close(cvar_categorical(probs, self.ATOMS.expand(5, 4), 0.3), value)

    def test_rockafellar_uryasev(self):
        """CVaR = max over b of b - E[(b - X)+] / alpha, and the maximum stands at an atom."""
        probs, atoms = torch.softmax(normal(11), -1), normal(11, seed=1)
        for alpha in (0.02, 0.3, 0.9):
            best = max(float(b - (probs * (b - atoms).clamp(min=0)).sum() / alpha) for b in atoms)
            assert float(cvar_categorical(probs, atoms, alpha)) == pytest.approx(best, rel=1e-12)

    def test_zero_mass_atoms_do_not_count(self):
        value = cvar_categorical(double([0.0, 0.5, 0.5]), double([-1e9, 1.0, 2.0]), 0.6)
        assert float(value) == pytest.approx((0.5 + 0.1 * 2) / 0.6)

    def test_gradient_in_the_probabilities(self):
        assert torch.autograd.gradcheck(
            lambda logits: cvar_categorical(torch.softmax(logits, -1), self.ATOMS, 0.37), normal(3, 4).requires_grad_()
        )

    def test_impossible_values_are_refused(self):
        with pytest.raises(ValueError, match=r"sum of probs is \[0\.9"):
            cvar_categorical(double([0.5, 0.4]), double([0.0, 1.0]), 0.5)
        with pytest.raises(ValueError, match="nonnegative"):
            cvar_categorical(double([1.5, -0.5]), double([0.0, 1.0]), 0.5)
        with pytest.raises(ValueError, match=r"atoms is \(3,\)"):
            cvar_categorical(double([0.5, 0.5]), double([0.0, 1.0, 2.0]), 0.5)


class TestEqualMassAtoms:
    @pytest.mark.parametrize("n", [1, 2, 32, 51, 101])
    def test_identity_on_uniform_levels(self, n):
        quantiles = normal(3, n, dtype=torch.float32).sort(-1).values
        torch.testing.assert_close(equal_mass_atoms(quantiles, torch.full((n,), 1 / n), n), quantiles)
        torch.testing.assert_close(
            equal_mass_atoms(quantiles, level_masses(uniform_levels(n)), n), quantiles, rtol=1e-5, atol=1e-5
        )

    @pytest.mark.parametrize("m", [1, 5, 16, 24, 100])
    def test_mean_and_cvar_are_kept(self, m):
        levels = tail_levels(24, 0.05, 8, torch.float64)
        quantiles = normal(4, 3, 24)
        atoms = equal_mass_atoms(quantiles, level_masses(levels), m)
        assert atoms.shape == (4, 3, m)
        assert bool((atoms.diff(dim=-1) >= -1e-12).all())
        torch.testing.assert_close(atoms.mean(-1), quantiles @ level_masses(levels))
        for k in range(1, m + 1):
            torch.testing.assert_close(cvar(atoms, k / m), cvar(quantiles, k / m, levels), rtol=1e-9, atol=1e-9)

    def test_by_hand(self):
        levels = double([0.05, 0.3, 0.75])  # cells of mass 0.1, 0.4, 0.5
        atoms = equal_mass_atoms(double([-10.0, 0.0, 4.0]), level_masses(levels), 4)
        torch.testing.assert_close(atoms, double([-4.0, 0.0, 4.0, 4.0]))


class TestLossEqualsTheDefinition:
    @pytest.mark.parametrize("kappa", [0.0, 1e-3, 0.1, 1.0, 50.0])
    @pytest.mark.parametrize(("n", "m"), [(32, 32), (5, 7), (7, 5), (1, 1), (51, 101), (8, 1), (1, 64)])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
    def test_value_and_gradient(self, kappa, n, m, dtype, tolerance):
        pred, target = normal(13, n, dtype=dtype), normal(13, m, seed=1, dtype=dtype) * 2
        ours = with_gradient(quantile_huber_loss, pred, target, uniform_levels(n, dtype), kappa)
        naive = with_gradient(pairwise_loss, pred, target, uniform_levels(n, dtype), kappa)
        assert ours[0].shape == (13,)
        assert ours[0].dtype == dtype
        for mine, theirs in zip(ours, naive, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("kappa", [0.0, 0.3])
    @pytest.mark.parametrize("per_row", [False, True])
    def test_masses(self, kappa, per_row):
        levels = tail_levels(8, 0.1, 3, torch.float64)
        pred, target = normal(4, 8), normal(4, 6, seed=1)
        masses = torch.softmax(normal(4, 6, seed=2) if per_row else normal(6, seed=2), -1)
        ours = with_gradient(quantile_huber_loss, pred, target, levels, kappa, masses)
        for mine, theirs in zip(ours, with_gradient(pairwise_loss, pred, target, levels, kappa, masses), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    def test_masses_count_like_copies(self):
        pred, target, levels = normal(3, 5), normal(3, 2, seed=1), uniform_levels(5, torch.float64)
        copies = torch.cat([target, target[:, 1:], target[:, 1:]], -1)
        weighted = quantile_huber_loss(pred, target, levels, 0.2, double([0.25, 0.75]))
        torch.testing.assert_close(weighted, quantile_huber_loss(pred, copies, levels, 0.2))

    @pytest.mark.parametrize("kappa", [0.0, 1.0])
    def test_leading_shapes_and_strides(self, kappa):
        pred, target, levels = normal(4, 3, 10), normal(3, 4, 6, seed=1).transpose(0, 1), uniform_levels(5, torch.float64)
        loss = quantile_huber_loss(pred[..., ::2], target, levels, kappa)
        assert loss.shape == (4, 3)
        torch.testing.assert_close(loss, pairwise_loss(pred[..., ::2], target, levels, kappa))
        alone = quantile_huber_loss(pred[1, 2, ::2], target[1, 2], levels, kappa)
        assert alone.shape == ()
        torch.testing.assert_close(alone, loss[1, 2])

    @pytest.mark.parametrize("kappa", [0.0, 0.1, 1.0])
    def test_gradcheck(self, kappa):
        levels, target = uniform_levels(6, torch.float64), normal(3, 5, seed=4)
        assert torch.autograd.gradcheck(
            lambda pred: quantile_huber_loss(pred, target, levels, kappa), normal(3, 6).requires_grad_()
        )

    @pytest.mark.parametrize("kappa", [0.0, 1.0])
    def test_a_large_offset_loses_no_digits(self, kappa):
        # Multiples of 1/16 stay exact in float32 after the shift, so nothing at all may change.
        pred = torch.round(normal(9, 32, dtype=torch.float32) * 16) / 16
        target = torch.round(normal(9, 32, seed=1, dtype=torch.float32) * 16) / 16
        here = with_gradient(quantile_huber_loss, pred, target, uniform_levels(32), kappa)
        there = with_gradient(quantile_huber_loss, pred + 2.0**18, target + 2.0**18, uniform_levels(32), kappa)
        for near, far in zip(here, there, strict=True):
            assert torch.equal(near, far)

    def test_kappa_zero_is_the_limit(self):
        pred, target, levels = normal(3, 5), normal(3, 7, seed=1), uniform_levels(5, torch.float64)
        near = quantile_huber_loss(pred, target, levels, 1e-9)
        torch.testing.assert_close(near, quantile_huber_loss(pred, target, levels, 0.0), rtol=1e-8, atol=1e-8)

    def test_gradient_scales_with_the_weights_of_the_rows(self):
        pred, target, levels = normal(3, 5).requires_grad_(), normal(3, 7, seed=1), uniform_levels(5, torch.float64)
        weights = double([0.0, 1.0, 2.5])
        (whole,) = torch.autograd.grad(quantile_huber_loss(pred, target, levels, 0.0).sum(), pred)
        (weighted,) = torch.autograd.grad((weights * quantile_huber_loss(pred, target, levels, 0.0)).sum(), pred)
        torch.testing.assert_close(weighted, weights[:, None] * whole)

    def test_nan_stays_in_its_row_and_is_not_hidden(self):
        pred, target, levels = normal(3, 5), normal(3, 7, seed=1), uniform_levels(5, torch.float64)
        clean = quantile_huber_loss(pred, target, levels, 0.0)
        target[1, 3] = float("nan")
        loss = quantile_huber_loss(pred, target, levels, 0.0)
        assert math.isnan(float(loss[1]))
        assert torch.equal(loss[[0, 2]], clean[[0, 2]])

    def test_inputs_are_not_changed(self):
        pred, target = normal(3, 5), normal(3, 7, seed=1)
        copies = pred.clone(), target.clone()
        quantile_huber_loss(pred, target, uniform_levels(5), 0.0)
        assert torch.equal(pred, copies[0])
        assert torch.equal(target, copies[1])


class TestLossIsQuantileRegression:
    LEVELS = double([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])

    @pytest.mark.parametrize(
        "distribution", [stats.norm(1.0, 2.0), stats.t(3), stats.uniform(-1, 3)], ids=["normal", "student", "uniform"]
    )
    def test_fixed_point_is_the_quantile(self, distribution):
        size = 200_000
        sample = double(distribution.rvs(size, random_state=np.random.default_rng(0)))
        truth = distribution.ppf(self.LEVELS.numpy())
        error = np.sqrt((self.LEVELS * (1 - self.LEVELS)).numpy() / size) / distribution.pdf(truth)
        for kappa in (0.0, 1e-4):
            found = fixed_points(sample, self.LEVELS, kappa).numpy()
            assert np.all(np.abs(found - truth) <= 3 * error), (found - truth) / error

    @pytest.mark.parametrize(
        ("kappa", "expected"),
        [(1.0, [-1.949, -1.598, -1.309, -0.993, -0.505]), (0.1, [-2.278, -1.914, -1.601, -1.243, -0.650])],
    )
    def test_huber_pulls_the_tails_inward_by_the_known_amount(self, kappa, expected):
        levels = double([0.01, 0.025, 0.05, 0.1, 0.25])
        found = fixed_points(quantiles_of(stats.norm, 100_000), levels, kappa)
        np.testing.assert_allclose(found, expected, atol=1e-3)

    def test_gradient_below_and_above_all_targets(self):
        levels = uniform_levels(4, torch.float64)
        _, gradient = with_gradient(quantile_huber_loss, double([-9.0, 9.0, -9.0, 9.0]), normal(6), levels, 0.0)
        torch.testing.assert_close(gradient * 4, torch.stack([-levels[0], 1 - levels[1], -levels[2], 1 - levels[3]]))

    def test_a_hit_pulls_nowhere(self):
        """A critic that is right about a certain return stays right."""
        _, gradient = with_gradient(quantile_huber_loss, double([2.0] * 4), double([2.0] * 3), uniform_levels(4), 0.0)
        assert not bool(gradient.any())

    @pytest.mark.parametrize("kappa", [0.0, 0.3])
    @pytest.mark.parametrize(("scale", "shift"), [(3.0, 100.0), (0.01, -5.0)])
    def test_affine_equivariance(self, kappa, scale, shift):
        sample, levels = normal(2001), double([0.1, 0.5, 0.8])
        moved = fixed_points(scale * sample + shift, levels, scale * kappa)
        torch.testing.assert_close(moved, scale * fixed_points(sample, levels, kappa) + shift, rtol=1e-9, atol=1e-9)

    def test_rows_never_mix(self):
        pred, target, levels = normal(4, 5), normal(4, 7, seed=1), uniform_levels(5, torch.float64)
        before = with_gradient(quantile_huber_loss, pred, target, levels, 0.0)
        pred[2], target[2] = 7.0, -3.0
        after = with_gradient(quantile_huber_loss, pred, target, levels, 0.0)
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[[0, 1, 3]], new[[0, 1, 3]])
            assert not torch.equal(old[2], new[2])

    def test_one_level_is_median_regression(self):
        sample = normal(5001)
        assert float(fixed_points(sample, double([0.5]), 0.0)) == pytest.approx(float(sample.median()), abs=1e-9)


class TestLossArguments:
    PRED, TARGET, LEVELS = normal(4, 5), normal(4, 7), uniform_levels(5, torch.float64)

    @pytest.mark.parametrize("shape", [(7,), (3, 7), (1, 7), (4, 4, 7), (4, 0)])
    def test_rows_must_match(self, shape):
        with pytest.raises(ValueError, match=r"target is .* of shape \(4, 'M'\)"):
            quantile_huber_loss(self.PRED, torch.zeros(shape, dtype=torch.float64), self.LEVELS, 0.0)

    def test_other_values(self):
        with pytest.raises(ValueError, match=r"levels is \(6,\).*\(5,\)"):
            quantile_huber_loss(self.PRED, self.TARGET, uniform_levels(6), 0.0)
        with pytest.raises(ValueError, match=r"levels is .*inside \(0, 1\)"):
            quantile_huber_loss(self.PRED, self.TARGET, 2 * self.LEVELS, 0.0)
        for kappa in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="kappa is"):
                quantile_huber_loss(self.PRED, self.TARGET, self.LEVELS, kappa)
        with pytest.raises(ValueError, match=r"target\.requires_grad"):
            quantile_huber_loss(self.PRED, self.TARGET.clone().requires_grad_(), self.LEVELS, 0.0)
        with pytest.raises(ValueError, match=r"target\.dtype"):
            quantile_huber_loss(self.PRED, self.TARGET.float(), self.LEVELS, 0.0)
        with pytest.raises(ValueError, match=r"pred\.dtype"):
            quantile_huber_loss(self.PRED.half(), self.TARGET.half(), self.LEVELS, 0.0)
        with pytest.raises(ValueError, match=r"target_masses is \(5,\)"):
            quantile_huber_loss(self.PRED, self.TARGET, self.LEVELS, 0.0, double([0.2] * 5))
        with pytest.raises(ValueError, match="sum of target_masses"):
            quantile_huber_loss(self.PRED, self.TARGET, self.LEVELS, 0.0, double([0.2] * 7))


@pytest.mark.parametrize("shape", [(1,), (5, 1), (64, 32), (3, 7, 51), (2, 0, 32)])
def test_atoms_are_sorted_as_torch_sorts_them(shape):
    atoms = normal(*shape, dtype=torch.float32)
    if atoms.numel() > 4:
        flat = atoms.view(-1)
        flat[0], flat[1], flat[-1], flat[-2] = math.nan, math.inf, -math.inf, math.nan
    before = atoms.clone()
    torch.testing.assert_close(ascending(atoms), atoms.sort(-1).values, rtol=0.0, atol=0.0, equal_nan=True)
    if atoms.ndim > 1:  # rows that are not contiguous
        torch.testing.assert_close(ascending(atoms.mT), atoms.mT.sort(-1).values, rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(atoms, before, rtol=0.0, atol=0.0, equal_nan=True)
