"""Settings of a population that are accepted and refused."""

import pytest

from tailguard.population import HyperparamConfig, PBTConfig

RANGE = {"name": "x", "min_value": 0.1, "max_value": 1.0}


def test_defaults_are_those_of_the_original():
    hyperparam = HyperparamConfig(**RANGE)
    assert (hyperparam.perturbation_factor, hyperparam.resample_probability, hyperparam.is_log_scale) == (1.2, 0.25, False)
    expected = {
        "population_size": 10,
        "perturbation_interval": 5,
        "hyperparams": (),
        "exploit_method": "truncation",
        "explore_method": "both",
        "truncation_ratio": 0.2,
        "checkpoint_dir": "pbt_checkpoints",
        "metric_name": "mean_reward",
        "metric_mode": "max",
        "ready_percentage": 0.8,
        "optimizer_exploit_strategy": "reset",
        "min_ready_members": 2,
        "ready_check_max_wait": 10,
    }
    assert {key: value for key, value in PBTConfig().model_dump().items() if key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": ["a", "b"]}, "a range or a list of values"),
        ({"min_value": None, "max_value": None}, "a range or a list of values"),
        ({"max_value": None}, "both min_value and max_value"),
        ({"min_value": 1.0}, "below max_value"),
        ({"min_value": 0.0, "is_log_scale": True}, "above 0 on a log scale"),
        ({"max_value": 1.5, "is_one_minus": True}, "at most 1"),
        ({"is_one_minus": True, "is_log_scale": True}, "below 1 for the logarithm"),
        ({"is_integer": True}, "whole numbers"),
        ({"min_value": 0.0, "max_value": 1.0, "is_integer": True, "is_one_minus": True}, "together with is_one_minus"),
        ({"perturbation_factor": 1.0}, "greater than 1"),
        ({"perturbation_noise": 0.0}, "greater than 0"),
        ({"resample_probability": 1.1}, "less than or equal to 1"),
        ({"max_value": float("inf")}, "finite"),
        ({"min": 0.1}, "Extra inputs"),
        ({"min_value": None, "max_value": None, "values": ["a"]}, "two or more different"),
        ({"min_value": None, "max_value": None, "values": ["a", "a"]}, "two or more different"),
        ({"min_value": None, "max_value": None, "values": [1, 2], "is_log_scale": True}, "choices have neither"),
    ],
)
def test_impossible_hyperparameters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        HyperparamConfig(**{**RANGE, **changes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"population_size": 1}, "greater than or equal to 2"),
        ({"perturbation_interval": 0}, "greater than 0"),
        ({"truncation_ratio": 0.0}, "greater than 0"),
        ({"truncation_ratio": 0.6}, "less than or equal to 0.5"),
        ({"ready_percentage": 0.0}, "greater than 0"),
        ({"population_size": 3, "min_ready_members": 4}, "at most population_size 3"),
        ({"hyperparams": [RANGE, RANGE]}, "all different"),
        ({"exploit_method": "best"}, "truncation"),
        ({"explore_method": "pb2", "hyperparams": [{"name": "x", "values": [1, 2]}]}, "at least one range"),
        ({"ratio": 0.2}, "Extra inputs"),
    ],
)
def test_impossible_populations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PBTConfig(**settings)


def test_choices_keep_their_types():
    values = HyperparamConfig(name="x", values=(True, 1, 2.0, "3")).values
    assert [type(value) for value in values] == [bool, int, float, str]
