"""Calls and tasks on a Ray cluster: ``pip install "tailguard[ray]"``.

A call holds its cores as long as it runs and no longer, so that any number of them can wait for few machines. What a call has
returned, and where it ran, is known here; a machine that is lost takes nothing with it but time.
"""

import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tailguard.parallel.logs import collect_logs, forward_logs
from tailguard.parallel.outcomes import Crashed, Lost
from tailguard.parallel.reaper import reaped
from tailguard.parallel.tasks import Outcome, Reached, Task, perform
from tailguard.parallel.worker import Returned, Tell
from tailguard.validation import require

POLL_SECONDS = 0.5  # between looks at what calls tell
LOOK_SECONDS = 2.0  # between looks at the machines of the cluster
TELL_SECONDS = 1.0  # between two messages of one call
PLACEMENT_SECONDS = 120.0
# Returns an answer, and what stays on the machine where it was computed until somebody asks for it.
Function = Callable[..., tuple[Any, Any]]


class _Board:
    """An actor beside the driver that holds what calls tell; it takes no core."""

    def __init__(self) -> None:
        self._machines: dict[Any, str] = {}
        self._told: dict[Any, Any] = {}

    def begin(self, key: Any, machine: str) -> None:
        self._machines[key] = machine

    def tell(self, key: Any, value: Any) -> None:
        self._told[key] = value

    def take(self) -> tuple[dict[Any, str], dict[Any, Any]]:
        """Return what is new: where calls have begun, and the last that each has told."""
        news = self._machines, self._told
        self._machines, self._told = {}, {}
        return news


@dataclass
class _Call:
    """A call that has not ended.

    :param answer: reference to its answer.
    :param kept: reference to what stays on its machine.
    :param machine: where it runs; None while it waits for a core.
    """

    answer: Any
    kept: Any
    machine: str | None = None


class RayCalls:
    """Calls of a function on a cluster.

    :param function: called as ``function(*arguments, tell)`` on some machine.
    :param resources: of a call, as Ray names them, such as ``{"num_cpus": 1, "resources": {"fast": 1}}``.
    :param placement_seconds: seconds without any machine that has them, after which calls that wait count as lost.
    """

    def __init__(
        self, function: Function, resources: Mapping[str, Any] | None = None, placement_seconds: float = PLACEMENT_SECONDS
    ) -> None:
        require(placement_seconds > 0.0, "placement_seconds", placement_seconds, "above 0")
        self._ray = ray()
        options = {"num_cpus": 1, **(resources or {})}
        self._needed = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        self._placement_seconds, self._starved_since, self._looked = placement_seconds, time.monotonic(), 0.0
        self._machines: dict[str, Mapping[str, float]] = {}  # resources of those that are alive
        self._look()
        most = max((machine.get("CPU", 0.0) for machine in self._machines.values()), default=0.0)
        require(self._fits(), "num_cpus of a call", options["num_cpus"], f"at most {most:g}: no machine has more cores")
        # Whoever calls decides what is tried again.
        self._call = self._ray.remote(_called).options(num_returns=2, max_retries=0, **options)
        self._function = self._ray.put(function)  # once per cluster, not once per call
        here = _on(self._ray.get_runtime_context().get_node_id())
        self._board = self._ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
        self._calls: dict[Any, _Call] = {}

    def capacity(self) -> int:
        """Return how many calls can run at the same time, on the machines that are there now; at least 1."""
        self._look()
        shares = [
            min(int(machine.get(name, 0.0) / amount + 1e-9) for name, amount in self._needed.items() if amount > 0)
            for machine in self._machines.values()
        ]
        return max(sum(shares), 1)

    def start(self, key: Any, *arguments: Any) -> None:
        """Send a call to the cluster; Ray finds a machine for it."""
        self._calls[key] = _Call(*self._call.remote(self._board, key, self._function, *arguments))

    def wait(self, timeout: float | None, told: Callable[[Any, Any], None] | None = None) -> list[tuple[Any, Any, Any]]:
        """Return the calls that have ended: key, :class:`Returned` or a loss or a crash, and a reference to what was kept.

        :param timeout: seconds after which to return without any; None waits without limit.
        :param told: called with the keys of calls, and what they tell.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if end is None else min(POLL_SECONDS, max(end - time.monotonic(), 0.0))
            references = {call.answer: key for key, call in self._calls.items()}
            if references:
                self._ray.wait(list(references), num_returns=1, timeout=left, fetch_local=False)
            ready = self._ray.wait(list(references), num_returns=len(references), timeout=0)[0] if references else []
            self._read_board(told)
            ended = [self._ended(references[reference]) for reference in ready]
            ended += self._starved()
            if ended or (end is not None and time.monotonic() >= end):
                return ended

    def machines(self) -> dict[Any, str | None]:
        """Return where each call runs; None for those that wait."""
        self._read_board(None)
        return {key: call.machine for key, call in self._calls.items()}

    def alive(self, machine: str) -> bool:
        """Return False for a machine that is gone."""
        self._look(at_least_every=0.0)  # a loss is counted: it may have gone since the last look
        return machine in self._machines

    def close(self) -> None:
        """End all calls."""
        for call in self._calls.values():
            self._ray.cancel(call.answer, force=True)
        self._calls.clear()
        self._ray.kill(self._board)

    def _ended(self, key: Any) -> tuple[Any, Any, Any]:
        call = self._calls.pop(key)
        try:
            answer: Returned = self._ray.get(call.answer)
        except self._ray.exceptions.RayTaskError as error:
            return key, Crashed(str(error)), None
        except self._ray.exceptions.RayError as error:  # worker, machine, memory or object: twenty subclasses for a loss
            return key, Lost(type(error).__name__, call.machine), None
        forward_logs(answer.logs)
        return key, answer, call.kept

    def _read_board(self, told: Callable[[Any, Any], None] | None) -> None:
        machines, news = self._ray.get(self._board.take.remote())
        for key, machine in machines.items():
            if key in self._calls:
                self._calls[key].machine = machine
        for key, value in news.items():
            if told is not None and key in self._calls:
                told(key, value)

    def _look(self, at_least_every: float = LOOK_SECONDS) -> None:
        """Look which machines there are, unless that was done a moment ago."""
        if time.monotonic() - self._looked >= at_least_every:
            self._machines = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
            self._looked = time.monotonic()

    def _fits(self) -> bool:
        return any(
            all(machine.get(name, 0.0) >= amount for name, amount in self._needed.items())
            for machine in self._machines.values()
        )

    def _starved(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the calls for which no machine has had the resources for too long."""
        self._look()
        if self._fits():
            self._starved_since = time.monotonic()
        elif time.monotonic() - self._starved_since > self._placement_seconds:
            for key in [key for key, call in self._calls.items() if call.machine is None]:
                self._ray.cancel(self._calls.pop(key).answer, force=True)
                yield key, Lost(f"no resources in the cluster within {self._placement_seconds:g} s"), None


class RayTasks:
    """Runs tasks on a Ray cluster. Results come back through Ray's object store: machines need no common disk.

    :param shared: what all tasks have in common; sent to each machine once.
    :param address: of the cluster; None starts one on this machine.
    :param resources: of a task, see :class:`RayCalls`.
    """

    def __init__(self, shared: Any, address: str | None = None, resources: Mapping[str, Any] | None = None) -> None:
        connect(address)
        self._shared = ray().put(shared)
        self._calls = RayCalls(_perform, resources)

    def capacity(self) -> int:
        """Return how many tasks the machines can run at the same time."""
        return self._calls.capacity()

    def start(self, task: Task) -> None:
        """Send a task to the cluster."""
        self._calls.start(task.name, self._shared, task)

    def wait(self, reached: Reached) -> list[tuple[str, Outcome]]:
        """Return outcomes."""
        ended = self._calls.wait(POLL_SECONDS, reached)
        return [(name, outcome.value if isinstance(outcome, Returned) else outcome) for name, outcome, _ in ended]

    def alive(self, machine: str) -> bool:
        """Return False for a machine that is gone."""
        return self._calls.alive(machine)

    def close(self) -> None:
        """End all tasks."""
        self._calls.close()


def connect(address: str | None = None) -> None:
    """Join a cluster, if this process has not joined one already.

    :param address: address of the cluster; None starts one on this machine, also where another one runs already.
    """
    if not ray().is_initialized():
        with _keeping_sigterm(), nullcontext() if address else reaped():
            ray().init(address=address or "local", log_to_driver=False, include_dashboard=None if address else False)


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces with one that exits without a word; the default one it may replace."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:  # by the handler of Ray
        handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def on_every_machine(function: Callable[[str], Any]) -> Iterator[tuple[str, str, Any]]:
    """Call a function once on each machine; yield the machine, its address, and the result.

    :param function: called with the machine.
    """
    call = ray().remote(function)
    calls = [
        (
            node["NodeID"],
            node["NodeManagerAddress"],
            call.options(num_cpus=0, scheduling_strategy=_on(node["NodeID"])).remote(node["NodeID"]),
        )
        for node in ray().nodes()
        if node["Alive"]
    ]
    for machine, address, reference in calls:
        yield machine, address, ray().get(reference)


def ray() -> Any:
    """Return the module of Ray.

    :raises ValueError: if it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ValueError('this needs Ray: pip install "tailguard[ray]"') from error


def _on(machine: str) -> Any:
    """Return the strategy that places something on a machine."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node_id=machine, soft=False)


def _called(board: Any, key: Any, function: Function, *arguments: Any) -> tuple[Returned, Any]:
    """Run a call on its machine."""
    board.begin.remote(key, ray().get_runtime_context().get_node_id())
    last = [0.0]

    def tell(value: Any) -> None:
        if time.monotonic() - last[0] >= TELL_SECONDS:
            last[0] = time.monotonic()
            board.tell.remote(key, value)

    with collect_logs() as logs:
        value, kept = function(*arguments, tell)
    return Returned(value, logs), kept


def _perform(shared: Any, task: Task, tell: Tell) -> tuple[Any, Any]:
    return perform(task, shared, tell), None
