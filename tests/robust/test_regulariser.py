"""The schedule of epsilon: end points, midpoints, and no dependence on earlier calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailguard.robust import SAPPOConfig
from tailguard.robust.regulariser import epsilon_at, horizon


def config(**values):
    return SAPPOConfig(**{"epsilon": 0.2, "epsilon_final": 0.05, "schedule": "linear", "warmup_updates": 0, **values})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("first", "last"), [(0.2, 0.05), (0.0, 0.1)])
def test_it_begins_and_ends_where_it_should_and_is_half_way_in_the_middle(schedule, first, last):
    settings = config(schedule=schedule, epsilon=first, epsilon_final=last)
    assert epsilon_at(settings, 0, 101) == pytest.approx(first, abs=1e-15)
    assert epsilon_at(settings, 50, 101) == pytest.approx((first + last) / 2.0)
    assert epsilon_at(settings, 100, 101) == last
    assert epsilon_at(settings, 10_000, 101) == last


def test_a_quarter_of_the_way_the_two_shapes_differ_as_they_should():
    """Linear: 0.2 - 0.15 / 4. Cosine: 0.05 + 0.15 (1 + cos(pi / 4)) / 2."""
    assert epsilon_at(config(), 25, 101) == pytest.approx(0.1625)
    assert epsilon_at(config(schedule="cosine"), 25, 101) == pytest.approx(0.05 + 0.075 * (1.0 + 0.5**0.5))


@given(update=st.integers(0, 500), updates=st.integers(1, 300), share=st.floats(0.01, 1.0))
def test_it_stays_between_its_ends_and_only_falls(update, updates, share):
    settings = config(schedule_share=share)
    now, later = epsilon_at(settings, update, updates), epsilon_at(settings, update + 1, updates)
    assert 0.05 <= later <= now <= 0.2


def test_a_share_of_the_training_and_updates_of_its_own():
    assert epsilon_at(config(schedule_share=0.5), 50, 101) == 0.05
    assert epsilon_at(config(max_updates=11), 10, 10_000) == 0.05
    assert epsilon_at(config(), 0, 1) == 0.05


def test_warm_up_and_idleness():
    settings = config(warmup_updates=3)
    assert [epsilon_at(settings, k, 11) for k in range(3)] == [0.0] * 3
    assert epsilon_at(settings, 3, 11) == pytest.approx(0.2 - 0.15 * 0.3)
    assert epsilon_at(config(enabled=False), 5, 11) == 0.0
    assert epsilon_at(config(coefficient=0.0), 5, 11) == 0.0
    assert epsilon_at(config(coefficient=0.0, mode="mix"), 5, 11) > 0.0
    assert SAPPOConfig(epsilon=0.0).idle


def test_asking_changes_nothing():
    settings = config()
    assert len({epsilon_at(settings, 7, 50) for _ in range(20)}) == 1
    assert settings.epsilon == 0.2


def test_an_update_takes_the_steps_of_all_environments():
    assert horizon(100_000, 128, 8) == 97
    assert horizon(10, 128, 8) == 1


def test_a_schedule_needs_an_end_and_a_constant_has_none():
    with pytest.raises(ValidationError, match="linear schedule needs one"):
        SAPPOConfig(schedule="linear")
    with pytest.raises(ValidationError, match="constant schedule has none"):
        SAPPOConfig(epsilon_final=0.1)
    with pytest.raises(ValueError, match="update is -1"):
        epsilon_at(config(), -1, 5)


def test_a_mixed_batch_perturbs_the_recurrent_state_too():
    with pytest.raises(ValidationError, match='memory must be "whole"'):
        SAPPOConfig(mode="mix", memory="step")
