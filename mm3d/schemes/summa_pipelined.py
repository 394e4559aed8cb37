"""Implement SUMMA with blocks under way while others are multiplied.

The blocks, words and collectives are those of `mm3d.schemes.summa`.  Broadcasts of the next step
begin before the product of this one, and a reduction ends after the product of the next, as in
libraries of dense linear algebra (van de Geijn and Watts, 1997, section 4).  Where a transport
cannot communicate while ranks compute, each collective ends where it begins, as in SUMMA.  Two
blocks of each kind are held instead of one.
"""

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.axis import Pending
from mm3d.grid.split import Split
from mm3d.schemes.overlap import progress_of
from mm3d.schemes.summa import Summa, SummaMatrixProduct


def ab(A: Array, B: Array, a: Split, b: Split) -> Array:
    """Compute C_ij = sum_t A_it B_tj; A_it and B_tj of the next t are broadcast meanwhile."""
    C, last = None, len(a.counts) - 1
    next_A, next_B = a.begin_broadcast(A, 0), b.begin_broadcast(B, 0)
    for t in range(last + 1):
        A_it, B_tj = next_A.take(), next_B.take()
        if t < last:
            next_A, next_B = a.begin_broadcast(A, t + 1), b.begin_broadcast(B, t + 1)
        C_t = matmul(A_it, B_tj, progress=progress_of(next_A, next_B))
        if C is None:
            C = C_t
        else:
            C += C_t
    return C


def abt(A: Array, B: Array, a: Split, b: Split) -> Array:
    """Compute C_it = sum_j A_ij B_tj^T; the next B_tj is broadcast, the last C_it reduced."""
    C, last, summing = None, len(a.counts) - 1, None
    next_B = b.begin_broadcast(B, 0)
    for t in range(last + 1):
        B_tj = next_B.take()
        if t < last:
            next_B = b.begin_broadcast(B, t + 1)
        term = matmul_nt(A, B_tj, a.reduce_term, progress_of(next_B, summing))
        C, summing = _complete(summing, C), a.begin_reduce(term, t)
        del term
    return _complete(summing, C)


def atb(A: Array, B: Array, a: Split, b: Split, accumulate_float32: bool = False) -> Array:
    """Compute C_tj = sum_i A_it^T B_ij; the next A_it is broadcast, the last C_tj reduced.

    With `accumulate_float32` C is computed and summed in float32 at least.
    """
    C, last, summing = None, len(a.counts) - 1, None
    next_A = a.begin_broadcast(A, 0)
    for t in range(last + 1):
        A_it = next_A.take()
        if t < last:
            next_A = a.begin_broadcast(A, t + 1)
        term = matmul_tn(A_it, B, b.reduce_term, accumulate_float32,
                         progress_of(next_A, summing))
        C, summing = _complete(summing, C), b.begin_reduce(term, t)
        del term
    return _complete(summing, C)


def _complete(summing: Pending | None, C: Array | None) -> Array | None:
    """Complete a reduction; return its result on the root, elsewhere the block `C` so far."""
    total = None if summing is None else summing.take()
    return C if total is None else total


class PipelinedMatrixProduct(SummaMatrixProduct):
    """Compute C = A B, A B^T or A^T B of matrices with blocks under way."""

    ALGORITHMS = {"ab": ab, "abt": abt, "atb": atb}


class PipelinedSumma(Summa):
    """Divide all matrices into blocks over a square of ranks, and communicate while multiplying.
    """

    name = "2d-pipelined"
    title = "2-D, pipelined"
    matrix_product = PipelinedMatrixProduct
