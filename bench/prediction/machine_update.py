"""Update a machine file with the figures measured by ``bench gemm`` and ``bench collectives``.

Each verb replaces the figures that it measures.  All others are those of the machine from which
the file was created; their sources say so.
"""

from datetime import datetime, timezone
from pathlib import Path

import msgspec
import numpy as np

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.instruments import host
from bench.prediction import fits, machine_file, machine_model
from bench.records.measurements import Measurements, grid_shape

MEASURED = "all of what is measured here; of the rest "    # begins the source of `achieved`


def open_machine(file: str | None, base: str | None, ranks_per_node: int,
                 comm) -> machine_model.Machine | None:
    """Read the machine to update, or create it from another; None without a file.

    Parameters
    ----------
    file, base : str, optional
        Values of ``--machine`` and ``--base``: the file, and the machine from which a new file is
        created.
    ranks_per_node : int
        Number of ranks on a node in this job.
    comm : mpi4py.MPI.Intracomm
        All ranks, which call this.

    Raises
    ------
    UsageError
        When the file cannot be written, describes no machine, or one calibrated with another
        number of ranks or in another emulated cluster; or when ``--base`` is given without a new
        file.
    """
    if not file:
        if base:
            raise UsageError(f"--base {base}: a new machine file begins as that one; "
                             f"name the file with --machine, or leave --base out")
        return None
    path = Path(file)
    machine_file.check_writable("--machine", path, comm)
    if not path.exists():
        return adopt_machine(machine_model.load_machine(base or "cpu"))
    if base:
        raise UsageError(f"--machine {path} --base {base}: the file is there, and only "
                         f"a new one begins as another; name a new file, or leave --base out")
    machine = machine_model.load_machine(str(path))
    if machine.ranks and machine.ranks != comm.size and comm.size > 1:
        raise UsageError(f"--machine {path} was calibrated with {machine.ranks} ranks, not "
                         f"{comm.size}: start that many, or name a new file")
    if machine.passes and machine.ranks_per_node != ranks_per_node and comm.size > 1:
        raise UsageError(f"--machine {path} was calibrated with {machine.ranks_per_node} ranks a "
                         f"node, not {ranks_per_node}: start that many, or name a new file")
    machine_model.check_cluster(machine, str(path))
    return machine


def adopt_machine(base: machine_model.Machine) -> machine_model.Machine:
    """Return a copy of `base` for this machine, with no figure measured yet."""
    sources = {name: f"{machine_file.ADOPTED}{base.name}: {source}"
               for name, source in base.sources.items()}
    cluster = machine_model.cluster_suffix(Cluster.from_environment())
    return msgspec.structs.replace(base, name=host.machine_slug(), sources=sources,
                                   about=host.cpu_model() + cluster)


def update_products(machine: machine_model.Machine,
                    record: Measurements) -> machine_model.Machine:
    """Return `machine` with rates fitted to the products of ``gemm`` with the fewest threads."""
    threads = record.scales["threads"]
    least = min(range(len(threads)), key=lambda k: threads[k])
    medians = record.variables["seconds"].values[:, least, :, 0]
    edges = record.scales["size"]
    found = {dtype: fits.fit_products(dict(zip(((n,) * 3 for n in edges), line.tolist())))
             for dtype, line in zip(record.scales["dtype"], medians)}
    first, fit = next(iter(found.items()))
    off = max(np.abs(one.errors).max() for one in found.values())
    how = (f"{describe_source(record)}, one rank alone with {threads[least]} of BLAS' threads: "
           f"medians of squares of {edges[0]} to {edges[-1]}; the fit is {100 * off:.0f} % off "
           f"at most")
    rates = machine.gemm_rate | {dtype: one.rate for dtype, one in found.items()}
    rest = [name for name in machine.gemm_rate if name not in found]
    before = f"; {', '.join(rest)} {machine.sources['gemm_rate']}" if rest else ""
    return replace_figures(
        machine, {"gemm_rate": how + before, "gemm_seconds": f"{how}; {first}",
                  "gemm_half_size": f"{how}; {first}, the same for every edge",
                  "gemm_deviations": f"{how}: these squares over the fit; {first}"}, ("gemm",),
        gemm_rate=rates, gemm_seconds=fit.start, gemm_half_size=fit.half,
        gemm_deviations=fit.deviations)


def update_collectives(machine: machine_model.Machine,
                       record: Measurements) -> machine_model.Machine:
    """Return `machine` with the collectives measured by ``collectives``, and links fitted to them.

    Other lines are kept if they were measured with as many ranks a node and the same transport.
    """
    chosen, per_node = record.configuration, record.environment["ranks_on_this_node"]
    found = read_lines(record)
    keys = {line.key for line in found}
    same = (machine.ranks_per_node, machine.transport) == (per_node, chosen["transport"])
    kept = [line for line in machine.collectives if same and line.key not in keys]
    how = f"{describe_source(record)}, all lines of a direction at once"
    links = fits.fit_links(found, per_node, chosen["transport"])
    fit = (f"{how}: the mean of the fits of all-gather and reduce-scatter on the longest line, "
           f"the bandwidth of those that copy")
    sources = {"ranks_per_node": f"{how}: ranks of the job on a node",
               "transport": f"{how}: how the bytes travelled",
               "collectives": f"{how}: medians; {record.environment['mpi']}; "
                              f"{record.environment['tuning_variables'] or 'no tuning variables'}"}
    return replace_figures(machine, sources | {name: fit for name in links}, tuple(links),
                           ranks_per_node=per_node, transport=chosen["transport"],
                           collectives=kept + found, **links)


def read_lines(record: Measurements) -> list[machine_model.Line]:
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


def replace_figures(machine: machine_model.Machine, sources: dict[str, str], full: tuple[str, ...],
                    **figures) -> machine_model.Machine:
    """Return `machine` with measured figures, their sources, and 1 for the fractions `full`."""
    achieved = msgspec.structs.replace(machine.achieved, **dict.fromkeys(full, 1.0))
    before = machine.sources["achieved"].removeprefix(MEASURED)
    return msgspec.structs.replace(
        machine, achieved=achieved,
        sources=machine.sources | sources | {"achieved": MEASURED + before}, **figures)


def describe_source(record: Measurements) -> str:
    """Return the source of a measured figure: date, verb, processor and emulated cluster."""
    environs = record.environment
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    cluster = environs.get("emulated_cluster")
    where = f" in the emulated cluster {cluster}" if cluster else ""
    return f"measured {when} by bench {record.kind} on {environs['cpu_model']}{where}"
