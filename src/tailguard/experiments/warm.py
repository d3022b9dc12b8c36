"""Compiling everything before it is needed: `tailguard warm`.

numba compiles a function when it is called first and keeps it on disk, for this CPU and this version of the source. A wheel
cannot bring machine code for every CPU, nor run anything when it is installed, so the first training would wait half a minute
and each worker of a first walk-forward would compile the same functions again. Here a few tiny runs of the real thing call what
trainings, backtests and verdicts call, on two cores side by side. A note in numba's folder says that it was done; where no
folder can be written to, there is nothing to do, since nothing could be kept.
"""

import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numba
import numpy as np
import pandas as pd
import torch
from numba.core.registry import cpu_target

import tailguard
from tailguard.config import Config
from tailguard.envs.signal_market import SignalMarket
from tailguard.evaluate.judge import judge
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.io.atomic import atomic
from tailguard.market.synthetic import random_walk
from tailguard.parallel.tasks import ProcessTasks, SerialTasks, run_tasks
from tailguard.parallel.worker import cores
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.compiled import kernels

logger = logging.getLogger(__name__)
NOTE = "warm.json"
BARS, ENVS, STEPS = 600, 4, 8
SCALAR = {"num_quantiles": 1, "twin": False, "target": "lambda_return"}
NOISE_AWARE = {"optimizer": {"name": "adaptive_upgd"}, "vgs": {"enabled": True, "warmup_steps": 0}}
# Networks, critics and optimizers whose passes are compiled one by one.
AGENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("MlpLstmPolicy", {}),
    ("MlpLstmPolicy", {"critic": SCALAR, **NOISE_AWARE}),
    ("MlpPolicy", {"critic": SCALAR}),
)


class Part(NamedTuple):
    """Something to run once, in a process of its own.

    :param name: in messages.
    """

    name: str

    def work(self, _: None, reached: Callable[[float], None]) -> None:
        """Run it; the random numbers of the process stay as they were."""
        with torch.random.fork_rng(devices=[]):
            PARTS[self.name]()


def _train() -> None:
    """Train agents for two updates each."""
    for policy, settings in AGENTS:
        model = DistributionalPPO(policy, SignalMarket(ENVS, seed=0), n_steps=STEPS, batch_size=2 * STEPS, seed=0, **settings)
        model.learn(2 * STEPS * ENVS)


def _judge() -> None:
    """Trade in a market, as a training and as a backtest do, and judge the latter with a report."""
    bars = random_walk(BARS, seed=0)
    env = prepare_market(bars, Config(), default_split(BARS, Config().training)).training_env(ENVS, seed=0)
    env.reset()
    for _ in range(STEPS):
        env.step_arrays(np.zeros((ENVS, 1), np.float32))
    with TemporaryDirectory() as folder:
        weights = pd.Series(np.sign(np.sin(np.arange(BARS))), bars.index)
        judge(weights=weights, bars=bars, ledger=None).write_report(Path(folder) / "report.html")


PARTS = {"markets and verdicts": _judge, "trainings": _train}


def warm_up() -> bool:
    """Compile what most work needs, unless that has been done; return True if anything was run for it.

    :raises ValueError: where it fails, for instance for lack of RAM.
    """
    note, now = _note(), _compiled_for()
    if note is None or (note.exists() and note.read_text(encoding="utf-8") == now):
        return False
    logger.info("compiling for this CPU; this is done once")
    jobs = min(cores(), len(PARTS))
    executor = ProcessTasks(None, jobs) if jobs > 1 else SerialTasks(None)
    run_tasks([Part(name) for name in PARTS], executor, lambda task, result: [], lambda name, share: None)
    with atomic(note) as file:
        file.write(now.encode())
    return True


def _note() -> Path | None:
    """Return the path of the note, beside what numba keeps; None where it keeps nothing."""
    stats = getattr(kernels.lstm_step, "stats", None)
    return Path(stats.cache_path) / NOTE if stats is not None and stats.cache_path is not None else None


def _compiled_for() -> str:
    """Return what compiled code depends on: the source, the versions and the CPU."""
    source = hashlib.sha256()
    folder = Path(tailguard.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        if b"tailguard.jit" in text:  # the only place where decorators come from
            source.update(text)
    cpu = " ".join(map(str, cpu_target.target_context.codegen().magic_tuple()))
    return f"{numba.__version__} {platform.python_version()} {cpu} {source.hexdigest()}\n"
