"""Ray clusters of several machines on this one, which go away while they work."""

import logging
import os
import sys
import time
from contextlib import contextmanager

import pytest

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


def lose(cluster, machine):
    """Kill a machine and return when the cluster knows it: what is sent to one that is just dying is lost, too."""
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == machine), allow_graceful=False)
    _until_known(machine)


def _until_known(machine):
    deadline = time.monotonic() + PATIENCE
    while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == machine):
        assert time.monotonic() < deadline
        time.sleep(0.05)
