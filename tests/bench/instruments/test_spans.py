"""Where the time goes: spans, their sums, and what tracing does not change."""
from collections import Counter

import numpy as np
import pytest

import mm3d
from bench.cases.selection import select_rows
from bench.instruments import spans, step_tracing
from bench.instruments.spans import Recorder, breakdown
from bench.records import run_file
from bench.reports import time_parts
from mm3d.arrays import backend, cupy_backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import Collective, Gemm, LayerEvent, PHASES, Phase
from mm3d.tracing.observe import observed
from models import PARALLELISMS, SIZES, Parallelism
from records import made_up

PARTS = spans.part_names("xyz")


class Clock:
    """A clock that moves by one second a reading."""

    def __init__(self):
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


def recorded(scheme, sizes="few"):
    """A recorder after a step of a model on `scheme`, the model, and traffic by phase."""
    model = mm3d.Transformer(scheme, **SIZES[sizes])
    x, dy = model.random("input"), model.random("output gradient")
    recorder, traffic = Recorder(scheme.grid.backend, Clock()), {}
    with observed(scheme.grid, recorder, model):
        scheme.grid.reset_traffic()
        saved = model.forward(x)[1]
        traffic["forward"] = scheme.grid.traffic()
        scheme.grid.reset_traffic()
        model.backward(dy, saved)
        traffic["backward"] = scheme.grid.traffic()
    return recorder, model, traffic


@pytest.mark.ranks(1, 4, slow=(8,))
def test_as_many_collectives_as_the_grid_counts(comm):
    """By phase, direction and kind, each after its barrier; parts add up to the whole, and of all
    schemes but 3-D every operand has a name."""
    for case in PARALLELISMS[comm.size]:
        with case.on(comm, "numpy") as scheme:
            recorder, _, traffic = recorded(scheme)
        operands = {s.operand for s in recorder.spans if s.kind == "collective"}
        assert "" not in operands or case.name not in ("1d", "1d-sp", "2d"), str(case)
        for phase, moved in traffic.items():
            found = step_tracing.spans_of_phase(recorder.spans, phase)
            for kind in ("collective", "wait"):
                seen = Counter((s.axis, s.collective) for s in found if s.kind == kind)
                assert seen == {key: t.calls for key, t in moved.items()}, (str(case), kind)
            root = found[-1]
            assert root.kind == "phase" and root.name == phase
            whole = root.end - root.start + 0.5
            seconds = breakdown(found, whole, PARTS)
            assert tuple(seconds) == PARTS
            assert sum(seconds.values()) == pytest.approx(whole, rel=1e-12)
            assert seconds["other"] >= 0.5 and seconds["gemm"] > 0 < seconds["elementwise"]
            assert all(s.own > 0 for s in found)


@pytest.mark.ranks(8)
def test_collectives_are_named_by_direction_and_operand(comm):
    with Parallelism("3d").on(comm, "numpy") as scheme:
        recorder, _, _ = recorded(scheme, "even")
    names = {phase: [s.name for s in step_tracing.spans_of_phase(recorder.spans, phase)
                     if s.kind == "collective"] for phase in PHASES}
    # Into the inner space in the directions y, x, z, and back in z, x, y; Algorithm 2 backward.
    for matrix in ("all-gather A along y", "all-gather B along x", "reduce-scatter C along z",
                   "all-gather A along z", "reduce-scatter C along y", "broadcast b along z",
                   "all-gather b along x", "all-reduce row sums along z"):
        assert matrix in names["forward"], matrix
    for matrix in ("all-gather dC along z", "all-gather B along x", "reduce-scatter dA along y",
                   "all-gather A along y", "reduce-scatter dB along x", "reduce db along z",
                   "reduce-scatter db along x"):
        assert matrix in names["backward"], matrix
    assert {len(name.split()) for phase in names.values() for name in phase} <= {4, 5}


@pytest.mark.ranks(1)
def test_layers_lie_within_blocks_and_products_within_layers(comm):
    with Parallelism("serial").on(comm, "numpy") as scheme:
        recorder, model, _ = recorded(scheme)
    forward = step_tracing.spans_of_phase(recorder.spans, "forward")
    names = [s.name for s in forward if s.kind == "layer"]
    assert names[:10] == [f"layers.0.{part}" for part in (
        "ln1", "attention.qkv", "attention.attention", "attention.proj", "attention",
        "ln2", "mlp.up", "mlp.gelu", "mlp.down", "mlp")]
    assert len(names) == 20 and names[-1] == "layers.1.mlp"
    useful = mm3d.cost.flops(mm3d.ModelSizes(**SIZES["few"]))
    assert sum(s.flops for s in forward) == useful["forward"]
    # A backward pass computes the scores again, with one more term for each head.
    again = 2 * SIZES["few"]["batch"] * SIZES["few"]["seq"] ** 2 * (21 + 3) * 2
    assert sum(s.flops for s in step_tracing.spans_of_phase(recorder.spans, "backward")) == (
        useful["backward"] + again)


class Nvtx:
    """Stands in for cupy.cuda.nvtx, and for the rest of CuPy that is asked for."""

    ptr = 0    # it is the only stream, too

    def __init__(self):
        self.open, self.names, self.cuda, self.nvtx = [], [], self, self

    def get_current_stream(self):
        return self

    def RangePush(self, name):
        self.open.append(name)
        self.names.append(list(self.open))

    def RangePop(self):
        self.open.pop()

    def synchronize(self):
        """The device is always idle."""


def test_own_time_is_without_what_lies_within_and_names_reach_the_profiler_of_a_gpu():
    library, profiler = object.__new__(cupy_backend.CupyBackend), Nvtx()
    library.xp = library.stream = profiler
    recorder = Recorder(library, Clock())
    recorder.enter(Phase("forward"))                                           # 1 to 8
    recorder.enter(LayerEvent("layers.0.mlp.up", "mlp.up"))                    # 2 to 7
    recorder.enter(Gemm(1, 2, 3, 4, "float32"))                                # 3 to 4
    recorder.leave()
    assert profiler.names[-1] == ["forward", "layers.0.mlp.up", "gemm 2 x 3 x 4"]
    recorder.operand = "C"
    recorder.enter(Collective("reduce_scatter", "z", 2, 1, 64))                # 5 to 6
    for _ in range(3):
        recorder.leave()
    assert profiler.open == []
    assert [(s.name, s.start, s.end, s.own, s.part) for s in recorder.spans] == [
        ("gemm 2 x 3 x 4", 3, 4, 1, "gemm"),
        ("reduce-scatter C along z", 5, 6, 1, "reduce_scatter z"),
        ("layers.0.mlp.up", 2, 7, 3, "elementwise"), ("forward", 1, 8, 2, "other")]
    product, collective = recorder.spans[:2]
    assert (product.flops, product.bytes) == (48, 4 * (6 + 12 + 8)) and collective.bytes == 64
    seconds = breakdown(recorder.spans, 10.0, PARTS)
    assert {part: s for part, s in seconds.items() if s} == {
        "gemm": 1, "reduce_scatter z": 1, "elementwise": 3, "other": 5}


def test_what_fails_is_told_and_what_follows_too(no_backends):
    """A program that catches the error within goes on being observed."""
    library = backend.get("numpy")
    model = mm3d.Transformer(mm3d.scheme("serial", backend=library,
                                         comm=mm3d.grid.grid.MPI.COMM_SELF),
                             layers=1, hidden=8, heads=2, batch=1, seq=4)
    recorder, counts = Recorder(library, Clock()), []
    a, b = np.ones((2, 3)), np.ones((3, 4))
    with observed(model.grid, recorder, model):
        for _ in range(2):
            for wrong in (lambda: library.gemm(a, b, np.ones((5, 5))), lambda: model.forward(a)):
                with pytest.raises(ValueError):
                    wrong()
            with pytest.raises(ValueError):
                model.layers.layers[0].forward(a)
            before = len(recorder.spans)
            model.forward(model.random("x"))
            counts.append(len(recorder.spans) - before)
            assert recorder.operand == ""
    assert counts[0] == counts[1] > 10


def test_a_product_that_calls_another_is_one(no_backends):
    """As CuPy's gemm is, which calls its gemms; stacks are seen by themselves."""
    library = NumpyBackend()
    library.gemms = lambda a, b, out: library.xp.matmul(a, b, out=out)
    library.gemm = lambda a, b, out: library.gemms(a[None], b[None], out[None])
    grid = mm3d.Grid(mm3d.grid.grid.MPI.COMM_SELF, library, x=1)
    recorder = Recorder(library, Clock())
    with observed(grid, recorder):
        library.gemm(np.ones((2, 3)), np.ones((3, 4)), np.ones((2, 4)))
        library.gemms(np.ones((5, 2, 3)), np.ones((5, 3, 4)), np.ones((5, 2, 4)))
        library.xp.matmul(np.ones((6, 2, 3)), np.ones((6, 3, 4)))
    assert [s.name for s in recorder.spans] == [
        "gemm 2 x 3 x 4", "gemm 5 x 2 x 3 x 4", "gemm 6 x 2 x 3 x 4"]


def with_parts(run, seconds) -> None:
    """Give a made-up run traced repetitions: (repetition, phase, rank, part)."""
    counts = np.zeros((run.ranks, 2, len(PARTS), 3))
    run.groups["parts"] = step_tracing.parts_group(seconds.transpose(2, 0, 1, 3), counts, PARTS)


def test_what_a_step_is_made_of(tmp_path):
    """Means over repetitions and ranks; who is done early waits for the slowest."""
    run = made_up(select_rows("weak", "3d")[0], forward=4.0, backward=8.0)
    assert (time_parts.mean_parts(run) is time_parts.tracing_overhead(run)
            is time_parts.collective_bandwidth(run) is None)
    seconds = np.zeros((2, 2, 8, len(PARTS)))
    seconds[..., PARTS.index("gemm")] = 1.0
    seconds[..., PARTS.index("all_gather x")] = 0.5
    seconds[..., PARTS.index("reduce x")] = 0.25
    seconds[..., PARTS.index("broadcast z")] = 0.125
    seconds[:, 1, 7, PARTS.index("elementwise")] = 8.0    # one rank is slow backward
    with_parts(run, seconds)
    again = run_file.read_run(run_file.write_run(run, tmp_path, "a"))
    found = time_parts.mean_parts(again)
    assert found["forward"] == {"gemm": 1, "x": 0.75, "y": 0, "z": 0.125, "elementwise": 0,
                                "waiting": 0, "other": 0}
    assert found["backward"] == {**found["forward"], "elementwise": 1, "waiting": 7}
    assert time_parts.tracing_overhead(again) == pytest.approx({"forward": 1.875 / 4,
                                                                "backward": 9.875 / 8})
    # Traffic of `made_up`: rank r moves 4 r bytes a phase along x.
    assert time_parts.collective_bandwidth(again) == {"x": 2 * 4 * 28 / (2 * 8 * 0.75)}
    # They are gathers; in shared memory these copy nothing, and what is summed has its own time.
    again.configuration["transport"] = "shared"
    assert time_parts.collective_bandwidth(again) == {}
    reduced = list(COLLECTIVES).index("reduce")
    again.groups["traffic"].variables["bytes"].values[0, :, 0, reduced] = 100
    assert time_parts.collective_bandwidth(again) == {"x": 8 * 100 / (2 * 8 * 0.25)}
    # Of several transports, along the directions that lie within nodes.
    again.configuration.update(transport="mpi shared", within_nodes="y")
    assert time_parts.collective_bandwidth(again) == {"x": (2 * 4 * 28 + 800) / (2 * 8 * 0.75)}
    again.configuration["within_nodes"] = "xy"
    assert time_parts.collective_bandwidth(again) == {"x": 8 * 100 / (2 * 8 * 0.25)}
    # Where links and waits were slowed, seconds are those as if they were not, as in tables.
    again.configuration["dilation"] = 4.0
    assert time_parts.mean_parts(again)["forward"]["gemm"] == 0.25
    assert time_parts.tracing_overhead(again)["forward"] == pytest.approx(1.875 / 4)
