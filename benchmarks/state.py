"""The cost of saving, and a training that is killed again and again, compared with the uninterrupted one: `make bench-state`.

A table of pause (median and longest of 20 saves), load time and file size; then 20 kills by SIGKILL at random moments, each
followed by `tailguard resume`, and a comparison of the last checkpoint and of all figures with those of a run left alone.
"""

import argparse
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from tailguard import DistributionalPPO
from tailguard.config import load_config
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.training import build_model
from tailguard.market import load_dataset

DATA = "nasdaq-1d"
SIZES = {
    "default": [],
    "LSTM 256, 64 accounts": ["training.lstm_hidden_size=256", "training.n_envs=64"],
}
EVERYTHING = [
    "training.risk={objective: cvar, alpha: 0.2}",
    "training.vgs={}",
    "training.optimizer={name: adaptive_upgd, sigma: 0.01}",
    "training.adversary={epsilon: 0.05, steps: 2}",
]
KILLED = {"MLP": ["training.policy=MlpPolicy"], "LSTM with everything on": EVERYTHING}


def market_of(settings):
    config, bars = load_config(None, ["training.tensorboard=null", *settings]), load_dataset(DATA)
    return config, prepare_market(bars, config, default_split(len(bars), config.training))


def costs(folder: Path) -> None:
    print(f"{'model':<24}{'pause':>10}{'longest':>10}{'load':>10}{'size':>10}")
    for name, settings in SIZES.items():
        config, market = market_of(settings)
        model = build_model(market, config.training).learn(3 * config.training.n_steps * config.training.n_envs)
        pauses, loads = [], []
        for _ in range(20):
            start = time.perf_counter()
            model.save(folder / "model")
            pauses.append(time.perf_counter() - start)
            start = time.perf_counter()
            DistributionalPPO.load(folder / "model")
            loads.append(time.perf_counter() - start)
        size = (folder / "model.safetensors").stat().st_size
        print(f"{name:<24}{median(pauses):>8.3f} s{max(pauses):>8.3f} s{median(loads):>8.3f} s{size / 2**20:>6.2f} MiB")


def kills(folder: Path, times: int) -> None:
    rng = np.random.default_rng(0)
    for name, settings in KILLED.items():
        steps = 400 * 4 * 32
        tiny = [f"training.steps={steps}", "training.n_envs=4", "training.n_steps=32", "checkpoints.every_seconds=0.2"]
        config, market = market_of([*tiny, *settings])
        runs = [Run.create(folder / f"{name} {which}", config, DATA, market) for which in ("whole", "killed")]
        start = time.perf_counter()
        train(runs[0], lambda done, total, text: None)
        seconds, killed = time.perf_counter() - start, 0
        while killed < times:
            command = [sys.executable, "-m", "tailguard", "resume", str(runs[1].path), "--quiet"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(rng.uniform(2.0, 5.0 + 1.5 * seconds / times))  # importing takes the first seconds
            if process.poll() is not None:  # it has come to its end
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        train(runs[1], lambda done, total, text: None)
        same = [
            runs[0].checkpoints.paths()[-1].read_bytes() == runs[1].checkpoints.paths()[-1].read_bytes(),
            (runs[0].path / "metrics.jsonl").read_text() == (runs[1].path / "metrics.jsonl").read_text(),
        ]
        print(f"{name}: killed {killed} times; last checkpoint identical: {same[0]}; all figures identical: {same[1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, data {DATA}, seed 0")
    with tempfile.TemporaryDirectory() as name:
        costs(Path(name))
        kills(Path(name), arguments.kills)
