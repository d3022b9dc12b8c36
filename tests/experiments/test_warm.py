"""Compiling ahead: once for a CPU and a version of the source, and never where nothing can be kept."""

import os
import subprocess
import sys

from tailguard.experiments import warm
from tailguard.parallel.tasks import SerialTasks, run_tasks

# numba looks for a folder nowhere else, and this one cannot be made.
NOWHERE = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": "/proc/nowhere"}
COMPILES = """
import numpy as np
from tailguard.experiments.warm import warm_up
from tailguard.optim.kernels import sum_of_squares
print(warm_up(), sum_of_squares(np.arange(4, dtype=np.float32)))
"""
COMPILED_AGAIN = """
import numba.core.event as event
from tailguard.experiments.warm import PARTS
compiled = []
class Listener(event.Listener):
    def on_start(self, event): compiled.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event): pass
event.register("numba:compile", Listener())
PARTS["trainings"]()
print(compiled)
"""


def run(program, **environment):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout


def test_it_is_done_once_for_a_cpu_and_a_version_of_the_source(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(warm, "PARTS", {"first": lambda: ran.append(1), "second": lambda: ran.append(2)})
    monkeypatch.setattr(warm, "cores", lambda: 1)
    monkeypatch.setattr(warm, "_note", lambda: tmp_path / warm.NOTE)
    assert warm.warm_up()
    assert ran == [1, 2]
    assert not warm.warm_up()
    assert ran == [1, 2]
    monkeypatch.setattr(warm, "_compiled_for", lambda: "another CPU\n")
    assert warm.warm_up()
    assert ran == [1, 2, 1, 2]


def test_it_compiles_what_trainings_call():
    run_tasks([warm.Part("trainings")], SerialTasks(None), lambda task, result: [], lambda name, share: None)
    assert run(COMPILED_AGAIN).strip() == "[]"


def test_where_nothing_can_be_kept_code_is_compiled_in_each_process_and_not_ahead():
    assert run(COMPILES, **NOWHERE).split() == ["False", "14.0"]
