"""Independent tasks under one supervisor: the same results everywhere, whatever happens to the workers."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from parallel_tasks import Echo, Square, runs

from tailguard.parallel.outcomes import Lost, count_losses
from tailguard.parallel.tasks import ProcessTasks, SerialTasks, _task_handler, run_tasks
from tailguard.parallel.worker import Started, WorkerProcess

HEADER = 4  # bytes that say how long a message is


def run(tasks, executor, **options):
    """Return the results by name, and the progress that was reported."""
    results, told = {}, []

    def finished(task, result):
        results[task.name] = result
        return [Square(task.number + 100)] if task.number == 1 else []

    run_tasks(tasks, executor, finished, lambda *said: told.append(said), **options)
    return results, told


@pytest.fixture(scope="module")
def undisturbed():
    return run([Square(number) for number in range(4)], SerialTasks(7))


def test_tasks_are_done_in_order_and_results_make_new_ones_possible(undisturbed):
    results, told = undisturbed
    assert results == {f"square of {number}": number**2 + 7 for number in (0, 1, 2, 3, 101)}
    assert told == [(name, 0.5) for name in results]


def test_a_worker_that_dies_costs_a_line_and_its_task_is_done_again(undisturbed, tmp_path, caplog):
    tasks = [Square(0), Square(1), Square(2, "kill", tmp_path), Square(3)]
    executor = ProcessTasks(7, 2)
    assert run(tasks, executor)[0] == undisturbed[0]
    assert caplog.messages == ["square of 2: lost (its process ended with exit code -9); it starts again"]
    assert executor.pids() == []


def test_a_task_that_always_dies_ends_the_rest_in_good_order(tmp_path, caplog):
    with pytest.raises(ValueError, match="square of 0: lost 2 times, at last its process ended with exit code -9"):
        run([Square(0, "always", tmp_path)], ProcessTasks(7, 1), max_losses=1)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("executor", [SerialTasks(0), ProcessTasks(0, 2)], ids=["serial", "process"])
def test_a_refusal_is_the_users_and_names_the_task(executor, tmp_path):
    with pytest.raises(ValueError, match=r"^square of 5: the number is too square$"):
        run([Square(5, "refuse", tmp_path), Square(6)], executor)


def test_a_bug_shows_its_trace_and_what_runs_is_finished(tmp_path):
    done = []
    with pytest.raises(RuntimeError, match=r"(?s)square of 5 has a bug.*by intent"):
        run_tasks(
            [Square(5, "bug", tmp_path), Square(6)],
            ProcessTasks(0, 2),
            lambda task, _: done.append(task.number) or [],
            lambda *said: None,
        )
    assert done == [6]


def test_a_result_that_cannot_be_kept_ends_the_run(tmp_path):
    def full(task, result):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_tasks([Square(1), Square(2)], SerialTasks(0), full, lambda *said: None)


def test_a_lost_machine_counts_once():
    losses = [Lost("gone", "a"), Lost("gone", "a"), Lost("died", "b"), Lost("died", "b"), Lost("died")]
    assert count_losses(losses, alive=lambda machine: machine == "b") == 4
    assert count_losses(losses, alive=lambda machine: False) == 3
    assert count_losses([], alive=lambda machine: True) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(number, tmp_path):
    """However it ends, and also in the middle of their work."""
    command = [sys.executable, str(Path(__file__).with_name("parallel_tasks.py")), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200.0
    while len(list(tmp_path.iterdir())) < 2 or not all(path.read_text() for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.02)
    workers = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert all(Path(f"/proc/{pid}").exists() for pid in workers)
    driver.send_signal(number)
    driver.wait()
    while any(runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_that_dies_before_it_has_read_its_work_is_a_loss():
    """Its parent must not wait for a reader that is gone."""

    def kill():
        while not (children := multiprocessing.active_children()):
            time.sleep(0.001)
        children[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    worker = WorkerProcess(_task_handler, (b" " * 2**24,))
    killer.join()
    assert worker.receive() == Lost("its process ended with exit code -9")
    worker.close()


def waiting(connection):
    """Return the number of bytes that can be read."""
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_worker_that_dies_while_it_sends_its_result_is_a_loss():
    """Half a message has come: the result is larger than what a connection holds while nobody reads."""
    worker = WorkerProcess(_task_handler, (bytes(2**24),))
    worker.send(Echo())
    assert isinstance(worker.receive(), Started)
    deadline = time.monotonic() + 200.0
    while waiting(worker.connection) <= HEADER:  # a header alone would break off between two messages
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.kill()
    assert worker.receive() == Lost("its process ended with exit code -9")
    worker.close()


def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from parallel_tasks import Square\n"
        "from tailguard.parallel.tasks import ProcessTasks, run_tasks\n"
        "run_tasks([Square(1)], ProcessTasks(0, 1), lambda task, result: [], lambda name, share: None, max_losses=0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert 'ended with exit code 1 before it began: a script needs `if __name__ == "__main__":`' in ran.stderr.splitlines()[-1]
