"""Count what experts add to a layer: weights that are gathered, rows that travel, and counts."""

from functools import cache
from typing import NamedTuple

from bench.cases.variants import itemsize
from bench.prediction.layer_blocks import BlockSizes
from bench.prediction.pipelines.training_step import expert_products, own_experts
from bench.prediction.seconds import gemm_seconds
from bench.prediction.training_plans.choices import Training
from mm3d.grid.shape import GridShape
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.sizes import ModelSizes
from mm3d.schemes import find_scheme
from mm3d.tracing.events import Collective, Gemm
from mm3d.training.mesh import expert_shards

EXPERT_DIRECTION = "e"    # the direction of replicas that divide experts
WIDE = 4         # bytes of a gradient, at least
COUNT = 8        # bytes of a number of tokens
Calls = tuple[tuple[Collective, int], ...]    # collectives, and how often each is called


@cache
def gathered_words(scheme: str, grid: GridShape, one: ModelSizes, experts: ExpertOptions | None,
                   parts: int) -> int:
    """Return the words of the larger weight of all of a rank's experts, as products have it.

    The gradient of a weight is computed for all experts at once.  Sizes are those of one layer.
    """
    if experts is None:
        return 0
    local = [find_scheme(scheme).local_products(grid, product)[0]
             for product in expert_products(one)]
    return own_experts(experts, parts) * max(each.inner * each.columns for each in local)


def exchanges(training: Training, parts: int, again: bool,
              block: tuple[int, int]) -> tuple[Calls, Calls]:
    """Return the collectives that bring rows to divided experts and back, forward and backward.

    They are those of `mm3d.model.experts.dispatch` in a layer with experts, where tokens choose
    all experts equally often.  `parts` replicas divide the experts; a rank has a `block` of tokens
    and features; backward may repeat forward, `again`.
    """
    experts, (tokens, width), size = training.gpt.experts, block, itemsize(training.dtype)

    def moved(kind: str, rows: int, itemsize: int = size) -> Collective:
        return Collective(kind, EXPERT_DIRECTION, parts, 1, rows * width * itemsize)
    if experts.top * (1 - 1 / parts) * 4 * width <= (parts - 1) * (4 * width + 3 * experts.top):
        one = moved("all_to_all", experts.top * tokens)
        return ((one, 2),), ((one, 2 + 2 * again),)
    gather, scatter = (moved(kind, parts * tokens) for kind in ("all_gather", "reduce_scatter"))
    last = moved("reduce_scatter", parts * tokens, max(size, WIDE))
    return ((gather, 1), (scatter, 1)), ((gather, 1 + again), (scatter, int(again)), (last, 1))


def grouping_seconds(training: Training, scheme: str, grid: GridShape, micro: int,
                     parts: int) -> float:
    """Return by how many seconds products of each expert take longer than one of all, forward.

    Where ranks gather rows, those of a rank and an expert are a product of their own.
    """
    experts, machine, found = training.gpt.experts, training.machine, 0.0
    if experts is None:
        return found
    one = training.stack(micro, "none", 1).sizes
    pieces = own_experts(experts, parts) * BlockSizes(scheme, grid, one).pieces
    for product in expert_products(one):
        for local in find_scheme(scheme).local_products(
                grid, product._replace(M=experts.top * one.tokens)):
            whole, piece = (gemm_seconds(machine, Gemm(
                1, local.rows / count, *local[1:3], training.dtype)) for count in (1, pieces))
            found += local.count * (pieces * piece - whole)
    return found / machine.achieved.gemm


class Copies(NamedTuple):
    """Ranks that hold the same parameters of a stage.

    `shards` ranks divide one copy by ZeRO, `near` apart; `count` hold the same shard, `far` apart.
    """

    shards: int
    near: int
    count: int
    far: int


def copies_of_experts(data: int, shards: int, parts: int, near: int, far: int) -> Copies:
    """Return the ranks that hold the same experts, which `parts` replicas divide.

    Neighbouring replicas are `near` apart, those across copies of the model `far`.
    """
    own = expert_shards(shards, parts)
    return Copies(own, near * parts, data // (parts * own),
                  near * parts * own if shards % parts else far)


def gathers_of_counts(experts: ExpertOptions, parts: int, copies: Copies) -> list[Collective]:
    """Return the collectives by which replicas learn what tokens have chosen, of a layer.

    Those among the `parts` replicas that divide the experts are part of the layer; `copies` are
    those of the experts.
    """
    size, found = COUNT * experts.top * experts.count * parts, []
    for direction, ranks, stride in (("d", copies.shards, copies.near),
                                     ("r", copies.count, copies.far)):
        size *= ranks
        if ranks > 1:
            found.append(Collective("all_gather", direction, ranks, stride, size))
    return found
