"""The one flat tensor that holds all parameters of a model."""

import copy

import pytest
import torch
from torch import nn

from tailguard.optim.layout import FlatParameters


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


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
        for network, optimizer in zip((module, plain), optimizers, strict=True):
            network(inputs).square().sum().backward()
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
