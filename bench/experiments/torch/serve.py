"""Answer for a subject that PyTorch computes: one process, in an interpreter of its own.

``python serve.py FOLDER RANK RANKS THREADS`` reads ``case.json`` and the arrays of its rank, or
those of rank 0, joins the others by gloo, and describes the library.  For each line on standard
input, a method of the subject and its arguments, it answers with a line of JSON, and with arrays
in ``answer-RANK.npz``.  Between two lines it sleeps.  It does not need mm3d.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Callable, Sequence

try:
    import numpy as np
except ImportError as lacking:    # of which the caller makes one line
    print(json.dumps({"problem": str(lacking)}))
    sys.exit(1)

TIMEOUT = 300.0    # seconds; a rank that waits longer for another ends
# Calls of a product timed as one: for this many operations, but at most this many calls.
WORK, CALLS = 1e8, 100
SETTINGS = re.compile(r"(MKL|OMP|KMP|GOMP|MALLOC|DNNL|ONEDNN|TORCH)_\w+|LD_PRELOAD")
# A product of matrices: rows, n and columns; whether each matrix has contiguous columns; and how
# many times it is computed.
TimedProduct = tuple[int, int, int, bool, bool, int]


def product_seconds(products: Sequence[TimedProduct], make: Callable[[int, int], Any],
                    multiply: Callable[[Any, Any, Any], object]) -> float:
    """Return the seconds of all products, each timed alone.

    `make` makes a matrix of ones, `multiply` writes the product of two matrices into the third.
    """
    total = 0.0
    for rows, n, columns, *transposed, count in products:
        a, b = (make(*shape[::-1]).T if columns_first else make(*shape) for shape, columns_first
                in zip(((rows, n), (n, columns)), transposed))
        out = make(rows, columns)
        calls = min(CALLS, math.ceil(WORK / (2 * rows * n * columns)))
        multiply(a, b, out)    # wakes the library and touches the memory
        begin = time.perf_counter()
        for _ in range(calls):
            multiply(a, b, out)
        total += count * (time.perf_counter() - begin) / calls
    return total


def mkl_instructions(torch: Any) -> str:
    """Return the instructions that MKL says it uses, such as "AVX-512"; "" if it does not say.

    The processor's own instructions do not tell: MKL chooses by the vendor, too.
    """
    if not torch.backends.mkl.is_available():
        return ""
    out = os.dup(1)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        try:
            with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(out, 1)
            os.close(out)
        said.seek(0)
        found = re.search(r"Advanced Vector Extensions (512|2)\b",
                          said.read().decode(errors="replace"))
    return {None: "", "512": "AVX-512", "2": "AVX2"}[found and found[1]]


def about(torch: Any) -> dict[str, Any]:
    """Describe the library: version, threads and products."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {"version": torch.__version__, "threads": torch.get_num_threads(),
            "blas": blas[1] if blas else "", "instructions": mkl_instructions(torch)}


def product_answer(torch: Any, dtype: str, products: str) -> dict[str, float]:
    """Return the seconds of products by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return {"seconds": product_seconds(
                json.loads(products), lambda *shape: torch.ones(
                    *shape, dtype=getattr(torch, dtype)),
                lambda a, b, out: torch.mm(a, b, out=out))}
    finally:
        torch.set_num_threads(threads)


def main(folder: str, rank: str, ranks: str, threads: str) -> None:
    """Answer each line of standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)    # what libraries print is no answer
    settings = {name: value for name, value in sorted(os.environ.items())
                if SETTINGS.fullmatch(name)}
    try:
        import torch    # which sets some itself
        import torch.distributed
    except ImportError as error:
        print(json.dumps({"problem": str(error)}), file=answers)
        sys.exit(1)
    torch.set_num_threads(int(threads))
    case = json.loads(Path(folder, "case.json").read_text(encoding="utf-8"))
    case |= {"rank": int(rank), "ranks": int(ranks)}
    torch.set_default_dtype(getattr(torch, case["dtype"]))
    with np.load(next(path for path in (Path(folder, f"arrays-{rank}.npz"),
                                        Path(folder, "arrays-0.npz")) if path.exists())) as found:
        arrays = dict(found)
    together = contextlib.ExitStack()
    if int(ranks) > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks),
            timeout=timedelta(seconds=TIMEOUT))
        together.callback(torch.distributed.destroy_process_group)
    subject = resolve_name(case["subject"])(torch, case, arrays)

    def say(found: dict[str, Any]) -> None:
        of_numpy = {key: a for key, a in found.items() if isinstance(a, np.ndarray)}
        if of_numpy:
            np.savez(Path(folder, f"answer-{rank}.npz"), **of_numpy)
            found = {key: a for key, a in found.items() if key not in of_numpy} | {"arrays": True}
        print(json.dumps(found), file=answers, flush=True)

    with together:
        say({**about(torch), **getattr(subject, "about", {}), "settings": settings})
        for line in sys.stdin:
            name, *words = line.split()
            say(product_answer(torch, *words) if name == "products" else
                getattr(subject, name)(*words))


if __name__ == "__main__":
    main(*sys.argv[1:])
