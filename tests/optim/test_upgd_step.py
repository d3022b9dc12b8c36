"""The gate of UPGD: the effect of utility on a step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailguard.optim import UPGD

LEAST, MOST = 1.0 / (1.0 + math.e), 1.0 / (1.0 + math.exp(-1.0))  # sigmoid(-1) and sigmoid(1)


def step_with_utilities(utilities, gate="minmax", beta=0.9, steps=1, implementation="single", dtype=torch.float64):
    """An UPGD optimizer after `steps` steps whose corrected utilities are these: weights 1 that do not move, gradient -u."""
    param = nn.Parameter(torch.ones(len(utilities), dtype=dtype))
    optimizer = UPGD([param], lr=0.0, sigma=0.0, beta_utility=beta, gate=gate, implementation=implementation)
    for _ in range(steps):
        param.grad = -torch.tensor(utilities, dtype=dtype)
        optimizer.step()
    return optimizer, param


def protection(utilities, **options):
    optimizer, param = step_with_utilities(utilities, **options)
    return optimizer.protection(param).double().numpy()


@settings(deadline=None)  # the first example may compile
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=8, unique=True))
def test_more_useful_is_more_protected(utilities):
    """R064: also where all utilities are negative; the range is [sigmoid(-1), sigmoid(1)] and its ends are reached."""
    s = protection([float(utility) for utility in utilities])
    order = np.argsort(utilities)
    assert (np.diff(s[order]) >= 0.0).all()
    assert s[order[0]] == pytest.approx(LEAST, abs=1e-5)
    assert s[order[-1]] == pytest.approx(MOST, abs=1e-5)


def test_negative_utilities_keep_their_order():
    """R064: dividing by a negative maximum would turn it round."""
    s = protection([-4.0, -1.0, -2.0])
    np.testing.assert_allclose(s, [LEAST, MOST, 1.0 / (1.0 + math.exp(-2.0 * (2.0 / 3.0 - 0.5)))], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
@pytest.mark.parametrize("utility", [0.0, 1e-3, -7.3, 1e-20])
@pytest.mark.parametrize("steps", [1, 10])
def test_equal_utilities_are_neutral(implementation, utility, steps):
    """R065: exactly 1/2, and the step is exactly SGD's."""
    dtype = torch.float32
    optimizer, param = step_with_utilities([utility] * 5, steps=steps, implementation=implementation, dtype=dtype)
    assert (optimizer.protection(param) == 0.5).all()
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0)
    param.grad = torch.full((5,), -utility)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(5).add_(param.grad, alpha=-0.5))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1e6])
def test_the_gate_has_no_scale(scale):
    """An absolute epsilon of 1e-8 would switch the gate off for small gradients."""
    utilities = np.array([-3.0, -0.5, 0.1, 2.0])
    np.testing.assert_allclose(protection(list(utilities * scale)), protection(list(utilities)), rtol=1e-6)


@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_the_first_step_is_gated_like_later_ones(beta):
    """Utility and its range share one bias correction: equal utilities, equal gates, at any step."""
    utilities = [-3.0, -0.5, 0.1, 2.0]
    first = protection(utilities, beta=beta)
    for steps in (2, 50):
        np.testing.assert_allclose(protection(utilities, beta=beta, steps=steps), first, rtol=1e-9)


def test_late_comers_are_compared_fairly():
    """Two tensors of equal utility, one of which has had a single step and one thirty, are protected equally."""
    old, new = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = UPGD([old, new], lr=0.0, sigma=0.0, beta_utility=0.99)
    gradient = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for step in range(30):
        old.grad, new.grad = gradient, gradient if step == 29 else None
        optimizer.step()
    np.testing.assert_allclose(optimizer.protection(new).numpy(), optimizer.protection(old).numpy(), rtol=1e-12)


def test_reference_gate():
    """sigmoid(u / M) with M before bias correction: at step 1 with beta = 0.9 the argument is ten times too large."""
    utilities = np.array([-1.0, 0.0, 0.5, 2.0])
    expected = 1.0 / (1.0 + np.exp(-utilities / (0.1 * 2.0)))
    np.testing.assert_allclose(protection(list(utilities), gate="reference"), expected, rtol=1e-9)


@pytest.mark.parametrize("utilities", [[0.0, 0.0], [-1.0, -2.0]])
def test_reference_gate_is_neutral_without_a_positive_utility(utilities):
    assert (protection(utilities, gate="reference") == 0.5).all()


def test_no_gate():
    assert (protection([-1.0, 0.0, 5.0], gate="none") == 0.5).all()


def test_share_of_a_step():
    """The step of the most useful weight is 2 (1 - sigmoid(1)) of SGD's, that of the least useful 2 sigmoid(1)."""
    param = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    param.grad = torch.tensor([-3.0, 3.0], dtype=torch.float64)  # utilities 3 and -3
    UPGD([param], lr=0.1, weight_decay=0.0, sigma=0.0).step()
    expected = 1.0 - 0.1 * np.array([2.0 * (1.0 - MOST) * -3.0, 2.0 * (1.0 - LEAST) * 3.0])
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-7)


def test_fused_gate_over_its_whole_range():
    """The compiled tanh against the exact one, for utilities that fill the range."""
    utilities = torch.linspace(-1.0, 1.0, 10_001)
    param = nn.Parameter(torch.ones(10_001))
    param.grad = -utilities
    UPGD([param], lr=1.0, weight_decay=0.0, sigma=0.0, implementation="fused").step()
    expected = 1.0 + (1.0 - torch.tanh(utilities.double() / 2.0)) * utilities.double()
    torch.testing.assert_close(param.detach().double(), expected, rtol=0.0, atol=2e-7)


def test_protection_needs_a_step():
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = UPGD([param])
    with pytest.raises(ValueError, match="no utility yet"):
        optimizer.protection(param)
    param.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(ValueError, match="not in this optimizer"):
        optimizer.protection(other)
