"""The noise of the optimizers: normal numbers from a seed."""

import numpy as np
import pytest
import torch
from scipy import stats

from tailguard.optim.kernels import normal_numbers
from tailguard.optim.noise import QUANTILES, NormalNumbers


def draw(count, seed=0):
    return NormalNumbers().draw(count, torch.Generator().manual_seed(seed)).double().numpy()


def test_words_are_splitmix64():
    """The published test vector of SplitMix64: seed 1234567."""
    words = np.empty(5, np.uint64)
    normal_numbers(np.empty(20, np.float32), words, np.uint64(1234567), QUANTILES)
    vector = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert words.tolist() == vector


def test_the_table_is_the_normal_distribution():
    """65,536 quantiles: mean 0, variance 1, and within 1e-5 of the normal distribution function."""
    table = QUANTILES.astype(np.float64)
    assert table.mean() == pytest.approx(0.0, abs=1e-6)
    assert table.var() == pytest.approx(1.0, abs=1e-6)
    below = np.arange(len(table)) / len(table)
    normal = stats.norm.cdf(table)
    assert max(np.abs(normal - below).max(), np.abs(normal - below - 1.0 / len(table)).max()) < 2e-5
    assert table.max() < 4.4


def test_numbers_are_normal_and_independent():
    numbers = draw(200_000)
    assert stats.kstest(numbers, "norm").pvalue > 0.01
    assert abs(stats.kurtosis(numbers)) < 4.0 * np.sqrt(24.0 / len(numbers))
    for lag in (1, 2, 3, 4, 5, 64):
        correlation = np.mean(numbers[lag:] * numbers[:-lag])
        assert abs(correlation) < 4.0 / np.sqrt(len(numbers))


def test_successive_draws_are_independent():
    source, generator = NormalNumbers(), torch.Generator().manual_seed(0)
    first, second = (source.draw(50_000, generator).double().numpy().copy() for _ in range(2))
    assert abs(np.mean(first * second)) < 4.0 / np.sqrt(50_000)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 1001])
def test_any_count_and_the_same_seed(count):
    assert len(draw(count)) == count
    np.testing.assert_array_equal(draw(count), draw(count))
    assert (draw(count, 0) != draw(count, 1)).any()


def test_one_number_of_the_generator_is_used():
    generator, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    NormalNumbers().draw(1000, generator)
    torch.empty(1, dtype=torch.int64).random_(-(2**63), None, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
