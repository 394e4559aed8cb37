"""Fit a few parameters to measured products, collectives and links."""

import math
from dataclasses import dataclass

import numpy as np

from bench.least_squares import solve_nonnegative
from bench.prediction import machine_model
from bench.prediction.seconds import uncopied_collectives, link_level

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ProductFit:
    """Fitted seconds of a product m x n by n x k.

    Attributes
    ----------
    start : float
        Seconds of a product of no size.
    rate : float
        Operations a second of large products.
    half : tuple of float
        Half sizes of m, n and k, as in `bench.prediction.machine_model.Machine`.
    shapes, errors : list
        The measured shapes, and the relative error of the fit at each.
    """

    start: float
    rate: float
    half: tuple[float, float, float]
    shapes: list[Shape]
    errors: list[float]

    @property
    def deviations(self) -> dict[str, float]:
        """Return measured over fitted seconds by shape, as `Machine.gemm_deviations`."""
        return {"x".join(map(str, shape)): 1 / (1 + error)
                for shape, error in zip(self.shapes, self.errors)}


def fit_products(times: dict[Shape, float]) -> ProductFit:
    """Fit seconds = start + flops / rate (1 + sum(half / edge) / 3) by least relative squares."""
    shapes = np.array(list(times), float)
    took = np.array(list(times.values()))
    m, n, k = shapes.T
    terms = np.stack([np.ones(len(took)), 2 * m * n * k, n * k, m * k, m * n], axis=1)
    found = solve_nonnegative(terms / took[:, None], np.ones(len(took)), needed=1)
    rate, half = 1 / found[1], found[2:]
    if (shapes == shapes[:, :1]).all():    # squares do not tell one edge from another
        half = np.full(3, half.mean())
    errors = terms @ found / took - 1
    return ProductFit(float(found[0]), float(rate), tuple((1.5 * rate * half).tolist()),
                      list(times), errors.tolist())


def fit_links(lines: list[machine_model.Line], per_node: int,
              transport: str) -> dict[str, machine_model.Level]:
    """Fit the links inside a node and between nodes, as far as `lines` use them.

    The links predict collectives that were not measured.  The fits of all-gather and
    reduce-scatter along the longest line are averaged, as a program calls both about as often.
    Only collectives that copy give the bandwidth: in shared memory a gather is only a barrier.
    """
    found: dict[str, machine_model.Level] = {}
    for one in sorted(lines, key=lambda one: one.size):
        pair = [other for other in lines if other.key in (
            (kind, one.size, one.stride, False) for kind in ("all_gather", "reduce_scatter"))]
        level, times = link_level(one.size, one.stride, per_node, transport)
        idle = uncopied_collectives(transport) if level == "node" else ()
        alpha = float(np.mean([other.alpha for other in pair]))
        beta = float(np.mean([other.beta for other in pair if other.kind not in idle]))
        found[level] = machine_model.Level(alpha / math.ceil(math.log2(one.size)),
                                           times * (one.size - 1) / one.size / max(beta, 1e-15))
    return found
