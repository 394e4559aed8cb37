"""A dry run's trace is the real run's, to the last call, word and byte."""
import gc
import math
import sys
import tracemalloc
import weakref
from collections import Counter
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import llamas
import mm3d
from mm3d.arrays import backend
from mm3d.grid.axis import COLLECTIVES
from mm3d.model.chains import saved_arrays
from mm3d.model.experts.token_order import ChoicePattern
from mm3d.tracing import dry_arrays, dry_run
from mm3d.tracing.events import Boundary, Call, Collective, Gemm, MemoryPass, Overlapped, PHASES
from mm3d.transport.communicators import DryCommunicator
from mirror import Mirror, mirrored
from models import CHOSEN, PARALLELISMS, SIZES as PLAIN, Parallelism
from support import run_python

# Squares and lines of every scheme on every grid of the other tests, and serial.
CASES = {n: [Parallelism("serial"), *found] for n, found in PARALLELISMS.items()}
SIZES = PLAIN | {"llama": dict(**llamas.SIZES, architecture=llamas.architecture("llama"))}


class Watch:
    """What really happens: calls of NumPy's matmul, and of the transport of each axis."""

    def __init__(self, monkeypatch, scheme, comm):
        self.seen, self.phase = Counter(), "build"
        matmul = np.matmul

        def multiply(a, b, **out):
            shape = math.prod(a.shape[:-2]), *a.shape[-2:], b.shape[-1]
            self.seen[self.phase, Gemm(*shape, str(a.dtype))] += 1
            return matmul(a, b, **out)

        monkeypatch.setattr(np, "matmul", multiply)
        for axis in scheme.grid.axes.values():
            axis.transport = Noted(axis, self.stride(axis.comm, comm), self)

    @staticmethod
    def stride(line, comm) -> int:
        """How far apart neighbours on a line are, as MPI has it; None where there are none."""
        ranks = MPI.Group.Translate_ranks(line.group, range(line.size), comm.group)
        steps = {b - a for a, b in zip(ranks, ranks[1:])}
        return steps.pop() if len(steps) == 1 else None


class Noted:
    """The transport of an axis, which tells a watch of each call."""

    def __init__(self, axis, stride, watch):
        self.axis, self.transport, self.stride, self.watch = axis, axis.transport, stride, watch

    def __getattr__(self, name):
        called, kind = getattr(self.transport, name), name.removeprefix("begin_")
        if kind not in COLLECTIVES:
            return called

        def noted(a, *arguments):
            result = called(a, *arguments)
            whole = result if name == "all_gather" else a
            self.note(Collective(kind, self.axis.name, self.axis.size, self.stride, whole.nbytes))
            for call in ("begin", "wait") if name != kind else ():
                self.note(Overlapped(call, kind, self.axis.name))
            return result
        return noted

    def note(self, event):
        self.watch.seen[self.watch.phase, event] += 1


def real_step(watch, scheme, sizes, dtype, causal) -> dict:
    """What `dry.step` does, on real arrays: traffic, and bytes of the pool."""
    pool, measured = scheme.grid.backend.pool, {}
    gc.collect()
    before = pool.in_use
    pool.reset_peak()
    model = mm3d.Transformer(scheme, **sizes, dtype=dtype, causal=causal)
    x, dy = model.random("input"), model.random("output gradient")
    measured["parameters"] = sum(p.value.nbytes + p.grad.nbytes for p in model.parameters)
    watch.phase = "forward"
    scheme.grid.reset_traffic()
    y, saved = model.forward(x)
    measured["saved"] = model.saved_bytes(saved)
    measured["forward"] = scheme.grid.traffic()
    watch.phase = "backward"
    scheme.grid.reset_traffic()
    model.backward(dy, saved)
    measured["backward"] = scheme.grid.traffic()
    measured["pool_peak"] = pool.peak - before
    return measured


@pytest.mark.ranks(1, 4, slow=(6, 8))
def test_dry_and_real_traces_are_equal(comm, monkeypatch):
    """On every rank: products, collectives, traffic, and the pool's peak, all to the byte; of each
    scheme with one of the sizes in turn."""
    for case, (sizes, dtype, causal) in zip(CASES[comm.size], cycle([
            ("even", "float32", False), ("uneven", "float64", True), ("few", "float32", True),
            ("llama", "float64", True)])):
        with case.on(comm, "numpy") as scheme, monkeypatch.context() as patch:
            watch = Watch(patch, scheme, comm)
            real = real_step(watch, scheme, SIZES[sizes], dtype, causal)
            shape = tuple(scheme.grid.shape.values())
        trace = dry_run.trace_step(case.name, comm.size, shape, comm.rank, backend.Backend.block,
                                   case.options, **SIZES[sizes], dtype=dtype, causal=causal)
        noted = Counter()
        for (phase, _, event), times in trace.events.items():
            if isinstance(event, Collective):    # MPI is given pieces that were put together
                event = event._replace(pieces=False)
            counted = not isinstance(event, (MemoryPass, Boundary, Call))
            if counted and getattr(event, "call", "") != "progress":
                noted[phase, event] += times
        assert noted == watch.seen, str(case)
        assert trace.traffic == {phase: real[phase] for phase in PHASES}, str(case)
        for name in ("parameters", "saved", "pool_peak"):
            assert getattr(trace, name) == real[name], (str(case), name)


def allocated(scheme, sizes, dtype, causal) -> int:
    """The most bytes at one time that Python's allocator sees of a step on this rank."""
    gc.collect()
    scheme.grid.backend.release_idle_memory()    # else a step would reuse it
    tracemalloc.start()
    try:
        model = mm3d.Transformer(scheme, **sizes, dtype=dtype, causal=causal)
        x, dy = model.random("input"), model.random("output gradient")
        tracemalloc.reset_peak()    # drawing the numbers takes float64, which is no model memory
        y, saved = model.forward(x)
        model.backward(dy, saved)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow_but_first
@pytest.mark.ranks(1, slow=(8,))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_memory_within_five_percent(comm, dtype, monkeypatch):
    """Intermediate arrays too, on every rank of every scheme's own grid and of some others; with a
    causal mask every other time.  In 16 bits products and sums have copies in float32.

    Five percent of the ranks' mean: objects of Python take some 300 kB on every rank, also on one
    that is on no face and holds a third of the mean.
    """
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")    # shared memory is not Python's to count
    monkeypatch.setattr("mm3d.arrays.pool.MIN_MAPPED_BYTES", math.inf)    # nor is mapped memory
    sizes = dict(layers=2, hidden=128, heads=8, batch=16, seq=128)
    more = [Parallelism("3d", (comm.size, 1, 1)), Parallelism("3d", (1, comm.size, 1))]
    cases = [Parallelism("serial"), *CHOSEN[comm.size], *more]
    if comm.size == 1:    # on which schemes hold the same
        cases = [Parallelism("serial"), Parallelism("3d"), Parallelism("2d-pipelined")]
    for case, causal in zip(cases, cycle([False, True])):
        with case.on(comm, "numpy") as scheme:
            measured = allocated(scheme, sizes, dtype, causal)
            shape = tuple(scheme.grid.shape.values())
        trace = dry_run.trace_step(case.name, comm.size, shape, comm.rank, backend.Backend.block,
                                   **sizes, dtype=dtype, causal=causal)
        most = 0.05 * comm.allreduce(trace.held) / comm.size
        assert abs(measured - trace.held) <= most, (str(case), measured, trace.held)


@pytest.mark.parametrize("name, grid, options, recompute", [
    ("1d-sp", None, {}, "none"), ("3d", (2, 3, 1), {}, "none"),
    ("3d", (3, 2, 1), {"overlap": True}, "none"), *(("3d", (2, 1, 3), {}, policy) for policy in (
        "none", "full+selective", "uniform:2+selective"))])
def test_layers_beyond_three_follow_from_two_and_three(name, grid, options, recompute):
    """`extended` is what all nine layers give, also as groups: four of two, and one of one."""
    sizes = dict(layers=9, hidden=20, heads=5, batch=3, seq=7, recompute=recompute)
    whole, extended = (make(name, 6, grid, options=options, **sizes)
                       for make in (dry_run.trace_step, dry_run.extrapolate_step))
    assert extended.events == whole.events and extended.traffic == whole.traffic
    for field in ("parameters", "saved", "peak", "held", "pool_peak"):
        assert getattr(extended, field) == getattr(whole, field), field


def test_nothing_is_drawn_and_nothing_computed(monkeypatch):
    for owner, name in ((np.random, "Philox"), (np.random, "Generator"), (np, "matmul")):
        monkeypatch.setattr(owner, name, None)
    assert dry_run.trace_step("3d", 8, layers=1, hidden=16, heads=4, batch=8, seq=4).flops()


def arrays():
    library = backend.get(dry_arrays.DryBackend())
    library.reset()
    return library, library.empty((3, 4), np.float32), library.empty((4,), np.float64)


def test_dry_arrays_keep_numpy_s_rules():
    """Shapes, types, strides, and errors of wrong shapes."""
    library, a, b = arrays()
    real = np.zeros((3, 4), np.float32)
    assert (a + b).dtype == np.float64 and (1 - a * 2.0).dtype == np.float32
    for index in (0, (slice(None), 1), (slice(None), None), (Ellipsis, slice(1, 3))):
        assert a[index].shape == real[index].shape
        assert a[index].flags.c_contiguous == real[index].flags.c_contiguous
    assert a.T.shape == (4, 3) and not a.T.flags.c_contiguous and len(a) == 3
    assert library.contiguous(a) is a and library.contiguous(a.T).flags.c_contiguous
    assert library.xp.reshape(a.T, (12,)).shape == (12,)
    for wrong in (lambda: a + library.empty((3,), np.float32),
                  lambda: a.__setitem__(slice(None), library.empty((2, 3, 4), np.float32)),
                  lambda: library.xp.matmul(a, a), lambda: library.xp.reshape(a, (5, 2))):
        with pytest.raises(ValueError):
            wrong()


def test_dry_arrays_have_no_contents():
    library, a, _ = arrays()
    for look in (lambda: bool(a > 0), lambda: library.to_host(a), lambda: np.ones((3, 4)) + a):
        with pytest.raises(TypeError):
            look()


def test_kernels_of_a_gpu_keep_no_intermediate_arrays_in_16_bits():
    """Scores and what GELU computes stay in registers; NumPy's blocks hold them."""
    sizes = dict(layers=1, hidden=64, heads=4, batch=1, seq=4096, causal=True)
    scores, wide = 4 * 4096 * 4096 * 4, 4096 * 4 * 64 * 4
    few, blocks, numpys = (dry_run.trace_step("serial", 1, None, 0, block, **sizes, dtype=dtype)
                           for block, dtype in ((sys.maxsize, "float16"), (2 ** 22, "float16"),
                                                (sys.maxsize, "float32")))
    assert few.peak < few.saved + 3 * wide < scores / 8 < blocks.peak < numpys.peak
    assert numpys.peak > scores


@pytest.mark.parametrize("recompute", ["none", "full+selective"])
@pytest.mark.parametrize("grid, halves", [((2, 2, 2), False), ((2, 2, 2), True),
                                          ((1, 1, 1), False)])
def test_what_is_saved_counts_until_backward_lets_it_go(grid, halves, recompute):
    """Of two micro-batches in flight each array counts once, and parameters do not."""
    def step(model, trace):
        dry, dy = model.grids[0].backend, model.random("output gradient")
        state = {dry.pool.lease_of(p.value._shell).key for p in model.parameters}

        def leases(*saved):
            found = {lease.key: lease.size for a in saved_arrays(saved)
                     for pool in (dry.pool, dry.scratch) if (lease := pool.lease_of(a._shell))}
            return sum(size for key, size in found.items() if key not in state)
        both = [model.forward(model.random("input"))[1] for _ in range(2)]
        assert dry.saved == leases(*both) > 0
        del both[0]
        gc.collect()
        assert dry.saved == leases(*both)
        if halves:
            operands = model.backward_input(dy, both.pop())[1]
            assert dry.saved == leases(operands) > 0
            model.backward_weights(operands)
            del operands
        else:
            model.backward(dy, both.pop())
        assert dry.saved == 0 < trace.activations < trace.peak - trace.parameters
    dry_run.trace(lambda comm, dry: mm3d.Transformer(
        mm3d.scheme("3d", comm, grid, dry), **PLAIN["even"], recompute=recompute),
        math.prod(grid), step=step)


def test_memory_returns_when_the_last_view_is_gone():
    library, a, b = arrays()
    used = library.memory()["in_use"]
    view = a[1:, :].T
    del a
    assert library.memory()["in_use"] == used == 2 * 4096
    del view, b
    assert library.memory() == {"in_use": 0, "peak": used, "reserved": used}


def test_a_rank_that_cannot_be():
    with pytest.raises(ValueError, match="rank 8 of 8 does not exist: 0 to 7"):
        DryCommunicator(8, 8)
    with pytest.raises(ValueError, match="a grid of 2 x 2 x 2 has 8 ranks"):
        dry_run.trace_step("3d", 9, (2, 2, 2), layers=1, hidden=4, heads=1, batch=1, seq=1)


@pytest.mark.parametrize("grid, keep, recompute", [
    ((2, 2, 2), "none", "full"), ((4, 1, 1), "none", "none"), ((1, 2, 4), "weight", "none")],
    ids=str)
def test_overlap_is_dry_as_it_is_real(grid, keep, recompute, monkeypatch):
    """Traffic, the memory of all buffers in flight, and which collectives are in flight."""
    sizes, begun = dict(layers=3, hidden=16, heads=4, batch=8, seq=4), Counter()
    for method, kind in (("Iallgatherv", "all_gather"), ("Ireduce_scatter", "reduce_scatter")):
        def begin(comm, *arguments, kind=kind, original=getattr(Mirror, method)):
            begun[phase.phase, kind, comm.name] += 1
            return original(comm, *arguments)
        monkeypatch.setattr(Mirror, method, begin)
    peaks = []
    for overlap in (False, True):
        options, phase = {"keep": keep, "overlap": overlap}, SimpleNamespace(phase="")
        with mirrored("3d", grid, **options) as (scheme, _):
            real = real_step(phase, scheme, {**sizes, "recompute": recompute}, "float32", False)
        trace = dry_run.trace_step("3d", math.prod(grid), grid, 0, backend.Backend.block, options,
                                   **sizes, recompute=recompute)
        assert trace.traffic == {phase: real[phase] for phase in PHASES}
        for name in ("parameters", "saved", "pool_peak"):
            assert getattr(trace, name) == real[name], name
        dry = Counter()
        for (when, _, event), times in trace.events.items():
            if isinstance(event, Overlapped) and event.call == "begin":
                dry[when, event.kind, event.direction] += times
        assert dry == begun and bool(begun) == overlap
        peaks.append(trace.pool_peak)
    assert peaks[0] < peaks[1] or grid[0] == 1


def test_a_trace_outlives_its_model():
    """A plan keeps hundreds of traces, and no model."""
    models = []

    def build(comm, backend):
        scheme = mm3d.scheme("3d", comm, backend=backend)
        models.append(weakref.ref(model := mm3d.Transformer(scheme, **SIZES["even"])))
        return model
    trace = dry_run.trace(build, 8, step=dry_run.step_of_chunks)
    gc.collect()
    assert trace.saved and models[0]() is None


# --- Experts, whose choice is assumed ---------------------------------------------------------

def traced(rank, ranks, data, grid, scheme="3d", layers=1, **options):
    """One micro-batch on a rank of replicas that divide the experts."""
    def build(comm, backend):
        mesh = mm3d.Mesh(comm, scheme=scheme, grid=grid, data=data, backend=backend)
        return mm3d.Pipeline(mesh, "gpipe", 1, layers=layers, **options)
    return dry_run.trace(build, ranks, rank, step=dry_run.step_of_chunks)


@pytest.mark.parametrize("k, rank", [(2, 5), (6, 30)])
def test_words_and_rows_of_64_experts_by_hand(k, rank):
    """8 replicas of 2 x 2 x 1 with 8 experts each: T = 128 tokens of 48 features on each rank."""
    trace = traced(rank, 32, 8, (2, 2, 1), hidden=48, heads=2, batch=64, seq=64,
                   experts=mm3d.Experts(64, top=k, every=1, capacity=None), expert_parallel=8)
    T, h = 128, 48
    moved = trace.traffic["forward"]["e", "all_to_all"]
    assert moved.words == 2 * k * T * h * 7 // 8 and moved.messages == 2 * 7
    assert trace.traffic["backward"]["e", "all_to_all"] == moved
    rows = max(event.m for phase, part, event in trace.events
               if (phase, part) == ("forward", "experts") and isinstance(event, Gemm)
               and event.k == 4 * h // 2)
    assert rows == k * T * 8 // 64    # of one expert from all replicas, and one rank along y


@pytest.mark.parametrize("layers, every, recompute", [(9, 2, "none"), (8, 1, "full")])
def test_layers_beyond_three_periods_follow(layers, every, recompute):
    experts = mm3d.Experts(8, top=2, every=every)

    def of(count):
        return traced(2, 4, 2, (2,), "1d", count, hidden=16, heads=2, batch=4, seq=8,
                      recompute=recompute, experts=experts, expert_parallel=2)
    whole = of(layers)
    extended = dry_run.extrapolate(of, layers, dry_run.period_of(recompute, experts))
    assert extended.events == whole.events and extended.traffic == whole.traffic
    for field in ("parameters", "divided", "saved", "pool_peak"):
        assert getattr(extended, field) == getattr(whole, field), field


def test_assumed_choices_are_even_and_each_token_s_are_different():
    for E, k in ((64, 2), (24, 8), (5, 3), (13, 1)):
        tokens, pattern = 8 * E * 3, ChoicePattern(mm3d.Experts(E, top=k))
        chosen = pattern.chosen(0, tokens)
        assert chosen.shape == (tokens, k)
        assert all(len(set(row)) == k for row in chosen.tolist())
        counts = np.stack([np.bincount(column, minlength=E) for column in chosen.T])
        before = pattern.counts_before(np.array([0, 7, tokens]))
        assert not before[0].any() and (before[2] == counts).all()
        assert (before[1] == [np.bincount(column[:7], minlength=E) for column in chosen.T]).all()
        got = counts.sum(0)
        assert got.max() - got.min() <= 1


def test_messages_between_stages_need_no_mpi():
    """Verbs that only count never initialize it."""
    done = run_python("-c", """
import mpi4py
mpi4py.rc.initialize = False
import mm3d
from mm3d.tracing import dry_run
trace = dry_run.trace(lambda comm, dry: mm3d.GPT(
    mm3d.Mesh(comm, stages=2, grid=(1, 1, 1), backend=dry), layers=2, hidden=8, heads=2, vocab=8,
    batch=2, seq=4, microbatches=2, schedule="zb-h1"), 2)
assert trace.peak > 0 and not mpi4py.MPI.Is_initialized()
""")
    assert done.returncode == 0, done.stderr
