"""Make the tables of the microbenchmarks from their records."""

import itertools
import math
from importlib import import_module
from typing import Callable, Sequence

import numpy as np

from bench.records.kinds.collectives import left_in_place
from bench.records.kinds.products import copied_operands
from bench.records.measurements import Measurements, grid_shape
from bench.reports.document import (Cell, Column, Notes, Number, Part, Rows, Table,
                                    number_cell)
from bench.reports.emulated import describe_cluster
from bench.reports.formats import render
from bench.reports.merit import words_note

# Dimensions of samples and bounds, for which a table of an unknown kind has no columns.
SAMPLE_DIMS = {"repetition", "rank", "edge", "bound"}
OF_THE_DISK = {"save": "disk write", "restore": "disk read"}    # of checkpoints
# Shown instead of a bandwidth for a collective whose result is read in place.
IN_PLACE = {"all_gather": "copies nothing", "broadcast": "root copies"}


# By the kind of a record: the function that makes its tables, of a file of `bench.reports` that is
# imported when a record of that kind is read.
BUILDERS = {
    "gemm": "micro_tables.gemm_parts", "collectives": "micro_tables.collective_parts",
    "products": "products.table.products_parts", "checkpoint": "micro_tables.checkpoint_parts",
    "experts": "experts.table.experts_parts", "training": "training_tables.training_parts",
    "training-meshes": "training_tables.meshes_parts",
    "training-step": "training_tables.step_parts"}
# Tables of any number of records.
JOINT_BUILDERS = {"matmul": "micro_tables.matmul_parts", "layer": "layer_table.layer_parts",
                  "sweep": "link_sweep.sweep_parts", "pipeline": "pipeline_tables.pipeline_parts"}


def make_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make the tables and notes of all records, by kind."""
    found: list[Part] = []
    for kind in sorted({record.kind for record in records}):
        mine = [record for record in records if record.kind == kind]
        if kind in JOINT_BUILDERS:
            found += _builder(JOINT_BUILDERS[kind])(mine)
        else:
            build = _builder(BUILDERS.get(kind, "micro_tables.other_parts"))
            found += itertools.chain.from_iterable(map(build, mine))
    return found


def format_record(record: Measurements) -> str:
    """Format the tables and notes of one record as text."""
    return render(make_parts([record]))


def _builder(name: str) -> Callable[..., list[Part]]:
    """Import a function of `bench.reports`."""
    file, _, function = name.rpartition(".")
    return getattr(import_module(f"bench.reports.{file}"), function)


def gemm_parts(record: Measurements) -> list[Part]:
    """Make the table of rates of products on one rank against their size."""
    seconds, rates = (record.variables[name].values for name in ("seconds", "rate"))
    series = [(d, t) for d in range(rates.shape[0]) for t in range(rates.shape[1])]
    columns = [Column("size")]
    for d, t in series:
        group = f"{record.scales['dtype'][d]}, {_threads(record.scales['threads'][t])}"
        columns += [Column("rate", "(GFLOP/s)", group), Column("low", "95 %", group),
                    Column("high", "95 %", group)]
    rows: Rows = []
    for s, size in enumerate(record.scales["size"]):
        cells: list[Cell] = [int(size)]
        for d, t in series:
            median, low, high = seconds[d, t, s, :3]
            bounds = rates[d, t, s] * median / np.array([median, high, low]) / 1e9
            cells += [number_cell(rate, ".1f") for rate in bounds]
        rows.append(cells)
    return [Table("Rate of C = A B of square matrices on one rank", columns, rows),
            Notes("About these rates:", [f"{describe_machine(record)}."])]


def collective_parts(record: Measurements) -> list[Part]:
    """Make the table of times, bandwidths and fits of collectives."""
    values = {name: variable.values for name, variable in record.variables.items()}
    columns = [Column("", "collective"), Column("", "along"),
               *(Column(_bytes(size), "(us)", "median makespan by the size of the whole array")
                 for size in record.scales["size"]),
               Column("bus", "(GB/s)", "bandwidth"), Column("algorithm", "(GB/s)", "bandwidth"),
               Column("alpha", "(us)", "fit"),
               Column("1 / beta", "(GB/s)", "fit"), Column("within", "", "fit")]
    plain = values.get("mpi_seconds")    # not of devices
    ends = [record.scales["size"][0], record.scales["size"][-1]]
    columns += [Column(_bytes(size), "(us)", "plain MPI call") for size in ends] * (
        plain is not None)
    rows: Rows = []
    chosen, narrow = record.configuration, values["ended_by_width"]
    placed = left_in_place(record)
    for c, kind in enumerate(record.scales["collective"]):
        for a, axis in enumerate(record.scales["axis"]):
            beta, error = values["beta"][a, c], values["fit_error"][a, c]
            copies = not placed[a, c]
            bandwidth = values["bandwidth"][a, c].max() / 1e9 if copies else math.nan
            whole = (record.scales["size"] / values["seconds"][a, c, :, 0]).max() / 1e9
            alone = [] if plain is None else plain[a, c, [0, -1], 0]
            rows.append([
                kind, axis,
                *(number_cell(1e6 * t, ".0f") for t in values["seconds"][a, c, :, 0]),
                number_cell(bandwidth, ".2f", IN_PLACE.get(kind, "-")),
                number_cell(whole if copies else math.nan, ".2f"),
                number_cell(1e6 * values["alpha"][a, c], ".0f"),
                number_cell(1e-9 / beta if beta and copies else math.nan, ".2f"),
                Number(error, f"{100 * error:.0f} %"),
                *(number_cell(1e6 * t, ".0f") for t in alone)])
    return [Table(f"Collectives on {chosen['grid']} ranks, all lines at once", columns, rows),
            Notes("About these times:", [
                "Bus bandwidth, as nccl-tests define it: the algorithm bandwidth, which is the "
                "whole array over the time, times (P - 1) / P for all-gather, reduce-scatter and "
                "all-to-all along P ranks, 2 (P - 1) / P for all-reduce, 1 for broadcast and "
                "reduce: the bytes that a ring brings the busiest rank. Both at the best size. "
                "Times and alpha are those of this library's calls, in Python"
                + "; the plain call is mpi4py's, blocking, on buffers that are there"
                * (plain is not None) + ". The fit alpha + beta n is of relative least squares. "
                "Arrays "
                "are sent again and again: those that fit the caches are read from there.",
                *["In shared memory ranks read what is gathered or broadcast where it lies, which "
                  "is not timed: there is no bandwidth."] * bool(placed.any()),
                f"{int(narrow.sum())} of {narrow.size} intervals are within "
                f"{100 * chosen['width']:g} % of the median, the others ended by repetitions or "
                f"seconds.", f"{describe_machine(record)}; transport {chosen['transport']}."]),
            *wire_parts(record)]


def wire_parts(record: Measurements) -> list[Part]:
    """Make the table of the bytes that collectives sent between nodes; none if not measured."""
    if "wire_least" not in record.variables:
        return []
    received, sent, seconds = (
        np.median(record.variables[f"wire_{name}"].values, axis=2)
        for name in ("received", "sent", "seconds"))    # (axis, collective, way, ...)
    least = record.variables["wire_least"].values.max(axis=-1)
    columns = [Column("", "collective"), Column("", "along"), Column("has to", "receive (MB)")]
    names = {"grid": "by the grid's transport", "mpi": "by MPI's own algorithm"}
    for way in record.scales["way"]:
        columns += [Column("received", "(MB)", names[way]), Column("over that", "", names[way]),
                    Column("sent", "(MB)", names[way]), Column("time", "(ms)", names[way])]
    rows: Rows = []
    for (a, axis), (c, kind) in itertools.product(enumerate(record.scales["axis"]),
                                                  enumerate(record.scales["collective"])):
        if least[a, c] == 0:    # its lines lie inside nodes
            continue
        cells: list[Cell] = [kind, axis, number_cell(1e-6 * least[a, c], ".2f")]
        for way in range(len(record.scales["way"])):
            most = received[a, c, way].max()
            over = most / least[a, c] - 1
            cells += [number_cell(1e-6 * most, ".2f"), Number(over, f"{100 * over:.1f} %"),
                      number_cell(1e-6 * sent[a, c, way].max(), ".2f"),
                      number_cell(1e3 * seconds[a, c, way], ".1f")]
        rows.append(cells)
    rounds = len(record.scales["round"])
    return [Table(f"Bytes on the wire of an array of {_bytes(record.configuration['wire_size'])}, "
                  f"all lines at once", columns, rows),
            Notes("About these bytes:", [
                f"Emulated cluster {record.environment['emulated_cluster']}: the busiest node's, "
                f"by its kernel's counters, headers and acknowledgements included; medians of "
                f"{rounds} calls each, in turn. A node has to receive the words of the bucket "
                f"algorithm between nodes: each block crosses a link once."])]


def matmul_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make one table of distributed products beside one process, from any number of records."""
    rows: Rows = []
    for record in records:
        chosen = record.configuration
        found = {name: variable.values for name, variable in record.variables.items()}
        for p, phase in enumerate(record.scales["phase"]):
            product, _, process = found["seconds"][p, :, 0]
            words, least = int(found["words"][p].max()), found["least_words"][p]
            if copied_operands(chosen["scheme"], chosen["form"], grid_shape(chosen), phase):
                least = math.nan
            rows.append([
                f"{chosen['form']} {chosen['M']} x {chosen['N']} x {chosen['K']}",
                chosen["dtype"], f"{chosen['scheme']} {chosen['grid']}", chosen["transport"],
                phase,
                number_cell(1e3 * product, "#.4g"),
                number_cell(found["flops"][p] / product / 1e9, ".1f"),
                number_cell(1e3 * process, "#.4g"),
                *(number_cell(value, ".3f") for value in found["efficiency"][p, :3]),
                number_cell(found["ceiling"][p, 0], ".3f"),
                number_cell(found["share_of_the_ceiling"][p, 0], ".3f"), words,
                number_cell(words / least if least > 0 else math.nan, ".3f")])
    columns = [Column("", "product"), Column("", "dtype"), Column("", "scheme, grid"),
               Column("", "transport"), Column("", "phase"), Column("time", "(ms)"),
               Column("rate", "(GFLOP/s)"), Column("one process", "(ms)"),
               Column("median", "", "efficiency"),
               Column("low", "95 %", "efficiency"), Column("high", "95 %", "efficiency"),
               Column("ceiling"), Column("of the", "ceiling"), Column("words", "counted"),
               Column("over the", "bound")]
    return [Table("Distributed matrix products beside one process with all cores", columns, rows),
            Notes("About these products:", matmul_notes(records))]


def matmul_notes(records: Sequence[Measurements]) -> list[str]:
    """State how the products were measured, and warn of references that were not fair."""
    notes = []
    for record in records:
        chosen, cores = record.configuration, record.environment["cores"]
        worst = max(check.share for check in record.checks)
        notes.append(f"{chosen['form']} {chosen['M']} x {chosen['N']} x {chosen['K']} "
                     f"{chosen['dtype']}, {chosen['scheme']} {chosen['grid']}, transport "
                     f"{chosen['transport']}: {len(record.scales['repetition'])} repetitions of "
                     f"{chosen['calls']} calls, ended by {chosen['ended_by']}; one process with "
                     f"{_threads(chosen['one_process_threads'])}; verified, errors at most "
                     f"{100 * worst:.2g} % of the tolerance.")
        if chosen["one_process_threads"] < cores:
            notes.append("WARNING: BLAS takes "
                         f"{chosen['one_process_threads']} threads at most, of {cores} cores: no "
                         "fair reference.")
        if chosen["one_process_cores"] < cores:
            notes.append(f"WARNING: the one process was bound to {chosen['one_process_cores']} of "
                         f"{cores} cores: no fair reference.")
    notes.append("Times are makespans a call. Efficiency: one process / product; ceiling: one "
                 "process / the local products without communication.")
    notes.append(words_note(record.configuration["transport"] for record in records)
                 + " They are the busiest rank's.")
    if any(copied_operands(record.configuration["scheme"], record.configuration["form"],
                           grid_shape(record.configuration), phase)
           for record in records for phase in record.scales["phase"]):
        notes.append("No bound where an operand has copies before the product: it is for operands "
                     "that are stored once.")
    if any("backward" in record.scales["phase"] for record in records):
        notes.append("The bound of backward is that of its two products apart, which share dC: "
                     "fewer words are possible.")
    return notes + list(dict.fromkeys(f"{describe_machine(record)}." for record in records))


def checkpoint_parts(record: Measurements) -> list[Part]:
    """Make the table of rates, and of shares of the disk's own."""
    names = list(record.scales["operation"])
    seconds, rate = (record.variables[name].values for name in ("seconds", "rate"))
    rows: Rows = []
    for number, name in enumerate(names):
        other = OF_THE_DISK.get(name)
        share = rate[number] / rate[names.index(other)] if other else float("nan")
        rows.append([name, *(number_cell(value, ".3g") for value in seconds[number, :3]),
                     number_cell(rate[number] / 1e9, ".3g"), number_cell(share, ".0%")])
    chosen, total = record.configuration, float(record.variables["bytes"].values)
    columns = [Column(""), *(Column(part, "(s)") for part in ("median", "low", "high")),
               Column("rate", "(GB/s)"), Column("of the disk's own")]
    return [Table(f"A checkpoint of {total / 1e9:.3g} GB, {chosen['ranks']} ranks", columns, rows),
            Notes("About these times:", [
                "Parameters and moments of AdamW; a sample is the slowest rank's. Save ends when "
                "all is on the disk; to remove the one before is not timed; restore compares "
                "checksums and copies. The disk: as many random bytes of each rank to one plain "
                "file, synchronised, and read. Files are dropped from the cache first, where the "
                f"system does so. {describe_machine(record)}."])]


def other_parts(record: Measurements) -> list[Part]:
    """Make the tables of a record of any kind: medians and bounds by each set of dimensions."""
    by_dims: dict[tuple[str, ...], dict[str, np.ndarray]] = {}
    for name, variable in record.variables.items():
        dims = tuple(dim for dim in variable.dims if dim not in SAMPLE_DIMS)
        left = [dim for dim in variable.dims if dim in SAMPLE_DIMS]
        if left in ([], ["bound"]):
            title = name if variable.units == "1" else f"{name} ({variable.units})"
            by_dims.setdefault(dims, {})[title] = variable.values
    found: list[Part] = []
    for dims, variables in by_dims.items():
        columns = [Column(dim) for dim in dims]
        for name, values in variables.items():
            columns += ([Column(part, "", name) for part in ("median", "low", "high")]
                        if values.ndim > len(dims) else [Column(name)])
        rows: Rows = []
        for place in np.ndindex(*(len(record.scales[dim]) for dim in dims)):
            cells: list[Cell] = [str(record.scales[dim][k]) for dim, k in zip(dims, place)]
            for values in variables.values():
                cells += [number_cell(value, ".4g") for value in np.ravel(values[place])[:3]]
            rows.append(cells)
        found.append(Table(f"{record.kind}: by {', '.join(dims)}" if dims else record.kind,
                           columns, rows))
    settings = ", ".join(f"{name} {value}" for name, value in record.configuration.items())
    about = [f"{settings}.", f"{describe_machine(record)}."]
    return [*found, Notes(f"About {record.kind}:", about)]


def describe_machine(record: Measurements) -> str:
    """Describe the machine of a record: processor, cores, BLAS and MPI."""
    env = record.environment
    known = [f"{env[name]}{unit}" for name, unit in (
        ("cpu_model", ""), ("cores", " cores"), ("blas", ""), ("blas_architecture", " kernels"),
        ("mpi", "")) if name in env]
    return "; ".join(filter(None, [", ".join(known), describe_cluster(env)]))


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 2 ** 20), ("KiB", 2 ** 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"
