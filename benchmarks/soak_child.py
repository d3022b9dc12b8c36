"""The command line of Tailguard in a bad place, for soak.py: the arguments are those of `tailguard`.

Two faults cannot come from outside, so they are put into the process, and into those that it spawns, by environment variables:

SOAK_CLOCK   a seed: the wall clock (`time.time`, `time.time_ns`) jumps by up to eleven days, there and back, every second or so
SOAK_BURST   a path: when somebody makes this file, the next step of a trading environment consumes it and says NaN, as reward
             or as observation, which the file tells
"""

import os
import random
import time
from pathlib import Path

import numpy as np

from tailguard.market.env import TradingVecEnv

FARTHEST = 1e6  # seconds


def jump_clocks(seed: int) -> None:
    """From now on the wall clock cannot be trusted. Monotonic clocks keep their word: they never jump."""
    rng, true_time, monotonic = random.Random(seed), time.time, time.monotonic
    state = {"offset": 0.0, "next": monotonic()}

    def wrong_time() -> float:
        if monotonic() >= state["next"]:
            state["offset"], state["next"] = rng.uniform(-FARTHEST, FARTHEST), monotonic() + rng.uniform(0.0, 2.0)
        return true_time() + state["offset"]

    time.time, time.time_ns = wrong_time, lambda: int(1e9 * wrong_time())


def burst_from(path: Path) -> None:
    """Environments that say NaN once when the file appears."""
    honest = TradingVecEnv.step_arrays

    def step_arrays(self, actions):
        step = honest(self, actions)
        try:
            what = path.read_text()
            path.unlink()  # whoever removes it has the burst; of several processes it is one
        except FileNotFoundError:
            return step
        damaged = (step.rewards if what == "reward" else step.obs).copy()
        damaged[: max(len(damaged) // 2, 1)] = np.nan
        return step._replace(rewards=damaged) if what == "reward" else step._replace(obs=damaged)

    TradingVecEnv.step_arrays = step_arrays


# At the top, because a spawned process imports this file and runs nothing else of it.
if "SOAK_CLOCK" in os.environ:
    jump_clocks(int(os.environ["SOAK_CLOCK"]))
if "SOAK_BURST" in os.environ:
    burst_from(Path(os.environ["SOAK_BURST"]))

if __name__ == "__main__":
    from tailguard.cli import main

    main()
