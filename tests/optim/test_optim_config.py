"""Optimizers from settings, and noise that suits a scaler."""

import inspect
import logging

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from tailguard.optim.adam import Adam
from tailguard.optim.config import OptimizerConfig
from tailguard.optim.factory import build_optimizer
from tailguard.optim.upgd import UtilityGated

NAMES = {
    "adam": Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "upgd": UPGD,
    "adaptive_upgd": AdaptiveUPGD,
    "upgdw": UPGDW,
}
PROTECTING = ["upgd", "adaptive_upgd", "upgdw"]


def make(vgs=False, **settings):
    return build_optimizer(OptimizerConfig(**settings), [nn.Parameter(torch.ones(3))], 0.01, vgs=vgs)


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    optimizer = make(name=name, weight_decay=0.03)
    assert type(optimizer) is NAMES[name]
    assert optimizer.defaults["lr"] == 0.01
    assert optimizer.defaults["weight_decay"] == 0.03


def test_settings_arrive():
    adam = make(name="adam", beta1=0.5, beta2=0.6, eps=0.1).defaults
    assert (adam["betas"], adam["eps"]) == ((0.5, 0.6), 0.1)
    assert make().defaults["eps"] == 1e-5
    assert make(name="sgd", momentum=0.7).defaults["momentum"] == 0.7
    for name in ("adaptive_upgd", "upgdw"):
        optimizer = make(name=name, beta1=0.5, beta2=0.6, sigma=0.2, beta_utility=0.3, gate="none", adaptive_noise=True)
        group = optimizer.param_groups[0]
        assert [group[key] for key in ("beta1", "beta2", "sigma", "beta_utility", "eps")] == [0.5, 0.6, 0.2, 0.3, 1e-5]
        assert group["adaptive_noise"] is True
        assert optimizer.gate == "none"


def test_a_generator_arrives():
    generator = torch.Generator()
    config = OptimizerConfig(name="upgd")
    assert build_optimizer(config, [nn.Parameter(torch.ones(3))], 0.01, vgs=False, generator=generator).generator is generator


@pytest.mark.parametrize("name", PROTECTING)
def test_noise_adapts_by_default_with_vgs(name):
    """R068: and is half as large; what the settings say goes before."""
    alone, together = make(name=name).param_groups[0], make(vgs=True, name=name).param_groups[0]
    assert (alone["adaptive_noise"], alone["sigma"]) == (False, 0.001)
    assert (together["adaptive_noise"], together["sigma"]) == (True, 0.0005)
    chosen = make(vgs=True, name=name, adaptive_noise=False, sigma=0.002).param_groups[0]
    assert (chosen["adaptive_noise"], chosen["sigma"]) == (False, 0.002)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"name": "adam", "sigma": 0.1}, "left out for the optimizer adam"),
        ({"name": "upgd", "beta1": 0.1}, "left out for the optimizer upgd"),
        ({"name": "sgd", "gate": "none"}, "left out for the optimizer sgd"),
        ({"name": "adamw", "momentum": 0.1}, "left out for the optimizer adamw"),
    ],
)
def test_a_setting_that_the_optimizer_does_not_have_is_refused(settings, known):
    with pytest.raises(ValueError, match=known):
        make(**settings)


@pytest.mark.parametrize("bad", [{"name": "lion"}, {"sigma": -1.0}, {"beta1": 1.0}, {"noise": 1.0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValidationError):
        OptimizerConfig(**bad)


def attach(optimizer, **settings):
    scaler = VarianceGradientScaler(optimizer.param_groups[0]["params"], **settings)
    scaler.attach(optimizer)


@pytest.mark.parametrize("name", PROTECTING)
def test_fixed_noise_with_vgs_is_warned_of(name, caplog):
    """R066, R069: the risky settings sigma = 0.001 without adaptive noise, in the seed's words."""
    with caplog.at_level(logging.WARNING):
        attach(make(name=name, sigma=0.001, adaptive_noise=False))
    assert caplog.messages == [
        "VGS enabled with UPGD adaptive_noise=false and sigma=0.001. This may cause excessive noise when VGS scales gradients "
        "down. Consider setting adaptive_noise=true for stability."
    ]


@pytest.mark.parametrize(
    ("settings", "scaler"),
    [
        ({"name": "upgd", "sigma": 1e-4, "adaptive_noise": False}, {}),
        ({"name": "upgd", "sigma": 0.001, "adaptive_noise": True}, {}),
        ({"name": "upgd", "sigma": 0.001, "adaptive_noise": False}, {"enabled": False}),
        ({"name": "adam"}, {}),
    ],
)
def test_no_warning_where_there_is_no_risk(settings, scaler, caplog):
    """R069."""
    attach(make(**settings), **scaler)
    assert caplog.messages == []


def test_adaptive_noise_is_recommended_in_words():
    """R067."""
    for cls in (UtilityGated, OptimizerConfig):
        text = " ".join(inspect.getdoc(cls).split())
        assert "recommended with variance-based gradient scaling" in text


def test_adam_is_left_to_torch_where_the_compiled_one_does_not_fit():
    for odd in (torch.ones(3, dtype=torch.float64), torch.ones(3, 2).t()):
        made = build_optimizer(OptimizerConfig(name="adam"), [nn.Parameter(odd)], 0.01, vgs=False)
        assert type(made) is torch.optim.Adam
    grouped = build_optimizer(OptimizerConfig(name="adam"), [{"params": [nn.Parameter(torch.ones(3))]}], 0.01, vgs=False)
    assert type(grouped) is torch.optim.Adam
