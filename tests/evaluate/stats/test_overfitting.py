"""PBO against ffn, on noise and where one trial really is better."""

import ffn
import numpy as np
import pandas as pd
import pytest

from tailguard.evaluate import statistics


@pytest.mark.parametrize(("bars", "trials", "blocks"), [(160, 10, 8), (200, 5, 10), (64, 2, 2)])
def test_logits_agree_with_ffn_halving_by_halving(bars, trials, blocks):
    returns = np.random.default_rng(bars).standard_normal((bars, trials)) * 0.01 + 0.02
    theirs = ffn.core.calc_prob_backtest_overfitting(pd.DataFrame(returns), blocks, full_output=True)
    ours = statistics.overfitting(returns, blocks)
    np.testing.assert_allclose(ours.logits, theirs["logits"], atol=1e-12)
    assert ours.probability == theirs["pbo"]


def test_blocks_of_unequal_length_slope_and_loss_by_hand():
    """Five bars a block but for one of four, and every halving computed from the returns themselves."""
    returns = np.random.default_rng(0).standard_normal((19, 6))
    pieces = np.array_split(np.arange(19), 4)
    before, after, losses = [], [], 0
    for first in range(4):
        for second in range(first + 1, 4):
            inside = np.concatenate([pieces[first], pieces[second]])
            outside = np.setdiff1d(np.arange(19), inside)
            ratios = [returns[half].mean(axis=0) / returns[half].std(axis=0, ddof=1) for half in (inside, outside)]
            before.append(ratios[0].max())
            after.append(ratios[1][ratios[0].argmax()])
            losses += after[-1] <= 0.0
    ours = statistics.overfitting(returns, 4)
    assert ours.slope == pytest.approx(np.polyfit(before, after, 1)[0])
    assert ours.loss == losses / 6


def test_noise_is_overfitted_in_half_of_the_halvings():
    rng = np.random.default_rng(1)
    measured = [statistics.overfitting(rng.standard_normal((400, 20)), 10) for _ in range(80)]
    assert np.mean([one.probability for one in measured]) == pytest.approx(0.5, abs=0.07)
    assert np.mean([one.loss for one in measured]) == pytest.approx(0.5, abs=0.1)
    # Halves share one mean: what the winner gained in one half is missing in the other.
    assert np.mean([one.slope for one in measured]) < -0.3


def test_one_trial_that_is_better_is_found_and_thousands_of_halvings_take_moments():
    returns = np.random.default_rng(2).standard_normal((2000, 30)) * 0.01
    returns[:, 7] += 0.0015
    ours = statistics.overfitting(returns)
    assert len(ours.logits) == 12_870
    assert ours.probability < 0.02
    assert ours.loss < 0.02


def test_trials_that_never_move_share_their_rank():
    """All ratios are 0: the winner has the middle rank, whose logit is 0."""
    ours = statistics.overfitting(np.zeros((32, 3)), 4)
    assert (ours.probability, ours.loss, ours.slope) == (1.0, 1.0, 0.0)
    np.testing.assert_array_equal(ours.logits, 0.0)


@pytest.mark.parametrize(
    ("returns", "blocks", "message"),
    [
        (np.zeros(32), 4, r"returns is \(32,\)"),
        (np.zeros((32, 1)), 4, r"returns is \(32, 1\)"),
        (np.full((32, 2), np.nan), 4, r"returns\[0, 0\] is nan"),
        (np.zeros((32, 2)), 5, "blocks is 5"),
        (np.zeros((32, 2)), 22, "blocks is 22"),
        (np.zeros((31, 2)), 16, "the number of bars is 31"),
    ],
)
def test_what_cannot_be_halved_is_refused(returns, blocks, message):
    with pytest.raises(ValueError, match=message):
        statistics.overfitting(returns, blocks)
