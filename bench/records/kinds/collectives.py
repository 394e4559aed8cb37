"""Bandwidths of collectives, the fit of their times, and the bytes that nodes must receive."""

import math
from typing import Sequence

import numpy as np

from bench.document import Column, Notes, Number, Part, make_table, number_cell
from bench.least_squares import fit_line
from bench.records.kinds import Derived, each, medians, require_as_many
from bench.records.measurements import Measurements, Place, grid_shape, list_places
from bench.records.notes import describe_machine
from mm3d.arrays.blocks import block_lengths
from mm3d.grid.shape import GridShape
from mm3d.transport.nodes import in_place_collectives, words_into_nodes

SCHEMAS = {
    "collectives": {
        "positive": "bandwidth samples seconds mpi_samples mpi_seconds wire_seconds",
        "settings": "dtype grid transport transports width",
        "needs": {
            "wire_received": "wire_sent wire_seconds wire_size emulated_cluster node_of_rank"},
        "variables": {
            "bytes_moved": "axis collective size",
            "ended_by_width": "axis collective size",
            "samples": "axis collective size repetition"},
        "optional": {
            "mpi_samples": "axis collective size mpi_repetition",
            "wire_received": "axis collective round way node",
            "wire_seconds": "axis collective round way",
            "wire_sent": "axis collective round way node"},
        "derived": {
            "alpha": "axis collective", "bandwidth": "axis collective size",
            "beta": "axis collective", "fit_error": "axis collective",
            "seconds": "axis collective size bound", "mpi_seconds": "axis collective size bound",
            "wire_least": "axis collective node"},
        "labels": {"way": [["grid", "mpi"]]}}}

# Shown instead of a bandwidth for a collective whose result is read in place.
IN_PLACE = {"all_gather": "copies nothing", "broadcast": "root copies"}
WAYS = {"grid": "by the grid's transport", "mpi": "by MPI's own algorithm"}


def derive(record: Measurements) -> Derived:
    """Return seconds, bus bandwidths, the fit alpha + beta n, and the least between nodes."""
    sizes = np.array(record.scales["size"], float)
    seconds = medians(record.raw["samples"].values)
    lines = np.array([fit_line(sizes, line) for line in seconds[..., 0].reshape(-1, len(sizes))])
    alpha, beta, error = np.moveaxis(lines.reshape(*seconds.shape[:2], 3), -1, 0)
    copies = ~left_in_place(record)[..., None]
    moved = record.raw["bytes_moved"].values
    found = {"seconds": (seconds, "s"), "alpha": (alpha, "s"), "beta": (beta, "s byte-1"),
             "bandwidth": (np.where(copies, moved / seconds[..., 0], np.nan), "byte s-1"),
             "fit_error": (error, "1")}
    if "mpi_samples" in record.raw:
        found["mpi_seconds"] = medians(record.raw["mpi_samples"].values), "s"
    if "wire_received" in record.raw:
        found["wire_least"] = _least_bytes(record), "byte"
    return found


def check_texts(run: Measurements) -> None:
    """Check that each direction has its transport."""
    require_as_many("configuration/transports", str(run.configuration["transports"]).split(),
                    run.scales["axis"], "axis")


def left_in_place(record: Measurements) -> np.ndarray:
    """Return which collectives leave their result in place, (axis, collective)."""
    return np.array([[kind in in_place_collectives(name) for kind in record.scales["collective"]]
                     for name in str(record.configuration["transports"]).split()])


def _least_bytes(record: Measurements) -> np.ndarray:
    """Compute the bytes of the largest array that nodes must receive, (axis, collective, node)."""
    chosen = record.configuration
    shape, item = grid_shape(chosen), np.dtype(chosen["dtype"]).itemsize
    nodes = [int(node) for node in record.environment["node_of_rank"].split()]
    return item * np.array([[least_words(shape, axis, kind, chosen["wire_size"] // item, nodes)
                             for kind in record.scales["collective"]]
                            for axis in record.scales["axis"]], float)


def least_words(shape: GridShape, axis: str, kind: str, words: int,
                nodes: Sequence[int]) -> list[int]:
    """Count the words that each node has to receive, for all lines of a direction.

    The ranks of each line gather or sum an array of `words` elements by a `kind` of
    `mm3d.grid.axis.COLLECTIVES`, with rank 0 of the line as its root.
    """
    into = [0] * (max(nodes) + 1)
    blocks = block_lengths(words, shape[axis])
    for coords in shape.all_coordinates():
        if coords[axis]:
            continue
        line = [nodes[shape.rank({**coords, axis: place})] for place in range(shape[axis])]
        known = list(dict.fromkeys(line))
        for node, count in zip(known, words_into_nodes(kind, blocks,
                                                       [known.index(node) for node in line])):
            into[node] += count
    return into


@each
def tables(record: Measurements) -> list[Part]:
    """Make the table of times, bandwidths and fits, and that of bytes between nodes, if any."""
    chosen, narrow = record.configuration, record.values("ended_by_width")
    plain = "mpi_seconds" in record.variables    # not of devices
    parts = [make_table(f"Collectives on {chosen['grid']} ranks, all lines at once",
                        _columns(record), list_places(record, "collective", "axis")),
             Notes("About these times:", [
                 "Bus bandwidth, as nccl-tests define it: the algorithm bandwidth, which is the "
                 "whole array over the time, times (P - 1) / P for all-gather, reduce-scatter and "
                 "all-to-all along P ranks, 2 (P - 1) / P for all-reduce, 1 for broadcast and "
                 "reduce: the bytes that a ring brings the busiest rank. Both at the best size. "
                 "Times and alpha are those of this library's calls, in Python"
                 + "; the plain call is mpi4py's, blocking, on buffers that are there" * plain
                 + ". The fit alpha + beta n is of relative least squares. Arrays are sent again "
                 "and again: those that fit the caches are read from there.",
                 *["In shared memory ranks read what is gathered or broadcast where it lies, "
                   "which is not timed: there is no bandwidth."] * bool(
                     left_in_place(record).any()),
                 f"{int(narrow.sum())} of {narrow.size} intervals are within "
                 f"{100 * chosen['width']:g} % of the median, the others ended by repetitions or "
                 f"seconds.", f"{describe_machine(record)}; transport {chosen['transport']}."])]
    return parts + (wire_parts(record) if "wire_least" in record.variables else [])


def _columns(record: Measurements) -> list[Column]:
    """Describe the table of times; with those of plain MPI calls where they were measured."""
    sizes, placed = np.array(record.scales["size"]), left_in_place(record)

    def copied(at: Place, value: float) -> float:
        return math.nan if placed[at.at["axis"], at.at["collective"]] else value

    def times(variable: str, places: Sequence[int], group: str) -> list[Column]:
        return [Column(_bytes(sizes[k]), "(us)", group, form=".0f",
                       of=lambda at, k=k: 1e6 * at(variable)[k, 0]) for k in places]

    def bus(at: Place) -> Number:
        return number_cell(copied(at, at("bandwidth").max() / 1e9), ".2f",
                           IN_PLACE.get(at["collective"], "-"))

    def within(at: Place) -> Number:
        return Number(at("fit_error"), f"{100 * at('fit_error'):.0f} %")
    return [
        Column("", "collective", of=lambda at: at["collective"]),
        Column("", "along", of=lambda at: at["axis"]),
        *times("seconds", range(len(sizes)), "median makespan by the size of the whole array"),
        Column("bus", "(GB/s)", "bandwidth", of=bus),
        Column("algorithm", "(GB/s)", "bandwidth", form=".2f",
               of=lambda at: copied(at, (sizes / at("seconds")[:, 0]).max() / 1e9)),
        Column("alpha", "(us)", "fit", form=".0f", of=lambda at: 1e6 * at("alpha")),
        Column("1 / beta", "(GB/s)", "fit", form=".2f", of=lambda at: copied(
            at, 1e-9 / at("beta") if at("beta") else math.nan)),
        Column("within", "", "fit", of=within),
        *(times("mpi_seconds", (0, -1), "plain MPI call")
          if "mpi_seconds" in record.variables else [])]


def wire_parts(record: Measurements) -> list[Part]:
    """Make the table of the bytes that collectives sent between nodes."""
    columns = [Column("", "collective", of=lambda at: at["collective"]),
               Column("", "along", of=lambda at: at["axis"]),
               Column("has to", "receive (MB)", of=lambda at: 1e-6 * _least(at), form=".2f")]
    for number, way in enumerate(record.scales["way"]):
        columns += _way_columns(number, WAYS[way])
    # Other lines lie inside nodes.
    rows = [at for at in list_places(record, "axis", "collective") if _least(at)]
    return [make_table(f"Bytes on the wire of an array of "
                       f"{_bytes(record.configuration['wire_size'])}, all lines at once",
                       columns, rows),
            Notes("About these bytes:", [
                f"Emulated cluster {record.environment['emulated_cluster']}: the busiest node's, "
                f"by its kernel's counters, headers and acknowledgements included; medians of "
                f"{len(record.scales['round'])} calls each, in turn. A node has to receive the "
                f"words of the bucket algorithm between nodes: each block crosses a link once."])]


def _way_columns(way: int, group: str) -> list[Column]:
    """Describe the columns of one way to send."""
    def middle(at: Place, name: str) -> float:
        """Return the median of the rounds, of the busiest node."""
        return np.median(at(f"wire_{name}"), axis=0)[way].max()

    def over(at: Place) -> Number:
        share = middle(at, "received") / _least(at) - 1
        return Number(share, f"{100 * share:.1f} %")
    return [Column("received", "(MB)", group, form=".2f",
                   of=lambda at: 1e-6 * middle(at, "received")),
            Column("over that", "", group, of=over),
            Column("sent", "(MB)", group, form=".2f", of=lambda at: 1e-6 * middle(at, "sent")),
            Column("time", "(ms)", group, form=".1f",
                   of=lambda at: 1e3 * middle(at, "seconds"))]


def _least(at: Place) -> float:
    """Return the bytes that the busiest node has to receive."""
    return at("wire_least").max()


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 2 ** 20), ("KiB", 2 ** 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"
