"""The code in the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(code):
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_files_that_are_named_exist():
    root = Path(__file__).parents[1]
    named = set(re.findall(r"\]\((docs/[^)]+|[A-Z]+\.md)\)", README)) | set(re.findall(r"`(tests/[\w/]+\.py)`", README))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (root / name).exists()] == []
