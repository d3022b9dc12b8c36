"""What a killed process leaves behind ends soon after it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailguard.parallel.reaper import GRACE_SECONDS, LOOK_SECONDS, MARK, QUIET_SECONDS, family, reaped

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
# Starts a shell that starts another one in a session of its own and ends: an orphan that nobody watches.
LEAVES = f"""
import os, subprocess, sys, time
from tailguard.parallel.reaper import reaped
with reaped():
    print(os.environ["{MARK}"], flush=True)
    subprocess.run(["sh", "-c", "setsid sleep 600 > /dev/null 2>&1 &"])
assert "{MARK}" not in os.environ
subprocess.Popen(["sleep", "600"])
print("started", flush=True)
{{then}}
"""


@linux
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGINT, None])
def test_orphans_end_with_who_started_them(ends):
    then = "time.sleep(600)" if ends else ""
    script = LEAVES.format(then=then)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as driver:
        assert driver.stdout is not None
        mark = driver.stdout.readline().strip()
        assert driver.stdout.readline() == "started\n"
        assert len(family(mark)) == 1  # not the process after the context
        if ends is not None:
            time.sleep(GRACE_SECONDS + 1.0)
            assert len(family(mark)) == 1  # it lives while its driver does
            driver.send_signal(ends)
        driver.wait()
    try:
        until = time.monotonic() + GRACE_SECONDS + 20.0
        while family(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert family(mark) == {}
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # the process after the context


# A process that carries the mark starts one that does not, as if a title were written over its environment.
HIDES = """
import subprocess, sys, time
from tailguard.parallel.reaper import reaped
child = "import subprocess, time; hidden = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True); "
child += "print(hidden.pid, flush=True); time.sleep(LIVES)"
with reaped():
    subprocess.run([sys.executable, "-c", child])
    time.sleep(600)
"""


@linux
@pytest.mark.parametrize("lives", [LOOK_SECONDS + 2.0, 600.0])
def test_children_of_the_marked_end_though_nothing_marks_them(lives):
    """Whether or not the one that started them is still there when the driver is killed."""
    script = HIDES.replace("LIVES", str(lives))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        hidden = int(driver.stdout.readline())
        time.sleep(LOOK_SECONDS + 4.0)
        os.kill(hidden, 0)  # it lives while its driver does
        driver.kill()
    until = time.monotonic() + GRACE_SECONDS + 20.0
    while _runs(hidden) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _runs(hidden)


def _runs(pid):
    """Whether a process is there, and not only waits for somebody to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
def test_nobody_who_reads_the_output_waits_for_it():
    script = "from tailguard.parallel.reaper import reaped\nwith reaped():\n    pass\nprint(flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"\n"
        driver.wait()
        ended = time.monotonic()
        assert driver.stdout.read() == b""
        assert time.monotonic() - ended < QUIET_SECONDS / 2


@linux
def test_nothing_is_marked_twice(monkeypatch):
    monkeypatch.setenv(MARK, "outer")
    with reaped():
        assert os.environ[MARK] == "outer"
    assert os.environ[MARK] == "outer"


@linux
def test_it_ends_itself_where_nothing_is_left():
    script = "import os\nfrom tailguard.parallel.reaper import reaped\nwith reaped():\n    pass\n"
    script += "print(open(f'/proc/self/task/{os.getpid()}/children').read())"
    pid = int(subprocess.check_output([sys.executable, "-c", script], text=True))
    assert os.path.exists(f"/proc/{pid}")
    until = time.monotonic() + QUIET_SECONDS + 20.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
