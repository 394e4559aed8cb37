"""Transports of device arrays and the CuPy backend, on a CuPy that needs no GPU."""
import re
import sys
import warnings
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import fakecupy
import fakelibs
import mm3d
from bench.checks import rounding, tolerances
from bench.instruments import hidden_time, host as machine
from mm3d import launcher, selftest
from mm3d.arrays import backend, cupy_backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.grid.split import Split
from mm3d.transport import choice, device, nccl, on_devices
from mirror import during_products
from models import SIZES, SOME, Parallelism, data, differences, serial, train
from reference import integers

NAMES = choice.DEVICE_TRANSPORTS


@pytest.fixture(params=["staged", "nccl", "device",
                        *(pytest.param(f"{kind} on a GPU", marks=pytest.mark.gpu)
                          for kind in ("staged", "device"))])
def carried(request, monkeypatch):
    """Each transport, on host memory that any MPI reads; where there is a GPU, all share it."""
    kind, _, where = request.param.partition(" ")
    if not where:
        request.getfixturevalue("cupy")
        monkeypatch.setattr(fakecupy.Memory, "open", kind == "device")
    elif kind == "device" and not on_devices.claims_cuda_support():
        pytest.skip("this MPI does not say that it is CUDA-aware")
    monkeypatch.setenv("MM3D_TRANSPORT", kind)
    return kind


@pytest.mark.ranks(1, 3, slow=(8,))
def test_every_collective_even_and_uneven(comm, carried):
    """Blocks of no elements, everything on one rank."""
    grid = mm3d.Grid(comm, "cupy", x=comm.size)
    assert comm.size == 1 or grid.x.transport.name == carried
    assert selftest.failed_collectives(grid, (1, 700), ("float16",)) == []
    assert grid.x.all_reduce(grid.backend.empty((4, 0), "float32")).shape == (4, 0)


@pytest.mark.ranks(1, 4, slow=(8,), first=(1, 4))
def test_the_model_equals_the_serial_one(comm, carried):
    """Nothing is computed before what it needs has arrived: on 4 ranks where most is under way, on
    8 in every scheme, dealt out to the transports."""
    examples = SOME[comm.size]
    if comm.size < 8:
        examples = [Parallelism("3d" if comm.size == 1 else "2d-pipelined")]
    if comm.size == 8:
        examples = examples[NAMES.index(carried)::len(NAMES)]
    for parallelism in examples:
        with parallelism.on(comm, "cupy") as scheme:
            model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype="float64", causal=True)
            results = train(model, *data(**SIZES["uneven"]))
            assert all(scheme.grid.backend.owns(a) for a in results.values())
            wrong = differences(model, results, serial("uneven", True), 1e-12, 1e-11)
        assert not wrong, f"{parallelism} {carried}: {wrong}"


class Begun:
    """A transport that keeps what it has begun."""

    def __init__(self, transport, begun: list) -> None:
        self.transport, self.begun = transport, begun

    def __getattr__(self, name):
        called = getattr(self.transport, name)

        def begin(*arguments):
            self.begun.append(called(*arguments))
            return self.begun[-1]
        return begin if name.startswith("begin_") else called


@pytest.fixture
def underway(carried):
    """Watches a scheme: of each product, how many collectives go on meanwhile."""
    library, begun, found = backend.get("cupy"), [], []
    multiply, kernels = library.gemms, library.kernels

    def multiplied(*arguments):
        found.append(sum(one.finish is not None for one in begun))
        return multiply(*arguments)

    def watch(scheme) -> list[int]:
        begun.clear()
        found.clear()
        for axis in scheme.grid.axes.values():
            axis.transport = Begun(axis.transport, begun)
        return found
    # Of the other kernels, which take long without a GPU, it asks nothing.
    library.gemms, library.kernels = multiplied, None
    yield watch
    del library.gemms
    library.kernels = kernels


@pytest.mark.ranks(4, slow=(8,), first=(4,))
@pytest.mark.limit(240)
@pytest.mark.parametrize("keep, options", [
    ("none", dict(dtype="float16", master="float32")), ("both", dict(dtype="float32"))])
def test_overlap_changes_no_bit(comm, carried, underway, options, keep):
    """A is gathered under the product of dA, dA summed under that of dB, and dB under those of
    the layer before; the next weight is gathered under the last product of each layer."""
    for grid in {4: [(1, 2, 2)], 8: [(2, 2, 2)]}[comm.size]:
        found, moved = [], []
        for overlap in (False, True):
            parallelism = Parallelism("3d", grid, dict(keep=keep, overlap=overlap))
            with parallelism.on(comm, "cupy") as scheme:
                model = mm3d.Transformer(scheme, **SIZES["uneven"], **options, causal=True)
                multiplied = underway(scheme)
                results = train(model, *data(**SIZES["uneven"]))
                counted = sum(multiplied)
                found.append({name: scheme.grid.backend.to_host(a).copy()
                              for name, a in results.items()})
                moved.append(sorted(map(str, scheme.grid.traffic().items())))
                if overlap:    # neither changes what is computed, nor stays behind
                    share = hidden_time.hidden_share(scheme.grid, lambda: model.backward(
                        model.random("dy"), model.forward(model.random("x"))[1]), 1)
                    assert np.isfinite(share) and "prefetch" not in vars(scheme.grid.y)
            expected = sum(len(names) for way in ("forward", "backward")
                           for _, names in during_products(grid, way, keep=keep))
            assert counted == overlap * expected, (grid, counted)
        assert moved[0] == moved[1], grid
        for name, a in found[0].items():
            assert np.array_equal(a, found[1][name]), (grid, name)


@pytest.mark.ranks(3, slow=(2,))
def test_what_goes_on_arrives(comm, carried):
    """Rows and columns, even and uneven, blocks of none; what is sent may go at once, and what
    is computed in between does not disturb."""
    grid = mm3d.Grid(comm, "cupy", x=comm.size)
    library, n = grid.backend, comm.size
    for dtype, dim, extent in product(("float32", "float16"), (0, 1), (4 * n, 4 * n + 1, 1)):
        split = Split(grid.x, dim, extent)
        shape = (extent, 6) if dim == 0 else (6, extent)
        terms = [integers(shape, 10 + rank, dtype) for rank in range(n)]
        here = slice(sum(split.counts[:comm.rank]), sum(split.counts[:comm.rank + 1]))
        block = (here, slice(None)) if dim == 0 else (slice(None), here)
        pending = split.begin_reduce_scatter(library.asarray(terms[comm.rank]))
        arriving = split.prefetch(library.asarray(terms[0][block]))
        other = [library.asarray(np.full(shape, 77, dtype)) for _ in range(4)]
        assert all((library.to_host(a) == 77).all() for a in other)
        expected = sum(a.astype(float) for a in terms)[block]
        assert np.array_equal(library.to_host(pending.wait()), expected), (dim, extent)
        assert np.array_equal(library.to_host(arriving.wait()), terms[0]), (dim, extent)
        assert pending.wait() is pending.out


@pytest.mark.ranks(1, 2, first=(1, 2))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_masters(comm, carried, dtype):
    """What is trained is float32 on the device, too; what is computed with is its rounding.  The
    results are those of NumPy with the same roundings, but for few that differ."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    options = dict(SIZES["uneven"], dtype=dtype, master="float32", causal=True)
    with rounding.rounding_backend() as library, \
            Parallelism("serial").on(MPI.COMM_SELF, library) as scheme:
        expected = {name: np.array(a, float) for name, a in train(
            mm3d.Transformer(scheme, **options), *data(**SIZES["uneven"])).items()}
    with Parallelism("3d", (1, comm.size, 1)).on(comm, "cupy") as scheme:
        model = mm3d.Transformer(scheme, **options)
        results = train(model, *data(**SIZES["uneven"]))
        limits = tolerances.beside_serial(dtype, layers=1)
        wrong = differences(model, results, expected, *limits)
        # One that is off by 2 % in bfloat16, and by 0.3 % in float16, would be seen by a rank that
        # has all of it; of a part, which is held against the norm of the whole, it takes more.
        off = {name: a * (1 + (0.02 if dtype == "bfloat16" else 0.003) * comm.size)
               for name, a in expected.items() if a.any()}
        seen = {line.split(":")[0] for line in differences(
            model, {name: results[name] for name in off}, off, *limits)}
        assert set().union(*comm.allgather(seen)) == off.keys()
        for p in model.parameters:
            assert (str(p.value.dtype), str(p.master.dtype), str(p.grad.dtype)) == (
                dtype, "float32", "float32")
            value, master = (scheme.grid.backend.to_host(a) for a in (p.value, p.master))
            assert np.array_equal(value, master.astype(value.dtype)), p.name
    assert not wrong, wrong


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype, large", [("float16", 2048), ("bfloat16", 256)])
def test_sixteen_bits_travel_as_they_are_and_are_summed_in_float32(comm, carried, dtype, large):
    """Terms of which a sum in 16 bits would lose all but the first; 2051 is rounded once."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16
    grid = mm3d.Grid(comm, "cupy", x=comm.size)
    for length in (8, 3 * device.MAX_GATHERED_ELEMENTS // comm.size):
        term = grid.backend.asarray(np.full(length, 1 if comm.rank else large, dtype))
        for move in grid.x.all_reduce, grid.x.reduce_scatter:
            found = grid.backend.to_host(move(term))
            assert found.dtype == dtype and set(found.astype(float).tolist()) == {large + 4}
    found = grid.backend.to_host(grid.x.all_gather(term)).astype(float)
    assert np.array_equal(found, np.repeat([large, 1, 1, 1], length))


def test_pinned_memory_is_kept_until_it_has_been_copied(cupy):
    a = cupy.empty((4,), "float32")
    host = cupy.host_buffer(a)
    host[...] = 7
    cupy.copy_from_host(host, a)
    assert any(kept is host for _, kept in cupy._copies_in_flight)
    assert cupy.to_host(a).tolist() == [7] * 4
    cupy.copy_from_host(host, a)
    assert len(cupy._copies_in_flight) == 1      # the first has arrived


def test_trimming_gives_pinned_memory_back(cupy):
    """Of the host's, too; what is on its way stays."""
    a = cupy.empty((1000,), "float32")
    for _ in range(3):
        cupy.copy_from_host(cupy.host_copy(a), a)
    cupy.side_stream("host to device").synchronize()
    pinned = cupy.xp.get_default_pinned_memory_pool()
    cupy.copy_from_host(cupy.host_copy(a), a)
    assert pinned.n_free_blocks() or cupy._copies_in_flight
    cupy.release_idle_memory()
    assert pinned.n_free_blocks() == 0 and len(cupy._copies_in_flight) == 0


# --- Which CuPy ----------------------------------------------------------------------------

@pytest.mark.parametrize("change, message", [
    (dict(version="13.6.0"), r"needs CuPy 14.1 or newer, here is 13.6.0: pip install -U 'cupy-c"),
    (dict(version="14.0.1"), "needs CuPy 14.1 or newer, here is 14.0.1"),
    (dict(missing="nvrtc"), "needs NVRTC, which CuPy does not find .*: pip install"),
    (dict(missing="cublas"), "needs cuBLAS, which CuPy does not find .*: pip install"),
    *((dict(lacks=name), f"the cuBLAS that CuPy uses has no {name}: pip install -U 'cupy-cuda")
      for name in ("cublasGemmStridedBatchedEx", "cublasGetStatusString")),
    (dict(capability="70"), r"CUDA 13 no longer supports this GPU \(sm_70\): pip uninstall"),
    (dict(capability="70", cuda=12090), None), (dict(version="15.0.0a1"), None)])
def test_what_lacks_something_is_refused_by_name(monkeypatch, change, message):
    modules = fakelibs.modules()
    cupy = modules["cupy"]
    cupy.__version__ = change.get("version", cupy.__version__)
    if "cuda" in change:
        cupy.runtime.runtimeGetVersion = lambda: change["cuda"]
    monkeypatch.setattr(fakecupy.Device, "compute_capability", change.get("capability", "80"))
    if "missing" in change:    # as an import ends of what is linked to a missing library
        def fail(name: str):
            raise (ImportError if name == change["missing"] else AttributeError)(name)
        libs = modules["cupy_backends.cuda.libs"]
        delattr(libs, change["missing"])
        libs.__getattr__ = fail
    if "lacks" in change:    # as an older library: that function has another name
        library = fakelibs.compiled((fakelibs.HERE / "cublas.c").read_text(),
                                    f"-D{change['lacks']}=another", "-x", "c")
        modules["cupy_backends.cuda.libs.cublas"].__file__ = library._name
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if message is None:
        assert cupy_backend.CupyBackend().name == "cupy"
    else:
        with pytest.raises(ValueError, match=message):
            cupy_backend.CupyBackend()


@pytest.mark.parametrize("given, tf32", [("", False), ("0", False), ("1", True)])
def test_tensorfloat_is_a_setting(monkeypatch, given, tf32):
    """Another word, which could mean either, is refused: as with cuDNN."""
    fakelibs.replace_cupy(monkeypatch)
    monkeypatch.setenv("MM3D_TF32", given)
    assert cupy_backend.CupyBackend().tf32 == tf32
    for name in ("MM3D_TF32", "MM3D_CUDNN"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "no")
            with pytest.raises(ValueError, match=f"{name}='no' is unknown: choose 0 or 1$"):
                cupy_backend.CupyBackend()


# --- Which transport -----------------------------------------------------------------------

class Lent(NumpyBackend):
    """Arrays on a device at a given place."""

    host_buffers, name = False, "lent"

    def __init__(self, place, nccl) -> None:
        super().__init__()
        self.device_location, self.nccl = (lambda: place), nccl


@pytest.mark.ranks(4)
@pytest.mark.parametrize("gpus, nccl, aware, expected", [
    (4, True, True, "nccl"), (1, True, True, "device"), (4, False, True, "device"),
    (1, True, False, "staged"), (2, False, False, "staged"), (0, True, True, "staged")])
def test_what_is_proven_is_chosen(comm, monkeypatch, gpus, nccl, aware, expected):
    """NCCL where every rank has a GPU, then an MPI that proves to be CUDA-aware, then copies."""
    monkeypatch.delenv("MM3D_TRANSPORT", raising=False)
    asked = []
    monkeypatch.setattr(on_devices, "find_problem",
                        lambda: asked.append(1) or ("" if aware else "it did not end"))
    lent = Lent(("node", comm.rank % gpus) if gpus else None, "library" if nccl else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert choice.choose_transport(comm, lent) == expected
    assert len(asked) == (comm.rank == 0 and expected != "nccl" and gpus > 0)
    # One rank says that arrays are copied, and why: neither of the better ways is there.
    assert len(said) == (len(asked) and not aware)
    for one in said:
        assert re.search(r"staged\): (NCCL needs a GPU for each rank, and 4 ranks have \d|4 of 4 "
                         r"ranks have no NCCL); it did not end", str(one.message)), one.message


@pytest.mark.ranks(4)
@pytest.mark.parametrize("setting, place, nccl, message", [
    ("nccl", ("node", 0), True, "NCCL needs a GPU for each rank, and 4 ranks have 1; choose"),
    ("nccl", ("node", 0), None, "4 of 4 ranks have no NCCL; choose device or staged"),
    ("shared", ("node", 0), True, "'shared' is unknown for arrays of backend 'lent': choose dev")])
def test_a_setting_that_cannot_be_is_refused_on_all_ranks(comm, monkeypatch, setting, place, nccl,
                                                          message):
    monkeypatch.setenv("MM3D_TRANSPORT", setting)
    with pytest.raises(ValueError, match=message):
        choice.choose_transport(comm, Lent(place, nccl))


@pytest.mark.ranks(2)
def test_a_device_transport_does_not_carry_host_arrays(comm, monkeypatch):
    """But on one rank, where nothing travels, the setting of a GPU's job does not matter."""
    for name in NAMES:
        monkeypatch.setenv("MM3D_TRANSPORT", name)
        with pytest.raises(ValueError, match="for arrays of backend 'numpy': choose mpi"):
            mm3d.Grid(comm, "numpy", x=2)
        assert mm3d.Grid(mm3d.grid.grid.MPI.COMM_SELF, "numpy", x=1).x.all_gather(name) == name


def test_a_job_that_does_not_end_proves_nothing(tmp_path, monkeypatch):
    """Nor one that fails, nor an MPI that says no; each answer is asked for once."""
    find, python, mpirun = on_devices.find_problem.__wrapped__, sys.executable, tmp_path / "mpirun"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))    # mpirun is beside it
    mpirun.touch(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "7")    # of which the job knows nothing
    for name in launcher.PERMISSIONS:    # as started by a plain mpirun
        monkeypatch.delenv(name, raising=False)
    alone = ("import os; assert not [name for name in os.environ if name.startswith('SLURM_')]; "
             f"assert os.environ.keys() >= {set(launcher.PERMISSIONS)}")
    for seconds, program, expected in (
            (2, "import time; time.sleep(60)", "did not end within 2 seconds"),
            (60, "raise SystemExit(3)", "ended with status 3"), (60, alone, "")):
        mpirun.write_text(f"#!{python}\n{program}\n")
        found = find(seconds, lambda: True)
        assert found.endswith(expected) and bool(found) == bool(expected), found
    assert "says that it does not" in find(claim=lambda: False)


# --- The backend ---------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("m, k, n", [(3, 5, 7), (1, 5, 7), (3, 1, 7), (3, 5, 1), (1, 1, 1),
                                     (0, 5, 7), (3, 0, 7)])
def test_products_of_all_forms_and_layouts(cupy, dtype, m, k, n):
    """cuBLAS stores by columns and is told sizes, steps and addresses: all must fit."""
    A, B = integers((m, k), 1, dtype), integers((k, n), 2, dtype)
    for turn_a in (False, True):
        for turn_b in (False, True):
            a = cupy.asarray(np.ascontiguousarray(A.T)).T if turn_a else cupy.asarray(A)
            b = cupy.asarray(np.ascontiguousarray(B.T)).T if turn_b else cupy.asarray(B)
            wide_a = cupy.asarray(np.repeat(A, 2, axis=1))[:, ::2]    # rows and columns apart
            for left in (a, wide_a):
                out = cupy.gemm(left, b, cupy.empty((m, n), dtype))
                assert np.array_equal(cupy.to_host(out), A @ B)
    if dtype == "float16":
        out = cupy.gemm(cupy.asarray(A), cupy.asarray(B), cupy.empty((m, n), "float32"))
        assert out.dtype == np.float32 and np.array_equal(cupy.to_host(out), A @ B)


def test_the_record_names_the_device(cupy):
    found = machine.describe_host("cupy", 1, "MPICH Version: 5", "python -m bench")
    assert found["gpu"] == "none" and found["cuda_driver"] == 13000    # the fake's
    assert found["tf32"] is False    # a record of a whole number would not be read
    assert "gpu" not in machine.describe_host("numpy", 1, "MPICH Version: 5", "")


def test_memory_counts_temporaries(cupy):
    """The peak is the allocator's own, not that of the arrays the backend is asked for."""
    cupy.synchronize()
    cupy.reset_peak()
    before = cupy.memory()
    kept = cupy.empty((1000,), "float64")
    cupy.xp.zeros(3000)
    cupy.empty((1,), "float64")    # the stand-in counts what was there before
    cupy.synchronize()
    found = cupy.memory()
    assert found["in_use"] == before["in_use"] + kept.nbytes
    assert found["peak"] >= before["in_use"] + kept.nbytes + 8 * 3000


@pytest.mark.parametrize("leave", ["gaps", "caller"])
def test_work_returns_to_its_stream(cupy, leave):
    """An array with gaps on its way to the host, or the caller, makes another one current."""
    a = cupy.asarray(integers((4, 6), 1, "float32"))
    if leave == "gaps":
        assert (cupy.to_host(a[:, :2]) == integers((4, 6), 1, "float32")[:, :2]).all()
        assert cupy.xp.cuda.get_current_stream() is cupy.stream
        cupy.xp.asnumpy(a[:, :2])    # a caller's own
    other = cupy.xp.cuda.Stream(non_blocking=True)
    if leave == "caller":
        other.use()
    b = cupy.empty((4, 4), "float32")
    cupy.gemm(a, a.T, b)
    assert cupy.xp.cuda.get_current_stream() is cupy.stream
    again, alone = cupy.graph(lambda: cupy.add_to(b, b)), nccl.NcclTransport(MPI.COMM_SELF, cupy)
    for move in (cupy.host_copy, cupy.to_host, lambda a: again(), lambda a: cupy.copy_from_host(
            cupy.host_buffer(a), a), lambda a: cupy.synchronize(), lambda a: cupy.record_mark(),
            lambda a: alone.broadcast(a, 0)):
        other.use()
        move(b)
        assert cupy.xp.cuda.get_current_stream() is cupy.stream


def test_blocks_of_no_elements_keep_their_shape_on_the_host(cupy):
    """A checkpoint compares it with the block's place."""
    for dtype in ("float32", "float16"):
        a = cupy.empty((4, 0), dtype)
        assert cupy.host_copy(a).shape == cupy.host_buffer(a).shape == (4, 0)


def test_arrays_refuse_the_host(cupy):
    a = cupy.asarray(np.ones(3))
    for use in (np.asarray, lambda a: a + np.ones(3), memoryview):
        with pytest.raises(TypeError):
            use(a)


# --- Graphs --------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_graph_repeats_a_step(cupy):
    """On what its input has become, from memory that nothing else is given; nothing is computed
    while it is recorded."""
    with Parallelism("serial").on(mm3d.grid.grid.MPI.COMM_SELF, "cupy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES["uneven"], causal=True)
        x, dy = model.random("x"), model.random("dy")

        def step():
            model.zero_gradients()
            y, saved = model.forward(x)
            return y, model.backward(dy, saved), *(p.grad for p in model.parameters)
        pool, asked = cupy.pool, cupy.pool.asked
        again = scheme.grid.graph(step)
        assert cupy.pool is pool and pool.asked == asked
        for name in ("x", "another"):
            x[...] = model.random(name)
            expected = [cupy.to_host(a).copy() for a in step()]
            model.zero_gradients()
            found = again()
            assert all(np.array_equal(cupy.to_host(a), b)
                       for a, b in zip(found, expected, strict=True))


def test_cupys_own_calls_of_cublas_refuse_a_capture(cupy):
    """Its wrappers set the stream first (cupy/cupy#6290), which takes a workspace away; ours have
    a handle that keeps both, as long as it lives."""
    a, binding = cupy.asarray(np.eye(4)), cupy.cublas.binding
    own = fakelibs.Handle.every[cupy.cublas.handle]
    for call in (lambda: cupy.xp.matmul(a, a), lambda: binding.gemmStridedBatchedEx(1)):
        with pytest.raises(NotImplementedError, match="while a stream is captured"):
            cupy.stream.begin_capture()
            try:
                call()
            finally:
                cupy.stream.end_capture()
    cupy.xp.matmul(a, a)
    assert own.workspace.nbytes == 4 << 20 and own.stream == cupy.stream.ptr
    binding.setStream(cupy.cublas.handle, cupy.stream.ptr)
    with pytest.raises(RuntimeError, match="cublasGemmStridedBatchedEx: an internal operation"):
        cupy.gemm(a, a, cupy.empty((4, 4), "float64"))


def test_a_step_that_waits_is_no_graph(cupy):
    """The backend is as before, and records the next one."""
    pool, a = cupy.pool, cupy.asarray(np.ones(3))
    with pytest.raises(RuntimeError, match="CaptureUnsupported"):
        cupy.graph(lambda: cupy.to_host(a))
    assert cupy.pool is pool and cupy.to_host(cupy.graph(lambda: a + 1)()).tolist() == [2] * 3


@pytest.mark.ranks(2)
def test_where_the_host_carries_messages_there_is_no_graph(comm, carried):
    """But with NCCL."""
    grid = mm3d.Grid(comm, "cupy", x=2)
    if carried == "nccl":
        assert grid.graph(lambda: 3)() == 3
    else:
        with pytest.raises(ValueError, match=f"MM3D_TRANSPORT={carried}: choose nccl, or one"):
            grid.graph(lambda: 3)
