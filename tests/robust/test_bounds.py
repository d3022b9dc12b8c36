"""Interval bounds: exact where they can be, and never broken by an attack."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailguard.robust import PerturbationConfig, StatePerturbation
from tailguard.robust.attacks import divergence, low_value
from tailguard.robust.bounds import certifiable, gaussian_kl_bound, interval_bounds, largest_move

ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus)


def test_one_affine_layer_and_a_growing_activation_are_exact():
    torch.manual_seed(0)
    layer, x, radius = nn.Linear(5, 3), torch.randn(7, 5), torch.tensor([0.1, 0.0, 0.3, 0.2, 0.5])
    reach = layer.weight.abs() @ radius
    low, high = interval_bounds(nn.Sequential(layer, nn.Tanh()), x, radius)
    torch.testing.assert_close(high, torch.tanh(layer(x) + reach))
    torch.testing.assert_close(low, torch.tanh(layer(x) - reach))
    torch.testing.assert_close(largest_move(layer, x, radius), reach.expand(7, 3))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    activation=st.sampled_from(ACTIVATIONS),
    epsilon=st.floats(0.0, 2.0),
    norm=st.sampled_from(["linf", "l2"]),
    depth=st.integers(0, 3),
)
def test_no_attack_breaks_a_bound(seed, activation, epsilon, norm, depth):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(4, 4), activation())]
    net = nn.Sequential(*layers, nn.Linear(4, 2)).double()
    x, log_std = torch.randn(6, 4, dtype=torch.float64), torch.tensor([-0.5, 0.2], dtype=torch.float64)
    attack = StatePerturbation(PerturbationConfig(epsilon=epsilon, steps=10, norm=norm), 4, generator=generator)
    low, high = interval_bounds(net, x, attack.radius().double())

    def kl(old, new):
        return 0.5 * ((old - new) * torch.exp(-log_std)).square().sum(-1)

    bound = gaussian_kl_bound(largest_move(net, x, attack.radius().double()), log_std)
    found = attack.attack(x, divergence(net, net(x), kl))
    assert (found.gain <= bound + 1e-9).all()
    for k in range(2):
        lowest = net(attack.attack(x, low_value(lambda moved, k=k: net(moved)[:, k])).inputs)[:, k]
        highest = net(attack.attack(x, low_value(lambda moved, k=k: -net(moved)[:, k])).inputs)[:, k]
        assert (low[:, k] - 1e-9 <= lowest).all()
        assert (highest <= high[:, k] + 1e-9).all()


def test_an_activation_that_turns_round_is_refused():
    assert certifiable(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert not certifiable(nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    with pytest.raises(ValueError, match="no bounds for a GELU"):
        interval_bounds(nn.Sequential(nn.GELU()), torch.zeros(1, 2), torch.ones(2))
