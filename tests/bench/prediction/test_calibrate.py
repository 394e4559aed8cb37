"""The machine model that a machine measures of itself."""
import math
import platform
import re
import tomllib
from argparse import Namespace

import numpy as np
import pytest

from bench.cluster.spec import Cluster
from bench.errors import StoreError, UsageError, WrongResult
from bench.instruments import sampling
from bench.prediction import machine_file, machine_model, whole_steps, work_list
from bench.prediction.calibration import fit, measure, operations_alone, record as samples_record
from bench.prediction.seconds import collective_terms, gemm_seconds, pass_seconds, step_seconds
from bench.prediction.work import Work, predict_seconds
from bench.records import run_file
from bench.records.measurements import Check, Measurements
from bench.validation.files import check_file
from bench.verbs import calibrate as verb
from mm3d.arrays.products import matmul
from mm3d.grid.grid import Grid
from mm3d.grid.split import Split
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, Gemm, Pass
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from machine_files import assert_sourced
from support import run_ranks

CURVE = machine_model.Curve([100.0, 1000.0], [1e-6, 1e-5])
LINE = machine_model.Line("all_gather", 2, 4, 1e-6, 1e-9, CURVE)
ONE_ROUND = """
import sys
from bench.__main__ import main
from bench.prediction import whole_steps
from bench.prediction.calibration import operations_alone
operations_alone.ROUNDS, whole_steps.ROUNDS = 1, 2
sys.exit(main(sys.argv[1:]))
"""


def test_a_curve_is_a_power_law_between_what_was_measured():
    assert CURVE.at(1) == CURVE.at(100) == pytest.approx(1e-6)
    assert CURVE.at(100 * 10 ** 0.5) == pytest.approx(1e-6 * 10 ** 0.5)


def test_a_curve_goes_on_as_a_straight_line():
    """Through the last size and one of a quarter or less; at the rate where that line falls."""
    def beyond(*seconds):
        return machine_model.Curve([100.0, 400.0, 800.0][-len(seconds):], list(seconds)).at(1600)

    assert CURVE.at(5000) == pytest.approx(5e-5)
    assert beyond(2.0, 99.0, 9.0) == pytest.approx(9 + 7 * 800 / 700)
    assert beyond(20.0, 5.0, 10.0) == beyond(10.0) == 20


def test_a_fit_finds_what_made_the_times():
    """Rate, start and the cost of each edge; a rate alone where nothing else was put in."""
    shapes = [*((edge,) * 3 for edge in operations_alone.EDGES), *operations_alone.OBLONG]
    for start, half in ((5e-6, (60.0, 30.0, 90.0)), (0.0, (0.0, 0.0, 0.0))):
        times = {shape: start + 2 * np.prod(shape) / 1e11 * (
            1 + sum(h / edge for h, edge in zip(half, shape)) / 3) for shape in shapes}
        found = fit.fit_products(times)
        assert found.rate == pytest.approx(1e11)
        assert found.start == pytest.approx(start, abs=1e-12)
        assert found.half == pytest.approx(half, abs=1e-4)
        assert np.abs(list(found.errors.values())).max() < 1e-6


def test_every_line_of_every_grid_is_measured():
    """Of 12 ranks: all sizes and strides that directions of grids have."""
    lines = {(y, z) for x in range(1, 13) for y in range(2, 13) for z in range(1, 13)
             if x * y * z == 12}
    assert sorted(operations_alone.list_placements(12)) == sorted(lines)
    assert operations_alone.list_placements(1) == []


def test_measured_curves_are_used_where_there_are_some():
    machine = machine_model.load_machine("cpu")
    event = Collective("all_gather", "x", 2, 4, 1000)
    other = Collective("all_gather", "x", 4, 4, 1000)
    plain = collective_terms(machine, other)
    changed = machine_model.msgspec.structs.replace(machine, collectives=[LINE],
                                                    passes={"exp": CURVE, "other": LINE.curve})
    assert collective_terms(changed, event) == {"node": pytest.approx(1e-5), "latency": 0}
    assert collective_terms(changed, other) == plain
    assert pass_seconds(changed, Pass("exp", 100)) == pytest.approx(1e-6)
    assert pass_seconds(changed, Pass("add", 1000)) == pytest.approx(1e-5)
    assert pass_seconds(machine, Pass("exp", 100)) == 100 / machine.memory_bandwidth


def test_columns_cost_what_was_measured_of_columns():
    """Or what rows do where nothing else is known."""
    rows = machine_model.Line("reduce_scatter", 2, 1, 0, 0, CURVE)
    columns = machine_model.msgspec.structs.replace(
        rows, curve=machine_model.Curve(CURVE.bytes, [3 * s for s in CURVE.seconds]), pieces=True)

    def seconds(lines, pieces):
        machine = machine_model.msgspec.structs.replace(machine_model.load_machine("cpu"),
                                                        collectives=lines)
        event = Collective("reduce_scatter", "x", 2, 1, 1000, pieces)
        return collective_terms(machine, event)["node"]

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
    shapes = {"64x512x64": 1.5, "64x2048x64": 0.9}
    plain = machine_model.load_machine("cpu")
    close = machine_model.msgspec.structs.replace(plain, gemm_deviations=shapes)

    def longer(*edges):
        gemm = Gemm(1, *edges, "float32")
        return gemm_seconds(close, gemm) / gemm_seconds(plain, gemm)

    assert 1.3 < longer(64, 512, 64) < 1.5 and 0.9 < longer(64, 2048, 64) < 0.95
    assert longer(65, 512, 64) == pytest.approx(longer(64, 512, 64), rel=0.01)
    assert longer(64, 1024, 64) == pytest.approx((1.5 * 0.9) ** 0.5, rel=0.05)
    assert longer(10**6, 1, 10**6) == pytest.approx(1)


def test_deviations_are_what_was_measured_over_the_fit():
    shapes = [*((edge,) * 3 for edge in operations_alone.EDGES), *operations_alone.OBLONG]
    rng = np.random.default_rng(0)
    times = {shape: (1e-5 + 2e-11 * np.prod(shape)) * rng.uniform(0.8, 1.25) for shape in shapes}
    found = fit.fit_products(times)
    machine = machine_model.msgspec.structs.replace(
        machine_model.load_machine("cpu"), gemm_rate={"float32": found.rate},
        gemm_half_size=found.half,
        gemm_seconds=found.start, memory_bandwidth=1e15)
    for shape, seconds in times.items():
        ratio = seconds / gemm_seconds(machine, Gemm(1, *shape, "float32"))
        assert found.deviations["x".join(map(str, shape))] == pytest.approx(ratio)


def test_ranks_wait_where_they_meet_between_work():
    """An all-reduce meets twice; of sizes that were not measured nothing is known."""
    def waits(kind, size):
        line = machine_model.Line(kind, size, 1, 0, 0, CURVE)
        machine = machine_model.msgspec.structs.replace(machine_model.load_machine("cpu"),
                                                        collectives=[line],
                                                        waiting={2: 1e-4, 8: 3e-4})
        return collective_terms(machine, Collective(kind, "x", size, 1, 9))["latency"]

    assert waits("all_gather", 2) == 1e-4 and waits("reduce", 8) == 3e-4
    assert waits("all_reduce", 8) == 6e-4 and waits("broadcast", 4) == 0


def test_models_are_smaller_where_links_are_slow():
    """The matrices of a step keep a link busy for at most 1.2 s, by arithmetic of its own: three
    times 12 h^2 numbers of four bytes."""
    def features(text):
        short, (hidden, *others) = work_list.list_models(Cluster.parse(text))
        assert tuple(others) == work_list.MODELS[1][1:]
        assert short == (hidden // 2, 8, 8, 48, 1)
        return hidden

    for unlimited in (None, Cluster.parse("4x2:unlimited")):
        assert work_list.list_models(unlimited) == work_list.MODELS
    assert [features(f"4x2:{link}") for link in ("200Mbit", "100Mbit", "50Mbit")] \
        == [448, 320, 224]
    assert features("4x2:1Mbit") == 160    # the smallest
    slow = Cluster.parse("16x4:50Mbit")
    assert work_list.list_models(slow, many=True) == work_list.list_models(slow)[1:]
    assert work_list.list_models(None, many=True) == work_list.MODELS
    assert 3 * 12 * 224 ** 2 * 4 / (50e6 / 8) < 1.2 < 3 * 12 * 320 ** 2 * 4 / (50e6 / 8)


def test_arrays_of_all_ranks_fit_the_memory(monkeypatch):
    """An array of each of them takes a 32nd of the memory at most, so that several fit."""
    monkeypatch.setattr(operations_alone, "total_memory", lambda: 24 * 2 ** 30)
    assert operations_alone.bytes_that_fit(16) == list(operations_alone.BYTES)
    assert operations_alone.bytes_that_fit(64)[-1] == 2 ** 21 == operations_alone.BYTES[-2]
    fitting = operations_alone.bytes_that_fit(64)
    assert operations_alone.bytes_within(1, "broadcast", 4, 1, None, fitting)[-1] == 2 ** 21


def test_the_largest_array_keeps_links_busy_for_as_long_as_it_may():
    """Four ranks of each node at once on its link, by arithmetic of its own."""
    cluster = Cluster.parse("16x4:200Mbit")
    for kind, sends in (("all_gather", 1), ("all_reduce", 2)):
        *others, last = operations_alone.bytes_within(0.4, kind, 16, 4, cluster)
        assert others == [n for n in operations_alone.BYTES if 512 <= n < last]
        assert sends * 4 * last * 8 / 200e6 <= 0.4 < 2 * sends * 4 * last * 8 / 200e6
    assert operations_alone.bytes_within(1e-9, "broadcast", 16, 4, cluster) == [512]
    assert operations_alone.bytes_within(1e-9, "broadcast", 4, 1, cluster)[-1] == 2 ** 24


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks, per_node", [(1, 1), (2, 2), (8, 8), (8, 2)])
def test_what_steps_lose_is_found(ranks, per_node):
    """From the seconds of works on a machine that loses just that, exactly; noise changes little,
    and steps as fast as their parts lose nothing.  On several nodes barriers inside them wait
    otherwise."""
    works = work_list.list_works(ranks, [], work_list.MODELS)
    sizes = [size for size in (2, 4, 8) if size <= ranks]
    alone = machine_model.msgspec.structs.replace(
        machine_model.load_machine("cpu"), ranks_per_node=per_node,
        collectives=[machine_model.Line(kind, size, stride, 0, 0, CURVE)
                     for size, stride in operations_alone.list_placements(ranks)
                     for kind in operations_alone.COLLECTIVES])
    truth = machine_model.msgspec.structs.replace(
        alone, achieved=machine_model.Achieved(0.6, 0.6, 0.6, 0.6, 1.0), launch_seconds=2e-5,
        waiting={size: 3e-5 * (size - 1) / size for size in sizes},
        node_waiting={2: 7e-5 / 2} if per_node < ranks else {})
    alone = machine_model.msgspec.structs.replace(
        alone, achieved=machine_model.Achieved(1.0, 1.0, 1.0, 1.0, 1.0), launch_seconds=0.0)

    def seconds(machine):
        return np.array([sum(predict_seconds(machine, work, "float32").values())
                         for work in works])

    found = fit.fit_step_losses(alone, works, seconds(truth))
    for name in ("gemm", "memory", "node", "latency"):
        assert getattr(found.achieved, name) == pytest.approx(getattr(truth.achieved, name))
    assert found.launch_seconds == pytest.approx(truth.launch_seconds)
    assert found.waiting == pytest.approx(truth.waiting)
    assert found.node_waiting == pytest.approx(truth.node_waiting)
    noise = 1 + 0.02 * np.random.default_rng(1).standard_normal(len(works))
    noisy = fit.fit_step_losses(alone, works, seconds(truth) * noise)
    assert seconds(noisy) == pytest.approx(seconds(truth), rel=0.03)
    same = fit.fit_step_losses(alone, works, 0.9 * seconds(alone))
    assert {*same.waiting.values(), *same.node_waiting.values()} <= {0.0}
    assert same.achieved == alone.achieved


def test_squares_do_not_tell_edges_apart():
    times = {(n, n, n): 1e-6 + 2 * n ** 3 / 1e11 * (1 + 50 / n) for n in operations_alone.EDGES}
    found = fit.fit_products(times)
    assert found.rate == pytest.approx(1e11) and found.half == pytest.approx((50, 50, 50))
    assert fit.fit_products({(8, 8, 8): 1e-6}).rate == pytest.approx(2 * 8 ** 3 / 1e-6)


class ManyRanks:
    """The communicator of 64 ranks that all do as this process does."""
    size = 64

    def Barrier(self):
        pass

    def allreduce(self, value):
        return self.size * value


def test_a_sample_is_as_long_on_each_of_many_ranks(monkeypatch):
    """A first call finds nothing in cache: samples of one or two calls would show that alone."""
    clock = [0.0]
    monkeypatch.setattr(operations_alone.launcher, "oversubscribed", lambda: True)
    monkeypatch.setattr(operations_alone.launcher, "cores", lambda: 2)
    monkeypatch.setattr(operations_alone.time, "process_time", lambda: clock[0])

    def step():
        clock[0] += 1e-5

    sample = operations_alone.make_sampler(step, ManyRanks())
    before = clock[0]
    assert sample() == pytest.approx(1e-5 * 64 / 2)
    assert clock[0] - before >= sampling.SAMPLE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("crowded", [False, True])
def test_a_sample_is_of_one_call(comm, crowded, monkeypatch):
    """Work, or makespan: of 3 ms on each of two ranks, all of it on one core, half on two."""
    monkeypatch.setattr(operations_alone.launcher, "oversubscribed", lambda: crowded)
    monkeypatch.setattr(operations_alone.launcher, "cores", lambda: 2 - crowded)

    def busy():
        end = operations_alone.time.process_time() + 3e-3
        while operations_alone.time.process_time() < end:
            pass

    found = operations_alone.make_sampler(busy, comm)()
    assert 3e-3 * (1 + crowded) <= found < (9e-3 if crowded else 1)


def test_a_written_machine_is_read_again(tmp_path):
    machine = machine_model.msgspec.structs.replace(
        machine_model.load_machine("cpu"), about='with "quotes"', gemm_seconds=1e-6, block=5,
        collectives=[LINE],
        passes={"other": CURVE}, transport="mpi", waiting={2: 1e-4})
    path = tmp_path / "mine.toml"
    path.write_text(machine_file.format_machine(machine))
    assert machine_model.load_machine(str(path)) == machine


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_machine_measures_itself(tmp_path):
    """On two ranks, in one round: every collective, rates that can be, and no word of who and
    where."""
    path = tmp_path / "here.toml"
    run = run_ranks(2, "-m", "mpi4py", "-c", ONE_ROUND, "calibrate", "--out", str(path),
                    timeout=320)
    assert run.returncode == 0, run.stderr
    machine = machine_model.load_machine(str(path))
    assert machine.ranks_per_node == 2
    assert {line.key for line in machine.collectives} == {
        *((kind, 2, 1, False) for kind in operations_alone.COLLECTIVES),
        ("all_gather", 2, 1, True), ("reduce_scatter", 2, 1, True)}
    assert machine.transport == "mpi" and set(machine.waiting) == {2}
    assert all(1e6 < rate < 1e15 for rate in machine.gemm_rate.values())
    assert platform.node() not in path.read_text()
    assert_sourced(machine)
    trace = dry_run.trace_step("3d", 2, (2, 1, 1), layers=1, hidden=64, heads=4, batch=4, seq=16,
                               block=machine.elementwise_block)
    assert sum(step_seconds(machine, trace).values()) > 1e-5
    [samples] = tmp_path.glob("here-samples-*.h5")
    assert check_file(samples)[0] == []
    again = run_ranks(1, "-m", "bench", "calibrate", "--samples", str(samples), "--out",
                      str(tmp_path / "again.toml"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.toml").read_text() == path.read_text()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cluster, rounds, steps", [(None, 3, 24), ("2x1:500Mbit", 2, 6)])
def test_links_make_steps_long_so_a_round_has_few(comm, monkeypatch, cluster, rounds, steps):
    """The file states how many there were."""
    monkeypatch.setattr(measure, "node_numbers", lambda comm: [0, int(cluster is not None)])
    monkeypatch.setattr(Cluster, "from_environment",
                        lambda: cluster and Cluster.parse(cluster))
    monkeypatch.setattr(whole_steps, "make_transformers", lambda *_: [])
    monkeypatch.setattr(whole_steps, "measure_rounds",
                        lambda trials, count, seed, *_: np.ones((count, 1, 2)))
    for part in ("products", "passes", "collectives"):
        monkeypatch.setattr(operations_alone, f"measure_{part}", lambda *_: {})
    lines = []
    record = measure.measure_samples(comm, lines.append)
    assert lines[-1].startswith(f"round {rounds} of {rounds}: ")
    assert (record is None) == (comm.rank > 0)
    if record:
        assert record.configuration["rounds"] == rounds
        assert record.variables["step_seconds"].values.shape == (1, steps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("most, fitted", [(2, {"2.5d", "faces"}), (1, set())])
def test_steps_of_summa_are_not_fitted_to_many_ranks_of_a_cluster(comm, monkeypatch, most, fitted):
    monkeypatch.setattr(measure, "MANY", most)
    monkeypatch.setattr(measure, "node_numbers", lambda comm: [0, 1])
    monkeypatch.setattr(Cluster, "from_environment", lambda: Cluster.parse("2x1:500Mbit"))
    monkeypatch.setattr(whole_steps, "make_transformers", lambda *_: [])
    monkeypatch.setattr(whole_steps, "measure_rounds",
                        lambda trials, count, seed, *_: np.ones((count, 1, 2)))
    for part in ("products", "passes", "collectives"):
        monkeypatch.setattr(operations_alone, f"measure_{part}", lambda *_: {})
    record = measure.measure_samples(comm)
    if record:
        assert ({Work.parse(label).scheme for label in record.scales["work"]}
                == {"1d", "1d-sp", "3d"} | fitted)


@pytest.mark.ranks(4)
def test_a_later_round_makes_as_many_calls_as_the_earlier_took(comm, monkeypatch):
    """On two nodes; columns are not measured over slow links."""
    asked = []

    def makespans(step, comm, synchronize, clock, least, calls):
        asked.append((least, calls))
        return lambda: 0.02

    monkeypatch.setattr(operations_alone.sampling, "makespans", makespans)
    monkeypatch.setattr(operations_alone, "LINK_SECONDS", 1e-9)
    monkeypatch.setattr(operations_alone, "bytes_that_fit", lambda ranks: [512])
    cluster = Cluster.parse("2x2:100Mbit")
    first = operations_alone.measure_collectives(comm, cluster)
    assert set(asked) == {(operations_alone.LONG_SAMPLE, None)}
    assert {(size, stride) for _, size, stride, pieces, _ in first if pieces} == {(2, 1)}
    assert {(size, stride) for _, size, stride, *_ in first} == {(2, 1), (2, 2), (4, 1)}
    free = operations_alone.measure_collectives(comm, Cluster.parse("2x2:unlimited"))
    assert {(size, stride) for _, size, stride, pieces, _ in free if pieces} == {
        (2, 1), (2, 2), (4, 1)}
    asked.clear()
    assert operations_alone.measure_collectives(comm, cluster, first) == first
    assert set(asked) == {(operations_alone.LONG_SAMPLE, 3)}    # 3 x 20 ms is 50 ms or more


def calibrated(comm) -> Measurements:
    """The record of a calibration with 2 nodes of 2 ranks: times of a machine of 1 Gflop/s."""
    operations = {samples_record.label_product(dtype, (m, n, k)):
                  [2e-9 * m * n * k, 4e-9 * m * n * k, 3e-9 * m * n * k]
                  for dtype in measure.DTYPES
                  for m, n, k in [(8, 8, 8), (16, 8, 32), (64, 32, 16), (8, 64, 64)]}
    operations |= {samples_record.label_pass(name, size): [2e-9 * size, 1e-9 * size]
                   for name in ("copy", "multiply") for size in (64, 4096)}
    operations |= {samples_record.label_collective(kind, size, stride, pieces, length):
                   [5e-5, 1e-5 + 1e-9 * length * stride]
                   for kind, pieces in (("all_gather", False), ("all_gather", True),
                                        ("all_reduce", False), ("reduce_scatter", False))
                   for size, stride in operations_alone.list_placements(4)
                   for length in (512, 4096)}
    works = work_list.list_works(4, [], work_list.MODELS[:1], schemes=("1d", "3d"))
    return samples_record.make_record(
        operations, works, np.full((4, len(works)), 0.1), [Check("output", 0.0, 1e-6)],
        {"transport": "chain mpi", "rounds": 2},
        {**sampling.measured_environment("numpy", comm), "ranks": 4, "ranks_per_core": 2.0,
         "cores": 2, "oversubscribed": True, "node_of_rank": "0 0 1 1",
         "emulated_cluster": "2x2:50Mbit", "memory_bytes": 4_000_000_000,
         "elementwise_block": 1234})


@pytest.mark.ranks(1)
def test_a_model_is_fitted_again_to_the_samples_in_a_file(comm, tmp_path, capsys):
    """All that the model says of the machine is in the file, wherever it is read."""
    record = calibrated(comm)
    path = run_file.write_run(record, tmp_path, "mine-samples")
    again = samples_record.read_calibration(path)
    alone = samples_record.least_seconds(again)
    assert alone == samples_record.least_seconds(record)
    assert alone.products["float64"][16, 8, 32] == 2e-9 * 16 * 8 * 32
    assert alone.passes["multiply", 4096] == 4096e-9
    assert alone.collectives["all_gather", 2, 2, True, 512] == 1e-5 + 1e-9 * 512 * 2
    assert alone.collectives["all_reduce", 4, 1, False, 4096] == 1e-5 + 1e-9 * 4096
    assert verb.run(Namespace(out=str(tmp_path / "mine.toml"), samples=str(path)), comm) == 0
    machine = machine_model.load_machine(str(tmp_path / "mine.toml"))
    assert machine.about.endswith("; emulated cluster, 2 nodes x 2 ranks, 50 Mbit/s")
    assert (machine.ranks, machine.ranks_per_node, machine.cores) == (4, 2, 2)
    assert (machine.memory_bytes, machine.block) == (1e9, 1234)
    assert machine.gemm_rate["float32"] == pytest.approx(1e9)
    assert "medians of 4 rounds" in machine.sources["waiting"]
    assert "the least of 2 rounds" in machine.sources["collectives"]
    assert_sourced(machine)
    first = machine_file.format_machine(fit.fit_machine(record))
    assert (tmp_path / "mine.toml").read_text() == first
    assert f"machine file: {tmp_path / 'mine.toml'}" in capsys.readouterr().out
    assert check_file(path)[0] == []


@pytest.mark.ranks(1, 2)
def test_other_files_than_samples_are_refused(comm, shared_tmp_path):
    path = shared_tmp_path / "other.h5"
    if comm.rank == 0:
        other = Measurements("other", {}, {"ranks": 1}, {}, {}, [])
        run_file.write_run(other, shared_tmp_path, "other").rename(path)
    comm.Barrier()
    for file, said in ((path, "is of other: the samples that calibrate wrote would do"),
                       (shared_tmp_path / "none.h5", "does not exist")):
        with pytest.raises(StoreError, match=said):
            verb.run(Namespace(out=str(shared_tmp_path / "new.toml"), samples=str(file)), comm)
    assert not (shared_tmp_path / "new.toml").exists()


@pytest.mark.ranks(4)
def test_a_machine_without_the_memory_is_refused(comm, monkeypatch):
    """Before anything is built: a rank that the system kills says nothing."""
    monkeypatch.setattr(measure, "total_memory", lambda: 500_000_000)
    monkeypatch.setattr(whole_steps, "make_transformers", lambda *_: pytest.fail("it measures"))
    refused = "4 ranks: .* 0.8 GB .* has 0.5: 2 ranks at most would do"
    with pytest.raises(UsageError, match=refused):
        measure.measure_samples(comm)


@pytest.mark.ranks(4)
def test_ranks_on_several_nodes_are_refused(comm, monkeypatch):
    """Also one on each, as with ``mpirun -ppn 1``, where each is all that its node has."""
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    monkeypatch.setattr(measure, "node_numbers", lambda comm: list(range(comm.size)))
    monkeypatch.setattr(whole_steps, "make_transformers", lambda *_: pytest.fail("it measures"))
    with pytest.raises(UsageError, match="on 4 nodes: .* start all ranks on one"):
        measure.measure_samples(comm)


@pytest.mark.ranks(1, 2)
def test_a_wrong_transport_is_refused_before_anything_is_measured(comm, monkeypatch):
    monkeypatch.setenv("MM3D_TRANSPORT", "foo")
    monkeypatch.setattr(whole_steps, "make_transformers", lambda *_: pytest.fail("it measures"))
    with pytest.raises(UsageError, match="MM3D_TRANSPORT='foo' is unknown"):
        measure.measure_samples(comm)


@pytest.mark.ranks(2, first=(2,))
@pytest.mark.parametrize("part, line", [
    ("steps", "layer 1d-sp 2 96x8x8x32x2: output is off by "),
    ("products", "C of 32 x 32 x 32 float32"),
    ("passes", "exp of 16 elements is not 1.64872"),
    ("collectives", "reduce_scatter of 128 elements along y is off by 1")])
def test_what_is_wrong_is_not_timed(comm, monkeypatch, part, line):
    """On one rank only; all of them say so."""
    right = {"steps": Split.reduce_scatter, "products": matmul,
             "passes": operations_alone._operations, "collectives": Split.reduce_scatter}[part]

    def wrong(*arguments):
        found = right(*arguments)
        if part == "passes" and comm.rank == 1:
            found["exp"] = (lambda: None, *found["exp"][1:])
        elif part != "passes" and comm.rank == 1:
            found[0] += 1
        return found

    where = {"products": (operations_alone, "matmul"), "passes": (operations_alone, "_operations")}
    monkeypatch.setattr(*where.get(part, (Split, "reduce_scatter")), wrong)
    works = work_list.list_works(comm.size, [], work_list.MODELS[:1])
    with pytest.raises(WrongResult, match=re.escape(line)):
        {"steps": lambda: whole_steps.make_transformers(works, comm, []),
         "products": lambda: operations_alone.measure_products("float32", comm),
         "passes": lambda: operations_alone.measure_passes(comm),
         "collectives": lambda: operations_alone.measure_collectives(comm)}[part]()


@pytest.mark.ranks(2)
def test_what_is_wrong_makes_no_machine(comm, shared_tmp_path, monkeypatch, capsys):
    def wrong(comm, progress):
        raise WrongResult("exp of 16 elements is not 1.64872")

    monkeypatch.setattr(measure, "measure_samples", wrong)
    path = shared_tmp_path / "here.toml"
    assert verb.run(Namespace(out=str(path), samples=None), comm) == 1 and not path.exists()
    assert capsys.readouterr().out == (comm.rank == 0) * (
        "failed: calibrate: exp of 16 elements is not 1.64872; no file was written\n")


NASTY = ['with "quotes" and \\', "an emoji \N{GRINNING FACE}", "two\nlines\r\n and \ta tab",
         "# no comment", "'" * 3, '"' * 3, "\x00\x07\x1f\x7f\x85", "[table]\nname = 3", "",
         "\ue000\U0010ffff", "a = b"]


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_any_text_is_written_and_read_again(text, tmp_path):
    """Also as the name of a source or of an operation."""
    source = f"as of {text}"
    machine = machine_model.msgspec.structs.replace(
        machine_model.load_machine("cpu"), name=text, about=text,
        passes={"other": CURVE, text: CURVE}, sources={text: source, "network": source})
    written = machine_file.format_machine(machine)
    path = tmp_path / "mine.toml"
    path.write_text(written, encoding="utf-8", newline="")
    assert machine_model.load_machine(str(path)) == machine
    assert tomllib.loads(written)["about"] == text


def test_numbers_are_written_to_six_digits_and_whole_ones_in_full():
    numbers = [1 / 3, 123456789.5, 2.0 ** 53, 1e300, -0.0, 5e-324, math.inf, -math.inf, math.nan]
    curve = machine_model.Curve(numbers, [*map(float, range(9))])
    machine = machine_model.msgspec.structs.replace(machine_model.load_machine("cpu"),
                                                    passes={"other": curve})
    found = tomllib.loads(machine_file.format_machine(machine))["passes"]["other"]
    assert found["bytes"][:8] == [0.333333, 123457000, 2.0 ** 53, 1e300, 0, 5e-324, math.inf,
                                  -math.inf] and math.isnan(found["bytes"][8])
    assert found["seconds"] == curve.seconds
