"""List the ways to divide a training of a GPT among GPUs."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Iterator, NamedTuple

from bench.prediction.machine_model import Machine
from bench.prediction.model_file import GptFile
from bench.prediction.pipeline_model import PipelineModel
from mm3d.grid.layout import divided_directions, without_faces
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.training.schedules import build

# Each with the directions of more than one rank: without, a grid is another scheme's.
SCHEMES = {"1d": "x", "1d-sp": "x", "2d": "xy", "2.5d": "xyz", "3d": ""}
TITLES = {"1d": "1-D", "1d-sp": "1-D", "2d": "2-D", "2.5d": "2.5-D", "3d": "3-D"}
POLICIES = ("none", "selective", "full")
FEW_GPUS = 1024     # on more of them, the ranks of a stage are those of `MOST_NODES` at most
MOST_NODES = 8
MOST_CHUNKS = 6     # of a rank, where stages are interleaved
MOST_ACTIONS = 2 ** 15    # micro-batches x chunks of all stages: what the clock times in seconds


class Choice(NamedTuple):
    """A plan: what divides a training, in the terms of `mm3d.config.Division`.

    `micro` is the number of sequences of a micro-batch, `grid` the shape of a stage's grid.
    """

    data: int
    zero: int
    stages: int
    schedule: str
    micro: int
    scheme: str
    grid: GridShape
    recompute: str

    @property
    def places(self) -> int:
        """Return the ranks of a stage."""
        return self.grid.ranks

    @property
    def chunks(self) -> int:
        """Return the chunks of layers on a rank."""
        return int(self.schedule.partition(":")[2] or 1)

    @property
    def family(self) -> str:
        """Name the kinds of parallelism beside replicas; or the kind of replicas."""
        if self.places == self.stages == 1:
            return "data, ZeRO 3" if self.zero == 3 else "data"
        parts = [TITLES[self.scheme]] * (self.places > 1) + ["pipeline"] * (self.stages > 1)
        return " + ".join(parts)


@dataclass(frozen=True)
class Training:
    """What is trained, and on how many GPUs of a machine.

    Attributes
    ----------
    gpt : GptFile
        The model; its sequences are as long as `seq` says.
    gpus, batch, seq : int
        GPUs in all; sequences of a step, of all replicas; tokens in a sequence.
    dtype : str
        Type of values and activations.
    machine : Machine
        The machine.
    """

    gpt: GptFile
    gpus: int
    batch: int
    seq: int
    dtype: str
    machine: Machine

    def microbatches(self, choice: Choice) -> int:
        """Return the micro-batches of a replica."""
        return self.batch // (choice.data * choice.micro)

    def stack(self, batch: int, recompute: str, layers: int | None = None) -> Stack:
        """Return the layers, for so many sequences."""
        gpt = self.gpt
        return Stack(layers=layers or gpt.layers, hidden=gpt.hidden, heads=gpt.heads, batch=batch,
                     seq=self.seq, dtype=self.dtype, causal=True, recompute=recompute)

    def model(self, choice: Choice) -> PipelineModel:
        """Return the model that a plan is of, for exact predictions."""
        schedule = build(choice.schedule, choice.stages, self.microbatches(choice))
        return PipelineModel(
            schedule, choice.scheme, (choice.grid,) * choice.stages,
            self.stack(self.batch // choice.data, choice.recompute), data=choice.data,
            zero=choice.zero, vocab=self.gpt.vocab, tied=self.gpt.tied, named=choice.schedule)

    @property
    def most_places(self) -> int:
        """Return the largest number of ranks of a stage that is considered."""
        most = MOST_NODES * self.machine.ranks_per_node
        return self.gpus if self.gpus <= FEW_GPUS else min(self.gpus, most)

    def shapes(self) -> Iterator[tuple[str, GridShape]]:
        """List the schemes and grids of a stage."""
        for places in divisors(self.gpus):
            if places <= self.most_places:
                yield from ((scheme, grid) for scheme, grid in list_grids(places)
                            if self._divides(scheme, grid))

    def _divides(self, scheme: str, grid: GridShape) -> bool:
        """Return whether a grid divides the weights and the heads evenly."""
        inner = find_scheme(scheme).layouts(grid, grid.ranks, self.seq)[1]
        columns = grid.ranks_along(divided_directions(without_faces(inner[1])))
        return self.gpt.hidden % grid.ranks == self.gpt.heads % columns == 0

    def meshes(self, places: int) -> Iterator[tuple[int, int]]:
        """List the numbers of replicas and of stages for stages of so many ranks."""
        rest = self.gpus // places
        for data in divisors(math.gcd(rest, self.batch)):
            if rest // data <= self.gpt.layers:
                yield data, rest // data

    def divides_rows(self, scheme: str, grid: GridShape, micro: int) -> bool:
        """Return whether a grid divides the sequences of a micro-batch, or their positions."""
        for rows in (one[0] for one in find_scheme(scheme).layouts(grid, micro, self.seq)):
            sequences, _, positions = without_faces(rows).partition(",")
            if micro % grid.ranks_along(sequences) or self.seq % grid.ranks_along(positions):
                return False
        return True

    def schedules(self, stages: int, microbatches: int) -> Iterator[str]:
        """List the schedules of so many stages and micro-batches."""
        if stages * microbatches > MOST_ACTIONS:
            return
        yield "1f1b"
        if stages == 1 or microbatches == 1:
            return
        yield "zb-h1"
        layers = self.gpt.layers
        if microbatches % stages == 0:
            for chunks in range(2, MOST_CHUNKS + 1):
                if (layers % (stages * chunks) == 0
                        and stages * chunks * microbatches <= MOST_ACTIONS):
                    yield f"interleaved:{chunks}"


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


@cache
def list_grids(ranks: int) -> tuple[tuple[str, GridShape], ...]:
    """List the schemes and grids of so many ranks, each division of the work once."""
    if ranks == 1:
        return (("1d", GridShape("x", (1,))),)
    found = []
    for scheme, several in SCHEMES.items():
        try:
            grids = find_scheme(scheme).grids(ranks)
        except ValueError:    # no square
            continue
        found += [(scheme, grid) for grid in grids if all(grid[name] > 1 for name in several)]
    return tuple(found)
