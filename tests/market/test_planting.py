"""Planted edges: the sizes of the moves are those of the original, their directions are not, and the oracle knows the rest."""

import numpy as np
import pandas as pd
import pytest

from tailguard.market import check_bars, load_bars, load_dataset, random_walk
from tailguard.market.planted import net_sharpe, open_returns
from tailguard.market.planting import plant_edge

FEE = 0.0005


@pytest.fixture(scope="module")
def bars():
    return load_dataset("nasdaq-1d")


def moves(bars):
    return np.diff(np.log(bars["close"].to_numpy()))


def test_without_an_edge_only_the_sizes_of_the_moves_are_left(bars):
    planted = plant_edge(bars, 0.0, fee=FEE, seed=1)
    original = moves(bars) - moves(bars).mean()
    np.testing.assert_allclose(np.sort(np.abs(moves(planted.bars))), np.sort(np.abs(original)), atol=1e-12)
    assert planted.bars.index.equals(bars.index)
    assert not planted.expected.any()
    assert not planted.oracle.any()
    assert sorted(planted.bars["volume"]) == sorted(bars["volume"])
    assert not [finding for finding in check_bars(planted.bars) if finding.level == "error"]


def test_signs_are_fair_and_volatility_still_clusters(bars):
    planted = moves(plant_edge(bars, 0.0, fee=FEE, seed=2).bars)
    n = len(planted)
    assert abs(np.corrcoef(planted[1:], planted[:-1])[0, 1]) < 4.0 / np.sqrt(n)
    size = np.abs(planted)
    assert np.corrcoef(size[1:], size[:-1])[0, 1] > 0.1
    assert abs((planted > 0.0).mean() - 0.5) < 2.0 / np.sqrt(n)


def test_expected_returns_are_what_is_earned_on_average(bars):
    """The regression of what an open earns on what was expected has a slope of 1, over many permutations."""
    known, earned = [], []
    for seed in range(8):
        planted = plant_edge(bars.iloc[:1000], 3.0, fee=FEE, seed=seed)
        known.append(planted.expected[:-2, 0])
        earned.append(open_returns(planted.bars)[:-2, 0])
    x, y = np.concatenate(known), np.concatenate(earned)
    slope = float(x @ y / (x @ x))
    residuals = y - slope * x
    error = float(np.sqrt((x**2 * residuals**2).sum()) / (x @ x))
    assert abs(slope - 1.0) < 4.0 * error
    assert error < 0.2


@pytest.mark.parametrize("sharpe", [1.0, 2.5])
def test_the_oracle_earns_what_was_asked_for(bars, sharpe):
    reached = []
    for seed in range(8):
        planted = plant_edge(bars.iloc[-800:], sharpe, fee=FEE, seed=100 + seed)
        reached.append(net_sharpe(planted.oracle, open_returns(planted.bars), FEE))
    years = 8 * 800 / 252
    assert np.mean(reached) == pytest.approx(sharpe, abs=4.0 / np.sqrt(years))


def test_the_same_seed_gives_the_same_bars_and_another_does_not(bars):
    one, same, other = (plant_edge(bars.iloc[:500], 2.0, fee=FEE, seed=seed).bars for seed in (5, 5, 6))
    pd.testing.assert_frame_equal(one, same)
    assert not np.allclose(one["close"], other["close"])


def test_what_cannot_be_planted_is_refused(bars):
    with pytest.raises(ValueError, match="one: an edge is planted into one series"):
        plant_edge(load_bars({"a": random_walk(200, seed=0), "b": random_walk(200, seed=1)}), 1.0, fee=FEE)
    with pytest.raises(ValueError, match="number of bars is 50"):
        plant_edge(bars.iloc[:50], 1.0, fee=FEE)
    with pytest.raises(ValueError, match="sharpe is -1"):
        plant_edge(bars, -1.0, fee=FEE)
    with pytest.raises(ValueError, match=r"sharpe is 100.* costs of 0\.2 per side eat what is stronger"):
        plant_edge(bars.iloc[:500], 100.0, fee=0.2)
