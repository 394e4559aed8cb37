"""Fit a machine model to the samples of a calibration."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Sequence

import msgspec
import numpy as np

from bench.cluster.spec import Cluster
from bench.instruments import host
from bench.least_squares import fit_line, solve_nonnegative
from bench.prediction import machine_model
from bench.prediction.calibration.record import least_seconds, step_samples
from bench.prediction.machine_model import Curve, Level, Line, Machine
from bench.prediction.seconds import barriers, link_level, step_seconds, uncopied_collectives
from bench.prediction.work import Work, trace_work
from bench.records.measurements import Measurements
from mm3d.tracing.events import Collective, Gemm, MemoryPass

DTYPE = "float32"    # of passes and steps, and of the products by which others are predicted
ProductSizes = tuple[int, int, int]    # m, n and k of a product
NO_LINKS = Level(0.0, 1e15)    # of one rank, which sends nothing


@dataclass(frozen=True)
class ProductFit:
    """Fitted seconds of a product: those of one of no size, and operations a second of large ones.

    `half` are the half sizes of its edges, as in `Machine.gemm_half_size`, and `errors` the
    relative ones of the fit at each measured shape.
    """

    start: float
    rate: float
    half: tuple[float, float, float]
    errors: dict[ProductSizes, float]

    @property
    def deviations(self) -> dict[str, float]:
        """Return measured over fitted seconds by shape, as `Machine.gemm_deviations`.

        Of a shape whose fit is nothing beside what was measured nothing is known.
        """
        return {"x".join(map(str, shape)): 1 / (1 + error) for shape, error in self.errors.items()
                if error > -1}


def fit_machine(record: Measurements) -> Machine:
    """Fit a machine model to the samples of `bench.prediction.calibration.measure`.

    Of each operation repeated alone the least sample counts, of each whole step the median.
    """
    environs, transport = record.environment, str(record.configuration["transport"])
    ranks, nodes = int(environs["ranks"]), str(environs["node_of_rank"]).split()
    per_node = nodes.count(nodes[0])
    works, steps = step_samples(record)
    alone = _group_by_first(least_seconds(record))
    products = {dtype: fit_products(times)
                for dtype, times in _group_by_first(alone["product"]).items()}
    passes = {name: curve for (name,), curve in _make_curves(alone["pass"]).items()}
    lines = [_make_line(*one) for one in _make_curves(alone.get("collective", {})).items()]
    links = fit_links(lines, per_node, transport)
    node = links.get("node", NO_LINKS)
    largest, first = passes["multiply"], products[DTYPE]
    cluster = environs.get("emulated_cluster")
    started = (f"{environs['cpu_model']}, ranks: {ranks}, cores: {environs['cores']}, BLAS "
               f"threads a rank: {environs['blas_threads']}, transport: {transport}"
               f"{machine_model.cluster_suffix(Cluster.parse(str(cluster)) if cluster else None)}")
    machine = Machine(
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
        block=int(environs["elementwise_block"]),
        passes=passes | {"other": largest},    # for all other operations
        collectives=lines, transport=transport)
    machine = fit_step_losses(machine, works, np.median(steps, axis=0))
    return msgspec.structs.replace(machine, sources=_state_sources(machine, products, record))


def _group_by_first(times: dict[tuple, float]) -> dict[str, dict[tuple, float]]:
    """Group seconds by the first entry of their keys, which then lack it."""
    found: dict[str, dict[tuple, float]] = {}
    for (first, *rest), seconds in times.items():
        found.setdefault(first, {})[tuple(rest)] = seconds
    return found


def fit_products(times: dict[ProductSizes, float]) -> ProductFit:
    """Fit seconds = start + flops / rate (1 + sum of half / edge / 3) by relative squares."""
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
                      dict(zip(times, errors.tolist())))


def _make_curves(times: dict[tuple, float]) -> dict[tuple, Curve]:
    """Make curves of seconds by the last number of each key, the bytes, for all of the rest."""
    found: dict[tuple, Curve] = {}
    for (*key, size), taken in times.items():
        curve = found.setdefault(tuple(key), Curve([], []))
        curve.bytes.append(float(size))
        curve.seconds.append(taken)
    return found


def _make_line(key: tuple[str, int, int, bool], curve: Curve) -> Line:
    """Make the line of a collective's kind, size, stride and pieces."""
    kind, size, stride, pieces = key
    alpha, beta, _ = fit_line(np.array(curve.bytes), np.array(curve.seconds))
    return Line(kind, size, stride, alpha, beta, curve, pieces)


def fit_links(lines: list[Line], per_node: int, transport: str) -> dict[str, Level]:
    """Fit the links inside a node and between nodes, as far as `lines` use them.

    They predict collectives that were not measured.  A program gathers about as often as it
    scatters, so the fits of both along the longest line are averaged.  The bandwidth is that of
    collectives that copy: in shared memory a gather is only a barrier.
    """
    found: dict[str, Level] = {}
    for one in sorted(lines, key=lambda one: one.size):
        pair = [other for other in lines if other.key in (
            (kind, one.size, one.stride, False) for kind in ("all_gather", "reduce_scatter"))]
        level, times = link_level(one.size, one.stride, per_node, transport)
        idle = uncopied_collectives(transport) if level == "node" else ()
        alpha = float(np.mean([other.alpha for other in pair]))
        beta = float(np.mean([other.beta for other in pair if other.kind not in idle]))
        found[level] = Level(alpha / math.ceil(math.log2(one.size)),
                             times * (one.size - 1) / one.size / max(beta, 1e-15))
    return found


def fit_step_losses(machine: Machine, works: Sequence[Work], took: np.ndarray) -> Machine:
    """Fit a few figures of `machine` to whole steps; its others are of operations alone.

    In a step operations follow others and not themselves: their data and code are in no cache,
    and ranks wait for each other.  The figures are the fraction of their rates that all operations
    achieve, the seconds of Python around each, and the seconds that a barrier of g ranks takes
    longer over (g-1)/g, the fraction of them that one waits for: one figure for barriers between
    nodes and one for those inside.  They are fitted by relative least squares to `took`, the
    seconds of a step of each of `works`.
    """
    def level_of(one: Line | Collective) -> str:
        return link_level(one.size, one.stride, machine.ranks_per_node)[0]

    shares: dict[str, dict[int, float]] = {}    # of the network before those of nodes
    for level, size in sorted({(level_of(line), line.size) for line in machine.collectives}):
        shares.setdefault(level, {})[size] = (size - 1) / size
    rows = []
    for work in works:
        trace = trace_work(work, DTYPE, machine)
        waits: Counter = Counter()
        for event, times in trace.count(Collective).items():
            waits[level_of(event), event.size] += times * barriers(event)
        rows.append([sum(step_seconds(machine, trace).values()),
                     (trace.count(Gemm) + trace.count(MemoryPass)).total(),
                     *(math.fsum(waits[level, size] * share for size, share in some.items())
                       for level, some in shares.items())])
    terms = np.array(rows) / took[:, None]
    more, launch, *fitted = solve_nonnegative(terms, 1 - terms[:, 0]).tolist()
    waiting, node_waiting = [*({size: seconds * share for size, share in some.items()}
                               for some, seconds in zip(shares.values(), fitted)), {}, {}][:2]
    return msgspec.structs.replace(
        machine, achieved=machine_model.Achieved(*[1 / (1 + more)] * 4, latency=1.0),
        launch_seconds=launch, waiting=waiting, node_waiting=node_waiting)


def _state_sources(machine: Machine, products: dict[str, ProductFit],
                   record: Measurements) -> dict[str, str]:
    """Return the source of each figure of the model, as its file states it."""
    environs, rounds = record.environment, record.configuration["rounds"]
    works, steps = step_samples(record)
    when = record.created.partition("T")[0]
    what = ("processor time of all ranks over cores" if environs["oversubscribed"]
            else "makespans")
    how, together = (f"measured {when}, all ranks at once, {way}, the least of {rounds} rounds"
                     for way in (what, "makespans" if machine.ranks else what))
    off = {d: np.abs(list(fit.errors.values())) for d, fit in products.items()}
    fit = (f"{how}: products of {len(off[DTYPE])} shapes; the fit is "
           + ", ".join(f"{100 * np.median(e):.0f} % off in the median and {100 * e.max():.0f} % "
                       f"at most in {d}" for d, e in off.items()))
    blas = f"{environs['blas']}, {environs['blas_architecture']} kernels"
    largest = machine.passes["multiply"].bytes[-1]
    grids = len({(work.scheme, work.grid) for work in works})
    whole = (f"measured {when}: what the makespans of whole steps on {grids} grids, medians "
             f"of {len(steps)} rounds, take beyond their parts")
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
