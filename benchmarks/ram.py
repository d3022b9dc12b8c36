"""Peak memory over the number of bars: `python benchmarks/ram.py --bars 20000 200000`.

Minute bars of a random walk as a CSV file. Every task is a process of its own; printed are its peak resident memory (libraries
included), what that is above the memory of the libraries alone, the same per bar, and its CPU time.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tailguard.market import random_walk

LIBRARIES = "import numba, pandas, scipy.stats, talib, tailguard.market, tailguard.evaluate.backtest"
TASKS = {
    "libraries": LIBRARIES,
    "check": "from tailguard.cli import main; main(['data', 'check', FILE])",
    "features": f"{LIBRARIES}; tailguard.market.build_features(tailguard.market.load_bars(FILE))",
    "backtest, all baselines": "from tailguard.cli import main; main(['backtest', '--data', FILE])",
}


def measured(code: str) -> tuple[float, float]:
    """Return the peak memory in MB and the CPU seconds of a process."""
    text = f"{code!s}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reported = f"import resource, sys\ntry:\n    {text}\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
    reported += "sys.stderr.write(f'PEAK {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}')"
    done = subprocess.run([sys.executable, "-c", reported], capture_output=True, text=True, check=False)
    if "PEAK" not in done.stderr:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return int(done.stderr.rpartition("PEAK ")[2]) / 1024, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bars", type=int, nargs="+", default=[20_000, 200_000])
    options = parser.parse_args()
    print(f"{'task':>24} {'bars':>9} {'peak MB':>8} {'above libraries':>16} {'bytes per bar':>14} {'CPU s':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for number in options.bars:
            file = Path(folder) / f"{number}.csv"
            random_walk(number, seed=0, freq="1min").to_csv(file)
            least = 0.0
            for task, code in TASKS.items():
                peak, seconds = measured(code.replace("FILE", repr(str(file))))
                least = peak if task == "libraries" else least
                above = peak - least
                print(f"{task:>24} {number:>9,} {peak:>8.0f} {above:>16.0f} {above * 2**20 / number:>14.0f} {seconds:>6.1f}")


if __name__ == "__main__":
    main()
