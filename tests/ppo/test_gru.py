"""GRU trunks: torch's own cell step by step, resets that are exact, and an agent that acts and learns with the same state."""

import numpy as np
import pytest
import torch
from torch import nn

from tailguard import DistributionalPPO
from tailguard.ppo.compiled.applies import acting_applies, update_applies
from tailguard.ppo.networks import GruTrunk
from tolerance import rounding

L, B, D, H = 9, 3, 4, 5
RESETS = [[0, 4], [], [2, 3, 8]]


def example(n_layers, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    trunk = GruTrunk(D, H, n_layers).to(dtype)
    inputs, hidden = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((L, B, D), (n_layers, B, H)))
    resets = torch.zeros(L, B, 1, dtype=dtype)
    for env, rows in enumerate(RESETS):
        resets[rows, env] = 1.0
    return trunk, inputs, resets, (hidden, torch.zeros_like(hidden))


def loop(trunk, inputs, resets, state):
    """PyTorch's cell one step at a time; at a reset step the state is set to zero and nothing is read."""
    cells = [nn.GRUCell(D if layer == 0 else H, H).to(inputs.dtype) for layer in range(trunk.n_layers)]
    hidden, outputs, states = list(state[0]), [], []
    for row, reset in zip(inputs, resets.bool(), strict=True):
        states.append(torch.stack(hidden))
        for layer, cell in enumerate(cells):
            parameters = {name: getattr(trunk.gru, f"{name}_l{layer}") for name, _ in cell.named_parameters()}
            new = torch.func.functional_call(cell, parameters, (row, hidden[layer]))
            hidden[layer] = row = torch.where(reset, torch.zeros_like(new), new)
        outputs.append(row)
    return torch.stack(outputs), torch.stack([*states[1:], torch.stack(hidden)]), torch.stack(states)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sequences_are_the_step_loop_forwards_and_backwards(n_layers, dtype):
    trunk, inputs, resets, state = example(n_layers, dtype)
    tolerance = rounding(L * B * 3 * H, np.float32 if dtype == torch.float32 else np.float64)
    leaves = [inputs.requires_grad_(), state[0].requires_grad_(), *trunk.parameters()]
    whole, (stepped, _, _) = trunk.sequence(inputs, resets, state), loop(trunk, inputs, resets, state)
    torch.testing.assert_close(whole, stepped, atol=tolerance, rtol=0.0)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    for got, expected in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (whole, stepped)), strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("n_layers", [1, 2])
def test_states_are_those_of_the_step_loop(n_layers):
    trunk, inputs, resets, state = example(n_layers)
    _, after, before = loop(trunk, inputs, resets, state)
    rows = torch.tensor([8, 5, 6])
    _, (hidden, cell) = trunk.sequence_and_states(inputs, resets, state, rows)
    torch.testing.assert_close(hidden, after[rows, :, torch.arange(B)].transpose(0, 1))
    assert (cell == 0.0).all()
    starts, _ = trunk.states_before(inputs, resets, state)
    torch.testing.assert_close(starts.unflatten(1, (L, B)).transpose(0, 1), before)


def test_nothing_before_a_reset_step_has_an_effect_after_it():
    """Bit for bit, and the gradient with respect to the past and to the biases of reset steps is exactly zero."""
    trunk, inputs, resets, state = example(2)
    resets[:] = 0.0
    resets[3] = 1.0
    other = inputs.clone()
    other[:4] = 50.0
    assert torch.equal(trunk.sequence(inputs, resets, state)[4:], trunk.sequence(other, resets, (state[0] - 3.0, state[1]))[4:])
    resets[:] = 1.0
    outputs = trunk.sequence(1e3 * inputs, resets, (1e3 + state[0], state[1]))
    assert (outputs == 0.0).all()
    for gradient in torch.autograd.grad(outputs.sum(), list(trunk.parameters())):
        assert (gradient == 0.0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_agents_with_a_gru_learn_save_and_act(shared, tmp_path):
    kwargs = {"recurrent_cell": "gru", "lstm_hidden_size": 8, "net_arch": [8], "shared_lstm": shared}
    model = DistributionalPPO(
        "MlpLstmPolicy", "CartPole-v1", n_steps=64, n_epochs=1, learning_rate=0.0, policy_kwargs=kwargs, seed=0
    )
    assert isinstance(model.policy.actor_trunk, GruTrunk)
    assert not acting_applies(model.policy)
    assert not update_applies(model.policy)
    model.learn(128)  # episodes end inside the rollout
    assert model.logger.name_to_value["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    model.learning_rate = 1e-3
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(128)
    assert all((new != old).any() for new, old in zip(model.policy.parameters(), before, strict=True))
    model.save(tmp_path / "gru")
    loaded = DistributionalPPO.load(tmp_path / "gru")
    obs, state, other = np.ones((2, 4), np.float32), None, None
    for _ in range(3):
        action, state = model.predict(obs, state, deterministic=True)
        same, other = loaded.predict(obs, other, deterministic=True)
        np.testing.assert_array_equal(action, same)
        np.testing.assert_array_equal(state[0], other[0])


def test_settings_that_a_gru_does_not_have_are_refused():
    with pytest.raises(ValueError, match="recurrent_cell"):
        DistributionalPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs={"recurrent_cell": "rnn"})
    with pytest.raises(ValueError, match="lstm_forget_bias"):
        DistributionalPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs={"recurrent_cell": "gru", "lstm_forget_bias": 1.0})
