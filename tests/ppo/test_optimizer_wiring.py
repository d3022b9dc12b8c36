"""Optimizers and the scaler of steps inside the algorithm: order of calls, factors by head, state, warnings."""

import logging

import numpy as np
import pytest
import torch
from test_algorithm import B, Script, T, collect, every_model, make, mlp_and_lstm, weights

from tailguard import DistributionalPPO

QUARTERS = {"batch_size": T, "n_epochs": 1}  # four steps of the optimizer in an update
NO_CLIP = {"max_grad_norm": 1e9}


def update(model, times=1):
    for _ in range(times):
        collect(model)
        model.train()
    return model


def noisy(**settings):
    return {"warmup_steps": 0, "min_scaling_factor": 1e-3, **settings}


# Heads.


@every_model
def test_every_parameter_belongs_to_exactly_one_head(kind):
    model = make(kind)
    heads = model.policy.heads()
    trunks = {"mlp": set(), "shared lstm": {"actor_trunk"}}.get(kind, {"actor_trunk", "critic_trunk"})
    assert set(heads) == {"actor", "critic1", "critic2"} | trunks
    listed = [id(parameter) for head in heads.values() for parameter in head]
    assert sorted(listed) == sorted(id(parameter) for parameter in model.policy.parameters())
    assert any(parameter is model.policy.log_std for parameter in heads["actor"])
    assert {id(parameter) for parameter in heads["critic2"]} == {
        id(parameter) for parameter in model.policy.critics[1].parameters()
    }
    assert tuple(heads) == model.vgs.heads


def test_a_single_critic_is_a_single_head():
    assert set(make(critic={"twin": False}).policy.heads()) == {"actor", "critic1"}


# The order of calls.


def spied(model, monkeypatch):
    """What is called, in order, with the norm of the gradient that the optimizer gets."""
    calls, norms = [], []

    def spy(owner, name, label):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(label), real(*a, **k))[1])

    spy(model.flat, "zero_grad", "zero")
    spy(model.update, "_loss", "loss")
    spy(model.update.compiled, "gradient", "loss")
    spy(model.vgs, "observe_microbatch", "microbatch")
    spy(model.vgs, "scale_gradients", "scale")
    spy(model.vgs, "update_statistics", "measure")
    spy(model.vgs, "step", "close")
    model.policy.optimizer.register_step_pre_hook(
        lambda *_: (calls.append("step"), norms.append(model.flat.gradient.norm()))[0]
    )
    return calls, norms


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["adam", "upgd"])
@mlp_and_lstm
def test_each_step_is_measured_scaled_clipped_taken_and_closed_once(kind, name, microbatches, monkeypatch):
    """R043 to R045: zero, all backward passes, scale, clip, step, close; whatever the number of microbatches."""
    size = 4 * T
    settings = {"batch_size": size, "microbatch_size": size // microbatches, "n_epochs": 3, "max_grad_norm": 1e-3}
    model = make(kind, vgs=noisy(), optimizer={"name": name}, **settings)
    calls, norms = spied(model, monkeypatch)
    update(model)
    part = ["loss", "microbatch"] if microbatches > 1 else ["loss"]
    assert calls == 3 * ["zero", *part * microbatches, "scale", "measure", "step", "close"]
    assert torch.stack(norms).tolist() == pytest.approx([1e-3] * 3, rel=1e-2)
    assert model.vgs.step_count == 3


def test_without_scaling_nothing_is_measured(monkeypatch):
    model = make(n_epochs=2, batch_size=T * B, microbatch_size=T)
    calls, _ = spied(model, monkeypatch)
    update(model)
    assert calls == 2 * ["zero", *["loss"] * 4, "step"]
    assert model.vgs.step_count == 0
    assert not [name for name in model.logger.name_to_value if name.startswith("vgs/")]


def test_clipping_measures_what_scaling_has_left():
    """A gradient that is still too long after scaling comes out at the limit, not below it."""
    model, norms = make(vgs=noisy(), optimizer={"name": "sgd"}, max_grad_norm=1e-4, **QUARTERS), []
    model.policy.optimizer.register_step_pre_hook(lambda *_: norms.append(model.flat.gradient.norm().item()))
    update(model, 2)
    assert max(model.vgs.factors()) < 0.9
    # The denominator of the clipping has 1e-6 added.
    assert norms == pytest.approx([1e-4] * 8, rel=1e-3)


def test_statistics_are_those_of_the_raw_gradient():
    """Measured before scaling and clipping: the limit on the norm does not reach them."""
    found = []
    for limit in (1e-4, 1e9):
        model = update(make(vgs=noisy(), max_grad_norm=limit, learning_rate=0.0, **QUARTERS))
        found.append(model.vgs.state_dict())
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, found[1][name])
    assert found[0]["grad_norm_ema"] > 1e-2


@mlp_and_lstm
def test_microbatches_change_neither_statistics_nor_weights(kind):
    """But for rounding: the accumulated gradient is that of the whole minibatch, and it is measured once."""
    whole, parts = (update(make(kind, vgs=noisy(), batch_size=2 * T, microbatch_size=size), 2) for size in (2 * T, T))
    torch.testing.assert_close(weights(whole.policy), weights(parts.policy), atol=1e-4, rtol=1e-3)
    assert whole.vgs.factors() == pytest.approx(parts.vgs.factors(), rel=1e-2)
    assert whole.vgs.step_count == parts.vgs.step_count == 16
    assert "vgs/noise_scale" not in whole.logger.name_to_value
    assert parts.vgs.noise_scale.covariance > 0.0


# The factor reaches the weights.


def last_step(name, alpha, action="auto", floor=1e-3, **options):
    """The fourth step of an update, the only one after the warm-up: how far each head goes, and its factor."""
    vgs = {"warmup_steps": 3, "alpha": alpha, "min_scaling_factor": floor, "action": action}
    model = make("lstm", vgs=vgs, optimizer={"name": name, **options}, **NO_CLIP, **QUARTERS)
    before, factors = [], []
    model.policy.optimizer.register_step_pre_hook(lambda *_: before.append(weights(model.policy)))
    apply = model.vgs.apply
    model.vgs.apply = lambda: (factors.append(apply()), factors[-1])[1]
    update(model)
    assert len(before) == 4
    assert all(factor == 1.0 for row in factors[:3] for factor in row)
    moved, start, by_head = weights(model.policy) - before[-1], 0, {}
    owner = {id(parameter): head for head, own in model.policy.heads().items() for parameter in own}
    for parameter in model.policy.parameters():
        by_head.setdefault(owner[id(parameter)], []).append(moved[start : start + parameter.numel()])
        start += parameter.numel()
    return {head: torch.cat(parts) for head, parts in by_head.items()}, dict(zip(model.vgs.heads, factors[-1], strict=True))


QUIET = {"sigma": 0.0, "weight_decay": 0.0}  # noise and decay are not part of the way along the gradient
OPTIMIZERS = {
    "adam": {},
    "adamw": {"weight_decay": 0.0},
    "sgd": {},
    "sgd with momentum": {"momentum": 0.9},
    "adaptive_upgd": QUIET,
    "upgdw": QUIET,
}


# Momentum of earlier gradients is not scaled by a factor on this one.
WAYS = [(name, action) for name in OPTIMIZERS for action in ("auto", "step") if (name, action) != ("sgd with momentum", "auto")]


@pytest.mark.parametrize(("name", "action"), WAYS)
def test_each_head_goes_its_own_factor_of_the_way(name, action):
    optimizer, options = name.split()[0], OPTIMIZERS[name]
    plain, ones = last_step(optimizer, 0.0, action, **options)
    scaled, factors = last_step(optimizer, 1.0, action, **options)
    assert set(ones.values()) == {1.0}
    assert len(set(factors.values())) >= 4  # of 5 heads; two may be at the floor
    assert max(factors.values()) < 1.0
    for head, factor in factors.items():
        assert plain[head].abs().max() > 0.0
        torch.testing.assert_close(scaled[head], factor * plain[head], atol=2e-7, rtol=1e-3)


def test_the_step_of_upgd_is_shortened_by_its_factor_head_by_head():
    """With ``action="step"`` by construction; the gate compares utilities of all heads with one another."""
    plain, _ = last_step("upgd", 0.0, "step", **QUIET)
    scaled, factors = last_step("upgd", 1.0, "step", **QUIET)
    for head, factor in factors.items():
        torch.testing.assert_close(scaled[head], factor * plain[head], atol=2e-7, rtol=1e-3)


def test_a_factor_on_the_gradients_of_upgd_is_a_factor_of_its_steps_but_for_the_gate():
    """Scaled heads have smaller utilities, and the gate compares those of all; it multiplies by 0.54 to 1.46 (upgd_step.py)."""
    plain, _ = last_step("upgd", 0.0, **QUIET)
    scaled, factors = last_step("upgd", 1.0, floor=0.05, **QUIET)
    low, high = 1.0 - np.tanh(0.5), 1.0 + np.tanh(0.5)
    for head, factor in factors.items():
        counted = factor * plain[head].abs() > 3e-7  # a weight of 1/4 has steps of 1.5e-8
        ratio = scaled[head][counted] / (factor * plain[head][counted])
        assert counted.any()
        assert ratio.min() > 0.9 * low / high
        assert ratio.max() < 1.1 * high / low


def test_noise_of_upgd_shrinks_with_the_gradients():
    """R068: with the scaler the noise adapts unless told otherwise."""
    assert make(vgs={}, optimizer={"name": "upgd"}).policy.optimizer.param_groups[0]["adaptive_noise"] is True
    assert make(optimizer={"name": "upgd"}).policy.optimizer.param_groups[0]["adaptive_noise"] is False


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "upgd", "adaptive_upgd", "upgdw"])
@mlp_and_lstm
def test_every_optimizer_moves_every_part(kind, name):
    model = make(kind, optimizer={"name": name})
    before = {
        part: torch.cat([parameter.detach().flatten() for parameter in own]) for part, own in model.policy.heads().items()
    }
    update(model)
    for part, own in model.policy.heads().items():
        after = torch.cat([parameter.detach().flatten() for parameter in own])
        assert after.isfinite().all()
        assert (after != before[part]).float().mean() > 0.5


# Nothing where nothing is asked for.


@mlp_and_lstm
def test_no_scaling_is_bit_identical_however_it_is_said(kind):
    """Switched off, still warming up, or a gain of 0, which only monitors."""
    plain = weights(update(make(kind), 2).policy)
    for vgs in ({"enabled": False}, {"warmup_steps": 10**6}, {"alpha": 0.0, "warmup_steps": 0}):
        assert torch.equal(weights(update(make(kind, vgs=vgs), 2).policy), plain)
    assert not torch.equal(weights(update(make(kind, vgs=noisy()), 2).policy), plain)


# Minibatches that are not stepped with.


@mlp_and_lstm
def test_a_microbatch_without_weight_is_harmless(kind):
    env = Script()
    env.weights = np.ones(env.rewards.shape, np.float32)
    env.weights[:, 1] = 0.0
    env.weights[: T // 2] = 0.0
    size = T if kind == "lstm" else 1
    model = make(kind, env, vgs=noisy(), batch_size=2 * T, microbatch_size=size)
    update(model)
    assert weights(model.policy).isfinite().all()


def test_a_gradient_that_is_not_finite_does_not_change_the_noise_scale():
    model = make(vgs=noisy(), batch_size=2 * T, microbatch_size=T)
    spoilt = iter([float("inf")])
    model.policy.actor[0].weight.register_hook(lambda gradient: gradient * next(spoilt, 1.0))
    update(model)
    assert np.isfinite(model.vgs.noise_scale.covariance)
    assert np.isfinite(model.vgs.noise_scale.signal)


def test_an_early_stop_leaves_no_open_minibatch_behind():
    """The next update must see its own microbatches only: two of T samples each."""
    model = make(vgs=noisy(), batch_size=2 * T, microbatch_size=T, kl={"mode": "early_stop", "target": 1e-5})
    update(model)
    batches = []
    close = model.vgs.noise_scale.close
    model.vgs.noise_scale.close = lambda: (batches.append(list(model.vgs.noise_scale._samples)), close())[1]
    update(model)
    assert batches
    assert all(samples == [T, T] for samples in batches)


# State.


@pytest.mark.parametrize("name", ["adam", "adaptive_upgd", "upgd", "sgd"])
def test_the_scaler_survives_saving_and_continues_acting(name, tmp_path):
    """Loaded twice from one file; in one of them the gain is 0. Both play and learn the same, but for the factors."""
    options = {"name": name} | ({} if name == "sgd" else QUIET if "upgd" in name else {})
    model = update(make(vgs=noisy(action="step"), optimizer=options, **NO_CLIP, **QUARTERS), 2)
    assert model.vgs.step_count == 8
    model.save(tmp_path / "model")
    moved, factors = [], []
    for alpha in (1.0, 0.0):
        loaded = DistributionalPPO.load(tmp_path / "model", env=Script(), n_epochs=1, batch_size=T * B)
        for key, value in model.vgs.state_dict().items():
            restored = loaded.vgs.state_dict()[key]
            assert torch.equal(value, restored) if isinstance(value, torch.Tensor) else value == restored
        assert loaded.vgs.parameters[0] is next(loaded.policy.parameters())
        loaded.vgs.config = loaded.vgs.config.model_copy(update={"alpha": alpha})
        before = []
        loaded.policy.optimizer.register_step_pre_hook(
            lambda *_, loaded=loaded, before=before: before.append(loaded.flat.tensor.detach().clone())
        )
        factors.append(loaded.vgs.factors())
        update(loaded)
        assert loaded.vgs.step_count == 9
        moved.append((loaded.flat.tensor - before[0]).detach())
    assert max(factors[0]) < 1.0
    assert set(factors[1]) == {1.0}
    for part, span in (("actor", "actor."), ("critic1", "critics.0."), ("critic2", "critics.1.")):
        where, factor = loaded.flat.span(span), factors[0][loaded.vgs.heads.index(part)]
        assert moved[1][where].abs().max() > 0.0
        torch.testing.assert_close(moved[0][where], factor * moved[1][where], atol=3e-7, rtol=1e-3)


def test_a_copied_scaler_does_not_act_on_another_model(tmp_path):
    """Loading must not leave hooks on the optimizer of the model that was saved."""
    model = update(make(vgs=noisy(), **QUARTERS))
    model.save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=Script())
    before = weights(model.policy)
    update(loaded)
    assert torch.equal(weights(model.policy), before)
    update(model)
    assert model.vgs.step_count == 8
    assert loaded.vgs is not model.vgs


# Warnings.


RISKY = {"name": "upgd", "sigma": 1e-3, "adaptive_noise": False}


@pytest.mark.parametrize(
    ("vgs", "optimizer", "warned"),
    [
        ({}, RISKY, True),
        ({}, {**RISKY, "name": "adaptive_upgd"}, True),
        ({}, {**RISKY, "sigma": 1e-4}, False),
        ({}, {**RISKY, "adaptive_noise": True}, False),
        ({"enabled": False}, RISKY, False),
        (None, RISKY, False),
        ({}, {"name": "upgd"}, False),
        ({}, {}, False),
    ],
)
def test_fixed_noise_beside_the_scaler_is_warned_of(vgs, optimizer, warned, caplog):
    """R069; the text names sigma and the remedy."""
    with caplog.at_level(logging.WARNING):
        make(vgs=vgs, optimizer=optimizer)
    assert bool(caplog.records) is warned
    if warned:
        assert "sigma=0.001" in caplog.text
        assert "adaptive_noise=true" in caplog.text


def test_a_setting_that_the_optimizer_does_not_have_is_refused():
    with pytest.raises(ValueError, match="sigma"):
        make(optimizer={"name": "adam", "sigma": 0.1})
    with pytest.raises(ValueError, match="lion"):
        make(optimizer={"name": "lion"})
    with pytest.raises(ValueError, match="beta"):
        make(vgs={"beta": 1.0})
