"""A record as a folder: `metrics.json` for the numbers, CSV files for the series, readable without Tailguard."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tailguard.evaluate.record import (
    AccountHistory,
    Calibration,
    CostPoint,
    Delay,
    Dispersion,
    Evaluation,
    Figure,
    Provenance,
    Sanity,
)
from tailguard.evaluate.stats.risk_tests import CoverageTest, ShortfallTest, UniformityTest
from tailguard.evaluate.verdict import Verdict

# The folder of a record inside that of its run.
RECORD = "evaluation"
METRICS = "metrics.json"
FORMAT = 1
# JSON has no words for these; anything else than a name would be read as something else.
NOT_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def save(evaluation: Evaluation, folder: Path) -> Path:
    """Write a record.

    :param evaluation: the record.
    :param folder: made if it is not there; files of an older record in it are replaced.
    :return: the folder. `metrics.json` is written last, so that a folder that has it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("calibration.csv", "attack.csv", "lineage.jsonl"):
        (folder / name).unlink(missing_ok=True)
    _write(folder / "tracks.csv", _tracks_table(evaluation))
    _write(folder / "prices.csv", evaluation.prices.rename_axis("time").reset_index())
    _write(folder / "folds.csv", evaluation.folds)
    _write(folder / "training.csv", evaluation.training)
    _write(folder / "regimes.csv", evaluation.sanity.regimes)
    if evaluation.calibration is not None:
        _write(folder / "calibration.csv", _calibration_table(evaluation.calibration))
    if evaluation.attack is not None:
        _write(folder / "attack.csv", evaluation.attack)
    if evaluation.lineage is not None:
        lines = "".join(json.dumps(entry) + "\n" for entry in evaluation.lineage)
        (folder / "lineage.jsonl").write_text(lines, encoding="utf-8")
    unfinished = folder / f"{METRICS}.tmp"
    unfinished.write_text(metrics_text(evaluation), encoding="utf-8")
    os.replace(unfinished, folder / METRICS)
    return folder


def load(folder: Path) -> Evaluation:
    """Read a record that :func:`save` wrote.

    :raises ValueError: if the folder holds none, or one of another format.
    """
    if not (folder / METRICS).exists():
        raise ValueError(f"{folder} holds no evaluation: there is no {METRICS}")
    numbers = _numbered(json.loads((folder / METRICS).read_text(encoding="utf-8")))
    if numbers.get("format") != FORMAT:
        raise ValueError(f"{folder / METRICS} has format {numbers.get('format')!r}; this version reads {FORMAT}")
    tracks = _read_tracks(folder / "tracks.csv")
    prices = _read(folder / "prices.csv", times=("time",)).set_index("time").rename_axis(None)
    attack, lineage = folder / "attack.csv", folder / "lineage.jsonl"
    return Evaluation(
        title=numbers["title"],
        source=numbers["source"],
        periods_per_year=numbers["periods_per_year"],
        prices=prices,
        agent=tracks["agent"][0],
        seeds=tracks.get("seed", []),
        baselines=tracks.get("baseline", []),
        market=numbers["market"],
        statistics={
            name: {key: Figure(*value.values()) for key, value in figures.items()}
            for name, figures in numbers["statistics"].items()
        },
        verdict=_read_verdict(numbers["verdict"]),
        sanity=_read_sanity(numbers["sanity"], _read(folder / "regimes.csv")),
        calibration=_read_calibration(folder / "calibration.csv", numbers["calibration"]),
        folds=_read(folder / "folds.csv", times=("train_from", "train_to", "test_from", "test_to")),
        training=_read(folder / "training.csv"),
        provenance=Provenance(**numbers["provenance"] | {"seeds": tuple(numbers["provenance"]["seeds"])}),
        warnings=numbers["warnings"],
        attack=_read(attack) if attack.exists() else None,
        lineage=[json.loads(line) for line in lineage.read_text("utf-8").splitlines()] if lineage.exists() else None,
    )


def metrics_text(evaluation: Evaluation) -> str:
    """What `metrics.json` holds: everything that is not a series."""
    return json.dumps(_named(_numbers(evaluation)), indent=2, allow_nan=False) + "\n"


def _numbers(evaluation: Evaluation) -> dict[str, Any]:
    """Everything that is not a series, as plain values."""
    sanity, calibration = evaluation.sanity, evaluation.calibration
    return {
        "format": FORMAT,
        "title": evaluation.title,
        "source": evaluation.source,
        "periods_per_year": evaluation.periods_per_year,
        "bars": len(evaluation.agent.times),
        "market": evaluation.market,
        "verdict": asdict(evaluation.verdict),
        "statistics": {
            name: {key: figure._asdict() for key, figure in figures.items()} for name, figures in evaluation.statistics.items()
        },
        "sanity": {
            "cost_curve": [point._asdict() for point in sanity.cost_curve],
            "break_even_cost": sanity.break_even_cost,
            "delay": sanity.delay._asdict(),
            "dispersion": None if sanity.dispersion is None else sanity.dispersion._asdict(),
            "permutation_p": sanity.permutation_p,
            "permutation_block": sanity.permutation_block,
        },
        "calibration": None if calibration is None else _calibration_numbers(calibration),
        "warnings": evaluation.warnings,
        "provenance": asdict(evaluation.provenance),
    }


def _tracks_table(evaluation: Evaluation) -> pd.DataFrame:
    kinds = ["agent"] + ["seed"] * len(evaluation.seeds) + ["baseline"] * len(evaluation.baselines)
    assets = [str(column) for column in evaluation.prices.columns]
    tables = []
    for kind, track in zip(kinds, evaluation.tracks, strict=True):
        columns = {"return": track.returns, "turnover": track.turnover, "costs": track.costs}
        weights = {f"weight {asset}": track.weights[:, i] for i, asset in enumerate(assets)}
        tables.append(pd.DataFrame({"kind": kind, "track": track.name, "time": track.times, **columns, **weights}))
    return pd.concat(tables, ignore_index=True)


def _read_tracks(path: Path) -> dict[str, list[AccountHistory]]:
    table = _read(path, times=("time",))
    found: dict[str, list[AccountHistory]] = {}
    for (kind, name), rows in table.groupby(["kind", "track"], sort=False):
        weights = rows[[column for column in rows.columns if column.startswith("weight ")]]
        track = AccountHistory(
            name=str(name),
            times=pd.DatetimeIndex(rows["time"], name=None),
            returns=rows["return"].to_numpy(dtype=np.float64),
            weights=weights.to_numpy(dtype=np.float64),
            turnover=rows["turnover"].to_numpy(dtype=np.float64),
            costs=rows["costs"].to_numpy(dtype=np.float64),
        )
        found.setdefault(str(kind), []).append(track)
    return found


def _calibration_table(calibration: Calibration) -> pd.DataFrame:
    columns = {"outcome": calibration.outcomes, "transform": calibration.transforms}
    laws = {f"q{i}": calibration.quantiles[:, i] for i in range(len(calibration.levels))}
    return pd.DataFrame({"time": calibration.times, **columns, **laws})


def _calibration_numbers(calibration: Calibration) -> dict[str, Any]:
    return {
        "horizon": calibration.horizon,
        "levels": calibration.levels.tolist(),
        "realised": calibration.realised.tolist(),
        "coverage": {str(tail): asdict(test) for tail, test in calibration.coverage.items()},
        "shortfall": {str(tail): asdict(test) for tail, test in calibration.shortfall.items()},
        "uniformity": asdict(calibration.uniformity),
    }


def _read_calibration(path: Path, numbers: dict[str, Any] | None) -> Calibration | None:
    if numbers is None:
        return None
    table = _read(path, times=("time",))
    laws = table[[f"q{i}" for i in range(len(numbers["levels"]))]]
    return Calibration(
        horizon=numbers["horizon"],
        levels=np.array(numbers["levels"], dtype=np.float64),
        times=pd.DatetimeIndex(table["time"], name=None),
        outcomes=table["outcome"].to_numpy(dtype=np.float64),
        quantiles=laws.to_numpy(dtype=np.float64),
        transforms=table["transform"].to_numpy(dtype=np.float64),
        realised=np.array(numbers["realised"], dtype=np.float64),
        coverage={float(tail): CoverageTest(**test) for tail, test in numbers["coverage"].items()},
        shortfall={float(tail): ShortfallTest(**test) for tail, test in numbers["shortfall"].items()},
        uniformity=UniformityTest(**numbers["uniformity"]),
    )


def _read_verdict(values: dict[str, Any]) -> Verdict:
    return Verdict(**values | {"reasons": tuple(values["reasons"]), "worse_than": tuple(values["worse_than"])})


def _read_sanity(values: dict[str, Any], regimes: pd.DataFrame) -> Sanity:
    return Sanity(
        cost_curve=[CostPoint(**point) for point in values["cost_curve"]],
        break_even_cost=values["break_even_cost"],
        delay=Delay(**values["delay"]),
        regimes=regimes,
        dispersion=None if values["dispersion"] is None else Dispersion(**values["dispersion"]),
        permutation_p=values["permutation_p"],
        permutation_block=values["permutation_block"],
    )


def _write(path: Path, table: pd.DataFrame) -> None:
    table.to_csv(path, index=False, encoding="utf-8")


def _read(path: Path, times: tuple[str, ...] = ()) -> pd.DataFrame:
    table = pd.read_csv(path, encoding="utf-8", dtype={"regime": str})
    for column in times:
        table[column] = pd.to_datetime(table[column], format="ISO8601")
    return table


def _named(value: Any) -> Any:
    """With the names of infinities and NaN in the place of the numbers."""
    if isinstance(value, dict):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_named(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0.0 else "-Infinity")
    return value


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbered(entry) for entry in value]
    return NOT_NUMBERS.get(value, value) if isinstance(value, str) else value
