"""Shared fixtures."""

import os
import resource
from contextlib import contextmanager

import pytest

from tailguard.market import load_dataset

os.environ["TAILGUARD_LEDGER"] = "off"  # no test writes to the ledger of whoever runs it; processes inherit it


@pytest.fixture(scope="session")
def nasdaq():
    return load_dataset("nasdaq-1d")


@pytest.fixture
def full_disk():
    """A context in which the disk is full for files beyond some bytes: a write fails as it does there."""

    @contextmanager
    def full(most):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full
