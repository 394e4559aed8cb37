"""The core runs on an array library whose arrays lie out of the host's reach.

array-api-strict has nothing but the functions of the array API standard, and the arrays of its
second device refuse to become NumPy arrays unasked, as those of a GPU do.
"""
import ast
import functools
import inspect
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import experts
import fakelibs
import llamas
import mm3d
from mm3d.arrays import backend, cupy_backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.model.experts.gates import balance_loss, choose, gates_backward, z_loss
from mm3d.model.experts.token_order import counts
from mm3d.model.experts.options import GATES
from mm3d.model.experts.layer import Experts
from models import PARALLELISMS, SIZES, Parallelism, data, differences, serial, train
from reference import SHAPES, integers, on_grid, relative_error

strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
HOST, DEVICE = strict.Device("CPU_DEVICE"), strict.Device("device1")


class StrictBackend(NumpyBackend):
    """array-api-strict on its second device, with blocks of a few rows."""

    name = "strict"
    xp = strict
    block = 64
    host_buffers = False

    def owns(self, a):
        return isinstance(a, type(strict.empty(0)))

    def empty(self, shape, dtype):
        return strict.full(tuple(shape), np.nan if strict.isdtype(dtype, "real floating") else -9,
                           dtype=dtype, device=DEVICE)    # what is forgotten shows

    def arange(self, start, stop):
        return strict.arange(start, stop, device=DEVICE)

    def asarray(self, host):
        return strict.asarray(host, device=DEVICE, copy=True)

    def to_host(self, a):
        return np.asarray(a.to_device(HOST))

    def is_contiguous(self, a):
        return True    # a library without strides: copies to the host are in order

    def gemm(self, a, b, out, progress=None):
        out[...] = strict.matmul(a, b)

    def take_rows(self, a, rows, out):
        out[...] = strict.take(a, strict.asarray(rows, device=DEVICE), axis=0)
        return out

    def put_rows(self, a, rows, values):
        for place, row in enumerate(rows):
            a[int(row), :] = values[place, :]


@pytest.fixture(autouse=True)
def strict_backend(monkeypatch, no_backends):
    """The library for one test; arrays travel as they do where nothing is set."""
    monkeypatch.delenv("MM3D_TRANSPORT", raising=False)
    return StrictBackend()


def test_a_hidden_host_copy_raises(strict_backend):
    """So that what runs here makes none."""
    a = backend.get(strict_backend).asarray(np.ones((2, 3)))
    for copy in (np.asarray, lambda a: a + np.ones((2, 3)), lambda a: np.add(a, 1), memoryview):
        with pytest.raises((RuntimeError, TypeError)):
            copy(a)
    assert np.array_equal(strict_backend.to_host(a), np.ones((2, 3)))


def test_the_library_is_chosen_by_argument_then_environment(monkeypatch):
    """NumPy if neither says anything."""
    monkeypatch.delenv("MM3D_BACKEND", raising=False)
    assert backend.get().name == "numpy"
    fakelibs.replace_cupy(monkeypatch)
    monkeypatch.setenv("MM3D_BACKEND", "cupy")
    assert backend.get().name == "cupy" and backend.get("numpy").name == "numpy"
    assert backend.get() is backend.get("cupy")
    monkeypatch.setenv("MM3D_BACKEND", "cuda")
    with pytest.raises(ValueError, match="MM3D_BACKEND='cuda' is unknown: choose numpy or c"):
        backend.get()


@pytest.mark.parametrize("before", [False, True])
def test_a_backend_given_itself_is_the_one_of_its_arrays(before):
    """Whether or not there was one of its name; a step takes all memory from it."""
    earlier = backend.get("numpy") if before else NumpyBackend()
    own = NumpyBackend()
    with Parallelism("serial").on(MPI.COMM_SELF, own) as scheme:
        model = mm3d.Transformer(scheme, **SIZES["few"])
        y, saved = model.forward(model.random("x"))
        model.backward(y, saved)
    assert scheme.grid.backend is own is backend.backend_of(y) is backend.get("numpy")
    assert own.memory()["peak"] > model.saved_bytes(saved) and earlier.memory()["peak"] == 0


@pytest.mark.ranks(1, slow=(8,))
@pytest.mark.parametrize("dtype, output, gradients", [("float64", 1e-12, 1e-11),
                                                      ("float32", 1e-5, 5e-5)])
def test_model_equals_numpy(comm, strict_backend, dtype, output, gradients):
    """The whole model on every scheme and grid, with the same words moved and bytes saved; in a
    library that promotes nothing by itself."""
    sizes, causal = "uneven", True
    x, dy, state = data(**SIZES[sizes])
    for parallelism in [Parallelism("serial"), *PARALLELISMS[comm.size]]:
        accounts = []
        for library in ("numpy", strict_backend):
            with parallelism.on(comm, library) as scheme:
                model = mm3d.Transformer(scheme, **SIZES[sizes], dtype=dtype, causal=causal)
                results = train(model, x, dy, state)
                saved = model.saved_bytes(model.forward(model.shard(x))[1])
                accounts.append((saved, scheme.grid.traffic()))
        assert {a.dtype for a in results.values()} == {getattr(strict, dtype)}
        assert all(a.device == DEVICE for a in results.values())
        wrong = differences(model, results, serial(sizes, causal), output, gradients)
        assert not wrong, f"{parallelism}: {wrong}"
        assert accounts[0] == accounts[1], parallelism


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", llamas.ARCHITECTURES)
def test_other_architectures_equal_numpy(strict_backend, name, dtype):
    """Norms, rotations, gates, groups and windows by functions of the standard alone."""
    found, (x, dy) = [], np.random.default_rng(0).standard_normal((2, 3, 7, 10))
    for library, kind in (("numpy", "float64"), (strict_backend, dtype)):
        with Parallelism("3d").on(MPI.COMM_SELF, library) as scheme:
            model = mm3d.Transformer(scheme, **llamas.SIZES, dtype=kind, causal=True,
                                     architecture=llamas.architecture(name))
            found.append(train(model, x, dy, model.state()))
    assert {a.dtype for a in found[1].values()} == {getattr(strict, dtype)}
    for key, a in found[0].items():
        other = scheme.grid.backend.to_host(found[1][key])
        assert relative_error(other, a) <= {"float64": 1e-13, "float32": 1e-5}[dtype], key


@pytest.mark.ranks(1, 4, slow=(8,))
def test_layouts(comm, strict_backend):
    """Shards and globals are equal to the bit, of any type, uneven and on a diagonal."""
    for spec, shape in (("xy,,z", SHAPES[0]), ("z,yx", SHAPES[1][:2]), ("zx@y", SHAPES[2][:1])):
        A, layout = integers(shape, 1), mm3d.Layout(spec)
        sizes = {1: (1, 1, 1), 4: (2, 1, 2), 8: (2, 2, 2)}[comm.size]
        for dtype in ("float64", "float32", "int64"):
            with on_grid(comm, *sizes) as numpy_grid:
                grid = mm3d.Grid(comm, strict_backend, **numpy_grid.shape)
                a = layout.shard(A.astype(dtype), grid)
                there_and_back = layout.unshard(a, grid, shape)
                assert tuple(a.shape) == layout.local_shape(numpy_grid, shape)
            assert there_and_back.dtype == dtype and np.array_equal(there_and_back, A)


@pytest.mark.ranks(1, 4, slow=(8,))
def test_products_in_exact_integers(comm, strict_backend):
    """Every scheme's products, forward and backward, to the bit; rows and columns uneven."""
    (batch, seq, h), wide = (3, 5, 7), 11
    X, DY = integers((batch, seq, h), 1), integers((batch, seq, wide), 2)
    W = integers((h, wide), 3)
    for parallelism in PARALLELISMS[comm.size]:
        with parallelism.on(comm, strict_backend) as scheme:
            outer, inner = scheme.spaces(batch, seq)
            for source, target in ((outer, inner), (inner, outer)):
                product = scheme.product(source, target, W.shape, (1, 1))
                x_layout, y_layout, grid = source.layout(), target.layout(), scheme.grid
                weight = product.weight.shard(W, grid)
                y, saved = product.forward(x_layout.shard(X, grid), weight)
                dx, dw = product.backward(y_layout.shard(DY, grid), weight, saved)
                for layout, a, expected in (
                        (y_layout, y, X @ W), (x_layout, dx, DY @ W.T),
                        (product.weight, dw, np.einsum("bsi,bso->io", X, DY))):
                    found = layout.unshard(a, grid, expected.shape)
                    assert np.array_equal(found, expected), parallelism


@functools.cache
def calls(path: Path) -> list[tuple[str, int, list[str]]]:
    """Functions of the array library that a module calls: name, arguments and keywords.

    The library goes by the name `xp`; what a backend of a library calls is its own.
    """
    if not re.search(r"\bxp\.", path.read_text()):
        return []    # to parse a file takes far longer
    tree = ast.parse(path.read_text())
    own = [node for node in tree.body if isinstance(node, ast.ClassDef)
           and any(getattr(base, "id", "") == "Backend" for base in node.bases)]
    skipped = {id(node) for cls in own for node in ast.walk(cls)}
    found = []
    for node in ast.walk(tree):
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and id(node) not in skipped):
            of = node.func.value
            if getattr(of, "id", getattr(of, "attr", "")) == "xp":
                found.append((node.func.attr, len(node.args), [k.arg for k in node.keywords]))
    return found


# They compute in place by ufuncs, which NumPy and CuPy have and the standard does not.
IN_PLACE = {"optimizers.py", "norms.py"}


@pytest.mark.parametrize("gate", GATES)
def test_tokens_are_routed_to_the_same_experts_on_both_libraries(gate, strict_backend):
    """The choice alone comes to the host."""
    case, rng, found = Experts(5, top=3, gate=gate), np.random.default_rng(0), []
    z, dgates = rng.normal(0, 2, (11, 5)), rng.normal(size=(11, 3))
    for library in backend.get("numpy"), backend.get(strict_backend):
        logits = library.asarray(z)
        choice = choose(logits, case)
        results = [choice.gates, choice.probabilities,
                   gates_backward(choice, library.asarray(dgates)), *z_loss(logits, 0.1, 11),
                   *balance_loss(choice, counts(choice.chosen, 5), 11)]
        found.append([choice.chosen] + [library.to_host(a) for a in results])
    for one, other in zip(*found):
        assert np.allclose(one, other, rtol=1e-14, atol=1e-17)


@pytest.mark.ranks(1, slow=(4,))
def test_layers_of_experts_equal_numpy(comm, strict_backend):
    """Routed, moved and multiplied on the device; only what plans the rows is on the host."""
    case, found = Experts(5, every=1, capacity=0.8), []
    for library in ("numpy", strict_backend):
        with Parallelism("3d", (1, 2, comm.size // 2) if comm.size > 1 else None).on(
                comm, library) as scheme:
            found.append(experts.step(mm3d.Transformer(scheme, **experts.SIZES, experts=case)))
    for name, a in found[0].items():
        assert np.allclose(a, found[1][name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "cupy"])
def test_functions_exist_with_these_arguments(library):
    """What the core calls as `xp.name(...)`, each library has; CuPy is looked at without a GPU."""
    xp = pytest.importorskip(library, reason=f"{library} is not installed")
    used = [call for path in Path(mm3d.__file__).parent.rglob("*.py") for call in calls(path)
            if library != "array_api_strict" or path.name not in IN_PLACE]
    assert {"sum", "permute_dims", "matmul"} <= {name for name, _, _ in used}
    for name, arguments, keywords in used:
        function = getattr(xp, name, None)
        assert function is not None, f"{library} has no {name}"
        if hasattr(function, "nin"):    # a ufunc, which has the same keywords in all libraries
            assert function.nin == arguments and set(keywords) <= {"out", "dtype"}, name
        else:
            with suppress(ValueError):    # some functions of NumPy have no signature before 2.4
                signature = inspect.signature(function)
                signature.bind(*range(arguments), **dict.fromkeys(keywords))


def test_cupy_backend_uses_what_cupy_has():
    """The functions that its backend alone calls."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    tree = ast.parse(inspect.getsource(cupy_backend.CupyBackend))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
             and isinstance(node.value, ast.Attribute) and node.value.attr == "xp"}
    assert "asnumpy" in names
    assert [name for name in names if not hasattr(cupy, name)] == []
