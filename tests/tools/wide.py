"""Checks many parallelisms in one start of many ranks: python -m mpi4py tests/tools/wide.py

What `test_wide.py` starts; prints a line for each model that equals the serial one.
"""
import itertools
import sys

import numpy as np

import mm3d
from mpi4py import MPI
from mm3d.model import cost
from models import Parallelism, data, differences, train
from products import FORMS, Case
from reference import SHAPES, on_grid, total, words

SIZES = {    # nothing divides but where it says so
    "uneven": dict(layers=1, hidden=40, heads=10, batch=5, seq=7),
    "odd": dict(layers=1, hidden=21, heads=7, batch=3, seq=11),
    "thin": dict(layers=1, hidden=10, heads=2, batch=1, seq=3),        # less than one a rank
    "table 2": dict(layers=1, hidden=32, heads=8, batch=24, seq=8),    # 16 does not divide 24
    "whole sequences": dict(layers=1, hidden=32, heads=8, batch=16, seq=2),
    "table 1": dict(layers=1, hidden=192, heads=64, batch=2, seq=3)}   # 3072 and 64 on 36, / 16

CASES = {
    9: [("uneven", Parallelism("2d")), ("uneven", Parallelism("3d", (3, 1, 3)))],
    27: [("uneven", Parallelism("1d")), ("uneven", Parallelism("1d-sp")),
         *((name, Parallelism("3d")) for name in ("uneven", "odd", "thin"))],
    36: [("table 1", Parallelism("1d")), ("uneven", Parallelism("2d"))],
    64: [("table 2", Parallelism("3d")), ("whole sequences", Parallelism("3d")),
         ("uneven", Parallelism("3d", (4, 4, 4), {"keep": "both"})),
         ("odd", Parallelism("3d")), ("thin", Parallelism("3d")),
         ("uneven", Parallelism("2d")), ("uneven", Parallelism("1d"))]}


def serial(sizes: dict[str, int], comm) -> dict[str, np.ndarray]:
    """The serial model's step, computed by rank 0 alone."""
    if comm.rank == 0:
        scheme = mm3d.scheme("serial", MPI.COMM_SELF)
        model = mm3d.Transformer(scheme, **sizes, dtype="float64", causal=True)
        results = train(model, *data(**sizes))
    return comm.bcast(results if comm.rank == 0 else None)


def check(name: str, parallelism: Parallelism, comm) -> None:
    """Output and gradients against the serial model; exactly the words of the closed form."""
    sizes, expected = SIZES[name], serial(SIZES[name], comm)
    with parallelism.on(comm) as scheme:
        model = mm3d.Transformer(scheme, **sizes, dtype="float64", causal=True)
        wrong = differences(model, train(model, *data(**sizes)), expected, 1e-12, 1e-11)
        everything = [line for lines in comm.allgather(wrong) for line in lines]
        assert not everything, f"{parallelism}, {name}: {everything}"
        moves = cost.words(scheme.name, scheme.grid.shape, model.sizes, **parallelism.options)
        x, dy = model.random("x"), model.random("dy")
        for phase in ("forward", "backward"):
            scheme.grid.reset_traffic()
            if phase == "forward":
                _, saved = model.forward(x)
            else:
                model.backward(dy, saved)
            moved = total(comm, words(scheme.grid))
            assert moved == moves[phase], f"{parallelism}, {name}: {phase} moved {moved}"
    if comm.rank == 0:
        print(parallelism, name)


def check_products(comm) -> None:
    """The three forms with their gradients on a cube, bitwise, on sizes that nothing divides."""
    p = round(comm.size ** (1 / 3))
    with on_grid(comm, p, p, p) as grid:
        for name, sizes in itertools.product(FORMS, SHAPES):
            case = Case(name, "xyz", grid, sizes)
            same = [np.array_equal(*pair) for pair in zip(case.run(), case.expected())]
            assert all(comm.allgather(all(same))), f"{name} of {sizes}: {same}"
    if comm.rank == 0:
        print(f"products {p}x{p}x{p}")


if __name__ == "__main__":
    for case in CASES[MPI.COMM_WORLD.size]:
        check(*case, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.size in (27, 64):
        check_products(MPI.COMM_WORLD)
    sys.stdout.flush()
