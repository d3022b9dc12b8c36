"""The arguments of SB3's PPO and sb3-contrib's RecurrentPPO, with their meaning, and state that is changed from outside."""

import inspect

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv
from test_observations import SPACES, Drawing
from test_sb3_contract import Copying
from torch import nn

from tailguard import DistributionalPPO
from tailguard.io.state import random_state
from tailguard.ppo.critic import critic_errors
from tailguard.ppo.rollout import SdeActing

T, B = 8, 4


def make(policy="MlpPolicy", n_envs=B, **kwargs):
    network = {"net_arch": [6], **({"lstm_hidden_size": 5} if "Lstm" in policy else {})} | kwargs.pop("policy_kwargs", {})
    env = make_vec_env(Copying, n_envs, seed=0)
    options = {"n_steps": T, "critic": {"num_quantiles": 4}, "seed": 0} | kwargs
    return DistributionalPPO(policy, env, policy_kwargs=network, **options)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


# Arguments.


def test_a_whole_number_is_a_log_std():
    assert (make(policy_kwargs={"log_std_init": -2}).policy.log_std == -2.0).all()


def test_every_argument_of_ppo_is_taken_by_its_name_and_position():
    theirs = [name for name in inspect.signature(PPO).parameters if not name.startswith("rollout_buffer")]
    ours = inspect.signature(DistributionalPPO).parameters
    positional = [name for name, parameter in ours.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name in theirs if name != "_init_setup_model"]
    assert {"rollout_buffer_class", "rollout_buffer_kwargs", "_init_setup_model"} <= set(ours)
    with pytest.raises(ValueError, match="rollout_buffer_class is not supported"):
        make(rollout_buffer_class=object)


def test_numbers_stand_for_settings_of_groups():
    model = make(ent_coef=0.02, target_kl=0.03)
    assert model.ent_coef == model.entropy.value == 0.02
    assert (model.kl.config.mode, model.kl.config.target, model.kl.config.stop_factor) == ("early_stop", 0.03, 1.5)
    assert model.target_kl == 0.03
    for pair in ({"ent_coef": 0.1, "entropy": {}}, {"target_kl": 0.1, "kl": {}}):
        with pytest.raises(ValueError, match=next(iter(pair))):
            make(**pair)


def test_the_entropy_bonus_stays_where_it_is_set():
    model = make(entropy={"initial": 0.01})
    for _ in range(10):
        model.entropy.step(None, -1.0)  # a critic worse than a constant
    assert model.ent_coef == 0.01


def test_clip_range_follows_its_schedule():
    model = make(clip_range=LinearSchedule(0.3, 0.1, 1.0), n_epochs=1)
    seen = []
    model.learn(2 * T * B, callback=lambda found, _: seen.append(found["self"]._update_settings().policy.clip) or True)
    assert seen[0] == 0.3
    assert model.logger.name_to_value["train/clip_range"] == pytest.approx(0.1)
    model.clip_range = 0.25  # a number from outside counts as well
    assert model._update_settings().policy.clip == 0.25


def test_the_clip_range_of_values_is_in_units_of_the_return():
    model = make(clip_range_vf=0.5).learn(T * B)
    assert model._ret_std_snapshot != 1.0
    assert model._update_settings().value_clip == pytest.approx(0.5 / model._ret_std_snapshot)
    assert not model._update_settings().compiled
    batch = model.rollout_buffer.experience().normalised(model.policy)
    moved = batch.old_atoms + 2.0 / model._ret_std_snapshot
    errors = critic_errors(model._update_settings().value_clip, model.policy.return_dist, moved, moved + 9.0, batch.old_atoms)
    back = model.policy.return_dist.distance(batch.old_atoms + 0.5 / model._ret_std_snapshot, moved + 9.0)
    torch.testing.assert_close(errors, back)
    with pytest.raises(AssertionError, match=r"clip_range_vf is -0.2"):
        make(clip_range_vf=-0.2)
    with pytest.raises(ValueError, match="categorical"):
        make(clip_range_vf=0.2, critic={"distribution": "categorical"})


def test_advantages_are_left_alone_when_asked_for():
    model = make(normalize_advantage=False).learn(T * B)
    found = model.rollout_buffer
    np.testing.assert_allclose(found.experience().batch.advantages.reshape(T, B), found.advantages, atol=1e-5)
    with pytest.raises(AssertionError, match="greater than 1"):
        make(n_envs=1, n_steps=1)
    make(n_envs=1, n_steps=1, normalize_advantage=False).learn(2)


class Watched(DistributionalPPO):
    """Keeps the advantages of every minibatch."""

    def _setup_model(self):
        super()._setup_model()
        self.seen, gradient = [], self.update.gradient

        def watch(batch, *others):
            self.seen.append((batch.advantages, batch.weights))
            return gradient(batch, *others)

        self.update.gradient = watch


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("policy", "batch_size"), [*(("MlpPolicy", size) for size in (8, 5, 31)), ("MlpLstmPolicy", 8)])
def test_advantages_are_standardised_in_each_minibatch_when_asked_for(policy, batch_size, compiled):
    found = {}
    for per_mini_batch in (True, False):
        network = {"net_arch": [6], "lstm_hidden_size": 5, "compiled": compiled}
        found[per_mini_batch] = Watched(
            policy,
            make_vec_env(Copying, B, seed=0),
            n_steps=T,
            batch_size=batch_size,
            seed=0,
            policy_kwargs=network,
            normalize_advantage_per_mini_batch=per_mini_batch,
        )
        found[per_mini_batch].learn(T * B)
    for (alone, weights), (together, _) in zip(found[True].seen[: T * B // batch_size], found[False].seen, strict=False):
        weights = weights / weights.sum()
        assert (weights * alone).sum().abs() < 1e-5
        assert (weights * alone.square()).sum() == pytest.approx(1.0, abs=1e-4)
        assert (weights * together).sum().abs() > 1e-3  # these are standardised all together
        kept = weights > 0.0
        assert torch.corrcoef(torch.stack((alone[kept], together[kept])))[0, 1] > 0.9999
    if batch_size == 31:
        last, weights = found[True].seen[1]
        assert last.shape == (1,)
        assert last.abs() > 1e-3  # a single one is left as it is, or nothing could be learnt from it


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_the_users_optimizer_moves_the_networks(kind):
    model = make(policy_kwargs={"optimizer_class": kind, "optimizer_kwargs": {"weight_decay": 0.01}})
    before = flat(model).clone()
    model.learn(T * B)
    assert type(model.policy.optimizer) is kind
    assert model.policy.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert (flat(model) != before).all()


@pytest.mark.parametrize("given", [{"eps": 0.3}, {"betas": (0.5, 0.9)}, {}])
@pytest.mark.parametrize("policy", ["MlpPolicy", ActorCriticPolicy])
def test_arguments_of_an_optimizer_without_a_class_are_those_of_adam_as_in_sb3(policy, given):
    env, network = make_vec_env(Copying, B, seed=0), {"net_arch": [6], "optimizer_kwargs": given}
    model = DistributionalPPO(policy, env, n_steps=T, policy_kwargs=network, seed=0).learn(T * B)
    theirs = PPO("MlpPolicy", env, policy_kwargs=network, device="cpu").policy.optimizer
    assert isinstance(model.policy.optimizer, torch.optim.Adam)
    for name in ("eps", "betas"):
        assert model.policy.optimizer.param_groups[0][name] == theirs.param_groups[0][name], name


def test_an_optimizer_that_is_named_twice_is_said_to_be_the_policys():
    with pytest.warns(UserWarning, match="optimizer sgd is not used"):
        model = make(optimizer={"name": "sgd"}, policy_kwargs={"optimizer_class": torch.optim.AdamW})
    assert type(model.policy.optimizer) is torch.optim.AdamW


def test_a_network_of_the_old_form_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match=r"net_arch=dict\(pi=\.\.\., vf=\.\.\.\)"):
        model = make(policy_kwargs={"net_arch": [{"pi": [3], "vf": [4]}]})
    assert model.policy.net_arch == {"pi": [3], "vf": [4]}


# gSDE.


@pytest.mark.parametrize("options", [{}, {"full_std": False}, {"use_expln": True, "log_std_init": 0.3}])
def test_state_dependent_exploration_has_sb3s_density(options):
    policy = make(use_sde=True, policy_kwargs={"log_std_init": -0.5, **options}).policy
    obs = torch.randn(7, 3)
    latent, mean = policy.latent(obs)
    theirs = StateDependentNoiseDistribution(
        2, full_std=options.get("full_std", True), use_expln=options.get("use_expln", False)
    )
    theirs.proba_distribution_net(6, log_std_init=0.0)
    theirs.proba_distribution(mean, policy.log_std, latent)
    actions = torch.randn(7, 2)
    torch.testing.assert_close(policy.evaluate_actions(obs, actions)[1], theirs.log_prob(actions))


def test_its_noise_is_a_function_of_the_state_for_some_steps():
    model = make("MlpLstmPolicy", use_sde=True, sde_sample_freq=4, n_envs=1, n_steps=4_000)
    assert isinstance(model.acting, SdeActing)
    model.acting.begin(model.rollout_buffer)
    obs, state = torch.ones(1, 3), model.policy.initial_state(1)
    rollout = model.rollout_buffer
    for rollout.filled in range(4_000):
        model.acting.step(rollout, obs, state)
    noise = (rollout.actions - rollout.dist_params[..., :2])[:, 0]
    assert torch.equal(noise[::4], noise[3::4])  # the same state, the same noise
    assert len(noise[::4, 0].unique()) == 1_000
    torch.testing.assert_close(noise[::4].std(0), rollout.dist_params[0, 0, 2:].exp(), rtol=0.1, atol=0.0)


# Changes from outside.


def test_rates_that_are_set_from_outside_count():
    model = make(learning_rate=1e-3)
    model.learn(T * B)
    for change in (
        {"learning_rate": 5e-4},
        {"lr_schedule": lambda _: 2e-4},
        {"learning_rate": LinearSchedule(1e-4, 1e-4, 1.0)},
    ):
        for name, value in change.items():
            setattr(model, name, value)
        model.learn(T * B)
        value = next(iter(change.values()))
        assert model.policy.optimizer.param_groups[0]["lr"] == (value(1.0) if callable(value) else value)
    model.ent_coef = 0.07
    assert model._update_settings().policy.entropy == 0.07


@pytest.mark.parametrize("optimizer", [{}, {"optimizer_class": torch.optim.AdamW}])
def test_frozen_parameters_do_not_move_whatever_momentum_they_have(optimizer):
    model = make(policy_kwargs=optimizer).learn(3 * T * B)
    model.policy.actor.requires_grad_(False)
    frozen, free = model.policy.actor[0].weight, model.policy.critics[0][0].weight
    before = frozen.clone(), free.detach().clone()
    model.learn(2 * T * B)
    assert torch.equal(frozen, before[0])
    assert not torch.equal(free, before[1])
    model.policy.actor.requires_grad_(True)
    model.learn(T * B)
    assert not torch.equal(frozen, before[0])


def test_weights_that_are_assigned_are_trained_on():
    """``load_state_dict(assign=True)`` puts new tensors in the place of those that the optimizer moves."""
    model, same = make(), make()
    source = {name: value.clone() for name, value in make(seed=5).policy.state_dict().items()}
    for other, assign in ((model, True), (same, False)):
        other.policy.load_state_dict({name: value.clone() for name, value in source.items()}, assign=assign)
        other.set_random_seed(3)
        other.learn(2 * T * B)
    assert torch.equal(flat(model), flat(same))
    assert not torch.equal(model.policy.actor[0].weight, source["actor.0.weight"])


def test_some_weights_can_be_set_alone():
    model, other = make(), make(seed=1)
    weights = {"actor.0.weight": other.policy.actor[0].weight.detach().clone()}
    kept = model.policy.actor[2].weight.detach().clone()
    model.set_parameters({"policy": weights}, exact_match=False)
    assert torch.equal(model.policy.actor[0].weight, other.policy.actor[0].weight)
    assert torch.equal(model.policy.actor[2].weight, kept)


# Files.


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_a_policy_is_saved_and_loaded_alone(tmp_path, policy):
    policy = make(policy, policy_kwargs={"activation_fn": nn.ReLU}, normalize_obs=True).learn(T * B).policy
    policy.save(tmp_path / "policy.pkl")
    loaded = type(policy).load(tmp_path / "policy.pkl")
    obs = np.random.default_rng(0).uniform(-1.0, 1.0, (5, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], policy.predict(obs, deterministic=True)[0])


def test_a_model_goes_on_with_another_number_of_environments(tmp_path):
    make("MlpLstmPolicy").learn(T * B).save(tmp_path / "x.zip")
    for force_reset in (True, False):
        loaded = DistributionalPPO.load(tmp_path / "x", make_vec_env(Copying, 1), force_reset=force_reset)
        assert loaded.n_envs == 1
        loaded.learn(T, reset_num_timesteps=False)
        assert loaded.num_timesteps == T * B + T


def test_environments_that_stand_where_they_stood_are_not_reset(tmp_path):
    model = make("MlpLstmPolicy").learn(T * B)
    model.save(tmp_path / "model")
    before = [env.unwrapped.t for env in model.env.envs]
    loaded = DistributionalPPO.load(tmp_path / "model", model.env, force_reset=False)
    loaded.learn(1, reset_num_timesteps=False)
    assert before == [T] * B
    assert loaded.rollout_buffer.starts()[0].tolist() == [False] * B
    assert [env.unwrapped.t for env in loaded.env.envs] == [2 * T - 10] * B


def test_settings_can_be_left_out_of_a_file(tmp_path):
    make(verbose=0, vf_coef=0.9).save(tmp_path / "model", exclude=["vf_coef", "gamma"], include=["gamma"])
    loaded = DistributionalPPO.load(tmp_path / "model", custom_objects={"learning_rate": 2e-5, "nothing": 1})
    assert loaded.vf_coef == 0.5
    assert loaded.learning_rate == 2e-5
    assert loaded.device.type == "cpu"


def test_a_clip_range_that_was_a_function_is_asked_for_again(tmp_path):
    make(clip_range=lambda progress: 0.1 + 0.1 * progress).save(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"clip_range was a function.*load\(clip_range=\.\.\.\)"):
        assert DistributionalPPO.load(tmp_path / "model").clip_range(0.5) == pytest.approx(0.2)
    assert DistributionalPPO.load(tmp_path / "model", clip_range=0.3).clip_range(0.5) == 0.3


def test_what_is_asked_of_a_loaded_model_takes_the_place_of_its_group(tmp_path):
    make(entropy={"initial": 0.01}, kl={"mode": "penalty"}).save(tmp_path / "model")
    loaded = DistributionalPPO.load(tmp_path / "model", ent_coef=0.5, target_kl=0.1)
    assert (loaded.ent_coef, loaded.target_kl) == (0.5, 0.1)


# What callbacks and others read.


class AtRolloutEnd(BaseCallback):
    """Keeps what is in the buffer when a rollout has ended."""

    def _on_step(self):
        assert self.model.rollout_buffer.size() == self.locals["n_steps"] + 1
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        self.found = {
            name: getattr(buffer, name) for name in ("values", "returns", "advantages", "log_probs", "episode_starts")
        }


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_reading_the_buffer_changes_nothing_and_finds_what_is_trained_on(policy):
    reading = AtRolloutEnd()
    model, silent = make(policy), make(policy)
    states = []
    for other, callback in ((model, reading), (silent, None)):
        other.set_random_seed(0)
        other.learn(2 * T * B, callback=callback)
        states.append(random_state()["torch"])
    assert torch.equal(flat(model), flat(silent))
    assert torch.equal(*states)
    assert {values.shape for values in reading.found.values()} == {(T, B)}
    np.testing.assert_allclose(reading.found["advantages"], reading.found["returns"] - reading.found["values"], atol=1e-6)
    rollout = model.rollout_buffer
    expected = torch.distributions.Normal(rollout.dist_params[..., :2], rollout.dist_params[..., 2:].exp()).log_prob(
        rollout.actions
    )
    np.testing.assert_allclose(reading.found["log_probs"], expected.sum(-1), atol=1e-5)
    model.rollout_buffer.reset()
    with pytest.raises(ValueError, match=f"it has 0 of {T} steps"):
        _ = model.rollout_buffer.values


class KeepingObservations(BaseCallback):
    """Keeps what an action is for, as callbacks see it before the step is over."""

    def _on_rollout_start(self):
        self.found = []

    def _on_step(self):
        obs = self.model.env.buf_obs
        self.found.append({key: array.copy() for key, array in obs.items()})
        return True


@pytest.mark.parametrize("name", ["numbers", "image", "dict"])
def test_the_buffer_shows_observations_in_the_shape_of_their_space(name):
    space = SPACES[name]
    policy = {"numbers": "MlpPolicy", "image": "CnnPolicy", "dict": "MultiInputPolicy"}[name]
    env, keeping = DummyVecEnv([lambda: Drawing(space)] * 2), KeepingObservations()
    model = DistributionalPPO(policy, env, n_steps=T, seed=0).learn(T * 2, callback=keeping)
    shown = model.rollout_buffer.observations
    for key, subspace in space.spaces.items() if name == "dict" else [(None, space)]:
        array = shown if key is None else shown[key]
        assert array.shape == (T, 2, *subspace.shape)
        np.testing.assert_array_equal(array[1:], np.stack([found[key] for found in keeping.found[:-1]]))


@pytest.mark.parametrize(
    "actions", [spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)], ids=str
)
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_a_policy_answers_by_sb3s_names(policy, actions):
    model = DistributionalPPO(policy, DummyVecEnv([lambda: Copying(actions)] * 2), n_steps=T, seed=0).learn(T * 2)
    policy, obs = model.policy, torch.rand(6, 3)
    recurrent = []
    if policy.recurrent:  # two sequences of three steps
        recurrent = [(policy.initial_state(2), policy.initial_critic_state(2)), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])]
    chosen, values, log_prob, *after = policy(obs, *recurrent)
    assert chosen.shape == (6, *actions.shape)
    again, same_log_prob, entropy = policy.evaluate_actions(obs, chosen, *recurrent)
    torch.testing.assert_close(again, values)
    torch.testing.assert_close(same_log_prob, log_prob)
    of_actor, of_critics = ([recurrent[0][i], recurrent[1]] if recurrent else [] for i in (0, 1))
    torch.testing.assert_close(policy.predict_values(obs, *of_critics), values)
    distribution = policy.get_distribution(obs, *of_actor)
    if recurrent:
        distribution, state = distribution
        torch.testing.assert_close(state, after[0][0])
    torch.testing.assert_close(distribution.log_prob(chosen.float()), log_prob)
    torch.testing.assert_close(distribution.entropy(), entropy)
