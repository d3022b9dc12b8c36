"""Hedging, execution and market making against their rivals, one script after the other.

Options are passed on to each of them (`--seeds`, `--quick`).
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the scripts and return the number of those that failed."""
    failed = 0
    scripts = (Path(__file__).parent / name for name in ("desk_hedging.py", "desk_execution.py", "desk_making.py"))
    for script in scripts:
        print(f"\n## {script.stem}\n", flush=True)
        failed += subprocess.run([sys.executable, str(script), *sys.argv[1:]], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
