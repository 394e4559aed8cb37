"""Seconds of an operation, and of links: by what was measured, by loads, and by shared cores."""
import itertools
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.prediction import machine_model
from bench.prediction.calibration import fit, operations_alone
from bench.prediction.machine_model import Curve, Level, Line, load_machine
from bench.prediction.planner import rank_plans
from bench.prediction.seconds import (chain_delay, collective_terms, gemm_seconds, link_level,
                                      pass_seconds)
from bench.prediction.shared_cores import trace_on_cores
from bench.prediction.work import SIZE_NAMES, Work, predict_seconds
from mm3d.grid.grid import Grid
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, Gemm, MemoryPass
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.transport.lanes import chunk_bytes

CPU = load_machine("cpu")
CURVE = Curve([100.0, 1000.0], [1e-6, 1e-5])


def test_a_curve_is_a_power_law_and_goes_on_as_a_straight_line():
    """Through the last size and one of a quarter or less; at the rate where that line falls."""
    assert CURVE.at(1) == CURVE.at(100) == pytest.approx(1e-6)
    assert CURVE.at(100 * 10 ** 0.5) == pytest.approx(1e-6 * 10 ** 0.5)

    def beyond(*seconds):
        return Curve([100.0, 400.0, 800.0][-len(seconds):], list(seconds)).at(1600)

    assert CURVE.at(5000) == pytest.approx(5e-5)
    assert beyond(2.0, 99.0, 9.0) == pytest.approx(9 + 7 * 800 / 700)
    assert beyond(20.0, 5.0, 10.0) == beyond(10.0) == 20


def test_measured_curves_are_used_where_there_are_some():
    event, other = (Collective("all_gather", "x", size, 4, 1000) for size in (2, 4))
    changed = replace(CPU, collectives=[Line("all_gather", 2, 4, 1e-6, 1e-9, CURVE)],
                      passes={"exp": CURVE, "other": CURVE})
    assert collective_terms(changed, event) == {"node": pytest.approx(1e-5), "latency": 0}
    assert collective_terms(changed, other) == collective_terms(CPU, other)
    assert pass_seconds(changed, MemoryPass("exp", 100)) == pytest.approx(1e-6)
    assert pass_seconds(changed, MemoryPass("add", 1000)) == pytest.approx(1e-5)
    assert pass_seconds(CPU, MemoryPass("exp", 100)) == 100 / CPU.memory_bandwidth


def test_columns_cost_what_was_measured_of_columns():
    """Or what rows do where nothing else is known."""
    rows = Line("reduce_scatter", 2, 1, 0, 0, CURVE)
    columns = replace(rows, curve=Curve(CURVE.bytes, [3e-6, 3e-5]), pieces=True)

    def seconds(lines, pieces):
        event = Collective("reduce_scatter", "x", 2, 1, 1000, pieces)
        return collective_terms(replace(CPU, collectives=lines), event)["node"]

    assert seconds([rows, columns], True) == pytest.approx(3 * seconds([rows, columns], False))
    assert seconds([rows], True) == seconds([rows], False) == seconds([columns, rows], False)


@pytest.mark.parametrize("dim, pieces", [(0, False), (1, True), (-1, True)])
@pytest.mark.ranks(2)
def test_what_travels_in_pieces_is_told(comm, dim, pieces):
    """Blocks of rows are in one piece each, blocks of columns are not; one row is."""
    grid = Grid(comm, "numpy", x=2)
    for shape, expected in (((4, 6), pieces), ((1, 6), False)):
        trace = Trace()
        with observed(grid, trace):
            if shape[dim] > 1:
                grid["x"].reduce_scatter(np.ones(shape), dim)
                grid["x"].all_gather(np.ones(shape), dim)
        assert {event.pieces for _, _, event in trace.events} <= {expected}
        assert len(trace.events) == 2 * (shape[dim] > 1)


def test_products_cost_what_products_of_like_shape_did():
    """Nearly, where one was measured; halfway between two as their mean; far from all as the
    figures say."""
    close = replace(CPU, gemm_deviations={"64x512x64": 1.5, "64x2048x64": 0.9})

    def longer(*edges):
        gemm = Gemm(1, *edges, "float32")
        return gemm_seconds(close, gemm) / gemm_seconds(CPU, gemm)

    assert 1.3 < longer(64, 512, 64) < 1.5 and 0.9 < longer(64, 2048, 64) < 0.95
    assert longer(65, 512, 64) == pytest.approx(longer(64, 512, 64), rel=0.01)
    assert longer(64, 1024, 64) == pytest.approx((1.5 * 0.9) ** 0.5, rel=0.05)
    assert longer(10**6, 1, 10**6) == pytest.approx(1)


def test_ranks_wait_where_they_meet_between_work():
    """An all-reduce meets twice; of sizes that were not measured nothing is known."""
    def waits(kind, size):
        machine = replace(CPU, collectives=[Line(kind, size, 1, 0, 0, CURVE)],
                          waiting={2: 1e-4, 8: 3e-4})
        return collective_terms(machine, Collective(kind, "x", size, 1, 9))["latency"]

    assert waits("all_gather", 2) == 1e-4 and waits("reduce", 8) == 3e-4
    assert waits("all_reduce", 8) == 6e-4 and waits("broadcast", 4) == 0


def test_deviations_are_what_was_measured_over_the_fit():
    rng = np.random.default_rng(0)
    times = {shape: (1e-5 + 2e-11 * np.prod(shape)) * rng.uniform(0.8, 1.25)
             for shape in operations_alone.SHAPES}
    found = fit.fit_products(times)
    machine = replace(CPU, gemm_rate={"float32": found.rate}, gemm_half_size=found.half,
                      gemm_seconds=found.start, memory_bandwidth=1e15)
    for shape, seconds in times.items():
        ratio = seconds / gemm_seconds(machine, Gemm(1, *shape, "float32"))
        assert found.deviations["x".join(map(str, shape))] == pytest.approx(ratio)


# On 4 x 1 x 2 ranks: along x 3 ms and 1 GB/s, along z a tenth of both.
LINES = {(4, 2): (3e-3, 1e-9), (2, 1): (3e-4, 1e-10)}


def lines(gather: float = 1.0) -> list[Line]:
    """Both collectives of each line; a gather takes `gather` times as long to start."""
    return [Line(kind, size, stride, alpha * (gather if kind == "all_gather" else 1), beta,
                 Curve([1.0, 2.0], [alpha, alpha + beta]))
            for (size, stride), (alpha, beta) in LINES.items()
            for kind in ("all_gather", "reduce_scatter")]


IDLE = [replace(one, beta=0.0) if one.kind == "all_gather" else one for one in lines()]


@pytest.mark.parametrize("measured, per_node, transport, links", [
    # Two turns of a ring of 4, of which three quarters move through each rank.
    (lines(), 8, "shared", {"node": Level(1.5e-3, 0.75e9)}),
    (lines(gather=3), 8, "mpi", {"node": Level(3e-3, 0.75e9)}),
    # In shared memory a gather takes as long whatever its size; through MPI both count.
    (IDLE, 8, "shared", {"node": Level(1.5e-3, 0.75e9)}),
    (IDLE, 8, "mpi", {"node": Level(1.5e-3, 1.5e9)}),
    # On nodes of 2 ranks z lies within, and x has both ranks of a node on its link.
    (lines(), 2, "shared", {"node": Level(3e-4, 5e9), "network": Level(1.5e-3, 1.5e9)})])
def test_links_are_of_the_longest_line_and_of_collectives_that_copy(measured, per_node, transport,
                                                                    links):
    assert fit.fit_links(measured, per_node, transport) == links


SHORT = Curve([1.0, 2.0], [1e-6, 2e-6])
CLUSTER = Cluster.parse("2x4:200Mbit")
INSIDE = CPU.about + machine_model.cluster_suffix(CLUSTER)
WHERE = "emulated cluster, 2 nodes x 4 ranks, 200 Mbit/s"


@pytest.mark.parametrize("figures, ranks, transport, cluster, said", [
    ({"transport": "shared"}, 2, "mpi", None, "with transport shared, not mpi: set "
     "MM3D_TRANSPORT=shared, or calibrate again"),
    ({"transport": "shared"}, 1, "none", None, "with transport shared, not none: start more "
     "ranks, or calibrate again"),
    ({"transport": "nccl"}, 2, "mpi", None, "with transport nccl, not mpi: calibrate again"),
    # Whatever the transport, which one rank has none of.
    ({"transport": "none", "passes": {"other": SHORT}, "ranks_per_node": 1}, 2, "mpi", None,
     "with 1 rank, not 2: start that many, or calibrate with 2"),
    ({"passes": {"other": SHORT}, "ranks_per_node": 4, "ranks": 8}, 2, "mpi", None,
     "with 8 ranks, not 2: start that many, or calibrate with 2"),
    ({"collectives": lines()}, 8, "mpi", CLUSTER, f"in no emulated cluster, and this is {WHERE}: "
     "start it there, or measure a new file here"),
    ({"collectives": lines(), "about": INSIDE}, 8, "mpi", None,
     f"in {WHERE}, and this is no emulated cluster: start it there, or measure a new file here")])
def test_a_machine_of_others_is_refused(figures, ranks, transport, cluster, said):
    machine = replace(CPU, **figures)
    with pytest.raises(UsageError) as refused:
        machine_model.check_machine(machine, "mine.toml", ranks, transport, cluster)
    assert str(refused.value) == f"--machine mine.toml was measured {said}"


def test_a_machine_is_of_its_own_ranks_or_of_all():
    mine = replace(CPU, passes={"other": SHORT}, ranks_per_node=4, ranks=8,
                   about=INSIDE, transport="mpi shared")
    machine_model.check_machine(mine, "mine.toml", 8, "mpi", CLUSTER)
    for cluster in (None, CLUSTER):
        machine_model.check_machine(CPU, "cpu", 3, "shared", cluster)


def fullest(size: int, stride: int, per_node: int, root: int | None) -> float:
    """Return the most arrays that a node receives in a gather, or that it receives or sends in a
    broadcast by number `root` of each line."""
    ranks = range(np.lcm(size * stride, per_node))
    received = dict.fromkeys((rank // per_node for rank in ranks), 0.0)
    sent = dict(received)
    for first in ranks:
        if first // stride % size:
            continue
        line = [(first + i * stride) // per_node for i in range(size)]
        for node in set(line):
            if root is None:
                received[node] += sum(other != node for other in line) / size
            elif line[root] != node:
                received[node] += 1
                sent[line[root]] = sent[line[root]] + 1 / (len(set(line)) - 1)
    return max(*received.values(), *sent.values())


@pytest.mark.parametrize("size, stride, per_node", [(6, 1, 4), (3, 1, 4), (6, 6, 4), (3, 2, 8),
                                                    (5, 3, 4), (9, 1, 6)])
def test_a_link_carries_what_passes_through_the_fullest_node(size, stride, per_node):
    level, load = link_level(size, stride, per_node, "shared hierarchical")
    assert level == "network"
    assert load * (size - 1) / size == pytest.approx(fullest(size, stride, per_node, None))
    expected = np.mean([fullest(size, stride, per_node, root) for root in range(size)])
    assert link_level(size, stride, per_node, rooted=True)[1] == pytest.approx(expected)


@pytest.mark.parametrize("line, level, load", [
    # The second node has two ranks of the first line and two of the second: each line sends it
    # four of its six blocks.
    ((6, 1, 4, "hierarchical"), "network", 8 / 5), ((6, 1, 4), "network", 2),    # two rings
    # Of six roots two leave that node with one array to receive, two with two, and two with one.
    ((6, 1, 4, "", True), "network", 8 / 6),
    # A node of four gathers from another four of eight blocks, a ring seven.
    ((8, 1, 4, "hierarchical"), "network", 4 / 7), ((8, 1, 4), "network", 1),
    ((8, 8, 4), "network", 4), ((4, 1, 4), "node", 1), ((2, 8, 8), "network", 8)])
def test_loads_by_hand(line, level, load):
    assert link_level(*line) == (level, pytest.approx(load))


def summa_seconds(q: int, chunks: int) -> float:
    """Simulate C = A B by SUMMA, each rank a node, with arrays that take a second to pass on.

    A node passes a chunk on as it has come; a root begins when it has ended what came before.
    """
    ready = np.zeros((q, q))
    for t, along_rows in itertools.product(range(q), (True, False)):
        view = ready if along_rows else ready.T
        for line in view:
            ended = line[t] + 1
            line[t] = ended
            for place in range(1, q):
                node = (t + place) % q
                ended = max(ended + 1 / chunks, line[node])
                line[node] = ended
    return float(ready.max())


@pytest.mark.parametrize("q", [3, 4, 6, 8])
@pytest.mark.parametrize("length", [30_000, 100_000, 1_000_000])
def test_a_product_in_chains_takes_as_long_as_simulated(q, length):
    event = Collective("broadcast", "x", q, 4, length)
    chunks = length / chunk_bytes(length, q)
    predicted = 2 * q * (1 + chain_delay(event, 4))
    assert predicted == pytest.approx(summa_seconds(q, chunks), rel=0.03)
    assert predicted > 2 * q * 1.02


def test_only_broadcasts_over_three_nodes_wait():
    assert chain_delay(Collective("broadcast", "x", 2, 4, 10 ** 6), 4) == 0
    assert chain_delay(Collective("all_gather", "x", 8, 4, 10 ** 6), 4) == 0
    assert chain_delay(Collective("broadcast", "x", 8, 4, 10 ** 4), 4) == 0.75    # 2 * 7 / 8 - 1
    assert chain_delay(Collective("reduce", "x", 8, 4, 10 ** 6), 4) > 0


SIZES = {"layers": 1, "hidden": 32, "heads": 8, "batch": 24, "seq": 8}    # evenly divided


def on_cores(scheme, sizes, cores):
    """The trace of ranks on these cores, and those of all ranks, each traced once at most."""
    grid, traced = GridShape(find_scheme(scheme).directions, sizes), []

    def trace_rank(rank):
        traced.append(rank)
        return dry_run.trace_step(scheme, grid.ranks, grid, rank, **SIZES)
    found = trace_on_cores(trace_rank, scheme, grid, cores)
    assert len(set(traced)) == len(traced)
    return found, [dry_run.trace_step(scheme, grid.ranks, grid, rank, **SIZES)
                   for rank in range(grid.ranks)]


def split(events):
    apart = Counter(), Counter()
    for key, times in events.items():
        apart[not isinstance(key[-1], Collective)][key] = times
    return apart


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (3, 1, 2), (1, 8, 1)])
def test_work_is_the_mean_of_all_ranks(sizes):
    """On one core: exactly, for every operation; collectives are those of rank 0."""
    found, every = on_cores("faces", sizes, 1)
    collectives, work = split(found.events)
    assert collectives == split(every[0].events)[0]
    total = sum((split(one.events)[1] for one in every), Counter())
    assert work.keys() == total.keys()
    for key, times in total.items():
        assert work[key] == pytest.approx(times / len(every), rel=1e-12)
    assert found.peak == every[0].peak


def test_a_rank_has_at_most_a_core_of_its_own():
    """Of 8 ranks on 4 cores one computes outer activations, in half of the time of all at once."""
    found, every = on_cores("faces", (1, 8, 1), 4)
    work, first, other = (split(one.events)[1] for one in (found, every[0], every[1]))
    alone = {key for key in first if not any(key in one.events for one in every[1:])}
    assert alone and all(work[key] == first[key] / 2 for key in alone)
    assert all(work[key] >= other[key] * 7 / 8 for key in other)
    assert found.flops() == every[0].flops()


@pytest.mark.parametrize("scheme, sizes, cores", [
    ("3d", (2, 2, 2), 2), ("2d", (2, 2), 1), ("faces", (2, 2, 2), 0)])
def test_rank_0_stands_for_all(scheme, sizes, cores):
    found, every = on_cores(scheme, sizes, cores)
    assert found.events == every[0].events


def test_predictions_and_plans_know_shared_cores():
    alone = replace(CPU, ranks_per_node=8)
    shared = replace(alone, cores=2)
    took = {}
    for machine in (alone, shared):
        for plan in (plan for scheme in ("3d", "faces")
                     for plan in rank_plans(8, machine, Stack(**SIZES), scheme=scheme)):
            work = Work("layer", plan.scheme, plan.grid,
                        tuple(SIZES[n] for n in SIZE_NAMES["layer"]))
            assert plan.seconds == sum(predict_seconds(machine, work, "float32").values())
            took[machine.cores, plan.scheme, plan.grid.compact] = plan.seconds
    assert took[2, "3d", "2x2x2"] == took[0, "3d", "2x2x2"]
    assert took[2, "faces", "2x2x2"] < took[0, "faces", "2x2x2"]
    # Which cores other numbers of ranks share was not measured.
    others = [[plan.seconds for plan in rank_plans(4, machine, Stack(**SIZES), scheme="faces")]
              for machine in (alone, shared)]
    assert others[0] == others[1]
    assert shared.cores_shared_by(8) == 2 and shared.cores_shared_by(4) == 0
