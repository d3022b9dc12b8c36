"""Batches: every sample once per epoch, sequences whole, everything that belongs together staying together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithm import collect, make, prepared

from tailguard.ppo.experience import Batch
from tailguard.ppo.targets import gae

L, K, M, H = 5, 2, 3, 4


def numbered(n, memory):
    """A batch of n samples or sequences in which every number says to which it belongs."""
    number = torch.arange(float(n))

    def rows(*tail):
        one_each = number.reshape(n, *(1,) * len(tail)).expand(n, *tail)
        return one_each.expand(L, *one_each.shape) if memory else one_each

    of_critics = torch.stack([rows(M)] * K)
    states = [number.reshape(1, n, 1).expand(2, n, H)] * 4 if memory else [torch.empty(0)] * 4
    resets = rows(1) if memory else torch.empty(0)
    return Batch(rows(6), rows(1), rows(2), rows(), rows(), of_critics, of_critics, resets, *states)


@pytest.mark.parametrize("memory", [True, False])
@given(size=st.integers(1, 6), parts=st.integers(1, 6), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_an_epoch_visits_every_sample_once_and_keeps_together_what_belongs_together(memory, size, parts, seed):
    batch = numbered(size * parts, memory)
    seen = []
    for part in batch.shuffled(size, torch.Generator().manual_seed(seed)):
        assert part.size == size
        who = part.weights[0] if memory else part.weights
        seen += who.tolist()
        expected = numbered(size * parts, memory)
        for got, whole, axis in zip(part, expected, (0,) * 5 + (1,) * 2 + (0,) * 5, strict=True):
            axis += int(memory) if axis < 1 or memory else 0
            if whole.numel():
                axis = 1 if whole.dim() == 3 and whole.shape[-1] == H else axis
                assert torch.equal(got, whole.index_select(axis, who.long()))
                assert got.is_contiguous()
    assert sorted(seen) == list(range(size * parts))


def test_epochs_differ_and_seeds_repeat_them():
    batch, generator = numbered(50, memory=False), torch.Generator().manual_seed(0)

    def order(generator):
        return torch.cat([part.weights for part in batch.shuffled(10, generator)])

    first, second = order(generator), order(generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, order(torch.Generator().manual_seed(0)))


def test_a_split_keeps_the_order_and_one_part_is_the_batch_itself():
    batch = numbered(12, memory=True)
    assert torch.equal(torch.cat([part.weights for part in batch.split(4)], dim=1), batch.weights)
    (whole,) = batch.split(12)
    assert whole is batch


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("compiled", [True, False])
def test_values_on_a_shared_memory_are_those_of_a_run_over_the_whole_strips(compiled, layers):
    """The hidden states of acting stand for it, in the second rollout from a memory that is not 0; final observations too."""
    model = make("shared lstm", policy_kwargs={"compiled": compiled, "n_lstm_layers": layers})
    for _ in range(2):
        collect(model)
        experience = prepared(model)
        rollout, policy = model.rollout_buffer, model.policy
        layout, obs = rollout.strips()
        assert layout.resets.sum() > 0.0
        with torch.no_grad():
            features = policy.actor_trunk.sequence(obs, layout.resets, model._rollout_start[0])
            means = policy.raw_atoms(features) @ policy.law.masses
        expected = torch.stack([layout.gather(one) for one in means])
        torch.testing.assert_close(experience.per_critic, expected, atol=1e-5, rtol=1e-5)
        following = layout.gather(model.critic.aggregate_values(means), offset=1)
        ends = rollout.terminated, rollout.truncated
        advantages = gae(rollout.rewards, experience.values, following, *ends, model.gamma, model.gae_lambda)
        torch.testing.assert_close(experience.returns, advantages + experience.values, atol=1e-4, rtol=1e-4)
        model.train()
