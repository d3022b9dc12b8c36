"""Feed-forward networks, and the one flat tensor that holds all parameters of a model."""

import copy
import math

import pytest
import torch
from torch import nn

from tailguard.ppo.networks import FlatParameters, mlp


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


# mlp.


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


# FlatParameters.


def test_flattening_keeps_every_value_under_its_name():
    module = small()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    flat = FlatParameters(module)
    assert list(flat.slices) == list(before)
    assert flat.tensor.numel() == sum(parameter.numel() for parameter in before.values())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert torch.equal(flat.tensor[flat.slices[name]], before[name].flatten())


def test_a_step_on_the_flat_tensor_moves_the_module_as_a_step_on_its_parameters():
    module, plain = small(), small()
    flat = FlatParameters(module)
    optimizers = [torch.optim.Adam([flat.tensor], lr=0.1), torch.optim.Adam(plain.parameters(), lr=0.1)]
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        flat.zero_grad()
        optimizers[1].zero_grad()
        for one, optimizer in zip((module, plain), optimizers, strict=True):
            one(inputs).square().sum().backward()
            optimizer.step()
    for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


def test_gradients_live_in_the_flat_tensor_and_add_up():
    module, inputs = small(), torch.ones(1, 3)
    flat = FlatParameters(module)
    module(inputs).sum().backward()
    once = flat.gradient.clone()
    assert (once != 0.0).any()
    module(inputs).sum().backward()
    torch.testing.assert_close(flat.gradient, 2.0 * once)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad.flatten(), flat.gradient[flat.slices[name]])
    flat.zero_grad()
    assert all((parameter.grad == 0.0).all() for parameter in module.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_cleared_the_usual_way_come_back(set_to_none):
    module = small()
    flat = FlatParameters(module)
    module.zero_grad(set_to_none=set_to_none)
    torch.optim.SGD([flat.tensor]).zero_grad(set_to_none=set_to_none)
    flat.zero_grad()
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]), flat.gradient)
    assert flat.tensor.grad is flat.gradient
    assert (flat.gradient != 0.0).any()


def test_loading_weights_goes_through_to_the_flat_tensor():
    module, source = small(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    flat = FlatParameters(module)
    module.load_state_dict(copy.deepcopy(source.state_dict()))
    assert torch.equal(flat.tensor, nn.utils.parameters_to_vector(source.parameters()))
