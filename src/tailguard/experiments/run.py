"""A run: one folder with every setting of a training, what it has learnt and how it went.

    RUN/config.yaml           every setting, as a record
    RUN/run.json              data and its fingerprint, rows of training and test, scale of the features, versions, checksum
    RUN/selection.json        what was chosen on held-out blocks of the training bars, if anything was to choose
    RUN/trials/               trainings of a choice that is not made yet
    RUN/checkpoints/          the last few models and the best; or
    RUN/agents/               the members of an ensemble, which `tailguard deploy` makes
    RUN/metrics.jsonl         the metrics, a line per update

Nothing else is needed to resume, evaluate or deploy it.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pandas as pd

from tailguard.config import LARGEST_FILE, Config, changed_settings, dump_config, load_config
from tailguard.evaluate.play import ReportProgress
from tailguard.experiments import Interrupted, stopped_at_once
from tailguard.experiments.callbacks import (
    LogLastingWarnings,
    SaveCheckpoints,
    ShowProgress,
    WriteMetrics,
    metric_lines,
    stopped_by_signals,
)
from tailguard.experiments.engines import SERIAL, Engine
from tailguard.experiments.ensemble import Ensemble, TradingAgent
from tailguard.experiments.prepared_market import (
    Market,
    Split,
    fingerprint,
    load_source_of,
    market_features,
    prepare_market,
)
from tailguard.experiments.selection import Selection, load_selection, save_selection, select
from tailguard.experiments.training import build_model, train_model
from tailguard.experiments.trials import Kept
from tailguard.io import checkpoint
from tailguard.io.atomic import UNFINISHED, atomic, clear_unfinished
from tailguard.io.checkpoint_folder import Checkpoints
from tailguard.io.form import COUNT, MAPPING, NUMBER, TEXT, Maybe, require_form
from tailguard.io.lock import LOCK, locked
from tailguard.io.reading import read_regular, refusing, require_readable
from tailguard.io.sealed import digest, read_sealed, sealed, write_sealed
from tailguard.market.bars import timeframe
from tailguard.market.data import source_parts
from tailguard.market.features import FeatureScaler
from tailguard.parallel.threads import conditions, one_thread, warn_of_differences
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.rollout import NotFinite
from tailguard.ppo.serialization import KIND, MIGRATIONS
from tailguard.validation import build

CONFIG, INFO, SELECTION, TRIALS, METRICS = "config.yaml", "run.json", "selection.json", "trials", "metrics.jsonl"
AGENTS = "agents"  # entry of run.json: by name, the checksums of the agents of an ensemble
# Entries of run.json that say where a run began, and not which run it is.
PLACE = ("data", "versions", "conditions")
# What everything else in a run relies on.
FORM = {
    "data": TEXT,
    "fingerprint": TEXT,
    "train": (COUNT, COUNT),
    "test": (COUNT, COUNT),
    "timeframe_seconds": Maybe(NUMBER),
    "ensemble": Maybe([TEXT]),
    AGENTS: Maybe(MAPPING),
}
# Settings that may change while a run is under way, if that is asked for. Of the training: names of the model's arguments.
MODEL_SETTINGS = (
    *("learning_rate", "n_epochs", "gae_lambda", "clip_range", "max_grad_norm", "vf_coef", "microbatch_size"),
    *("entropy", "kl", "stats_window_size"),
)
CHANGEABLE = (
    *("checkpoints", "walkforward", "strategies", "benchmark", "training.steps", "training.minutes", "training.tensorboard"),
    *(f"trading.{name}" for name in ("fee", "half_spread", "slippage", "cash_rate", "borrow_rate")),
    *(f"training.{name}" for name in MODEL_SETTINGS),
)


class Run:
    """The folder of a run.

    :param path: of the folder.
    :param config: every setting; after a selection, with what was chosen.
    :param info: content of ``run.json``.
    :param market: if it has been prepared already.
    """

    def __init__(self, path: Path, config: Config, info: dict[str, Any], market: Market | None = None) -> None:
        self.path, self.config, self.info = path, config, info
        self._market = market
        self.changed: dict[str, tuple[Any, Any]] = {}  # settings edited since the run began: key to old and new value
        self.selection: Selection | None = None
        if config.selects and (path / SELECTION).exists():
            self._apply(load_selection(path / SELECTION, self.label, unlabelled=True))
        # Runs of earlier versions have no identity, and neither have their checkpoints.
        self.checkpoints = Checkpoints(path / "checkpoints", KIND, config.checkpoints.keep, MIGRATIONS, info.get("run_id"))

    @classmethod
    def create(
        cls, path: str | Path, config: Config, source: str, market: Market, facts: Mapping[str, Any] | None = None
    ) -> Self:
        """Make the folder of a new run.

        :param path: nothing may be there yet.
        :param config: every setting.
        :param source: the data, as :func:`tailguard.market.data.load_source` understands it.
        :param market: prepared from this data.
        :param facts: further entries of ``run.json``.
        :raises ValueError: when the folder is not empty, or when the settings do not fit the data. Nothing is written then.
        """
        path, settings = Path(path), dump_config(config).encode()
        resume = f"`tailguard resume {path}` continues a run, another --run starts a new one"
        require_free(path, resume, {CONFIG: settings})
        build_model(market, config.training)  # settings that do not fit the data are refused while there is no folder yet
        info = {
            "data": _located(source),
            "fingerprint": fingerprint(market.bars),
            "timeframe_seconds": timeframe(pd.DatetimeIndex(market.bars.index)).total_seconds(),
            "train": list(market.split.train),
            "test": list(market.split.test),
            "features": market.scaler.state_dict(),
            "versions": checkpoint.libraries(),
            "conditions": conditions(),
            "config": config.model_dump(mode="json"),
            **(facts or {}),
        }
        # The same settings on the same data are the same run: its checkpoints are equal, bit for bit.
        info["run_id"] = digest(sealed({name: value for name, value in info.items() if name not in PLACE}))
        with locked(path):
            require_free(path, resume, {CONFIG: settings})  # still: another process may have begun one meanwhile
            with atomic(path / CONFIG) as file:
                file.write(settings)
            write_sealed(path / INFO, info)  # last: a folder with it is a run
        return cls(path, config, info, market)

    @classmethod
    def open(cls, path: str | Path, *, allow_config_change: bool = False) -> Self:
        """Open the run in a folder.

        :param allow_config_change: train on with the settings that were changed in ``config.yaml``, see :attr:`changed`.
        :raises ValueError: when there is none, or when one of its files was changed since it was written.
        """
        path = Path(path)
        try:
            info = read_sealed(path / INFO)
        except OSError:
            raise ValueError(f"{path} is not a run: it has no readable {INFO}; `tailguard train` makes one") from None
        config = _recorded_config(path)
        with refusing(path / INFO):
            require_form({name: info.get(name) for name in FORM}, FORM, "")
            FeatureScaler.from_state_dict(info["features"])
            began = build(Config, info["config"]) if "config" in info else config
        run = cls(path, config, info)
        run.changed = changed_settings(began, config)
        run._require_known_changes(allow_config_change)
        return run

    def _require_known_changes(self, allowed: bool) -> None:
        """Raise for settings that were edited though nobody has asked for it, or that cannot change any more."""
        if not self.changed:
            return
        record = f"{self.path / CONFIG} is a record of this run, not an input, and was edited: "
        fixed = [key for key in self.changed if not any(key == known or key.startswith(f"{known}.") for known in CHANGEABLE)]
        fixed += ["training.steps"] if self.selection is not None and "training.steps" in self.changed else []
        if fixed:
            raise ValueError(
                f"{record}{', '.join(fixed)} cannot change in a run that has begun; restore it, or start a new run"
            )
        if not allowed:
            advice = f"restore it, start a new run, or use `tailguard resume {self.path} --allow-config-change`"
            raise ValueError(f"{record}{self.change_text()}; {advice}")

    def change_text(self) -> str:
        """Return what was changed, such as ``training.learning_rate: 0.0003 -> 0.001``."""
        return ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in self.changed.items())

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add facts to ``run.json``."""
        self.info.update(facts)
        write_sealed(self.path / INFO, self.info)

    def accept_changes(self, step: int) -> None:
        """Make settings that were changed part of the record.

        :param step: of the model that is trained on with them.
        """
        if not self.changed:
            return
        # Of the file as it is: a selection has replaced some of the settings of this object.
        config = _recorded_config(self.path)
        history = [*self.info.get("config_changes", []), {"step": step, "settings": list(self.changed)}]
        self.note({"config": config.model_dump(mode="json"), "config_changes": history})
        self.changed = {}

    def _changes_since(self, step: int) -> dict[str, Any]:
        """Return the arguments of the model that were changed after a checkpoint was written."""
        later = [change["settings"] for change in self.info.get("config_changes", []) if change["step"] >= step]
        keys = {key.split(".")[1] for key in [*self.changed, *(key for keys in later for key in keys)] if "training." in key}
        return {name: getattr(self.config.training, name) for name in MODEL_SETTINGS if name in keys}

    def select(self, report: ReportProgress, engine: Engine = SERIAL) -> None:
        """Choose the agent inside the training bars, unless that is done or there is nothing to choose."""
        if self.config.selects:
            market = self.market()
            features = market_features(market.bars, self.config)
            identity = {"settings": self.config.model_dump(mode="json"), "data": self.info["fingerprint"]}
            kept = Kept(self.path / TRIALS, digest(sealed(identity)))
            chosen = select(market.bars, self.config, self.split, features, report, engine=engine, kept=kept)
            save_selection(chosen, self.path / SELECTION, self.label)
            self._apply(chosen)
        shutil.rmtree(self.path / TRIALS, ignore_errors=True)  # of no use once the choice is on the disk

    def _apply(self, selection: Selection) -> None:
        self.selection, self.config = selection, selection.applied(self.config)
        if self._market is not None:
            self._market = replace(self._market, trading=selection.steered(self._market.trading))

    @property
    def label(self) -> dict[str, Any] | None:
        """The label of the files of this run; None for runs of earlier versions, which have no identity."""
        return {"run": self.info["run_id"]} if "run_id" in self.info else None

    @property
    def split(self) -> Split:
        """The rows of training and test."""
        return Split(tuple(self.info["train"]), tuple(self.info["test"]))

    @property
    def scaler(self) -> FeatureScaler:
        """The scale of the features, as fitted when the run began."""
        return FeatureScaler.from_state_dict(self.info["features"])

    @property
    def timeframe(self) -> pd.Timedelta | None:
        """The usual time between the bars; None for runs that did not note it."""
        seconds = self.info.get("timeframe_seconds")
        return None if seconds is None else pd.Timedelta(seconds=seconds)

    def market(self) -> Market:
        """Return the market of the run; the data is read and its features are computed once.

        :raises ValueError: when the data has changed since the run was created.
        """
        if self._market is None:
            bars = load_source_of(self.config, self.info["data"])
            if fingerprint(bars) != self.info["fingerprint"]:
                raise ValueError(
                    f"{self.info['data']} is not what it was when {self.path} was created: restore it, or start a new run"
                )
            self._market = prepare_market(bars, self.config, self.split)
        return self._market

    def model(self) -> DistributionalPPO | None:
        """Return the newest model that is not damaged; None before the first was saved."""
        return self.checkpoints.newest(DistributionalPPO.from_tree)

    def resumed_model(self, env: Any) -> DistributionalPPO | None:
        """Return the newest model in the middle of its training, with the settings that were changed since.

        :param env: environments to train in.
        """

        def resume(tree: dict[str, Any]) -> DistributionalPPO:
            step = tree["run"]["counters"]["num_timesteps"]
            return DistributionalPPO.from_tree(tree, env, "cpu", False, self._changes_since(step))

        return self.checkpoints.newest(resume)

    def note_agents(self) -> None:
        """Add the checksums of the agents of an ensemble to ``run.json``."""
        self.note({AGENTS: {path.name: digest(read_regular(path, checkpoint.largest_file())) for path in self.members}})

    @property
    def members(self) -> list[Path]:
        """The files of the agents of an ensemble; empty for a training."""
        return [self.path / name for name in self.info.get("ensemble", ())]

    def agent(self) -> TradingAgent:
        """Return what trades: the newest model of a training, or the ensemble.

        :raises ValueError: when no model was saved yet, or when it is not known what was chosen for it.
        """
        self._require_selection()
        if not self.members:
            return self.trained_model()
        agents = [DistributionalPPO.load(path) for path in self.members]
        for path in self.members:
            # Runs of earlier versions did not note what they were made of.
            if (self.info.get(AGENTS) or {}).get(path.name, "") not in (
                "",
                digest(read_regular(path, checkpoint.largest_file())),
            ):
                raise ValueError(f"{path} is not the agent that was deployed: restore it, or deploy again")
        return Ensemble(agents, self.config.trading)

    def _require_selection(self) -> None:
        """Raise where the choice is missing that says how far the agent is trusted; a population makes none."""
        began: dict[str, Any] = self.info.get("config", {})  # runs of earlier versions did not note it
        chosen = self.selection is not None or "validation" in self.info or began.get("selection") is None
        if self.config.selects and not chosen:
            remedy = "restore it" if self.members else f"restore it, or let `tailguard resume {self.path}` choose again"
            raise ValueError(f"{self.path / SELECTION} is missing, which says how far the agent is trusted: {remedy}")

    def trained_model(self) -> DistributionalPPO:
        """Return the newest model.

        :raises ValueError: when none was saved yet.
        """
        model = self.model()
        if model is None:
            raise ValueError(f"{self.path} holds no model yet: `tailguard resume {self.path}` trains it")
        return model

    def metrics(self) -> pd.DataFrame:
        """Return the metrics, a row per update; empty before the first."""
        lines = metric_lines(self.path / METRICS)
        with refusing(self.path / METRICS):
            # A process that was killed may have left half a line.
            return pd.DataFrame([json.loads(line) for line in lines if line.endswith(b"\n")])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training this run."""
        with locked(self.path):
            yield


@one_thread()
def train(run: Run, report: ReportProgress, engine: Engine = SERIAL) -> DistributionalPPO:
    """Train the model of a run to its end, from wherever it stands.

    :param run: a new one, or one that was stopped or killed.
    :param report: called with the steps done, the steps in all, and a line.
    :param engine: where the candidates of a selection are trained; the agent itself is trained here.
    :raises Interrupted: when a signal stopped it; it is saved.
    :raises ValueError: when the disk or the environments fail; the last checkpoint can be resumed from.
    """
    if run.members:
        raise ValueError(f"{run.path} is an ensemble of trained agents: there is nothing to train")
    with run.locked():
        clear_unfinished(run.path)
        warn_of_differences(str(run.path), run.info.get("conditions"))
        with stopped_at_once(f"`tailguard resume {run.path}` continues the selection"):
            run.select(report, engine)
        steps = run.config.training.steps
        market = run.market()
        env = market.training_env(run.config.training.n_envs, run.config.training.seed)
        model = run.resumed_model(env) or build_model(market, run.config.training, env)
        run.accept_changes(model.num_timesteps)
        if model.num_timesteps >= steps:
            return model
        saving = SaveCheckpoints(run.checkpoints, run.config.checkpoints)
        callbacks = [ShowProgress(report), WriteMetrics(run.path / METRICS), LogLastingWarnings(), saving]
        first_step, resume = model.num_timesteps, f"`tailguard resume {run.path}` continues from there"
        try:
            with stopped_by_signals(saving):
                train_model(
                    model,
                    steps,
                    callbacks,
                    horizon=None if run.selection is None else run.selection.horizon,
                    log_name=run.path.name,
                    minutes=run.config.training.minutes,
                )
                saving.save()  # a time limit ends a training between two checkpoints
        except (OSError, NotFinite) as error:
            raise ValueError(f"{error}; safe up to step {max(first_step, saving.saved_step):,}, {resume}") from error
        except Interrupted as stopped:
            raise Interrupted(f"{stopped}; {resume}", stopped.number) from None
    return model


def require_free(path: Path, advice: str, left: Mapping[str, bytes] | None = None) -> None:
    """Raise a :class:`ValueError` for a path that is a file or a folder with something in it.

    What a process that was killed while it made the folder has left there does not count.

    :param advice: what to do then.
    :param left: files, with their contents, that such a process had finished.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, but --run must name a folder")
    if path.exists() and not all(_is_left(entry, left or {}) for entry in path.iterdir()):
        raise ValueError(f"{path} is not empty: {advice}")


def _is_left(path: Path, left: Mapping[str, bytes]) -> bool:
    if path.name in left:
        return path.is_file() and path.read_bytes() == left[path.name]
    return path.name == LOCK or path.name.endswith(UNFINISHED)


def _recorded_config(path: Path) -> Config:
    """Return the settings in the folder of a run."""
    require_readable(path / CONFIG, LARGEST_FILE)
    return load_config(path / CONFIG)


def _located(source: str) -> str:
    """Return the source with files by their whole path, so that a run can be resumed from another folder."""
    return "+".join(str(Path(part).resolve()) if Path(part).exists() else part for part in source_parts(source))
