"""An exported agent acts as the model that it was made from."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tailguard import DistributionalPPO, TradingEnv
from tailguard.evaluate.play import target_weights
from tailguard.experiments.export import export, observation_names
from tailguard.market import BettingGame, SignalMarket, build_features, random_walk
from tailguard.market.features import FeatureScaler
from tailguard.market.relevance import fill_returns
from tailguard.market.rules import TradingSettings

STEPS, BATCH = 20, 3
AGENTS = {
    "lstm": (lambda: SignalMarket(4, seed=0), "MlpLstmPolicy", {}),
    "two layers, normalised": (
        lambda: SignalMarket(4, seed=0),
        "MlpLstmPolicy",
        {"normalize_obs": True, "policy_kwargs": {"n_lstm_layers": 2, "lstm_hidden_size": 8, "shared_lstm": True}},
    ),
    "squashed": (lambda: SignalMarket(4, seed=0), "MlpPolicy", {"policy_kwargs": {"squash_output": True}}),
    "periods": (lambda: BettingGame(4, seed=0), "MlpPolicy", {"risk": {"objective": "cvar", "alpha": 0.2, "period": 3}}),
    "discrete, dial": (lambda: BettingGame(4, seed=0), "MlpPolicy", {"risk": {"objective": "cvar", "alpha": (0.05, 1.0)}}),
}


def trained(name):
    env, policy, settings = AGENTS[name]
    settings = {"policy_kwargs": {"lstm_hidden_size": 8}} | settings if policy == "MlpLstmPolicy" else settings
    return DistributionalPPO(policy, env(), n_steps=16, seed=0, **settings).learn(128)


def runner(path, form):
    """A function of arrays, as another program would call the file."""
    if form == "onnx":
        session = onnxruntime.InferenceSession(str(path))
        names = [one.name for one in session.get_inputs()]
        return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))
    module = torch.jit.load(str(path))
    return lambda *inputs: [one.numpy() for one in module(*map(torch.from_numpy, inputs))]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("form", ["onnx", "torchscript"])
@pytest.mark.parametrize("name", AGENTS)
def test_the_graph_acts_as_the_model_over_a_whole_episode(tmp_path, name, form):
    model = trained(name)
    act = runner(export(model.policy, tmp_path / "agent", form), form)
    observations = np.random.default_rng(0).random((STEPS, BATCH, model.policy.obs_size)).astype(np.float32)
    memory = [one.numpy() for one in model.policy.initial_state(BATCH)] if model.policy.recurrent else []
    state = None
    for observation in observations:
        action, *memory = act(observation, *memory)
        expected, state = model.predict(observation, state, None, deterministic=True)
        assert action.shape == expected.shape
        np.testing.assert_allclose(action, expected, atol=1e-5)
    for mine, theirs in zip(memory, state or (), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_scale_and_weights_of_features_are_part_of_the_graph(tmp_path, form):
    bars = random_walk(400, seed=0)
    raw = build_features(bars)
    scaler = FeatureScaler(bars.index[0], bars.index[300]).fit(raw[:300], fill_returns(bars.iloc[:300], "next_open"), 1.0)
    assert len(set(scaler.weight.tolist())) > 5
    scaled = scaler.transform(raw)
    model = DistributionalPPO("MlpPolicy", TradingEnv(bars, features=scaled, episode_length=50), n_steps=32, seed=0).learn(64)
    columns = observation_names(model.policy, scaler.names)
    assert columns == [*scaler.names, "weight_0", "unrealised_gain_0", "drawdown"]
    trading = TradingSettings(core=(0.4,), active=0.5, gain=3.0)
    path = export(model.policy, tmp_path / "agent", form, scaler, columns, trading)
    act = runner(path, form)
    account = np.array([0.3, 0.01, -0.02], np.float32)
    for row in range(raw.warmup, 400, 20):
        expected, _ = model.predict(np.concatenate((scaled.values[row], account)), deterministic=True)
        (action,) = act(np.concatenate((raw.values[row], account))[None])
        np.testing.assert_allclose(action[0], expected, atol=1e-5)
    if form == "onnx":
        (kept,) = (json.loads(one.value) for one in onnx.load(path).metadata_props if one.key == "tailguard")
    else:
        extra = {"tailguard.json": ""}
        torch.jit.load(str(path), _extra_files=extra)
        kept = json.loads(extra["tailguard.json"])
    assert kept["columns"] == columns
    rules = TradingSettings(**kept["trading"])
    asked = np.linspace(-1.0, 1.0, 9)[:, None]
    np.testing.assert_array_equal(target_weights(asked, rules), target_weights(asked, trading))
    np.testing.assert_allclose(target_weights(asked, rules), 0.5 * 0.4 + 0.5 * np.clip(3.0 * asked, -1.0, 1.0))


def test_a_missing_folder_is_not_made(tmp_path):
    policy = trained("squashed").policy
    with pytest.raises(ValueError, match="there is no folder"):
        export(policy, tmp_path / "missing" / "agent", "torchscript")
    assert not (tmp_path / "missing").exists()
