"""Put the figures of ``bench gemm`` and ``bench collectives`` into a machine's file.

Each puts in what it has measured.  What neither has is of the machine that the file began as, and
its source says so.
"""

from datetime import datetime, timezone
from pathlib import Path

import msgspec
import numpy as np

from bench.errors import UsageError
from bench.instruments import host as here
from bench.prediction import fits, machine_file, machine_model
from bench.records.measurements import Measurements, grid_shape

MEASURED = "all of what is measured here; of the rest "


def begun(file: str | None, base: str | None, ranks_per_node: int,
          comm) -> machine_model.Machine | None:
    """Read the machine that is to be updated, or begin one as another; None without a file.

    Parameters
    ----------
    file, base : str, optional
        Values of ``--machine`` and ``--base``: the file, and the machine that a new one begins
        as.
    ranks_per_node : int
        Ranks on a node now.
    comm : mpi4py.MPI.Intracomm
        All ranks, which call this.

    Raises
    ------
    UsageError
        When the file cannot be written, describes no machine, or one that was calibrated with
        another number of ranks, and when there is nothing to begin with ``--base``.
    """
    if not file:
        if base:
            raise UsageError(f"--base {base}: a new machine file begins as that one; "
                             f"name the file with --machine, or leave --base out")
        return None
    path = Path(file)
    machine_file.check("--machine", path, comm)
    if not path.exists():
        return taken(machine_model.load(base or "cpu"))
    if base:
        raise UsageError(f"--machine {path} --base {base}: the file is there, and only "
                         f"a new one begins as another; name a new file, or leave --base out")
    machine = machine_model.load(str(path))
    if machine.passes and machine.ranks_per_node != ranks_per_node and comm.size > 1:
        raise UsageError(f"--machine {path} was calibrated with {machine.ranks_per_node} ranks a "
                         f"node, not {ranks_per_node}: start that many, or name a new file")
    return machine


def taken(base: machine_model.Machine) -> machine_model.Machine:
    """Return a machine of this kind of which nothing is measured yet."""
    sources = {name: f"{machine_file.TAKEN}{base.name}: {source}"
               for name, source in base.sources.items()}
    return msgspec.structs.replace(base, name=here.machine_slug(), about=here.cpu_model(),
                                   sources=sources)


def products(machine: machine_model.Machine, record: Measurements) -> machine_model.Machine:
    """Return `machine` with the products measured by ``gemm``, with the fewest threads of BLAS."""
    threads = record.scales["threads"]
    least = min(range(len(threads)), key=lambda k: threads[k])
    medians = record.variables["seconds"].values[:, least, :, 0]
    edges = record.scales["size"]
    found = {dtype: fits.products(dict(zip(((n,) * 3 for n in edges), line.tolist())))
             for dtype, line in zip(record.scales["dtype"], medians)}
    first, fit = next(iter(found.items()))
    off = max(np.abs(one.errors).max() for one in found.values())
    how = (f"{measured(record)}, one rank alone with {threads[least]} of BLAS' threads: medians "
           f"of squares of {edges[0]} to {edges[-1]}; the fit is {100 * off:.0f} % off at most")
    rates = machine.gemm_rate | {dtype: one.rate for dtype, one in found.items()}
    rest = [name for name in machine.gemm_rate if name not in found]
    before = f"; {', '.join(rest)} {machine.sources['gemm_rate']}" if rest else ""
    return replaced(
        machine, {"gemm_rate": how + before, "gemm_seconds": f"{how}; {first}",
                  "gemm_half_size": f"{how}; {first}, the same for every edge",
                  "gemm_deviations": f"{how}: these squares over the fit; {first}"}, ("gemm",),
        gemm_rate=rates, gemm_seconds=fit.start, gemm_half_size=fit.half,
        gemm_deviations=fit.deviations)


def lines(machine: machine_model.Machine, record: Measurements) -> machine_model.Machine:
    """Return `machine` with the collectives measured by ``collectives``, and links fitted to them.

    Lines of before stay if they were measured with as many ranks a node and by the same
    transport.
    """
    chosen, per_node = record.configuration, record.environment["ranks_on_this_node"]
    found = measured_lines(record)
    keys = {line.key for line in found}
    same = (machine.ranks_per_node, machine.transport) == (per_node, chosen["transport"])
    kept = [line for line in machine.collectives if same and line.key not in keys]
    how = f"{measured(record)}, all lines of a direction at once"
    links = fits.links(found, per_node, chosen["transport"])
    fit = (f"{how}: the mean of the fits of all-gather and reduce-scatter on the longest line, "
           f"the bandwidth of those that copy")
    sources = {"ranks_per_node": f"{how}: ranks of the job on a node",
               "transport": f"{how}: how the bytes travelled",
               "collectives": f"{how}: medians; {record.environment['mpi']}; "
                              f"{record.environment['tuning_variables'] or 'no tuning variables'}"}
    return replaced(machine, sources | {name: fit for name in links}, tuple(links),
                    ranks_per_node=per_node, transport=chosen["transport"],
                    collectives=kept + found, **links)


def measured_lines(record: Measurements) -> list[machine_model.Line]:
    """Read the collectives of a record, each with its fit."""
    shape = grid_shape(record.configuration)
    alpha, beta, seconds = (record.variables[name].values
                            for name in ("alpha", "beta", "seconds"))
    found = []
    for i, axis in enumerate(record.scales["axis"]):
        for k, kind in enumerate(record.scales["collective"]):
            curve = machine_model.Curve([float(size) for size in record.scales["size"]],
                                        seconds[i, k, :, 0].tolist())
            found.append(machine_model.Line(kind, shape[axis], shape.stride(axis),
                                            float(alpha[i, k]),
                                            float(beta[i, k]), curve))
    return found


def replaced(machine: machine_model.Machine, sources: dict[str, str], full: tuple[str, ...],
             **figures) -> machine_model.Machine:
    """Return `machine` with measured figures, achieved in full, and their sources."""
    achieved = msgspec.structs.replace(machine.achieved, **dict.fromkeys(full, 1.0))
    before = machine.sources["achieved"].removeprefix(MEASURED)
    return msgspec.structs.replace(
        machine, achieved=achieved,
        sources=machine.sources | sources | {"achieved": MEASURED + before}, **figures)


def measured(record: Measurements) -> str:
    """Name date and library of a measurement, for the source of a figure."""
    environs = record.environment
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return f"measured {when} by bench {record.kind} on {environs['cpu_model']}"
