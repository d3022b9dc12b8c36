"""Searches against policies that are all but certain, whose KL is lost in the rounding of float32."""

import pytest
import torch
from gymnasium import spaces

from tailguard.ppo.actions import action_distribution
from tailguard.robust import PerturbationConfig, StatePerturbation
from tailguard.robust.attacks import divergence

COUNTS = [2, 3, 1]
CHOICE = action_distribution(spaces.Discrete(2))
SEVERAL = action_distribution(spaces.MultiDiscrete(COUNTS))


def logits(seed, size=6):
    return torch.randn(50, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_sharp_kl_is_the_kl_and_the_surprise_is_that_of_the_favourite():
    old, new = 3.0 * logits(0), 3.0 * logits(1)
    torch.testing.assert_close(SEVERAL.sharp_kl(old, new), SEVERAL.kl(old, new))
    torch.testing.assert_close(SEVERAL.surprise(old, new), -SEVERAL.log_prob(new, SEVERAL.mode(old)))


def test_they_keep_their_digits_where_the_policy_is_all_but_certain():
    """Against float64, with logits 12 to 80 apart and moved by up to 1."""
    margin = torch.linspace(12.0, 80.0, 50, dtype=torch.float64)
    old = torch.stack((margin, torch.zeros(50, dtype=torch.float64)), -1)
    new = old + torch.tensor([-1.0, 0.5])
    # d = log(1 + e^-m) has no closed form without cancellation but its series, which is exact to 1e-10 from m = 12 on
    p, q = torch.exp(-margin), torch.exp(-margin + 1.5)
    expected = q - p - p * 1.5
    for kl in (CHOICE.sharp_kl(old.float(), new.float()), CHOICE.sharp_kl(old, new)):
        torch.testing.assert_close(kl.double(), expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(CHOICE.surprise(old.float(), new.float()).double(), q, rtol=1e-4, atol=0.0)
    rounded = CHOICE.kl(old.float(), new.float())
    assert (rounded[margin > 18.0] <= 0.0).all()  # what the usual form makes of it


@pytest.mark.parametrize("goal", ["surprise", "sharp_kl"])
def test_the_gradient_is_alive_at_a_margin_of_40(goal):
    old = torch.tensor([[40.0, 0.0]])
    new = torch.tensor([[39.0, 0.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(getattr(CHOICE, goal)(old, new).sum(), new)
    assert grad[0, 0] < 0.0 < grad[0, 1]  # less of the favourite is a gain
    torch.testing.assert_close(grad.sum(), torch.tensor(0.0))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_certain_policy_is_turned_wherever_it_can_be(norm):
    """z = (w x, 0), 40 apart; the ball holds a point where the other choice wins, for any start."""
    w = torch.tensor([30.0, -50.0, 1.0])
    x = (w / w.square().sum() * 40.0).expand(200, 3)  # w x = 40
    radius = 40.0 / w.norm(p=1.0 if norm == "linf" else 2.0).item() * 1.05

    def outputs_of(inputs):
        preferred = inputs @ w
        return torch.stack((preferred, torch.zeros_like(preferred)), -1)

    clean = outputs_of(x)
    torch.testing.assert_close(clean[:, 0], torch.full((200,), 40.0))
    config = PerturbationConfig(epsilon=radius, steps=20, norm=norm)
    turned = {}
    for name, goal in (("surprise", CHOICE.surprise), ("kl", CHOICE.kl)):
        found = StatePerturbation(config, 3).attack(x, divergence(outputs_of, clean, goal))
        turned[name] = (CHOICE.mode(outputs_of(found.inputs)) == 1.0).float().mean().item()
    assert turned["surprise"] == 1.0
    assert turned["kl"] < 0.9  # climbs to more of the same from half of the starts
