"""Feed-forward networks, and the LSTM trunk: sequences with reset steps against a plain loop over time that resets states."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailguard.ppo.networks import LstmTrunk, mlp
from tolerance import rounding

# ------------------------------------------------------------------------------------------------------- feed-forward


@pytest.mark.parametrize("hidden", [[], [6], [6, 5]])
def test_layers_alternate_with_activations_and_the_last_is_linear(hidden):
    network = mlp([3, *hidden, 2], nn.ReLU, output_gain=1.0)
    assert [type(layer) for layer in network] == [nn.Linear, nn.ReLU] * len(hidden) + [nn.Linear]
    assert network(torch.zeros(7, 3)).shape == (7, 2)


def test_orthogonal_layers_keep_lengths_and_start_without_bias():
    """Rows are orthonormal times the gain: sqrt(2) inside, the given one at the end."""
    network = mlp([8, 6, 4], nn.Tanh, output_gain=0.01)
    for layer, gain in ((network[0], math.sqrt(2.0)), (network[2], 0.01)):
        torch.testing.assert_close(layer.weight @ layer.weight.T, gain**2 * torch.eye(len(layer.weight)), atol=1e-6, rtol=1e-4)
        assert (layer.bias == 0.0).all()


def test_plain_initialisation_is_pytorchs():
    torch.manual_seed(0)
    network = mlp([8, 6, 4], nn.Tanh, output_gain=0.01, orthogonal=False)
    torch.manual_seed(0)
    for layer, expected in ((network[0], nn.Linear(8, 6)), (network[2], nn.Linear(6, 4))):
        assert torch.equal(layer.weight, expected.weight)
        assert torch.equal(layer.bias, expected.bias)


def test_two_networks_made_in_a_row_differ():
    first, second = (mlp([4, 4, 1], nn.Tanh, 1.0) for _ in range(2))
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[2].weight, second[2].weight)


# --------------------------------------------------------------------------------------------------------------- LSTM

L, B, D, H = 7, 4, 3, 5

# Rows that are reset steps, for each of the four environments.
PLACES = {
    "none": [[], [], [], []],
    "inside": [[3], [], [2], [5]],
    "first row": [[0], [0], [], [4]],
    "last row": [[6], [], [6], [1]],
    "consecutive": [[2, 3, 4], [0, 1], [5, 6], []],
    "everywhere": [list(range(L)), [0, 2, 4, 6], [1, 3, 5], list(range(L))],
}


# The compiled kernel, and torch's own LSTM in both precisions.
TERMS = L * B * 4 * H  # of the gradient of a weight; the outputs are shorter sums
SINGLE, DOUBLE = rounding(TERMS), rounding(TERMS, np.float64)
ENGINES = [(True, torch.float32, SINGLE), (False, torch.float32, SINGLE), (False, torch.float64, DOUBLE)]


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_trunk(n_layers, dtype=torch.float32, compiled=True):
    torch.manual_seed(1)
    trunk = LstmTrunk(D, H, n_layers, compiled).to(dtype)
    state = (random(n_layers, B, H, seed=2, dtype=dtype), random(n_layers, B, H, seed=3, dtype=dtype))
    return trunk, random(L, B, D, seed=4, dtype=dtype), state


def make_resets(rows, dtype=torch.float32):
    resets = torch.zeros(L, B, 1, dtype=dtype)
    for env, places in enumerate(rows):
        resets[places, env] = 1.0
    return resets


def loop(trunk, inputs, resets, state):
    """PyTorch's own LSTM one step at a time; at a reset step the state is set to zero and nothing is read."""
    layers = [nn.LSTMCell(D if layer == 0 else H, H).to(inputs.dtype) for layer in range(trunk.n_layers)]
    hidden, cells = list(state[0]), list(state[1])
    outputs, states = [], []
    for row, reset in zip(inputs, resets.bool(), strict=True):
        for layer, cell in enumerate(layers):
            parameters = {name: getattr(trunk.lstm, f"{name}_l{layer}") for name, _ in cell.named_parameters()}
            row, new = torch.func.functional_call(cell, parameters, (row, (hidden[layer], cells[layer])))
            zero = torch.zeros_like(row)
            hidden[layer], cells[layer] = torch.where(reset, zero, row), torch.where(reset, zero, new)
            row = hidden[layer]
        outputs.append(row)
        states.append((torch.stack(hidden), torch.stack(cells)))
    return torch.stack(outputs), states


def gradients(trunk, inputs, state, outputs):
    weights = random(*outputs.shape, seed=5, dtype=outputs.dtype)
    return torch.autograd.grad((outputs * weights).sum(), [inputs, *state, *trunk.parameters()])


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("rows", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("compiled", "dtype", "tolerance"), ENGINES, ids=["kernel", "float32", "float64"])
def test_sequence_is_the_step_loop_forwards_and_backwards(n_layers, rows, compiled, dtype, tolerance):
    trunk, inputs, state = make_trunk(n_layers, dtype, compiled)
    resets = make_resets(rows, dtype)
    leaves = [inputs, *state]
    for leaf in leaves:
        leaf.requires_grad_()
    whole, (stepped, _) = trunk.sequence(inputs, resets, state), loop(trunk, inputs, resets, state)
    torch.testing.assert_close(whole, stepped, atol=tolerance, rtol=0.0)
    pairs = zip(gradients(trunk, inputs, state, whole), gradients(trunk, inputs, state, stepped), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("compiled", "dtype", "tolerance"), ENGINES, ids=["kernel", "float32", "float64"])
@given(pattern=st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=L, max_size=L), n_layers=st.integers(1, 2))
@settings(max_examples=50, deadline=None)
def test_sequence_is_the_step_loop_wherever_the_resets_are(compiled, dtype, tolerance, pattern, n_layers):
    trunk, inputs, state = make_trunk(n_layers, dtype, compiled)
    resets = torch.tensor(pattern, dtype=dtype).unsqueeze(-1)
    expected, _ = loop(trunk, inputs, resets, state)
    torch.testing.assert_close(trunk.sequence(inputs, resets, state), expected, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_step_is_pytorchs_own_lstm(n_layers, compiled):
    trunk, inputs, state = make_trunk(n_layers, compiled=compiled)
    expected, (hidden, cell) = trunk.lstm(inputs[:1], state)
    output, after = trunk.step(inputs[0], state)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(after, (hidden, cell))


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("hidden_size", [5, 64])
@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_reset_steps_give_exactly_zero_whatever_was_before(n_layers, learning, hidden_size, compiled):
    """In training and in evaluation: PyTorch takes different kernels for the two."""
    torch.manual_seed(1)
    trunk = LstmTrunk(D, hidden_size, n_layers, compiled).train(learning)
    resets = make_resets(PLACES["consecutive"])
    state = (torch.full((n_layers, B, hidden_size), 1e3), torch.full((n_layers, B, hidden_size), -1e3))
    with torch.set_grad_enabled(learning):
        outputs = trunk.sequence(1e3 * random(L, B, D, seed=4), resets, state)
    reset_rows = resets.squeeze(-1).bool()
    assert (outputs[reset_rows] == 0.0).all()
    assert (outputs[~reset_rows] != 0.0).any()


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_nothing_before_a_reset_step_has_an_effect_after_it(n_layers, compiled):
    """Bit for bit: another past gives the same outputs, and the gradient with respect to the past is exactly zero."""
    trunk, inputs, state = make_trunk(n_layers, compiled=compiled)
    resets = make_resets([[3]] * B)
    other = inputs.clone()
    other[:3] = random(3, B, D, seed=9) * 50.0
    far = (state[0] - 3.0, state[1] * 7.0)
    assert torch.equal(trunk.sequence(inputs, resets, state)[4:], trunk.sequence(other, resets, far)[4:])

    leaves = [inputs.requires_grad_(), *(part.requires_grad_() for part in state)]
    late = trunk.sequence(inputs, resets, state)[4:].square().sum()
    past, *initial = torch.autograd.grad(late, leaves)
    assert (past[:4] == 0.0).all()
    assert (past[4:] != 0.0).all()
    assert all((gradient == 0.0).all() for gradient in initial)


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_the_input_of_a_reset_step_is_ignored(compiled):
    trunk, inputs, state = make_trunk(2, compiled=compiled)
    resets = make_resets(PLACES["inside"])
    changed = torch.where(resets.bool(), 20.0, inputs)
    assert torch.equal(trunk.sequence(changed, resets, state), trunk.sequence(inputs, resets, state))


@pytest.mark.parametrize(("compiled", "dtype", "tolerance"), ENGINES, ids=["kernel", "float32", "float64"])
@given(rows=st.lists(st.integers(0, L - 1), min_size=B, max_size=B), places=st.sampled_from(sorted(PLACES)))
@settings(max_examples=60, deadline=None)
def test_states_after_chosen_rows_are_those_of_the_step_loop(compiled, dtype, tolerance, rows, places):
    trunk, inputs, state = make_trunk(2, dtype, compiled)
    resets = make_resets(PLACES[places], dtype)
    expected, states = loop(trunk, inputs, resets, state)
    outputs, (hidden, cell) = trunk.sequence_and_states(inputs, resets, state, torch.tensor(rows))
    torch.testing.assert_close(outputs, expected, atol=tolerance, rtol=0.0)
    for env, row in enumerate(rows):
        torch.testing.assert_close(hidden[:, env], states[row][0][:, env], atol=tolerance, rtol=0.0)
        torch.testing.assert_close(cell[:, env], states[row][1][:, env], atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("env", range(B))
@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_one_environment_never_changes_another(env, compiled):
    trunk, inputs, state = make_trunk(2, compiled=compiled)
    rows = torch.tensor([6, 5, 6, 4])
    others = [i for i in range(B) if i != env]
    resets = make_resets(PLACES["inside"])
    before, states_before = trunk.sequence_and_states(inputs, resets, state, rows)

    inputs[:, env] += 5.0
    state[0][:, env] -= 1.0
    resets[:, env] = 1.0 - resets[:, env]
    after, states_after = trunk.sequence_and_states(inputs, resets, state, rows)
    assert torch.equal(after[:, others], before[:, others])
    assert not torch.equal(after[:, env], before[:, env])
    for old, new in zip(states_before, states_after, strict=True):
        assert torch.equal(new[:, others], old[:, others])


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_permuting_environments_permutes_the_outputs(compiled):
    trunk, inputs, state = make_trunk(2, compiled=compiled)
    resets, rows, order = make_resets(PLACES["consecutive"]), torch.tensor([6, 3, 4, 6]), torch.tensor([2, 0, 3, 1])
    outputs, states = trunk.sequence_and_states(inputs, resets, state, rows)
    turned = (state[0][:, order], state[1][:, order])
    permuted, states_permuted = trunk.sequence_and_states(inputs[:, order], resets[:, order], turned, rows[order])
    torch.testing.assert_close(permuted, outputs[:, order], atol=SINGLE, rtol=0.0)
    for got, expected in zip(states_permuted, states, strict=True):
        torch.testing.assert_close(got, expected[:, order], atol=SINGLE, rtol=0.0)


@pytest.mark.parametrize(("compiled", "dtype", "tolerance"), ENGINES, ids=["kernel", "float32", "float64"])
def test_a_sequence_can_be_cut_anywhere_and_carried_on(compiled, dtype, tolerance):
    trunk, inputs, state = make_trunk(2, dtype, compiled)
    resets = make_resets(PLACES["inside"], dtype)
    whole = trunk.sequence(inputs, resets, state)
    for cut in range(1, L):
        head, middle = trunk.sequence_and_states(inputs[:cut], resets[:cut], state, torch.full((B,), cut - 1))
        tail = trunk.sequence(inputs[cut:], resets[cut:], middle)
        torch.testing.assert_close(torch.cat((head, tail)), whole, atol=tolerance, rtol=0.0)


def test_the_initial_state_is_zero_fresh_and_of_the_modules_type():
    trunk = LstmTrunk(D, H, 2).double()
    hidden, cell = trunk.initial_state(B)
    assert hidden.shape == cell.shape == (2, B, H)
    assert hidden.dtype == torch.float64
    hidden += 1.0
    assert (cell == 0.0).all()
    assert all((part == 0.0).all() for part in trunk.initial_state(B))


def test_parameters_carry_pytorchs_names():
    assert {name for name, _ in LstmTrunk(D, H, 2).named_parameters()} == {
        f"lstm.{name}" for name, _ in nn.LSTM(D, H, 2).named_parameters()
    }


@pytest.mark.parametrize("n_layers", [1, 2])
def test_the_forget_bias_is_added_to_the_forget_gates_of_every_layer_and_to_nothing_else(n_layers):
    plain, keeping = (torch.manual_seed(0) and LstmTrunk(D, H, n_layers, forget_bias=bias) for bias in (0.0, 1.5))
    for (name, before), after in zip(plain.named_parameters(), keeping.parameters(), strict=True):
        added = torch.zeros_like(before)
        if name.startswith("lstm.bias_ih"):
            added[H : 2 * H] = 1.5
        torch.testing.assert_close(after - before, added, rtol=0.0, atol=1e-6)


def test_a_gradient_is_taken_once():
    trunk, inputs, state = make_trunk(1)
    outputs = trunk.sequence(inputs, make_resets(PLACES["none"]), state)
    outputs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run it forward again"):
        outputs.sum().backward()


@pytest.mark.parametrize("size", [1, 3, 16, 37])
def test_the_kernel_agrees_with_double_precision_at_any_size(size):
    """Long sequences, large inputs, states far out: as close to float64 as torch's own float32 LSTM, give or take."""
    torch.manual_seed(0)
    trunk = LstmTrunk(D, size, 1)
    inputs, resets = 3.0 * random(200, B, D, seed=1), (random(200, B, 1, seed=2) > 2.0).float()
    state = (random(1, B, size, seed=3), 30.0 * random(1, B, size, seed=4))
    grad_output = random(200, B, size, seed=5)

    def run(dtype, compiled):
        trunk.compiled = compiled
        trunk.to(dtype).zero_grad()
        outputs = trunk.sequence(inputs.to(dtype), resets.to(dtype), (state[0].to(dtype), state[1].to(dtype)))
        (outputs * grad_output.to(dtype)).sum().backward()
        return [outputs.detach().double(), *(p.grad.double().clone() for p in trunk.parameters())]

    exact, torchs, ours = run(torch.float64, False), run(torch.float32, False), run(torch.float32, True)
    for truth, theirs, mine in zip(exact, torchs, ours, strict=True):
        scale = truth.abs().max()
        assert (mine - truth).abs().max() <= 4.0 * (theirs - truth).abs().max() + 1e-6 * scale


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_or_saturates(value):
    """A NaN must come out as a NaN, for the guard that skips such steps; an infinity shuts or opens its gates."""
    trunk, inputs, state = make_trunk(1)
    inputs[2, 1, 0] = value
    outputs = trunk.sequence(inputs, make_resets(PLACES["none"]), state)
    trunk.compiled = False
    expected = trunk.sequence(inputs, make_resets(PLACES["none"]), state)
    torch.testing.assert_close(outputs, expected, equal_nan=True, atol=1e-6, rtol=0.0)
