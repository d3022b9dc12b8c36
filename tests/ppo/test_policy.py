"""The policy alone: its parts, its initialisation, and `predict` with a recurrent state."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tailguard.ppo.config import CriticConfig, ObsNormConfig
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy

D, N = 3, 5
OBS = spaces.Box(-10.0, 10.0, (D,))
BOX = spaces.Box(-1.0, 1.0, (2,))


def make(kind=DistributionalPolicy, *, obs=OBS, actions=BOX, critic=None, seed=0, **kwargs):
    torch.manual_seed(seed)
    if kind.recurrent:
        kwargs = {"lstm_hidden_size": 4, **kwargs}
    return kind(obs, actions, critic=critic or CriticConfig(num_quantiles=N), **{"net_arch": [6], **kwargs})


def recurrent(**kwargs):
    return make(RecurrentDistributionalPolicy, **kwargs)


def observations(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, D)).astype(np.float32)


# Parts.


@pytest.mark.parametrize("shape", [(7,), (4, 7)])
def test_heads_keep_the_leading_dimensions(shape):
    policy = make()
    features = torch.zeros(*shape, D)
    assert policy.dist_params(features).shape == (*shape, 4)
    assert policy.critic_outputs(features).shape == (2, *shape, N)


def test_critics_are_two_different_networks_or_one():
    first, second = make().critics
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[-1].weight, second[-1].weight)
    assert len(make(critic=CriticConfig(num_quantiles=N, twin=False)).critic_outputs(torch.zeros(1, D))) == 1


@pytest.mark.parametrize("distribution", ["quantile", "monotone", "categorical"])
@pytest.mark.parametrize("n", [2, 8])
def test_raw_predictions_of_both_critics_survive_a_change_of_scale(distribution, n):
    policy, features = make(critic=CriticConfig(num_quantiles=n, distribution=distribution)), torch.randn(6, D)
    before = policy.raw_atoms(features)
    for returns in ([-0.5, 1.5], [-1.0, 1.5], [-0.2, 2.0]):
        policy.return_scale.update(torch.tensor(returns))
        policy.activate_return_scale()
        torch.testing.assert_close(policy.raw_atoms(features), before, atol=1e-5, rtol=1e-5)


def test_actor_and_critics_have_an_lstm_each_unless_they_share_one():
    separate, shared = recurrent(), recurrent(shared_lstm=True)
    assert not torch.equal(separate.actor_trunk.lstm.weight_ih_l0, separate.critic_trunk.lstm.weight_ih_l0)
    assert shared.critic_trunk is None
    assert make().actor_trunk is None


@pytest.mark.parametrize(
    ("net_arch", "actor", "critic"),
    [
        (None, [64, 64], [64, 64]),
        ([8], [8], [8]),
        ([], [], []),
        ({"pi": [], "vf": [7, 6]}, [], [7, 6]),
        ({"pi": [9]}, [9], []),
    ],
    ids=["default", "list", "none", "dict", "half a dict"],
)
def test_net_arch_gives_the_hidden_layers(net_arch, actor, critic):
    policy = recurrent(net_arch=net_arch)
    widths = [
        [layer.out_features for layer in net if isinstance(layer, nn.Linear)] for net in (policy.actor, policy.critics[0])
    ]
    assert widths == [[*actor, 2], [*critic, N]]


def test_the_first_policy_is_nearly_the_same_everywhere():
    """The small gain of the last layer: no observation is decided before anything is learnt."""
    outputs = make(actions=spaces.Discrete(3)).dist_params(10.0 * torch.randn(100, D))
    assert outputs.abs().max() < 0.1


def test_one_learnt_std_per_action_or_one_per_state():
    features = torch.randn(50, D)
    free = make(log_std_init=-0.7).dist_params(features)[:, 2:]
    torch.testing.assert_close(free, torch.full_like(free, -0.7))
    policy = make(state_dependent_std=True)
    assert policy.log_std is None
    with torch.no_grad():
        policy.actor[-1].weight *= 1e4
    wild = policy.dist_params(features)[:, 2:]
    assert (wild.min().item(), wild.max().item()) == (-5.0, 2.0)
    assert len(wild.unique()) > 2


def test_activation_and_initialisation_can_be_chosen():
    policy = make(activation_fn=nn.ReLU, ortho_init=False)
    assert isinstance(policy.actor[1], nn.ReLU)
    assert (policy.actor[0].bias != 0.0).any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"obs": spaces.Text(3)}, "observations must be Box"),
        ({"actions": spaces.Text(2)}, "actions must be a Box"),
        ({"lstm_kwargs": {"bidirectional": True}}, "lstm_kwargs"),
        ({"lstm_kwargs": {"dropout": 1.0}}, "dropout is 1.0"),
        ({"net_arch": {"pi": [3], "value": [3]}}, '"pi" and "vf"'),
        ({"lstm_hidden_size": 0}, "lstm_hidden_size is 0"),
        ({"n_lstm_layers": 0}, "n_lstm_layers is 0"),
        ({"actions": spaces.Box(-np.inf, np.inf, (1,)), "squash_output": True}, "bounded"),
    ],
    ids=["observations", "actions", "lstm_kwargs", "dropout", "net_arch", "hidden size", "layers", "squash"],
)
def test_impossible_settings_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        recurrent(**kwargs)


# predict.

ACTIONS = {
    "box": (BOX, (2,)),
    "matrix": (spaces.Box(-1.0, 1.0, (2, 2)), (2, 2)),
    "discrete": (spaces.Discrete(4, start=3), ()),
    "multi": (spaces.MultiDiscrete([2, 3]), (2,)),
}


@pytest.mark.parametrize("kind", [DistributionalPolicy, RecurrentDistributionalPolicy])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("actions", ACTIONS)
def test_predict_gives_one_legal_action_per_observation(kind, deterministic, actions):
    space, shape = ACTIONS[actions]
    policy = make(kind, actions=space, log_std_init=1.0)
    single, _ = policy.predict(observations(), deterministic=deterministic)
    batch, state = policy.predict(observations(6), deterministic=deterministic)
    assert np.shape(single) == shape
    assert batch.shape == (6, *shape)
    assert space.contains(single)
    assert all(space.contains(action) for action in batch)
    assert (state is None) == (not kind.recurrent)


def test_predict_takes_observations_of_any_shape():
    policy = make(obs=spaces.Box(-1.0, 1.0, (2, 3)))
    assert policy.predict(np.zeros((2, 3)))[0].shape == (2,)
    assert policy.predict(np.zeros((5, 2, 3)))[0].shape == (5, 2)


@pytest.mark.parametrize("shape", [(2 * D,), (2, 2 * D), (D, 2), ()])
def test_an_observation_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="observation"):
        make().predict(np.zeros(shape, np.float32))


def test_deterministic_is_the_mode_and_repeats_itself():
    policy, obs = make(log_std_init=0.5), observations(4)
    with torch.no_grad():
        mean = policy.dist_params(torch.from_numpy(obs))[:, :2]
    first, second = (policy.predict(obs, deterministic=True)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, mean.clip(-1.0, 1.0), rtol=1e-6)
    assert not np.array_equal(policy.predict(obs)[0], policy.predict(obs)[0])


def test_observations_are_normalised_exactly_once():
    plain, normalised = make(), make(obs_norm=ObsNormConfig())
    moments = {"normalizer.mean": torch.tensor([1.0, 2.0, 3.0]), "normalizer.var": torch.tensor([4.0, 0.25, 1.0])}
    normalised.load_state_dict(plain.state_dict() | moments, strict=False)
    obs = observations(5)
    expected, _ = plain.predict((obs - [1.0, 2.0, 3.0]) / [2.0, 0.5, 1.0], deterministic=True)
    np.testing.assert_allclose(normalised.predict(obs, deterministic=True)[0], expected, rtol=1e-5)


# The recurrent state in predict.


@pytest.mark.parametrize("n_layers", [1, 2])
def test_the_state_has_sb3s_shape(n_layers):
    policy = recurrent(n_lstm_layers=n_layers)
    for obs, n in ((observations(), 1), (observations(5), 5)):
        _, state = policy.predict(obs)
        assert [part.shape for part in state] == [(n_layers, n, 4)] * 2
        assert all(isinstance(part, np.ndarray) for part in state)


def test_the_state_is_carried_from_call_to_call():
    policy, obs = recurrent(), observations(6, 2)
    state, actions = None, []
    for row in obs:
        action, state = policy.predict(row, state, np.zeros(2, bool), deterministic=True)
        actions.append(action)
    with torch.no_grad():
        no_blanks = torch.zeros(6, 2, 1)
        features = policy.actor_trunk.sequence(torch.from_numpy(obs), no_blanks, policy.initial_state(2))
        expected = policy.dist_params(features)[..., :2]
    np.testing.assert_allclose(np.stack(actions), expected.clip(-1.0, 1.0), atol=1e-6)


def test_an_episode_start_forgets_in_that_environment_only():
    policy, obs = recurrent(n_lstm_layers=2), observations(2, 3)
    _, state = policy.predict(obs[0], deterministic=True)
    carried, carried_state = policy.predict(obs[1], state, np.array([False] * 3), deterministic=True)
    fresh, fresh_state = policy.predict(obs[1], None, np.array([True] * 3), deterministic=True)
    mixed, mixed_state = policy.predict(obs[1], state, np.array([False, True, False]), deterministic=True)
    for part, old, new in zip(mixed_state, carried_state, fresh_state, strict=True):
        np.testing.assert_array_equal(part[:, [0, 2]], old[:, [0, 2]])
        np.testing.assert_allclose(part[:, 1], new[:, 1], atol=1e-7)
        assert not np.allclose(old[:, 1], new[:, 1], atol=1e-4)
    np.testing.assert_array_equal(mixed[[0, 2]], carried[[0, 2]])
    np.testing.assert_allclose(mixed[1], fresh[1], atol=1e-7)


def test_no_state_is_the_initial_state_and_no_episode_start_continues():
    policy, obs = recurrent(), observations(3)
    _, from_none = policy.predict(obs)
    _, from_zeros = policy.predict(obs, (np.zeros((1, 3, 4), np.float32), np.zeros((1, 3, 4), np.float32)), np.ones(3, bool))
    np.testing.assert_array_equal(from_none[0], from_zeros[0])
    _, on = policy.predict(obs, from_none)
    _, on_too = policy.predict(obs, from_none, np.zeros(3, bool))
    np.testing.assert_array_equal(on[0], on_too[0])


def test_predict_does_not_change_the_state_that_it_is_given():
    policy = recurrent()
    _, state = policy.predict(observations(3))
    before = [part.copy() for part in state]
    policy.predict(observations(3, seed=1), state, np.array([True, False, True]))
    for part, copy in zip(state, before, strict=True):
        np.testing.assert_array_equal(part, copy)


def test_a_state_of_another_number_of_environments_is_refused():
    policy = recurrent()
    _, state = policy.predict(observations(3))
    with pytest.raises(ValueError, match=r"\(1, 2, 4\), got \(1, 3, 4\)"):
        policy.predict(observations(2), state)


@pytest.mark.parametrize("shared", [True, False])
def test_weights_moved_to_another_policy_act_alike(shared):
    first, second = recurrent(shared_lstm=shared, seed=0), recurrent(shared_lstm=shared, seed=1)
    obs = observations(4)
    assert not np.array_equal(first.predict(obs, deterministic=True)[0], second.predict(obs, deterministic=True)[0])
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(first.predict(obs, deterministic=True)[0], second.predict(obs, deterministic=True)[0])
