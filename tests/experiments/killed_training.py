"""A training that kills itself: ``python killed_training.py RUN N``, at the Nth step of its environments or file that it opens.

Counted from the first step on, so that it has begun to train, and a few hundred of them are in the middle of everything.
"""

import os
import signal
import sys

from tailguard.cli import main
from tailguard.market.env import TradingVecEnv

if __name__ == "__main__":
    folder, left = sys.argv[1], int(sys.argv[2])
    honest, begun = TradingVecEnv.step_arrays, False

    def count(event, arguments):
        global left
        if begun and event in ("step", "open", "os.rename", "os.remove"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def step_arrays(self, actions):
        global begun
        begun = True
        sys.audit("step")
        return honest(self, actions)

    TradingVecEnv.step_arrays = step_arrays
    sys.addaudithook(count)
    main(["resume", folder, "--quiet"])
