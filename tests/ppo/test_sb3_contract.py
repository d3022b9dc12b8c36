"""The contract with SB3 users: callbacks, loggers, wrappers, evaluation, recurrent prediction, saving and loading."""

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor, VecNormalize

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import random_walk

T, B = 8, 4
POLICIES = ("MlpPolicy", "MlpLstmPolicy")
both = pytest.mark.parametrize("policy", POLICIES)


class Copying(gym.Env):
    """The reward is how near the action is to the first number of the observation; ten steps an episode."""

    observation_space = spaces.Box(-1.0, 1.0, (3,))

    def __init__(self, action_space=None):
        self.action_space = action_space or spaces.Box(-1.0, 1.0, (2,))
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.obs = self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = -float(np.abs(np.asarray(action, np.float64) - self.obs[0]).sum())
        self.t += 1
        self.obs = self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)
        return self.obs, reward, False, self.t == 10, {}


def copies(n=B, seed=0, action_space=None):
    return make_vec_env(lambda: Copying(action_space), n, seed=seed)


def make(policy="MlpPolicy", env=None, **kwargs):
    lstm = {"lstm_hidden_size": 5} if policy == "MlpLstmPolicy" else {}
    return DistributionalPPO(
        policy,
        env if env is not None else copies(),
        n_steps=T,
        critic={"num_quantiles": 4},
        policy_kwargs={"net_arch": [6], **lstm},
        **{"seed": 0, **kwargs},
    )


def observations(*shape):
    return np.random.default_rng(0).uniform(-1.0, 1.0, (*shape, 3)).astype(np.float32)


def raw_quantiles(model):
    with torch.no_grad():
        return model.policy.raw_atoms(torch.from_numpy(observations(5)))


# Environments.


def vector_poles():
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * B, autoreset_mode=AutoresetMode.SAME_STEP)


ENVS = {
    "id": lambda: "CartPole-v1",
    "gym env": lambda: Copying(),
    "monitored": lambda: Monitor(Copying()),
    "dummy": lambda: copies(),
    "vec monitor": lambda: VecMonitor(DummyVecEnv([Copying] * B)),
    "vec normalize": lambda: VecNormalize(copies(), norm_reward=False),
    "trading": lambda: TradingVecEnv(random_walk(200, seed=0), n_envs=B, seed=0, episode_length=20, fee=0.001),
    "trading monitored": lambda: VecMonitor(
        TradingVecEnv(random_walk(200, seed=0), n_envs=B, seed=0, episode_length=20, fee=0.001)
    ),
    "vector env": lambda: vector_poles(),
    "adapter": lambda: VecMonitor(GymVectorAdapter(vector_poles(), seed=0)),
}


@pytest.mark.parametrize("name", ENVS)
@both
def test_every_kind_of_environment_can_be_learnt_on(policy, name):
    check_learning(make(policy, ENVS[name]()))


def test_environments_in_other_processes_can_be_learnt_on():
    check_learning(make("MlpLstmPolicy", make_vec_env("CartPole-v1", 1, seed=0, vec_env_cls=SubprocVecEnv)))


def check_learning(model):
    before = model.policy.actor[0].weight.detach().clone()
    assert model.learn(12 * T) is model
    assert model.num_timesteps >= 12 * T
    assert model.num_timesteps % (T * model.n_envs) == 0
    assert not torch.equal(model.policy.actor[0].weight, before)
    actions, _ = model.predict(model.env.reset())
    assert all(model.action_space.contains(action) for action in actions)
    model.env.close()


@pytest.mark.parametrize(
    "actions",
    [spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-3.0, 0.5, (2, 2)), spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 3])],
    ids=["box", "matrix", "discrete", "multi"],
)
@both
def test_every_kind_of_action_can_be_learnt_and_evaluated(policy, actions):
    model = make(policy, copies(action_space=actions)).learn(2 * T * B)
    mean, _ = evaluate_policy(model, copies(2, action_space=actions), n_eval_episodes=2)
    assert mean < 0.0


def test_a_squashed_policy_never_leaves_the_box():
    squashed = {"squash_output": True, "log_std_init": 2.0}
    env = copies(action_space=spaces.Box(-1.0, 0.1, (2,)))
    model = DistributionalPPO("MlpPolicy", env, n_steps=T, policy_kwargs=squashed, seed=0)
    model.learn(4 * T * B)  # the environment checks every action


def test_a_gymnasium_vector_env_is_taken_wherever_an_env_is(tmp_path):
    model = make(env=vector_poles()).learn(T * B)
    model.set_env(vector_poles())
    model.learn(T * B)
    model.save(tmp_path / "model")
    DistributionalPPO.load(tmp_path / "model", env=vector_poles()).learn(T * B)


def test_learning_continues_after_set_env():
    model = make("MlpLstmPolicy", copies(seed=0)).learn(T * B)
    other = copies(seed=9)
    model.set_env(other)
    assert model.get_env() is other
    model.learn(T * B, reset_num_timesteps=False)
    assert model.num_timesteps == 2 * T * B


def test_it_is_an_sb3_algorithm_and_unknown_policies_are_refused():
    assert isinstance(make(), OnPolicyAlgorithm)
    with pytest.raises(ValueError, match="TransformerPolicy"):
        make("TransformerPolicy")


# Callbacks.


class Reading(BaseCallback):
    """Keeps what community callbacks read from `locals`."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.seen, self.events, self.stop_after = [], [], stop_after

    def _on_training_start(self):
        self.events.append(("training", self.locals["total_timesteps"]))

    def _on_rollout_start(self):
        self.events.append("start")

    def _on_rollout_end(self):
        self.events.append("end")

    def _on_step(self):
        names = ("infos", "rewards", "dones", "new_obs", "actions", "clipped_actions", "n_steps")
        self.seen.append({name: self.locals[name] for name in names} | {"obs": self.locals["obs_tensor"].numpy().copy()})
        return self.stop_after is None or len(self.seen) < self.stop_after

    def _on_training_end(self):
        self.events.append("done")


@both
def test_callbacks_are_called_in_order_and_find_what_they_look_for(policy):
    reading = Reading()
    model = make(policy).learn(2 * T * B, callback=reading)
    assert reading.events == [("training", 2 * T * B), "start", "end", "start", "end", "done"]
    assert len(reading.seen) == 2 * T
    assert reading.num_timesteps == model.num_timesteps
    for step, found in enumerate(reading.seen):
        assert found["rewards"].shape == found["dones"].shape == (B,)
        assert found["new_obs"].shape == (B, 3)
        assert found["clipped_actions"].shape == (B, 2)
        assert found["n_steps"] == step % T
        assert len(found["infos"]) == B
        assert list(found["dones"]) == ["terminal_observation" in info for info in found["infos"]]
        assert found["dones"].all() == (step % 10 == 9)
    for earlier, later in zip(reading.seen, reading.seen[1:], strict=False):
        np.testing.assert_array_equal(later["obs"], earlier["new_obs"])


def test_actions_in_locals_are_arrays_as_sb3s_are():
    reading = Reading()
    make().learn(T * B, callback=reading)
    for found in reading.seen:
        assert isinstance(found["actions"], np.ndarray)
        np.testing.assert_array_equal(np.clip(found["actions"], -1.0, 1.0), found["clipped_actions"])


def test_what_a_callback_keeps_is_not_overwritten_later():
    reading = Reading()
    make().learn(2 * T * B, callback=reading)
    assert len({found["new_obs"].tobytes() for found in reading.seen}) == 2 * T
    assert len({np.asarray(found["actions"]).tobytes() for found in reading.seen}) == 2 * T


def test_a_callback_can_stop_the_training():
    reading = Reading(stop_after=T + 3)
    model = make().learn(100 * T * B, callback=reading)
    assert model.num_timesteps == (T + 3) * B
    assert model._n_updates == model.n_epochs
    stopped = make().learn(100 * T * B, callback=StopTrainingOnMaxEpisodes(max_episodes=3))
    assert stopped.num_timesteps < 20 * T * B


@both
def test_evaluation_and_checkpoint_callbacks_work(policy, tmp_path):
    folder = str(tmp_path)
    eval_env = VecNormalize(copies(2, seed=7), norm_reward=False, training=False)
    evaluation = EvalCallback(eval_env, n_eval_episodes=3, eval_freq=T, best_model_save_path=folder, log_path=folder, verbose=0)
    checkpoints = CheckpointCallback(save_freq=T, save_path=folder, save_vecnormalize=True)
    model = make(policy, VecNormalize(copies(), norm_reward=False))
    model.learn(2 * T * B, callback=[evaluation, checkpoints])
    assert np.load(tmp_path / "evaluations.npz")["results"].shape == (2, 3)
    assert evaluation.best_mean_reward < 0.0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"best_model.safetensors", f"rl_model_{T * B}_steps.zip", f"rl_model_vecnormalize_{2 * T * B}_steps.pkl"} <= names
    best = DistributionalPPO.load(tmp_path / "best_model.zip")
    assert best.predict(observations(2))[0].shape == (2, 2)


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_a_progress_bar_can_be_shown(capsys):
    make().learn(2 * T * B, progress_bar=True)
    assert f"{2 * T * B}/{2 * T * B}" in capsys.readouterr().out


# Logger.


@both
def test_dashboards_find_their_keys(policy, tmp_path):
    model = make(policy)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(3 * T * B)
    model.logger.close()
    table = pd.read_csv(tmp_path / "progress.csv")
    assert len(table) == 3
    for key in ("rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps", "time/total_timesteps", "time/iterations"):
        assert np.isfinite(table[key].iloc[-1]), key
    losses = ("policy_gradient_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
    for key in (*losses, "learning_rate", "n_updates", "std", "grad_norm"):
        assert np.isfinite(table[f"train/{key}"].iloc[1:]).all(), key
    assert table["rollout/ep_len_mean"].iloc[-1] == 10.0
    assert list(table["time/total_timesteps"]) == [T * B, 2 * T * B, 3 * T * B]


def test_the_table_on_the_screen_can_be_printed(capsys):
    make(verbose=1).learn(2 * T * B)
    assert "ep_rew_mean" in capsys.readouterr().out


# Evaluation and prediction.


@both
def test_evaluate_policy_carries_the_state_as_a_loop_over_predict_does(policy):
    model = make(policy).learn(T * B)
    env = copies(1)
    env.seed(3)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=3, return_episode_rewards=True)
    assert lengths == [10, 10, 10]

    env.seed(3)
    obs, state, start = env.reset(), None, np.ones(1, bool)
    played = np.zeros(3)
    for episode in range(3):
        for _ in range(10):
            action, state = model.predict(obs, state, start, deterministic=True)
            obs, reward, start, _ = env.step(action)
            played[episode] += reward[0]
    np.testing.assert_allclose(returns, played, rtol=1e-5)


def test_the_agent_acts_in_evaluation_as_in_training():
    """Same observations, same weights: the recurrent state of predict is that of the rollout."""
    model = make("MlpLstmPolicy", copies())
    model.learn(T * B)
    dist_params, obs = model.rollout_buffer.dist_params[..., :2], model.rollout_buffer.obs
    fresh = make("MlpLstmPolicy", copies())  # the weights that collected the rollout
    state, start = None, np.ones(B, bool)
    for t in range(T):
        actions, state = fresh.predict(obs[t].numpy(), state, start, deterministic=True)
        np.testing.assert_allclose(actions, dist_params[t].clip(-1.0, 1.0), atol=1e-6)
        start = (model.rollout_buffer.terminated | model.rollout_buffer.truncated)[t].numpy()


@both
def test_predict_takes_one_observation_or_many(policy):
    model = make(policy)
    single, state = model.predict(observations(), deterministic=True)
    batch, states = model.predict(observations(B), deterministic=True)
    assert single.shape == (2,)
    assert batch.shape == (B, 2)
    if policy == "MlpLstmPolicy":
        assert state[0].shape == (1, 1, 5)
        assert states[0].shape == (1, B, 5)
    else:
        assert state is None


# Saving.


@pytest.mark.parametrize("normalize_obs", [False, True])
@both
def test_a_saved_model_predicts_the_same_when_loaded(policy, normalize_obs, tmp_path):
    model = make(policy, normalize_obs=normalize_obs).learn(2 * T * B)
    model.save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model")
    state = other_state = None
    for obs in observations(3, B):
        actions, state = model.predict(obs, state, deterministic=True)
        other, other_state = loaded.predict(obs, other_state, deterministic=True)
        np.testing.assert_array_equal(actions, other)
    if policy == "MlpPolicy":
        assert torch.equal(raw_quantiles(model), raw_quantiles(loaded))
    assert (loaded.n_steps, loaded.batch_size, loaded.critic_config) == (model.n_steps, model.batch_size, model.critic_config)


def test_a_loaded_model_knows_that_it_has_been_trained(tmp_path):
    """With a learning rate of 0 nothing may move, least of all what trained critics predict."""
    make().learn(3 * T * B).save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=copies(seed=5))
    assert loaded._n_updates == 3 * loaded.n_epochs
    loaded.lr.set(0.0)
    before = raw_quantiles(loaded)
    loaded.learn(T * B)
    torch.testing.assert_close(raw_quantiles(loaded), before, rtol=1e-4, atol=1e-4)


def test_a_model_with_copied_parameters_keeps_its_predictions():
    """The same for weights that came through set_parameters into a model that has not been trained itself."""
    source, target = make().learn(3 * T * B), make(learning_rate=0.0, seed=1)
    target.set_parameters(source.get_parameters())
    before = raw_quantiles(target)
    assert torch.equal(before, raw_quantiles(source))
    target.learn(T * B)
    torch.testing.assert_close(raw_quantiles(target), before, rtol=1e-4, atol=1e-4)


def test_a_loaded_model_continues_with_its_optimizer(tmp_path):
    model = make().learn(2 * T * B)
    model.save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=copies())
    (old,), (new,) = (each.policy.optimizer.state_dict()["state"].values() for each in (model, loaded))
    for name, value in old.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(new[name])), name
    before = loaded.policy.actor[0].weight.detach().clone()
    loaded.learn(T * B, reset_num_timesteps=False)
    assert loaded.num_timesteps == 3 * T * B
    assert not torch.equal(loaded.policy.actor[0].weight, before)


@pytest.mark.parametrize("given_rate", [1e-3, lambda progress: 1e-3], ids=["number", "function"])
def test_a_learning_rate_that_was_set_is_saved(given_rate, tmp_path):
    model = make(learning_rate=given_rate).learn(T * B)
    model.lr.set(7e-5)
    model.save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", env=copies())
    loaded.learn(T * B)
    assert loaded.policy.optimizer.param_groups[0]["lr"] == 7e-5


SAVED_RATES = {"a number": 1e-3, "a function": lambda progress: 1e-3}
LOADED_RATES = {"another number": 5e-4, "another function": lambda progress: 5e-4, "the old number": 1e-3}


@pytest.mark.parametrize("loaded_rate", LOADED_RATES)
@pytest.mark.parametrize("saved_rate", SAVED_RATES)
@pytest.mark.parametrize("way", ["argument", "custom object"])
def test_a_learning_rate_given_when_loading_counts(way, saved_rate, loaded_rate, tmp_path):
    """SB3's two ways to change a setting of a saved model; even when another rate had been set before saving."""
    model, given_rate = make(learning_rate=SAVED_RATES[saved_rate]).learn(T * B), LOADED_RATES[loaded_rate]
    model.lr.set(7e-5)
    model.save(tmp_path / "model")
    change = {"learning_rate": given_rate}
    change = change if way == "argument" else {"custom_objects": change}
    loaded = DistributionalPPO.load(tmp_path / "model", env=copies(), **change).learn(T * B)
    assert loaded.policy.optimizer.param_groups[0]["lr"] == (given_rate(1.0) if callable(given_rate) else given_rate)


@both
def test_parameters_can_be_taken_out_and_put_in(policy):
    source, target = make(policy, seed=0).learn(T * B), make(policy, seed=1)
    target.set_parameters(source.get_parameters())
    obs = observations(B)
    np.testing.assert_array_equal(source.predict(obs, deterministic=True)[0], target.predict(obs, deterministic=True)[0])
    target.learn(T * B)  # the weights that the optimizer moves are the ones that act
    assert not np.array_equal(source.predict(obs, deterministic=True)[0], target.predict(obs, deterministic=True)[0])


class Asking(BaseCallback):
    """Reads the values at some steps only, so that the critics have to catch up."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.found, self.at_end = every, [], []

    def _on_step(self) -> bool:
        step = self.locals["n_steps"]
        if step % self.every == self.every - 1:
            self.found.append((step, self.locals["values"], self.locals.get("log_probs")))
        return True

    def _on_rollout_end(self) -> None:
        assert "values" in self.locals
        self.at_end.append((self.locals["values"], self.model.rollout_buffer.values, self.model.rollout_buffer.log_probs))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("policy", "kwargs"),
    [
        ("MlpPolicy", {}),
        ("MlpLstmPolicy", {"lstm_hidden_size": 8}),
        ("MlpLstmPolicy", {"lstm_hidden_size": 8, "shared_lstm": True}),
        ("MlpLstmPolicy", {"lstm_hidden_size": 8, "enable_critic_lstm": False}),
        ("MlpLstmPolicy", {"lstm_hidden_size": 8, "recurrent_cell": "gru", "n_lstm_layers": 2}),
        (ActorCriticPolicy, {}),
    ],
)
def test_callbacks_find_values_and_log_probabilities(policy, kwargs, every):
    asking = Asking(every)
    env = make_vec_env("CartPole-v1", 3, seed=0)
    model = DistributionalPPO(policy, env, n_steps=64, seed=0, policy_kwargs=kwargs).learn(2 * 64 * 3, callback=[asking])

    for step, values, log_probs in asking.found[len(asking.found) // 2 :]:  # the units are found in the first rollout
        _, of_rollout, log_probs_of_rollout = asking.at_end[-1]
        assert values.shape == (3, 1)
        np.testing.assert_allclose(values.squeeze(-1), of_rollout[step], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(log_probs, log_probs_of_rollout[step], rtol=1e-5)
    assert bool(model.rollout_buffer.terminated.any()), "episodes must end inside the rollout"
    following, *_ = asking.at_end[-1]
    assert not np.allclose(following.squeeze(-1), asking.at_end[-1][1][-1])


def test_asking_for_values_changes_no_training():
    trained = [make("MlpLstmPolicy").learn(2 * T * B, callback=callback) for callback in (None, Asking(1))]
    left, right = (each.policy.state_dict() for each in trained)
    assert all(torch.equal(left[name], right[name]) for name in left)
