"""What others may import: it exists, says what it is, and explains every parameter."""

import ast
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest
from pydantic import BaseModel
from stable_baselines3 import PPO

import tailguard

SOURCE = Path(tailguard.__file__).parent
# Import paths that scripts outside the project use, beside what the packages list in `__all__`.
RELIED_ON = {
    "tailguard": ["DistributionalPPO", "TradingEnv", "TradingVecEnv"],
    "tailguard.optim": ["UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"],
    "tailguard.ppo.quantiles": ["quantile_huber_loss", "cvar", "cvar_categorical"],
    "tailguard.ppo.targets": ["gae"],
    "tailguard.population": ["PBTScheduler", "PBTConfig", "HyperparamConfig", "PopulationMember"],
    "tailguard.robust": ["PerturbationConfig", "StatePerturbation", "SAPPOConfig"],
    "tailguard.market": [
        *("load_bars", "load_dataset", "build_features", "simulate"),
        *("BettingGame", "GuardedMaze", "SignalMarket"),
    ],
    "tailguard.evaluate": ["statistics"],
    # What a dict given to DistributionalPPO is checked against.
    "tailguard.optim.config": ["OptimizerConfig", "VGSConfig"],
    "tailguard.ppo.schedules": ["EntropyConfig", "KLConfig"],
    "tailguard.ppo.critic": ["CriticConfig"],
    "tailguard.ppo.risk": ["RiskConfig"],
    "tailguard.ppo.scaling": ["ObsNormConfig"],
    "tailguard.config": ["Config", "TrainingConfig", "CheckpointConfig"],
    "tailguard.envs.vec_env": ["GymVectorAdapter"],
    "tailguard.population.member": ["Learner"],
}


def listed():
    """Every `__all__` of the source, by module."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
                parts = path.relative_to(SOURCE.parent).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.literal_eval(node.value)


PUBLIC = sorted(
    {(module, name) for module, names in [*listed(), *RELIED_ON.items()] for name in names} - {("tailguard", "__version__")}
)


def explained(thing):
    """The names after ``:param`` in its docstring; of a class also in those of its constructor and of what it extends."""
    family = [one for one in thing.__mro__ if one.__module__.startswith("tailguard")] if inspect.isclass(thing) else [thing]
    texts = [one.__doc__ or "" for one in family]
    texts += [vars(one)["__init__"].__doc__ or "" for one in family if "__init__" in vars(one)]
    return {name for text in texts for name in re.findall(r":param (\w+):", text)}


def parameters(thing):
    """The names that a caller may give."""
    if inspect.isclass(thing) and issubclass(thing, BaseModel):
        return set(thing.model_fields)
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return set(thing._fields)
    signature = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing)
    return {name for name in signature.parameters if name != "self" and not name.startswith("_")}


def public(module, name):
    """The thing itself; None where there is nothing to be called: a module, a constant, the name of a type, an error."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.ismodule(thing) or isinstance(thing, types.GenericAlias | dict | tuple | str | float | int):
        return None
    quiet = inspect.isclass(thing) and (issubclass(thing, Exception) or vars(thing).get("_is_protocol", False))
    return None if quiet else thing


def test_all_packages_say_what_is_public():
    modules = {module for module, _ in PUBLIC}
    assert {"tailguard", *(f"tailguard.{name}" for name in ("market", "optim", "population", "robust", "evaluate"))} <= modules
    assert len(PUBLIC) > 60


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda part: part)
def test_a_public_name_is_documented_with_every_parameter_and_no_other(module, name):
    thing = public(module, name)
    if thing is not None:
        assert (thing.__doc__ or "").strip()
        assert sorted(parameters(thing) - explained(thing)) == []
        assert not inspect.isfunction(thing) or sorted(explained(thing) - parameters(thing)) == []


def test_what_is_not_there_is_told_as_python_does():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tailguard.nothing


def test_the_algorithm_has_no_more_parameters_than_a_page():
    """Those of SB3 and sb3-contrib are taken as they are; our own must stay few."""
    own = parameters(tailguard.DistributionalPPO) - set(inspect.signature(PPO.__init__).parameters)
    assert len(own) <= 10, sorted(own)
