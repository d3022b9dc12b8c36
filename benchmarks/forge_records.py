"""Forged records: files of runs, populations, walk-forwards and evaluations with the right checksums and other content.

    python benchmarks/forge_records.py --forged 100

One value of a file is deleted or replaced by one of another type or size, and the file is sealed again. Whoever opens it must
refuse it in one line, or take it as it is, as one that a person could have made; never end with a raw error, or hang. Prints a
table, and every case that was neither. forge.py does the same with checkpoints.
"""

import argparse
import copy
import json
import logging
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forge import SECONDS, at, places

from tailguard.config import load_config
from tailguard.evaluate.assessment import Effort
from tailguard.evaluate.record import CHECKSUMS, METRICS_FILE, RECORD_FOLDER, load_record
from tailguard.experiments.deploy import open_walkforward
from tailguard.experiments.population_run import PopulationRun
from tailguard.experiments.prepared_market import load_market, load_source_of
from tailguard.experiments.run import Run, train
from tailguard.experiments.walkforward import identity_of, walkforward
from tailguard.io.sealed import digest, read_sealed, write_sealed
from tailguard.market import random_walk
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.lineage import read
from tailguard.population.store import FileStore

TINY = [
    *("training.steps=256", "training.n_envs=4", "training.n_steps=16", "training.n_epochs=1", "training.policy=MlpPolicy"),
    *("training.tensorboard=null", "features.drawdown_window=21", "features.slow_window=21", "features.horizons=[1, 5]"),
]
CHOOSING = "selection={blocks: 2, seeds: 1, stops: [1.0]}"
WALKING = ["selection=null", "walkforward={folds: 1, seeds: 1, warmup: 16, jobs: 1}"]
BREEDING = [
    "selection=null",
    "population={population_size: 2, perturbation_interval: 2, intervals: 2, validation_blocks: 2, hyperparams: ["
    "{name: learning_rate, min_value: 1.0e-5, max_value: 1.0e-2, is_log_scale: true}]}",
]
VALUES: list[Any] = [None, "text", "nan", -1, 0, 10**30, 10**400, 1e308, True, [], {}, [[1]], {"a": 1}]
DELETED = object()


def make(folder: Path) -> None:
    """Make a run with a selection, a population, and a walk-forward with its evaluation."""
    random_walk(500, seed=0).to_csv(folder / "bars.csv")
    source = str(folder / "bars.csv")
    config = load_config(None, [*TINY, CHOOSING])
    train(Run.create(folder / "run", config, source, load_market(source, config)), lambda *_: None)
    PopulationRun.create(folder / "population", load_config(None, [*TINY, *BREEDING]), source).train("serial")
    config = load_config(None, [*TINY, *WALKING])
    bars = load_source_of(config, source)
    walkforward(bars, config, config.walkforward, folder / "walkforward", source=source, effort=Effort(50, 9))


def open_run(folder: Path) -> None:
    run = Run.open(folder)
    run.market()
    run.agent()
    run.metrics()


def open_population(folder: Path) -> None:
    run = PopulationRun.open(folder)
    read(run.lineage)
    run._begin_or_resume(SerialEngine(run.scheduler, lambda *_: None, FileStore(folder / "population" / "states")))
    run.standing()


def open_record(folder: Path) -> None:
    load_record(folder / RECORD_FOLDER)


def open_walk(folder: Path) -> None:
    identity_of(folder)
    open_walkforward(folder)


@dataclass(frozen=True)
class Record:
    """A file, and who reads it.

    :param folder: that is opened.
    :param file: in this folder.
    :param opening: opens the folder.
    """

    folder: str
    file: str
    opening: Callable[[Path], None]

    def read(self, folder: Path) -> Any:
        path = folder / self.file
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        return json.loads(path.read_text()) if path.name == METRICS_FILE else read_sealed(path)

    def write(self, folder: Path, tree: Any) -> None:
        """Write the file with checksums that fit."""
        path = folder / self.file
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(line) + "\n" for line in tree))
        elif path.name == METRICS_FILE:
            path.write_text(json.dumps(tree))
            checksums = path.with_name(CHECKSUMS)
            write_sealed(checksums, read_sealed(checksums) | {METRICS_FILE: digest(path.read_bytes())})
        else:
            write_sealed(path, tree)


RECORDS = [
    Record("run", "run.json", open_run),
    Record("run", "selection.json", open_run),
    Record("population", "run.json", open_population),
    Record("population", "population/states/population.json", open_population),
    Record("population", "population/states/history_000000.json", open_population),
    Record("population", "population/lineage.jsonl", open_population),
    Record("walkforward", "walkforward.json", open_walk),
    Record("walkforward", f"{RECORD_FOLDER}/{METRICS_FILE}", open_record),
]


def forged(tree: Any, number: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Yield so many trees, each with one value that is deleted or another, and the name of what was done."""
    every = list(places(tree))
    cases = [(place, value) for place in every for value in (DELETED, *VALUES)]
    for k in rng.permutation(len(cases))[:number]:
        (*above, last), value = cases[k]
        changed = copy.deepcopy(tree)
        parent = at(changed, tuple(above))
        if value is DELETED:
            del parent[last]
        else:
            parent[last] = value
        yield f"{'.'.join(map(str, cases[k][0]))} {'deleted' if value is DELETED else repr(value)[:20]}", changed


def outcome(opening: Callable[[Path], None], folder: Path) -> tuple[str, str]:
    """Return what became of a folder, and the words that were said."""
    began = time.process_time()
    try:
        opening(folder)
    except (ValueError, OSError) as error:
        text = str(error)
        return ("refused" if "\n" not in text else "refused in many lines"), text
    except Exception as error:  # noqa: BLE001 (this is what the script looks for)
        return "raw error", f"{type(error).__name__}: {error}"
    return ("taken" if time.process_time() - began < SECONDS else "slow"), ""


def examine(number: int, seed: int) -> dict[str, Counter[str]]:
    """Forge every record so often; return what happened by file."""
    rng, counts = np.random.default_rng(seed), {}
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, victim = Path(name) / "whole", Path(name) / "victim"
        whole.mkdir()
        make(whole)
        for record in RECORDS:
            found = counts[f"{record.folder}/{record.file}"] = Counter[str]()
            for what, tree in forged(record.read(whole / record.folder), number, rng):
                shutil.rmtree(victim, ignore_errors=True)
                shutil.copytree(whole / record.folder, victim)
                record.write(victim, tree)
                end, words = outcome(record.opening, victim)
                found[end] += 1
                if end not in ("refused", "taken"):
                    print(f"  {record.file}: {what}: {end} {words[:200]}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forged", type=int, default=100, help="of every file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = examine(arguments.forged, arguments.seed)
    print("| file | refused | taken | anything else |\n|---|---|---|---|")
    for file, found in counts.items():
        others = sum(found.values()) - found["refused"] - found["taken"]
        print(f"| `{file}` | {found['refused']} | {found['taken']} | {others} |")
    raise SystemExit(any(set(found) - {"refused", "taken"} for found in counts.values()))


if __name__ == "__main__":
    main()
