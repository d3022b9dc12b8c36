"""The arrows of the house: who may import whom. Read from the source, so that a lazy import counts too."""

import ast
from pathlib import Path

import pytest

import tailguard

SOURCE = Path(tailguard.__file__).parent
ENVIRONMENTS = ("gymnasium", "stable_baselines3")
# A room may not import what its row names. A test engine never belongs in the product.
FORBIDDEN = {
    "": ("vectorbt", "backtesting", "empyrical", "arch", "statsmodels", "ffn"),
    # An adversary is built from a dict like every other part of the algorithm, so ppo knows robust; robust knows no policy.
    "ppo": ("tailguard.market", "tailguard.population", "tailguard.evaluate"),
    "optim": (
        "tailguard.market",
        "tailguard.ppo",
        "tailguard.population",
        "tailguard.evaluate",
        "gymnasium",
        "stable_baselines3",
    ),
    "robust": (
        "tailguard.market",
        "tailguard.ppo",
        "tailguard.population",
        "tailguard.evaluate",
        "gymnasium",
        "stable_baselines3",
    ),
    "market": ("torch", "tailguard.ppo", "tailguard.population", "tailguard.robust", "tailguard.evaluate"),
    "population": ("tailguard.ppo", "tailguard.market", "tailguard.evaluate"),
}
# Nobody knows the command line, and only the command line knows the application; only these two know the configuration.
ENTRANCES = ("tailguard.cli", "tailguard.app", "tailguard.config")
OPEN_TO = {"__main__.py": (), "cli": (), "app": ("tailguard.cli",)}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def inside(name, package):
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_arrows(path):
    room = path.name if path.parent == SOURCE else path.relative_to(SOURCE).parts[0]
    forbidden = FORBIDDEN[""] + FORBIDDEN.get(room, ()) + OPEN_TO.get(room, ENTRANCES)
    crossed = [(name, wall) for name in imports(path) for wall in forbidden if inside(name, wall)]
    assert not crossed


def test_only_the_outside_of_the_algorithm_knows_sb3():
    knowing = {
        path.name for path in (SOURCE / "ppo").glob("*.py") if any(inside(name, "stable_baselines3") for name in imports(path))
    }
    assert knowing == {"algorithm.py", "persistence.py", "policy.py"}


def test_public_names_can_be_imported():
    from tailguard import TradingEnv, TradingVecEnv
    from tailguard.evaluate import statistics
    from tailguard.market import BettingGame, GuardedMaze, SignalMarket, build_features, load_bars, load_dataset, simulate
    from tailguard.robust import PerturbationConfig, SAPPOConfig, StatePerturbation

    robust = (PerturbationConfig, SAPPOConfig, StatePerturbation)
    for name in (BettingGame, GuardedMaze, SignalMarket, TradingEnv, TradingVecEnv, *robust):
        assert isinstance(name, type)
    assert all(map(callable, (build_features, load_bars, load_dataset, simulate, statistics.cvar)))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tailguard.nothing
