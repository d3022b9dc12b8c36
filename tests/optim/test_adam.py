"""The compiled Adam against torch's."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from tailguard.optim.adam import Adam

OPTIONS = [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.7), "eps": 1e-3}, {"betas": (0.0, 0.9)}]


def run(kind, options, steps, start=None, shapes=((17,), (3, 5))):
    """Weights after some steps along random gradients, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = kind(parameters, lr=0.01, **options)
    if start is not None:
        optimizer.load_state_dict(deepcopy(start))  # torch keeps the very tensors
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3 - 1)
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), optimizer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_and_state_are_torchs(options):
    ours, mine = run(Adam, options, 30)
    theirs, other = run(torch.optim.Adam, options, 30)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    found, expected = mine.state_dict()["state"], other.state_dict()["state"]
    assert found.keys() == expected.keys()
    for key, state in found.items():
        assert state.keys() == expected[key].keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[key][name], atol=1e-7, rtol=1e-5)


def test_either_continues_from_the_others_state():
    for first, second in ((Adam, torch.optim.Adam), (torch.optim.Adam, Adam)):
        state = run(first, {}, 7)[1].state_dict()
        same, other = (run(kind, {}, 5, start=state)[0] for kind in (first, second))
        torch.testing.assert_close(other, same, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(run(second, {}, 5)[0], other, atol=1e-4)


def test_parameters_without_a_gradient_stay():
    still, moved = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = Adam([still, moved], lr=0.1)
    moved.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(still, torch.ones(4))
    assert not torch.equal(moved, torch.ones(4))
    assert len(optimizer.state[still]) == 0


def test_a_closure_is_called_once_with_gradients_on():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, calls = Adam([parameter], lr=0.1), []

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 2.0
    assert calls == [2.0]
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.9), atol=1e-5, rtol=0.0)


def test_hooks_run_once_per_step_from_the_first_on():
    parameter, calls = nn.Parameter(torch.ones(2)), []
    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # torch wraps the step of a class when it is first used
    optimizer = Adam([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert calls == ["before", "after"] * 2


def test_what_it_does_not_know_is_refused():
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    wide.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="float32"):
        Adam([wide], lr=0.1).step()
    with pytest.raises(ValueError, match="amsgrad"):
        Adam([nn.Parameter(torch.ones(2))], lr=0.1, amsgrad=True).step()
