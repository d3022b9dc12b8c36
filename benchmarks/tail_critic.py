"""The tail of a period by the agent's own critics, against the forecast that is shown: `python benchmarks/tail_critic.py`.

Neutral agents predict no period, so that these are agents for the mean whose critics do: mean-CVaR with a weight of 0.0001.
`tailguard walkforward` trains one on each market (one fold and seed, feed-forward, no selection, all else default), trades the
bars after the training, and records what critic and forecast predicted at the first decision of every 21 bars, with what
came. Pinball losses of log returns; exceptions of the 5 % quantile; daily shipped data and crash markets of `tail_agents.py`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tail import inside_band, pinball
from tail_agents import crash_market

from tailguard.evaluate.record import Calibration, load_record

LEVELS = (0.05, 0.1)
SETTINGS = (
    "training.risk={objective: mean_cvar, weight: 0.0001, alpha: 0.05, period: 21}",
    "trading.tail_period=21",
    "training.policy=MlpPolicy",
    "selection=null",
    "walkforward.folds=1",
    "walkforward.seeds=1",
)


def predicted(calibration: Calibration, level: float) -> NDArray[np.float64]:
    """Return the predicted quantile of each period."""
    return np.array([np.interp(level, calibration.levels, row) for row in calibration.quantiles])


def main() -> None:
    """Train what is missing, and print a row per market."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("artifacts/tail_critic"))
    parser.add_argument("--crashes", type=int, nargs="*", default=[0, 1, 2, 3], help="seeds of crash markets")
    parser.add_argument("--shipped", nargs="*", default=["nasdaq-1d", "aapl-1d", "ibm-1d", "msft-1d"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sources = {name: name for name in options.shipped}
    for seed in options.crashes:
        path = options.folder / f"crash-{seed}.csv"
        crash_market(8000, seed).drop(columns="danger").to_csv(path)
        sources[f"crash {seed}"] = str(path)
    print("market      periods  5 %: exceptions of critic, forecast   loss of forecast / critic at 5 %, 10 %", flush=True)
    ratios = []
    for name, data in sources.items():
        run = options.folder / name.replace(" ", "-")
        if not (run / "evaluation" / "metrics.json").is_file():
            sets = [argument for setting in SETTINGS for argument in ("--set", setting)]
            command = [sys.executable, "-m", "tailguard", "walkforward", "--data", data, "--run", str(run), *sets]
            subprocess.run([*command, "--no-ledger", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        record = load_record(run / "evaluation")
        critic, forecast = record.critic_calibration, record.calibration
        if critic is None or forecast is None:
            print(f"{name:12} too few periods")
            continue
        counts, losses = [], []
        for each, outcomes in ((critic, critic.outcomes), (forecast, np.log1p(forecast.outcomes))):
            quantiles = [predicted(each, level) for level in LEVELS]
            quantiles = quantiles if each is critic else [np.log1p(values) for values in quantiles]
            below = int((outcomes < quantiles[0]).sum())
            counts.append(
                f"{below} of {len(outcomes)}{'' if inside_band(below, len(outcomes), 0.05) else ' (outside the band)'}"
            )
            losses.append([pinball(outcomes, values, level) for values, level in zip(quantiles, LEVELS, strict=True)])
        ratios.append(np.log(losses[1]) - np.log(losses[0]))
        shares = "  ".join(f"{value:.3f}" for value in np.exp(ratios[-1]))
        print(f"{name:12} {len(critic.outcomes):6}  {counts[0]}, {counts[1]}   {shares}", flush=True)
    rng = np.random.default_rng(0)
    draws = np.exp([np.mean([ratios[k] for k in rng.integers(0, len(ratios), len(ratios))], axis=0) for _ in range(2000)])
    for level, mean, drawn in zip(LEVELS, np.exp(np.mean(ratios, axis=0)), draws.T, strict=True):
        low, high = np.quantile(drawn, [0.025, 0.975])
        print(f"{level:.0%}: {mean:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
