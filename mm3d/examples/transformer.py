"""Compute a Transformer forward and backward on a grid of ranks, beside the same on one rank.

``mpirun -n 8 python -m mm3d.examples.transformer --scheme 3d --grid 2 2 2``
"""

import sys

import numpy as np

import mm3d
from mm3d.examples import ExampleParser
from mpi4py import MPI

SIZES = {"layers": 2, "hidden": 48, "heads": 4, "batch": 8, "seq": 16, "dtype": "float64"}


def main(words: list[str] | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> None:
    """Print the largest difference to one rank, and the words that a rank receives in a step."""
    parser = ExampleParser(description=main.__doc__)
    parser.add_argument("--scheme", default="3d")
    parser.add_argument("--grid", type=int, nargs="+")
    options = parser.parse_args(words)
    try:
        scheme = mm3d.scheme(options.scheme, comm, grid=options.grid and tuple(options.grid))
    except ValueError as error:    # before any communication, the same on every rank
        sys.exit(f"error: {error}")
    found, traffic = step(scheme)
    # Drawn from the same seed, the model is the same on every scheme and grid.
    expected, _ = step(mm3d.scheme("serial", MPI.COMM_SELF))
    worst = max(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()
                for name in expected)
    if comm.rank == 0:
        print(f"output and {len(found) - 1} gradients on {comm.size} ranks of {scheme.name}: "
              f"largest relative difference to one rank {worst:.0e}")
        print(traffic)
    if worst > 1e-12:
        raise SystemExit(1)


def step(scheme: "mm3d.Scheme") -> tuple[dict[str, np.ndarray], dict]:
    """Return global output and gradients of a step, and the traffic of this rank."""
    model = mm3d.Transformer(scheme, seed=0, **SIZES)
    y, saved = model.forward(model.random("input"))
    dx = model.backward(model.random("output gradient"), saved)
    words = scheme.grid.traffic()
    return {"y": model.unshard(y), "dx": model.unshard(dx), **model.gradients()}, words


if __name__ == "__main__":
    main()
