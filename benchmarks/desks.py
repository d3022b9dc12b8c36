"""Hedging, execution and market making against their rivals, one script after the other."""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the scripts and return the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Each script has more options of its own.")
    parser.add_argument("--seeds", type=int, help="how many, from --first")
    parser.add_argument("--first", type=int, help="the first seed")
    parser.add_argument("--quick", action="store_true", help="few steps: whether everything runs")
    parser.add_argument("--folder", type=Path, help="keeps what each agent reached, so that an interrupted run can continue")
    parser.parse_args()  # refuses options that not every script has
    failed = 0
    scripts = (Path(__file__).parent / name for name in ("desk_hedging.py", "desk_execution.py", "desk_making.py"))
    for script in scripts:
        print(f"\n## {script.stem}\n", flush=True)
        failed += subprocess.run([sys.executable, str(script), *sys.argv[1:]], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
