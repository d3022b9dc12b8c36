"""What ``get_parameters`` holds and ``set_parameters`` restores, where TensorBoard writes, and the alert rule."""

import logging

import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.config import load_config
from tailguard.experiments.callbacks import PATIENCE, LogLastingWarnings
from tailguard.market import SignalMarket

T, B = 16, 4


def make(seed=0, **settings):
    network = {"lstm_hidden_size": 8, "net_arch": [8]}
    settings = {"vgs": {"warmup_steps": 2}, "kl": {"mode": "penalty"}} | settings
    env = SignalMarket(B, episode_length=10, seed=seed)
    return DistributionalPPO("MlpLstmPolicy", env, n_steps=T, seed=seed, policy_kwargs=network, **settings)


def test_get_parameters_keys():
    """R074, R121: the optimizer's state is there when it is asked for, and only then."""
    model = make().learn(T * B)
    assert set(model.get_parameters()) == {"policy", "kl_penalty_state", "vgs_state"}
    assert set(model.get_parameters(include_optimizer=True)) == {"policy", "kl_penalty_state", "vgs_state", "optimizer_state"}


def test_vgs_state_round_trip_through_parameters():
    """R052: VGS state is part of what get_parameters gives and is restored by set_parameters."""
    source, target = make(seed=0).learn(3 * T * B), make(seed=1).learn(T * B)
    assert source.vgs.get_normalized_variance() != target.vgs.get_normalized_variance()
    target.set_parameters(source.get_parameters(include_optimizer=True))
    assert target.vgs.step_count == source.vgs.step_count
    assert target.vgs.get_normalized_variance() == source.vgs.get_normalized_variance()
    assert target.kl.kl_penalty_state == source.kl.kl_penalty_state
    assert torch.equal(target.flat.tensor, source.flat.tensor)
    ours, theirs = (model.policy.optimizer.state_dict()["state"][0] for model in (target, source))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_parameters_do_not_change_with_the_model_that_gave_them():
    model = make().learn(T * B)
    parameters = model.get_parameters(include_optimizer=True)
    before = {name: value.clone() for name, value in parameters["policy"].items()}
    model.learn(T * B)
    assert all(torch.equal(parameters["policy"][name], value) for name, value in before.items())


def test_a_missing_part_is_named_unless_it_may_be_missing():
    model = make()
    parameters = model.get_parameters()
    del parameters["vgs_state"]
    with pytest.raises(ValueError, match="vgs"):
        model.set_parameters(parameters)
    model.set_parameters(parameters, exact_match=False)


def test_tensorboard_default_path():
    """R126."""
    assert load_config().training.tensorboard == "artifacts/tensorboard"


def test_alert_on_critics_grad_ratio(caplog):
    """R127: a ratio of the critics' gradients outside [0.01, 100] that stays is reported, once."""
    model = make()
    for parameter in model.policy.critics[0].parameters():
        parameter.register_hook(lambda gradient: 1e4 * gradient)
    with caplog.at_level(logging.WARNING):
        model.learn((PATIENCE + 2) * T * B, callback=LogLastingWarnings())
    alerts = [record.message for record in caplog.records if "twin_critics_gradient_imbalance" in record.message]
    expected = f"in {PATIENCE} updates in a row, at step {PATIENCE * T * B}: see docs/metrics.md"
    assert alerts == [f"warn/twin_critics_gradient_imbalance {expected}"]
    caplog.clear()
    make().learn((PATIENCE + 2) * T * B, callback=LogLastingWarnings())
    assert not caplog.records
