"""Count what each rank does in a distributed product, on this rank or in a dry run of all."""

import math
from dataclasses import dataclass, fields

from bench.experiments.products.problem import Problem, product_grid
from mm3d.grid.shape import GridShape
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import Gemm
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.transport.communicators import DryCommunicator


@dataclass(frozen=True)
class CountedProduct:
    """What one rank counts in one product.

    Words and messages as `mm3d.grid.axis.Traffic` counts them, and rounds of collectives, which
    follow one another; elements stored of A, B and C, and floating-point operations of its local
    products; and the most bytes of arrays at one time, with those of A, B and C.
    """

    words: int
    messages: int
    rounds: int
    stored: int
    operations: int
    memory: int


COUNTS = tuple(field.name for field in fields(CountedProduct))[:-1]    # but the memory


def count_product(problem: Problem, phase: str = "forward") -> CountedProduct:
    """Count the traffic, the memory and the work of one product on this rank."""
    grid, trace = problem.grid, Trace()
    trace.kinds = (Gemm,)    # its own traffic is what the grid counts
    grid.reset_traffic()
    grid.backend.reset_peak()
    with observed(grid, trace):
        result = getattr(problem, phase)()
    memory = grid.backend.memory()["peak"]
    del result
    found = list(grid.traffic().values())
    stored = sum(math.prod(layout.local_shape(grid, problem.shapes[name]))
                 for name, layout in problem.layouts.items())
    return CountedProduct(sum(one.words for one in found), sum(one.messages for one in found),
                          sum(one.calls for one in found), stored, trace.flops(trace.phase),
                          memory)


def count_dry(name: str, form: str, sizes: GridShape, shape: tuple[int, int, int], dtype: str,
              phase: str = "forward") -> list[CountedProduct]:
    """Count what each rank of a grid does, without data.

    Memory is that of a rank which receives all that it reads; ranks that share memory take less.
    """
    return [count_product(Problem(name, form, product_grid(
        name, DryCommunicator(sizes.ranks, rank), sizes, DryBackend()), shape, dtype), phase)
        for rank in range(sizes.ranks)]
