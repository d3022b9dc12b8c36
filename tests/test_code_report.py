"""The report on the code finds what it looks for, and the language of the project is the field's."""

import code_report
import pytest


def terms(text, path="src/tailguard/ppo/example.py"):
    return [finding.text.partition(":")[0].strip("'\"") for finding in code_report.private_terms(text, path)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the law of the return", ["law"]),
        ("class QuantileLaw(Head): ...", ["Law"]),
        ("return_laws = []", ["laws"]),
        ("a policy with memory", ["memory"]),
        ("into_mean = slopes[m]", ["slopes", "into_mean"]),
        ("Who goes on after a kill", ["goes on"]),
        ("the seeds' order", ["the seeds' order"]),
        ("the learning rate in force", ["in force"]),
        ("the rooms of the house", ["rooms", "house"]),
        ("agents for a tail", ["agents for a tail"]),
        ("record.track(name)", ["track"]),
    ],
)
def test_a_private_term_is_found(text, found):
    assert sorted(terms(text)) == sorted(found)


@pytest.mark.parametrize(
    "text",
    [
        "name.strip().rstrip()",
        "lawful, flaw, outlaw",
        "slope = self.slope",
        "minimum_track_record",
        "written to tracks.csv",
        "bars are held in memory once",
        "on flat float32 memory of the CPU",
        'law: distribution  # alias of "law"',
        "the median of the seeds' leads over the market, and the seeds themselves",
        "there is no room for more",
    ],
)
def test_an_ordinary_word_is_not_found(text):
    assert terms(text) == []


def test_a_term_may_be_private_to_a_part_of_the_tree():
    assert terms("slope of the regression", "src/tailguard/evaluate/stats/regression.py") == []
    assert terms("the slope", "src/tailguard/ppo/loss.py") == ["slope"]


def test_riddles_and_nameless_variables_are_found():
    source = 'def f(one):\n    """Whether it is one."""\n    return one\n\n\ndef g():\n    """Return 1."""\n'
    assert [finding.line for finding in code_report.riddles(source, "x.py")] == [2]
    assert [finding.line for finding in code_report.variables_named_one(source, "x.py")] == [1, 3]


def test_what_a_call_enters_is_counted_by_module():
    from tailguard.validation import require

    assert code_report.entered(lambda: require(True, "x", 1, "anything")) == {"validation.py": {"require"}}


def test_no_private_term_is_left():
    left = code_report.findings()
    assert {kind: [str(finding) for finding in found] for kind, found in left.items() if found} == {}
