"""Follow the blocks of A, B and C on all ranks through the recorded events of a product.

A picture can be drawn from the result, since each step is checked: the words of the blocks that
travel are those that the running code counts, each rank multiplies blocks that fit, with the
operations of its event, and each term of a sum is added once.
"""

from dataclasses import dataclass, replace
from typing import Iterator, Mapping, Sequence

from mm3d.arrays.blocks import block_lengths
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.schemes.matrix_product import GRADIENT_PRODUCTS, matrix_shapes
from mm3d.tracing.events import Collective, Gemm

GATHERS, REDUCTIONS = ("all_gather", "broadcast"), ("reduce_scatter", "reduce", "all_reduce")
MULTIPLY, KEEP = "multiply", "keep"


@dataclass(frozen=True)
class MatrixBlock:
    """Describe a block of a matrix, and the rank that it comes from; None for a term of a sum."""

    owner: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Travel:
    """Describe a block that travels from one rank to another."""

    source: int
    target: int
    block: MatrixBlock


# By matrix: A, B, C, and dA and dB of backward.
HeldBlocks = Mapping[str, tuple[MatrixBlock, ...]]


@dataclass(frozen=True)
class ReplayStep:
    """Describe one collective, or one multiplication, of all ranks."""

    # One of `mm3d.grid.axis.COLLECTIVES`, "multiply", or "keep": what ranks store at the end.
    kind: str
    matrix: str    # the matrix that moves, or the result: "A", "B", "C", "dA", "dB", "dC"
    direction: str
    result: str    # the result that the step is for: "C", "dA" or "dB"
    words: tuple[int, ...]    # words that each rank counts, as `mm3d.grid.axis.Traffic` says
    travels: tuple[Travel, ...]
    held: tuple[HeldBlocks, ...]    # by rank, the blocks after the step, by matrix


@dataclass(frozen=True)
class Recorded:
    """Describe an event of one rank, with the operand that it moves, and its words."""

    event: Gemm | Collective
    operand: str
    words: int


class Replay:
    """Follow the blocks of all ranks through the events of a product, whose M, N, K are `shape`.

    `layouts` has layout and global shape of "A", "B" and "C"; rows may be (batch, positions).
    """

    def __init__(self, form: str, grid: GridShape,
                 layouts: Mapping[str, tuple[Layout, tuple[int, ...]]],
                 shape: tuple[int, int, int]) -> None:
        self.form, self.grid, self.layouts = form, grid, layouts
        self.shapes = matrix_shapes(form, shape)
        self.coords = [*grid.all_coordinates()]
        ranks = range(grid.ranks)
        self.held: list[dict[str, tuple[MatrixBlock, ...]]] = []    # of the steps so far
        self.operands: list[dict[str, tuple[MatrixBlock, ...]]] = [{} for _ in ranks]
        # By rank: blocks of a result, each with the terms of its sums that are in it.
        self.terms: list[dict[MatrixBlock, frozenset[int]]] = [{} for _ in ranks]

    def block(self, rank: int, name: str) -> MatrixBlock:
        """Return the block of a matrix, or of its gradient, that a rank stores."""
        layout, whole = self.layouts[name[-1]]
        place = layout.slices(self.grid, whole, self.coords[rank])
        rows = place[whole[:-1].index(max(whole[:-1]))]
        empty = any(one.start == one.stop for one in place)
        return MatrixBlock(rank, (0, 0) if empty else (rows.start, rows.stop),
                           (0, 0) if empty else (place[-1].start, place[-1].stop))

    def stored(self, names: str) -> tuple[HeldBlocks, ...]:
        """Return what each rank stores of these matrices."""
        return tuple({name: (self.block(rank, name),) for name in names}
                     for rank in range(self.grid.ranks))

    def steps(self, recorded: list[tuple[Recorded, ...]], backward: bool) -> Iterator[ReplayStep]:
        """Iterate over the steps of C, or of dA and dB, of events as every rank recorded them.

        Raises RuntimeError when blocks and events do not agree.
        """
        results = (("dA", "dB"), GRADIENT_PRODUCTS[self.form]) if backward else (
            ("C",), ((self.form, "AB"),))
        self.held = [dict(one) for one in self.stored("ABC" if backward else "AB")]
        products = sum(isinstance(one[0].event, Gemm) for one in recorded) // len(results[0])
        waiting = iter([*recorded, None])
        events = next(waiting)
        for result, (form, names) in zip(*results):
            left = products
            while events and (left or _sums(events[0], result)):
                yield self._step(events, result, form, names)
                left -= isinstance(events[0].event, Gemm)
                events = next(waiting)
            for rank, terms in enumerate(self.terms):
                _require(not terms and self.held[rank].get(result, ()) == self._own(rank, result),
                         f"rank {rank} holds another block of {result} than it stores")
        _require(events is None, "events are left")
        words = (0,) * self.grid.ranks
        yield ReplayStep(KEEP, "", "", results[0][-1], words, (), tuple(
            one | {name: self._own(rank, name) for name in results[0]}
            for rank, one in enumerate(self.stored("ABC" if backward else "AB"))))

    def _own(self, rank: int, name: str) -> tuple[MatrixBlock, ...]:
        own = self.block(rank, name)
        return (own,) if own.size else ()

    def _step(self, events: tuple[Recorded, ...], result: str, form: str,
              names: str) -> ReplayStep:
        event, words = events[0].event, tuple(one.words for one in events)
        travels: list[Travel] = []
        if isinstance(event, Gemm):
            kind, matrix, direction = MULTIPLY, result, ""
            for rank, one in enumerate(events):
                self._multiply(rank, one.event.flops, form, names)
        else:
            kind, direction, matrix = event.kind, event.direction, events[0].operand
            _require({(one.event.kind, one.event.direction, one.operand) for one in events}
                     == {(kind, direction, matrix)}, "ranks make different calls")
            for line in self._lines(direction):
                if kind in GATHERS:
                    travels += self._gather(line, kind, matrix, words)
                else:
                    travels += self._reduce(line, kind, result, words)
            matrix = result if kind in REDUCTIONS else "d" * (
                matrix == "C" and result != "C") + matrix
        # The extent that is summed over.
        self._settle(result, self.shapes[names[0]][0 if form == "atb" else 1])
        return ReplayStep(kind, matrix, direction, result, words,
                          tuple(one for one in travels if one.block.size),
                          tuple(map(dict, self.held)))

    def _lines(self, direction: str) -> Iterator[list[int]]:
        """Iterate over the lines of ranks along a direction."""
        for coords in self.coords:
            if coords[direction] == 0:
                yield [self.grid.rank({**coords, direction: at})
                       for at in range(self.grid[direction])]

    def _gather(self, line: list[int], kind: str, name: str,
                words: tuple[int, ...]) -> Iterator[Travel]:
        """Give the ranks of a line the blocks of all of them, or of the one that broadcasts."""
        blocks = {rank: self.block(rank, name) for rank in line}
        # The one that broadcasts receives nothing.
        sources = line if kind == "all_gather" else [
            next((rank for rank in line if words[rank] == 0 and blocks[rank].size), line[0])]
        for rank in line:
            new = [blocks[source] for source in sources if source != rank]
            _require(words[rank] == sum(one.size for one in new),
                     f"rank {rank} counts {words[rank]} words of {name}")
            self.operands[rank][name] = tuple(blocks[source] for source in sources)
            self.held[rank][name] = (*self._own(rank, name), *new)
            yield from (Travel(one.owner, rank, one) for one in new)

    def _multiply(self, rank: int, flops: int, form: str, names: str) -> None:
        """Multiply the operands of a rank, and add the product to its term of that block."""
        (x_rows, x_columns), (y_rows, y_columns) = (
            _joined(self.operands[rank].get(name, (self.block(rank, name),))) for name in names)
        rows, inner, columns, other = {
            "ab": (x_rows, x_columns, y_columns, y_rows),
            "abt": (x_rows, x_columns, y_rows, y_columns),
            "atb": (x_columns, x_rows, y_columns, y_rows)}[form]
        block = MatrixBlock(None, rows, columns)
        _require(inner == other and flops == 2 * block.size * (inner[1] - inner[0]),
                 f"rank {rank} multiplies blocks of {names} that do not fit")
        before = self.terms[rank].pop(block, frozenset())
        self.terms[rank][block] = _united([before, frozenset(range(*inner))])

    def _reduce(self, line: list[int], kind: str, name: str,
                words: tuple[int, ...]) -> Iterator[Travel]:
        """Sum the last terms of the ranks of a line; each, or one, gets its block of the sum."""
        blocks, terms = zip(*(self.terms[rank].popitem() for rank in line))
        block, inner = blocks[0], _united(terms)
        _require({*blocks} == {block}, "terms of different blocks")
        if kind == "reduce_scatter":
            goals = {rank: replace(self.block(rank, name), owner=None) for rank in line}
            count = [block.size - goals[rank].size for rank in line]
        elif kind == "all_reduce":
            goals = dict.fromkeys(line, block)
            count = [2 * (block.size - own) for own in block_lengths(block.size, len(line))]
        else:
            root = next(rank for rank in line if words[rank] == 0)
            goals = {root: block}
            count = [block.size * (rank != root) for rank in line]
        _require([words[rank] for rank in line] == count, f"ranks {line} count other words")
        for rank, goal in goals.items():
            own = self.terms[rank].get(goal, frozenset())
            self.terms[rank][goal] = _united([own, inner])
            yield from (Travel(source, rank, goal) for source in line if source != rank)

    def _settle(self, result: str, whole: int) -> None:
        """Turn sums of `whole` terms into blocks of the result, and show the others."""
        for rank, terms in enumerate(self.terms):
            ready = [block for block, inner in terms.items() if len(inner) == whole]
            self.terms[rank] = {one: inner for one, inner in terms.items() if len(inner) < whole}
            done = [one for one in self.held[rank].get(result, ()) if one.owner is not None]
            found = (*done, *(replace(one, owner=rank) for one in ready if one.size),
                     *self.terms[rank])
            self.held[rank][result] = found


def _sums(one: Recorded, result: str) -> bool:
    """Return whether an event sums terms of a result."""
    return (isinstance(one.event, Collective) and one.event.kind in REDUCTIONS
            and one.operand == result[-1])


def _joined(blocks: tuple[MatrixBlock, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and columns of the block that `blocks` cover without a gap."""
    blocks = tuple(one for one in blocks if one.size) or blocks[:1]
    rows, columns = ((min(one[0] for one in ends), max(one[1] for one in ends))
                     for ends in ([one.rows for one in blocks], [one.columns for one in blocks]))
    _require(MatrixBlock(None, rows, columns).size == sum(one.size for one in blocks),
             "gathered blocks leave gaps")
    return rows, columns


def _united(parts: Sequence[frozenset[int]]) -> frozenset[int]:
    """Return all terms of a sum; each is added once."""
    found = frozenset().union(*parts)
    _require(len(found) == sum(map(len, parts)), "a term is added twice")
    return found


def _require(fits: bool, problem: str) -> None:
    """Raise RuntimeError with `problem` unless blocks and events agree."""
    if not fits:
        raise RuntimeError(f"the blocks do not follow the events: {problem}")
