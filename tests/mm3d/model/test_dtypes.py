"""No operation changes the type of the numbers: float32 in, float32 everywhere."""
import ml_dtypes
import numpy as np
import pytest

import mm3d
from mm3d.arrays import backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.split import Split
from mm3d.model.chains import saved_arrays
from models import SIZES, SOME
from reference import on_grid
from support import use_only


class Watched(np.ndarray):
    """An array all of whose offspring are watched, too: every result, temporary and view."""

    seen: set[str] = set()

    def __array_finalize__(self, parent):
        self.seen.add(str(self.dtype))


class WatchedBackend(NumpyBackend):
    """NumPy, with every array watched from its first moment."""

    name = "watched"

    def empty(self, shape, dtype):
        return np.empty(shape, dtype).view(Watched)

    def arange(self, start, stop):
        return np.arange(start, stop).view(Watched)


class Travelled:
    """A transport that notes type and last dimension of every array that it is handed."""

    def __init__(self, transport, found: set):
        self.transport, self.found = transport, found

    def __getattr__(self, name):
        called = getattr(self.transport, name)
        if name not in COLLECTIVES:
            return called

        def noted(a, *arguments):
            self.found.add((str(a.dtype), a.shape[-1]))
            return called(a, *arguments)
        return noted


@pytest.fixture
def watched(monkeypatch):
    """A backend whose arrays' types are recorded, and that all arrays in use belong to."""
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")    # where the backend makes every array
    library = WatchedBackend()
    monkeypatch.setattr(Watched, "seen", set())
    with use_only(library):
        yield library


@pytest.mark.ranks(*SOME, first=(4, 8))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_promotion(comm, watched, dtype):
    """All arrays of a step have the model's type, but for masks and positions; with float16,
    sums and attention's probabilities are float32, of which only sums travel."""
    float16 = dtype == "float16"
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm, watched) as scheme:
            Watched.seen.clear()
            travelled: set[tuple[str, int]] = set()
            for axis in scheme.grid.axes.values():
                axis.transport = Travelled(axis.transport, travelled)
            model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype=dtype, causal=True)
            y, saved = model.forward(model.random("x"))
            dx = model.backward(model.random("dy"), saved)
        lasting = [y, dx, *(a for p in model.parameters for a in (p.value, p.grad))]
        assert all(isinstance(a, Watched) and a.dtype == dtype for a in lasting), parallelism
        assert np.isfinite(y).all() and np.isfinite(dx).all(), parallelism
        wide = {"float32"} if float16 else {dtype}
        statistics = {str(a.dtype) for a in saved_arrays(saved)} - {dtype}
        assert statistics == wide - {dtype}, parallelism
        assert Watched.seen == {dtype, "int64", "bool"} | wide, parallelism
        assert comm.size == 1 or {kind for kind, _ in travelled} <= {dtype} | wide, parallelism
        if float16:
            assert all(kind == dtype or last <= 2 for kind, last in travelled), parallelism


@pytest.mark.ranks(4)
@pytest.mark.every_transport
@pytest.mark.parametrize("columns", [4, 9000])    # handed to all ranks in shared memory, and not
@pytest.mark.parametrize("dtype, terms, total", [
    ("float16", (40000, 40000, -40000, 0), 40000), ("float16", (2048, 1, 1, 0), 2050),
    ("bfloat16", (256, 1, 1, 0), 258)])
def test_sums_of_16_bits_over_ranks_are_rounded_once(comm, transport, columns, dtype, terms,
                                                     total):
    """Summed in 16 bits the first would be infinite, the second 2048, and the third 256."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with on_grid(comm, x=4) as grid:
        x, term = grid.x, np.full((4, columns), terms[comm.rank], kind)
        split, found = Split(x, 0, 4), {}
        found["all_reduce"] = x.all_reduce(term.copy())
        for dim in (0, 1):
            found[f"reduce_scatter {dim}"] = x.reduce_scatter(term.copy(), dim)
            even = [term.shape[dim] // 4] * 4
            found[f"begun {dim}"] = x.begin_reduce_scatter(term.copy(), dim, even).take()
        found["uneven"] = x.reduce_scatter(term.copy(), 0, [2, 1, 0, 1])
        for name, made, add in (("placed", split.term, split.reduce_scatter),
                                ("reduce_term", split.reduce_term, lambda a: x.reduce(a, 1)),
                                ("reduce", lambda *_: term.copy(), lambda a: x.reduce(a, 1))):
            mine = made(term.shape, kind)
            mine[...] = term
            found[name] = add(mine)
        for name, a in found.items():
            assert a is None or a.dtype == kind and np.array_equal(
                a, np.full(a.shape, total)), (name, a)
        assert [name for name, a in found.items() if a is None] == (
            [] if comm.rank == 1 else ["reduce_term", "reduce"])
        del found, mine


@pytest.mark.ranks(1, 4, slow=(8,))
def test_bfloat16_is_as_exact_as_its_three_bits_less_allow(comm, transport):
    """Beside float64: about 8 times as far as float16, 2 to 32 times; with masters of float32."""
    for parallelism in SOME[comm.size]:
        found = {}
        for dtype, master in (("float64", None), ("float16", "float32"), ("bfloat16", "float32")):
            with parallelism.on(comm, backend.get("numpy")) as scheme:
                model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype=dtype, master=master)
                y, saved = model.forward(model.random("x"))
                dx = model.backward(model.random("dy"), saved)
                assert (str(y.dtype), str(dx.dtype)) == (dtype, dtype)
                if master:
                    assert {str(a.dtype) for p in model.parameters
                            for a in (p.master, p.grad)} == {"float32"}
                found[dtype] = [np.asarray(a, float) for a in
                                (y, dx, *(p.grad for p in model.parameters))]
        float16, bfloat16 = (
            np.sqrt(comm.allreduce(sum(np.sum((a - b) ** 2) for a, b in zip(
                found[dtype], found["float64"])))) for dtype in ("float16", "bfloat16"))
        assert 2 * float16 < bfloat16 < 32 * float16, parallelism
