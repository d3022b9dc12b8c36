"""Rollouts on attacked observations: what is shown is what is acted on and stored, and nothing else changes."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.market import random_walk
from tailguard.robust import SAPPOConfig

STEPS, ENVS, EPSILON = 16, 6, 0.2
FIRST = 2  # two thirds of six are attacked: the last four
ROLLOUTS = {"epsilon": EPSILON, "rollouts": 2 / 3, "coefficient": 0.0, "warmup_updates": 0}
POLICIES = ("MlpPolicy", "MlpLstmPolicy")
SMALL = {"MlpPolicy": {"net_arch": [16]}, "MlpLstmPolicy": {"net_arch": [16], "lstm_hidden_size": 8}}


class Walk(gym.Env):
    """Observations that depend on nothing but the seed; every fifth episode terminates, the others are cut after 7 steps."""

    def __init__(self, actions):
        self.observation_space, self.action_space = spaces.Box(-100.0, 100.0, (3,), np.float32), actions
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.episode = 0, self.episode + 1
        return self._observed(), {}

    def step(self, action):
        self.age += 1
        ended = self.age == 7
        return self._observed(), float(self.age), ended and self.episode % 5 == 0, ended and self.episode % 5 != 0, {}

    def _observed(self):
        self.last = (self.np_random.standard_normal(3) * [1.0, 4.0, 0.5]).astype(np.float32)
        return self.last


BOX, CHOICE = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)


def model(policy="MlpPolicy", adversary=None, actions=BOX, **settings):
    kwargs = {**SMALL[policy], **settings.pop("policy_kwargs", {})}
    plan = {"n_steps": STEPS, "n_epochs": 2, "seed": 0, "adversary": adversary, "policy_kwargs": kwargs, **settings}
    agent = DistributionalPPO(policy, DummyVecEnv([lambda: Walk(actions)] * ENVS), **plan)
    agent.policy.actor[-1].weight.data *= 50.0  # it begins nearly constant
    return agent


def collected(*args, updates=1, **kwargs):
    """An agent after `updates` rollouts, the last of them not learnt from."""
    agent = model(*args, **kwargs)
    train = agent.train
    agent.train = lambda: train() if agent.num_timesteps < updates * STEPS * ENVS else None
    return agent.learn(updates * STEPS * ENVS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "idle", [{"epsilon": 0.0}, {"rollouts": 0.0}, {"enabled": False}, {"warmup_updates": 3}], ids=lambda one: next(iter(one))
)
def test_an_idle_attack_changes_no_bit(policy, idle):
    plain, idle_agent = (model(policy, adversary).learn(3 * STEPS * ENVS) for adversary in (None, {**ROLLOUTS, **idle}))
    assert torch.equal(plain.flat.tensor, idle_agent.flat.tensor)
    assert torch.equal(plain.shuffler.get_state(), idle_agent.shuffler.get_state())
    assert torch.equal(plain.rollout_buffer.obs, idle_agent.rollout_buffer.obs)
    assert idle_agent._attack is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("actions", [BOX, CHOICE], ids=["box", "choice"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("objective", ["kl", "action"])
def test_what_is_stored_is_what_the_policy_acted_on(policy, actions, compiled, objective):
    """Replayed step by step with torch: distribution parameters, state, and the ball in the units of the normaliser."""
    threat = {**ROLLOUTS, "rollout_objectives": [objective]}
    agent = collected(policy, threat, actions, updates=2, normalize_obs=True, policy_kwargs={"compiled": compiled})
    rollout, own = agent.rollout_buffer, agent.policy
    state = agent._rollout_start[0]
    with torch.no_grad():
        for t in range(STEPS):
            dist_params, after = own.act(own.inputs(rollout.obs[t]), state)
            torch.testing.assert_close(rollout.dist_params[t], dist_params, rtol=1e-4, atol=1e-5)
            ended = (rollout.terminated | rollout.truncated)[t]
            keep = 1.0 - ended.float().reshape(1, -1, 1)
            state = (after[0] * keep, after[1] * keep) if own.recurrent else after
    true, shown = agent._attack.true_observations(), rollout.obs[:-1]
    assert torch.equal(true[:, :FIRST], shown[:, :FIRST])
    moved = (own.inputs(shown) - own.inputs(true))[:, FIRST:].abs()
    assert (moved <= EPSILON + 1e-5).all()
    assert moved.amax(-1).mean() > 0.9 * EPSILON


def test_some_environments_are_attacked_at_every_step_and_others_now_and_then():
    """Half of them at all steps, each of the others at a share of its own between none and all, drawn for every rollout."""
    agent, shares = model(adversary={**ROLLOUTS, "rollout_presence": "mixed"}), []
    for _ in range(40):
        agent.learn(STEPS * ENVS)
        shown, true = agent.rollout_buffer.obs[:-1], agent._attack.true_observations()
        shares.append((shown != true).any(-1)[:, FIRST:].float().mean(0))
    shares = torch.cat(shares)
    assert (shares == 1.0).float().mean().item() == pytest.approx(0.5, abs=0.12)
    assert shares[shares < 1.0].mean().item() == pytest.approx(0.5, abs=0.08)
    assert shares[shares < 1.0].std().item() > 0.2


def test_environments_and_their_random_numbers_know_nothing_of_it():
    plain, attacked = collected(), collected(adversary=ROLLOUTS)
    assert torch.equal(plain.rollout_buffer.obs[:-1], attacked._attack.true_observations())
    assert np.array_equal(plain._last_obs, attacked._last_obs)  # true: the next rollout begins with it
    assert not torch.equal(plain.rollout_buffer.obs[-1, FIRST:], attacked.rollout_buffer.obs[-1, FIRST:])
    assert np.array_equal(attacked._last_obs, np.stack([env.unwrapped.last for env in attacked.get_env().envs]))
    assert torch.equal(plain.rollout_buffer.rewards, attacked.rollout_buffer.rewards)
    noise = [
        (agent.rollout_buffer.actions - agent.rollout_buffer.dist_params[..., :2]) for agent in (plain, attacked)
    ]  # what was drawn, with a deviation of 1
    torch.testing.assert_close(*noise, rtol=0.0, atol=1e-5)


def test_a_linear_policy_is_moved_by_exactly_what_the_ball_allows():
    """m = W x + b. Towards the far end of its box the first mean moves by eps |w|_1, its column scales included."""
    threat = {**ROLLOUTS, "rollout_objectives": ["action"], "perturbable": [0, 2], "feature_scale": [1.0, 9.0, 0.5]}
    one = spaces.Box(-1.0, 1.0, (1,), np.float32)
    agent = collected("MlpPolicy", threat, one, policy_kwargs={"net_arch": []})
    weight, bias = agent.policy.actor[0].weight.detach()[0], agent.policy.actor[0].bias.detach()[0]
    true = agent._attack.true_observations()
    clean = true @ weight + bias
    reach = EPSILON * (weight.abs() * torch.tensor([1.0, 0.0, 0.5])).sum()
    expected = clean - torch.where(clean > 0.0, reach, -reach)
    # Past the far end of the box the adversary has more than it wants, and turns back.
    inside = (clean.abs() - reach).abs() < 1.0
    inside[:, :FIRST] = False
    shown = agent.rollout_buffer.dist_params[..., 0]
    assert inside.sum() > 20
    torch.testing.assert_close(shown[inside], expected[inside], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shown[:, :FIRST], clean[:, :FIRST], rtol=1e-4, atol=1e-4)
    assert torch.equal(agent.rollout_buffer.obs[:-1, :, 1], true[..., 1])  # the column that nobody may touch


@pytest.mark.parametrize("policy", POLICIES)
def test_final_observations_of_cut_episodes_are_attacked_too(policy):
    plain, attacked = collected(policy), collected(policy, ROLLOUTS)
    pairs = list(zip(plain.rollout_buffer._finals, attacked.rollout_buffer._finals, strict=True))
    met = set()
    for (t, ended, true), (other_t, other_ended, shown) in pairs:
        assert t == other_t
        assert torch.equal(ended, other_ended)
        cut = attacked.rollout_buffer.truncated[t, ended]
        mine = (ended >= FIRST) & cut
        assert torch.equal(true[~mine], shown[~mine])
        move = (shown - true)[mine].abs()
        assert (move <= EPSILON + 1e-6).all()
        assert (move.amax(-1) > 0.5 * EPSILON).all()
        met |= {"moved"} if mine.any() else set()
    assert met


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("actions", [BOX, CHOICE, spaces.MultiDiscrete([2, 3, 1])], ids=["box", "choice", "choices"])
def test_compiled_and_torch_show_the_same(policy, actions):
    shown = [
        collected(policy, ROLLOUTS, actions, policy_kwargs={"compiled": compiled}).rollout_buffer.obs
        for compiled in (True, False)
    ]
    same = (shown[0] - shown[1]).abs().amax(-1) < 1e-4
    assert same.float().mean() > 0.97  # where a gradient is all but 0 its sign is a matter of rounding


@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_agent_continues_as_if_nothing_had_happened(policy, tmp_path):
    def env():
        return TradingVecEnv(random_walk(300, seed=0), n_envs=ENVS, episode_length=20, seed=0)

    growing = {"epsilon": 0.0, "epsilon_final": 0.2, "schedule": "linear", "max_updates": 8, "coefficient": 0.1}
    plan = {"n_steps": STEPS, "seed": 0, "adversary": {**ROLLOUTS, **growing}, "normalize_obs": True}
    agent = DistributionalPPO(policy, env(), **plan, policy_kwargs=SMALL[policy])
    agent.learn(3 * STEPS * ENVS)
    agent.save(tmp_path / "agent")
    agent.learn(2 * STEPS * ENVS, reset_num_timesteps=False)
    loaded = DistributionalPPO.load(tmp_path / "agent", env(), force_reset=False)
    loaded.learn(2 * STEPS * ENVS, reset_num_timesteps=False)
    assert loaded._attack.objective == agent._attack.objective == "kl"  # the fifth rollout
    assert loaded._attack.epsilon == agent._attack.epsilon == agent.adversary.epsilon == pytest.approx(0.2 * 4 / 7)
    assert torch.equal(agent.rollout_buffer.obs, loaded.rollout_buffer.obs)
    assert torch.equal(agent.flat.tensor, loaded.flat.tensor)


def test_statistics_of_observations_are_those_of_the_truth():
    agent = model(adversary=ROLLOUTS, normalize_obs=True)
    agent.learn(STEPS * ENVS)
    true = agent._attack.true_observations().double().flatten(0, 1)
    torch.testing.assert_close(agent.policy.normalizer.mean, true.mean(0))
    torch.testing.assert_close(agent.policy.normalizer.var, true.var(0, correction=0))


def test_objectives_take_turns_and_the_update_goes_without_an_adversary():
    agent, met = model(adversary=ROLLOUTS), []
    train = agent.train
    agent.train = lambda: (met.append(agent._attack.objective), train())
    agent.learn(3 * STEPS * ENVS)
    assert met == ["kl", "action", "kl"]
    metrics = agent.adversary.metrics() | agent._attack.metrics()
    assert metrics["sa_ppo/enabled"] == 1.0
    assert metrics["sa_ppo/attack_count"] == 0.0
    assert metrics["sa_ppo/rollout_share"] == pytest.approx(2 / 3)
    assert metrics["sa_ppo/rollout_perturbation_norm"] == pytest.approx(EPSILON, rel=0.05)
    rewards = agent.rollout_buffer.rewards
    assert metrics["sa_ppo/rollout_reward_clean"] == pytest.approx(rewards[:, :FIRST].mean().item())
    assert metrics["sa_ppo/rollout_reward_attacked"] == pytest.approx(rewards[:, FIRST:].mean().item())
    both = model(adversary={**ROLLOUTS, "coefficient": 0.1, "rollouts": 1.0})
    both.learn(STEPS * ENVS)
    assert both.adversary.metrics()["sa_ppo/attack_count"] == 2 * 4
    assert "sa_ppo/rollout_reward_clean" not in both._attack.metrics()


def test_it_is_repeatable_on_any_environment():
    """Two agents that know a budget of the tail, on a task of SB3's own making."""

    def trained():
        env = make_vec_env("CartPole-v1", 4, seed=0)
        risk = {"objective": "cvar", "alpha": (0.2, 0.8)}
        return DistributionalPPO("MlpPolicy", env, n_steps=32, seed=0, risk=risk, adversary=ROLLOUTS).learn(256)

    first, second = trained(), trained()
    assert torch.equal(first.flat.tensor, second.flat.tensor)
    own = first.policy.own_size
    assert first._attack.true_observations().shape[-1] == own
    assert torch.equal(first.rollout_buffer.obs[..., own:], second.rollout_buffer.obs[..., own:])


@pytest.mark.parametrize("wrong", [{"rollouts": 1.5}, {"rollouts": -0.1}, {"rollout_objectives": []}], ids=str)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SAPPOConfig(**wrong)
