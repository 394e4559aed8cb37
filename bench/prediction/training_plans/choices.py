"""Describe a plan, and list the values of each choice that it makes."""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Callable, Iterator, NamedTuple

from bench.prediction.machine_model import Machine
from bench.prediction.model_file import ModelFile
from bench.prediction.pipelines.pipeline_model import (PipelineModel, build_once, mesh_shape,
                                                       mesh_strides)
from mm3d.config import Division
from mm3d.grid.layout import divided_directions, without_faces
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme

# Each with the directions of more than one rank: without, a grid is another scheme's.
PLANNED_SCHEMES = {"1d": "x", "1d-sp": "x", "2d": "xy", "2.5d": "xyz", "3d": ""}
KIND_TITLES = {"1d": "1-D", "1d-sp": "1-D", "2d": "2-D", "2.5d": "2.5-D", "3d": "3-D"}
PLANNED_POLICIES = ("none", "selective", "full")
# On more GPUs the ranks of a stage are those of `MOST_NODES` at most, and shards those of one.
FEW_GPUS = 1024
MOST_NODES = 8
LONG_SEQ = 2 ** 14    # tokens of a sequence, from which on a context is considered
MOST_CONTEXT = 16     # ranks that divide positions, beside stages within a node
CONTEXT_WAYS = Division.__dataclass_fields__["context_way"].metadata["choices"]
PLANNED_SCHEDULES = ("1f1b", "zb-h1", "interleaved")
MOST_CHUNKS = 6     # of a rank, where stages are interleaved
MOST_ACTIONS = 2 ** 15    # micro-batches x chunks of all stages: what the clock times in seconds


class Choice(NamedTuple):
    """A plan: what divides a training, in the terms of `mm3d.config.Division`.

    `micro` is the number of sequences of a micro-batch, `inside` the direction of the mesh whose
    ranks follow each other on the nodes, "" for its order, and `way` that of the context.
    """

    data: int
    zero: int
    stages: int
    schedule: str
    micro: int
    scheme: str
    grid: GridShape
    recompute: str
    shards: int | None = None
    inside: str = ""
    expert_parallel: int = 1
    context: int = 1
    way: str = "gather"

    @property
    def replicas(self) -> int:
        """Return the replicas, also those with the same sequences."""
        return self.data * self.context

    @property
    def places(self) -> int:
        """Return the ranks of a stage."""
        return self.grid.ranks

    @property
    def chunks(self) -> int:
        """Return the chunks of layers on a rank."""
        return int(self.schedule.partition(":")[2] or 1)

    @property
    def parts(self) -> int:
        """Return the replicas that divide one copy of the model by ZeRO."""
        return self.shards or self.replicas

    @property
    def mesh(self) -> GridShape:
        """Return the mesh of all GPUs."""
        return mesh_shape(self.replicas // self.parts, self.parts, self.stages, self.grid)

    @property
    def strides(self) -> dict[str, int]:
        """Return the strides of the directions of the mesh over the nodes."""
        return mesh_strides(self.mesh, self.inside)

    @property
    def family(self) -> str:
        """Name the kinds of parallelism beside replicas; or the kind of replicas."""
        if self.places == self.stages == self.expert_parallel == self.context == 1:
            return "data, ZeRO 3" if self.zero == 3 else "data"
        parts = ([kind_title(self.scheme, self.grid)] * (self.places > 1)
                 + ["pipeline"] * (self.stages > 1)
                 + ["experts"] * (self.expert_parallel > 1) + ["context"] * (self.context > 1))
        return " + ".join(parts)


@dataclass(frozen=True)
class Training:
    """What is trained, and on how many GPUs of a machine.

    The batch is of all replicas, and `seq` in place of the model's.  With `overlap` collectives
    over replicas are assumed to go on behind other work, as `predict_step` says.  The machine is
    `named` by its name or file, and `asked` are the options that name the model, by default its
    own name.  `keeps` is given a scheme and a grid, and returns whether plans may have them; all
    plans have as many stages, 0 for any.
    """

    gpt: ModelFile
    gpus: int
    batch: int
    seq: int
    dtype: str
    machine: Machine
    overlap: bool = False
    named: str = ""
    asked: str = ""
    keeps: Callable[[str, GridShape], bool] = lambda scheme, grid: True
    stages: int = 0

    def microbatches(self, choice: Choice) -> int:
        """Return the micro-batches of a replica."""
        return self.batch // (choice.data * choice.micro)

    def stack(self, batch: int, recompute: str, layers: int | None = None) -> Stack:
        """Return the layers, for so many sequences."""
        gpt = self.gpt
        return Stack(layers=layers or gpt.layers, hidden=gpt.hidden, heads=gpt.heads, batch=batch,
                     seq=self.seq, dtype=self.dtype, causal=True, recompute=recompute,
                     architecture=gpt.architecture, experts=gpt.experts)

    def model(self, choice: Choice) -> PipelineModel:
        """Return the model that a plan is of, for exact predictions."""
        schedule = build_once(choice.schedule, choice.stages, self.microbatches(choice))
        return PipelineModel(
            schedule, choice.scheme, (choice.grid,) * choice.stages,
            self.stack(self.batch // choice.data, choice.recompute), data=choice.data,
            context=choice.context, context_way=choice.way, zero=choice.zero,
            shards=choice.shards, expert_parallel=choice.expert_parallel,
            vocab=self.gpt.vocab, tied=self.gpt.tied, named=choice.schedule)

    @property
    def most_places(self) -> int:
        """Return the largest number of ranks of a stage that is considered."""
        most = MOST_NODES * self.machine.ranks_per_node
        return self.gpus if self.gpus <= FEW_GPUS else min(self.gpus, most)

    @cached_property
    def shapes(self) -> tuple[tuple[str, GridShape], ...]:
        """List the schemes and grids of a stage."""
        return tuple((scheme, grid) for places in divisors(self.gpus)
                     if places <= self.most_places for scheme, grid in list_grids(places)
                     if self._has_heads(scheme, grid) and self.keeps(scheme, grid))

    def _has_heads(self, scheme: str, grid: GridShape) -> bool:
        """Return whether each rank of a grid has a head of keys, and features."""
        columns = [grid.ranks_along(divided_directions(without_faces(one[1])))
                   for one in find_scheme(scheme).layouts(grid, grid.ranks, self.seq)]
        return columns[0] <= self.gpt.hidden and columns[1] <= self.gpt.sizes().kv_heads

    @property
    def long(self) -> bool:
        """Return whether sequences are so long that dividing their positions is considered."""
        return self.seq >= LONG_SEQ and self.gpt.experts is None

    def contexts(self, choice: Choice) -> Iterator[tuple[int, str]]:
        """List the numbers of ranks that divide positions, and their ways."""
        yield 1, CONTEXT_WAYS[0]
        if self.long and choice.places <= self.machine.ranks_per_node:
            for ranks in divisors(self.gpus // choice.places)[1:]:
                if ranks <= MOST_CONTEXT:
                    yield from ((ranks, way) for way in CONTEXT_WAYS)

    def meshes(self, places: int) -> Iterator[tuple[int, int]]:
        """List the numbers of replicas and of stages for so many ranks of a stage and context."""
        rest = self.gpus // places
        for data in divisors(math.gcd(rest, self.batch)):
            if self.divides_layers(rest // data) and self.stages in (0, rest // data):
                yield data, rest // data

    @property
    def group(self) -> int:
        """Return the number of layers of a group, such that all groups are alike."""
        return self.gpt.experts.every if self.gpt.experts else 1

    def divides_layers(self, stages: int) -> bool:
        """Return whether the layers can be divided among stages; groups stay whole."""
        layers = self.gpt.layers
        return stages == 1 or stages <= layers and (
            self.group == 1 or layers % (stages * self.group) == 0)

    def expert_parallels(self, choice: Choice) -> tuple[int, ...]:
        """List the numbers of replicas that may divide the experts."""
        experts = self.gpt.experts
        return tuple(one for one in divisors(choice.data)
                     if one == 1 or experts and one <= experts.count)

    def micros(self, choice: Choice) -> Iterator[int]:
        """List the numbers of sequences of a micro-batch that give every rank rows."""
        for micro in divisors(self.batch // choice.data):
            if _has_rows(choice.scheme, choice.grid, micro, self.seq // choice.context):
                yield micro

    def schedules(self, choice: Choice) -> Iterator[str]:
        """List the schedules for the stages and micro-batches of a plan."""
        stages, microbatches = choice.stages, self.microbatches(choice)
        if stages * microbatches > MOST_ACTIONS:
            return
        plain, apart, interleaved = PLANNED_SCHEDULES
        yield plain
        if stages == 1 or microbatches == 1:
            return
        yield apart
        layers = self.gpt.layers
        if microbatches % stages == 0:
            for chunks in range(2, MOST_CHUNKS + 1):
                equal = layers % (stages * chunks * self.group) == 0
                # As without chunks.
                uneven = self.group == 1 and layers % stages and layers >= stages * chunks
                if (equal or uneven) and stages * chunks * microbatches <= MOST_ACTIONS:
                    yield f"{interleaved}:{chunks}"

    def shards(self, choice: Choice) -> tuple[int | None, ...]:
        """List the numbers of replicas that divide one copy of the model, None for all."""
        most = self.gpus if self.gpus <= FEW_GPUS else self.machine.ranks_per_node
        return (None, *(one for one in divisors(choice.replicas)[1:-1]
                        if choice.zero and one <= most))

    def insides(self, choice: Choice) -> tuple[str, ...]:
        """List the directions that may lie inside the nodes, "" for the order of the mesh first.

        Replicas that divide experts stay equally far apart; shards that cut a context stay in the
        order of the mesh.
        """
        if choice.parts % choice.context:
            return ("",)
        found = _movable(choice.mesh, self.machine.ranks_per_node)
        if choice.parts % choice.expert_parallel:
            return tuple(one for one in found if one not in ("r", "d"))
        return found


@cache
def _has_rows(scheme: str, grid: GridShape, micro: int, seq: int) -> bool:
    """Return whether each rank of a grid has a part of the sequences of a micro-batch."""
    for rows in (one[0] for one in find_scheme(scheme).layouts(grid, micro, seq)):
        sequences, _, positions = without_faces(rows).partition(",")
        if micro < grid.ranks_along(sequences) or seq < grid.ranks_along(positions):
            return False
    return True


@cache
def _movable(mesh: GridShape, per_node: int) -> tuple[str, ...]:
    """Return "", and the directions that are not inside the nodes in the order of the mesh.

    With one rank on a node, none can be.
    """
    strides = mesh_strides(mesh, "")
    return ("", *[name for name, size in mesh.items()
                  if size > 1 and per_node % (size * strides[name]) and per_node > 1])


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


def kind_title(scheme: str, grid: GridShape) -> str:
    """Name the kind of a grid: one of 3-D has several directions of more than one rank."""
    several = sum(size > 1 for size in grid.sizes) > 1
    return KIND_TITLES[scheme] if several or KIND_TITLES[scheme] != "3-D" else "one direction"


@cache
def list_grids(ranks: int) -> tuple[tuple[str, GridShape], ...]:
    """List the schemes and grids of so many ranks, each division of the work once.

    1 x P x 1 of 3-D is sequence-parallel 1-D, which takes no longer.
    """
    if ranks == 1:
        return (("1d", GridShape("x", (1,))),)
    found = []
    for scheme, several in PLANNED_SCHEMES.items():
        try:
            grids = find_scheme(scheme).grids(ranks)
        except ValueError:    # no square
            continue
        found += [(scheme, grid) for grid in grids if all(grid[name] > 1 for name in several)
                  and grid.get("y") != ranks]
    return tuple(found)
