"""Make the table of every distributed product of one shape on the same ranks."""

import math

import numpy as np

from bench.records.kinds.products import copied_operands, mean_words, record_grids
from bench.records.measurements import Measurements
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell
from bench.reports.emulated import describe_cluster
from bench.statistics import median_interval
from mm3d.grid.shape import GridShape

COLUMNS = [
    Column("", "product"), Column("", "grid"),
    Column("counted", "", "words a rank"), Column("closed form", "", "words a rank"),
    Column("same", "", "words a rank"), Column("most", "", "words a rank"),
    Column("any memory", "", "over the bound"), Column("its memory", "", "over the bound"),
    Column("messages", "a rank"), Column("rounds"),
    Column("measured", "(KiB)", "peak memory a rank"),
    Column("alone", "(KiB)", "peak memory a rank"),
    *(Column(name, "(ms)", "time") for name in ("median", "low", "high"))]
BALANCED = ("stored", "operations", "words")    # compared between ranks
REFERENCE = "3d"    # whose seconds others are compared with; the first product where it is missing


def products_parts(record: Measurements) -> list[Part]:
    """Make the table and the notes of a record of kind "products"."""
    chosen, names = record.configuration, record.scales["scheme"]
    found = {name: variable.values for name, variable in record.variables.items()}
    grids, ranks = record_grids(names, chosen["grids"]), len(record.scales["rank"])
    least = float(found["least_words"])
    rows: Rows = []
    for s, name in enumerate(names):
        words, total = found["words"][s], found["closed_form_words"][s]
        mean, bound = words.mean(), found["least_words_with_memory"][s]
        same = "-" if math.isnan(mean_words(total, ranks)) else (
            "=" if words.sum() == total else "NO")
        rows.append([
            name, str(grids[name]), number_cell(mean, ".1f"),
            number_cell(mean_words(total, ranks), ".1f"), same, int(words.max()),
            number_cell(_over_bound(words.max(), least, name, chosen["form"], grids[name]), ".3f"),
            number_cell(words.max() / bound if bound > 0 else math.nan, ".3f"),
            int(found["messages"][s].max()), int(found["rounds"][s].max()),
            number_cell(found["memory"][s].max() / 1024, ".1f"),
            number_cell(found["memory_alone"][s] / 1024, ".1f"),
            *(number_cell(1e3 * value, "#.4g") for value in found["seconds"][s, :3])])
    title = (f"Products {chosen['form']} {chosen['M']} x {chosen['N']} x {chosen['K']} "
             f"{chosen['dtype']} on {ranks} ranks")
    turns = [turns_table(record)] if chosen["in_turns"] and len(names) > 1 else []
    return [Table(title, COLUMNS, rows), balance_table(found, grids), *turns,
            Notes("About these products:", _notes(record, least))]


def balance_table(found: dict[str, np.ndarray], grids: dict[str, GridShape]) -> Table:
    """Make the table of what ranks store, compute and move: the least, the mean, the most."""
    rows: Rows = []
    for s, (name, sizes) in enumerate(grids.items()):
        cells = []
        for quantity in BALANCED:
            values = found[quantity][s]
            cells += [int(values.min()), number_cell(values.mean(), ".1f"), int(values.max()),
                      number_cell(values.max() / values.mean() if values.any() else 1, ".3f")]
        rows.append([name, str(sizes), *cells])
    groups = ("elements of A, B and C stored", "floating-point operations", "words")
    columns = [Column("", "product"), Column("", "grid"), *(
        Column(what, "", group) for group in groups for what in ("least", "mean", "most",
                                                                 "most / mean"))]
    return Table("Balance of the ranks, counted", columns, rows)


def turns_table(record: Measurements) -> Table:
    """Make the table of seconds over those of one product, from the ratios of all rounds."""
    names, samples = record.scales["scheme"], record.variables["samples"].values
    reference = names.index(REFERENCE) if REFERENCE in names else 0
    rows: Rows = []
    for s, name in enumerate(names):
        if s != reference:
            ratio = median_interval(samples[s] / samples[reference])
            rows.append([name, *(number_cell(value, ".3f") for value in ratio[:3]),
                         number_cell(ratio.confidence, ".1%")])
    columns = [Column("product"), *(Column(name) for name in ("median", "low", "high")),
               Column("confidence")]
    return Table(f"Seconds over those of {names[reference]}, ratios of {samples.shape[1]} rounds",
                 columns, rows)


def _sharing(transports: str) -> str:
    """Say how memory is counted where a transport shares it; "" where none does."""
    shared = {"shared", "hierarchical"} & set(transports.split())
    return ", in which ranks that share an array count a part of it each" * bool(shared)


def _timing_note(record: Measurements) -> str:
    """State how often products were timed, and how sure their medians are."""
    rounds = len(record.scales["repetition"])
    confidence = record.variables["seconds"].values[:, 3].min()
    how = "in turns, in random order" if record.configuration.get("in_turns") else "each alone"
    return (f"Time: makespans a call, {rounds} rounds, {how}; medians between bounds of at least "
            f"{confidence:.1%} confidence.")


def _over_bound(words: float, least: float, name: str, form: str, grid: GridShape) -> float:
    """Divide by the bound for any memory; NaN where it is none, or not for copied operands."""
    holds = least > 0 and not copied_operands(name, form, grid)
    return words / least if holds else math.nan


def _notes(record: Measurements, least: float) -> list[str]:
    """State what was counted, measured and computed, and what limits the times."""
    chosen, cores = record.configuration, record.environment["cores"]
    ranks = len(record.scales["rank"])
    worst = max(check.share for check in record.checks)
    notes = [f"Words are counted from shapes by the bucket algorithm; \"=\": those of all ranks "
             f"are the closed form's. Verified, errors at most {100 * worst:.2g} % of the "
             f"tolerance.",
             f"Bound for any memory: {least:.1f} words of the busiest rank (Al Daas and others, "
             "2022). Bound for its memory: MNK / (2 sqrt(2) P sqrt(S)) - S (Irony, Toledo and "
             "Tiskin, 2004) of S words, its peak alone. \"-\": with so much memory this says "
             "nothing, or an operand has copies before the product, which the bound for any "
             "memory excludes. Words over a bound are the busiest rank's.",
             "Messages, rounds and memory are the busiest rank's. "
             "Rounds are calls of collectives, one "
             "after another; a broadcast or a gather along q ranks takes more than one step of a "
             "network.",
             "Peak memory is that of all arrays, with A, B and C: measured with transport "
             f"{chosen['transport']}{_sharing(chosen['transport'])}; alone: by dry runs, of ranks "
             "that share none.", _timing_note(record)]
    if ranks > cores:
        notes.insert(0, f"NOT SCALING RESULTS: {ranks} ranks take turns on {cores} cores.")
    if chosen["left_out"]:
        notes.append(f"Left out: {chosen['left_out']}.")
    cluster = describe_cluster(record.environment)
    return notes + ["; ".join(filter(None, [
        f"{record.environment['cpu_model']}, {cores} cores", cluster,
        record.environment["mpi"]])) + "."]
