"""docs/requirements.md: all rows are there, and what a row calls done is tested under the name that it gives."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (R\d{3}) \|.*\| ([^|]*) \|$", (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8"), re.MULTILINE
)


def test_all_rows_are_there_once():
    assert [row for row, _ in ROWS] == [f"R{number:03}" for number in range(1, 134)]


def test_named_tests_exist():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)\(", source))
    named = {name for _, state in ROWS if state.startswith("done") for name in re.findall(r"`(test_\w+)`", state)}
    assert len(named) > 20
    assert named - existing == set()


def test_every_row_has_a_state():
    assert [row for row, state in ROWS if not state.startswith(("done: ", "decided otherwise: ", "open"))] == []
