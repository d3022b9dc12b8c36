"""Folds: whatever the numbers, no test row is trained on, and no window reaches from one into the other."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailguard.evaluate.folds import WalkforwardConfig, cut_into_blocks, least_embargo, longest_lookback, make_folds
from tailguard.market import FeatureConfig, build_features, random_walk

SHAPES = {
    "rows": st.integers(10, 20_000),
    "unusable": st.integers(0, 300),
    "more_lookback": st.integers(0, 300),
    "folds": st.integers(1, 12),
    "share": st.floats(0.05, 0.95),
    "warmup": st.integers(0, 200),
    "more_embargo": st.none() | st.integers(0, 300),
    "mode": st.sampled_from(["expanding", "rolling"]),
}


@given(**SHAPES)
def test_folds_keep_their_promises(rows, unusable, more_lookback, folds, share, warmup, more_embargo, mode):
    lookback = unusable + more_lookback
    least = least_embargo(lookback, warmup)
    embargo = None if more_embargo is None else least + more_embargo
    config = WalkforwardConfig(folds=folds, train_share=share, warmup=warmup, embargo=embargo, mode=mode)
    first_test = unusable + round((rows - unusable) * share)
    if first_test - (embargo or least) - unusable < 2 or rows - first_test < 2 * folds:
        with pytest.raises(ValueError, match="the number of bars"):
            make_folds(rows, unusable, lookback, config)
        return
    made = make_folds(rows, unusable, lookback, config)
    assert [fold.number for fold in made] == list(range(folds))
    assert made[-1].test[1] == rows
    for fold in made:
        assert 0 <= fold.train[0] < fold.train[1] < fold.test[0] < fold.test[1]
        assert fold.embargo == (embargo or least) >= lookback + warmup
        assert fold.span == (fold.test[0] - 1, fold.test[1])
        # The earliest bar that the first decision's features and warm-up look at is later than the last one trained on.
        assert fold.span[0] - warmup - lookback >= fold.train[1] - 1
        assert fold.train[1] - max(fold.train[0], unusable) >= 2
    for one, other in pairwise(made):
        assert one.test[1] == other.test[0]  # without a gap
        assert abs((one.test[1] - one.test[0]) - (other.test[1] - other.test[0])) <= 1
    lengths = {fold.train[1] - fold.train[0] for fold in made}
    if mode == "rolling":
        assert len(lengths) == 1
    else:
        assert all(fold.train[0] == 0 for fold in made)
        assert len(lengths) == folds


@given(**SHAPES)
def test_the_modes_share_the_first_fold_and_all_tests(rows, unusable, more_lookback, folds, share, warmup, more_embargo, mode):
    both = []
    for each in ("expanding", "rolling"):
        config = WalkforwardConfig(folds=folds, train_share=share, warmup=warmup, mode=each)
        try:
            both.append(make_folds(rows, unusable, unusable + more_lookback, config))
        except ValueError:
            assume(False)
    assert both[0][0] == both[1][0]
    assert [fold.test for fold in both[0]] == [fold.test for fold in both[1]]


def test_folds_by_hand():
    made = make_folds(1000, 0, 40, WalkforwardConfig(folds=2, train_share=0.5, warmup=10, mode="rolling"))
    assert [(fold.train, fold.test) for fold in made] == [((0, 450), (500, 750)), ((250, 700), (750, 1000))]


def test_a_shorter_embargo_is_refused():
    config = WalkforwardConfig(embargo=49, warmup=10)
    with pytest.raises(ValueError, match="at least 50: look-back 40 and warm-up 10"):
        make_folds(1000, 0, 40, config)


def test_the_longest_look_back_covers_every_feature():
    """Garbage more than the look-back before a bar does not reach its features, but for what exponential averages keep."""
    config = FeatureConfig(drawdown_window=90, horizons=(1, 30), rsi=5, atr=5, macd=(2, 3, 2))
    assert longest_lookback(config) == 91
    assert longest_lookback(FeatureConfig(macd=(200, 300, 50))) == 351
    bars = random_walk(400, seed=0)
    changed = bars.copy()
    last = 400 - longest_lookback(config)
    changed.iloc[:last, :4] *= 1.7
    one, other = build_features(bars, config), build_features(changed, config)
    spread = abs(one.values[-1] - other.values[-1])
    assert spread.max() < 1e-4
    reached = abs(one.values[last + 5] - other.values[last + 5])
    assert reached.max() > 1e-2


@given(first=st.integers(0, 1000), length=st.integers(1, 5000), number=st.integers(1, 120))
def test_blocks_cover_the_rows_without_gaps_and_are_equally_long(first, length, number):
    if length < 3 * number:
        with pytest.raises(ValueError, match=f"selection.blocks is {number}, but it must be at most {length // 3}"):
            cut_into_blocks((first, first + length), number, "selection.blocks")
        return
    blocks = cut_into_blocks((first, first + length), number, "selection.blocks")
    assert len(blocks) == number
    assert (blocks[0][0], blocks[-1][1]) == (first, first + length)
    assert all(one[1] == other[0] for one, other in pairwise(blocks))
    lengths = [stop - start for start, stop in blocks]
    assert min(lengths) >= 3
    assert max(lengths) - min(lengths) <= 1
