"""The environment by its Gymnasium id, ``tailguard/Trading-v0``."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import tailguard
from tailguard.market import load_dataset

ID = "tailguard/Trading-v0"


@pytest.fixture(scope="module")
def bars():
    return load_dataset("nasdaq-1d").iloc[-600:]


@pytest.mark.parametrize("name", [ID, f"tailguard:{ID}"])
def test_made_by_its_id_it_is_the_same_environment(bars, name):
    env = gymnasium.make(name, bars=bars, fee=0.002, episode_length=50)
    direct = tailguard.TradingEnv(bars, fee=0.002, episode_length=50)
    assert type(env.unwrapped) is tailguard.TradingEnv
    assert env.unwrapped.batch.settings == direct.batch.settings
    np.testing.assert_array_equal(env.reset(seed=3)[0], direct.reset(seed=3)[0])
    for action in np.linspace(-1.0, 1.0, 50, dtype=np.float32).reshape(-1, 1):
        ours, theirs = env.step(action), direct.step(action)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
    assert ours[3]


@pytest.mark.parametrize("settings", [{}, {"episode_length": 20, "long_only": True, "leverage": 2.0}])
def test_gymnasiums_checker_finds_nothing(bars, settings):
    """Warnings are errors here, those of the checker included."""
    check_env(gymnasium.make(ID, bars=bars, fee=0.001, **settings).unwrapped)


@pytest.mark.parametrize("imports", ["import tailguard, gymnasium", "import gymnasium, tailguard"])
def test_the_order_of_imports_does_not_matter_and_nothing_heavy_is_loaded(imports):
    heavy = "{'torch', 'pandas', 'stable_baselines3', 'numba'}"
    code = f"{imports}; gymnasium.spec('{ID}'); import sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_gymnasium_imports_tailguard_for_a_name_with_a_prefix():
    code = f"import gymnasium; gymnasium.make('tailguard:{ID}')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "missing 1 required positional argument: 'bars'" in process.stderr


def test_a_wrong_setting_is_refused_by_its_name(bars):
    with pytest.raises(ValueError, match=r"fees: unknown key; .*did you mean fee\?"):
        gymnasium.make(ID, bars=bars, fees=0.001)
