"""The few numbers that stand for many samples: of products, of collectives, of links."""

import itertools
import math
from typing import Sequence

import msgspec
import numpy as np

from bench import model
from bench.seconds import copies_nothing, link_level
from mm3d.choice import in_place

Shape = tuple[int, int, int]


class Fit(msgspec.Struct, frozen=True):
    """Products by shape: seconds of one of no size, the rate, what its edges cost, and the
    relative errors of the fit at the shapes that were measured."""

    start: float
    rate: float
    half: tuple[float, float, float]
    shapes: list[Shape]
    errors: list[float]

    @property
    def deviations(self) -> dict[str, float]:
        """What was measured over the fit, as `bench.model.Machine` has it."""
        return {"x".join(map(str, shape)): 1 / (1 + error)
                for shape, error in zip(self.shapes, self.errors)}


def products(times: dict[Shape, float]) -> Fit:
    """seconds = start + flops / rate (1 + sum of half / edge / 3), of least relative squares."""
    shapes = np.array(list(times), float)
    took = np.array(list(times.values()))
    m, n, k = shapes.T
    terms = np.stack([np.ones(len(took)), 2 * m * n * k, n * k, m * k, m * n], axis=1)
    found = nonnegative(terms / took[:, None], np.ones(len(took)), needed=1)
    rate, half = 1 / found[1], found[2:]
    if (shapes == shapes[:, :1]).all():    # squares do not tell one edge from another
        half = np.full(3, half.mean())
    errors = terms @ found / took - 1
    return Fit(float(found[0]), float(rate), tuple((1.5 * rate * half).tolist()), list(times),
               errors.tolist())


def nonnegative(A: np.ndarray, b: np.ndarray, needed: int | None = None) -> np.ndarray:
    """The c >= 0 that makes |A c - b| least: the best of all choices of columns, of those that
    have the column `needed` if there is one, whose c is greater than 0."""
    best, least = np.zeros(A.shape[1]), np.inf
    for count in range(1, A.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(A.shape[1]), count)):
            if needed not in (None, *chosen):
                continue
            c = np.linalg.lstsq(A[:, chosen], b, rcond=None)[0]
            residual = np.linalg.norm(A[:, chosen] @ c - b)
            good = (c >= 0).all() and (needed is None or c[chosen.index(needed)] > 0)
            if good and residual < least:
                best, least = np.zeros(A.shape[1]), residual
                best[chosen] = c
    return best


def line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """alpha and beta of seconds = alpha + beta sizes, and the largest relative error.

    The squares of *relative* errors are the least, so that small sizes count as much as large
    ones; neither is negative.
    """
    weighted = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(weighted, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0 or beta < 0:
        keep = 1 if alpha < 0 else 0
        column = weighted[:, keep]
        only = column.sum() / (column @ column)
        alpha, beta = (0.0, only) if keep else (only, 0.0)
    return float(alpha), float(beta), float(np.abs((alpha + beta * sizes) / seconds - 1).max())


def in_places(transports: str, kinds: Sequence[str]) -> np.ndarray:
    """Whether collectives leave their result in place, (direction, kind), with a transport of
    each direction."""
    return np.array([[kind in in_place(name) for kind in kinds] for name in transports.split()])


def links(lines: list[model.Line], per_node: int, transport: str) -> dict[str, model.Level]:
    """The links inside a node and between nodes, as far as `lines` use them.

    They are for collectives that were not measured, of which a program gathers about as many as
    it scatters: the mean of the fits of both along the longest line.  The bandwidth is of those
    that copy: by `transport` a gather may be a meeting.
    """
    found: dict[str, model.Level] = {}
    for one in sorted(lines, key=lambda one: one.size):
        pair = [other for other in lines if other.key in (
            (kind, one.size, one.stride, False) for kind in ("all_gather", "reduce_scatter"))]
        level, times = link_level(one.size, one.stride, per_node)
        idle = copies_nothing(transport) if level == "node" else ()
        alpha = float(np.mean([other.alpha for other in pair]))
        beta = float(np.mean([other.beta for other in pair if other.kind not in idle]))
        found[level] = model.Level(alpha / math.ceil(math.log2(one.size)),
                                   times * (one.size - 1) / one.size / max(beta, 1e-15))
    return found
