"""The factor reaches the weights: under every optimizer a factor f makes the step f times as long."""

import copy

import pytest
import torch
from torch import nn

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from tailguard.optim.adam import Adam
from tailguard.optim.layout import FlatParameters

SIZES = {"actor": [(4, 3), (3,)], "critics": [(6, 2)], "trunk": [(5,)]}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "UPGD": lambda p: UPGD(p, lr=0.1, weight_decay=0.0, sigma=0.0),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam of this project": lambda p: Adam(p, lr=0.1),
    "AdaptiveUPGD, foreach": lambda p: AdaptiveUPGD(p, lr=0.1, weight_decay=0.0, sigma=0.0, implementation="foreach"),
    "AdaptiveUPGD, single": lambda p: AdaptiveUPGD(p, lr=0.1, weight_decay=0.0, sigma=0.0, implementation="single"),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
    "AdaptiveUPGD": lambda p: AdaptiveUPGD(p, lr=0.1, weight_decay=0.0, sigma=0.0),
    "UPGDW": lambda p: UPGDW(p, lr=0.1, weight_decay=0.0, sigma=0.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


class Model:
    """Heads of random weights, flat or as separate tensors."""

    def __init__(self, flat):
        generator = torch.Generator().manual_seed(0)
        self.heads = {
            head: nn.ParameterList(torch.randn(size, generator=generator) for size in sizes) for head, sizes in SIZES.items()
        }
        module = nn.ModuleDict(self.heads)
        self.named = {head: list(parameters) for head, parameters in self.heads.items()}
        self.flat = FlatParameters(module) if flat else None
        self.all = list(module.parameters())

    @property
    def moved(self):
        """The parameters that an optimizer is given."""
        return self.all if self.flat is None else [self.flat.tensor]

    def values(self):
        return {head: torch.cat([p.detach().flatten() for p in members]).clone() for head, members in self.named.items()}

    def set_values(self, other):
        with torch.no_grad():
            for mine, theirs in zip(self.all, other.all, strict=True):
                mine.copy_(theirs)

    def set_gradients(self, seed, noise=None):
        """Gradients of mean 1 with noise of each head's own size."""
        generator = torch.Generator().manual_seed(seed)
        if self.flat is not None:
            self.flat.zero_grad()
        for head, members in self.named.items():
            for param in members:
                std = 1.0 if noise is None else noise[head]
                gradient = 1.0 + std * torch.randn(param.shape, generator=generator)
                if self.flat is None:
                    param.grad = gradient
                else:
                    param.grad.copy_(gradient)


def constant_scaler(parameters, factor, **options):
    """A scaler whose factor is always this one: with a huge gain any noise takes it to its floor."""
    return VarianceGradientScaler(parameters, warmup_steps=0, alpha=1e12, min_scaling_factor=factor, **options)


def step(model, optimizer, scaler=None):
    """Take one step in the audit reports' order; return the move of each head."""
    before = model.values()
    factors = None if scaler is None else scaler.apply()
    optimizer.step()
    if scaler is not None:
        scaler.step()
    return {head: after - before[head] for head, after in model.values().items()}, factors


def warm(scaler, model, steps=2):
    for seed in range(steps):
        model.set_gradients(100 + seed)
        scaler.update_statistics()


@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
@pytest.mark.parametrize("factor", [0.5, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_constant_factor_multiplies_the_step(name, factor, flat):
    """Compare equal weights and gradients with and without a scaler, over ten steps with all the state an optimizer has."""
    plain, scaled = Model(flat), Model(flat)
    optimizers = [OPTIMIZERS[name](model.moved) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, factor)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    for seed in range(10):
        for model in (plain, scaled):
            model.set_gradients(seed)
        scaled.set_values(plain)
        moves, _ = step(plain, optimizers[0])
        shorter, factors = step(scaled, optimizers[1], scaler)
        assert factors == [factor]
        for head, move in moves.items():
            assert move.abs().max() > 1e-3
            torch.testing.assert_close(shorter[head], factor * move, rtol=1e-5, atol=5e-7)


@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "fused Adam", "AdaptiveUPGD", "UPGDW"])
def test_each_head_has_its_own_factor(name, flat):
    """Heads in another order than in memory, with noise of different sizes; one flat tensor or many."""
    plain, scaled = Model(flat), Model(flat)
    optimizers = [OPTIMIZERS[name](model.moved) for model in (plain, scaled)]
    scaler = VarianceGradientScaler({head: scaled.named[head] for head in ("trunk", "actor", "critics")}, warmup_steps=5)
    scaler.attach(optimizers[1])
    noise = {"actor": 2.0, "critics": 0.5, "trunk": 0.1}
    for seed in range(30):
        for model in (plain, scaled):
            model.set_gradients(seed, noise)
        scaled.set_values(plain)
        moves, _ = step(plain, optimizers[0])
        shorter, factors = step(scaled, optimizers[1], scaler)
        for head, factor in zip(scaler.heads, factors, strict=True):
            torch.testing.assert_close(shorter[head], factor * moves[head], rtol=1e-4, atol=1e-6)
    trunk, actor, critics = factors
    assert actor < critics < trunk < 1.0


@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
        lambda p: AdaptiveUPGD(p, lr=0.1, weight_decay=0.5, sigma=0.0),
        lambda p: UPGDW(p, lr=0.1, weight_decay=0.5, sigma=0.0),
        lambda p: UPGD(p, lr=0.1, weight_decay=0.5, sigma=0.0),
    ],
    ids=["AdamW", "AdaptiveUPGD", "UPGDW", "UPGD"],
)
def test_decoupled_decay_stays_whole(make, flat):
    """weight <- (1 - lr * decay) weight + f * step."""
    plain, scaled = Model(flat), Model(flat)
    optimizers = [make(model.moved) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.25)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    for seed in range(5):
        for model in (plain, scaled):
            model.set_gradients(seed)
        scaled.set_values(plain)
        before = plain.values()
        moves, _ = step(plain, optimizers[0])
        shorter, _ = step(scaled, optimizers[1], scaler)
        for head, weight in before.items():
            decay = -0.1 * 0.5 * weight
            torch.testing.assert_close(shorter[head], decay + 0.25 * (moves[head] - decay), rtol=1e-5, atol=5e-7)


def test_coupled_decay_is_part_of_the_step():
    """Adam's own weight decay goes through its moments and is scaled with them."""
    plain, scaled = Model(False), Model(False)
    optimizers = [torch.optim.Adam(model.moved, lr=0.1, weight_decay=0.5) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.25)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    for model in (plain, scaled):
        model.set_gradients(0)
    moves, _ = step(plain, optimizers[0])
    shorter, _ = step(scaled, optimizers[1], scaler)
    for head, move in moves.items():
        torch.testing.assert_close(shorter[head], 0.25 * move, rtol=1e-5, atol=5e-7)


def test_scaled_gradients_would_not_slow_adam():
    """Why the step is scaled under Adam: on its gradients a constant factor cancels."""
    plain, scaled = Model(False), Model(False)
    optimizers = [torch.optim.Adam(model.moved, lr=0.1) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.1, action="gradient")
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    for seed in range(5):
        for model in (plain, scaled):
            model.set_gradients(seed)
        scaled.set_values(plain)
        moves, _ = step(plain, optimizers[0])
        same, _ = step(scaled, optimizers[1], scaler)
    for head, move in moves.items():
        torch.testing.assert_close(same[head], move, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("action", "left"), [("auto", 1.0), ("step", 0.1)])
def test_clipping_undoes_a_factor_on_the_gradient(action, left):
    """SGD with gradients far above the limit: only a shortened step is shorter."""
    plain, scaled = Model(False), Model(False)
    optimizers = [torch.optim.SGD(model.moved, lr=0.1) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.1, action=action)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    moves = []
    for model, optimizer in zip((plain, scaled), optimizers, strict=True):
        model.set_gradients(0)
        before = model.values()["actor"]
        if model is scaled:
            scaler.scale_gradients()
        nn.utils.clip_grad_norm_(model.all, 1e-2)
        optimizer.step()
        moves.append(model.values()["actor"] - before)
    scaler.step()
    torch.testing.assert_close(moves[1], left * moves[0], rtol=1e-3, atol=2e-7)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_steps_are_bit_identical_in_warm_up(name, flat):
    """R046."""
    plain, scaled = Model(flat), Model(flat)
    optimizers = [OPTIMIZERS[name](model.moved) for model in (plain, scaled)]
    scaler = VarianceGradientScaler(scaled.all, warmup_steps=5)
    scaler.attach(optimizers[1])
    for seed in range(6):
        for model in (plain, scaled):
            model.set_gradients(seed, {"actor": 3.0, "critics": 3.0, "trunk": 3.0})
        moves, _ = step(plain, optimizers[0])
        same, factors = step(scaled, optimizers[1], scaler)
        equal = all(torch.equal(same[head], moves[head]) for head in moves)
        assert equal == (seed < 5) == (factors == [1.0])


def test_monitoring_only():
    """alpha = 0 measures and leaves every step alone."""
    plain, monitored = Model(False), Model(False)
    optimizers = [torch.optim.Adam(model.moved, lr=0.1) for model in (plain, monitored)]
    scaler = VarianceGradientScaler(monitored.all, warmup_steps=0, alpha=0.0)
    scaler.attach(optimizers[1])
    for seed in range(5):
        for model in (plain, monitored):
            model.set_gradients(seed)
        moves, _ = step(plain, optimizers[0])
        same, _ = step(monitored, optimizers[1], scaler)
        assert all(torch.equal(same[head], moves[head]) for head in moves)
    assert scaler.get_normalized_variance() > 0.1


def test_a_closure_may_scale():
    """optimizer.step(closure) with scale_gradients() inside the closure."""
    plain, scaled = Model(False), Model(False)
    optimizers = [torch.optim.Adam(model.moved, lr=0.1) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.5)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)

    def closure():
        scaled.set_gradients(0)
        scaler.scale_gradients()
        return 0.0

    plain.set_gradients(0)
    moves, _ = step(plain, optimizers[0])
    before = scaled.values()
    optimizers[1].step(closure)
    scaler.step()
    for head, after in scaled.values().items():
        torch.testing.assert_close(after - before[head], 0.5 * moves[head], rtol=1e-5, atol=5e-7)


def test_a_parameter_without_gradient_does_not_move():
    """Nor does it decay, although the fallback knows the decay of its group."""
    model = Model(False)
    optimizer = torch.optim.AdamW(model.moved, lr=0.1, weight_decay=0.5)
    scaler = constant_scaler(model.all, 0.5)
    scaler.attach(optimizer)
    warm(scaler, model)
    model.set_gradients(0)
    still = model.all[1]
    still.grad = None
    before = still.detach().clone()
    moves, _ = step(model, optimizer, scaler)
    assert torch.equal(still, before)
    assert moves["trunk"].abs().max() > 0.01


def test_a_step_without_scaling_is_left_alone():
    """The factor belongs to the step that scale_gradients() announced, and to no other."""
    plain, scaled = Model(True), Model(True)
    optimizers = [torch.optim.Adam(model.moved, lr=0.1) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.5)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    for model, optimizer in zip((plain, scaled), optimizers, strict=True):
        model.set_gradients(0)
        optimizer.step()
    assert torch.equal(plain.flat.tensor, scaled.flat.tensor)


def test_attaching_again_and_detaching():
    """One optimizer at a time: the first is free again when the second is attached, both after detach()."""
    model, plain = Model(False), Model(False)
    first, second = (torch.optim.Adam(model.moved, lr=0.1) for _ in range(2))
    reference = torch.optim.Adam(plain.moved, lr=0.1)
    scaler = constant_scaler(model.all, 0.5)
    scaler.attach(first)
    scaler.attach(second)
    warm(scaler, model)
    for each in (model, plain):
        each.set_gradients(0)
    moves, _ = step(plain, reference)
    scaler.scale_gradients()
    before = model.values()
    first.step()
    torch.testing.assert_close(model.values()["trunk"] - before["trunk"], moves["trunk"], rtol=1e-5, atol=5e-7)
    before = model.values()
    second.step()
    torch.testing.assert_close(model.values()["trunk"] - before["trunk"], 0.5 * moves["trunk"], rtol=1e-5, atol=5e-7)
    scaler.step()
    scaler.detach()
    model.set_gradients(0)
    scaler.scale_gradients()
    model.set_gradients(0)
    before = model.values()
    copied = copy.deepcopy(second)
    assert not copied._optimizer_step_post_hooks
    second.step()
    assert (model.values()["trunk"] - before["trunk"]).abs().max() > 0.09


def test_groups_with_their_own_decay():
    """The saved value of each weight decays by its own group's rate."""
    plain, scaled = Model(False), Model(False)

    def make(model):
        groups = [{"params": model.named["actor"], "weight_decay": 0.5}, {"params": model.named["trunk"], "lr": 0.2}]
        return torch.optim.AdamW([*groups, {"params": model.named["critics"]}], lr=0.1, weight_decay=0.0)

    optimizers = [make(model) for model in (plain, scaled)]
    scaler = constant_scaler(scaled.all, 0.25)
    scaler.attach(optimizers[1])
    warm(scaler, scaled)
    for model in (plain, scaled):
        model.set_gradients(0)
    before = plain.values()
    moves, _ = step(plain, optimizers[0])
    shorter, _ = step(scaled, optimizers[1], scaler)
    for head, rate in {"actor": 0.05, "critics": 0.0, "trunk": 0.0}.items():
        decay = -rate * before[head]
        torch.testing.assert_close(shorter[head], decay + 0.25 * (moves[head] - decay), rtol=1e-5, atol=5e-7)


def test_an_optimizer_of_other_parameters_is_refused():
    scaler = VarianceGradientScaler(Model(False).all)
    with pytest.raises(ValueError, match="does not move a parameter of shape"):
        scaler.attach(torch.optim.Adam(Model(False).all))
