"""Plans by closed forms: what a scheme on a grid takes, without running anything.

Words are exact; flops, elementwise work and memory follow from the sizes of the blocks.
"""

import math
from functools import cache
from typing import Iterator

import msgspec
import numpy as np

import mm3d
from bench import model
from mm3d import cost, dry
from mm3d.recompute import policy

Sizes = dict[str, int]


class Plan(msgspec.Struct):
    """A scheme on a grid and what is expected of it.

    Attributes
    ----------
    scheme, grid : str, tuple of int
        Which.
    forward, backward : float
        Predicted seconds.
    words : dict of str to float
        Words moved in each phase, the mean over the ranks (exact).
    over_bound : float
        Words of the products forward over the least possible.
    memory : float
        Most bytes at one time on rank 0.
    fits : bool
        Whether that is no more than a rank of the machine has.
    traced : bool
        Whether seconds and memory are from a dry run and not from the closed forms.
    """

    scheme: str
    grid: tuple[int, ...]
    forward: float
    backward: float
    words: dict[str, float]
    over_bound: float
    memory: float
    fits: bool
    traced: bool = False

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.forward + self.backward

    @property
    def order(self) -> tuple[bool, float]:
        """What fits first, then by seconds."""
        return not self.fits, self.seconds


def products(hidden: int) -> list[tuple[str, int, int]]:
    """Way, rows and columns of the weights of a layer's four products."""
    h = hidden
    return [("into", h, 3 * h), ("back", h, h), ("into", h, 4 * h), ("back", 4 * h, h)]


def over_bound(name: str, grid: dict[str, int], sizes: Sizes) -> float:
    """Words of the layers' products forward over their lower bound; nan where that is 0."""
    ranks, M = math.prod(grid.values()), sizes["batch"] * sizes["seq"]
    moved = least = 0.0
    for way, N, K in products(sizes["hidden"]):
        moves = mm3d.SCHEMES[name].product_moves(grid, way, M, N, K)[0]
        moved += sum(m.words for m in moves if grid[m.axis] > 1) / ranks
        least += cost.lower_bound(M, N, K, ranks)
    return moved / least if least > 0 else math.nan


@cache
def elementwise() -> tuple[np.ndarray, np.ndarray]:
    """Words read and written by elementwise work in a layer, forward and backward.

    Each is linear in the elements of an outer activation, of an inner one and of the scores on a
    rank; the three coefficients are solved from three small dry runs.
    """
    rows, found = [], {phase: [] for phase in dry.PHASES}
    for ranks, seq in ((1, 64), (4, 64), (1, 128)):
        trace = dry.step("1d", ranks, layers=1, hidden=256, heads=4, batch=4, seq=seq)
        outer = 4 * seq * 256
        rows.append((outer, outer / ranks, 4 * 4 * seq * seq / ranks))
        for phase in dry.PHASES:
            moved = sum(e.bytes * n for e, n in trace.of(dry.Pass, phase).items())
            found[phase].append(moved / 4)
    return tuple(np.linalg.solve(np.array(rows), np.array(found[phase]))
                 for phase in dry.PHASES)


def _directions(name: str, grid: tuple[int, ...]) -> tuple[int, int, int]:
    """Into how many parts rows, the features outside and those inside are divided: the sizes
    X, Z and Y of the 3-D grid whose local products are the same."""
    if name == "3d":
        return grid[0], grid[2], grid[1]
    if name == "2d":
        return grid[0], grid[1], grid[1]
    return 1, 1, grid[0]


def _local_gemms(name: str, grid: tuple[int, ...], sizes: Sizes,
                 dtype: str) -> Iterator[tuple[int, dry.Gemm]]:
    """The products of rank 0 in a layer forward, those of attention last."""
    X, Z, Y = _directions(name, grid)
    h, heads, seq = sizes["hidden"], sizes["heads"], sizes["seq"]
    rows = -(-sizes["batch"] * seq // X)
    own = -(-heads // Y)
    wide = {h: own * (h // heads), 3 * h: 3 * own * (h // heads), 4 * h: -(-4 * h // Y)}
    times = grid[0] if name == "2d" else 1
    for way, N, K in products(h):
        n, k = (-(-N // Z), wide[K]) if way == "into" else (wide[N], -(-K // Z))
        # Each of SUMMA's turns multiplies one block of the inner dimension.
        n = n if name != "2d" or way == "back" else -(-N // grid[0])
        yield times, dry.Gemm(1, rows, n, k, dtype)
    queries = max(1, rows // Z // max(1, sizes["batch"] // (X * Z)))
    pairs = -(-rows // Z // queries) * own
    yield 1, dry.Gemm(2 * pairs, queries, h // heads, seq, dtype)


def screen(name: str, grid: tuple[int, ...], machine: model.Machine, dtype: str,
           recompute: str, sizes: Sizes) -> Plan:
    """The plan of a scheme on a grid by the closed forms."""
    letters = mm3d.SCHEMES[name].directions
    shape, ranks = dict(zip(letters, grid)), math.prod(grid)
    size = np.dtype(dtype).itemsize
    rest = {key: sizes[key] for key in ("layers", "hidden", "batch", "seq")}
    moves = cost.transformer_moves(name, shape, **rest, recompute=recompute)
    words = {phase: sum(m.words for m in found.values()) / ranks
             for phase, found in moves.items()}
    strides = {c: math.prod(grid[i + 1:]) for i, c in enumerate(letters)}
    spent = {phase: dict.fromkeys(model.TERMS, 0.0) for phase in dry.PHASES}
    for phase, found in moves.items():
        for (axis, kind), move in found.items():
            g = shape[axis]
            whole = move.words / ranks * size * g / (g - 1) / move.calls
            whole /= 2 if kind == "all_reduce" else 1
            event = dry.Collective(kind, axis, g, strides[axis], whole)
            for term, value in model.collective_terms(machine, event).items():
                spent[phase][term] += move.calls * value
    gemms = list(_local_gemms(name, grid, sizes, dtype))
    per_layer = sum(times * model.gemm_seconds(machine, gemm) for times, gemm in gemms)
    attention = model.gemm_seconds(machine, gemms[-1][1])
    spent["forward"]["gemm"] = sizes["layers"] * per_layer
    again = (cost.flops_again(**sizes, recompute=recompute)
             / cost.flops(**sizes)["forward"])
    spent["backward"]["gemm"] = sizes["layers"] * ((2 + again) * per_layer + attention / 2)
    local = local_elements(name, grid, sizes)
    for phase, coefficients in zip(dry.PHASES, elementwise()):
        spent[phase]["memory"] = (sizes["layers"] * size * float(coefficients @ local)
                                  / machine.memory_bandwidth)
    # Elementwise work is done again with every policy, twice where two are joined.
    chosen = policy(recompute)
    spent["backward"]["memory"] += (bool(chosen.every) + chosen.selective
                                    ) * spent["forward"]["memory"]
    seconds = {phase: model.seconds(machine, spent[phase]) for phase in dry.PHASES}
    memory = size * cost.peak_words(name, shape, **sizes, recompute=recompute)
    return Plan(name, grid, seconds["forward"], seconds["backward"], words,
                over_bound(name, shape, sizes), memory, memory <= machine.memory_bytes)


def local_elements(name: str, grid: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Elements of an outer and an inner activation and of the scores, on a rank."""
    ranks, h, heads = math.prod(grid), sizes["hidden"], sizes["heads"]
    whole = sizes["batch"] * sizes["seq"] * h
    outer = whole if name == "1d" else whole / ranks
    parts = _directions(name, grid)[2]
    uneven = -(-heads // parts) * parts / heads
    scores = sizes["batch"] * heads * sizes["seq"] ** 2 / ranks
    return np.array([outer, whole / ranks * uneven, scores * uneven])
