"""The configuration: one tree of settings, one YAML file, overrides from the command line. It does not load PyTorch.

A section is the settings class of its package, so every default stands exactly once, beside the code that it steers, and the
constructor of :class:`tailguard.DistributionalPPO` takes the same classes. ``docs/config.md`` is made of their docstrings.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tailguard.bounded_yaml import NotYaml, parse_yaml
from tailguard.envs.desk_config import ExecutionSettings, HedgeSettings, OptionSettings
from tailguard.evaluate.folds import WalkforwardConfig
from tailguard.market.features import FeatureConfig
from tailguard.market.files import FileConfig
from tailguard.market.rules import AssetConfig, GuardConfig, TradingRules, TradingSettings
from tailguard.optim.config import OptimizerConfig, VGSConfig
from tailguard.population.config import HyperparamConfig, PBTConfig, PopulationConfig
from tailguard.ppo.config import (
    CriticConfig,
    EntropyConfig,
    KLConfig,
    LayersConfig,
    NetworkConfig,
    ObsNormConfig,
    ReturnScaleConfig,
    RiskConfig,
    resolve_batch_sizes,
)
from tailguard.robust.config import PerturbationConfig, SAPPOConfig
from tailguard.validation import build, require

__all__ = [
    "AdversaryConfig",
    "AssetConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "EntropyConfig",
    "ExecutionSettings",
    "FeatureConfig",
    "FileConfig",
    "GuardConfig",
    "HedgeSettings",
    "HyperparamConfig",
    "KLConfig",
    "LayersConfig",
    "NetworkConfig",
    "ObsNormConfig",
    "OptimizerConfig",
    "OptionSettings",
    "PBTConfig",
    "PerturbationConfig",
    "PopulationConfig",
    "ReturnScaleConfig",
    "RiskConfig",
    "SAPPOConfig",
    "SelectionConfig",
    "TradingNetworkConfig",
    "TradingRules",
    "TradingSettings",
    "TrainingConfig",
    "VGSConfig",
    "WalkforwardConfig",
    "changed_settings",
    "dump_config",
    "load_config",
]

# Limits of what is read: all settings together have 10 kB and some 200 values.
LARGEST_FILE = 256 * 2**10

# What a population may search, by the names that experiments/population_member.py gives to the hyperparameters of a model.
ADVERSARIAL = frozenset({"adversarial_epsilon", "adversarial_ratio", "robust_kl_coef"})
SEARCHABLE = ADVERSARIAL | {
    "clip_range",
    "entropy_coef",
    "gae_lambda",
    "gamma",
    "kl_target",
    "learning_rate",
    "max_grad_norm",
    "n_epochs",
    "vf_coef",
}


class TradingNetworkConfig(NetworkConfig):
    """The networks of a trading agent: those of :class:`NetworkConfig`, but small ones, since markets are mostly noise.

    :param net_arch: hidden layers of actor and critics, such as ``[64, 64]``, or ``{pi: [32], vf: [64]}``; ``[]`` is linear.
        One layer of 16 is enough for what a few thousand bars can teach; larger ones trade more and learn the past by heart.
    :param lstm_hidden_size: size of the LSTM's hidden state, at least 1, for ``MlpLstmPolicy``. 16 is enough for daily and
        hourly bars; time grows with its square, and a larger one learns the noise of the past by heart.
    """

    net_arch: LayersConfig | tuple[PositiveInt, ...] | None = (16,)
    lstm_hidden_size: PositiveInt = 16


class AdversaryConfig(SAPPOConfig):
    """Training against perturbed observations, with columns that may be named.

    :param perturbable: features that the adversary may move: names, patterns such as ``[return_*, rsi]``, or numbers of
        columns. None is everything that the market says: the calendar and the account are known for certain. Fewer make the
        adversary weaker and the agent trust the others.
    """

    perturbable: tuple[NonNegativeInt | str, ...] | None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def _names_or_columns(self) -> Self:
        kinds = {isinstance(column, str) for column in self.perturbable or ()}
        require(len(kinds) < 2, "perturbable", self.perturbable, "all names or all numbers of columns")
        return self


# Defaults of agents that are averse to the tail of their periods, where they differ. A tail is learnt from few samples, so that
# it takes more updates and larger steps. And it is the tail of an agent that explores: with positions drawn as widely as usual,
# what is seen in the worst periods are the agent's own dice and what they cost. With small dice, though, the returns of the
# bars after an action drown what it has changed, unless traces are short: critics know what a position is worth afterwards.
RISK_DEFAULTS: dict[str, Any] = {"n_steps": 32, "learning_rate": 1e-3, "gae_lambda": 0.5}
RISK_LOG_STD = -2.0
# Weight of the CVaR: the more, the higher the Sharpe ratio below which cash is best.
RISK_WEIGHT = 0.1


class TrainingConfig(BaseModel):
    """The training of an agent. With a ``risk`` that has a period, `n_steps`, `learning_rate`, `gae_lambda`,
    ``network.log_std_init`` and ``risk.weight`` default to 32, 1e-3, 0.5, -2 and 0.1.

    :param steps: environment steps in all, at least 1; with a ``selection`` the most that it may choose. 65,536 take a second
        or two. More fit the training bars better, which is not always better on the bars that follow.
    :param minutes: wall time after which a training ends even if steps are left, above 0; None has no limit. Then the same seed
        no longer gives the same agent, and nothing is selected before. A run that is resumed gets this time again; populations
        have no such limit.
    :param seed: seed of everything that is random, at least 0. The same seed gives the same agent, bit for bit.
    :param n_envs: accounts that trade side by side, at least 1. 32 is typical; more make steadier updates and fewer of them.
    :param test_share: share of the bars, at the end, that training never sees, in (0, 1). 0.3 is typical; less leaves more to
        learn from and makes the test less certain.
    :param pooled: one policy learns on all symbols of the data: every account trades one of them, with features scaled by its
        own past, and the portfolio gives each symbol the same share. What the symbols have in common is learnt from all of
        them. False trades the symbols as one portfolio with observations of all of them.
    :param policy: ``MlpLstmPolicy`` is recurrent: it remembers earlier bars. ``MlpPolicy`` sees the features of the present bar
        only (the last returns are among them) and trains faster. ``auto`` lets the ``selection`` choose between the two, and is
        ``MlpPolicy`` without one.
    :param network: layers, activation, LSTM and the distribution of actions. ``training.lstm_hidden_size`` is an older place of
        ``training.network.lstm_hidden_size``.
    :param learning_rate: size of a gradient step, above 0. 3e-4 is typical; three times more is often unstable, three times
        less slow.
    :param n_steps: steps per account between updates, at least 2. 64 to 128 are typical; longer rollouts see farther and update
        less often. The recurrent policy learns from sequences of this length.
    :param batch_size: samples per gradient step, a divisor of ``n_steps * n_envs``; for ``MlpLstmPolicy`` a multiple of
        `n_steps`, since a minibatch is whole sequences. None takes a quarter of the rollout. Smaller ones are noisier and make
        more steps.
    :param n_epochs: passes over each rollout, at least 1. 4 to 10 are usual; more learn faster and overfit the rollout.
    :param gamma: discount, in [0, 1]; 0.95 looks about 20 bars ahead. Closer to 1 looks farther, with more noise.
    :param gae_lambda: lambda of the advantages (GAE), in [0, 1]. 0.95 is typical; lower trusts the critics more, with less
        noise and more bias.
    :param clip_range: how far the ratio of new to old probability may count, above 0. 0.2 is typical; 0.1 is more cautious.
    :param max_grad_norm: gradients are scaled down to this norm, above 0. 0.5 is typical; lower cuts more of them.
    :param vf_coef: weight of the critics' loss, at least 0. 0.5 is typical; it matters where actor and critics share an LSTM.
    :param normalize_advantage_per_mini_batch: standardise the advantages of each minibatch alone, as SB3 does, not those
        of the rollout at once. It adds noise where minibatches are small, and lets all of them count alike.
    :param microbatch_size: samples per backward pass, a divisor of `batch_size`; gradients of a minibatch are added up, which
        saves memory and changes nothing else. None: the whole minibatch.
    :param risk: what is maximised: the mean return or the average of its worst share (CVaR).
    :param critic: what the critics predict and how they learn it.
    :param optimizer: the optimizer and its settings.
    :param entropy: how much randomness is paid for.
    :param kl: how far one update may move the policy.
    :param vgs: variance-based gradient scaling, shorter steps where gradients are noisy; ``{}`` switches it on. None is off.
    :param adversary: training against perturbed observations, such as ``{epsilon: 0.1}``. None is off.
    :param normalize_obs: a running normalisation of the observations; true or ``{}`` switches it on, with
        ``{half_life: ...}`` it forgets. None is off: the features are standardised already.
    :param stats_window_size: finished episodes that averages in the log span, at least 1. More are smoother and lag.
    :param tensorboard: folder for TensorBoard; None writes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: PositiveInt = 65_536
    minutes: Annotated[float, Field(gt=0.0)] | None = None
    seed: NonNegativeInt = 0
    n_envs: PositiveInt = 32
    test_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    pooled: bool = False
    policy: Literal["auto", "MlpPolicy", "MlpLstmPolicy"] = "auto"
    network: TradingNetworkConfig = Field(default_factory=TradingNetworkConfig)
    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-4
    n_steps: Annotated[int, Field(ge=2)] = 64
    batch_size: PositiveInt | None = None
    n_epochs: PositiveInt = 4
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    clip_range: Annotated[float, Field(gt=0.0)] = 0.2
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 0.5
    vf_coef: Annotated[float, Field(ge=0.0)] = 0.5
    normalize_advantage_per_mini_batch: bool = False
    microbatch_size: PositiveInt | None = None
    risk: RiskConfig = Field(default_factory=RiskConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    entropy: EntropyConfig = Field(default_factory=EntropyConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    vgs: VGSConfig | None = None
    adversary: AdversaryConfig | None = None
    normalize_obs: ObsNormConfig | None = None
    stats_window_size: PositiveInt = 100
    tensorboard: str | None = "artifacts/tensorboard"

    @model_validator(mode="before")
    @classmethod
    def _lstm_hidden_size_belongs_to_the_network(cls, values: Any) -> Any:
        """Accept ``lstm_hidden_size`` where files of earlier versions have it."""
        if not isinstance(values, dict) or "lstm_hidden_size" not in values:
            return values
        values = dict(values)
        size, network = values.pop("lstm_hidden_size"), values.get("network", {})
        if isinstance(network, BaseModel):
            network = network.model_dump()
        if not isinstance(network, dict):
            return values  # the field's own check refuses it
        named = network.get("lstm_hidden_size", size)
        require(named == size, "network.lstm_hidden_size", named, f"{size}, as lstm_hidden_size says; keep one of the two")
        return values | {"network": network | {"lstm_hidden_size": size}}

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        """Fill in what agents that are averse to the tail of their periods learn better with."""
        if not isinstance(values, dict):
            return values
        risk, network = values.get("risk"), values.get("network", {})
        if isinstance(risk, RiskConfig):
            risk = risk.model_dump()
        if not isinstance(risk, dict) or risk.get("period") is None or risk.get("objective", "neutral") == "neutral":
            return values
        if isinstance(network, dict):
            network = {"log_std_init": RISK_LOG_STD, **network}
        return RISK_DEFAULTS | values | {"network": network, "risk": {"weight": RISK_WEIGHT, **risk}}

    @field_validator("normalize_obs", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        """Accept true and false, as the constructor of the model does."""
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        resolve_batch_sizes(
            self.n_steps,
            self.n_envs,
            recurrent=self.policy != "MlpPolicy",
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
        )
        if self.risk.return_augmented:
            require(self.gamma > 0.0, "gamma", self.gamma, "above 0 for an objective that looks at the return of an episode")
        return self


class SelectionConfig(BaseModel):
    """The choice of an agent inside the training bars, by blocks held out in time. Nothing of a test is used.

    Agents are trained without one block at a time and trade it at several stops of their training. The policy and the stop with
    the best Sharpe ratio over all blocks are chosen, and trained again on all training bars. How much of the account such an
    agent may steer follows from its alpha over the market on the held-out bars, and from how well these can be forecast; the
    rest is held in a constant mix.

    :param blocks: parts that the training bars are cut into, each held out once; at least 2. 4 is typical; more leave more bars
        to learn from and take proportionally longer.
    :param seeds: trainings per block and policy, at least 1. Their decisions are averaged: more make the choice steadier.
    :param stops: shares of ``training.steps``, rising, in (0, 1], after which agents are scored.
    :param doubt: t-statistic of the held-out evidence up to which an agent is not believed and steers nothing. It steers
        everything from ``doubt + 1`` on. 0.5 to 1 is typical; more makes idle agents, less makes agents that trade on noise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    blocks: Annotated[int, Field(ge=2, le=100)] = 4
    seeds: Annotated[int, Field(ge=1, le=100)] = 2
    stops: Annotated[tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(min_length=1)] = (0.125, 0.25, 0.5, 1.0)
    doubt: float = 1.0

    @field_validator("stops")
    @classmethod
    def _rising(cls, stops: tuple[float, ...]) -> tuple[float, ...]:
        require(list(stops) == sorted(set(stops)), "stops", stops, "rising shares of the steps")
        return stops


class CheckpointConfig(BaseModel):
    """The checkpoints of a training. Whatever happens, at most this much is lost.

    :param every_seconds: save between updates when this much time has passed since the last time, at least 0. A save takes some
        milliseconds.
    :param every_steps: save when this many steps have passed as well, at least 1; None looks at the time only.
    :param keep: how many of the newest checkpoints stay, at least 2, so that a damaged one has a predecessor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 60.0
    every_steps: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=2)] = 3


class Config(BaseModel):
    """All settings of a run.

    :param data: names of shipped data sets or paths of files, each ``a`` or ``a+b``: joined by ``+`` they are traded as one
        portfolio. ``--data`` on the command line comes first.
    :param files: the form of these files, where they do not show it themselves.
    :param strategies: baselines that ``tailguard backtest`` runs, each a name, or ``name:parameter=value,...``. Empty: all.
    :param benchmark: name of a shipped data set or path of a file with one symbol, such as an index, read as ``files`` says. It
        is bought when a test begins and held without costs, and stands beside the baselines of ``train``, ``evaluate``,
        ``walkforward`` and ``backtest``. To be called skilled, an agent has to beat it as well. None has none.
    :param trading: costs, fills, limits and the shape of episodes.
    :param features: what is computed from the bars.
    :param training: how an agent is trained.
    :param selection: how the agent is chosen before it is trained; None trains ``training.policy`` for ``training.steps``.
    :param checkpoints: how often a training is saved.
    :param walkforward: folds and seeds of ``tailguard walkforward``.
    :param population: for ``tailguard population``: what is searched while a population trains; None for all other commands.
    :param hedging: for ``tailguard hedge``: the options, what trading costs, and how hedges are compared.
    :param execution: for ``tailguard execute``: the order, its impact, and how ways to sell it are compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: tuple[str, ...] = ()
    files: FileConfig = Field(default_factory=FileConfig)
    strategies: tuple[str, ...] = ()
    benchmark: Annotated[str, Field(min_length=1)] | None = None
    trading: TradingSettings = Field(default_factory=TradingSettings)
    features: FeatureConfig = Field(default_factory=FeatureConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    selection: SelectionConfig | None = Field(default_factory=SelectionConfig)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    walkforward: WalkforwardConfig = Field(default_factory=WalkforwardConfig)
    population: PopulationConfig | None = None
    hedging: HedgeSettings = Field(default_factory=HedgeSettings)
    execution: ExecutionSettings = Field(default_factory=ExecutionSettings)

    @property
    def selects(self) -> bool:
        """True if an agent is to be selected; a training with a time limit takes its settings as they are."""
        return self.selection is not None and self.training.minutes is None

    @model_validator(mode="after")
    def _searchable(self) -> Self:
        for hyperparam in self.population.hyperparams if self.population is not None else ():
            name, key = hyperparam.name, "population.hyperparams"
            require(name in SEARCHABLE, key, name, f"one of {', '.join(sorted(SEARCHABLE))}")
            has_adversary = self.training.adversary is not None
            require(name not in ADVERSARIAL or has_adversary, key, name, "left out, or training.adversary set: there is none")
            fixed = name == "gamma" and self.training.risk.return_augmented
            require(not fixed, key, name, "left alone where the objective looks at the return of an episode")
        return self


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
    """Return the whole tree as YAML, in the form that :func:`load_config` reads.

    :param config: all settings.
    """
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def changed_settings(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by their keys such as ``training.learning_rate``, with the old and the new value.

    :param before: the old settings.
    :param after: the new ones.
    """
    old, new = (_flat(config.model_dump(mode="json")) for config in (before, after))
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a tree of settings as one mapping from whole keys to values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return flat


def _read(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path)
    except ValueError as error:
        if path.suffix.lower() in (".yaml", ".yml"):
            raise
        raise ValueError(f"{error}; bars are given with --data {path}") from None  # somebody's first command


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # bounded: it may be a device
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    require(len(data) <= LARGEST_FILE, str(path), f"more than {LARGEST_FILE:,} bytes", "a file of settings")
    try:
        values = parse_yaml(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not YAML ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
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
        value = parse_yaml(text)
    except NotYaml:
        raise ValueError(f"--set {override!r}: {text!r} is not a YAML value") from None
    node = values
    for key in path[:-1]:
        if node.get(key) is None:  # a section that is switched off, such as training.vgs, is switched on by its keys
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ValueError(f"--set {override!r}: {key} is not a section")
    node[path[-1]] = value
