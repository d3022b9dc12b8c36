"""One thread per process, wherever work begins: the number of threads of a library changes the last bits of its sums.

A product of matrices is summed in another order on two threads than on one, so that the same training would end with other
weights on another machine, or after ``export OMP_NUM_THREADS=2``. Everything that trains, decides or evaluates therefore runs
in :func:`one_thread`: for as long as it lasts, and not for good, since the process may be the user's. Nothing is lost: networks
of this size are slower on several threads, and work that can be shared out is shared out to processes.

The threads of numba need no pinning: no kernel is compiled with ``parallel`` (:mod:`tailguard.jit` has no such decorator).
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)
# What libraries read when they are loaded.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of PyTorch and of every BLAS, inside a ``with`` statement or a function that this decorates."""
    torch = sys.modules.get("torch")  # a library that is not loaded computes nothing, and takes a second to load
    threads = 1 if torch is None else torch.get_num_threads()
    with _libraries().limit(limits=1):
        if torch is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(threads)


@contextmanager
def one_thread_in_children() -> Iterator[None]:
    """Start processes with one thread per library: set in their environment, which libraries read when they are loaded."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def conditions() -> dict[str, str]:
    """Return what the last bits of a result depend on beside the code: threads, versions, and the CPU as each library sees it.

    With equal conditions a training gives equal bits. With others it gives an equally good agent, but not the same one.
    """
    import llvmlite.binding
    import numba
    import torch
    from torch.backends import cpu

    libraries = {
        f"BLAS of {_owner(library['filepath'])}": f"{library['version']} for {library.get('architecture', 'any CPU')}"
        for library in _libraries().info()
        if library["user_api"] == "blas"
    }
    return {
        "threads": "1",
        "CPU": os.environ.get("NUMBA_CPU_NAME") or llvmlite.binding.get_host_cpu_name(),
        "instructions of torch": cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        **dict(sorted(libraries.items())),  # in whatever order they were loaded
    }


def warn_of_differences(what: str, before: Mapping[str, str] | None) -> None:
    """Log one line if work continues under other conditions than those under which it began.

    :param what: the work.
    :param before: :func:`conditions` at its beginning; None if they were not noted.
    """
    changed = differences(before, conditions()) if before is not None else ""
    if changed:
        logger.warning("%s began under other conditions (%s): it may end with other bits than without the stop", what, changed)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what has changed between two results of :func:`conditions`, such as ``torch: 2.12.0 -> 2.13.0``."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name}: {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names)


@cache
def _libraries() -> Any:
    """Return the thread pools of all libraries that compute here; found once, since looking for them takes milliseconds."""
    # Those that are not loaded yet could not be limited. numba multiplies with the BLAS of scipy.
    for name in ("numpy", "scipy.linalg.cython_blas"):
        importlib.import_module(name)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _owner(path: str) -> str:
    """Return the package that a shared library came with, by its folder: ``numpy.libs`` or ``torch/lib``."""
    folders = path.split("/")[:-1]
    return next((name.removesuffix(".libs") for name in reversed(folders) if name != "lib"), path)
