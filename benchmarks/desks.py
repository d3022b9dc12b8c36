"""All desks in one go: hedging, execution and market making, against their rivals: `python benchmarks/desks.py`.

Every desk is a script of its own, `desk_*.py`; options are passed on to each of them (`--seeds`, `--first`, `--quick`).
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the desks one after the other, and return the number of those that failed."""
    failed = 0
    for script in sorted(Path(__file__).parent.glob("desk_*.py")):
        print(f"\n## {script.stem}\n", flush=True)
        failed += subprocess.run([sys.executable, str(script), *sys.argv[1:]], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
