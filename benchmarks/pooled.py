"""A pool of instruments with a weak common edge: one policy for all of them against one policy for each.

    python benchmarks/pooled.py [--instruments 16] [--sharpe 0.4] [--bars 5000] [--draws 3] [--first-draw 0] [--folder pooled]

Each draw writes as many CSVs of the family `ar`, whose edge is the same and whose prices are independent, and gives them to
`tailguard walkforward` (2 folds x 2 seeds, all else default): once together with `training.pooled=true`, and once each. The
portfolio of the separate agents gives every instrument the same share, as the pool does. Finished runs are kept in the folder.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from edges import FEE, FRONT_DOOR, PER_YEAR

from tailguard.evaluate.record import load_record
from tailguard.market.planted import planted_market


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instruments", type=int, default=16)
    parser.add_argument("--sharpe", type=float, default=0.4, help="of the oracle on one instrument, after costs")
    parser.add_argument("--bars", type=int, default=5000)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first-draw", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override of the configuration")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/pooled"))
    options = parser.parse_args()
    print("| draw | pooled: Sharpe | separate: Sharpe | ratio | verdict of the pool | seconds pooled / separate |")
    print("|---|---|---|---|---|---|")
    for draw in range(options.first_draw, options.first_draw + options.draws):
        print(row(options, draw), flush=True)


def row(options, draw):
    folder = options.folder / f"{options.instruments}-{options.sharpe:g}-{options.bars}-{draw}"
    csvs = []
    for number in range(options.instruments):
        csvs.append(folder / f"I{number:02d}.csv")
        if not csvs[-1].exists():
            folder.mkdir(parents=True, exist_ok=True)
            seed = 1000 * draw + number
            planted_market("ar", options.bars, sharpe=options.sharpe, fee=FEE, seed=seed).bars.to_csv(csvs[-1])
    pooled, pooled_seconds = run(options, "+".join(map(str, csvs)), folder / "pooled", ["training.pooled=true"])
    alone = [run(options, str(csv), folder / csv.stem, []) for csv in csvs]
    separate = np.mean([record.agent.returns for record, _ in alone], axis=0)
    ratios = [sharpe(pooled.agent.returns), sharpe(separate)]
    seconds = f"{pooled_seconds:.0f} / {sum(took for _, took in alone):.0f}"
    return (
        f"| {draw} | {ratios[0]:.2f} | {ratios[1]:.2f} | {ratios[0] / ratios[1]:.2f} | {pooled.verdict.outcome} | {seconds} |"
    )


def run(options, source, folder, settings):
    """The record of a walk-forward through the command of the guide, and its seconds; 0 if it was finished before."""
    started = time.time()
    finished = (folder / "evaluation" / "metrics.json").exists()
    if not finished:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        overrides = [part for setting in (*FRONT_DOOR, *settings, *options.settings) for part in ("--set", setting)]
        command = [sys.executable, "-m", "tailguard", "walkforward", "--data", source, "--run", str(folder), *overrides]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return load_record(folder / "evaluation"), 0.0 if finished else time.time() - started


def sharpe(returns):
    return float(returns.mean() / returns.std() * np.sqrt(PER_YEAR))


if __name__ == "__main__":
    main()
