"""Risk-averse agents as a whole: advantages, first passes, environments, saving."""

import itertools
import math

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from test_algorithm import B, D, Script, T, collect, make, mlp_and_lstm, prepared, weights

from tailguard import DistributionalPPO, ReturnObserver

CONDITIONED = {"objective": "cvar", "alpha": (0.1, 0.4)}


# What the policy learns from.


def whole_episodes(**kwargs):
    """Episodes that end inside the rollout, all of them, in a state of their own."""
    env = Script(**kwargs)
    env.terminated |= env.truncated
    env.truncated[:] = False
    env.terminated[T - 1 :: T] = True
    return env


MIXTURES = {
    "cvar": ({"objective": "cvar", "alpha": 0.2}, 0.0, 1.0),
    "mix": ({"objective": "mean_cvar", "alpha": 0.2, "weight": 0.4, "anneal": 0.0}, 0.6, 2.0),
    "constrained": ({"objective": "constrained", "alpha": 0.2, "limit": 0.0}, 1.0, 0.0),
}


@pytest.mark.parametrize("name", MIXTURES)
@mlp_and_lstm
def test_advantages_are_capped_returns_less_what_the_critics_expect(kind, name):
    """With lambda = 1 and whole episodes: f(Z) - E f(Z) with f(z) = mean z + tail (min(z, c) - min(0, c)), standardised."""
    config, mean, tail = MIXTURES[name]
    env = whole_episodes()
    model = make(kind, env, gae_lambda=1.0, gamma=0.9, risk=config, critic={"tail_quantiles": 2, "tail_alpha": 0.1})
    cap = 0.3
    model.policy.budget.caps.fill_(cap)
    collect(model)
    experience = prepared(model)
    atoms, masses = predicted_atoms(model, experience), model.policy.return_dist.masses.double()
    expected = np.zeros((T, B))
    for b in range(B):
        earned, discount = 0.0, 1.0
        for t in range(T):
            budget, rest = (cap - earned) / discount, 0.0
            for k in itertools.count():
                rest += 0.9**k * env.rewards[t + k, b]
                if env.terminated[t + k, b]:
                    break

            def worth(z, budget=budget):
                return mean * z + tail * (np.minimum(z, budget) - min(0.0, budget))

            rows = atoms[:, t, b].double().numpy()
            expected[t, b] = worth(rest) - np.mean([masses.numpy() @ worth(row) for row in rows])
            earned, discount = earned + discount * env.rewards[t, b], 0.9 * discount
            if env.terminated[t, b]:
                earned, discount = 0.0, 1.0
    expected = (expected - expected.mean()) / expected.std()
    found = experience.at_steps(experience.batch.advantages).reshape(T, B)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-4)


def predicted_atoms(model, experience):
    """Raw atoms at every step, ``[K, T, B, M]``."""
    with torch.no_grad():
        _, features = experience.batch.features(model.policy)
        rows = model.policy.raw_atoms(features)
    if model.policy.recurrent:
        return torch.stack([experience.layout.gather(one) for one in rows])
    return rows.unflatten(1, (T, B))


@mlp_and_lstm
def test_critics_learn_the_plain_return_whatever_the_objective(kind):
    """Targets and returns of a capped agent are those of the plain rewards."""
    env = Script()
    model = make(kind, env, gae_lambda=1.0, risk={"objective": "cvar", "alpha": 0.2}, critic={"target": "lambda_return"})
    model.policy.budget.caps.fill_(-5.0)
    collect(model)
    found = prepared(model)
    where = np.argwhere(env.terminated[:T])
    assert len(where)
    for t, b in where:
        assert found.returns[t, b].item() == pytest.approx(env.rewards[t, b], abs=1e-5)


def test_finished_episodes_are_remembered_with_their_return_or_its_predicted_distribution():
    env, gamma = Script(), 0.9
    model = make(env=env, gamma=gamma, risk={"objective": "cvar", "alpha": 0.2})
    collect(model)
    finished = prepared(model).finished
    running, discount, totals, truncated = np.zeros(B), np.ones(B), [], []
    for t in range(T):
        running, discount = running + discount * env.rewards[t], discount * gamma
        for b in np.flatnonzero(env.dones[t]):
            if env.terminated[t, b]:
                totals.append(running[b])
            else:
                augmented = np.concatenate((env.finals[t, b], [running[b], discount[b]])).astype(np.float32)
                with torch.no_grad():
                    atoms = model.policy.raw_atoms(model.policy.inputs(torch.from_numpy(augmented)))
                truncated.append(running[b] + discount[b] * atoms.sort(-1).values.mean(0).double().numpy())
            running[b], discount[b] = 0.0, 1.0
    assert totals
    assert truncated
    np.testing.assert_allclose(finished.totals, totals, atol=1e-5)
    np.testing.assert_allclose(finished.atoms, truncated, atol=1e-5)
    assert finished.atoms.shape[1] == 6
    assert finished.totals_alpha.shape == (len(totals),)
    assert finished.atoms_alpha.shape == (len(truncated),)


# Neutral, and nearly so.


@mlp_and_lstm
def test_a_neutral_objective_is_no_objective_bit_for_bit(kind):
    found = [make(kind, Script(), **risk).learn(3 * T * B) for risk in ({}, {"risk": {"objective": "neutral"}})]
    assert torch.equal(weights(found[0].policy), weights(found[1].policy))
    assert not isinstance(found[1].env, ReturnObserver)


@pytest.mark.parametrize("cap", [math.inf, 1e6])
@pytest.mark.parametrize(
    "risk",
    [
        {"objective": "cvar", "alpha": 1.0},
        {"objective": "mean_cvar", "weight": 0.0},
        {"objective": "constrained", "limit": -1e6},
    ],
)
@mlp_and_lstm
def test_an_objective_that_caps_nothing_trains_as_the_neutral_one(kind, risk, cap):
    """The cap is above every return, and so few episodes end that it stays there; the policy is shown nothing more."""
    models = []
    for config in (None, {**risk, "observe_return": False}):
        model = make(kind, Script(ends=0.02), risk=config)
        model.policy.budget.caps.fill_(cap)
        for _ in range(3):
            collect(model)
            model.train()
        models.append(model)
    assert models[1].policy.budget.caps.item() == cap
    torch.testing.assert_close(weights(models[0].policy), weights(models[1].policy), atol=1e-4, rtol=1e-3)


# The first pass.


@pytest.mark.parametrize(
    "risk",
    [{"objective": "cvar", "alpha": 0.2}, {**CONDITIONED, "levels": 2}, {"objective": "mean_cvar", "observe_return": False}],
    ids=["cvar", "conditioned", "unseen"],
)
@mlp_and_lstm
def test_on_the_first_pass_every_ratio_is_one(kind, risk):
    """Caps, the scale of returns and the statistics of observations all move between rollouts, and never inside one."""
    env = Script(ends=0.4)
    model = make(kind, env, risk={"anneal": 0.0, **risk}, normalize_obs=True)
    model.policy.budget.caps.fill_(0.5)
    for _ in range(3):
        caps = model.policy.budget.caps.clone()
        collect(model)
        check_ratios(model)
        model.train()
    assert not torch.equal(model.policy.budget.caps, caps)


def check_ratios(model):
    batch = prepared(model).batch
    with torch.no_grad():
        dist_params = model.policy.dist_params(batch.features(model.policy)[0])
    real, action_dist = batch.weights > 0.0, model.policy.action_dist
    ratio = (action_dist.log_prob(dist_params, batch.actions) - action_dist.log_prob(batch.dist_params, batch.actions)).exp()[
        real
    ]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked at first"])
@mlp_and_lstm
def test_the_first_step_of_every_update_reports_no_kl(kind, masked):
    """Also where nothing can be learnt from the first rollout, but its episodes end and set the cap."""
    env = Script(ends=0.6)
    env.weights = np.ones(env.rewards.shape, np.float32)
    env.weights[: T if masked else 0] = 0.0
    env.rewards *= 20.0
    plain = {"policy_kwargs": {"ortho_init": False}, "learning_rate": 1e-2, "n_epochs": 1, "batch_size": T * B}
    model = make(kind, env, risk={"objective": "cvar", "alpha": 0.2, "anneal": 0.0}, **plain)
    for _ in range(3):
        collect(model)
        model.train()
        assert model.logger.name_to_value.get("train/approx_kl", 0.0) == pytest.approx(0.0, abs=1e-6)
    assert model.policy.budget.caps.isfinite().all()
    assert "train/approx_kl" in model.logger.name_to_value


# Around the agent.


def test_the_environment_is_return_augmented_once():
    for env in (ReturnObserver(Script(), 0.99), VecMonitor(ReturnObserver(Script(), 0.99))):
        model = make(env=env, risk={"objective": "cvar"})
        assert model.env is env
        assert model.observation_space.shape == (D + 2,)
    model = make(env=Script(), risk={"objective": "cvar"})
    model.set_env(model.env)
    assert isinstance(model.env, ReturnObserver)
    assert not isinstance(model.env.venv, ReturnObserver)
    model.set_env(Script())
    assert isinstance(model.env, ReturnObserver)


@pytest.mark.parametrize(
    ("env", "risk"),
    [
        (lambda: ReturnObserver(Script(), 0.5), {"objective": "cvar"}),  # another discount than the agent's
        (
            lambda: ReturnObserver(Script(), 0.99),
            CONDITIONED,
        ),  # no alpha: a column of the environment would be taken for it
        (lambda: ReturnObserver(Script(), 0.99, [0.1, 0.4]), {"objective": "cvar"}),  # a column too many
        (lambda: VecNormalize(ReturnObserver(Script(), 0.99), norm_reward=False), {"objective": "cvar"}),  # scaled returns
    ],
    ids=["gamma", "no tails", "tails", "normalised"],
)
def test_an_observer_that_does_not_fit_the_agent_is_refused(env, risk):
    with pytest.raises(ValueError, match="ReturnObserver"):
        make(env=env(), risk=risk)


def test_a_discount_of_zero_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        make(env=Script(), gamma=0.0, risk={"objective": "cvar"})
    make(env=Script(), gamma=0.0, risk={"objective": "neutral"})


def augmented(n):
    rng = np.random.default_rng(5)
    return np.concatenate((rng.normal(size=(n, D)), rng.normal(size=(n, 1)), np.full((n, 1), 0.5)), axis=1).astype(np.float32)


def conditioned_agent(**risk):
    model = make(env=Script(), risk={**CONDITIONED, **risk}, policy_kwargs={"ortho_init": False})
    model.policy.budget.caps.copy_(torch.linspace(-2.0, 2.0, 6))
    return model


def test_predict_adds_the_tail_that_was_set():
    model, obs = conditioned_agent(), augmented(7)
    assert model.policy.budget.alpha.item() == pytest.approx(0.1)
    answers = []
    for alpha in (0.1, 0.25, 0.4):
        model.set_risk(alpha)
        full = np.concatenate((obs, np.full((7, 1), alpha)), axis=1)
        answers.append(model.predict(obs, deterministic=True)[0])
        np.testing.assert_allclose(answers[-1], model.predict(full, deterministic=True)[0], atol=1e-6)
        np.testing.assert_allclose(model.predict(obs[2], deterministic=True)[0], answers[-1][2], atol=1e-6)
    assert not np.allclose(answers[0], answers[2])


@pytest.mark.parametrize("alpha", [0.0999, 0.4001, 0.0, 1.0])
def test_a_tail_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"between 0\.1 and 0\.4"):
        conditioned_agent().set_risk(alpha)


def test_an_agent_of_one_objective_cannot_change_its_alpha():
    for risk in ({"objective": "cvar"}, {"objective": "neutral", "alpha": (0.1, 0.4)}, None):
        with pytest.raises(ValueError, match="one objective"):
            make(env=Script(), risk=risk).set_risk(0.2)


@pytest.mark.parametrize("risk", [{"objective": "cvar"}, CONDITIONED])
def test_an_agent_that_must_see_the_return_says_how_to_show_it(risk):
    model = make(env=Script(), risk=risk)
    for obs in (np.zeros(D), np.zeros((5, D))):
        with pytest.raises(ValueError, match="ReturnAugmentedEnv"):
            model.predict(obs)


def test_an_agent_that_does_not_look_at_the_return_takes_plain_observations():
    for risk in ({"objective": "cvar", "observe_return": False}, {**CONDITIONED, "observe_return": False}):
        model = make(env=Script(), risk=risk, policy_kwargs={"ortho_init": False})
        obs = augmented(4)
        plain, _ = model.predict(obs[:, :D], deterministic=True)
        np.testing.assert_allclose(plain, model.predict(obs, deterministic=True)[0], atol=1e-6)
        assert model.predict(obs[0, :D])[0].shape == (2,)


@pytest.mark.parametrize("width", [D - 1, D + 1, D + 4])
def test_observations_of_any_other_width_are_refused(width):
    with pytest.raises(ValueError, match="shape"):
        conditioned_agent().predict(np.zeros((2, width)))


# Saving.


def saved(tmp_path, **risk):
    model = make(env=Script(ends=0.4), risk={"objective": "cvar", "alpha": 0.2, "anneal": 0.0, **risk})
    model.learn(2 * T * B)
    model.save(tmp_path / "model")
    return model, tmp_path / "model"


def test_a_loaded_agent_brings_caps_and_remembered_returns(tmp_path):
    model, path = saved(tmp_path, objective="constrained", limit=5.0)
    assert model.policy.budget.caps.isfinite().all()
    assert model.objective.multiplier > 0.0
    loaded = DistributionalPPO.load(path)
    assert torch.equal(loaded.policy.budget.caps, model.policy.budget.caps)
    assert loaded.objective.state_dict() == model.objective.state_dict()
    assert loaded.objective.budget is loaded.policy.budget
    obs = augmented(5)
    np.testing.assert_array_equal(*(one.predict(obs, deterministic=True)[0] for one in (model, loaded)))
    loaded.set_env(Script(ends=0.4))
    loaded.learn(T * B)
    assert not torch.equal(loaded.policy.budget.caps, model.policy.budget.caps)


class Tails(BaseCallback):
    """Write down the tail that is served, and whether the search for the cap is over, before every rollout."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_rollout_start(self):
        self.seen.append((self.model.objective._annealed(0.2), self.model.objective._searched))

    def _on_step(self):
        return True


@pytest.mark.parametrize("anneal", [0.3, 0.8, 1.0])
def test_the_tail_of_an_agent_shrinks_to_its_end_and_stays_there(tmp_path, anneal):
    """Also through a second training, which begins its progress again, and through a file."""
    risk = {"objective": "cvar", "alpha": 0.2, "anneal": anneal}
    model, tails = make(env=Script(ends=0.4, steps=14 * T), risk=risk), Tails()
    model.learn(10 * T * B, callback=tails)
    served = [tail for tail, _ in tails.seen] + [model.objective._annealed(0.2)]
    assert served[0] == pytest.approx(0.5)
    assert all(later <= earlier for earlier, later in itertools.pairwise(served))
    model.save(tmp_path / "model")
    for again in (model, DistributionalPPO.load(tmp_path / "model", env=Script(ends=0.4))):
        tails = Tails()
        again.learn(3 * T * B, callback=tails)
        assert tails.seen == [(0.2, True)] * 3


@pytest.mark.parametrize("wrap", [lambda env: env, VecMonitor], ids=["plain", "monitored"])
def test_a_loaded_agent_takes_the_environment_that_it_was_made_with(tmp_path, wrap):
    """What ``DistributionalPPO(..., env)`` takes, ``load(path, env)`` must take as well, as SB3's users write it."""
    _, path = saved(tmp_path)
    DistributionalPPO.load(path, env=wrap(Script())).learn(T * B)


def test_a_loaded_agent_takes_a_return_augmented_environment(tmp_path):
    _, path = saved(tmp_path)
    loaded = DistributionalPPO.load(path, env=ReturnObserver(Script(), 0.99))
    before = weights(loaded.policy)
    loaded.learn(T * B)
    assert not torch.equal(weights(loaded.policy), before)


def test_the_alpha_that_was_set_is_saved(tmp_path):
    model = conditioned_agent()
    model.set_risk(0.3)
    model.save(tmp_path / "model")
    assert DistributionalPPO.load(tmp_path / "model").policy.budget.alpha.item() == pytest.approx(0.3)
