"""Paper trading under kill -9: `python benchmarks/paper.py --kills 20`.

An agent is trained on shipped bars and trades the bars that it has not seen on paper. One process does it in peace; another
ledger is traded by processes that are killed at random moments (at the start, between a decision and its order, inside a write)
until the bars are used up. Printed: the bars and orders of both, and the largest differences between the two, and between the
ledger and `simulate` over the weights that it holds. All of them must be 0.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from tailguard.config import load_config
from tailguard.experiments.prepared_market import load_market
from tailguard.experiments.run import Run, train
from tailguard.market.accounting import bar_array, simulate_bars
from tailguard.market.rules import TradingRules

SETTINGS = [
    "selection=null",
    "training.policy=MlpLstmPolicy",
    "training.steps=8192",
    "training.tensorboard=null",
    "trading.fee=0.001",
    "trading.slippage=0.0005",
    "trading.cash=10000000",
    "trading.lot=1",
    "trading.stop_loss=0.03",
    "trading.cash_rate=0.02",
]


def trained(folder: Path, data: str, share: float) -> Run:
    config = load_config(None, [*SETTINGS, f"training.test_share={share}"])
    run = Run.create(folder / "run", config, data, load_market(data, config))
    train(run, lambda *_: None)
    return Run.open(run.path)


def start(run: Run, file: Path, ledger: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "tailguard",
        "paper",
        str(run.path),
        "--bars",
        str(file),
        "--ledger",
        str(ledger),
        "--quiet",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {errors}")


def orders(ledger: Path) -> int:
    path = ledger / "ledger.jsonl"
    return path.read_bytes().count(b'{"kind":"order"') if path.exists() else 0


def killed(run: Run, file: Path, ledger: Path, kills: int, expected: int, generator: random.Random) -> list[int]:
    """Kill processes until so many were killed, then let one finish; return the orders in the ledger at each kill."""
    at = []
    while len(at) < kills:
        process = start(run, file, ledger)
        # Some die while they start or replay, the others after a part of the orders that are left.
        needed = orders(ledger) + generator.randrange(max((expected - orders(ledger)) // (kills - len(at)), 1) + 1)
        began, patience = time.monotonic(), 0.1 + 8.0 * generator.random()
        while process.poll() is None and orders(ledger) <= needed and time.monotonic() - began < 10 * patience:
            time.sleep(0.002)
            if orders(ledger) == needed and time.monotonic() - began > patience and generator.random() < 0.01:
                break
        if process.poll() is not None:
            raise SystemExit("a process was done before it could be killed: use more bars")
        time.sleep(0.02 * generator.random())
        process.kill()
        process.communicate()
        at.append(orders(ledger))
    finish(start(run, file, ledger))
    return at


def accounts(ledger: Path) -> pd.DataFrame:
    lines = map(json.loads, (ledger / "ledger.jsonl").read_text().splitlines())
    rows = [line for line in lines if line["kind"] in ("begin", "bar", "order")]
    settled = pd.DataFrame([row for row in rows if row["kind"] != "order"]).set_index("time")
    sent = pd.DataFrame([row for row in rows if row["kind"] == "order"]).set_index("time")
    assert sent["number"].tolist() == list(range(1, len(sent) + 1)), "an order is missing or doubled"
    return settled.join(sent[["number", "weights"]])


def difference(table: pd.DataFrame, cash: np.ndarray, units: np.ndarray) -> float:
    own = np.column_stack([table["cash"], np.array(table["units"].tolist())])
    return float(np.abs(own - np.column_stack([cash, units])).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="nasdaq-1d")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.1, help="of the bars that are traded")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = trained(folder, options.data, options.share)
        bars, file = run.market().bars, folder / "bars.csv"
        bars.to_csv(file)
        finish(start(run, file, folder / "peace"))
        expected = orders(folder / "peace")
        at = killed(run, file, folder / "war", options.kills, expected, random.Random(options.seed))
        peace, war = accounts(folder / "peace"), accounts(folder / "war")
        first = bars.index.get_loc(pd.Timestamp(war.index[0]))
        rules = TradingRules(**run.config.trading.model_dump(include=set(TradingRules.model_fields)))
        weights = np.array(war["weights"].tolist())
        result = simulate_bars(bar_array(bars, rules)[first:], weights, rules)
        print(f"{options.data}, {len(war)} bars on paper, killed {len(at)} times after orders {at}")
        print(f"{'bars':>24} {'orders':>8} {'fills':>8} {'difference to peace':>20} {'to simulate':>12}")
        for label, table in (("in peace", peace), ("killed and resumed", war)):
            fills = sum(map(len, table["fills"]))
            to_peace = difference(table, peace["cash"], np.array(peace["units"].tolist()))
            to_simulate = difference(table, result.cash, result.units)
            print(f"{label:>18} {len(table):>5} {table['number'].max():>8} {fills:>8} {to_peace:>20g} {to_simulate:>12g}")
        if difference(war, result.cash, result.units) or difference(war, peace["cash"], np.array(peace["units"].tolist())):
            raise SystemExit("the ledger of the killed processes is another one")


if __name__ == "__main__":
    main()
