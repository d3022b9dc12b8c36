"""Observations of every space: their rows, and the encoders that read them, which learn and see what SB3's would see."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnv, IdentityEnvMultiBinary
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn

from tailguard import DistributionalPPO
from tailguard.ppo.observations import ObservationRows

IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
NUMBERS = spaces.Box(-1.0, 1.0, (2, 2))
SPACES = {
    "numbers": NUMBERS,
    "image": IMAGE,
    "discrete": spaces.Discrete(4),
    "multi discrete": spaces.MultiDiscrete([4, 3]),
    "multi binary": spaces.MultiBinary((3, 2)),
    "dict": spaces.Dict({"image": IMAGE, "state": spaces.Discrete(3), "numbers": NUMBERS}),
}
T, B = 12, 2


def drawn(space, n=5):
    """Return n observations of a space, as a vectorised environment gives them."""
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


class Drawing(gym.Env):
    """Observations of any space, drawn; the reward is the first number of the action; five steps an episode."""

    def __init__(self, space):
        self.observation_space, self.action_space = copy.deepcopy(space), spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), float(action[0]), False, self.t == 5, {}


class InDict(gym.ObservationWrapper):
    """Observations as the only entry of a Dict."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Dict({"only": env.observation_space})

    def observation(self, observation):
        return {"only": observation}


def make(space, policy="MlpPolicy", wrapper=None, **kwargs):
    network = {"net_arch": [8], "lstm_hidden_size": 5} | kwargs.pop("policy_kwargs", {})
    env = make_vec_env(lambda: Drawing(space), B, seed=0, wrapper_class=wrapper)
    return DistributionalPPO(policy, env, n_steps=T, critic={"num_quantiles": 4}, policy_kwargs=network, seed=0, **kwargs)


# Rows.


@pytest.mark.parametrize("name", SPACES)
def test_networks_see_what_sb3s_would_see(name):
    space, observations = SPACES[name], drawn(SPACES[name])
    rows = ObservationRows(space)
    stored = torch.as_tensor(rows.rows(observations)).to(rows.dtype)
    assert stored.shape == (5, rows.size)
    seen, expected = rows.tensors(stored), preprocess_obs(obs_as_tensor(observations, "cpu"), space)
    for found, wanted in zip(*([x.values() if isinstance(x, dict) else [x] for x in (seen, expected)]), strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(rows.tensor_rows(obs_as_tensor(observations, "cpu")), stored)


@pytest.mark.parametrize("name", SPACES)
def test_one_observation_and_a_batch_are_told_apart(name):
    rows, observations = ObservationRows(SPACES[name]), drawn(SPACES[name])
    batch, single = rows.batch(observations)
    assert not single
    first = {key: values[0] for key, values in observations.items()} if isinstance(observations, dict) else observations[0]
    row, single = rows.batch(first)
    assert single
    np.testing.assert_array_equal(row[0], batch[0])


def test_integers_count_from_zero_in_rows():
    rows = ObservationRows(spaces.Dict({"a": spaces.Discrete(3, start=-1), "b": spaces.MultiDiscrete([2, 2], start=[5, 7])}))
    found = rows.rows({"a": np.array([-1, 1]), "b": np.array([[5, 8], [6, 7]])})
    np.testing.assert_array_equal(found, [[0, 0, 1], [2, 1, 0]])


def test_images_take_a_byte_per_number():
    assert make(IMAGE, "CnnPolicy").rollout_buffer.obs.dtype == torch.uint8
    assert make(NUMBERS).rollout_buffer.obs.dtype == torch.float32


def test_what_does_not_fit_the_space_is_refused():
    with pytest.raises(ValueError, match="observations must be Box"):
        ObservationRows(spaces.Dict({"a": spaces.Text(3)}))
    with pytest.raises(ValueError, match=r"observation\['numbers'\] must have the shape \(2, 2\)"):
        ObservationRows(SPACES["dict"]).batch(drawn(SPACES["dict"]) | {"numbers": np.zeros(3)})
    with pytest.raises(ValueError, match="observation must be a dict of"):
        ObservationRows(SPACES["dict"]).batch({"numbers": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="normalize_obs is"):
        make(IMAGE, "CnnPolicy", normalize_obs=True)
    with pytest.raises(ValueError, match="adversary is"):
        make(IMAGE, "CnnPolicy", adversary={"epsilon": 0.1})


# Encoders.


class Shifted(FlattenExtractor):
    """A trainable encoder of the user's own."""

    def __init__(self, space):
        super().__init__(space)
        self.shift = nn.Parameter(torch.zeros(self.features_dim))

    def forward(self, observations):
        return super().forward(observations) + self.shift


ENCODERS = {
    "CnnPolicy": (IMAGE, NatureCNN),
    "MultiInputPolicy": (SPACES["dict"], CombinedExtractor),
    "MlpPolicy": (NUMBERS, Shifted),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("lstm", ["", "Lstm"])
@pytest.mark.parametrize("policy", ENCODERS)
def test_encoders_are_trained_from_end_to_end(policy, lstm, shared):
    space, encoder = ENCODERS[policy]
    network = {"features_extractor_class": encoder, "share_features_extractor": shared}
    model = make(space, policy.replace("Policy", f"{lstm}Policy"), policy_kwargs=network)
    extractors = [model.policy.features_extractor, *([] if shared else [model.policy.vf_features_extractor])]
    before = [[parameter.detach().clone() for parameter in extractor.parameters()] for extractor in extractors]
    model.learn(2 * T * B)
    for extractor, old in zip(extractors, before, strict=True):
        assert isinstance(extractor, encoder)
        assert all(not torch.equal(new, parameter) for new, parameter in zip(extractor.parameters(), old, strict=True))
    assert model.predict(drawn(space))[0].shape == (5, 1)


LSTMS = {
    "separate": {},
    "shared": {"shared_lstm": True},
    "feed-forward critics": {"enable_critic_lstm": False},
    "two layers": {"n_lstm_layers": 2},
    "torch": {"compiled": False},
}


@pytest.mark.parametrize("batch_size", [T * B, T // 3])
@pytest.mark.parametrize("lstm", LSTMS)
@pytest.mark.parametrize("policy", ["CnnLstmPolicy", "MultiInputLstmPolicy", "MlpLstmPolicy"])
def test_before_the_first_step_training_sees_what_acting_saw(policy, lstm, batch_size):
    """Ratios of 1 everywhere: encoders, recurrent states at the start of a sequence, and resets inside it are right."""
    space, encoder = ENCODERS[policy.replace("Lstm", "")]
    model = make(space, policy, policy_kwargs={"features_extractor_class": encoder, **LSTMS[lstm]}, batch_size=batch_size)
    model.learn(T * B)  # states that are not 0, in the middle of an episode
    _, callback = model._setup_learn(T * B, None, False)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, T)
    batch = model.rollout_buffer.experience().batch
    assert batch.size == T * B // min(batch_size, T)
    with torch.no_grad():
        actor, critic = batch.features(model.policy)
        learnt = batch.weights > 0.0
        torch.testing.assert_close(model.policy.dist_params(actor)[learnt], batch.dist_params[learnt], rtol=1e-4, atol=1e-5)
        values = model.rollout_buffer.experience().at_steps(model.policy._values(critic).squeeze(-1))
    torch.testing.assert_close(values, torch.from_numpy(model.rollout_buffer.values), rtol=1e-4, atol=1e-4)


class Normed(BaseFeaturesExtractor):
    """Batch normalisation and dropout, which differ between acting and training."""

    def __init__(self, space):
        super().__init__(space, 4)
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, observations):
        return self.layers(observations)


def test_acting_and_predicting_leave_batch_normalisation_alone():
    model = make(NUMBERS, policy_kwargs={"features_extractor_class": Normed})
    statistics = model.policy.features_extractor.layers[1].running_mean
    before = statistics.clone()
    _, callback = model._setup_learn(T * B)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, T)
    model.rollout_buffer.experience()
    first, second = (model.predict(drawn(NUMBERS), deterministic=True)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert torch.equal(statistics, before)
    model.train()
    assert not torch.equal(statistics, before)


def test_an_encoder_beside_the_policys_own_is_named_as_not_learning():
    class Own(make(NUMBERS).policy_class):
        """Runs a network before the policy where no gradient is kept."""

        def __init__(self, *spaces_, **kwargs):
            super().__init__(*spaces_, **kwargs)
            self.encoder = nn.Linear(4, 4)

        def inputs(self, obs):
            return self.encoder(super().inputs(obs))

        acting_inputs = inputs

    model = make(NUMBERS, Own)
    with pytest.warns(UserWarning, match=r"never learn: encoder.weight, encoder.bias"):
        model.learn(T * B)


def test_a_dict_of_one_box_learns_as_the_box_does():
    space = spaces.Box(-1.0, 1.0, (3,))
    plain = make(space).learn(3 * T * B)
    wrapped = make(space, "MultiInputPolicy", InDict).learn(3 * T * B)
    observations = drawn(space)
    expected, found = (
        plain.predict(observations, deterministic=True),
        wrapped.predict({"only": observations}, deterministic=True),
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)


def test_integers_are_learnt_from_and_bits_are_chosen():
    for env in (IdentityEnv(4), IdentityEnvMultiBinary(3)):
        model = DistributionalPPO("MlpPolicy", make_vec_env(lambda env=env: env, 1), 2e-3, 256, gamma=0.4, seed=1).learn(3_000)
        assert evaluate_policy(model, model.get_env(), n_eval_episodes=5)[0] > 90.0


def test_running_returns_reach_the_networks_beside_an_encoder():
    """A risk objective's columns are appended to what the extractor makes of the environment's own."""
    model = make(
        spaces.Box(-1.0, 1.0, (3,)),
        policy_kwargs={"features_extractor_class": Shifted},
        risk={"objective": "cvar", "alpha": 0.2},
    )
    model.learn(2 * T * B)
    assert model.policy.features_extractor.features_dim == 3
    assert model.policy.actor[0].in_features == 3 + model.policy.budget.features


class Counting(BaseFeaturesExtractor):
    """An extractor that reads its images by ``view``, which needs the usual memory layout."""

    def __init__(self, space):
        super().__init__(space, 2)
        self.layer = nn.Linear(3 * 36 * 36, 2)

    def forward(self, observations):
        return self.layer(observations.view(len(observations), -1))


@pytest.mark.parametrize("extractor", [NatureCNN, Counting])
def test_the_memory_layout_of_images_changes_no_gradient(extractor):
    """Convolutions get their images with the channels last where a gradient is taken."""
    space = spaces.Box(0, 255, (3, 36, 36), np.uint8)
    env = make_vec_env(lambda: Drawing(space), B, seed=0)
    kwargs = {"features_extractor_class": extractor, "net_arch": []}
    policy = DistributionalPPO("CnnPolicy", env, n_steps=T, policy_kwargs=kwargs, seed=0).policy
    rows = torch.as_tensor(policy.observations.rows(drawn(space)))
    features = policy.encode_for_actor(rows)
    features.square().sum().backward()
    reached = [parameter.grad.clone() for parameter in policy.features_extractor.parameters()]
    policy.zero_grad()
    direct = policy.features_extractor(preprocess_obs(torch.as_tensor(drawn(space)), space))
    direct.square().sum().backward()
    torch.testing.assert_close(features, direct)
    for gradient, parameter in zip(reached, policy.features_extractor.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
