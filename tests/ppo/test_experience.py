"""Batches: every sample once per epoch, sequences whole, everything that belongs together staying together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.ppo.experience import Batch

L, K, M, H = 5, 2, 3, 4


def numbered(n, memory):
    """A batch of n samples or sequences in which every number says to which it belongs."""
    number = torch.arange(float(n))

    def rows(*tail):
        one_each = number.reshape(n, *(1,) * len(tail)).expand(n, *tail)
        return one_each.expand(L, *one_each.shape) if memory else one_each

    of_critics = torch.stack([rows(M)] * K)
    states = [number.reshape(1, n, 1).expand(2, n, H)] * 4 if memory else [torch.empty(0)] * 4
    blanks = rows(1) if memory else torch.empty(0)
    return Batch(rows(6), rows(1), rows(2), rows(), rows(), of_critics, of_critics, blanks, *states)


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
