"""The compiled search against torch's autograd: the same objectives, gradients and penalty."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tailguard.optim.layout import FlatParameters
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.compiled.attack import CompiledObjective, View, compiled_actor
from tailguard.ppo.config import CriticConfig
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy
from tailguard.ppo.rollout import Batch
from tailguard.robust import SAPPOConfig

L, B, D, H = 9, 5, 4, 6
SPACES = {
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "choice": spaces.Discrete(3),
    "choices": spaces.MultiDiscrete([2, 3, 1]),
}


def build(recurrent, actions="box", **settings):
    """A policy whose outputs spread, its flat parameters, and a batch with a reset in the middle of one sequence."""
    torch.manual_seed(0)
    kind = RecurrentDistributionalPolicy if recurrent else DistributionalPolicy
    options = {"critic": CriticConfig(), "net_arch": [7, 5], "log_std_init": -0.7, **settings}
    policy = kind(spaces.Box(-9.0, 9.0, (D,), np.float32), SPACES[actions], lstm_hidden_size=H, **options)
    policy.actor[-1].weight.data *= 60.0
    flat = FlatParameters(policy)
    generator = torch.Generator().manual_seed(1)
    lead = (L, B) if recurrent else (L * B,)
    obs, weights = torch.randn(*lead, D, generator=generator), torch.rand(lead, generator=generator)
    resets, state, nothing = torch.empty(0), [torch.empty(0)] * 4, torch.empty(0)
    if recurrent:
        resets = torch.zeros(L, B, 1)
        resets[4, 2] = 1.0
        weights[3:5, 2] = 0.0
        state = [0.5 * torch.randn(1, B, H, generator=generator) for _ in range(4)]
    dist_params = torch.zeros(*lead, policy.action_dist.n_params)
    actions = torch.zeros(*lead, *policy.action_dist.action_shape)
    return policy, flat, Batch(obs, actions, dist_params, torch.zeros(lead), weights, nothing, nothing, resets, *state)


CASES = [
    (recurrent, memory, actions)
    for recurrent, memory in ((False, "whole"), (True, "whole"), (True, "step"))
    for actions in SPACES
]


@pytest.mark.parametrize(("recurrent", "memory", "actions"), CASES)
@pytest.mark.parametrize("objective", ["kl", "action"])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_gradients_are_those_of_autograd(recurrent, memory, actions, objective, activation):
    policy, flat, batch = build(recurrent, actions, activation_fn=activation)
    settings = SAPPOConfig(memory=memory, objective=objective, epsilon=0.3, warmup_updates=0)
    adversary = Adversary(policy, settings, 0)
    with torch.no_grad():
        clean = adversary._dist_params(batch)
    goal = adversary._goal(objective, clean)
    compiled_objective = CompiledObjective(compiled_actor(policy, flat), goal, objective == "kl", adversary._view(batch))
    reference = adversary._objective(batch, clean)
    points = [batch.obs + 0.4 * torch.randn(batch.obs.shape, generator=torch.Generator().manual_seed(k)) for k in (2, 3)]
    values = []
    for point in points:
        grad, value = compiled_objective.gradient(point)
        leaf = point.clone().requires_grad_()
        expected = reference(leaf)
        (expected_grad,) = torch.autograd.grad(expected.sum(), leaf)
        scale = expected_grad.abs().max()
        assert scale > 1e-3
        torch.testing.assert_close(grad, expected_grad, rtol=1e-3, atol=1e-4 * scale.item())
        torch.testing.assert_close(compiled_objective(point), value)
        values.append((value, expected.detach()))
    # The constant of a density drops out between two points.
    gains = [values[1][which] - values[0][which] for which in (0, 1)]
    torch.testing.assert_close(*gains, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("recurrent", "memory", "actions"), CASES)
def test_the_gradient_of_the_penalty_is_added_to_what_is_there(recurrent, memory, actions):
    gradients, metrics = [], []
    for compiled in (True, False):
        policy, flat, batch = build(recurrent, actions)
        settings = SAPPOConfig(memory=memory, epsilon=0.3, warmup_updates=0, coefficient=2.0, adversarial_ratio=0.6)
        adversary = Adversary(policy, settings, 0, flat if compiled else None)
        adversary.begin(10)
        flat.gradient.fill_(0.25)
        adversary.add_gradient(batch, batch.weights / batch.weights.sum())
        gradients.append(flat.gradient - 0.25)
        metrics.append(adversary.metrics())
        critics = [flat.slices[name] for name in flat.slices if name.startswith(("critic", "log_std"))]
        assert all((flat.gradient[part] == 0.25).all() for part in critics)
    one, other = gradients
    assert other.norm() > 0.01
    assert (one - other).norm() < 0.01 * other.norm()  # where a gradient is all but 0 its sign is a matter of rounding
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-2)


@pytest.mark.parametrize("actions", SPACES)
def test_samples_that_do_not_count_add_nothing(actions):
    policy, flat, batch = build(True, actions)
    adversary = Adversary(policy, SAPPOConfig(epsilon=0.3, warmup_updates=0, coefficient=10.0), 0, flat)
    adversary.begin(10)
    flat.gradient.fill_(0.25)
    adversary.add_gradient(dataclasses.replace(batch, weights=torch.zeros_like(batch.weights)), torch.zeros_like(batch.weights))
    assert (flat.gradient == 0.25).all()


def test_a_certain_choice_keeps_its_gradient():
    """Logits (w x, 0) 60 apart: -log q = log(1 + e^m) - m, whose derivative in x is -w e^-60."""
    policy = DistributionalPolicy(
        spaces.Box(-99.0, 99.0, (1,), np.float32), spaces.Discrete(2), critic=CriticConfig(), net_arch=[]
    )
    with torch.no_grad():
        policy.actor[0].weight.copy_(torch.tensor([[3.0], [0.0]]))
        policy.actor[0].bias.zero_()
    actor = compiled_actor(policy, FlatParameters(policy))
    compiled_objective = CompiledObjective(actor, torch.zeros(1, 1), True, View(policy.initial_state(1)))
    grad, value = compiled_objective.gradient(torch.tensor([[20.0]]))
    np.testing.assert_allclose(value.item(), np.exp(-60.0), rtol=1e-4)
    np.testing.assert_allclose(grad.item(), -3.0 * np.exp(-60.0), rtol=1e-4)


def test_what_it_does_not_cover_is_left_to_torch():
    policy, flat, _ = build(True)
    assert compiled_actor(policy, flat) is not None
    for settings in ({"compiled": False}, {"n_lstm_layers": 2}, {"state_dependent_std": True}, {"activation_fn": nn.ELU}):
        policy, flat, batch = build(True, **settings)
        assert compiled_actor(policy, flat) is None
    policy, flat, batch = build(False, activation_fn=nn.ELU)
    adversary = Adversary(policy, SAPPOConfig(epsilon=0.3, warmup_updates=0), 0, flat)
    adversary.begin(10)
    adversary.add_gradient(batch, batch.weights / batch.weights.sum())
    assert flat.gradient.any()


def test_the_passes_change_no_parameter_and_no_gradient():
    policy, flat, batch = build(True)
    flat.gradient.fill_(0.5)
    before = copy.deepcopy(policy.state_dict())
    compiled_objective = CompiledObjective(
        compiled_actor(policy, flat), batch.actions, False, View((batch.actor_hidden, batch.actor_cell), batch.resets)
    )
    kept = batch.obs.clone()
    compiled_objective.gradient(batch.obs)
    assert torch.equal(batch.obs, kept)
    assert (flat.gradient == 0.5).all()
    assert all(torch.equal(one, other) for one, other in zip(before.values(), policy.state_dict().values(), strict=True))
