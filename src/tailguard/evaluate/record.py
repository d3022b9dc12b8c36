"""The record of an evaluation: everything that a verdict rests on and a report shows, as classes and as a folder on disk.

The agent of a record is the ensemble of its training seeds: the mean of their target weights, traded as one account over the
out-of-sample folds one after another. No seed has to be chosen by looking at the test, and the ensemble can be traded as it is.
Each seed alone is in the record as well.

The folder holds `metrics.json` for the numbers and CSV files for the series, readable without Tailguard.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tailguard.bounded_yaml import parse_yaml
from tailguard.evaluate.stats.risk_tests import CoverageTest, ShortfallTest, UniformityTest
from tailguard.evaluate.stats.series import Floats, equity_of
from tailguard.evaluate.verdict import Verdict, VerdictRules
from tailguard.io.atomic import atomic, make_folder
from tailguard.io.reading import read_regular, refusing, require_readable
from tailguard.io.sealed import LARGEST, digest, read_sealed, write_sealed
from tailguard.validation import require

RECORD_FOLDER = "evaluation"  # inside the folder of the run
LARGEST_TABLE = 2**30  # bytes: all accounts over a million bars
METRICS_FILE = "metrics.json"
CHECKSUMS = "checksums.json"
FORMAT = 1
# A prediction whose coverage has a p-value below this has failed.
FAILED = 0.05
# JSON has no infinity and no NaN; they are written as these strings.
NOT_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class Estimate(NamedTuple):
    """A statistic with its 95 % interval.

    :param value: of the data; may be infinite (a gain without risk) or NaN (not defined, such as alpha over a flat market).
    :param low: lower end of the interval; None where there is no interval, as for turnover.
    :param high: upper end of the interval, or None.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, eq=False)
class AccountHistory:
    """The history of one account, bar by bar.

    :param name: of the agent, the seed or the baseline.
    :param times: ``[n]`` ends of the bars over which the returns were earned.
    :param returns: ``[n]`` simple, after all costs, each above -1.
    :param weights: ``[n, assets]`` held while the return was earned, as shares of equity; negative is short. Without columns
        where only the returns are known.
    :param turnover: ``[n]`` traded notional as a share of equity.
    :param costs: ``[n]`` fees and slippage as a share of the equity before the bar.
    :param riskless: ``[n]`` returns of idle cash over the same bars.
    """

    name: str
    times: pd.DatetimeIndex
    returns: Floats
    weights: Floats
    turnover: Floats
    costs: Floats
    riskless: Floats

    def __post_init__(self) -> None:
        """Refuse columns of different lengths."""
        n = len(self.times)
        columns = {"returns": self.returns, "turnover": self.turnover, "costs": self.costs, "riskless": self.riskless}
        for label, column in columns.items():
            require(column.shape == (n,), f"the shape of {label}", column.shape, f"{(n,)}, one per time")
        legal = f"({n}, assets), one row per time"
        require(self.weights.ndim == 2 and len(self.weights) == n, "the shape of weights", self.weights.shape, legal)

    @property
    def traded(self) -> bool:
        """True where weights and costs are known, False where only the returns are."""
        return bool(self.weights.shape[1])

    @property
    def excess(self) -> Floats:
        """The returns ``[n]`` in excess of those of idle cash: what every ratio, regression and test is about."""
        return self.returns - self.riskless

    @property
    def equity(self) -> Floats:
        """The equity curve ``[n + 1]``, which starts at 1."""
        return equity_of(self.returns)

    @property
    def total_return(self) -> float:
        """The gain over the whole history, as a share of the start."""
        return float(self.equity[-1]) - 1.0

    @property
    def excess_return(self) -> float:
        """The gain over what idle cash would have earned, as a share of the start."""
        return self.total_return - float(np.prod(1.0 + self.riskless) - 1.0)

    @property
    def total_costs(self) -> float:
        """The fees and slippage paid over the whole history, as a share of the start."""
        return float((self.costs * self.equity[:-1]).sum())


class CostPoint(NamedTuple):
    """The result of the agent's decisions at other costs.

    :param multiple: of fee, spread and slippage; 0 is free, 1 is as tested.
    :param sharpe: annualised.
    :param total_return: over the whole test.
    """

    multiple: float
    sharpe: float
    total_return: float


class Delay(NamedTuple):
    """The result of the agent's decisions, each traded some bars later than decided.

    :param bars: extra bars of delay.
    :param sharpe: annualised, with the delay.
    :param total_return: with the delay.
    :param sharpe_before: annualised, as tested.
    :param total_return_before: as tested.
    """

    bars: int
    sharpe: float
    total_return: float
    sharpe_before: float
    total_return_before: float


class Dispersion(NamedTuple):
    """The dispersion of the training seeds, in annualised Sharpe ratios.

    :param median: of the seeds.
    :param low: lower quartile.
    :param high: upper quartile.
    :param worst: of the seeds.
    :param best: of the seeds.
    :param interquartile_mean: mean of the middle half of all (fold, seed) pairs.
    :param interquartile_low: lower end of its 95 % interval, seeds resampled within folds.
    :param interquartile_high: upper end of that interval.
    """

    median: float
    low: float
    high: float
    worst: float
    best: float
    interquartile_mean: float
    interquartile_low: float
    interquartile_high: float


@dataclass(frozen=True, eq=False)
class Sanity:
    """The sanity checks of the agent's decisions; where only returns are known, there are regimes and nothing else.

    :param cost_curve: at 0 to 5 times the costs.
    :param break_even_cost: cost per unit of traded notional that would have left nothing of the gross gain over cash (0.001 is
        10 basis points); negative if there was no such gain, None if the agent never traded.
    :param delay: one extra bar between decision and trade; None where nothing can be traded again.
    :param regimes: one row per regime: `kind` (year or volatility), `regime`, `bars`, `agent_return`, `agent_sharpe`,
        `market_return`, `market_sharpe`, `agent_max_drawdown`, `exposure`.
    :param dispersion: of the seeds; None with a single one.
    :param permutation_p: share of permutations of the agent's positions, in blocks, that reach its Sharpe ratio; None without
        positions.
    :param permutation_block: bars per block of the permutations; None without positions.
    """

    cost_curve: list[CostPoint]
    break_even_cost: float | None
    delay: Delay | None
    regimes: pd.DataFrame
    dispersion: Dispersion | None
    permutation_p: float | None
    permutation_block: int | None


@dataclass(frozen=True, eq=False)
class Calibration:
    """Predicted return distributions on test bars, compared with the outcomes.

    Of an account: the simple return of each period (:mod:`tailguard.evaluate.tail_calibration`). Of a critic: the discounted
    sum of the rewards after the prediction (:mod:`tailguard.evaluate.critic_calibration`).

    :param horizon: bars that an outcome spans.
    :param levels: ``[N]`` of the predicted quantiles.
    :param times: ``[n]`` when each prediction was made.
    :param outcomes: ``[n]`` that were predicted.
    :param quantiles: ``[n, N]`` predicted for the outcomes.
    :param transforms: ``[n]`` probability integral transforms, uniform if the predictions are right.
    :param realised: ``[N]`` share of the outcomes at or below each predicted quantile; equal to `levels` if calibrated.
    :param coverage: Kupiec's test by tail probability, such as 0.05.
    :param shortfall: Acerbi and Szekely's test by tail probability; left out where the predicted shortfall is no loss.
    :param uniformity: Kolmogorov-Smirnov test of the transforms.
    :param period: that outcomes span, in words, such as ``month``; empty for a critic.
    :param losses: mean pinball loss by forecast and tail; empty for a critic.
    """

    horizon: int
    levels: Floats
    times: pd.DatetimeIndex
    outcomes: Floats
    quantiles: Floats
    transforms: Floats
    realised: Floats
    coverage: dict[float, CoverageTest]
    shortfall: dict[float, ShortfallTest]
    uniformity: UniformityTest
    period: str = ""
    losses: dict[str, dict[float, float]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if no tail failed its test of coverage: what failed is not shown as a prediction."""
        return all(test.exact_p_value >= FAILED for test in self.coverage.values())


@dataclass(frozen=True)
class Provenance:
    """The origin of a record: configuration, data, versions and seeds.

    :param config: the whole configuration as YAML.
    :param fingerprint: of the data, a checksum of its bars.
    :param versions: of Tailguard and its dependencies, by name.
    :param seeds: of the trainings.
    :param trials: agents that could have been chosen by looking at these test bars, discarded ones included.
    :param date: of the evaluation, as YYYY-MM-DD.
    :param ledger: how the trials were counted, as a sentence; empty in records of earlier versions.
    """

    config: str
    fingerprint: str
    versions: Mapping[str, str]
    seeds: tuple[int, ...]
    trials: int
    date: str
    ledger: str = ""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The out-of-sample evaluation of an agent, with the accounts that it is compared with.

    :param title: one line.
    :param source: name of the data set or file.
    :param periods_per_year: bars per year.
    :param prices: closes over the out-of-sample time, one column per asset, one row per bar; no column where only returns are
        known.
    :param agent: the account that the verdict is about: the ensemble of the seeds, the out-of-sample folds chained.
    :param seeds: the account of each training seed alone.
    :param baselines: under the same accounting, over the same bars; see :mod:`tailguard.evaluate.sanity` for
        those that are made from the agent's own positions.
    :param market: name of the baseline that merely holds the market.
    :param statistics: estimates by name of the account and name of the statistic.
    :param verdict: outcome and reasons.
    :param sanity: costs, delay, regimes, seeds, permutation.
    :param calibration: of the tail that is shown, the predicted return of the account over a period; None without predictions.
    :param critic_calibration: of the critic of the first seed, which was trained and not calibrated; None where it has none.
    :param folds: one row per fold: `fold`, `train_first`, `train_last`, `embargo`, `test_first`, `test_last` (rows, the last
        one excluded), `train_from`, `train_to`, `test_from`, `test_to` (times, the last one included).
    :param training: curves with the columns `fold`, `seed`, `step` and one per metric.
    :param warnings: of the trainings, as sentences.
    :param attack: one row per attack and strength: `attack`, `epsilon`, `statistic`, `value`, `low`, `high`; None if none ran.
    :param lineage: entries of a population's lineage.jsonl; None without a population.
    :param selection: one row per fold and candidate that the agent was selected from, inside the training bars: `fold`,
        `policy`, `steps`, `in_sample_sharpe`, `sharpe`, `growth`, `turnover`, `t_statistic`, `chosen`, `active`,
        `forecast_t`, `mix_growth`, `reason`; see :class:`tailguard.experiments.selection.Candidate`. None without a selection.
    :param instruments: one row per instrument of a pool, each traded alone with the whole account: `symbol`, `sharpe`,
        `growth`, `turnover`, `market_sharpe`. None without a pool.
    :param provenance: config, data, versions, seeds, trials, date.
    :param subject: what the report calls the account that was evaluated: an agent, or a strategy.
    :param rules: of the verdict; records of earlier versions have the usual ones.
    :param trades: round trips of the account, see :func:`tailguard.evaluate.trades.round_trips`; None where only returns are
        known, and in records of earlier versions.
    """

    title: str
    source: str
    periods_per_year: float
    prices: pd.DataFrame
    agent: AccountHistory
    seeds: list[AccountHistory]
    baselines: list[AccountHistory]
    market: str
    statistics: dict[str, dict[str, Estimate]]
    verdict: Verdict
    sanity: Sanity
    calibration: Calibration | None
    critic_calibration: Calibration | None
    folds: pd.DataFrame
    training: pd.DataFrame
    provenance: Provenance
    warnings: list[str] = field(default_factory=list)
    attack: pd.DataFrame | None = None
    lineage: list[dict[str, Any]] | None = None
    selection: pd.DataFrame | None = None
    instruments: pd.DataFrame | None = None
    subject: str = "agent"
    rules: VerdictRules = field(default_factory=VerdictRules)
    trades: pd.DataFrame | None = None

    def __post_init__(self) -> None:
        """Refuse accounts over other bars than the agent's, and names that occur twice."""
        names = [history.name for history in self.histories]
        repeated = sorted({name for name in names if names.count(name) > 1})
        require(not repeated, "the names of the accounts", repeated, "all different")
        require(self.market in [history.name for history in self.baselines], "market", self.market, "the name of a baseline")
        for history in self.histories:
            same = history.times.equals(self.agent.times)
            require(same, f"the times of {history.name}", len(history.times), f"those of the agent, {len(self.agent.times)}")
        require(len(self.prices) == len(self.agent.times), "the rows of prices", len(self.prices), "one per time")
        require(0.0 < self.periods_per_year < math.inf, "periods_per_year", self.periods_per_year, "finite and positive")

    @property
    def histories(self) -> list[AccountHistory]:
        """All accounts: the agent, its seeds and the baselines."""
        return [self.agent, *self.seeds, *self.baselines]

    def history(self, name: str) -> AccountHistory:
        """Return an account by its name."""
        histories = {history.name: history for history in self.histories}
        require(name in histories, "the account", name, f"one of {', '.join(histories)}")
        return histories[name]


def source_name(source: str) -> str:
    """Return the name of the data, with absolute paths of files cut to their names."""
    parts = source.split("+")
    return "+".join(re.split(r"[/\\]", part)[-1] if re.match(r"/|~|[A-Za-z]:[/\\]", part) else part for part in parts)


def without_folders(evaluation: Evaluation) -> Evaluation:
    """Return a record whose data are named without the folders of their files: it may be shown to others."""
    config = evaluation.provenance.config
    for part in evaluation.source.split("+"):
        config = config.replace(part, source_name(part)) if part else config
    provenance = replace(evaluation.provenance, config=config)
    return replace(evaluation, source=source_name(evaluation.source), provenance=provenance)


def save_record(evaluation: Evaluation, folder: Path) -> Path:
    """Write a record.

    :param evaluation: the record.
    :param folder: created if it does not exist; files of an older record in it are replaced.
    :return: the folder. `metrics.json` is written last: a folder that has it is complete.
    """
    make_folder(folder)
    # The old metrics go first: a folder that has them is complete.
    tables = ("attack.csv", "selection.csv", "instruments.csv", "trades.csv")
    for name in (METRICS_FILE, CHECKSUMS, "calibration.csv", "critic_calibration.csv", *tables, "lineage.jsonl"):
        (folder / name).unlink(missing_ok=True)
    _write_table(folder / "tracks.csv", _histories_table(evaluation))
    _write_table(folder / "prices.csv", evaluation.prices.rename_axis("time").reset_index())
    _write_table(folder / "folds.csv", evaluation.folds)
    _write_table(folder / "training.csv", evaluation.training)
    _write_table(folder / "regimes.csv", evaluation.sanity.regimes)
    for calibration, name in ((evaluation.calibration, "calibration"), (evaluation.critic_calibration, "critic_calibration")):
        if calibration is not None:
            _write_table(folder / f"{name}.csv", _calibration_table(calibration))
    if evaluation.attack is not None:
        _write_table(folder / "attack.csv", evaluation.attack)
    if evaluation.selection is not None:
        _write_table(folder / "selection.csv", evaluation.selection)
    if evaluation.instruments is not None:
        _write_table(folder / "instruments.csv", evaluation.instruments)
    if evaluation.trades is not None:
        _write_table(folder / "trades.csv", evaluation.trades)
    if evaluation.lineage is not None:
        with atomic(folder / "lineage.jsonl") as file:
            file.write("".join(json.dumps(entry) + "\n" for entry in evaluation.lineage).encode())
    metrics = metrics_text(evaluation).encode()
    others = {path.name: digest(path.read_bytes()) for path in sorted(folder.iterdir()) if path.suffix in (".csv", ".jsonl")}
    write_sealed(folder / CHECKSUMS, {**others, METRICS_FILE: digest(metrics)})
    with atomic(folder / METRICS_FILE) as file:
        file.write(metrics)
    return folder


def _largest(path: Path) -> int:
    """Return the most bytes that a file of a record may have."""
    return LARGEST if path.suffix == ".json" else LARGEST_TABLE


def _require_unchanged(folder: Path) -> None:
    """Raise a :class:`ValueError` if a file of a record is not as it was written; earlier versions wrote no checksums."""
    if not (folder / CHECKSUMS).exists():
        return
    for name, expected in read_sealed(folder / CHECKSUMS).items():
        require(Path(name).name == name, f"a name in {folder / CHECKSUMS}", name, "the name of a file beside it")
        path = folder / name
        if not path.is_file() or digest(read_regular(path, _largest(path))) != expected:
            raise ValueError(f"{path} was changed since Tailguard wrote it; it is a record, not an input: evaluate again")


def load_record(folder: Path) -> Evaluation:
    """Read a record that :func:`save_record` wrote, in this or an earlier version.

    :raises ValueError: if the folder holds no record, or one of an unknown format.
    """
    if not (folder / METRICS_FILE).exists():
        advice = "`tailguard evaluate`, `walkforward` and `judge` write it"
        raise ValueError(f"{folder} holds no evaluation: there is no {METRICS_FILE}; {advice}")
    for path in folder.iterdir():
        if path.suffix in (".csv", ".json", ".jsonl"):
            require_readable(path, _largest(path))
    _require_unchanged(folder)
    with refusing(folder):
        return _load_record(folder)


def _load_record(folder: Path) -> Evaluation:
    numbers = _numbered(json.loads((folder / METRICS_FILE).read_text(encoding="utf-8")))
    if numbers.get("format") != FORMAT:
        raise ValueError(f"{folder / METRICS_FILE} has format {numbers.get('format')!r}; this version reads {FORMAT}")
    parse_yaml(numbers["provenance"]["config"])  # whoever shows it takes it for the settings that it was
    histories = _read_histories(folder / "tracks.csv")
    prices = _read_table(folder / "prices.csv", times=("time",)).set_index("time").rename_axis(None)
    names = ("attack.csv", "selection.csv", "instruments.csv", "trades.csv", "lineage.jsonl")
    attack, selection, instruments, trades, lineage = (folder / name for name in names)
    return Evaluation(
        title=numbers["title"],
        source=numbers["source"],
        periods_per_year=numbers["periods_per_year"],
        prices=prices,
        agent=histories["agent"][0],
        seeds=histories.get("seed", []),
        baselines=histories.get("baseline", []),
        market=numbers["market"],
        statistics={
            name: {key: Estimate(*value.values()) for key, value in figures.items()}
            for name, figures in numbers["statistics"].items()
        },
        verdict=_read_verdict(numbers["verdict"]),
        sanity=_read_sanity(numbers["sanity"], _read_table(folder / "regimes.csv")),
        calibration=_read_calibration(folder / "calibration.csv", numbers["calibration"]),
        critic_calibration=_read_calibration(folder / "critic_calibration.csv", numbers.get("critic_calibration")),
        folds=_read_table(folder / "folds.csv", times=("train_from", "train_to", "test_from", "test_to")),
        training=_read_table(folder / "training.csv"),
        provenance=Provenance(**numbers["provenance"] | {"seeds": tuple(numbers["provenance"]["seeds"])}),
        warnings=numbers["warnings"],
        attack=_read_table(attack) if attack.exists() else None,
        selection=_read_table(selection) if selection.exists() else None,
        instruments=_read_table(instruments) if instruments.exists() else None,
        lineage=[json.loads(line) for line in lineage.read_text("utf-8").splitlines()] if lineage.exists() else None,
        subject=numbers.get("subject", "agent"),
        rules=VerdictRules(**numbers.get("rules", {})),
        trades=_read_table(trades, times=("entry", "exit")) if trades.exists() else None,
    )


def metrics_text(evaluation: Evaluation) -> str:
    """Return the text of `metrics.json`: everything that is not a series, and no folder of whoever evaluated."""
    return json.dumps(_named(_numbers(without_folders(evaluation))), indent=2, allow_nan=False) + "\n"


def _numbers(evaluation: Evaluation) -> dict[str, Any]:
    """Return everything that is not a series as plain values."""
    sanity = evaluation.sanity
    return {
        "format": FORMAT,
        "title": evaluation.title,
        "source": evaluation.source,
        "subject": evaluation.subject,
        "periods_per_year": evaluation.periods_per_year,
        "bars": len(evaluation.agent.times),
        "market": evaluation.market,
        "verdict": asdict(evaluation.verdict),
        "rules": evaluation.rules.model_dump(),
        "statistics": {
            name: {key: figure._asdict() for key, figure in figures.items()} for name, figures in evaluation.statistics.items()
        },
        "sanity": {
            "cost_curve": [point._asdict() for point in sanity.cost_curve],
            "break_even_cost": sanity.break_even_cost,
            "delay": None if sanity.delay is None else sanity.delay._asdict(),
            "dispersion": None if sanity.dispersion is None else sanity.dispersion._asdict(),
            "permutation_p": sanity.permutation_p,
            "permutation_block": sanity.permutation_block,
        },
        "calibration": _calibration_numbers(evaluation.calibration),
        "critic_calibration": _calibration_numbers(evaluation.critic_calibration),
        "warnings": evaluation.warnings,
        "provenance": asdict(evaluation.provenance),
    }


def _histories_table(evaluation: Evaluation) -> pd.DataFrame:
    kinds = ["agent"] + ["seed"] * len(evaluation.seeds) + ["baseline"] * len(evaluation.baselines)
    assets = [str(column) for column in evaluation.prices.columns]
    tables = []
    for kind, history in zip(kinds, evaluation.histories, strict=True):
        earned = {"return": history.returns, "riskless": history.riskless}
        paid = {"turnover": history.turnover, "costs": history.costs}
        held = history.weights if history.traded else np.full((len(history.times), len(assets)), np.nan)
        weights = {f"weight {asset}": held[:, i] for i, asset in enumerate(assets)}
        tables.append(pd.DataFrame({"kind": kind, "track": history.name, "time": history.times, **earned, **paid, **weights}))
    return pd.concat(tables, ignore_index=True)


def _read_histories(path: Path) -> dict[str, list[AccountHistory]]:
    table = _read_table(path, times=("time",))
    histories: dict[str, list[AccountHistory]] = {}
    for (kind, name), rows in table.groupby(["kind", "track"], sort=False):
        weights = rows[[column for column in rows.columns if column.startswith("weight ")]].dropna(axis="columns", how="all")
        history = AccountHistory(
            name=str(name),
            times=pd.DatetimeIndex(rows["time"], name=None),
            returns=rows["return"].to_numpy(dtype=np.float64),
            weights=weights.to_numpy(dtype=np.float64),
            turnover=rows["turnover"].to_numpy(dtype=np.float64),
            costs=rows["costs"].to_numpy(dtype=np.float64),
            # Records of earlier versions have no such column: their ratios were of raw returns.
            riskless=rows["riskless"].to_numpy(dtype=np.float64) if "riskless" in rows else np.zeros(len(rows)),
        )
        histories.setdefault(str(kind), []).append(history)
    return histories


def _calibration_table(calibration: Calibration) -> pd.DataFrame:
    columns = {"outcome": calibration.outcomes, "transform": calibration.transforms}
    predicted = {f"q{i}": calibration.quantiles[:, i] for i in range(len(calibration.levels))}
    return pd.DataFrame({"time": calibration.times, **columns, **predicted})


def _calibration_numbers(calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    return {
        "period": calibration.period,
        "holds": calibration.holds,
        "horizon": calibration.horizon,
        "levels": calibration.levels.tolist(),
        "realised": calibration.realised.tolist(),
        "coverage": {str(tail): asdict(test) for tail, test in calibration.coverage.items()},
        "shortfall": {str(tail): asdict(test) for tail, test in calibration.shortfall.items()},
        "uniformity": asdict(calibration.uniformity),
        "losses": {name: {str(tail): loss for tail, loss in losses.items()} for name, losses in calibration.losses.items()},
    }


def _read_calibration(path: Path, numbers: dict[str, Any] | None) -> Calibration | None:
    if numbers is None:
        return None
    table = _read_table(path, times=("time",))
    predicted = table[[f"q{i}" for i in range(len(numbers["levels"]))]]
    return Calibration(
        horizon=numbers["horizon"],
        levels=np.array(numbers["levels"], dtype=np.float64),
        times=pd.DatetimeIndex(table["time"], name=None),
        outcomes=table["outcome"].to_numpy(dtype=np.float64),
        quantiles=predicted.to_numpy(dtype=np.float64),
        transforms=table["transform"].to_numpy(dtype=np.float64),
        realised=np.array(numbers["realised"], dtype=np.float64),
        coverage={float(tail): CoverageTest(**test) for tail, test in numbers["coverage"].items()},
        shortfall={float(tail): ShortfallTest(**test) for tail, test in numbers["shortfall"].items()},
        uniformity=UniformityTest(**numbers["uniformity"]),
        period=numbers.get("period", ""),
        losses={
            name: {float(tail): loss for tail, loss in losses.items()} for name, losses in numbers.get("losses", {}).items()
        },
    )


def _read_verdict(values: dict[str, Any]) -> Verdict:
    return Verdict(**values | {"reasons": tuple(values["reasons"]), "worse_than": tuple(values["worse_than"])})


def _read_sanity(values: dict[str, Any], regimes: pd.DataFrame) -> Sanity:
    return Sanity(
        cost_curve=[CostPoint(**point) for point in values["cost_curve"]],
        break_even_cost=values["break_even_cost"],
        delay=None if values["delay"] is None else Delay(**values["delay"]),
        regimes=regimes,
        dispersion=None if values["dispersion"] is None else Dispersion(**values["dispersion"]),
        permutation_p=values["permutation_p"],
        permutation_block=values["permutation_block"],
    )


def _write_table(path: Path, table: pd.DataFrame) -> None:
    with atomic(path) as file:
        file.write(table.to_csv(index=False).encode())


def _read_table(path: Path, times: tuple[str, ...] = ()) -> pd.DataFrame:
    table = pd.read_csv(path, encoding="utf-8", dtype={"regime": str, "symbol": str})
    for column in times:
        table[column] = pd.to_datetime(table[column], format="ISO8601")
    return table


def _named(value: Any) -> Any:
    """Replace infinities and NaN by strings, for JSON."""
    if isinstance(value, dict):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_named(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0.0 else "-Infinity")
    return value


def _numbered(value: Any) -> Any:
    """Undo :func:`_named`."""
    if isinstance(value, dict):
        return {key: _numbered(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbered(entry) for entry in value]
    return NOT_NUMBERS.get(value, value) if isinstance(value, str) else value
