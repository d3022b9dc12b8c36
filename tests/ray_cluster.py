"""Ray clusters of several machines on this one, which go away while they work."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from tailguard.parallel.reaper import MARK, family, reaped

ray = pytest.importorskip("ray", reason='needs Ray: pip install "tailguard[ray]"')
SMALL = {"object_store_memory": 100 * 2**20}
# A machine that was killed refuses connections: five refusals in a row, which take seconds and not half a minute.
WATCHFUL = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 5}
PATIENCE = 200.0
# Ray leaves them behind; they are errors in our own tests.
WARNINGS = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def joined_cluster():
    """Join a cluster whose first machine has no cores, so that a test knows which machines work."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": WATCHFUL, **SMALL}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # of the helpers of tests
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=path)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@contextmanager
def machines(cluster, number, cores):
    """Add machines for the length of a test."""
    added = [cluster.add_node(num_cpus=cores, **SMALL) for _ in range(number)]
    yield added
    for machine in added:
        if machine in cluster.worker_nodes:
            cluster.remove_node(machine)
            _until_known(machine.node_id)


@contextmanager
def machine_with_its_own_disk(cluster, hidden):
    """Add a machine with one core that sees an empty folder where this one has files: it has a mount namespace of its own."""
    own_disk = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
    if subprocess.run([*own_disk, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount in a namespace of its own")
    known = {node["NodeID"] for node in ray.nodes()}
    start = ["ray.scripts.scripts", "start", f"--address={cluster.address}", "--num-cpus=1", "--block", "--log-color=false"]
    memory = f"--object-store-memory={SMALL['object_store_memory']}"
    with reaped():
        mark = os.environ[MARK]
        machine = subprocess.Popen([*own_disk, sys.executable, "-m", *start, memory], stdout=subprocess.DEVNULL)
    deadline, added = time.monotonic() + PATIENCE, set()
    while not added:
        assert time.monotonic() < deadline
        assert machine.poll() is None
        time.sleep(0.1)
        added = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - known
    node = added.pop()
    try:
        yield node
    finally:
        for pid in family(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        machine.wait()
        _until_known(node)


def lose(cluster, machine):
    """Kill a machine and return when the cluster knows it: what is sent to one that is just dying is lost, too."""
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == machine), allow_graceful=False)
    _until_known(machine)


def _until_known(machine):
    deadline = time.monotonic() + PATIENCE
    while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == machine):
        assert time.monotonic() < deadline
        time.sleep(0.05)
