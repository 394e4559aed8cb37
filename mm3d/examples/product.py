"""Multiply matrices on a p x p x p cube of ranks: the paper's Algorithms 1 and 2 in plain MPI.

``mpirun -n 8 python -m mm3d.examples.product``.  Rank (i, j, k) lies at i along x, j along y and
k, the paper's l, along z.  It stores A_ijk: part j of row block i, column block k; B_kji: row
block k, part i of column block j; and C_ikj: part k of row block i, column block j.
"""

import numpy as np
from mpi4py import MPI


def main(comm: MPI.Comm = MPI.COMM_WORLD) -> None:
    """Compute C = A B and, for a gradient dC, dA = dC B^T and dB = A^T dC; compare with NumPy."""
    p = round(comm.size ** (1 / 3))
    if p ** 3 != comm.size:
        raise SystemExit(f"{comm.size} ranks make no cube: 1, 8 or 27 would do")
    i, j, k = np.unravel_index(comm.rank, (p, p, p))
    x, y, z = (comm.Split(color) for color in (j * p + k, i * p + k, i * p + j))

    M, N, K = 6 * p ** 2, 4 * p ** 2, 8 * p ** 2    # any multiples of p^2
    draw = np.random.default_rng(0)
    A, B, dC = (draw.integers(-9, 10, shape).astype(float) for shape in ((M, N), (N, K), (M, K)))

    def block(number: int, size: int) -> slice:    # of the p blocks of all rows, or all columns
        return slice(number * size // p, (number + 1) * size // p)

    def part(number: int, of: int, size: int) -> slice:    # of the p parts of block `of`
        return block(of * p + number, size // p)
    A_ijk = A[part(j, i, M), block(k, N)]
    B_kji = B[block(k, N), part(i, j, K)]
    dC_ikj = dC[part(k, i, M), block(j, K)]

    # Forward: gather A along y and B along x, multiply, and scatter the sums of C along z.
    A_ik = all_gather(A_ijk, y, axis=0)
    B_kj = all_gather(B_kji, x, axis=1)
    C_ikj = reduce_scatter(A_ik @ B_kj, z, axis=0)
    # Backward: the same with the directions exchanged, for dA = dC B^T and dB = A^T dC.
    dC_ij = all_gather(dC_ikj, z, axis=0)
    dA_ijk = reduce_scatter(dC_ij @ B_kj.T, y, axis=0)
    dB_kji = reduce_scatter(A_ik.T @ dC_ij, x, axis=1)

    right = [np.array_equal(C_ikj, (A @ B)[part(k, i, M), block(j, K)]),
             np.array_equal(dA_ijk, (dC @ B.T)[part(j, i, M), block(k, N)]),
             np.array_equal(dB_kji, (A.T @ dC)[block(k, N), part(i, j, K)])]
    wrong = comm.allreduce(right.count(False))
    moved = (p - 1) * (A_ijk.size + B_kji.size + C_ikj.size)
    if comm.rank == 0:
        print(f"C ({M} x {K}), dA and dB on {p} x {p} x {p} ranks: {wrong} blocks differ from "
              f"NumPy's; in C = A B each rank receives {moved} numbers")
    if wrong:
        raise SystemExit(1)


def all_gather(block: np.ndarray, line: MPI.Comm, axis: int) -> np.ndarray:
    """Return the blocks of all ranks of a line, joined along an axis."""
    blocks = np.empty((line.size, *block.shape))
    line.Allgather(np.ascontiguousarray(block), blocks)
    return np.concatenate(blocks, axis)


def reduce_scatter(term: np.ndarray, line: MPI.Comm, axis: int) -> np.ndarray:
    """Return this rank's part along an axis of the sum of the terms of all ranks of a line."""
    parts = np.stack(np.split(term, line.size, axis))
    total = np.empty(parts.shape[1:])
    line.Reduce_scatter_block(parts, total)
    return total


if __name__ == "__main__":
    main()
