"""Run a command as if this CPU had another instruction set: ``python tools/isa.py avx2 pytest``.

Every library that chooses its code by the CPU is told what to choose: OpenBLAS (numpy, scipy), numba, torch's own kernels,
oneDNN, XLA and numpy's loops. MKL is not: it takes no such order on CPUs that are not Intel's. Results may differ from
those of the native instruction set in the last bits of a sum, and in nothing else.
"""

import os
import subprocess
import sys

import numpy as np

AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",  # otherwise this CPU's own, which numba adds to those of the named one
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}


def variables(isa: str) -> dict[str, str]:
    """Return the environment variables of an instruction set.

    :param isa: ``native`` (none) or ``avx2``.
    """
    if isa == "native":
        return {}
    if isa != "avx2":
        raise SystemExit(f"isa must be native or avx2, got {isa!r}")
    return AVX2 | {"NPY_DISABLE_CPU_FEATURES": " ".join(_beyond_avx2())}


def _beyond_avx2() -> list[str]:
    """Name what numpy would dispatch to here; it warns of a name that this CPU or this build does not have."""
    core = np._core._multiarray_umath
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name] and name.startswith(("AVX512", "X86_V4"))]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: python tools/isa.py native|avx2 COMMAND ...")
    sys.exit(subprocess.call(sys.argv[2:], env=os.environ | variables(sys.argv[1])))
