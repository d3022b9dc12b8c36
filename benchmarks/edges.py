"""Planted edges through the front door: how much of what the oracle earns do agents find in a CSV, with default settings?

    python benchmarks/edges.py [--families ar volume ...] [--sharpe 1 2] [--bars 2500 5000] [--draws 5] [--first-draw 0]
                               [--set training.steps=60000 ...] [--folder edges] [--name default] [--rivals ridge ...]

Each case writes a market of `tailguard.market.planted` to a CSV and gives it to `tailguard walkforward` with 2 folds x 2
seeds and, unless --set says otherwise, default settings. Rivals (edge_rivals.py) learn on the same folds with the same
features. The oracle trades the conditional mean with the no-trade threshold that is best in hindsight on the test bars.
Every account is simulated by the same accounting. Finished cases are kept in the folder: a run that was stopped continues
where it was.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from edge_rivals import RIVALS

from tailguard.config import load_config
from tailguard.evaluate.folds import longest_lookback, make_folds
from tailguard.market import build_features, simulate
from tailguard.market.features import FeatureScaler
from tailguard.market.planted import FAMILIES, best_threshold, open_returns, oracle_weights, planted_market

FEE = 0.0005
PER_YEAR = 252.0
FRONT_DOOR = ["walkforward.folds=2", "walkforward.seeds=2", f"trading.fee={FEE}", "training.tensorboard=null"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--sharpe", nargs="+", type=float, default=[1.0, 2.0], help="of the oracle, after costs")
    parser.add_argument("--bars", nargs="+", type=int, default=[5000])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument(
        "--first-draw", type=int, default=0, help="settings are chosen on draws from 100, and reported on those from 0"
    )
    parser.add_argument("--drift", type=float, default=0.0, help="mean log return per year beside the edge")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override of the configuration")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=RIVALS, help="none takes half of the time")
    parser.add_argument("--name", default="default", help="of these settings, in the folder")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/edges"))
    options = parser.parse_args()
    results = []
    # Draws come last, so that a run that was stopped has something to say about every family.
    draws = range(options.first_draw, options.first_draw + options.draws)
    for draw, bars, sharpe, family in product(draws, options.bars, options.sharpe, options.families):
        results.append(case(options, family, sharpe, bars, draw))
        print(line(results[-1]), file=sys.stderr, flush=True)
    print(table(results, options.rivals))


def case(options, family, sharpe, n_bars, draw):
    """One market: agent, oracle and rivals on the same test bars; read from the folder where it is finished."""
    market_name = f"{family}-{sharpe:g}-{n_bars}-{draw}" + (f"-drift{options.drift:g}" if options.drift else "")
    rivals_file = options.folder / "-".join(["rivals", *options.rivals]) / f"{market_name}.json"
    agent_file = options.folder / options.name / f"{market_name}.json"
    if not rivals_file.exists() or not agent_file.exists():
        market = planted_market(family, n_bars, sharpe=sharpe, fee=FEE, drift=options.drift, seed=draw)
        for path, measure in ((rivals_file, measure_rivals), (agent_file, measure_agent)):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(measure(market, path.with_suffix(""), options)), encoding="utf-8")
    key = {"family": family, "sharpe": sharpe, "bars": n_bars, "draw": draw}
    return key | json.loads(rivals_file.read_text()) | json.loads(agent_file.read_text())


def folds_of(market, config):
    features = build_features(market.bars, config.features)
    return features, make_folds(len(market.bars), features.warmup, longest_lookback(config.features), config.walkforward)


def measure_rivals(market, _, options):
    """Net Sharpe ratios of the oracle and of each rival over the test bars, and of the oracle over the training bars."""
    features, folds = folds_of(market, load_config(None, FRONT_DOOR))
    earned = open_returns(market.bars)
    first, last = folds[0].span[0], folds[-1].test[1]
    span = slice(first, last)

    def oracle_sharpe(rows):
        threshold = best_threshold(market.expected[rows], earned[rows], FEE)
        return account(market.bars.iloc[rows], oracle_weights(market.expected[rows], threshold))["sharpe"]

    in_sample = np.mean([oracle_sharpe(slice(features.warmup, fold.train[1])) for fold in folds])
    oracle, found = {"oracle": oracle_sharpe(span), "oracle_in_sample": float(in_sample)}, {}
    for name in options.rivals:
        rival, started, weights = RIVALS[name], time.process_time(), []
        for fold in folds:
            scaler = FeatureScaler(market.bars.index[0], market.bars.index[fold.train[1]]).fit(features[: fold.train[1]])
            rows = (max(fold.train[0], features.warmup), fold.train[1])
            last_row = fold.span[1] - (fold is not folds[-1])  # the last row of a fold is the first decision of the next
            test = (fold.span[0], last_row)
            weights.append(rival(scaler.transform(features).values.astype(np.float64), earned, rows, test, FEE))
        found[name] = account(market.bars.iloc[span], np.concatenate(weights))["sharpe"]
        found[f"{name}_seconds"] = time.process_time() - started
    return oracle | {"rivals": found}


def measure_agent(market, run, options):
    """The command of the guide, from a CSV; figures from what it wrote."""
    csvs = write_csvs(market.bars, run.with_name(f"{run.name}.csv"))
    started = time.time()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    sources = "+".join(map(str, csvs))
    overrides = [part for setting in (*FRONT_DOOR, *options.settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "tailguard", "walkforward", "--data", sources, "--run", str(run), *overrides]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    metrics = json.loads((run / "evaluation" / "metrics.json").read_text(encoding="utf-8"))
    agent = metrics["statistics"]["agent"]
    coverage = (metrics.get("calibration") or {}).get("coverage", {}).get("0.05")
    candidates = pd.read_csv(run / "evaluation" / "selection.csv") if (run / "evaluation" / "selection.csv").exists() else None
    chosen = None if candidates is None else candidates[candidates["chosen"]]
    return {
        "in_sample": None if chosen is None else float(chosen["in_sample_sharpe"].mean()),
        "held_out": None if chosen is None else float(chosen["sharpe"].mean()),
        "active": None if chosen is None else float(chosen["active"].mean()),
        "recurrent": None if chosen is None else float((chosen["policy"] == "MlpLstmPolicy").mean()),
        "agent": agent["sharpe"]["value"],
        "turnover": agent["turnover"]["value"],
        "mix": metrics["statistics"]["own_mix"]["sharpe"]["value"],
        "outcome": metrics["verdict"]["outcome"],
        "below_5_percent": None if coverage is None else coverage["exceptions"] / coverage["bars"],
        "seconds": time.time() - started,
    }


def write_csvs(bars, path):
    """One file per symbol, as users have them."""
    tables = {path: bars}
    if bars.columns.nlevels > 1:
        tables = {path.with_name(f"{path.stem}-{symbol}.csv"): bars[symbol] for symbol in bars.columns.unique(0)}
    for place, table in tables.items():
        table.to_csv(place)
    return list(tables)


def account(bars, weights):
    """Net Sharpe ratio of target weights under the accounting of the environment."""
    result = simulate(bars, weights if weights.shape[1] > 1 else weights[:, 0], fee=FEE)
    returns = np.diff(result.equity) / result.equity[:-1]
    spread = returns.std()
    return {"sharpe": float(returns.mean() / spread * np.sqrt(PER_YEAR)) if spread > 0.0 else 0.0}


def line(result):
    rivals = {name: round(sharpe, 2) for name, sharpe in result["rivals"].items() if not name.endswith("_seconds")}
    return (
        f"{result['family']} {result['sharpe']:g} {result['bars']} draw {result['draw']}: oracle {result['oracle']:.2f}, agent "
        f"{result['agent']:.2f} ({result['outcome']}, steers {result['active']:.0%}), turnover {result['turnover']:.0f}, "
        f"{rivals}, {result['seconds']:.0f} s"
    )


HEADS = (
    "market", "oracle", "agent: in sample", "held out", "out of sample", "share of the oracle [90 % interval]",
    "in sample / oracle", "steered", "turnover", "below the 5 % quantile", "skill claimed", "seconds",
)  # fmt: skip


def table(results, rivals):
    """One row for each market: medians over the draws, with an interval for the share by resampling draws."""
    frame = pd.DataFrame(results)
    frame["share"] = frame["agent"] / frame["oracle"].where(frame["oracle"] > 0.1)
    frame["memorised"] = frame["in_sample"] / frame["oracle_in_sample"].where(frame["oracle_in_sample"] > 0.1)
    for name in rivals:
        frame[name] = [found[name] for found in frame["rivals"]]
    heads = HEADS
    if rivals:
        frame["lead"] = frame["agent"] - frame[rivals].max(axis=1)
        heads = (*HEADS, *rivals, "lead over the best rival")
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for (family, sharpe, bars), part in frame.groupby(["family", "sharpe", "bars"], sort=False):
        rows.append(row(f"{family}, Sharpe {sharpe:g}, {bars:,} bars", part, rivals))
    for bars, part in frame[frame["sharpe"] >= 1.0].groupby("bars"):
        rows.append(row(f"all with Sharpe 1 and more, {bars:,} bars", part, rivals))
    return "\n".join(rows)


def row(name, part, rivals):
    median = part.median(numeric_only=True)
    skill = (part["outcome"] == "evidence of skill").mean()
    low, high = interval(part["share"].dropna().to_numpy())
    cells = [
        name, f"{median['oracle']:.2f}", f"{median['in_sample']:.2f}", f"{median['held_out']:.2f}", f"{median['agent']:.2f}",
        f"{median['share']:.2f} [{low:.2f}, {high:.2f}]", f"{median['memorised']:.2f}",
        f"{part['active'].mean():.0%}", f"{median['turnover']:.0f}", f"{part['below_5_percent'].mean():.1%}", f"{skill:.0%}",
        f"{median['seconds']:.0f}", *(f"{median[rival]:.2f}" for rival in rivals),
        *([f"{median['lead']:+.2f}"] if rivals else []),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def interval(values, draws=2000):
    """Where 90 % of the medians lie when draws are drawn anew."""
    if len(values) == 0:
        return np.nan, np.nan
    chosen = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    return np.quantile(np.median(values[chosen], axis=1), [0.05, 0.95])


if __name__ == "__main__":
    main()
