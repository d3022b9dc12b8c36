"""The audit reports' rows on state-adversarial PPO (R088 to R092), on real agents."""

import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import SignalMarket
from tailguard.ppo.actions import Categorical, Gaussian
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.robust import PerturbationConfig, StatePerturbation
from tailguard.robust.attacks import divergence, frozen

STEPS, ENVS = 16, 8


def agent(policy="MlpPolicy", **adversary):
    env = GymVectorAdapter(SignalMarket(ENVS), 0)
    settings = {"warmup_updates": 0, **adversary}
    return DistributionalPPO(policy, env, n_steps=STEPS, n_epochs=1, batch_size=STEPS * ENVS, seed=0, adversary=settings)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_sa_ppo_clean_and_adversarial_samples_weigh_the_same(policy, monkeypatch):
    """R088: in a mixed batch the loss gives a perturbed sample the weight of a clean one, and there are as many of both."""
    import tailguard.ppo.update

    shares = []
    true_loss = tailguard.ppo.update.policy_loss

    def watch(distribution, dist_params, old, actions, advantages, share, coefficients):
        shares.append(share.clone())
        return true_loss(distribution, dist_params, old, actions, advantages, share, coefficients)

    monkeypatch.setattr(tailguard.ppo.update, "policy_loss", watch)
    model = agent(policy, mode="mix", epsilon=0.1)
    model.learn(STEPS * ENVS)
    metrics = model.adversary.metrics()
    assert metrics["sa_ppo/adversarial_samples"] == metrics["sa_ppo/clean_samples"] == STEPS * ENVS / 2
    (share,) = shares
    assert share[share > 0.0].unique().tolist() == [pytest.approx(1.0 / (STEPS * ENVS))]


def test_sa_ppo_epsilon_schedule_horizon():
    """R089: epsilon_final is reached at the last update, total_timesteps // (n_steps n_envs), and not at update 1000."""
    model = agent(epsilon=0.2, epsilon_final=0.05, schedule="linear")
    met = []
    begin = model.adversary.begin
    model.adversary.begin = lambda horizon: (begin(horizon), met.append(model.adversary.epsilon))
    model.learn(7 * STEPS * ENVS)
    assert met[0] == 0.2
    assert met[-1] == 0.05
    assert met == [pytest.approx(0.2 - 0.025 * k) for k in range(7)]


@pytest.mark.parametrize("size", [1.0, 1e30])
def test_pgd_respects_the_linf_ball(size):
    """R090: max |move| <= epsilon + 1e-6 for any gradient, huge ones included."""
    policy = agent().policy
    obs = torch.randn(64, policy.obs_size, generator=torch.Generator().manual_seed(0))
    attack = StatePerturbation(PerturbationConfig(epsilon=0.075, steps=20), policy.own_size)
    found = attack.attack(obs, lambda moved: size * policy.dist_params(moved).sum(-1))
    assert (found.inputs - obs).abs().max() <= 0.075 + 1e-6
    assert found.move.abs().max() > 0.0749


@pytest.mark.parametrize("policy_class", ["MlpPolicy", "MlpLstmPolicy"])
def test_attack_gradients_are_isolated(policy_class):
    """R091: parameters' .grad is None before and after an attack; so are mode and random numbers what they were."""
    policy: DistributionalPolicy = agent(policy_class).policy
    for parameter in policy.parameters():
        parameter.grad = None
    obs, state = torch.randn(8, policy.obs_size), policy.initial_state(8)
    clean = policy.act(obs, state)[0]
    before, training = torch.get_rng_state(), policy.training
    with frozen(policy.parameters()):
        objective = divergence(lambda moved: policy.act(moved, state)[0], clean, policy.action_dist.kl)
        StatePerturbation(PerturbationConfig(), policy.own_size).attack(obs, objective)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.training == training


@pytest.mark.parametrize("log_std", [-30.0, -5.0, 0.0, 2.0])
def test_robust_kl_is_stable_for_gaussians(log_std):
    """R092: finite with finite gradients for tiny sigma, exactly 0 for identical distributions."""
    policy = agent().policy
    assert isinstance(policy.action_dist, Gaussian)
    dist_params = torch.tensor([[0.3, log_std]], requires_grad=True)
    moved = torch.tensor([[0.3 + 0.1, log_std]], requires_grad=True)
    kl = policy.action_dist.kl
    assert kl(dist_params, dist_params).item() == 0.0
    value = kl(dist_params, moved)
    value.sum().backward()
    assert value.item() == pytest.approx(0.5 * 0.1**2 * torch.exp(torch.tensor(-2.0 * log_std)).item(), rel=1e-4, abs=1e-7)
    assert dist_params.grad.isfinite().all()
    assert moved.grad.isfinite().all()


def test_robust_kl_is_stable_for_categories():
    """R092: the same for choices that are all but certain."""
    kl = Categorical([3], single=True, start=torch.zeros(1).numpy()).kl
    certain = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    other = torch.tensor([[-200.0, 0.0, 200.0]], requires_grad=True)
    assert kl(certain, certain).item() == 0.0
    value = kl(certain, other)
    value.sum().backward()
    assert value.item() == pytest.approx(400.0)
    assert certain.grad.isfinite().all()
    assert other.grad.isfinite().all()


def test_robust_kl_is_zero_without_epsilon():
    """R092: epsilon 0 moves nothing and costs nothing."""
    policy = agent().policy
    obs = torch.randn(16, policy.obs_size, generator=torch.Generator().manual_seed(0))
    clean = policy.dist_params(obs)
    found = StatePerturbation(PerturbationConfig(epsilon=0.0), policy.own_size).attack(
        obs, divergence(policy.dist_params, clean, policy.action_dist.kl)
    )
    assert torch.equal(found.inputs, obs)
    assert torch.equal(found.gain, torch.zeros(16))
