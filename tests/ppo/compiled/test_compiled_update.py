"""The compiled update and the compiled acting step against torch's: same gradient, same measures, same agent."""

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.torch_layers import FlattenExtractor
from test_algorithm import B, Script, T, collect, make, weights
from torch import nn

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import StepArrays
from tailguard.market import SignalMarket
from tailguard.optim.layout import FlatParameters
from tailguard.ppo.compiled import kernels as kernels
from tailguard.ppo.compiled.acting import CompiledActing, acting_of
from tailguard.ppo.compiled.applies import update_applies
from tailguard.ppo.compiled.threads import Threads
from tailguard.ppo.config import CriticConfig
from tailguard.ppo.loss import Coefficients
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy
from tailguard.ppo.rollout import Acting, Batch, Rollout
from tailguard.ppo.update import LOSSES, Update, UpdateSettings
from tolerance import rounding

FULL = {"optimizer": {"name": "adaptive_upgd", "sigma": 0.0}, "vgs": {"warmup_steps": 1}}
SCALAR = {"num_quantiles": 1, "twin": False, "target": "lambda_return"}
BOX, SQUASHED, CENSORED, ONE_OF, MANY = "box", "squashed", "censored", "discrete", "multi"
SPACES = {
    BOX: spaces.Box(-1.0, 1.0, (2,)),
    SQUASHED: spaces.Box(-1.0, 1.0, (1,)),
    CENSORED: spaces.Box(-0.5, 0.8, (2,)),
    ONE_OF: spaces.Discrete(3),
    MANY: spaces.MultiDiscrete([3, 2]),
}


def build(kind="lstm", actions=BOX, critic=None, inputs=5, seed=0, **options):
    """A policy with random parameters, its flat parameters and its update, without scaler."""
    torch.manual_seed(seed)
    config = CriticConfig(**(critic or {}))
    space = spaces.Box(-10.0, 10.0, (inputs,))
    lstm = {} if kind == "mlp" else {"lstm_hidden_size": 6, "shared_lstm": kind == "shared lstm"}
    options = {"net_arch": [7], "squash_output": actions == SQUASHED, "censored": actions == CENSORED, **lstm, **options}
    policy = (DistributionalPolicy if kind == "mlp" else RecurrentDistributionalPolicy)(
        space, SPACES[actions], critic=config, **options
    )
    flat = FlatParameters(policy)
    with torch.no_grad():
        flat.tensor.normal_(std=0.4)
    model = make("mlp")  # for the scaler that does nothing
    return policy, flat, Update(policy, flat, config, model.vgs)


def random_batch(policy, rows, envs, atoms, seed=1, masked=0.2):
    """SequenceLayout with resets and samples of weight 0, or samples; behind the actions a policy near the present one."""
    generator = torch.Generator().manual_seed(seed)
    lead = (rows, envs) if policy.recurrent else (rows * envs,)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    action_dist, critics = policy.action_dist, len(policy.critics)
    dist_params = 0.3 * normal(*lead, action_dist.n_params)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actions = action_dist.sample(dist_params)
    used = torch.rand(lead, generator=generator)
    sample_weights = torch.where(used < masked, torch.zeros(lead), used)
    states = [torch.empty(0)] * 5
    if policy.recurrent:
        size = policy.actor_trunk.hidden_size
        resets = (torch.rand(rows, envs, 1, generator=generator) < 0.1).float()
        states = [resets, *(0.5 * normal(1, envs, size) for _ in range(4))]
    given_ = normal(*lead, policy.own_size), actions, dist_params, normal(*lead), sample_weights
    return Batch(*given_, normal(critics, *lead, atoms), torch.empty(0), *states)


def settings_of(compiled, coefficients=None):
    return UpdateSettings(coefficients or Coefficients(0.2, 0.03, 0.4), vf_coef=0.7, microbatch=1000, compiled=compiled)


def both_ways(update, batch, coefficients=None):
    """Measures and gradient by the compiled passes and by torch."""
    assert update.compiled is not None
    found = []
    for compiled in (True, False):
        update.flat.gradient.fill_(torch.nan)  # what stood there must not matter
        measures = update.gradient(batch, float(batch.weights.sum()), settings_of(compiled, coefficients))
        found.append((measures.double(), update.flat.gradient.double().clone()))
    return found


def terms(policy, batch):
    """How many numbers go into a gradient: each sample's, through the widest product of the networks."""
    return batch.weights.numel() * max(max(parameter.shape) for parameter in policy.parameters() if parameter.dim() == 2)


def agree(update, batch, coefficients=None):
    (measures, grads), (expected_measures, expected) = both_ways(update, batch, coefficients)
    tolerance = rounding(terms(update.policy, batch))
    assert expected.norm() > 1e-3
    torch.testing.assert_close(measures, expected_measures, atol=tolerance, rtol=tolerance)
    for name, part in update.flat.slices.items():
        # A parameter whose gradient is far below the others' is a sum in which nearly everything cancels.
        scale = torch.maximum(expected[part].abs().max(), 0.01 * expected.abs().max())
        found, reference = grads[part] / scale, expected[part] / scale
        torch.testing.assert_close(found, reference, atol=tolerance, rtol=0.0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "critic", [SCALAR, {"num_quantiles": 1}, {}, {"twin": False, "num_quantiles": 9, "mean_coef": 0.6}], ids=str
)
@pytest.mark.parametrize("actions", SPACES)
@pytest.mark.parametrize("kind", ["lstm", "shared lstm", "mlp"])
def test_gradient_and_measures_are_torchs(kind, actions, critic):
    policy, _, update = build(kind, actions, critic)
    agree(update, random_batch(policy, 23, 4, policy.return_dist.n_outputs))


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, top) for top in (40, 9, 20, 40))),
    layers=st.lists(st.integers(1, 33), max_size=3),
    kind=st.sampled_from(["lstm", "shared lstm", "mlp"]),
    activation=st.sampled_from([nn.Tanh, nn.ReLU]),
    quantiles=st.sampled_from([1, 2, 32]),
    seed=st.integers(0, 1000),
)
def test_any_shape(sizes, layers, kind, activation, quantiles, seed):
    """Around and off the widths of vectors and cache lines; a single one of everything; heads without hidden layers."""
    rows, envs, inputs, hidden = sizes
    lstm = {} if kind == "mlp" else {"lstm_hidden_size": hidden}
    options = {"net_arch": layers, "activation_fn": activation, **lstm}
    policy, _, update = build(kind, BOX, {"num_quantiles": quantiles}, inputs, seed, **options)
    batch = random_batch(policy, rows, envs, quantiles, seed + 1, masked=0.0)
    (measures, grads), (expected_measures, expected) = both_ways(update, batch)
    tolerance = rounding(terms(policy, batch))
    torch.testing.assert_close(measures, expected_measures, atol=tolerance, rtol=tolerance)
    scale = expected.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(grads / scale, expected / scale, atol=tolerance, rtol=0.0)


def test_large_networks_take_the_blocked_products():
    policy, _, update = build("lstm", BOX, {}, 40, lstm_hidden_size=160, net_arch=[200, 150])
    agree(update, random_batch(policy, 30, 12, 32))


def test_atoms_that_equal_a_target_pull_nowhere():
    """At a tie the gradient of the pinball loss is taken as 0, by torch's path and by the compiled one."""
    policy, _, update = build("mlp", BOX, {"num_quantiles": 4, "twin": False})
    last = policy.critics[0][-1]
    with torch.no_grad():  # so that every prediction is exactly its bias
        last.weight.zero_()
        last.bias.copy_(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    batch = random_batch(policy, 3, 2, 4, masked=0.0)
    targets = torch.tensor([-1.0, 0.0, 0.5, 3.0]).expand(1, 6, 4).contiguous()
    agree(update, dataclasses.replace(batch, targets=targets))
    (_, grads), _ = both_ways(update, dataclasses.replace(batch, targets=targets))
    # Levels 1/8, 3/8, ..; the first atom has a tie and three targets above it, a mean of four quantiles: -(1/8)(3/4)/4.
    assert grads[update.flat.slices["critics.0.2.bias"]][0].item() == pytest.approx(-0.7 * 0.125 * 0.75 / 4.0, rel=1e-5)


@pytest.mark.parametrize("mean_coef", [0.0, 0.6])
@pytest.mark.parametrize("target", ["distribution", "lambda_return"])
def test_uneven_levels_and_single_targets(target, mean_coef):
    critic = {"num_quantiles": 7, "tail_quantiles": 3, "target": target, "mean_coef": mean_coef}
    policy, _, update = build("shared lstm", BOX, critic)
    agree(update, random_batch(policy, 11, 3, 7 if target == "distribution" else 1))


def test_samples_of_weight_zero_are_not_looked_at():
    """Not even where they are not numbers."""
    policy, _, update = build("lstm", BOX, {})
    batch = random_batch(policy, 9, 3, 32)
    hidden = batch.weights == 0.0
    assert hidden.any()
    advantages, targets = batch.advantages.clone(), batch.targets.clone()
    advantages[hidden], targets[:, hidden] = torch.nan, torch.nan
    (measures, grads), _ = both_ways(update, batch)
    (others, same), _ = both_ways(update, dataclasses.replace(batch, advantages=advantages, targets=targets))
    assert torch.equal(measures, others)
    assert torch.equal(grads, same)


def test_something_that_is_not_a_number_gets_into_the_gradient():
    """So that the step is skipped; a kernel that clips its arguments would swallow it."""
    for kind in ("lstm", "mlp"):
        policy, _, update = build(kind, BOX, {})
        batch = random_batch(policy, 9, 3, 32, masked=0.0)
        batch.obs.view(-1)[0] = torch.nan
        (measures, _), _ = both_ways(update, batch)
        assert not measures.isfinite().all()


def test_the_same_batch_gives_the_same_bits():
    policy, _, update = build("lstm", BOX, {}, lstm_hidden_size=24)
    batch, other = random_batch(policy, 20, 5, 32), random_batch(policy, 33, 8, 32, seed=5)
    first = both_ways(update, batch)[0]
    both_ways(update, other)  # leaves its numbers in the workspace
    again = both_ways(update, batch)[0]
    assert all(torch.equal(one, same) for one, same in zip(first, again, strict=True))


@pytest.mark.parametrize("envs", [1, 2, 5, 8])
@pytest.mark.parametrize("critic", [SCALAR, {}], ids=["scalar", "twin"])
@pytest.mark.parametrize("kind", ["lstm", "shared lstm", "mlp"])
def test_two_threads_give_the_same_bits(kind, critic, envs):
    """Halves of a shared LSTM's environments and of its gates, odd ones too; actor and critics side by side."""
    found = []
    for threads in (1, 2):
        policy, _, update = build(kind, BOX, critic, 5, threads=threads)
        batch = random_batch(policy, 23, envs, policy.return_dist.n_outputs)
        found.append([both_ways(update, batch)[0] for _ in range(3)])
    for one, two in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_an_error_in_either_thread_is_raised():
    def fail():
        raise FloatingPointError("wrong")

    threads = Threads(2)
    for tasks in ((fail, lambda: 1), (lambda: 1, fail)):
        with pytest.raises(FloatingPointError, match="wrong"):
            threads.run(*tasks)
    assert threads.run(lambda: 1, lambda: 2) == (1, 2)


# Who goes which way.


class Scaled(FlattenExtractor):
    """An extractor of the user's own."""

    def forward(self, observations):
        return 2.0 * super().forward(observations)


def covered(critic=None, kind="lstm", **options):
    return build(kind, critic=critic, **options)[2].compiled is not None


def test_what_is_not_covered_is_left_to_torch():
    assert covered()
    assert covered(kind="mlp", activation_fn=nn.ReLU)
    assert not covered(compiled=False)
    assert not covered(kind="mlp", compiled=False)
    assert not covered(n_lstm_layers=2)
    assert not covered(enable_critic_lstm=False)
    assert not covered(use_sde=True)
    assert not covered(kind="mlp", features_extractor_class=Scaled)
    assert not covered(activation_fn=nn.ELU)
    assert not covered(state_dependent_std=True)
    assert not covered({"huber_kappa": 1.0})
    assert not covered({"clip_range": 0.2})
    assert not covered({"distribution": "monotone"})
    assert not covered({"distribution": "categorical"})


def test_a_policy_of_ones_own_is_left_to_torch():
    class Own(DistributionalPolicy):
        """Could compute anything."""

    policy = Own(spaces.Box(-1.0, 1.0, (3,)), SPACES[BOX], critic=CriticConfig())
    flat = FlatParameters(policy)
    assert not update_applies(policy)
    assert type(acting_of(policy, flat, 4)) is Acting


def test_frozen_parameters_and_hooks_are_left_to_torch():
    for disturb in (
        lambda policy: policy.critics[0].requires_grad_(False),
        lambda policy: policy.actor[0].weight.register_hook(lambda gradient: 2.0 * gradient),
    ):
        policy = build("mlp")[0]
        assert update_applies(policy)
        disturb(policy)
        assert not update_applies(policy)
    assert not update_applies(build("mlp")[0], whole_minibatches=False)
    assert not update_applies(build("mlp")[0], clips_values=True)


# Whole agents.


@pytest.mark.parametrize("critic", [SCALAR, {"num_quantiles": 1}, {"mean_coef": 0.6}], ids=["scalar", "twin", "mean"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["adam", "full"])
@pytest.mark.parametrize("kind", ["mlp", "lstm", "shared lstm"])
def test_training_ends_at_the_same_weights(kind, options, critic):
    """Actions are drawn from outputs that differ in the last bit; the environments' answers do not depend on them."""
    ends = []
    for compiled in (True, False):
        model = make(kind, critic=critic, policy_kwargs={"compiled": compiled}, learning_rate=1e-3, batch_size=2 * T, **options)
        assert (model.update.compiled is not None) == isinstance(model.acting, CompiledActing) == compiled
        for _ in range(4):
            collect(model)
            model.train()
        ends.append(weights(model.policy))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ends[0], weights(make(kind, critic=critic).policy), atol=1e-3)


@pytest.mark.parametrize("actions", [BOX, CENSORED, ONE_OF])
@pytest.mark.parametrize("kind", ["mlp", "lstm", "shared lstm"])
def test_on_the_first_pass_every_ratio_is_one(kind, actions):
    """Acting and learning are two compiled passes over the same weights; one reset in seven steps."""
    networks = {"censored": actions == CENSORED}
    model = make(kind, Script(action_space=SPACES[actions]), batch_size=T * B, n_epochs=1, policy_kwargs=networks)
    for _ in range(3):
        collect(model)
        model.train()
        assert model.logger.name_to_value["train/approx_kl"] < 1e-9
        assert model.logger.name_to_value["train/kl"] < 1e-9
        assert model.logger.name_to_value["train/clip_fraction"] == 0.0


def test_two_runs_of_one_seed_are_one_run():
    runs = []
    for _ in range(2):
        model = make("lstm")
        for _ in range(3):
            collect(model)
            model.train()
        runs.append(weights(model.policy))
    assert torch.equal(*runs)


# Acting.


def empty_rollout(policy, steps, envs):
    return Rollout(steps, envs, policy.obs_size, policy.action_dist)


def play(acting, policy, steps=4, envs=5, seed=0):
    """Return the rollout of some steps on fixed random observations, and the recurrent state after each step."""
    rollout, state, states = empty_rollout(policy, steps, envs), policy.initial_state(envs), []
    torch.manual_seed(seed)
    acting.begin(rollout)
    for step in range(steps):
        obs = torch.randn(envs, policy.obs_size, generator=torch.Generator().manual_seed(step))
        state = acting.step(rollout, rollout.observe(obs.numpy()), state)
        states.append(state)
        nothing = np.zeros(envs, np.bool_)
        rollout.add(StepArrays(obs.numpy(), np.zeros(envs), nothing, nothing, np.empty(0, np.intp), obs.numpy()[:0]), state)
    return rollout, states


@pytest.mark.parametrize("actions", SPACES)
@pytest.mark.parametrize("kind", ["mlp", "lstm", "shared lstm"])
def test_acting_is_torchs(kind, actions):
    policy, flat, _ = build(kind, actions, inputs=11, lstm_hidden_size=19, net_arch=[33, 8])
    acting = acting_of(policy, flat, 5)
    assert isinstance(acting, CompiledActing)
    found, states = play(acting, policy)
    expected, others = play(Acting(policy), policy)
    tolerance = rounding(4 * 19 * 4)  # four gates of 19 units in each of four steps
    torch.testing.assert_close(found.dist_params, expected.dist_params, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.actions, expected.actions, atol=tolerance, rtol=tolerance)
    assert found.actions.flatten(1).std(0).min() > 0.0 or actions in (ONE_OF, MANY)
    for pair, others_pair in zip(states, others, strict=True):
        for state, reference in zip(pair, others_pair, strict=True):
            torch.testing.assert_close(state, reference, atol=tolerance, rtol=tolerance)
    if kind != "mlp":
        for state, reference in zip(found.states_after_steps(), zip(*states, strict=True), strict=True):
            assert torch.equal(state, torch.stack(reference, dim=1))


def test_actions_are_drawn_from_the_outputs_that_are_stored_with_them():
    policy, flat, _ = build("mlp", BOX, inputs=3)
    rollout, _ = play(acting_of(policy, flat, 500), policy, steps=20, envs=500)
    mean, log_std = rollout.dist_params.chunk(2, dim=-1)
    standard = ((rollout.actions - mean) / log_std.exp()).reshape(-1)
    # 20,000 draws: four standard errors of the mean and of the variance of a standard normal, sqrt(1 / n) and sqrt(2 / n).
    assert abs(standard.mean().item()) < 4.0 * 20_000**-0.5
    assert abs(standard.var().item() - 1.0) < 4.0 * (2.0 / 20_000) ** 0.5
    lags = (standard.reshape(20, -1)[1:] * standard.reshape(20, -1)[:-1]).mean().item()
    assert abs(lags) < 4.0 * 19_000**-0.5  # every step has noise of its own


def test_acting_takes_new_weights_at_its_next_beginning():
    policy, flat, _ = build("lstm")
    acting, rollout, state = acting_of(policy, flat, 2), empty_rollout(policy, 2, 2), policy.initial_state(2)
    obs = rollout.observe(np.ones((2, 5), np.float32))
    acting.begin(rollout)
    old = acting.step(rollout, obs, state)[0]
    with torch.no_grad():
        flat.tensor.mul_(2.0)
    assert torch.equal(acting.step(rollout, obs, state)[0], old)
    acting.begin(rollout)
    assert not torch.equal(acting.step(rollout, obs, state)[0], old)


def test_the_state_that_acting_returned_is_not_overwritten_by_the_next_step():
    """Rollouts keep the state at their start."""
    policy, flat, _ = build("lstm", ONE_OF)
    acting, rollout = acting_of(policy, flat, 2), empty_rollout(policy, 2, 2)
    acting.begin(rollout)
    state = acting.step(rollout, rollout.observe(np.ones((2, 5), np.float32)), policy.initial_state(2))
    kept = [one.clone() for one in state]
    acting.step(rollout, rollout.observe(-np.ones((2, 5), np.float32)), state)
    assert all(torch.equal(one, other) for one, other in zip(kept, state, strict=True))


def test_the_measures_have_their_names():
    policy, _, update = build("mlp", BOX, SCALAR)
    (measures, grads), _ = both_ways(update, random_batch(policy, 5, 2, 1))
    assert len(measures) == len(LOSSES) + 2
    assert measures[-1].item() == pytest.approx(grads.norm().item(), rel=1e-6)
    assert np.isfinite(measures.numpy()).all()


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_kernels_are_compiled_for_contiguous_arrays_only(policy):
    """Gaps between rows, as columns leave that a policy is not shown, would compile slow versions a second time."""
    network = {"net_arch": [8]} | ({"lstm_hidden_size": 8} if policy == "MlpLstmPolicy" else {})
    risk = {"objective": "cvar", "alpha": 0.5, "observe_return": False}
    DistributionalPPO(policy, SignalMarket(4, seed=0), n_steps=16, seed=0, policy_kwargs=network, risk=risk).learn(128)
    layouts = {
        argument.layout
        for function in (
            kernels.mlp_forward,
            kernels.mlp_backward,
            kernels.lstm_forward,
            kernels.lstm_step,
            kernels.lstm_backward,
        )
        for signature in function.signatures
        for argument in signature
        if hasattr(argument, "layout")
    }
    assert layouts == {"C"}
