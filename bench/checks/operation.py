"""Check operations before they are timed: collectives exactly, products by random vectors."""

import math
from typing import Callable

import numpy as np
from mpi4py import MPI

from bench.agreement import agree
from bench.checks import freivalds
from bench.checks.freivalds import DistributedMatrix
from bench.checks.passed import describe_failed, require_passed
from bench.errors import WrongResult
from bench.records.measurements import Check
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Array
from mm3d.grid.split import Split

MODULUS = 11    # sums of integers below it are exact in every dtype


def check_collective(split: Split, kind: str, step: Callable[[], Array | None], a: Array,
                     comm: MPI.Intracomm) -> Check:
    """Compare the result of the collective `kind` of small integers with the exact one.

    Parameters
    ----------
    split : Split
        Division of the last dimension over an axis, of the same size on every rank of `comm`.
    kind : str
        One of `mm3d.grid.axis.COLLECTIVES`; a broadcast is from the first rank, a
        reduction to it, and an all-to-all sends every rank its block of the array.
    step : callable
        Calls the collective with `a` and returns its result.
    a : Array
        This rank's block of an all-gather, the whole array otherwise; it is overwritten.
    comm : mpi4py.MPI.Intracomm
        The ranks of all lines of the axis, which all raise WrongResult if one has a wrong result.
    """
    axis, shape = split.axis, (*a.shape[:-1], split.extent)
    start = sum(split.counts[:axis.rank])
    own = ..., slice(start, start + split.counts[axis.rank])
    periods = np.add.outer(np.arange(axis.size), np.arange(MODULUS)) % MODULUS
    length = math.prod(shape)

    def repeat(period: np.ndarray) -> np.ndarray:
        times = -(-length // MODULUS)
        return np.tile(period.astype(str(a.dtype)), times)[:length].reshape(shape)

    # No more arrays at a time than needed: they may be as large as the memory allows.
    first, total = periods[0], periods.sum(axis=0)
    a[...] = axis.backend.asarray(repeat(first)[own] if kind == "all_gather"
                                  else repeat(periods[axis.rank]))
    found = step()
    wanted = {"all_gather": lambda: repeat(first),
              "reduce_scatter": lambda: repeat(total)[own],
              "all_reduce": lambda: repeat(total),
              "all_to_all": lambda: np.concatenate(
                  [repeat(period)[own] for period in periods], -1),
              "broadcast": lambda: repeat(first),
              "reduce": lambda: None if axis.rank else repeat(total)}[kind]()
    if wanted is None or found is None:
        off = 0.0 if wanted is found else np.inf
    else:
        difference = axis.backend.to_host(found) - wanted
        off = float(np.abs(difference, out=difference).max(initial=0))
    off = comm.allreduce(off, MPI.MAX)
    what = f"{shape[0]} elements" if len(shape) == 1 else " x ".join(map(str, shape))
    check = Check(f"{kind} of {what} along {axis.name}", off, 0.0)
    return require_passed([check])[0]


def check_own_product(name: str, matrices: tuple[Array, Array, Array], seed: int,
                      comm: MPI.Intracomm = MPI.COMM_SELF,
                      eps: float | None = None) -> list[Check]:
    """Compare each rank's own C with A B by a random vector and some rows.

    A, B and C are each whole on this rank; `eps` is the relative rounding error of the factors,
    that of C's dtype unless given.  All ranks of `comm` raise WrongResult if one is wrong.
    """
    hosts = (backends.backend_of(a).to_host(a) for a in matrices)
    A, B, C = (DistributedMatrix(block, tuple(map(slice, (0, 0), block.shape)), block.shape,
                                 MPI.COMM_SELF) for block in hosts)
    checks = freivalds.check_product(name, A, B, C, seed, str(matrices[2].dtype), eps)
    agree(describe_failed(checks), comm, WrongResult)
    return checks
