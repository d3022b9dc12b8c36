"""The adversary in training: the right loss, the right gradient, and nothing else changed."""

import numpy as np
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import BettingGame, SignalMarket, random_walk
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.rollout import prepare
from tailguard.robust import SAPPOConfig

STEPS, ENVS = 16, 8
POLICIES = ("MlpPolicy", "MlpLstmPolicy")
SMALL = {"MlpPolicy": {"net_arch": [16]}, "MlpLstmPolicy": {"net_arch": [16], "lstm_hidden_size": 8}}


def model(policy="MlpPolicy", adversary=None, **settings):
    env = GymVectorAdapter(SignalMarket(ENVS), 0)
    small = {"policy_kwargs": {**SMALL[policy], **settings.pop("policy_kwargs", {})}}
    return DistributionalPPO(policy, env, n_steps=STEPS, n_epochs=2, seed=0, adversary=adversary, **small, **settings)


def trained(policy, adversary, updates=3, **settings):
    agent = model(policy, adversary, **settings)
    agent.learn(updates * STEPS * ENVS)
    return agent


def batch_of(agent):
    """The batch of one rollout, and each sample's share."""
    agent.learn(STEPS * ENVS)
    rollout = agent.rollout_buffer
    options = {"critic": agent.critic_config, "objective": agent.objective, "gamma": 0.9, "gae_lambda": 0.9}
    experience = prepare(agent.policy, rollout, *agent._rollout_start, generator=torch.Generator().manual_seed(0), **options)
    batch = experience.normalised(agent.policy)
    return batch, batch.weights / batch.weights.sum()


def adversary_of(agent, **settings):
    adversary = Adversary(agent.policy, SAPPOConfig(**{"warmup_updates": 0, "epsilon": 0.2, **settings}), seed=1)
    adversary.begin(10)
    return adversary


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "idle",
    [{"epsilon": 0.0}, {"coefficient": 0.0}, {"enabled": False}, {"warmup_updates": 3}, {"epsilon": 0.0, "mode": "mix"}],
    ids=str,
)
def test_an_idle_adversary_changes_no_bit(policy, idle):
    plain, idle_one = trained(policy, None), trained(policy, {"epsilon": 0.1, **idle})
    assert torch.equal(plain.flat.tensor, idle_one.flat.tensor)
    assert torch.equal(plain.shuffler.get_state(), idle_one.shuffler.get_state())
    assert np.array_equal(plain._last_obs, idle_one._last_obs)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["regularise", "mix"])
def test_a_real_adversary_changes_training_and_is_repeatable(policy, mode):
    plain = trained(policy, None)
    config = {"epsilon": 0.3, "warmup_updates": 0, "mode": mode}
    one, two = trained(policy, config), trained(policy, SAPPOConfig(**config))
    assert not torch.equal(plain.flat.tensor, one.flat.tensor)
    assert torch.equal(one.flat.tensor, two.flat.tensor)
    assert one.flat.tensor.isfinite().all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory", ["whole", "step"])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_loss_is_the_mean_kl_between_clean_and_perturbed_of_the_same_samples(policy, memory, compiled):
    """Against a slow reference, step by step with torch's own cell and the library's KL, at the perturbation that was found."""
    options = {"compiled": compiled} if policy == "MlpLstmPolicy" else {}
    agent = model(policy, policy_kwargs=options)
    batch, share = batch_of(agent)
    agent.policy.actor[-1].weight.data *= 30.0 if policy == "MlpPolicy" else 80.0  # it begins nearly constant
    adversary = adversary_of(agent, coefficient=0.7, adversarial_ratio=1.0, memory=memory)
    met = []
    search = adversary.perturb
    adversary.perturb = lambda *given: met.append(search(*given)) or met[-1]
    order = torch.Generator().manual_seed(1)
    which = torch.randperm(batch.size, generator=order)
    outputs = agent.policy.dist_params(batch.features(agent.policy)[0])
    loss = adversary.loss(batch, outputs, share)
    (found,) = met
    assert (found.move.abs().amax(-1) <= 0.2 + 1e-6).all()
    moved = batch.obs.clone()
    axis = batch.weights.dim() - 1
    moved.index_copy_(axis, which, found.inputs)
    expected = 0.0
    with torch.no_grad():
        if policy == "MlpPolicy":
            perturbed = agent.policy.dist_params(moved)
        else:
            state, rows = (batch.actor_hidden, batch.actor_cell), []
            for row in range(len(moved)):
                features, after = agent.policy.actor_trunk.step(moved[row], state)
                rows.append(agent.policy.dist_params(features))
                if memory == "step":  # the next step remembers what truly was
                    _, after = agent.policy.actor_trunk.step(batch.obs[row], state)
                keep = 1.0 - batch.resets[row]
                state = (after[0] * keep, after[1] * keep)
            perturbed = torch.stack(rows)
        assert (outputs[..., 0].abs() < 1.0).all()  # inside the box, where clipping means changes nothing
        assert (perturbed[..., 0].abs() < 1.0).all()
        each = agent.policy.action_dist.kl(outputs, perturbed)
        expected = 0.7 * (share * each)[share > 0.0].sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-3, atol=0.0)
    assert expected > 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_reaches_the_actor_and_not_the_critics(policy):
    agent = model(policy)
    batch, share = batch_of(agent)
    adversary = adversary_of(agent)
    agent.flat.zero_grad()
    outputs = agent.policy.dist_params(batch.features(agent.policy)[0])
    before = torch.get_rng_state()
    loss = adversary.loss(batch, outputs, share)
    assert not agent.flat.gradient.any()
    assert all(parameter.requires_grad for parameter in agent.policy.parameters())
    loss.backward()
    touched = {name: bool(parameter.grad.any()) for name, parameter in agent.policy.named_parameters()}
    assert touched["actor.0.weight"]
    assert not touched["log_std"]  # or the policy would become steady by becoming noisy
    assert not any(moved for name, moved in touched.items() if name.startswith("critic"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_along_the_penalty_makes_the_policy_steadier():
    agent = model("MlpPolicy")
    batch, share = batch_of(agent)
    adversary = adversary_of(agent, coefficient=1.0, adversarial_ratio=1.0, steps=10)
    agent.policy.actor[-1].weight.data *= 100.0  # it begins nearly constant: there would be nothing to steady
    losses = []
    for _ in range(30):
        agent.flat.zero_grad()
        loss = adversary.loss(batch, agent.policy.dist_params(batch.obs), share)
        loss.backward()
        agent.flat.tensor.data -= 0.05 * agent.flat.gradient / agent.flat.gradient.norm()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mixed_batch_perturbs_a_share_and_leaves_the_rest(policy):
    agent = model(policy)
    batch, share = batch_of(agent)
    adversary = adversary_of(agent, mode="mix", coefficient=1.0, adversarial_ratio=0.25)
    seen = adversary.seen(batch)
    changed = (seen.obs != batch.obs).flatten(0, -3) if policy == "MlpLstmPolicy" else (seen.obs != batch.obs)
    by_sample = changed.any(-1).any(0) if policy == "MlpLstmPolicy" else changed.any(-1)
    assert by_sample.sum() == round(0.25 * batch.size)
    assert (seen.obs - batch.obs).abs().max() <= 0.2 + 1e-6
    outputs = agent.policy.dist_params(seen.features(agent.policy)[0])
    loss = adversary.loss(batch, outputs, share)
    clean = agent.policy.dist_params(batch.features(agent.policy)[0])
    each = agent.policy.action_dist.kl(clean, outputs)
    if policy == "MlpPolicy":
        torch.testing.assert_close(loss, each[by_sample].mean(), rtol=1e-4, atol=1e-7)
    assert loss > 0.0


def test_what_the_environment_clips_away_costs_nothing():
    """Means beyond the same end of the box are one action; beyond different ends they are as far apart as the box is wide."""
    agent = model("MlpPolicy")
    batch, share = batch_of(agent)
    adversary = adversary_of(agent, adversarial_ratio=1.0)
    agent.policy.actor[-1].weight.data *= 100.0
    agent.policy.actor[-1].bias.data.fill_(50.0)
    assert adversary.loss(batch, agent.policy.dist_params(batch.obs), share) == 0.0
    one, other = torch.tensor([[7.0, 0.0]]), torch.tensor([[-9.0, 0.0]])
    assert adversary._kl(one, other).item() == pytest.approx(0.5 * 2.0**2)


def test_an_adversary_may_want_the_opposite_action():
    agent = model("MlpPolicy")
    batch, share = batch_of(agent)
    agent.policy.actor[-1].weight.data *= 100.0
    adversary = adversary_of(agent, objective="action", adversarial_ratio=1.0)
    met = []
    search = adversary.perturb
    adversary.perturb = lambda *given: met.append(search(*given)) or met[-1]
    adversary.loss(batch, agent.policy.dist_params(batch.obs), share)
    with torch.no_grad():
        before, after = (agent.policy.dist_params(inputs)[:, 0] for inputs in (met[0].inputs - met[0].move, met[0].inputs))
    assert (((after - before) * before.sign()) < 0.0).float().mean() > 0.95


def test_certain_choices_are_turned_in_training_too():
    """A linear policy with logits some 40 apart, and a ball in which every state has a point of the other choice."""
    env = make_vec_env("CartPole-v1", ENVS, seed=0)
    agent = DistributionalPPO("MlpPolicy", env, n_steps=STEPS, seed=0, policy_kwargs={"net_arch": []}, normalize_obs=False)
    batch, share = batch_of(agent)
    weight = torch.tensor([2.0, 2.0, 20.0, 2.0])  # float32 knows no e^-m beyond m = 100
    with torch.no_grad():
        agent.policy.actor[-1].weight.copy_(torch.stack((weight, -weight)))
        agent.policy.actor[-1].bias.copy_(torch.tensor([20.0, -20.0]))
    clean = agent.policy.dist_params(batch.obs).detach()
    margin = (clean[:, 0] - clean[:, 1]).abs()
    radius = 1.05 * margin.max().item() / (2.0 * weight.sum().item())
    adversary = adversary_of(agent, epsilon=radius, adversarial_ratio=1.0)
    met = []
    search = adversary.perturb
    adversary.perturb = lambda inputs, goal: met.append((inputs, search(inputs, goal))) or met[-1][1]
    adversary.loss(batch, agent.policy.dist_params(batch.obs), share)
    ((inputs, found),) = met
    before, after = (agent.policy.dist_params(one).argmax(-1) for one in (inputs, found.inputs))
    assert margin.median() > 20.0
    assert (before != after).all()


def test_the_critics_can_be_the_target():
    agent = model("MlpLstmPolicy")
    batch, share = batch_of(agent)
    adversary = adversary_of(agent, objective="value", adversarial_ratio=1.0, memory="step")
    met = []
    search = adversary.perturb
    adversary.perturb = lambda *given: met.append((search(*given), given[1])) or met[-1][0]
    adversary.loss(batch, agent.policy.dist_params(batch.features(agent.policy)[0]), share)
    ((found, objective),) = met
    with torch.no_grad():
        gained = objective(found.inputs) - objective(found.inputs - found.move)
    assert gained.mean() > 0.0
    assert (gained > -1e-5).float().mean() > 0.95


def test_what_the_agent_has_earned_cannot_be_perturbed():
    env = BettingGame(ENVS)
    agent = DistributionalPPO(
        "MlpPolicy",
        env,
        n_steps=STEPS,
        seed=0,
        risk={"objective": "cvar", "alpha": (0.1, 0.9)},
        adversary={"warmup_updates": 0},
    )
    scale = agent.adversary.perturbation.scale
    assert len(scale) == agent.policy.own_size + agent.policy.budget.features
    assert (scale[: agent.policy.own_size] == 1.0).all()
    assert not scale[agent.policy.own_size :].any()
    agent.learn(2 * STEPS * ENVS)
    with pytest.raises(ValueError, match="perturbable"):
        DistributionalPPO(
            "MlpPolicy", env, n_steps=STEPS, risk={"objective": "cvar"}, adversary={"perturbable": [agent.policy.own_size]}
        )


def test_the_certificate_bounds_what_the_attack_finds():
    agent = model("MlpPolicy", {"epsilon": 0.2, "warmup_updates": 0, "steps": 10, "adversarial_ratio": 1.0})
    agent.learn(STEPS * ENVS)
    batch, share = batch_of(agent)
    adversary = agent.adversary
    bounds = adversary.certificate(batch)
    adversary.begin(10)
    adversary.loss(batch, agent.policy.dist_params(batch.obs), share)
    assert 0.0 < adversary.metrics()["sa_ppo/robust_kl"] <= bounds["sa_ppo/certified_kl"]
    assert adversary_of(model("MlpLstmPolicy")).certificate(batch) == {}


def test_it_continues_where_it_stopped():
    agent = model("MlpPolicy", {"epsilon": 0.0, "epsilon_final": 0.2, "schedule": "linear", "warmup_updates": 0})
    agent.learn(3 * STEPS * ENVS)
    state = agent.adversary.state_dict()
    other = adversary_of(agent, epsilon=0.0, epsilon_final=0.2, schedule="linear")
    other.load_state_dict(state)
    assert other.updates == 3
    for one in (agent.adversary, other):
        one.begin(11)
    assert other.epsilon == agent.adversary.epsilon == pytest.approx(0.2 * 3 / 10)
    assert torch.equal(other.choose(20), agent.adversary.choose(20))


def test_metrics_say_what_happened():
    agent = trained("MlpPolicy", {"epsilon": 0.1, "warmup_updates": 0, "adversarial_ratio": 0.5})
    metrics = agent.adversary.metrics()
    minibatches = 2 * 4  # epochs, and quarters of the rollout
    assert metrics["sa_ppo/attack_count"] == minibatches
    assert metrics["sa_ppo/adversarial_samples"] == 2 * STEPS * ENVS / 2
    assert metrics["sa_ppo/adversarial_ratio"] == 0.5
    assert metrics["sa_ppo/current_epsilon"] == 0.1
    assert metrics["sa_ppo/update_count"] == 3
    assert metrics["sa_ppo/avg_perturbation_norm"] == pytest.approx(0.1, rel=1e-4)
    assert metrics["sa_ppo/robust_kl"] > 0.0


def test_a_saved_agent_continues_with_its_adversary_where_it_stopped(tmp_path):
    def env():
        return TradingVecEnv(random_walk(300, seed=0), n_envs=ENVS, episode_length=20, seed=0)

    settings = {"epsilon": 0.0, "epsilon_final": 0.2, "schedule": "linear", "max_updates": 8, "warmup_updates": 0}
    plan = {"n_steps": STEPS, "seed": 0, "adversary": {**settings, "perturbable": [0, 1, 2]}}
    agent = DistributionalPPO("MlpPolicy", env(), **plan)
    agent.learn(3 * STEPS * ENVS)
    agent.save(tmp_path / "agent")
    agent.learn(2 * STEPS * ENVS, reset_num_timesteps=False)
    loaded = DistributionalPPO.load(tmp_path / "agent", env(), force_reset=False)
    assert loaded.adversary.config == agent.adversary.config
    loaded.learn(2 * STEPS * ENVS, reset_num_timesteps=False)
    assert loaded.adversary.epsilon == agent.adversary.epsilon == pytest.approx(0.2 * 4 / 7)
    assert torch.equal(agent.flat.tensor, loaded.flat.tensor)


def test_unknown_settings_are_refused_by_name():
    with pytest.raises(ValueError, match="strength: unknown key"):
        model("MlpPolicy", {"strength": 1.0})


@pytest.mark.parametrize("policy", POLICIES)
def test_the_compiled_update_adds_the_penalty_to_its_gradient(policy):
    """One gradient step on the same rollout, against torch's autograd from end to end: other rounding, nothing else."""
    after = {}
    for compiled in (True, False):
        agent = model(policy, {"epsilon": 0.3, "coefficient": 5.0, "warmup_updates": 0}, policy_kwargs={"compiled": compiled})
        assert (agent.update.compiled is not None) == compiled
        agent.policy.actor[-1].weight.data *= 100.0
        agent.learn(STEPS * ENVS)
        after[compiled] = agent.flat.tensor.detach().clone(), agent.adversary.metrics()
    plain = model(policy)
    plain.policy.actor[-1].weight.data *= 100.0
    plain.learn(STEPS * ENVS)
    moved = (after[False][0] - plain.flat.tensor).norm()
    assert (after[True][0] - after[False][0]).norm() < 1e-2 * moved
    assert after[True][1] == pytest.approx(after[False][1], rel=1e-3)
