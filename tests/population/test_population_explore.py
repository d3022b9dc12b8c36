"""The operators on hyperparameters: closed forms, and bounds and types under every legal setting."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from population_strategies import choices, ranges
from scipy.stats import chisquare, kstest

from tailguard.population import HyperparamConfig
from tailguard.population.operators import explore, perturb, resample

seeds = st.integers(0, 2**32)
LEARNING_RATE = HyperparamConfig(name="lr", min_value=1e-5, max_value=1e-3, is_log_scale=True)
GAMMA = HyperparamConfig(name="gamma", min_value=0.9, max_value=0.9999, is_log_scale=True, is_one_minus=True)
EPOCHS = HyperparamConfig(name="epochs", min_value=1, max_value=10, is_integer=True)
LINEAR = HyperparamConfig(name="clip", min_value=0.1, max_value=0.3)


def outcomes(config, value, draws=200):
    rng = np.random.default_rng(0)
    return {perturb(config, value, rng) for _ in range(draws)}


def draws(config, number=4000):
    rng = np.random.default_rng(1)
    return np.array([resample(config, rng) for _ in range(number)])


@given(config=ranges() | choices(), seed=seeds, steps=st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_whatever_happens_values_stay_legal(config, seed, steps):
    rng = np.random.default_rng(seed)
    value = resample(config, rng)
    config.require_legal(value)
    for _ in range(steps):
        value = perturb(config, value, rng)
        config.require_legal(value)


@given(config=ranges(), end=st.sampled_from(["min_value", "max_value"]), seed=seeds)
@settings(max_examples=100, deadline=None)
def test_the_ends_of_a_range_are_legal_starts(config, end, seed):
    value = config.model_dump()[end]
    value = int(value) if config.is_integer else value
    config.require_legal(value)
    config.require_legal(perturb(config, value, np.random.default_rng(seed)))


@given(config=ranges(), unit=st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None)
def test_the_unit_scale_can_be_inverted(config, unit):
    value = config.from_unit(unit)
    assert 0.0 <= config.to_unit(value) <= 1.0
    if config.is_integer:
        assert config.from_unit(config.to_unit(value)) == value
    else:
        # 1 - x keeps an absolute precision of 1e-16 only, a wide offset a relative one.
        size = max(abs(config.min_value), abs(config.max_value), 1.0)
        assert config.from_unit(config.to_unit(value)) == pytest.approx(value, rel=1e-9, abs=1e-12 * size)


@pytest.mark.parametrize(("config", "value"), [(LINEAR, 0.2), (LEARNING_RATE, 1e-4)])
def test_a_factor_multiplies_or_divides(config, value):
    assert sorted(outcomes(config, value)) == pytest.approx([value / 1.2, value * 1.2], rel=1e-12)


def test_both_directions_are_equally_likely():
    rng = np.random.default_rng(5)
    up = sum(perturb(LINEAR, 0.2, rng) > 0.2 for _ in range(2000))
    assert abs(up - 1000) < 4.0 * math.sqrt(2000 / 4)


def test_gamma_moves_in_one_minus():
    assert sorted(outcomes(GAMMA, 0.99)) == pytest.approx([1.0 - 0.012, 1.0 - 0.01 / 1.2], rel=1e-12)


def test_steps_beyond_a_bound_end_on_it():
    assert outcomes(LINEAR, 0.29) == {0.3, 0.29 / 1.2}
    assert outcomes(LEARNING_RATE, 1e-5) == {1e-5, 1e-5 * 1.2}
    assert min(outcomes(GAMMA, 0.901)) == 0.9


def test_counts_stay_whole_and_move():
    assert outcomes(EPOCHS, 1) == {1, 2}
    assert outcomes(EPOCHS, 2) == {1, 3}  # 2.4 and 1.67 round back to 2
    assert outcomes(EPOCHS, 10) == {8, 10}  # 10 / 1.2 = 8.3
    noisy = HyperparamConfig(name="x", min_value=0, max_value=100, is_integer=True, perturbation_noise=1e-4)
    assert outcomes(noisy, 50) == {49, 51}
    assert all(type(value) is int for value in outcomes(EPOCHS, 5) | outcomes(noisy, 50))


def test_a_range_with_zero_does_not_hold_values_there():
    config = HyperparamConfig(name="entropy", min_value=0.0, max_value=1.0)
    assert sorted(outcomes(config, 0.0)) == pytest.approx([0.0, 0.2 * 0.01])
    around = HyperparamConfig(name="x", min_value=-1.0, max_value=1.0)
    assert sorted(outcomes(around, 0.0)) == pytest.approx([-0.2 * 0.02, 0.2 * 0.02])
    assert sorted(outcomes(around, -0.6)) == pytest.approx([-0.72, -0.5])


def test_choices_shift_to_neighbours():
    config = HyperparamConfig(name="batch", values=(32, 64, 128, 256))
    assert outcomes(config, 64) == {32, 128}
    assert outcomes(config, 32) == {64}
    assert outcomes(config, 256) == {128}


def test_true_and_1_are_different_choices():
    config = HyperparamConfig(name="x", values=("off", True, 1, 1.0))
    rng = np.random.default_rng(0)
    assert {type(perturb(config, True, rng)) for _ in range(50)} == {str, int}
    assert {type(perturb(config, 1, rng)) for _ in range(50)} == {bool, float}


@pytest.mark.parametrize("config", [LINEAR, LEARNING_RATE, GAMMA], ids=lambda config: config.name)
def test_noise_is_gaussian_on_the_scale_of_the_search(config):
    noisy = config.model_copy(update={"perturbation_noise": 0.05})
    middle = noisy.from_unit(0.5)
    rng = np.random.default_rng(3)
    steps = [(noisy.to_unit(perturb(noisy, middle, rng)) - 0.5) / 0.05 for _ in range(2000)]
    assert kstest(steps, "norm").pvalue > 0.01


def test_fresh_draws_are_uniform_on_the_scale_of_the_search():
    linear, log, gamma = draws(LINEAR), draws(LEARNING_RATE), draws(GAMMA)
    assert kstest((linear - 0.1) / 0.2, "uniform").pvalue > 0.01
    assert kstest((np.log10(log) + 5.0) / 2.0, "uniform").pvalue > 0.01
    assert kstest(-(np.log10(1.0 - gamma) + 1.0) / 3.0, "uniform").pvalue > 0.01


def test_fresh_counts_get_their_share():
    counts = np.bincount(draws(EPOCHS), minlength=11)[1:]
    assert chisquare(counts).pvalue > 0.01
    log = EPOCHS.model_copy(update={"is_log_scale": True})
    k = np.arange(1, 11)
    share = np.log((k + 0.5) / (k - 0.5)) / np.log(10.5 / 0.5)
    assert chisquare(np.bincount(draws(log), minlength=11)[1:], share * 4000).pvalue > 0.01
    choice = HyperparamConfig(name="x", values=(0, 1, 2))
    assert chisquare(np.bincount(draws(choice))).pvalue > 0.01


def test_both_resamples_with_its_probability():
    config = HyperparamConfig(name="x", min_value=0.1, max_value=1.0, resample_probability=0.25)
    rng = np.random.default_rng(4)
    results = [explore((config,), {"x": 0.5}, "both", rng)["x"] for _ in range(4000)]
    fresh = sum(min(abs(x - 0.6), abs(x - 0.5 / 1.2)) > 1e-12 for x in results)
    assert abs(fresh - 1000) < 4.0 * math.sqrt(4000 * 0.25 * 0.75)
    assert {explore((config,), {"x": 0.5}, "perturb", rng)["x"] for _ in range(50)} == {0.6, 0.5 / 1.2}
    assert len({explore((config,), {"x": 0.5}, "resample", rng)["x"] for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("config", "value", "message"),
    [
        (LINEAR, 0.5, "within 0.1 and 0.3"),
        (LINEAR, float("nan"), "within"),
        (LINEAR, 1, "a float"),
        (EPOCHS, 5.0, "an int"),
        (EPOCHS, True, "an int"),
        (HyperparamConfig(name="x", values=(1, 2)), 1.0, "one of"),
    ],
)
def test_values_that_the_search_cannot_produce_are_refused(config, value, message):
    with pytest.raises(ValueError, match=message):
        config.require_legal(value)
