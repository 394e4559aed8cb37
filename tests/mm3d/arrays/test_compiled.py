"""Kernels that Numba compiles: which are used, their numbers, and where those have equal bits.

That they are the readable functions is tested in test_functional.py and test_cross_entropy.py.
"""
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from compiled import load_compiled
from mm3d.arrays import backend, numpy_backend
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.child_process import run_child
from mm3d.training.optimizers import AdamW

HOW = ["as written", pytest.param("by numba", marks=pytest.mark.slow)]


@pytest.fixture(params=HOW)
def compiled(request, monkeypatch):
    with np.errstate(all="ignore"):    # Python says more than Numba
        yield load_compiled(request.param, monkeypatch)


@pytest.mark.parametrize("installed, asked, expected", [
    (True, None, "numba 0.99"), (True, "numpy", ""), (False, None, "")])
def test_numba_is_used_where_it_is_installed(tmp_path, monkeypatch, installed, asked, expected):
    """Unless a variable refuses it; and the record of a run says which."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if installed:
        (tmp_path / "numba-0.99.dist-info").mkdir()
        (tmp_path / "numba-0.99.dist-info" / "METADATA").write_text("Name: numba\nVersion: 0.99")
    monkeypatch.delenv("MM3D_KERNELS", raising=False)
    if asked:
        monkeypatch.setenv("MM3D_KERNELS", asked)
    library = numpy_backend.NumpyBackend()
    assert library.compiler == expected
    assert library.describe_device() == (
        {"elementwise_version": expected} if expected else {})
    if not expected:
        assert type(library.kernels) is Kernels
    monkeypatch.setenv("MM3D_KERNELS", "numba")    # which need not be there
    with pytest.raises(ValueError, match="MM3D_KERNELS='numba' is unknown: choose numpy$"):
        numpy_backend.NumpyBackend()


@pytest.mark.parametrize("dtype, least", [("float32", -87.3), ("float64", -707.0)])
def test_exponentials(compiled, dtype, least):
    """To two roundings; 0 of -inf, and of what would be subnormal; NaN of NaN."""
    x = np.concatenate([np.linspace(least, 0, 300), [-1e4, -np.inf, 0]]).astype(dtype)
    a, top, total = x.reshape(1, 3, 101).copy(), *np.empty((2, 1, 3), dtype)
    compiled.exponentials(a, top, total)
    highest = x.reshape(1, 3, 101).max(-1)
    expected = np.exp(x.reshape(1, 3, 101).astype(np.longdouble) - highest[..., None])
    expected[expected < np.finfo(dtype).tiny] = 0
    eps = np.finfo(dtype).eps
    assert np.array_equal(top, highest) and np.allclose(a, expected, rtol=2 * eps, atol=0)
    assert np.allclose(total, expected.sum(-1), rtol=50 * eps)
    a[0, 1, 7] = np.nan
    compiled.exponentials(a, top, total)
    assert np.isnan(total).tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_largest_number(compiled, dtype):
    for row in ([-3, -1, -2], [0.5, -7, 0.25], [-np.inf, -1e-30, -1], [3, np.inf, 4], [-5]):
        assert compiled.largest_of_row(np.array(row, dtype)) == np.array(max(row), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adamw_has_the_bits_of_numpy(compiled, monkeypatch, no_backends, dtype):
    library, drawn = backend.get("numpy"), np.random.default_rng(4)
    own = SimpleNamespace(betas=(0.9, 0.95), eps=1e-8, lr=3e-4, steps=3)
    own._numbers = lambda factors: AdamW._numbers(own, factors)
    start = [abs(drawn.standard_normal((5, 7))).astype(dtype) for _ in range(4)]
    found = []
    for kind in (Kernels, compiled.CompiledKernels):
        library.kernels, arrays = kind(library), [a.copy() for a in start]
        AdamW._update(own, np, (0.7, 0.99), np.empty_like(start[0]), *arrays)
        found.append(arrays)
    assert all(np.array_equal(*both) for both in zip(*found))
    assert not np.array_equal(found[0][0], start[0])
    apart = [np.asfortranarray(a) for a in start]    # left to NumPy
    AdamW._update(own, np, (0.7, 0.99), np.empty_like(start[0]), *apart)
    assert all(np.array_equal(*both) for both in zip(apart, found[0]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_element_has_the_same_bits_wherever_it_lies(monkeypatch, dtype):
    """However features and rows are divided, also where processors take many at once."""
    kernels = load_compiled("by numba", monkeypatch)
    x, dy, xhat = np.random.default_rng(5).standard_normal((3, 4, 203)).astype(dtype)
    b, rstd, means = x[0].copy(), abs(x[:, :1]), dy[:, :2].copy()

    def results(rows, features):
        place = slice(*rows), slice(*features)
        u, g, h = (a[place].copy() for a in (x, dy, xhat))
        y, dx = np.empty_like(u), np.empty_like(u)
        kernels.gelu_forward(u, b[place[1]].copy(), y)
        kernels.gelu_backward(g, u, b[place[1]].copy(), dx)
        kernels.normalize_backward(g, h, rstd[place[0]], means[place[0]])
        return np.stack([y, dx, g])
    whole = results((0, 4), (0, 203))
    for rows in ((0, 1), (1, 4)):
        for features in ((0, 7), (7, 100), (100, 203), (202, 203)):
            part = whole[:, slice(*rows), slice(*features)]
            assert np.array_equal(results(rows, features), part)


@pytest.mark.slow
def test_a_process_that_compiles_has_the_bits_of_one_that_reads_the_cache(tmp_path):
    """Sums of rows, too, whose order the compiler chooses."""
    pytest.importorskip("numba")
    program = """
import numpy as np
from mm3d.arrays import compiled
for dtype in ("float32", "float64"):
    for length in range(1, 300):
        a, b = np.random.default_rng(6).standard_normal((2, 1, 4, length)).astype(dtype)
        top, total = np.empty((2, 1, 4), dtype)
        compiled.softmax_backward(a, b)
        compiled.exponentials(a, top, total)
        print(dtype, length, b.tobytes().hex(), total.tobytes().hex())
print(sum(compiled.exponentials.stats.cache_hits.values()))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    compiles, reads = (run_child([sys.executable, "-c", program], env=environment).out.splitlines()
                       for _ in range(2))
    assert (compiles.pop(), reads.pop()) == ("0", "2")
    assert compiles == reads and len(reads) == 598
