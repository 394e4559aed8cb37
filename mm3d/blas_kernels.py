"""Choose the kernels of OpenBLAS on processors where its own choice is not the fastest.

Imports neither NumPy nor anything else that loads a BLAS, which reads its variables once.
"""
from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
PROCESSORS = Path("/proc/cpuinfo")    # of Linux
HEAD_BYTES = 8192                     # in which the first processor is described


def set_default(environ: MutableMapping[str, str] = os.environ,
                processors: Path = PROCESSORS) -> None:
    """Set `VARIABLE` in `environ` to `fastest_kernels`, unless the user has set it.

    Too late once NumPy has started OpenBLAS, which then keeps its own choice.
    """
    if "numpy" not in sys.modules and (kernels := fastest_kernels(processors)):
        environ.setdefault(VARIABLE, kernels)


def fastest_kernels(processors: Path = PROCESSORS) -> str | None:
    """Return the kernels that OpenBLAS should use here; None where it chooses the fastest itself.

    On every processor with AVX-512 it uses kernels of 512 bits.  Zen 4 (the only one of family 25
    with AVX-512) executes such instructions in halves of 256 bits.  There the products of a GPT of
    512 features, 1024 rows, take 1.03 (one process) to 1.08 times as long (two) in float32 as with
    kernels of 256 bits (OpenBLAS 0.3.31), and as long in float64.  `processors` describes them as
    Linux does.
    """
    try:
        with processors.open("rb") as file:
            head = file.read(HEAD_BYTES).decode("ascii", "replace").partition("\n\n")[0]
    except OSError:
        return None
    found = {name.strip(): value.strip() for name, _, value in
             (line.partition(":") for line in head.splitlines())}
    zen4 = (found.get("vendor_id") == "AuthenticAMD" and found.get("cpu family") == "25"
            and "avx512f" in found.get("flags", "").split())
    return "Haswell" if zen4 else None
