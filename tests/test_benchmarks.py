"""The script that runs all benchmarks, on scripts of our own; and the pieces of the soak that need no hour."""

import importlib
import re
import shlex
import sys
import time
from pathlib import Path

import all as everything
import numpy as np
import pandas as pd
import pytest
import tail
import tail_series
from all import BENCH, CHECK, Job, Outcome, document, fits, run, shown
from learning import share_of_best
from mutants import MUTANTS, TESTS
from soak import Memory, Round, report
from soak_faults import Finding, _spoil
from soak_subjects import Child

from tailguard.io import checkpoint
from tailguard.market import SignalMarket

BENCHMARKS = Path(everything.__file__).parent
PEERS = {"jax", "sb3_contrib"}


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A folder of benchmarks: name to code."""
    monkeypatch.setattr(everything, "HERE", tmp_path)

    def write(**codes):
        for name, code in codes.items():
            (tmp_path / f"{name}.py").write_text(code)

    return write


@pytest.mark.parametrize("job", [*BENCH, *CHECK], ids=lambda job: job.command)
def test_every_job_names_a_script_and_options_that_exist(job):
    script, *words = shlex.split(job.command)
    source = (BENCHMARKS / script).read_text(encoding="utf-8")
    declared = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', source))
    assert {word for word in words if word.startswith("--")} <= declared


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_script_finds_what_it_imports(script):
    """A name that the package has lost breaks a benchmark silently: nobody runs all of them."""
    try:
        importlib.import_module(script)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package in PEERS:
            pytest.skip(f"needs {package}, of the extra `bench`")
        raise


def test_both_plans_cover_everything():
    """Speed, learning, risk, optimizers, robustness, population and environment."""
    for plan in (BENCH, CHECK):
        named = {shlex.split(job.command)[0] for job in plan}
        assert {"speed.py", "learning.py", "risk.py", "optim.py", "robustness.py", "population.py", "env_speed.py"} <= named


@pytest.mark.parametrize("hidden", [False, True])
def test_the_best_has_a_share_of_one_who_does_nothing_of_zero_and_who_is_late_something_between(hidden):
    """On as few signals as these: the best and its rival trade on the same ones."""
    market = SignalMarket(256, hidden=hidden, episode_length=10_000)
    best = market.solve()

    class Trader:
        def __init__(self, delay, held):
            self.belief, self.delay, self.held = np.zeros(256), delay, held

        def predict(self, obs, state, starts, deterministic):
            self.belief = market.filter.step(self.belief, obs[:, 0]) if hidden else obs[:, 0]
            wish = best.policy(self.belief / self.delay, obs[:, 1])
            return (self.held * wish)[:, None].astype(np.float32), state

    ideal, idle, late = (
        share_of_best(trader, market, 3, 600) for trader in (Trader(1.0, 1.0), Trader(1.0, 0.0), Trader(2.0, 1.0))
    )
    assert ideal == pytest.approx(1.0, abs=1e-6)
    assert idle == pytest.approx(0.0, abs=0.04)
    assert 0.6 < late < 0.95


def test_what_measures_time_runs_alone_and_the_rest_as_cores_allow():
    clock, one, two = Job("a", "a.py", 1.0, 0), Job("b", "b.py", 1.0, 1), Job("c", "c.py", 1.0, 2)
    assert all(fits(job, [], 2) for job in (clock, one, two))
    assert not fits(clock, [one], 2)
    assert not fits(one, [clock], 2)
    assert fits(one, [one], 2)
    assert not fits(one, [one, one], 2)
    assert not fits(two, [one], 2)
    assert fits(two, [one], 3)


def test_one_that_fails_and_one_that_hangs_do_not_stop_the_others(scripts, capsys):
    hang = """
import subprocess, sys
print("begun", flush=True)
subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])  # far more than a test may take
"""
    scripts(good="print('| a | b |')", bad="print('half')\nraise SystemExit('out of luck')", hang=hang)
    jobs = [
        Job("Good", "good.py", 1.0),
        Job("Bad", "bad.py", 1.0),
        Job("Long", "hang.py", 0.2),
        Job("Good", "good.py", 1.0, 0),
    ]
    outcomes = []
    run(jobs, 2, outcomes)
    assert sorted((one.job.command, one.state) for one in outcomes) == [
        ("bad.py", "failed (exit code 1)"),
        ("good.py", "done"),
        ("good.py", "done"),
        ("hang.py", "stopped after 0.2 min"),
    ]
    assert {one.printed.strip() for one in outcomes} == {"| a | b |", "half", "begun"}
    assert next(one.errors for one in outcomes if one.job.section == "Bad").strip() == "out of luck"
    assert "4 of 4 done" in capsys.readouterr().err


def test_timings_never_overlap_with_anything(scripts, tmp_path):
    stamp = """
import pathlib, sys, time
begun = time.time()
time.sleep(0.3)
pathlib.Path(sys.argv[1]).write_text(f"{begun} {time.time()}")
"""
    scripts(stamp=stamp)
    run([Job("x", f"stamp.py {tmp_path}/at-{n}", 1.0, cores) for n, cores in enumerate([1, 0, 0, 1, 1])], 2, [])
    spans = {n: tuple(map(float, (tmp_path / f"at-{n}").read_text().split())) for n in range(5)}
    for clock in (1, 2):
        others = [spans[n] for n in spans if n != clock]
        assert all(end <= spans[clock][0] or begin >= spans[clock][1] for begin, end in others)


def test_the_page_holds_tables_states_and_errors():
    done = Outcome(
        Job("Learning", CHECK[3].command, 1.0), "torch 2, seeds 0\n  progress\n\n| a |\n|---|\n| 1 |\n", "", "done", 4.2
    )
    failed = Outcome(Job("Risk", CHECK[4].command, 1.0), "", "Traceback\nValueError: x\n", "failed (exit code 1)", 1.0)
    page = document(["- Machine: m."], [failed, done], quick=True)
    assert page.index("## Learning") < page.index("## Risk")  # in the order of the plan
    assert "torch 2, seeds 0\n\n| a |\n|---|\n| 1 |" in page
    assert "progress" not in page
    assert f"| Risk | `{CHECK[4].command}` | failed (exit code 1) | 1 |" in page
    assert "ValueError: x" in page
    assert "It is no measurement" in page
    assert "It is no measurement" not in document([], [], quick=False)


def test_progress_is_left_out_of_tables():
    assert shown("a\n  b\n| c |  \n\n") == "a\n| c |"


def test_the_machine_is_described():
    text = "\n".join(everything.machine(2))
    assert f"torch {sys.modules['torch'].__version__}" in text
    assert "2 cores" in text


def test_every_mutant_still_changes_one_place_of_the_code_and_has_tests():
    source = BENCHMARKS.parent / "src" / "tailguard"
    assert [mutant for mutant in MUTANTS if (source / mutant[0]).read_text().count(mutant[1]) != 1] == []
    assert {mutant[0] for mutant in MUTANTS} == set(TESTS)
    named = {word for tests in TESTS.values() for word in tests if word.startswith("tests/")}
    assert [name for name in named if not (BENCHMARKS.parent / name).is_file()] == []


# ------------------------------------------------------------------------------------------------------------------ soak


def test_the_slope_of_memory_is_found_and_its_interval_covers():
    rng = np.random.default_rng(0)
    seconds = np.arange(0.0, 3600.0, 2.0)
    flat, growing = (
        Memory(seconds.tolist(), (500.0 + rate * seconds / 3600.0 + rng.normal(0.0, 1.0, len(seconds))).tolist())
        for rate in (0.0, 30.0)
    )
    for memory, truth in ((flat, 0.0), (growing, 30.0)):
        slope, width = memory.slope()
        assert abs(slope - truth) < 2.0 * width
        assert width < 2.0
    assert np.isnan(Memory([1.0], [2.0]).slope()).all()


def test_what_happens_while_everything_is_loaded_does_not_count():
    seconds = np.arange(0.0, 1000.0, 1.0)
    memory = Memory(seconds.tolist(), np.where(seconds < 90.0, 100.0, 300.0).tolist())
    assert memory.slope()[0] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_spoilt_file_is_never_taken_for_a_whole_one(tmp_path, seed):
    path = tmp_path / "x"
    checkpoint.save(path, {"numbers": np.arange(50.0)}, kind="test")
    how = _spoil(path, np.random.default_rng(seed))
    assert how in ("cut", "flipped", "emptied", "overwritten", "unreadable")
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(path, kind="test")


def test_the_report_counts_what_was_promised():
    good = Finding("killed", "training", "killed", True, "words", 512)
    bad = Finding("killed", "training", "killed", False, "", 9999)
    text = report(60.0, 3, [Round("LSTM", [good, bad], True, True), Round("MLP", [], False, True)], Memory(), 143)
    assert "2 faults in 2 rounds, 1 with the outcome that was promised" in text
    assert "| killed | training | 2 | 1 | killed | 9,999 steps | `words` |" in text
    assert "| MLP | 0 | yes | **no** |" in text


def test_a_child_is_killed_and_its_words_are_kept(tmp_path):
    code = "import sys, time\nsys.stderr.write('hello\\n\\n')\nsys.stderr.flush()\ntime.sleep(60)"
    child = Child([sys.executable, "-c", code], {}, tmp_path / "said")
    deadline = time.monotonic() + 200.0
    while not child.said() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert child.said() == ["hello"]
    assert child.code(0.0) is None
    assert child.resident() > 1_000_000
    child.kill()
    child.kill()  # nothing happens to one that has ended
    assert child.code(0.0) == -9


def test_the_frontier_is_read_on_the_line_through_cash():
    points = pd.DataFrame({"cvar": [-0.1, -0.02], "mean": [0.01, 0.004]})
    assert tail.mean_at(points, -0.02) == pytest.approx(0.004)
    assert tail.mean_at(points, -0.01) == pytest.approx(0.002)
    assert tail.mean_at(points, -0.06) == pytest.approx(0.007)
    assert tail.mean_at(points, -0.2) == pytest.approx(0.01)  # no more than everything is held


def test_a_target_holds_the_limit_over_the_predicted_loss():
    loss = np.array([np.nan, 0.02, 0.1, 0.104, 0.2])
    held = tail.targeted(np.ones((5, 1)), loss, 0.05)[:, 0]
    np.testing.assert_allclose(held, [0.0, 1.0, 0.5, 0.5, 0.25])  # 4 % more is not traded


def test_the_frontier_takes_the_guard_from_its_records(monkeypatch):
    bars, stated = tail_series.walk(0, 1500), {"cvar": -0.031, "mean": 0.002}
    loss = {"volatility": np.full(1500, 0.1)}
    monkeypatch.setattr(tail, "predicted_losses", lambda *_: loss)  # the rivals need the package `arch`
    records = [{"position": name, "limit": limit} | stated for name in ("holding", "trend") for limit in tail.LIMITS[:2]]
    rows = pd.DataFrame(tail.frontier_series(bars, records)).set_index(["position", "rule", "limit"])
    assert len(rows) == 2 * (1 + 2 * 3)
    assert dict(rows.loc[("holding", "guard", 0.05)]) == stated
    assert -0.1 < rows.loc[("holding", "guard", 0.1), "cvar"] < 0.0  # not among the records: made now
    # Half of the position has half of the tail, but for costs and compounding.
    free, part = (rows.loc[("holding", *key), "cvar"] for key in (("none", np.nan), ("volatility", 0.05)))
    assert part == pytest.approx(0.5 * free, rel=0.05)
