"""The layout of sequences on random episodes, the storage of steps, and batches that keep together what belongs together."""

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_algorithm import collect, make, prepared

from tailguard.envs.vec_env import StepArrays
from tailguard.ppo.actions import action_distribution
from tailguard.ppo.critic import aggregate_values
from tailguard.ppo.rollout import Batch, Rollout, SequenceLayout
from tailguard.ppo.targets import gae

ONE_ACTION = action_distribution(spaces.Box(-1.0, 1.0, (1,)))
random_episodes = settings(max_examples=100, deadline=None)


@st.composite
def episode_ends(draw):
    """Dones ``[T, B]`` from none to all."""
    shape = (draw(st.integers(2, 12)), draw(st.integers(1, 5)))
    return torch.from_numpy(draw(arrays(np.bool_, shape)))


# The layout.


@given(dones=episode_ends())
@random_episodes
def test_every_step_stands_in_one_row_of_its_own_in_order(dones):
    layout = SequenceLayout.of(dones)
    assert layout.positions.shape == dones.shape
    assert (layout.positions[0] == 0).all()
    assert (layout.positions.diff(dim=0) > 0).all()
    assert layout.positions.max() < len(layout.resets)


@given(dones=episode_ends())
@random_episodes
def test_below_a_step_stands_the_next_step_or_a_final_observation_and_a_reset(dones):
    layout = SequenceLayout.of(dones)
    for env in range(dones.shape[1]):
        expected_resets, row = [], 0
        for t in range(len(dones)):
            assert layout.positions[t, env] == row
            last = t == len(dones) - 1
            if dones[t, env] and not last:
                expected_resets.append(row + 2)
            row += 3 if dones[t, env] else 1
        assert layout.resets[:, env, 0].nonzero().flatten().tolist() == expected_resets


@given(dones=episode_ends())
@random_episodes
def test_sequences_are_no_longer_than_the_longest_needs(dones):
    assert len(SequenceLayout.of(dones).resets) == len(dones) + 1 + 2 * int(dones[:-1].sum(0).max())


@given(dones=episode_ends(), width=st.integers(1, 3))
@random_episodes
def test_gather_undoes_spread_and_the_rest_is_zero(dones, width):
    layout = SequenceLayout.of(dones)
    values = torch.rand(*dones.shape, width) + 1.0
    rows = layout.spread(values)
    assert torch.equal(layout.gather(rows), values)
    assert int((rows != 0.0).sum()) == values.numel()
    assert torch.equal(layout.gather(layout.spread(values[..., 0])), values[..., 0])


# Observations in the sequences.


def fill(terminated, truncated):
    """A rollout whose observation of env b at time t is (t, b), and whose final observations are (t + 1000, b)."""
    n_steps, n_envs = terminated.shape
    rollout = Rollout(n_steps, n_envs, obs_size=2, action_dist=ONE_ACTION)
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
    rollout.actions[t : t + 1], rollout.dist_params[t : t + 1] = float(t), float(-t)  # as acting does
    rollout.add(step)


@given(dones=episode_ends(), seed=st.integers(0, 9))
@random_episodes
def test_observations_stand_at_their_steps_and_what_they_led_to_below_them(dones, seed):
    cut = torch.rand(dones.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    layout, obs = fill(dones & ~cut, dones & cut).sequence_layout()
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
    layout, obs = fill(torch.zeros_like(dones), truncated=dones).sequence_layout()
    # Env 0: s0 s1 final reset s2 next. Env 1: s0 final reset s1 s2 final.
    assert obs[:, 0, 0].tolist() == [0, 1, 1001, 0, 2, 3]
    assert obs[:, 1, 0].tolist() == [0, 1000, 0, 1, 2, 1002]
    assert layout.resets.squeeze(-1).T.tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_laying_out_twice_changes_nothing_in_the_rollout():
    ends = torch.tensor([[True, False], [False, True], [True, False]])
    rollout = fill(torch.zeros_like(ends), truncated=ends)
    obs = rollout.obs.clone()
    first, second = rollout.sequence_layout()[1], rollout.sequence_layout()[1]
    assert torch.equal(first, second)
    assert torch.equal(rollout.obs, obs)


# The storage.


def test_one_step_too_many_is_refused_and_harms_nothing():
    never = torch.zeros(3, 2, dtype=torch.bool)
    rollout = fill(never, never)
    before = [tensor.clone() for tensor in (rollout.obs, rollout.actions, rollout.dist_params, rollout.rewards)]
    with pytest.raises(ValueError, match="holds 3 steps"):
        add(rollout, 99, terminated=np.ones(2, np.bool_), ended=[0, 1])
    assert rollout.filled == 3
    assert not rollout.terminated.any()
    for old, new in zip(before, (rollout.obs, rollout.actions, rollout.dist_params, rollout.rewards), strict=True):
        assert torch.equal(old, new)
    assert rollout.sequence_layout()[1].max() == 3.0  # and no final observation was kept


def test_every_field_is_kept_at_its_step():
    rollout = Rollout(2, 3, obs_size=2, action_dist=ONE_ACTION)
    add(rollout, 0, weights=np.array([1.0, 0.0, 0.5], np.float32))
    add(rollout, 1, terminated=np.array([True, False, False]), truncated=np.array([False, False, True]), ended=[0, 2])
    assert rollout.actions.squeeze(-1).tolist() == [[0.0] * 3, [1.0] * 3]
    assert rollout.dist_params[..., 1].tolist() == [[0.0] * 3, [-1.0] * 3]
    assert rollout.rewards.tolist() == [[0.0] * 3, [0.5] * 3]
    assert rollout.terminated.tolist() == [[False] * 3, [True, False, False]]
    assert rollout.truncated.tolist() == [[False] * 3, [False, False, True]]
    assert rollout.weights.tolist() == [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0]]


def test_reset_forgets_weights_and_final_observations():
    rollout = Rollout(2, 1, obs_size=2, action_dist=ONE_ACTION)
    for t in range(2):
        add(rollout, t, truncated=np.array([True]), ended=[0], weights=np.zeros(1, np.float32))
    rollout.reset()
    for t in range(2):
        rollout.observe(np.array([[t, 0.0]], np.float32))
        add(rollout, t)
    rollout.observe(np.array([[2.0, 0.0]], np.float32))
    assert (rollout.weights == 1.0).all()
    assert rollout.sequence_layout()[1][:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_what_an_environment_changes_later_does_not_reach_the_storage():
    rollout = Rollout(2, 1, obs_size=2, action_dist=ONE_ACTION)
    obs = np.ones((1, 2), np.float32)
    rollout.observe(obs)
    obs += 5.0
    assert rollout.obs[0].tolist() == [[1.0, 1.0]]


def test_observations_of_any_shape_are_stored_flat():
    rollout = Rollout(2, 3, obs_size=4, action_dist=ONE_ACTION)
    obs = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    assert torch.equal(rollout.observe(obs), torch.arange(12.0).reshape(3, 4))


# Batches: every sample once per epoch, sequences whole, everything that belongs together staying together.

L, K, M, H = 5, 2, 3, 4


def numbered(n, recurrent):
    """A batch of n samples or sequences in which every number says to which it belongs."""
    number = torch.arange(float(n))

    def rows(*tail):
        numbers = number.reshape(n, *(1,) * len(tail)).expand(n, *tail)
        return numbers.expand(L, *numbers.shape) if recurrent else numbers

    of_critics = torch.stack([rows(M)] * K)
    states = [number.reshape(1, n, 1).expand(2, n, H)] * 4 if recurrent else [torch.empty(0)] * 4
    resets = rows(1) if recurrent else torch.empty(0)
    return Batch(rows(6), rows(1), rows(2), rows(), rows(), of_critics, of_critics, resets, *states)


@pytest.mark.parametrize("recurrent", [True, False])
@given(size=st.integers(1, 6), parts=st.integers(1, 6), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_an_epoch_visits_every_sample_once_and_keeps_together_what_belongs_together(recurrent, size, parts, seed):
    batch = numbered(size * parts, recurrent)
    seen = []
    for part in batch.shuffled(size, torch.Generator().manual_seed(seed)):
        assert part.size == size
        who = part.weights[0] if recurrent else part.weights
        seen += who.tolist()
        for declared in dataclasses.fields(Batch):
            got, whole = getattr(part, declared.name), getattr(batch, declared.name)
            axis = int(recurrent) + (1 if declared.name in ("targets", "old_atoms") else 0)
            if whole.numel():
                assert torch.equal(got, whole.index_select(axis, who.long()))
                assert got.is_contiguous()
    assert sorted(seen) == list(range(size * parts))


def test_epochs_differ_and_seeds_repeat_them():
    batch, generator = numbered(50, recurrent=False), torch.Generator().manual_seed(0)

    def order(generator):
        return torch.cat([part.weights for part in batch.shuffled(10, generator)])

    first, second = order(generator), order(generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, order(torch.Generator().manual_seed(0)))


def test_a_split_keeps_the_order_and_one_part_is_the_batch_itself():
    batch = numbered(12, recurrent=True)
    assert torch.equal(torch.cat([part.weights for part in batch.split(4)], dim=1), batch.weights)
    (whole,) = batch.split(12)
    assert whole is batch


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("compiled", [True, False])
def test_values_on_a_shared_lstm_are_those_of_a_run_over_the_whole_sequences(compiled, layers):
    """The hidden states of acting stand for it, in the second rollout from a state that is not 0; final observations too."""
    model = make("shared lstm", policy_kwargs={"compiled": compiled, "n_lstm_layers": layers})
    for _ in range(2):
        collect(model)
        experience = prepared(model)
        rollout, policy = model.rollout_buffer, model.policy
        layout, obs = rollout.sequence_layout()
        assert layout.resets.sum() > 0.0
        with torch.no_grad():
            features = policy.actor_trunk.sequence(obs, layout.resets, model._rollout_start[0])
            means = policy.raw_atoms(features) @ policy.return_dist.masses
        expected = torch.stack([layout.gather(values) for values in means])
        torch.testing.assert_close(experience.per_critic, expected, atol=1e-5, rtol=1e-5)
        following = layout.gather(aggregate_values(model.critic_config, means), offset=1)
        ends = rollout.terminated, rollout.truncated
        advantages = gae(rollout.rewards, experience.values, following, *ends, model.gamma, model.gae_lambda)
        torch.testing.assert_close(experience.returns, advantages + experience.values, atol=1e-4, rtol=1e-4)
        model.train()
