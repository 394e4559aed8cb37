"""The machine model that a machine measures of itself: what is measured, the fit, the files."""
import platform
import re
import time
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from bench.cluster.spec import Cluster
from bench.errors import StoreError, UsageError, WrongResult
from bench.instruments import sampling
from bench.prediction import work_list
from bench.prediction.calibration import fit, measure, operations_alone, record as samples_record
from bench.prediction.machine_model import Achieved, Curve, Line, load_machine
from bench.prediction.work import predict_seconds
from bench.records import run_file
from bench.records.measurements import Check, Measurements
from bench.validation.files import check_file
from bench.verbs import calibrate as verb
from mm3d.grid.axis import COLLECTIVES
from machine_files import assert_sourced, format_machine

CPU = load_machine("cpu")
CURVE = Curve([100.0, 1000.0], [1e-6, 1e-5])
SMALL = [(8, 8, 8), (16, 8, 32), (64, 32, 16), (128, 128, 128), (32, 32, 32)]
MODEL = (16, 2, 4, 4, 1)
NOTHING = dict.fromkeys(("logs", "machine", "stall", "cluster"))    # is asked for


@pytest.mark.parametrize("start, half, shapes", [
    (5e-6, (60.0, 30.0, 90.0), operations_alone.SHAPES),
    (0.0, (0.0, 0.0, 0.0), operations_alone.SHAPES), (0.0, (0.0, 0.0, 0.0), [(8, 8, 8)]),
    # Squares do not tell edges apart.
    (1e-6, (50.0, 50.0, 50.0), [(edge,) * 3 for edge in operations_alone.EDGES])])
def test_a_fit_finds_what_made_the_times(start, half, shapes):
    times = {shape: start + 2 * np.prod(shape) / 1e11 * (
        1 + sum(h / edge for h, edge in zip(half, shape)) / 3) for shape in shapes}
    found = fit.fit_products(times)
    assert found.rate == pytest.approx(1e11)
    assert found.start == pytest.approx(start, abs=1e-12)
    assert found.half == pytest.approx(half, abs=1e-4)
    assert np.abs(list(found.errors.values())).max() < 1e-6


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks, per_node", [(1, 1), (2, 2), (8, 8), (8, 2)])
def test_what_steps_lose_is_found(ranks, per_node):
    """From the seconds of works on a machine that loses just that, exactly; noise changes little,
    and steps as fast as their parts lose nothing.  On several nodes barriers inside them wait
    otherwise."""
    works = work_list.list_works(ranks, [], measure.MODELS)
    sizes = [size for size in (2, 4, 8) if size <= ranks]
    alone = replace(
        CPU, ranks_per_node=per_node, achieved=Achieved(1.0, 1.0, 1.0, 1.0, 1.0),
        launch_seconds=0.0,
        collectives=[Line(kind, size, stride, 0, 0, CURVE) for kind in COLLECTIVES
                     for size, stride in operations_alone.list_placements(ranks)])
    truth = replace(
        alone, achieved=Achieved(0.6, 0.6, 0.6, 0.6, 1.0), launch_seconds=2e-5,
        waiting={size: 3e-5 * (size - 1) / size for size in sizes},
        node_waiting={2: 7e-5 / 2} if per_node < ranks else {})

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


def test_every_line_of_every_grid_is_measured():
    lines = {(y, z) for x in range(1, 13) for y in range(2, 13) for z in range(1, 13)
             if x * y * z == 12}
    points = operations_alone.list_collectives(12, [64, 512, 4096])
    kinds = [*((kind, False) for kind in COLLECTIVES), ("all_gather", True),
             ("reduce_scatter", True)]
    assert sorted(points) == sorted(
        ("collective", kind, *line, pieces, length) for kind, pieces in kinds for line in lines
        for length in (512, 4096))
    assert operations_alone.list_collectives(1, [512]) == []


def test_arrays_of_all_ranks_fit_the_memory():
    assert operations_alone.bytes_that_fit(16, 24 * 2 ** 30) == list(operations_alone.BYTES)
    assert operations_alone.bytes_that_fit(64, 24 * 2 ** 30)[-1] == 2 ** 21


def test_the_largest_array_keeps_links_busy_for_as_long_as_it_may():
    """Four ranks of each node at once on its link, by arithmetic of its own; columns are measured
    where no link takes longer than to make them contiguous."""
    def points(text):
        return operations_alone.list_collectives(64, operations_alone.BYTES, Cluster.parse(text))

    def lengths(text, kind, size, stride):
        return [length for _, *line, pieces, length in points(text)
                if line == [kind, size, stride] and not pieces]

    most = operations_alone.LINK_SECONDS
    for kind, sends in (("all_gather", 1), ("all_reduce", 2)):
        *others, last = lengths("16x4:200Mbit", kind, 16, 4)
        assert others == [n for n in operations_alone.BYTES if 512 <= n < last]
        assert sends * 4 * last * 8 / 200e6 <= most < 2 * sends * 4 * last * 8 / 200e6
    assert lengths("16x4:1kbit", "broadcast", 16, 4) == [512]
    assert lengths("16x4:1kbit", "broadcast", 4, 1)[-1] == 2 ** 24
    columns = {text: {(size, stride) for *_, size, stride, pieces, _ in points(text) if pieces}
               for text in ("16x4:200Mbit", "16x4:unlimited")}
    assert columns == {"16x4:200Mbit": {(2, 1), (2, 2), (4, 1)},
                       "16x4:unlimited": set(operations_alone.list_placements(64))}


def test_models_are_smaller_where_links_are_slow():
    """The matrices of a step keep a link busy for at most 1.2 s, by arithmetic of its own: three
    times 12 h^2 numbers of four bytes."""
    def features(text):
        short, (hidden, *others) = measure.list_models(Cluster.parse(text))
        assert tuple(others) == measure.MODELS[1][1:]
        assert short == (hidden // 2, 8, 8, 48, 1)
        return hidden

    for unlimited in (None, Cluster.parse("4x2:unlimited")):
        assert measure.list_models(unlimited) == measure.MODELS
    assert [features(f"4x2:{link}") for link in ("200Mbit", "100Mbit", "50Mbit")] \
        == [448, 320, 224]
    assert features("4x2:1Mbit") == 160    # the smallest
    assert 3 * 12 * 224 ** 2 * 4 / (50e6 / 8) < 1.2 < 3 * 12 * 320 ** 2 * 4 / (50e6 / 8)


@pytest.mark.parametrize("ranks, cluster, turns, models, schemes", [
    (8, None, (3, 8), 2, None), (64, None, (2, 3), 2, None), (8, "4x2:200Mbit", (2, 3), 2, None),
    # Steps of SUMMA are not fitted to many ranks of a cluster, nor are short ones.
    (64, "16x4:50Mbit", (2, 3), 1, {"1d", "1d-sp", "3d"})])
def test_less_is_measured_where_steps_are_long(ranks, cluster, turns, models, schemes):
    found = measure.choose_extent(ranks, cluster and Cluster.parse(cluster), 24e9)
    assert (found.rounds, found.steps) == turns
    assert len({work.sizes for work in found.works}) == models
    listed = [work.scheme for work in found.works if work.sizes == found.works[0].sizes]
    assert listed.count("3d") == measure.GRIDS and len(set(found.works)) == len(found.works)
    assert set(listed) == (schemes or {work.scheme for work in work_list.list_works(
        ranks, [], [MODEL])})


def test_a_sample_is_as_long_on_each_of_many_ranks():
    """A first call finds nothing in cache: samples of one or two calls would show that alone."""
    clock = [0.0]
    ranks = SimpleNamespace(size=64, Barrier=lambda: None, allreduce=lambda value: 64 * value)

    def step():
        clock[0] += 1e-5

    found = operations_alone.processor_sampler(ranks, 2, lambda: clock[0])(step)
    assert found == pytest.approx([1e-5 * 64 / 2] * operations_alone.SAMPLES)
    assert clock[0] >= operations_alone.SAMPLES * sampling.SAMPLE


@pytest.mark.ranks(2)
def test_a_sample_is_of_one_call(comm):
    """Makespan, or work: of 3 ms on each of two ranks, all of it on one core."""
    def busy():
        clock[0] += 3e-3
        end = time.process_time() + 3e-3
        while time.process_time() < end:
            pass

    clock = [0.0]
    assert 3e-3 <= min(operations_alone.makespan_sampler(comm)(busy)) < 1
    assert 6e-3 <= min(operations_alone.processor_sampler(comm, 1)(busy))
    found = operations_alone.processor_sampler(comm, 1, lambda: clock[0])(busy)
    assert found == pytest.approx(operations_alone.SAMPLES * [6e-3])


def test_a_machine_without_the_memory_is_refused():
    with pytest.raises(UsageError, match="4 ranks: .* 0.8 GB .* has 0.5: 2 ranks at most would"):
        measure.read_memory(4, 500_000_000)
    assert measure.read_memory(2, 500_000_000) == 500_000_000


def test_ranks_on_several_nodes_are_those_of_a_cluster():
    cluster = Cluster.parse("2x2:50Mbit")
    assert measure.find_cluster([0, 0, 1, 1], cluster) is cluster
    assert measure.find_cluster([0, 0], cluster) is measure.find_cluster([0], None) is None
    with pytest.raises(UsageError, match="4 ranks on 4 nodes: .* start all ranks on one"):
        measure.find_cluster([0, 1, 2, 3], None)
    with pytest.raises(UsageError, match="3 ranks on 2 nodes: start as many on each"):
        measure.find_cluster([0, 0, 1], cluster)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("part, line", [("products", "C of 8 x 8 x 8 float32"),
                                        ("passes", "exp of 16 elements is not 1.64872")])
def test_what_is_wrong_is_not_timed(comm, part, line):
    """On the last rank only; all of them say so."""
    wrong = comm.rank == comm.size - 1

    def passes(a, b, out):
        found = operations_alone.list_passes(a, b, out)["exp"]
        return {"exp": (lambda: None, *found[1:]) if wrong else found}

    def take(step):
        pytest.fail("it is timed")

    with pytest.raises(WrongResult, match=line):
        if part == "products":
            operations_alone.measure_products(comm, take, "float32", [(8, 8, 8)],
                                              lambda a, b: a @ b + wrong)
        operations_alone.measure_passes(comm, take, [64], passes)


@pytest.mark.ranks(2)
def test_what_is_wrong_makes_no_machine(comm, shared_tmp_path, capsys):
    def wrong(comm, progress):
        raise WrongResult("exp of 16 elements is not 1.64872")

    path = shared_tmp_path / "here.toml"
    assert verb.calibrate(Namespace(out=str(path), samples=None), comm, wrong) == 1
    assert not path.exists()
    assert capsys.readouterr().err == (comm.rank == 0) * (
        "failed: calibrate: exp of 16 elements is not 1.64872; no file was written\n")


@pytest.mark.ranks(1, 2)
def test_a_machine_measures_itself(comm, shared_tmp_path, capsys):
    """Little of everything, in two rounds: every collective, rates that can be, and no word of who
    and where."""
    sizes = [64, 4096]
    works = work_list.list_works(comm.size, [], [MODEL], schemes=("1d", "3d")[comm.size - 1:])
    extent = measure.Extent(works, 2, 3, SMALL, sizes,
                            operations_alone.list_collectives(comm.size, sizes))
    path = shared_tmp_path / "here.toml"

    def little(comm, progress):
        return measure.measure_samples(comm, progress, extent)
    assert verb.calibrate(Namespace(out=str(path), samples=None), comm, little) == 0
    machine = load_machine(str(path))
    lines = {(kind, 2, 1, pieces) for _, kind, _, _, pieces, _ in extent.collectives}
    assert {line.key for line in machine.collectives} == lines
    assert machine.measured_ranks == comm.size
    assert machine.transport == ("mpi" if comm.size > 1 else "none")
    assert set(machine.waiting) == {2} - {2 * (comm.size == 1)}
    assert all(1e6 < rate < 1e15 for rate in machine.gemm_rate.values())
    assert_sourced(machine)
    if comm.rank:
        return
    assert not re.search(rf"(?<![\w-]){re.escape(platform.node())}\b", path.read_text())
    [file] = shared_tmp_path.glob("here-samples-*.h5")
    assert check_file(file)[0] == []
    found = samples_record.read_calibration(file)
    assert found.variables["step_seconds"].values.shape == (len(extent.works), 6)
    taken = found.variables["operation_seconds"].values
    assert taken.shape == (2 * len(SMALL) + 8 * 2 + len(extent.collectives),
                           2 * operations_alone.SAMPLES)
    assert (taken > 0).all() and len(found.checks) > len(extent.works)
    said = capsys.readouterr().out
    assert "round 2 of 2: products, elementwise passes and collectives\n" in said
    assert f"machine file: {path}\n{machine.about}\n" in said
    assert format_machine(fit.fit_machine(found)) == path.read_text()


def calibrated(comm) -> Measurements:
    """The record of a calibration with 2 nodes of 2 ranks: times of a machine of 1 Gflop/s."""
    operations = {("product", dtype, m, n, k):
                  [2e-9 * m * n * k, 4e-9 * m * n * k, 3e-9 * m * n * k]
                  for dtype in measure.DTYPES for m, n, k in SMALL[:4]}
    operations |= {("pass", name, size): [2e-9 * size, 1e-9 * size]
                   for name in ("copy", "multiply") for size in (64, 4096)}
    operations |= {point: [5e-5, 1e-5 + 1e-9 * point[-1] * point[3]]
                   for point in operations_alone.list_collectives(4, [512, 4096])}
    works = work_list.list_works(4, [], measure.MODELS[:1], schemes=("1d", "3d"))
    return samples_record.make_calibration_record(
        operations, works, np.full((4, len(works)), 0.1), [Check("output", 0.0, 1e-6)],
        {"transport": "chain mpi", "rounds": 2},
        {**sampling.measured_environment("numpy", comm), "ranks": 4, "ranks_per_core": 2.0,
         "cores": 2, "oversubscribed": True, "node_of_rank": "0 0 1 1",
         "emulated_cluster": "2x2:50Mbit", "memory_bytes": 4_000_000_000,
         "elementwise_block": 1234})


@pytest.mark.ranks(1)
def test_a_model_is_fitted_again_to_the_samples_in_a_file(comm, tmp_path):
    """All that the model says of the machine is in the file, wherever it is read."""
    record = calibrated(comm)
    path = run_file.write_run(record, tmp_path, "mine-samples")
    again = samples_record.read_calibration(path)
    alone = samples_record.least_seconds(again)
    assert alone == samples_record.least_seconds(record)
    assert alone["product", "float64", 16, 8, 32] == 2e-9 * 16 * 8 * 32
    assert alone["pass", "multiply", 4096] == 4096e-9
    assert alone["collective", "all_gather", 2, 2, True, 512] == 1e-5 + 1e-9 * 512 * 2
    assert alone["collective", "all_reduce", 4, 1, False, 4096] == 1e-5 + 1e-9 * 4096
    assert set(again.scales["operation"]) >= {
        "product float64 16x8x32", "pass multiply 4096 bytes",
        "collective all_gather columns 2 ranks 2 apart 512 bytes"}
    words = Namespace(out=str(tmp_path / "mine.toml"), samples=str(path), **NOTHING)
    assert verb.run(words, comm) == 0
    machine = load_machine(str(tmp_path / "mine.toml"))
    assert machine.about.endswith("; emulated cluster, 2 nodes x 2 ranks, 50 Mbit/s")
    assert (machine.ranks, machine.ranks_per_node, machine.cores) == (4, 2, 2)
    assert (machine.memory_bytes, machine.block) == (1e9, 1234)
    assert machine.gemm_rate["float32"] == pytest.approx(1e9)
    assert "medians of 4 rounds" in machine.sources["waiting"]
    assert "the least of 2 rounds" in machine.sources["collectives"]
    assert_sourced(machine)
    assert (tmp_path / "mine.toml").read_text() == format_machine(fit.fit_machine(record))
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
            verb.run(Namespace(out=str(shared_tmp_path / "new.toml"), samples=str(file),
                               **NOTHING), comm)
    assert not (shared_tmp_path / "new.toml").exists()
