"""The configuration: one tree of settings, one YAML file, overrides from the command line.

A section is the settings class of its room, so every default stands exactly once, beside the code that it steers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from tailguard.evaluate.walkforward import WalkforwardConfig
from tailguard.market.features import FeatureConfig
from tailguard.market.rules import TradingSettings
from tailguard.population.config import PopulationConfig
from tailguard.validation import build


class TrainingConfig(BaseModel):
    """How an agent is trained.

    :param steps: environment steps in all.
    :param seed: of everything that is random.
    :param n_envs: accounts that trade side by side.
    :param test_share: share of the bars, at the end, that training never sees.
    :param policy: with or without memory.
    :param lstm_hidden_size: size of the memory.
    :param learning_rate: size of a gradient step.
    :param n_steps: steps per account between updates.
    :param n_epochs: passes over them.
    :param gamma: discount; 0.95 looks about 20 bars ahead.
    :param risk: the objective, such as ``{objective: cvar, alpha: 0.2}``; as all that follow, passed on to DistributionalPPO.
    :param critic: settings of the critics.
    :param optimizer: such as ``{name: adaptive_upgd}``.
    :param vgs: variance gradient scaling; ``{}`` switches it on.
    :param adversary: training against perturbed observations, such as ``{epsilon: 0.1}``; its ``perturbable`` may name features
        (``[return_*, rsi]``) and is all that the market says by default, but not the calendar and the account.
    :param tensorboard: folder for TensorBoard; None writes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1)] = 300_000
    seed: Annotated[int, Field(ge=0)] = 0
    n_envs: Annotated[int, Field(ge=1)] = 32
    test_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    policy: Literal["MlpPolicy", "MlpLstmPolicy"] = "MlpLstmPolicy"
    lstm_hidden_size: Annotated[int, Field(ge=1)] = 32
    learning_rate: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 3e-4
    n_steps: Annotated[int, Field(ge=2)] = 128
    n_epochs: Annotated[int, Field(ge=1)] = 4
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    # Checked where they are used: their classes would make every command wait for PyTorch.
    risk: dict[str, Any] = Field(default_factory=dict)
    critic: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    vgs: dict[str, Any] | None = None
    adversary: dict[str, Any] | None = None
    tensorboard: str | None = "artifacts/tensorboard"


class CheckpointConfig(BaseModel):
    """How often a training is saved. Whatever happens, at most this much is lost.

    :param every_seconds: save between updates when this much time has passed since the last time.
    :param every_steps: save when this many steps have passed as well; None looks at the time only.
    :param keep: how many of the newest stay.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 60.0
    every_steps: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=2)] = 3


class Config(BaseModel):
    """Everything that a run can be told.

    :param data: names of shipped data sets or paths of files; several joined by ``+`` are traded as one portfolio.
    :param strategies: baselines to run, each a name, or ``name:parameter=value,...``.
    :param trading: costs, fills, limits and the shape of episodes.
    :param features: what is computed from the bars.
    :param training: how an agent is trained.
    :param checkpoints: how often its training is saved.
    :param walkforward: folds and seeds of ``tailguard walkforward``.
    :param population: for ``tailguard population``: what is searched while a population trains; None for all other commands.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    trading: TradingSettings = Field(default_factory=TradingSettings)
    features: FeatureConfig = Field(default_factory=FeatureConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    walkforward: WalkforwardConfig = Field(default_factory=WalkforwardConfig)
    population: PopulationConfig | None = None


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``a.b=c`` overrides, check everything.

    :param path: the file; None starts from the defaults.
    :param overrides: each a path of keys, ``=`` and a value in YAML.
    :raises ValueError: one line naming the key, the value and what is legal.
    """
    values = {} if path is None else _read(path)
    for override in overrides:
        _apply(values, override)
    try:
        return build(Config, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from None


def dump_config(config: Config) -> str:
    """The whole tree as YAML, in the form that :func:`load_config` reads."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold keys and values, got {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    keys, equals, text = override.partition("=")
    path = keys.strip().split(".")
    if not equals or not all(path):
        raise ValueError(f"--set {override!r}: must look like section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"--set {override!r}: {text!r} is not a YAML value") from None
    node = values
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ValueError(f"--set {override!r}: {key} is not a section")
    node[path[-1]] = value
