"""Distributed products of one shape on the same ranks: seconds, counts, closed forms, bounds."""

import math
from typing import Sequence

import numpy as np

from bench.document import Column, Notes, Part, Table, make_table, spread
from bench.records.kinds import Derived, each, medians, named, require_as_many
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import describe_cluster, largest_error
from bench.statistics import median_interval
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.schemes import algorithms_with_products

SCHEMAS = {
    "products": {
        "verified": True,
        "positive": "memory_alone samples seconds",
        "environment": "ranks cores cpu_model mpi",
        "settings": "K M N dtype form grids in_turns left_out transport",
        "variables": {
            "memory": "scheme rank", "memory_alone": "scheme", "messages": "scheme rank",
            "operations": "scheme rank", "rounds": "scheme rank", "samples": "scheme repetition",
            "stored": "scheme rank", "words": "scheme rank"},
        "derived": {
            "closed_form_words": "scheme", "least_words": "",
            "least_words_with_memory": "scheme", "seconds": "scheme bound"}}}


def derive(record: Measurements) -> Derived:
    """Return seconds and closed forms of each product, and the lower bounds of words."""
    chosen, ranks = record.configuration, len(record.scales["rank"])
    form, shape = chosen["form"], tuple(chosen[name] for name in "MNK")
    words = record.raw["memory_alone"].values / np.dtype(chosen["dtype"]).itemsize
    grids = record_grids(record.scales["scheme"], chosen["grids"])
    return {
        "seconds": (medians(record.raw["samples"].values), "s"),
        "closed_form_words": (np.array([
            closed_form_words(name, form, sizes, shape) for name, sizes in grids.items()], float),
            "1"),
        "least_words": (cost.lower_bound(*shape, ranks), "1"),
        "least_words_with_memory": (
            [cost.lower_bound_with_memory(*shape, ranks, each) for each in words], "1")}


def check_texts(run: Measurements) -> None:
    """Check that each product has a grid with a size for each of its directions."""
    grids = str(run.configuration["grids"]).split()
    require_as_many("configuration/grids", grids, run.scales["scheme"], "scheme")
    products = algorithms_with_products()
    for name, grid in zip(run.scales["scheme"], grids):
        if name not in products:
            raise ValueError(f"measurements/scheme {name!r:.60} is none of {', '.join(products)}")
        named("configuration/grids", GridShape.parse, grid, products[name].directions)


def closed_form_words(name: str, form: str, sizes: GridShape,
                      shape: tuple[int, int, int]) -> float:
    """Return the words of all ranks by the closed form."""
    product = algorithms_with_products()[name].matrix_product
    return sum(move.words for move in product.forward_moves(sizes, form, shape))


def record_grids(names: Sequence[str], grids: str) -> dict[str, GridShape]:
    """Return the grid of each scheme of a record, from its setting "grids"."""
    return {name: GridShape.parse(text, algorithms_with_products()[name].directions)
            for name, text in zip(names, grids.split(), strict=True)}


def copied_operands(name: str, form: str, sizes: GridShape, phase: str = "forward") -> list[str]:
    """List the operands that a known algorithm stores in copies before a phase: no bound holds."""
    cls = algorithms_with_products().get(name)
    if not cls:
        return []
    layouts = dict(zip("ABC", map(Layout, cls.matrix_product.LAYOUTS[form])))
    return [matrix for matrix in ("AB" if phase == "forward" else "ABC")
            if copied_along(layouts[matrix], sizes)]


def copied_along(layout: Layout, sizes: GridShape) -> str:
    """Return the directions along which all ranks store the same block."""
    return "".join(direction for direction, size in sizes.items()
                   if size > 1 and direction not in layout.letters)


REFERENCE = "3d"    # others' seconds are compared with its; else with those of the first product
BALANCED = {"stored": "elements of A, B and C stored", "operations": "floating-point operations",
            "words": "words"}    # compared between ranks


@each
def tables(record: Measurements) -> list[Part]:
    """Make the tables of the products, of their balance, and of their ratios."""
    chosen, places = record.configuration, list_places(record, "scheme")
    title = (f"Products {chosen['form']} {chosen['M']} x {chosen['N']} x {chosen['K']} "
             f"{chosen['dtype']} on {len(record.scales['rank'])} ranks")
    turns = [_turns(record)] if chosen["in_turns"] and len(places) > 1 else []
    return [make_table(title, COLUMNS, places), make_table(
        "Balance of the ranks, counted", BALANCE, places), *turns,
        Notes("About these products:", _notes(record))]


def _grid(at: Place) -> GridShape:
    return record_grids(at.record.scales["scheme"], at["grids"])[at["scheme"]]


def _closed_form(at: Place) -> float:
    return at("closed_form_words") / len(at.record.scales["rank"])


def _same(at: Place) -> str:
    """Say whether the words of all ranks are the closed form's."""
    if math.isnan(_closed_form(at)):
        return "-"
    return "=" if at("words").sum() == at("closed_form_words") else "NO"


def _over_bound(at: Place) -> float:
    """Divide words by the bound for any memory; NaN where it is 0 or an operand has copies."""
    least = float(at("least_words"))
    holds = least > 0 and not copied_operands(at["scheme"], at["form"], _grid(at))
    return at("words").max() / least if holds else math.nan


def _over_bound_with_memory(at: Place) -> float:
    bound = at("least_words_with_memory")
    return at("words").max() / bound if bound > 0 else math.nan


def _balance(name: str, group: str) -> list[Column]:
    """Describe a quantity over the ranks: the least, the mean, the most."""
    def uneven(at: Place) -> float:
        return at(name).max() / at(name).mean() if at(name).any() else 1
    return [Column("least", "", group, of=lambda at: int(at(name).min())),
            Column("mean", "", group, of=lambda at: at(name).mean(), form=".1f"),
            Column("most", "", group, of=lambda at: int(at(name).max())),
            Column("most / mean", "", group, of=uneven, form=".3f")]


PRODUCT = [Column("", "product", of=lambda at: at["scheme"]),
           Column("", "grid", of=lambda at: str(_grid(at)))]
WORDS, OVER, PEAK = "words a rank", "over the bound", "peak memory a rank"
COLUMNS = [
    *PRODUCT, Column("counted", "", WORDS, of=lambda at: at("words").mean(), form=".1f"),
    Column("closed form", "", WORDS, of=_closed_form, form=".1f"),
    Column("same", "", WORDS, of=_same),
    Column("most", "", WORDS, of=lambda at: int(at("words").max())),
    Column("any memory", "", OVER, of=_over_bound, form=".3f"),
    Column("its memory", "", OVER, of=_over_bound_with_memory, form=".3f"),
    Column("messages", "a rank", of=lambda at: int(at("messages").max())),
    Column("rounds", of=lambda at: int(at("rounds").max())),
    Column("measured", "(KiB)", PEAK, of=lambda at: at("memory").max() / 1024, form=".1f"),
    Column("alone", "(KiB)", PEAK, of=lambda at: at("memory_alone") / 1024, form=".1f"),
    *spread(lambda at: 1e3 * at("seconds"), "#.4g", "time", units=("(ms)",) * 3)]
BALANCE = [*PRODUCT, *(column for name, group in BALANCED.items()
                       for column in _balance(name, group))]


def _turns(record: Measurements) -> Table:
    """Make the table of seconds over those of one product, from the ratios of all rounds."""
    names, samples = list(record.scales["scheme"]), record.values("samples")
    reference = names.index(REFERENCE) if REFERENCE in names else 0

    def ratio(at: Place) -> np.ndarray:
        return median_interval(at("samples") / samples[reference])
    return make_table(
        f"Seconds over those of {names[reference]}, ratios of {samples.shape[1]} rounds",
        [Column("product", of=lambda at: at["scheme"]), *spread(ratio, ".3f"),
         Column("confidence", of=lambda at: ratio(at).confidence, form=".1%")],
        [at for at in list_places(record, "scheme") if at.at["scheme"] != reference])


def _notes(record: Measurements) -> list[str]:
    """Explain the counts, times and closed forms, and what limits the times."""
    chosen, env = record.configuration, record.environment
    ranks, transport = len(record.scales["rank"]), chosen["transport"]
    shared = ", in which ranks that share an array count a part of it each" * bool(
        {"shared", "hierarchical"} & set(transport.split()))
    how = "in turns, in random order" if chosen["in_turns"] else "each alone"
    crowded = f"NOT SCALING RESULTS: {ranks} ranks take turns on {env['cores']} cores."
    return [
        *[crowded] * (ranks > env["cores"]),
        f"Words are counted from shapes by the bucket algorithm; \"=\": those of all ranks are "
        f"the closed form's. Verified, {largest_error(record.checks)}.",
        f"Bound for any memory: {float(record.values('least_words')):.1f} words of the busiest "
        "rank (Al Daas and others, 2022). Bound for its memory: MNK / (2 sqrt(2) P sqrt(S)) - S "
        "(Irony, Toledo and Tiskin, 2004) of S words, its peak alone. \"-\": with so much memory "
        "this says nothing, or an operand has copies before the product, which the bound for any "
        "memory excludes. Words over a bound are the busiest rank's.",
        "Messages, rounds and memory are the busiest rank's. Rounds are calls of collectives, one "
        "after another; a broadcast or a gather along q ranks takes more than one step of a "
        "network.",
        f"Peak memory is that of all arrays, with A, B and C: measured with transport {transport}"
        f"{shared}; alone: by dry runs, of ranks that share none.",
        f"Time: makespans a call, {len(record.scales['repetition'])} rounds, {how}; medians "
        f"between bounds of at least {record.values('seconds')[:, 3].min():.1%} confidence.",
        *[f"Left out: {chosen['left_out']}."] * bool(chosen["left_out"]),
        "; ".join(filter(None, [f"{env['cpu_model']}, {env['cores']} cores",
                                describe_cluster(env), env["mpi"]])) + "."]
