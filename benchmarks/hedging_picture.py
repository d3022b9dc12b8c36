"""Draw the distribution of the hedge error by strategy: `python benchmarks/hedging_picture.py` writes docs/hedge-error.svg."""

from pathlib import Path

import matplotlib
import numpy as np
import torch

from tailguard.envs import BandHedging, OptionHedging
from tailguard.envs.hedging_rivals import delta_hedge, leland, play_hedge, tune_whalley_wilmott
from tailguard.experiments.hedging import ENVS, TEST_SEED, play_hedger, train_hedger

PICTURE = Path(__file__).parents[1] / "docs" / "hedge-error.svg"
PATHS, STEPS, COST, ALPHA, SEED = 30_000, 1_000_000, 0.005, 0.05, 0


def main() -> None:
    torch.set_num_threads(1)
    env = OptionHedging(PATHS, cost=COST)
    model = train_hedger(BandHedging(ENVS, cost=COST), alpha=ALPHA, steps=STEPS, seed=SEED)
    results = {
        "Black-Scholes delta": play_hedge(env, delta_hedge, TEST_SEED),
        "Leland": play_hedge(env, leland(env), TEST_SEED),
        "Whalley-Wilmott, tuned": tune_whalley_wilmott(env, ALPHA, TEST_SEED)[1],
        "agent": play_hedger(model, BandHedging(PATHS, cost=COST), TEST_SEED),
    }
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tailguard"  # the same file on every run
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    edges = np.linspace(-4.0, 1.5, 56)
    for (name, result), color in zip(results.items(), ("#8a8f98", "#c08a2b", "#3b6fb6", "#b3333a"), strict=True):
        heights = np.histogram(result.pnl, edges)[0] / PATHS / (edges[1] - edges[0])
        axes.plot(0.5 * (edges[1:] + edges[:-1]), heights, color=color, lw=1.6, label=f"{name}: CVaR {result.cvar(ALPHA):.2f}")
        axes.axvline(-result.cvar(ALPHA), color=color, lw=0.8, ls=":")
    axes.set_xlabel(f"final profit and loss; the premium is {-env.premium:.2f}, the spot 100")
    axes.set_ylabel("density")
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"A sold call, one month, hedged daily at costs of {COST:.1%}; dotted: mean of the worst 5 %", fontsize=10)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
