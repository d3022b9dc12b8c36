"""The settings of rl-baselines3-zoo, translated; needs sb3-contrib, of the extra `bench`."""

import json

import numpy as np
import pytest
import yaml

pytest.importorskip("sb3_contrib")

from published import ENGINES, ROWS, central, file_of, table
from zoo import literal, make, schedule, translated

ENTRY = """
normalize: true
n_envs: 4
n_timesteps: !!float 1e5
policy: 'MlpLstmPolicy'
n_steps: 32
gamma: 0.98
learning_rate: lin_0.001
policy_kwargs: "dict(
    ortho_init=False, activation_fn=nn.ReLU, lstm_hidden_size=16,
    net_arch=dict(pi=[16], vf=[16])
  )"
"""


def test_an_entry_becomes_arguments_and_the_peer_gives_the_rest() -> None:
    settings = translated("ppo_lstm", "CartPoleNoVel-v1", yaml.safe_load(ENTRY))
    assert (settings.n_envs, settings.steps, settings.normalize) == (4, 100_000, {"gamma": 0.98})
    arguments = settings.arguments
    assert arguments["learning_rate"](0.25) == pytest.approx(0.00025)
    assert arguments["policy_kwargs"]["net_arch"] == {"pi": [16], "vf": [16]}
    assert arguments["policy_kwargs"]["activation_fn"].__name__ == "ReLU"
    assert arguments["batch_size"] == 128  # sb3-contrib's, not ours


def test_settings_cannot_run_code() -> None:
    for text in ("__import__('os').getcwd()", "dict(a=open('x'))", "nn.functional", "nn.init.zeros_(1)"):
        with pytest.raises((ValueError, AttributeError)):
            literal(text)
    with pytest.raises(ValueError, match="unknown schedule"):
        schedule("cos_1")
    with pytest.raises(ValueError, match="frame_stack"):
        translated("ppo", "X", {"policy": "CnnPolicy", "n_timesteps": 1, "frame_stack": 4})


def test_velocities_are_hidden() -> None:
    env = make("CartPoleNoVel-v1")
    env.reset(seed=0)
    for _ in range(5):
        obs = env.step(env.action_space.sample())[0]
        assert obs[1] == obs[3] == 0.0 != obs[0]


def test_the_interquartile_mean_leaves_out_the_quarters_at_the_ends() -> None:
    scores = np.array([-1e9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e9])
    mean, low, high = central(scores)
    assert mean == pytest.approx(3.5)
    assert low < mean < high
    assert central([1.0, 2.0, 9.0])[0] == pytest.approx(4.0)  # nothing can be left out of three: their mean


def test_the_table_says_what_was_reached_and_what_was_not_run(tmp_path):
    bar = ROWS["pendulum-novel"].bar
    for row, score in (("cartpole-novel", 499.0), ("pendulum-novel", bar)):
        for seed in range(2):
            result = {"score": score, "spread": 3.0, "cpu_seconds": 90.0}
            file_of(tmp_path, row, ENGINES[0], seed).write_text(json.dumps(result), encoding="utf-8")
    lines = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in table(tmp_path).splitlines() if "|" in line}
    assert lines["CartPoleNoVel-v1"][2:5] == ["499.0 [499.0, 499.0] (499 ± 3, 499 ± 3)", "no", "not run"]
    assert lines["PendulumNoVel-v1"][3] == "yes"
    assert lines["PendulumNoVel-v1"][5] == "1.5, - |"
    assert {lines[row.env_id][2] for name, row in ROWS.items() if row.steps is None and "novel" not in name} == {"not run"}
