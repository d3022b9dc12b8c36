"""Options of the critics in a real training: the reserve, value clipping, and every distribution on a known task."""

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_algorithm import B, Script, T, collect, make, mlp_and_lstm, prepared, weights

from tailguard.envs.vec_env import ArrayVecEnv, StepArrays
from tailguard.ppo.config import CriticConfig
from tailguard.ppo.critic import quantile_levels
from tailguard.ppo.diagnostics import reserve_metrics
from tailguard.ppo.quantiles import uniform_levels


def before_and_after(model):
    """Return the critics' predictions for the second rollout before and after its update; the first one sets the scale."""
    collect(model)
    model.train()
    collect(model)
    before = prepared(model)
    model.train()
    return before, prepared(model)


# The reserve.


@pytest.mark.parametrize("distribution", ["quantile", "categorical"])
@mlp_and_lstm
def test_the_reserve_never_alters_the_training(kind, distribution):
    found = []
    for reserve in (False, True):
        model = make(kind, Script(), critic={"ev_reserve": reserve, "distribution": distribution}, normalize_obs=True)
        model.learn(3 * T * B)
        found.append((weights(model.policy), model.entropy.value, torch.get_rng_state(), model.shuffler.get_state()))
        assert ("train/ev/reserve" in model.logger.name_to_value) is reserve
    assert found[0][1] == found[1][1]
    for k in (0, 2, 3):
        assert torch.equal(found[0][k], found[1][k])


@pytest.mark.parametrize("aggregate", ["mean", "min"])
@mlp_and_lstm
def test_the_reserve_is_the_explained_variance_of_the_final_weights(kind, aggregate):
    """1 - Var(R - V) / Var(R) over samples with weight, for the returns of before and the critics of after the update."""
    env = Script()
    env.weights = np.random.default_rng(1).choice([0.0, 1.0, 2.0], size=env.rewards.shape).astype(np.float32)
    model = make(kind, env, critic={"ev_reserve": True, "aggregate": aggregate}, n_epochs=20)
    before, after = before_and_after(model)
    share = before.weights.double().numpy() / before.weights.sum().item()
    returns, values = before.returns.double().numpy(), after.values.double().numpy()

    def variance(x):
        return (share * (x - (share * x).sum()) ** 2).sum()

    expected = 1.0 - variance(returns - values) / variance(returns)
    logged = model.logger.name_to_value
    assert logged["train/ev/reserve"] == pytest.approx(expected, abs=1e-3)
    assert logged["train/ev/reserve"] > logged["train/explained_variance"]  # it has learnt from these very returns


def test_a_reserve_without_weight_is_a_warning():
    model = make(critic={"ev_reserve": True})
    collect(model)
    masked = dataclasses.replace(prepared(model), weights=torch.zeros(T, B))
    assert reserve_metrics(model.policy, model.critic_config, masked) == {"warn/ev_reserve_all_masked": 1.0}


@mlp_and_lstm
def test_a_training_without_weight_warns_of_its_reserve(kind):
    """R116: the batch is skipped, and the metric says so."""
    env = Script()
    env.weights = np.zeros(env.rewards.shape, np.float32)
    model = make(kind, env, critic={"ev_reserve": True})
    collect(model)
    model.train()
    assert model.logger.name_to_value["warn/ev_reserve_all_masked"] == 1.0


# Clipping of predictions.


def moved(model):
    """Return how far the critics' means move in one long update, in standard deviations of the return."""
    before, after = before_and_after(model)
    return (after.per_critic - before.per_critic).abs().mean().item() / model._ret_std_snapshot


@pytest.mark.parametrize(("kind", "distribution"), [("mlp", "quantile"), ("mlp", "monotone"), ("lstm", "quantile")])
def test_clipped_predictions_move_less(kind, distribution):
    """By plain gradient descent, which has no momentum that would carry them on."""
    settings = {"n_epochs": 10, "max_grad_norm": 10.0, "optimizer": {"name": "sgd"}, "learning_rate": 0.3}
    free, clipped = (
        moved(make(kind, critic={"clip_range": clip, "distribution": distribution}, **settings)) for clip in (None, 0.02)
    )
    assert 0.0 < clipped < 0.5 * free


@mlp_and_lstm
def test_a_range_that_nothing_reaches_clips_nothing(kind):
    generous = {"clip_range": 1e3}
    found = [weights(make(kind, critic=critic).learn(2 * T * B).policy) for critic in ({}, generous)]
    torch.testing.assert_close(found[0], found[1], atol=5e-3, rtol=1e-2)


@mlp_and_lstm
def test_the_actor_does_not_feel_the_clipping_in_its_own_gradient(kind):
    """Without a shared LSTM, one update moves the actor alike, whatever becomes of the critics."""
    found = []
    for clip in (None, 0.02):
        model = make(kind, critic={"clip_range": clip}, max_grad_norm=1e9)
        collect(model)
        model.train()
        found.append(weights(model.policy.actor))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0.0)


# Every distribution on a task with an answer.


class Echo(ArrayVecEnv):
    """Say whether the number is positive. A right answer pays 1, and every step pays the number itself; 4 steps."""

    def __init__(self, seed=0, n_envs=8):
        super().__init__(n_envs, spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2))
        self.rng = np.random.default_rng(seed)

    def draw(self):
        self.obs = self.rng.choice([-1.0, 1.0], size=(self.num_envs, 1)).astype(np.float32)
        return self.obs

    def reset(self):
        self.t = 0
        return self.draw()

    def step_arrays(self, actions):
        self.t += 1
        rewards = (actions == (self.obs[:, 0] > 0.0)) + self.obs[:, 0].astype(np.float64)
        ends = np.full(self.num_envs, self.t % 4 == 0)
        final = self.obs[ends]
        return StepArrays(self.draw(), rewards, ends, np.zeros_like(ends), np.flatnonzero(ends), final)


@mlp_and_lstm
def test_an_ordinary_critic_learns_the_lambda_returns_of_the_advantages(kind):
    """As in SB3: one number has no spread that a sampled target could keep. Who asks for samples, or has a file, gets them."""
    model = make(kind, critic={"num_quantiles": 1, "twin": False}, gae_lambda=0.7)
    collect(model)
    experience = prepared(model)
    torch.testing.assert_close(experience.at_steps(experience.batch.targets[0, ..., 0]), experience.returns)
    assert CriticConfig(num_quantiles=1, target="distribution").target == "distribution"
    assert CriticConfig().target == CriticConfig(num_quantiles=2).target == "distribution"


CRITICS = {
    "quantile": {},
    "monotone": {"distribution": "monotone"},
    "categorical": {"distribution": "categorical", "num_quantiles": 11},
    "mean": {"num_quantiles": 1},
    "tail": {"num_quantiles": 12, "tail_quantiles": 4},
    "clipped": {"clip_range": 0.5},
    "single": {"twin": False, "target": "lambda_return"},
}
QUESTIONS = np.array([[-1.0], [1.0]], np.float32)


def taught(kind, **kwargs):
    return make(kind, Echo(), gamma=0.5, learning_rate=2e-2, **kwargs).learn(12 * T * 8)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("mlp", name) for name in CRITICS), ("lstm", "monotone"), ("lstm", "categorical")]
)
def test_the_answer_is_found_with_every_kind_of_critic(kind, name):
    """Chance answers half of them."""
    model = taught(kind, critic=CRITICS[name])
    probability = answers(model)
    assert probability[0] < 0.2
    assert probability[1] > 0.8
    assert model.logger.name_to_value["train/explained_variance"] > 0.3


@pytest.mark.parametrize(
    "risk",
    [
        {"objective": "cvar", "alpha": 0.3},
        {"objective": "mean_cvar", "alpha": 0.3},
        {"objective": "constrained", "alpha": 0.3, "limit": 0.0},
    ],
    ids=["cvar", "mix", "constrained"],
)
def test_the_answer_is_found_for_every_objective(risk):
    """A right answer is better for every tail."""
    probability = answers(taught("mlp", risk=risk))
    assert probability[0] < 0.3
    assert probability[1] > 0.7


def answers(model):
    """The probability of saying "positive" to both questions at the start of an episode."""
    policy, shown = model.policy, QUESTIONS
    if policy.budget.columns:
        shown = np.concatenate((QUESTIONS, np.tile([[0.0, 1.0]], (2, 1))), axis=1).astype(np.float32)
    with torch.no_grad():
        outputs, _ = policy.act(policy.inputs(torch.from_numpy(shown)), policy.initial_state(2))
    return outputs.softmax(-1)[:, 1].tolist()


@pytest.mark.parametrize(
    ("config", "n_tail"),
    [
        ({}, 5),
        ({"num_quantiles": 20}, 5),
        ({"num_quantiles": 19}, 0),
        ({"num_quantiles": 1}, 0),
        ({"distribution": "categorical"}, 0),
    ],
)
def test_five_of_many_quantiles_stand_in_the_tail(config: dict[str, object], n_tail: int) -> None:
    critic = CriticConfig.model_validate(config)
    levels = quantile_levels(critic)
    assert len(levels) == critic.num_quantiles
    assert critic.n_tail == n_tail
    assert int((levels < critic.tail_alpha).sum()) == (n_tail or round(critic.tail_alpha * critic.num_quantiles))
    assert torch.equal(quantile_levels(CriticConfig(num_quantiles=32, tail_quantiles=0)), uniform_levels(32))
