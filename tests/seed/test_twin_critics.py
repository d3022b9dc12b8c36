"""The audit reports' tests of twin critics (R093 to R103), on the real heads of a real model."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import ArrayVecEnv, StepArrays
from tailguard.ppo.diagnostics import twin_metrics

T, B = 8, 3
WARNINGS = ("warn/critic1_vanishing_gradients", "warn/critic2_vanishing_gradients", "warn/twin_critics_gradient_imbalance")


class Paying(ArrayVecEnv):
    """Random observations and rewards."""

    def __init__(self):
        super().__init__(B, spaces.Box(-10.0, 10.0, (2,)), spaces.Discrete(2))
        self.rng = np.random.default_rng(0)

    def reset(self):
        return self.rng.normal(size=(B, 2)).astype(np.float32)

    def step_arrays(self, actions):
        never = np.zeros(B, np.bool_)
        obs = self.reset()
        return StepArrays(obs, self.rng.normal(size=B), never, never, np.flatnonzero(never), obs[never])


def make(policy="MlpPolicy", **critic):
    lstm = {"lstm_hidden_size": 4} if policy == "MlpLstmPolicy" else {}
    return DistributionalPPO(
        policy,
        Paying(),
        n_steps=T,
        batch_size=T * B,
        n_epochs=1,
        max_grad_norm=1e9,
        critic={"num_quantiles": 4, **critic},
        policy_kwargs={"net_arch": [6], **lstm},
        seed=0,
    )


def update(model):
    """One collect and one train(), and what the latter logged."""
    _, callback = model._setup_learn(10_000)
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, T)
    model.train()
    return dict(model.logger.name_to_value)


def scale_gradients(critic, factor):
    for parameter in critic.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)


def warnings(logged):
    return [name for name in WARNINGS if name in logged]


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_twin_critics_gradient_norms_logged(policy):
    """R095 to R097, R101: real L2 norms of the two heads, and their ratio."""
    model = make(policy)
    logged = update(model)
    norms = []
    for i, critic in enumerate(model.policy.critics, start=1):
        norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in critic.parameters()))
        assert norm > 0.0
        assert logged[f"train/critic{i}_grad_norm"] == pytest.approx(norm, rel=1e-4)
        norms.append(norm)
    assert norms[0] != norms[1]
    assert logged["train/critics_grad_ratio"] == pytest.approx(norms[0] / norms[1], rel=1e-4)
    assert warnings(logged) == []


@pytest.mark.parametrize(("ratio", "warned"), [(101.0, True), (99.0, False), (0.009, True), (0.011, False)])
def test_twin_critics_gradient_imbalance_warning(ratio, warned):
    """R098, R102: the gradient of one real head is scaled until the ratio is what the case says."""
    natural = update(make())["train/critics_grad_ratio"]
    model = make()
    scale_gradients(model.policy.critics[0], ratio / natural)
    logged = update(model)
    assert logged["train/critics_grad_ratio"] == pytest.approx(ratio, rel=1e-3)
    assert warnings(logged) == (["warn/twin_critics_gradient_imbalance"] if warned else [])


@pytest.mark.parametrize(("ratio", "warned"), [(101.0, True), (100.0, False), (1.0, False), (0.01, False), (0.009, True)])
def test_the_limits_themselves_are_still_in_order(ratio, warned):
    """R098: fires at 101 and 0.009, silent at exactly 100 and 0.01."""
    metrics = twin_metrics([ratio, 1.0])
    assert metrics["train/critics_grad_ratio"] == ratio
    assert ("warn/twin_critics_gradient_imbalance" in metrics) == warned


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("frozen", [1, 2])
def test_twin_critics_vanishing_gradients_warning(policy, frozen):
    """R099, R100, R103: one real head is frozen; the warning names it, and no ratio to nothing is logged."""
    model = make(policy)
    model.policy.critics[frozen - 1].requires_grad_(False)
    logged = update(model)
    assert logged[f"train/critic{frozen}_grad_norm"] < 1e-8
    assert logged[f"train/critic{3 - frozen}_grad_norm"] > 1e-8
    assert warnings(logged) == [f"warn/critic{frozen}_vanishing_gradients"]
    assert "train/critics_grad_ratio" not in logged


def test_both_critics_can_vanish_at_once():
    model = make()
    model.policy.critics.requires_grad_(False)
    assert warnings(update(model)) == ["warn/critic1_vanishing_gradients", "warn/critic2_vanishing_gradients"]


def test_a_warning_ends_with_its_cause():
    model = make()
    model.policy.critics[1].requires_grad_(False)
    assert warnings(update(model)) == ["warn/critic2_vanishing_gradients"]
    model.logger.dump(0)
    model.policy.critics[1].requires_grad_(True)
    assert warnings(update(model)) == []


def test_a_single_critic_has_a_norm_and_no_twin():
    logged = update(make(twin=False))
    assert logged["train/critic1_grad_norm"] > 0.0
    assert "train/critic2_grad_norm" not in logged
    assert "train/critics_grad_ratio" not in logged
    assert warnings(logged) == []


def test_both_critics_are_trained_and_stay_different():
    """R093."""
    model = make()
    before = [nn.utils.parameters_to_vector(critic.parameters()).detach().clone() for critic in model.policy.critics]
    update(model)
    after = [nn.utils.parameters_to_vector(critic.parameters()).detach() for critic in model.policy.critics]
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not torch.equal(*after)


def test_each_critic_learns_from_its_own_predictions():
    """R094: the targets of the two differ as their predictions do."""
    targets = []

    class Watching(DistributionalPPO):
        def _finalize_return_stats(self, experience):
            targets.append(experience.batch.targets)
            super()._finalize_return_stats(experience)

    model = Watching("MlpPolicy", Paying(), n_steps=T, seed=0)
    update(model)
    first, second = targets[0]
    assert (first != second).any(-1).all()
