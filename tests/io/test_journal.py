"""A journal keeps what was acknowledged, and notices every change."""

import pytest

from tailguard.io.journal import Journal

RECORDS = [
    {"kind": "a", "value": 0.1 + 0.2},
    {"kind": "b", "text": 'quoted "text", and \u00fc'},
    {"kind": "c", "list": [1, None]},
]


@pytest.fixture
def written(tmp_path):
    journal = Journal(tmp_path / "folder" / "journal.jsonl")
    journal.append(RECORDS[0])
    journal.append(*RECORDS[1:], sync=False)
    journal.close()
    return journal.path


def test_records_come_back_as_they_were(written):
    journal = Journal(written)
    assert list(journal) == RECORDS
    journal.append({"kind": "d"})
    assert list(journal) == [*RECORDS, {"kind": "d"}]
    journal.close()
    assert list(Journal(written)) == [*RECORDS, {"kind": "d"}]


def test_an_unfinished_line_is_cut_off(written):
    whole = written.read_bytes()
    for length in range(len(whole) + 1):
        written.write_bytes(whole[:length])
        journal = Journal(written)
        kept = whole[:length].count(b"\n")
        assert list(journal) == RECORDS[:kept]
        journal.append(*RECORDS[kept:])
        journal.close()
        assert written.read_bytes() == whole


def test_every_changed_missing_or_exchanged_line_is_noticed(written):
    lines = written.read_bytes().splitlines(keepends=True)
    damaged = [lines[1:], [lines[1], lines[0], lines[2]], [lines[0], lines[2]]]
    damaged += [[lines[0], lines[1][:k] + b"~" + lines[1][k + 1 :], lines[2]] for k in range(len(lines[1]) - 1)]
    for changed in damaged:
        written.write_bytes(b"".join(changed))
        with pytest.raises(ValueError, match=r"line \d is damaged"):
            Journal(written)


def test_one_process_writes_at_a_time(written):
    first = Journal(written)
    with pytest.raises(ValueError, match="in use by another process"):
        Journal(written)
    first.close()
    Journal(written).close()


def test_numbers_that_json_lacks_are_refused(written):
    journal = Journal(written)
    with pytest.raises(ValueError, match="not JSON compliant"):
        journal.append({"value": float("nan")})
    assert list(journal) == RECORDS
