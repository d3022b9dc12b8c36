"""The compiled LSTM at its edges: odd sizes, strides, several graphs at once, threads; against torch in double precision."""

import pytest
import torch
from test_networks import random

from tailguard.ppo.compiled import kernels
from tailguard.ppo.compiled.networks import lstm_layer
from tailguard.ppo.networks import LstmTrunk
from tolerance import rounding

# Around the widths of vectors (4, 8, 16 floats), and a single one of everything.
SIZES = [(1, 1, 1, 1), (1, 1, 3, 7), (1, 5, 2, 8), (9, 1, 1, 1), (4, 3, 17, 15), (6, 2, 5, 31), (3, 7, 33, 33), (2, 2, 8, 65)]


def layer(rows, envs, inputs, size, seed=0):
    """Inputs, resets, both states and the weights of one layer."""
    weights = [
        0.3 * random(*shape, seed=seed + k)
        for k, shape in enumerate([(4 * size, inputs), (4 * size, size), (4 * size,), (4 * size,)])
    ]
    resets = (random(rows, envs, 1, seed=seed + 5) > 1.0).float()
    return random(rows, envs, inputs, seed=seed + 6), resets, *(random(envs, size, seed=seed + k) for k in (7, 8)), weights


def reference(inputs, resets, hidden, cell, weights):
    """torch's cell in a loop, with the state set to 0 at reset steps."""
    outputs, cells = [], []
    for row, reset in zip(inputs, resets, strict=True):
        hidden, cell = torch.lstm_cell(row, (hidden, cell), *weights)
        hidden, cell = hidden * (1.0 - reset), cell * (1.0 - reset)
        outputs.append(hidden)
        cells.append(cell)
    return torch.stack(outputs), torch.stack(cells)


def run(function, inputs, resets, hidden, cell, weights, dtype=torch.float32):
    """Outputs, cells and the gradients of everything that has one."""
    leaves = [one.detach().to(dtype).requires_grad_() for one in (inputs, hidden, cell, *weights)]
    outputs, cells = function(leaves[0], resets.to(dtype), leaves[1], leaves[2], leaves[3:])
    grad_output = random(*outputs.shape, seed=99, dtype=dtype)
    return [outputs.detach(), cells.detach(), *torch.autograd.grad((outputs * grad_output).sum(), leaves)]


def close(found, expected):
    """Within the rounding of a sum over all steps and gates, which is what the gradient of a weight is."""
    steps, envs, size = expected[0].shape
    tolerance = rounding(steps * envs * 4 * size)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance * max(1.0, float(other.abs().max())), rtol=0.0)


def equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# Rows, environments, inputs, size: few environments, whose parts between resets run side by side.
FEW_ENVS = [(30, 1, 3, 5), (40, 2, 17, 16), (25, 4, 2, 33), (1, 1, 2, 8), (7, 3, 40, 64)]


def often(rows, envs, share, seed=0):
    """Resets as often as episodes end at first, also in the first and the last row."""
    resets = (torch.rand(rows, envs, 1, generator=torch.Generator().manual_seed(seed)) < share).float()
    resets[0, -1], resets[-1, 0] = 1.0, 1.0
    return resets


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("sizes", FEW_ENVS, ids=str)
def test_short_episodes_of_few_environments(sizes, share):
    inputs, _, *others = layer(*sizes)
    parts = inputs, often(*sizes[:2], share), *others
    close(run(lstm_layer, *parts), run(reference, *parts, dtype=torch.float64))


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("sizes", FEW_ENVS, ids=str)
def test_episodes_side_by_side_are_those_step_by_step(sizes, share):
    """With more environments beside them there are rows enough, and all go step by step: the bits are the same."""
    (rows, envs, _, size), idle = sizes, kernels.TALLEST
    inputs, _, hidden, cell, weights = layer(*sizes)
    resets, grad_output = often(rows, envs, share), random(rows, envs, size, seed=98)
    more = [torch.cat((x, x.new_zeros(*x.shape[:1], idle, *x.shape[2:])), 1) for x in (inputs, resets, grad_output)]
    more += [torch.cat((x, x.new_zeros(idle, size))) for x in (hidden, cell)]

    def states(inputs, resets, grad_output, hidden, cell):
        leaves = [x.clone().requires_grad_() for x in (inputs, hidden, cell)]
        outputs, cells = lstm_layer(leaves[0], resets, *leaves[1:], weights)
        grads = torch.autograd.grad((outputs * grad_output).sum(), leaves)
        return outputs[:, :envs], cells[:, :envs], grads[0][:, :envs], grads[1][:envs], grads[2][:envs]

    assert equal(states(inputs, resets, grad_output, hidden, cell), states(*more))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_size_is_torchs_cell_forwards_and_backwards(sizes):
    parts = layer(*sizes)
    close(run(lstm_layer, *parts), run(reference, *parts, dtype=torch.float64))


def strided(tensor):
    """The same numbers with gaps between them."""
    return torch.stack((tensor, torch.full_like(tensor, 7.0)), dim=-1)[..., 0]


def transposed(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("lay", [strided, transposed])
def test_inputs_resets_and_states_may_have_any_strides(lay):
    inputs, resets, hidden, cell, weights = layer(5, 4, 3, 6)
    plain, other = [], []
    for parts, found in (((inputs, resets, hidden, cell), plain), (tuple(map(lay, (inputs, resets, hidden, cell))), other)):
        leaves = [one.requires_grad_() for one in (parts[0], parts[2], parts[3])]
        outputs, cells = lstm_layer(leaves[0], parts[1], leaves[1], leaves[2], weights)
        grad_output = random(*outputs.shape, seed=3)
        found += [outputs.detach(), cells, *torch.autograd.grad((outputs * grad_output).sum(), leaves)]
    assert not lay(inputs).is_contiguous()
    assert equal(plain, other)


def test_an_expanded_state_is_read_as_it_is():
    """One state for all environments, as ``expand`` gives it: no storage of its own for each."""
    inputs, resets, hidden, cell, weights = layer(5, 4, 3, 6)
    wide = [one[:1].expand(4, 6) for one in (hidden, cell)]
    copies = [one.clone() for one in wide]
    assert equal(lstm_layer(inputs, resets, *wide, weights), lstm_layer(inputs, resets, *copies, weights))


def test_a_gradient_of_any_strides_flows_back():
    """What comes from above may be expanded, as the gradient of a sum is."""
    inputs, resets, hidden, cell, weights = layer(5, 4, 3, 6)
    found = []
    for total in (lambda out: out.sum(), lambda out: (out * torch.ones_like(out)).sum(), lambda out: out.transpose(0, 2).sum()):
        leaf = inputs.clone().requires_grad_()
        total(lstm_layer(leaf, resets, hidden, cell, weights)[0]).backward()
        found.append(leaf.grad)
    assert equal(found[1:], [found[0]] * 2)


# Several graphs at once.


def test_forward_passes_before_the_first_backward_do_not_disturb_one_another():
    first, second = layer(6, 3, 2, 5, seed=0), layer(6, 3, 2, 5, seed=50)
    alone = [run(lstm_layer, *parts) for parts in (first, second)]
    graphs = []
    for inputs, resets, hidden, cell, weights in (first, second, first):
        leaves = [one.detach().clone().requires_grad_() for one in (inputs, hidden, cell, *weights)]
        graphs.append((leaves, *lstm_layer(leaves[0], resets, leaves[1], leaves[2], leaves[3:])))
    for (leaves, outputs, cells), expected in zip(reversed(graphs), (alone[0], alone[1], alone[0]), strict=True):
        grad_output = random(*outputs.shape, seed=99)
        grads = torch.autograd.grad((outputs * grad_output).sum(), leaves)
        assert equal([outputs.detach(), cells, *grads], expected)


def test_one_layer_used_twice_adds_both_gradients():
    """Shared weights: the sum of what each use would give alone."""
    inputs, resets, hidden, cell, weights = layer(6, 3, 2, 5)
    leaf = weights[0].clone().requires_grad_()
    once = [lstm_layer(x, resets, hidden, cell, [leaf, *weights[1:]])[0].sum() for x in (inputs, -inputs)]
    separate = [
        torch.autograd.grad(lstm_layer(x, resets, hidden, cell, [leaf, *weights[1:]])[0].sum(), leaf)[0]
        for x in (inputs, -inputs)
    ]
    torch.testing.assert_close(torch.autograd.grad(sum(once), leaf)[0], separate[0] + separate[1])


def test_two_trunks_in_one_loss_have_the_gradients_of_each_alone():
    torch.manual_seed(0)
    trunks = [LstmTrunk(3, 5, n) for n in (1, 2)]
    inputs, resets = random(7, 4, 3, seed=1), torch.zeros(7, 4, 1)
    alone = [
        torch.autograd.grad(one.sequence(inputs, resets, one.initial_state(4)).square().sum(), list(one.parameters()))
        for one in trunks
    ]
    both = [one.sequence(inputs, resets, one.initial_state(4)) for one in trunks]
    grads = torch.autograd.grad(sum(out.square().sum() for out in both), [p for one in trunks for p in one.parameters()])
    assert equal(grads, [*alone[0], *alone[1]])


# Modes and threads.


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients_the_numbers_are_the_same(mode):
    torch.manual_seed(0)
    trunk = LstmTrunk(3, 5, 2)
    inputs, resets = random(7, 4, 3, seed=1), (random(7, 4, 1, seed=2) > 1.0).float()
    with_graph = trunk.sequence(inputs, resets, trunk.initial_state(4))
    with mode():
        state = trunk.initial_state(4)
        assert torch.equal(trunk.sequence(inputs, resets, state), with_graph)
        outputs = []
        for row, reset in zip(inputs, resets, strict=True):
            row_output, state = trunk.step(row, state)
            state = tuple(part * (1.0 - reset) for part in state)
            outputs.append(row_output * (1.0 - reset))
    torch.testing.assert_close(torch.stack(outputs), with_graph.detach(), atol=rounding(7 * 4 * 5), rtol=0.0)


def test_runs_repeat_bit_by_bit():
    parts = layer(50, 8, 9, 37)
    first = run(lstm_layer, *parts)
    assert all(equal(run(lstm_layer, *parts), first) for _ in range(3))


def test_two_threads_give_the_same_numbers():
    parts = layer(20, 8, 9, 37)
    single, before = run(lstm_layer, *parts), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [run(lstm_layer, *parts) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert equal(*found)
    close(found[0], single)


@pytest.mark.parametrize("size", [1, 7, 16])
def test_the_environments_of_a_batch_do_not_depend_on_their_number(size):
    """One environment alone is what it is among others, but for rounding in the matrix product."""
    inputs, resets, hidden, cell, weights = layer(10, 6, 3, size)
    whole = lstm_layer(inputs, resets, hidden, cell, weights)
    for b in range(6):
        own = (inputs[:, b : b + 1], resets[:, b : b + 1], hidden[b : b + 1], cell[b : b + 1], weights)
        close(lstm_layer(*own), [one[:, b : b + 1] for one in whole])
