"""Single operations are checked before they are timed, collectives exactly, of integers."""

import math
from typing import Callable

import numpy as np
from mpi4py import MPI

from bench import residual
from bench.residual import Distributed
from mm3d.axis import Split
from mm3d.backend import Array, Backend
from mm3d.store import Check

MODULUS = 11    # sums of so small integers are exact in every dtype


class WrongResult(Exception):
    """An operation gives something else than it must; the message names it."""


def collective(split: Split, kind: str, step: Callable[[], Array | None], a: Array,
               shape: tuple[int, ...], comm: MPI.Intracomm) -> Check:
    """Whether `step` gives what the collective `kind` must, of integers that are put into `a`.

    Parameters
    ----------
    split : Split
        The last dimension of `shape` dealt over an axis; every rank of `comm` has one of the
        same size.
    kind : str
        One of `mm3d.store.COLLECTIVES`; a broadcast is from the first rank, a reduction to it.
    step : callable
        Gives the result of the collective of `a`.

    Raises
    ------
    WrongResult
        When it does not, on any rank of `comm`; on all of them.
    """
    axis = split.axis
    start = sum(split.counts[:axis.rank])
    own = ..., slice(start, start + split.counts[axis.rank])
    periods = np.add.outer(np.arange(axis.size), np.arange(MODULUS)) % MODULUS
    length = math.prod(shape)
    first, term, total = (
        np.tile(period.astype(str(a.dtype)), -(-length // MODULUS))[:length].reshape(shape)
        for period in (periods[0], periods[axis.rank], periods.sum(axis=0)))
    given, wanted = {"all_gather": (first[own], first),
                     "reduce_scatter": (term, total[own]),
                     "all_reduce": (term, total),
                     "broadcast": (term, first),
                     "reduce": (term, None if axis.rank else total)}[kind]
    a[...] = axis.backend.asarray(given)
    found = step()
    if wanted is None or found is None:
        off = 0.0 if wanted is found else np.inf
    else:
        off = float(np.abs(axis.backend.to_host(found) - wanted).max(initial=0))
    off = comm.allreduce(off, MPI.MAX)
    what = f"{shape[0]} elements" if len(shape) == 1 else " x ".join(map(str, shape))
    check = Check(f"{kind} of {what} along {axis.name}", off, 0.0)
    agree("" if check.passed else f"{check.quantity} is off by {off:g}", comm)
    return check


def agree(problem: str, comm: MPI.Intracomm) -> None:
    """WrongResult on all ranks when one has a `problem`: the first rank's that has."""
    found = next(filter(None, comm.allgather(problem)), "")
    if found:
        raise WrongResult(found)


def product(a: Array, b: Array, c: Array, seed: int, backend: Backend, name: str,
            comm: MPI.Intracomm, eps: float | None = None) -> list[Check]:
    """The checks of every rank's own C = A B; WrongResult on all when one of one rank fails.

    `eps` is that of C's type unless given.
    """
    A, B, C = (Distributed(block, tuple(map(slice, (0, 0), block.shape)), block.shape,
                           MPI.COMM_SELF) for block in map(backend.to_host, (a, b, c)))
    checks = residual.checks(name, A, B, C, seed, str(c.dtype), eps)
    wrong = [f"{done.quantity} is off by {done.error:.2g} |A||B|, tolerance {done.tolerance:.2g}"
             for done in checks if not done.passed]
    agree(wrong[0] if wrong else "", comm)
    return checks
