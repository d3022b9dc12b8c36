"""The laws of the strips on random episodes, and what the storage keeps of the steps that are added to it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.rollout import Rollout, SequenceLayout

laws = settings(max_examples=100, deadline=None)


@st.composite
def episode_ends(draw):
    """Dones ``[T, B]`` from none to all."""
    shape = (draw(st.integers(2, 12)), draw(st.integers(1, 5)))
    return torch.from_numpy(draw(arrays(np.bool_, shape)))


# The layout.


@given(dones=episode_ends())
@laws
def test_every_step_stands_in_one_row_of_its_own_in_order(dones):
    layout = SequenceLayout.of(dones)
    assert layout.positions.shape == dones.shape
    assert (layout.positions[0] == 0).all()
    assert (layout.positions.diff(dim=0) > 0).all()
    assert layout.positions.max() < len(layout.resets)


@given(dones=episode_ends())
@laws
def test_below_a_step_stands_the_next_step_or_a_final_observation_and_a_blank(dones):
    layout = SequenceLayout.of(dones)
    for env in range(dones.shape[1]):
        expected_blanks, row = [], 0
        for t in range(len(dones)):
            assert layout.positions[t, env] == row
            last = t == len(dones) - 1
            if dones[t, env] and not last:
                expected_blanks.append(row + 2)
            row += 3 if dones[t, env] else 1
        assert layout.resets[:, env, 0].nonzero().flatten().tolist() == expected_blanks


@given(dones=episode_ends())
@laws
def test_strips_are_no_longer_than_the_longest_needs(dones):
    assert len(SequenceLayout.of(dones).resets) == len(dones) + 1 + 2 * int(dones[:-1].sum(0).max())


@given(dones=episode_ends(), width=st.integers(1, 3))
@laws
def test_gather_undoes_spread_and_the_rest_is_zero(dones, width):
    layout = SequenceLayout.of(dones)
    values = torch.rand(*dones.shape, width) + 1.0
    rows = layout.spread(values)
    assert torch.equal(layout.gather(rows), values)
    assert int((rows != 0.0).sum()) == values.numel()
    assert torch.equal(layout.gather(layout.spread(values[..., 0])), values[..., 0])


# Observations in the strips.


def fill(terminated, truncated):
    """A rollout whose observation of env b at time t is (t, b), and whose final observations are (t + 1000, b)."""
    n_steps, n_envs = terminated.shape
    rollout = Rollout(n_steps, n_envs, obs_size=2, action_size=1, n_outputs=2)
    envs = np.arange(n_envs, dtype=np.float32)
    for t in range(n_steps):
        rollout.observe(np.stack((np.full_like(envs, t), envs), axis=1))
        ended = np.flatnonzero(terminated[t] | truncated[t])
        add(rollout, t, terminated=terminated[t].numpy(), truncated=truncated[t].numpy(), ended=ended)
    rollout.observe(np.stack((np.full_like(envs, n_steps), envs), axis=1))
    return rollout


def add(rollout, t, *, terminated=None, truncated=None, ended=(), weights=None):
    n, envs = rollout.n_envs, np.asarray(ended, dtype=np.intp)
    nobody = np.zeros(n, np.bool_)
    step = StepArrays(
        np.zeros((n, 2), np.float32),
        np.full(n, t / 2.0),
        nobody if terminated is None else terminated,
        nobody if truncated is None else truncated,
        envs,
        np.stack((np.full(len(envs), t + 1000.0), envs), axis=1).astype(np.float32),
        weights,
    )
    rollout.actions[t : t + 1], rollout.outputs[t : t + 1] = float(t), float(-t)  # as acting does
    rollout.add(step)


@given(dones=episode_ends(), seed=st.integers(0, 9))
@laws
def test_observations_stand_at_their_steps_and_what_they_led_to_below_them(dones, seed):
    cut = torch.rand(dones.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    layout, obs = fill(dones & ~cut, dones & cut).strips()
    now, after = layout.gather(obs), layout.gather(obs, offset=1)
    for t in range(len(dones)):
        for env in range(dones.shape[1]):
            assert now[t, env].tolist() == [t, env]
            if not dones[t, env]:
                assert after[t, env].tolist() == [t + 1, env]
            elif cut[t, env]:  # nobody asks what comes after a termination
                assert after[t, env].tolist() == [t + 1000, env]
    assert (obs[layout.resets.squeeze(-1).bool()] == 0.0).all()


def test_rows_in_a_small_case_written_out():
    dones = torch.tensor([[False, True], [True, False], [False, True]])
    layout, obs = fill(torch.zeros_like(dones), truncated=dones).strips()
    # Env 0: s0 s1 final blank s2 next. Env 1: s0 final blank s1 s2 final.
    assert obs[:, 0, 0].tolist() == [0, 1, 1001, 0, 2, 3]
    assert obs[:, 1, 0].tolist() == [0, 1000, 0, 1, 2, 1002]
    assert layout.resets.squeeze(-1).T.tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_laying_out_twice_changes_nothing_in_the_rollout():
    ends = torch.tensor([[True, False], [False, True], [True, False]])
    rollout = fill(torch.zeros_like(ends), truncated=ends)
    obs = rollout.obs.clone()
    first, second = rollout.strips()[1], rollout.strips()[1]
    assert torch.equal(first, second)
    assert torch.equal(rollout.obs, obs)


# The storage.


def test_one_step_too_many_is_refused_and_harms_nothing():
    never = torch.zeros(3, 2, dtype=torch.bool)
    rollout = fill(never, never)
    before = [tensor.clone() for tensor in (rollout.obs, rollout.actions, rollout.outputs, rollout.rewards)]
    with pytest.raises(ValueError, match="holds 3 steps"):
        add(rollout, 99, terminated=np.ones(2, np.bool_), ended=[0, 1])
    assert rollout.filled == 3
    assert not rollout.terminated.any()
    for old, new in zip(before, (rollout.obs, rollout.actions, rollout.outputs, rollout.rewards), strict=True):
        assert torch.equal(old, new)
    assert rollout.strips()[1].max() == 3.0  # and no final observation was kept


def test_every_field_is_kept_at_its_step():
    rollout = Rollout(2, 3, obs_size=2, action_size=1, n_outputs=2)
    add(rollout, 0, weights=np.array([1.0, 0.0, 0.5], np.float32))
    add(rollout, 1, terminated=np.array([True, False, False]), truncated=np.array([False, False, True]), ended=[0, 2])
    assert rollout.actions.squeeze(-1).tolist() == [[0.0] * 3, [1.0] * 3]
    assert rollout.outputs[..., 1].tolist() == [[0.0] * 3, [-1.0] * 3]
    assert rollout.rewards.tolist() == [[0.0] * 3, [0.5] * 3]
    assert rollout.terminated.tolist() == [[False] * 3, [True, False, False]]
    assert rollout.truncated.tolist() == [[False] * 3, [False, False, True]]
    assert rollout.weights.tolist() == [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0]]


def test_reset_forgets_weights_and_final_observations():
    rollout = Rollout(2, 1, obs_size=2, action_size=1, n_outputs=2)
    for t in range(2):
        add(rollout, t, truncated=np.array([True]), ended=[0], weights=np.zeros(1, np.float32))
    rollout.reset()
    for t in range(2):
        rollout.observe(np.array([[t, 0.0]], np.float32))
        add(rollout, t)
    rollout.observe(np.array([[2.0, 0.0]], np.float32))
    assert (rollout.weights == 1.0).all()
    assert rollout.strips()[1][:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_what_an_environment_changes_later_does_not_reach_the_storage():
    rollout = Rollout(2, 1, obs_size=2, action_size=1, n_outputs=2)
    obs = np.ones((1, 2), np.float32)
    rollout.observe(obs)
    obs += 5.0
    assert rollout.obs[0].tolist() == [[1.0, 1.0]]


def test_observations_of_any_shape_are_stored_flat():
    rollout = Rollout(2, 3, obs_size=4, action_size=1, n_outputs=2)
    obs = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    assert torch.equal(rollout.observe(obs), torch.arange(12.0).reshape(3, 4))
