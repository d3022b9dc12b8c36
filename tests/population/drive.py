"""A driver to be killed: ``python drive.py FOLDER INTERVALS``. A member hangs in the fourth interval, so it never ends."""

import sys
from pathlib import Path

from faults import INTERVAL, Fates, population

from tailguard.population.engines.process import ProcessEngine

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    scheduler, store = population(folder)
    with ProcessEngine(scheduler, Fates(folder, {(0, 3 * INTERVAL): "hang"}), store) as engine:
        engine.run(int(sys.argv[2]))
