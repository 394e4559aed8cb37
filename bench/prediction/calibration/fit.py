"""Fit a machine model to the samples of a calibration."""

import msgspec
import numpy as np

from bench.cluster.spec import Cluster
from bench.instruments import host
from bench.prediction import fits, machine_model, whole_steps
from bench.prediction.calibration import operations_alone
from bench.prediction.calibration.record import least_seconds, step_samples
from bench.records.measurements import Measurements, Setting

DTYPE = "float32"    # of passes and steps, and of the products by which others are predicted
NO_LINKS = machine_model.Level(0.0, 1e15)    # of one rank, which sends nothing


def fit_machine(record: Measurements) -> machine_model.Machine:
    """Fit a machine model to the samples of `bench.prediction.calibration.measure`.

    Of each operation repeated alone the least sample counts, of each whole step the median.
    """
    environs, transport = record.environment, str(record.configuration["transport"])
    ranks, nodes = int(environs["ranks"]), str(environs["node_of_rank"]).split()
    per_node = nodes.count(nodes[0])
    alone = least_seconds(record)
    works, steps = step_samples(record)
    products = {dtype: fits.fit_products(times) for dtype, times in alone.products.items()}
    curves = operations_alone.make_curves(alone.passes)
    lines = operations_alone.make_lines(alone.collectives)
    links = fits.fit_links(lines, per_node, transport)
    node = links.get("node", NO_LINKS)
    largest, first = curves["multiply"], products[DTYPE]
    cluster = environs.get("emulated_cluster")
    started = (f"{environs['cpu_model']}, ranks: {ranks}, cores: {environs['cores']}, BLAS "
               f"threads a rank: {environs['blas_threads']}, transport: {transport}"
               f"{machine_model.cluster_suffix(Cluster.parse(str(cluster)) if cluster else None)}")
    machine = machine_model.Machine(
        name=f"{host.slug_of(str(environs['cpu_model']), int(environs['cores']))}-p{ranks}",
        about=started, ranks_per_node=per_node,
        ranks=ranks if per_node < ranks else 0,
        memory_bytes=float(environs["memory_bytes"] // ranks),
        memory_bandwidth=largest.bytes[-1] / largest.seconds[-1], launch_seconds=0.0,
        gemm_half_size=first.half, gemm_rate={d: fit.rate for d, fit in products.items()},
        node=node, network=links.get("network", node),
        achieved=machine_model.Achieved(1.0, 1.0, 1.0, 1.0), sources={},
        gemm_seconds=first.start, gemm_deviations=first.deviations,
        cores=int(environs["cores"]) if environs["oversubscribed"] else 0,
        block=int(environs["elementwise_block"]), passes=curves, collectives=lines,
        transport=transport)
    machine = whole_steps.fit_step_losses(machine, works, np.median(steps, axis=0))
    return msgspec.structs.replace(machine, sources=state_sources(
        machine, products, record, steps=len(steps),
        grids=len({(work.scheme, work.grid) for work in works})))


def state_sources(machine: machine_model.Machine, products: dict[str, fits.ProductFit],
                  record: Measurements, steps: int, grids: int) -> dict[str, str]:
    """Return the source of each figure of the model, as its file states it.

    There were so many `steps` of each model on each of `grids`.
    """
    environs: dict[str, Setting] = record.environment
    rounds = int(record.configuration["rounds"])
    when = record.created.partition("T")[0]
    what = ("processor time of all ranks over cores" if environs["oversubscribed"]
            else "makespans")
    least = f"the least of {rounds} rounds" if rounds > 1 else "one round"
    how, together = (f"measured {when}, all ranks at once, {way}, {least}"
                     for way in (what, "makespans" if machine.ranks else what))
    off = {d: np.abs(fit.errors) for d, fit in products.items()}
    fit = (f"{how}: products of {len(products[DTYPE].errors)} shapes; the fit is "
           + ", ".join(f"{100 * np.median(e):.0f} % off in the median and {100 * e.max():.0f} % "
                       f"at most in {d}" for d, e in off.items()))
    blas = f"{environs['blas']}, {environs['blas_architecture']} kernels"
    largest = machine.passes["multiply"].bytes[-1]
    whole = (f"measured {when}: what the makespans of whole steps on {grids} grids, medians "
             f"of {steps} rounds, take beyond their parts")
    return {"ranks_per_node": f"ranks of the job, measured {when}",
            "memory_bytes": "the node's memory over its ranks",
            "memory_bandwidth": f"{how}: c = a * b, {largest / 1e6:.0f} MB in all",
            "launch_seconds": f"{whole} (Python {environs['python']})",
            "gemm_half_size": f"{fit}; {DTYPE}", "gemm_rate": f"{fit}; {blas}",
            "gemm_seconds": f"{fit}; {DTYPE}",
            "gemm_deviations": f"{how}: these products over the fit; {DTYPE}",
            "node": "the fits of gathers and scatters of all ranks, the bandwidth of those that "
                    "copy; one rank moves nothing",
            "network": "the fits of lines between nodes, whose links a node's ranks share"
                       if machine.ranks else
                       "not measured: as inside the node",
            "ranks": "ranks of the job",
            "cores": f"of this machine, if {environs['ranks']} ranks share them; else 0",
            "achieved": whole,
            "block": "mm3d.arrays.backend.Backend.block",
            "passes": f"{how}: float32, NumPy {environs['numpy_version']}",
            "collectives": f"{together}: {environs['mpi']}; "
                           f"{environs['tuning_variables'] or 'no tuning variables'}",
            "transport": "how the bytes of collectives travelled",
            "waiting": whole, "node_waiting": whole}
