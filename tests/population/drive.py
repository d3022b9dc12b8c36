"""A driver to be killed: ``python drive.py FOLDER INTERVALS``."""

import sys
from pathlib import Path

from faults import Fates, population

from tailguard.population.engines.process import ProcessEngine

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    scheduler, store = population(folder)
    with ProcessEngine(scheduler, Fates(folder, pause=0.1), store) as engine:
        engine.run(int(sys.argv[2]))
