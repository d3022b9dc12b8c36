"""Shared fixtures."""

import pytest

from tailguard.market import load_dataset


@pytest.fixture(scope="session")
def nasdaq():
    return load_dataset("nasdaq-1d")
