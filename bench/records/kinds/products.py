"""Derive the bounds of distributed products of one shape, and their closed forms."""

import math
from typing import Sequence

import numpy as np

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.schemes.matrix_product import FORMS
from mm3d.schemes.products_alone import algorithms_with_products

NOT_STATED = -1    # the closed form of an algorithm that has none


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds and closed forms of each product, and the lower bounds of words."""
    chosen, ranks = record.configuration, len(record.scales["rank"])
    form, shape = chosen["form"], tuple(chosen[name] for name in "MNK")
    words = record.raw["memory_alone"].values / np.dtype(chosen["dtype"]).itemsize
    grids = record_grids(record.scales["scheme"], chosen["grids"])
    return {
        "seconds": Variable(medians(record.raw["samples"].values), "s", ("scheme", *BOUND)),
        "closed_form_words": Variable(np.array([
            closed_form_words(name, form, sizes, shape) for name, sizes in grids.items()]),
            "1", ("scheme",)),
        "least_words": Variable(np.array(cost.lower_bound(*shape, ranks)), "1", ()),
        "least_words_with_memory": Variable(np.array([
            cost.lower_bound_with_memory(*shape, ranks, each) for each in words]),
            "1", ("scheme",))}


def closed_form_words(name: str, form: str, sizes: GridShape, shape: tuple[int, int, int]) -> int:
    """Return the words of all ranks by the closed form; `NOT_STATED` if there is none."""
    product = algorithms_with_products()[name].matrix_product
    moves = product.forward_moves(sizes, form, shape)
    return NOT_STATED if moves is None else sum(move.words for move in moves)


def record_grids(names: Sequence[str], grids: str) -> dict[str, GridShape]:
    """Return the grid of each scheme of a record, from its setting "grids"."""
    return {name: GridShape.parse(text, algorithms_with_products()[name].directions)
            for name, text in zip(names, grids.split(), strict=True)}


def mean_words(total: float, ranks: int) -> float:
    """Return the words of a rank in the mean; NaN for `NOT_STATED`."""
    return math.nan if total == NOT_STATED else total / ranks


def copied_operands(name: str, form: str, sizes: GridShape, phase: str = "forward") -> list[str]:
    """List the operands of which an algorithm has copies before a phase, as no bound assumes.

    None of an algorithm or a form that is unknown, as a file may name any.
    """
    cls = algorithms_with_products().get(name)
    if not cls or form not in FORMS:
        return []
    return [matrix for matrix in ("AB" if phase == "forward" else "ABC")
            if cls.matrix_product.copied_along(sizes, form, matrix)]
