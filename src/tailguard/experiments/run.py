"""A run: one folder with everything that a training was told, what it has learnt and how it went.

    RUN/config.yaml           every setting
    RUN/run.json              data and its fingerprint, rows of training and test, scale of the features, versions
    RUN/checkpoints/          the last few models and the best
    RUN/metrics.jsonl         what was measured, a line per update

Nothing else is needed to go on with it, to judge it or to deploy it.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch
from stable_baselines3.common.callbacks import BaseCallback

from tailguard.config import Config, dump_config, load_config
from tailguard.experiments.callbacks import Alarm, Journal, Progress, Report, Saving, stopped_by_signals
from tailguard.experiments.interruption import Interrupted
from tailguard.experiments.training import Market, Split, build_model, prepare_market
from tailguard.io import checkpoint
from tailguard.io.atomic import atomic
from tailguard.io.checkpoint_folder import Checkpoints
from tailguard.market.data import load_source
from tailguard.market.features import FeatureScaler
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.migrations import MIGRATIONS
from tailguard.ppo.persistence import KIND
from tailguard.ppo.rollout import NotFinite

CONFIG, INFO, METRICS, LOCK = "config.yaml", "run.json", "metrics.jsonl", ".lock"


class Run:
    """One such folder.

    :param path: of the folder.
    :param config: every setting.
    :param info: what ``run.json`` holds.
    """

    def __init__(self, path: Path, config: Config, info: dict[str, Any]) -> None:
        self.path, self.config, self.info = path, config, info
        self.checkpoints = Checkpoints(path / "checkpoints", KIND, config.checkpoints.keep, MIGRATIONS)

    @classmethod
    def create(cls, path: str | Path, config: Config, source: str, market: Market) -> Self:
        """Make the folder of a new run.

        :param source: the data, as :func:`tailguard.market.load_source` understands it.
        :raises ValueError: when there is something in that place already.
        """
        path = Path(path)
        if path.exists() and any(path.iterdir()):
            raise ValueError(
                f"{path} is not empty: `tailguard resume {path}` goes on with a run, another --run begins a new one"
            )
        info = {
            "data": _located(source),
            "fingerprint": fingerprint(market.bars),
            "train": list(market.split.train),
            "test": list(market.split.test),
            "features": market.scaler.state_dict(),
            "versions": checkpoint.libraries(),
        }
        with atomic(path / CONFIG) as file:
            file.write(dump_config(config).encode())
        with atomic(path / INFO) as file:  # last: a folder with it is a run
            file.write(json.dumps(info, indent=2).encode())
        return cls(path, config, info)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The run in a folder.

        :raises ValueError: when there is none.
        """
        path = Path(path)
        try:
            info = json.loads((path / INFO).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(f"{path} is not a run: it has no readable {INFO}; `tailguard train` makes one") from None
        return cls(path, load_config(path / CONFIG), info)

    @property
    def split(self) -> Split:
        """The rows of training and test."""
        return Split(tuple(self.info["train"]), tuple(self.info["test"]))

    @property
    def scaler(self) -> FeatureScaler:
        """The scale of the features, as fitted when the run began."""
        return FeatureScaler.from_state_dict(self.info["features"])

    def market(self) -> Market:
        """The market of the run.

        :raises ValueError: when the data has changed since.
        """
        bars = load_source(self.info["data"])
        if fingerprint(bars) != self.info["fingerprint"]:
            raise ValueError(f"{self.info['data']} is not what it was when {self.path} began: restore it, or begin a new run")
        return prepare_market(bars, self.config, self.split)

    def model(self, env: Any = None, force_reset: bool = True) -> DistributionalPPO | None:
        """The newest model that is whole; None before the first was saved.

        :param env: to train on.
        :param force_reset: as in :meth:`DistributionalPPO.load`.
        """
        return self.checkpoints.newest(lambda tree: DistributionalPPO.from_tree(tree, env, "cpu", force_reset))

    def trained_model(self) -> DistributionalPPO:
        """The same where one must exist."""
        model = self.model()
        if model is None:
            raise ValueError(f"{self.path} holds no model yet: `tailguard resume {self.path}` trains it")
        return model

    def metrics(self) -> pd.DataFrame:
        """What was measured, a row per update; empty before the first."""
        path = self.path / METRICS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        # A process that was killed may have left half a line.
        return pd.DataFrame([json.loads(line) for line in lines if line.endswith("\n")])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else trains this run meanwhile; the lock ends with the process, however it ends."""
        with (self.path / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.path} is being trained by another process") from None
            yield


def train(run: Run, report: Report) -> DistributionalPPO:
    """Train the model of a run to its end, from wherever it stands.

    :param report: called with the steps done and a line about them.
    :raises Interrupted: when a signal stopped it; it is saved.
    :raises ValueError: when the disk or the environments fail; the last checkpoint is whole, and can be gone on from.
    """
    torch.set_num_threads(1)  # small networks are slower on more
    steps = run.config.training.steps
    with run.locked():
        market = run.market()
        env = market.training_env(run.config.training.n_envs, run.config.training.seed)
        model = run.model(env, force_reset=False) or build_model(market, run.config.training, env)
        if model.num_timesteps >= steps:
            return model
        saving = Saving(run.checkpoints, run.config.checkpoints)
        callbacks: list[BaseCallback] = [Progress(report), Journal(run.path / METRICS), Alarm(), saving]
        begun = model.num_timesteps
        try:
            with stopped_by_signals(saving):
                model.learn(steps - begun, callback=callbacks, reset_num_timesteps=False, tb_log_name=run.path.name)
        except (OSError, NotFinite) as error:
            safe = max(begun, saving.saved_step)
            raise ValueError(f"{error}; safe up to step {safe:,}, `tailguard resume {run.path}` goes on from there") from error
        if saving.stopped:
            raise Interrupted(f"stopped and saved at step {saving.saved_step:,}; `tailguard resume {run.path}` goes on")
    return model


def fingerprint(bars: pd.DataFrame) -> str:
    """A hash of every time, name and number of a table."""
    digest = hashlib.sha256(repr(list(bars.columns)).encode())
    digest.update(pd.util.hash_pandas_object(bars, index=True).to_numpy().tobytes())
    return digest.hexdigest()


def _located(source: str) -> str:
    """Files by their whole path, so that a run can be resumed from another folder."""
    return "+".join(str(Path(part).resolve()) if Path(part).exists() else part for part in source.split("+"))
