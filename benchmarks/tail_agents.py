"""Agents that are averse to the tail of their months, against one that is not: `python benchmarks/tail_agents.py`.

The market pays a premium for holding, and crashes. Phases of calm and of danger follow each other; in danger volatility is more
than twice as large, and from its ninth day on the market loses 8 % in a day with probability 5 %. Danger pays for that on
average, so the mean gives no reason to leave. Volatility comes first, so the danger can be seen. Nothing else is known: every
agent gets a CSV of bars, and the defaults of `tailguard walkforward`.

Accounts are compared at equal mean exposure: weights times a constant, so that their mean absolute weight is that of the
neutral agent. Returns over 21 bars, every window; worst 1 % and 5 % of them, as a share of the neutral agent's. Runs that
exist already in the folder are not made again. Settings were chosen on markets 10 to 12.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from tailguard.evaluate.record import load_record

PERIOD = 21
TAIL = f"alpha: 0.05, period: {PERIOD}"
AGENTS = {
    "neutral": "{objective: neutral}",
    "CVaR": f"{{objective: cvar, {TAIL}}}",
    "mean-CVaR .2": f"{{objective: mean_cvar, weight: 0.2, {TAIL}}}",
    "mean-CVaR .5": f"{{objective: mean_cvar, weight: 0.5, {TAIL}}}",
    "constrained -4 %": f"{{objective: constrained, limit: -0.04, {TAIL}}}",
}
REDUCED = (
    "walkforward.folds=1",
    "walkforward.seeds=1",
    "training.policy=MlpPolicy",
    "selection.seeds=1",
    "selection.blocks=3",
)
CALM_DAYS, DANGER_DAYS, WARNING_DAYS = 80, 30, 8
PREMIUM, CALM_STD, DANGER_STD = 0.0006, 0.005, 0.012
CRASH_PROBABILITY, CRASH_SIZE = 0.05, 0.08


def crash_market(n: int, seed: int) -> pd.DataFrame:
    """Return bars, with the column ``danger``, which no agent is shown."""
    rng = np.random.default_rng(seed)
    danger, crash, age = np.zeros(n, bool), np.zeros(n, bool), 0
    for t in range(1, n):
        leaves = 1.0 / CALM_DAYS if not danger[t - 1] else (1.0 / DANGER_DAYS if age >= WARNING_DAYS else 0.0)
        danger[t] = danger[t - 1] ^ (rng.random() < leaves)
        age = age + 1 if danger[t] else 0
        crash[t] = age > WARNING_DAYS and rng.random() < CRASH_PROBABILITY
    # In danger the premium makes up for the crashes of an average phase.
    paid_back = CRASH_PROBABILITY * CRASH_SIZE * DANGER_DAYS / (DANGER_DAYS + WARNING_DAYS)
    std = np.where(danger, DANGER_STD, CALM_STD)
    returns = PREMIUM + danger * paid_back + std * rng.normal(size=n) - crash * CRASH_SIZE
    close = 100.0 * np.cumprod(1.0 + returns)
    opened = np.append(100.0, close[:-1]) * (1.0 + 0.0003 * rng.normal(size=n))
    above, below = np.abs(rng.normal(size=(2, n))) * 0.3 * std
    return pd.DataFrame(
        {
            "open": opened,
            "high": np.maximum(opened, close) * (1.0 + above),
            "low": np.minimum(opened, close) * (1.0 - below),
            "close": close,
            "volume": 1e6,
            "danger": danger,
        },
        index=pd.bdate_range("2000-01-03", periods=n, tz="UTC", name="time"),
    )


def tail_mean(sums: np.ndarray, alpha: float) -> float:
    ordered = np.sort(sums)
    return float(ordered[: max(int(alpha * len(ordered)), 1)].mean())


def windows(returns: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(np.log1p(returns), PERIOD).sum(axis=1)


def figures(returns: np.ndarray, weights: np.ndarray, danger: np.ndarray, exposure: float) -> dict[str, float]:
    """Return what an account did, and its tails at a mean exposure."""
    sums, sharpe = windows(returns), returns.mean() / max(returns.std(), 1e-12) * 252**0.5
    own = float(np.abs(weights).mean())
    scaled = windows(np.maximum(returns * exposure / max(own, 1e-12), -0.99))
    return {
        "calm": float(weights[~danger].mean()),
        "danger": float(weights[danger].mean()),
        "mean": float(sums.mean()),
        "CVaR 5 %": tail_mean(sums, 0.05),
        "sharpe": float(sharpe),
        "exposure": own,
        "5 % at equal exposure": tail_mean(scaled, 0.05),
        "1 % at equal exposure": tail_mean(scaled, 0.01),
    }


def walked(folder: Path, market: Path, risk: str, settings: list[str]) -> Path:
    """Run the command that anybody would, unless it was done before; return the folder of its results."""
    if not (folder / "evaluation" / "metrics.json").is_file():
        sets = [argument for setting in (f"training.risk={risk}", *settings) for argument in ("--set", setting)]
        command = [sys.executable, "-m", "tailguard", "walkforward", "--data", str(market), "--run", str(folder), *sets]
        command += ["--no-ledger", "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "evaluation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="of the markets")
    parser.add_argument("--bars", type=int, default=8000)
    parser.add_argument("--reduced", action="store_true", help="one fold and seed, without memory: a tenth of the time")
    parser.add_argument("--agents", default=",".join(AGENTS), help=f"of {', '.join(AGENTS)}")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/tail_agents"))
    parser.add_argument("--set", dest="settings", action="append", default=[], help="as of the command, for all agents")
    options = parser.parse_args()
    settings = [*(REDUCED if options.reduced else ()), *options.settings]
    columns = (
        "market",
        "agent",
        "calm",
        "danger",
        "exposure",
        "mean",
        "CVaR 5 %",
        "Sharpe",
        "5 %, of neutral",
        "1 %, of neutral",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for seed in map(int, options.seeds.split(",")):
        bars = crash_market(options.bars, seed)
        market = options.folder / f"crash-{seed}.csv"
        market.parent.mkdir(parents=True, exist_ok=True)
        bars.drop(columns="danger").to_csv(market)
        neutral: dict[str, float] = {}
        for name in options.agents.split(","):
            place = options.folder / f"{seed}-{name.replace(' ', '').replace('%', '')}"
            record = load_record(walked(place, market, AGENTS[name], settings))
            account = record.agent
            danger = bars["danger"].to_numpy()[bars.index.tz_localize(None).get_indexer(account.times.tz_localize(None))]
            found = figures(
                account.excess, account.weights[:, 0], danger, neutral.get("exposure", float(np.abs(account.weights).mean()))
            )
            neutral = neutral or found
            ratios = [found[f"{level} at equal exposure"] / neutral[f"{level} at equal exposure"] for level in ("5 %", "1 %")]
            shown = [f"{found[column]:+.2f}" for column in ("calm", "danger", "exposure")]
            shown += [
                f"{found['mean']:+.2%}",
                f"{found['CVaR 5 %']:+.2%}",
                f"{found['sharpe']:.2f}",
                *(f"{r:.2f}" for r in ratios),
            ]
            print(f"| {seed} | {name} | {' | '.join(shown)} |", flush=True)
        held = bars["close"].pct_change().to_numpy()[-len(account.times) :]
        found = figures(held, np.ones(len(held)), bars["danger"].to_numpy()[-len(held) :], neutral["exposure"])
        ratios = [found[f"{level} at equal exposure"] / neutral[f"{level} at equal exposure"] for level in ("5 %", "1 %")]
        tail = f"{found['mean']:+.2%} | {found['CVaR 5 %']:+.2%} | {found['sharpe']:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
        print(f"| {seed} | holding | +1.00 | +1.00 | +1.00 | {tail} |", flush=True)


if __name__ == "__main__":
    main()
