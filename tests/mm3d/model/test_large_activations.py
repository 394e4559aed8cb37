"""Activations of some thousands, as trained models have them, in types of 16 bits: no square, no
score and no sum of them goes beyond the range of float16, in NumPy and in the GPU's kernels."""

import sys

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.arrays import backend
from mm3d.arrays.cudnn_attention import Saved
from mm3d.model import functional
from reference import relative_error

EPS = {"float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}


@pytest.fixture(params=["numpy", pytest.param("fake", marks=pytest.mark.slow),
                        pytest.param("cudnn", marks=pytest.mark.slow),
                        pytest.param("gpu", marks=pytest.mark.gpu)])
def library(request, monkeypatch):
    """NumPy, the GPU's kernels on this processor, also with cuDNN's, and a GPU where there is one.
    """
    if request.param == "numpy":
        return backend.get("numpy")
    if request.param != "gpu":
        request.getfixturevalue("compiled_cupy")
    if request.param == "cudnn":
        import fakecudnn
        monkeypatch.setitem(sys.modules, "cudnn", fakecudnn.module())
    backend.get("numpy")
    return backend.get("cupy")


@pytest.fixture(params=EPS)
def dtype(request, library):
    if request.param not in ("float16", *map(str, library.more_dtypes)):
        pytest.skip(f"{library.name} has no {request.param} here")
    return request.param


def numbers(seed, *shape, centre=0.0, scale=1.0):
    return centre + scale * np.random.default_rng(seed).standard_normal(shape)


def there(library, dtype, *arrays):
    """The arrays, rounded, where the library has them, and the same numbers in float64."""
    made = [library.from_host(a.shape, dtype, lambda a=a: a) for a in arrays]
    return made, [library.to_host(a).astype(np.float64) for a in made]


def like(library, a):
    return library.empty(a.shape, a.dtype)


def assert_close(library, dtype, found, expected, factor=4):
    """Every element within some roundings of its own size and the array's."""
    found = library.to_host(found).astype(np.float64)
    size = np.abs(expected) + np.sqrt(np.mean(expected ** 2))
    assert np.isfinite(found).all()
    assert np.max(np.abs(found - expected) / size) <= factor * EPS[dtype]


@pytest.mark.limit(240)
@pytest.mark.parametrize("outlier, centre", [(300, 0), (-5000, 0), (60000, 0), (0, 5000)])
def test_normalize(library, dtype, outlier, centre):
    """One element of a row that is far larger than all others; and a large mean."""
    x = numbers(1, 3, 4, 96, centre=centre, scale=1 + abs(centre) / 100)
    x[..., 17] += outlier
    (X, DY), (x, dy) = there(library, dtype, x, numbers(2, *x.shape))
    XHAT, RSTD = functional.normalize_forward(X, 96, 1e-5, lambda s: s, like(library, X))
    xhat, rstd = functional.normalize_forward(x, 96, 1e-5, lambda s: s, np.empty(x.shape))
    assert_close(library, dtype, XHAT, xhat)
    assert np.allclose(library.to_host(RSTD), rstd, rtol=1e-5)
    DX = functional.normalize_backward(DY, XHAT, RSTD, 96, lambda s: s, like(library, X))
    dx = functional.normalize_backward(dy, xhat, rstd, 96, lambda s: s, np.empty(x.shape))
    if abs(outlier) < 60000:    # whose gradient is a difference of nearly equal numbers
        assert_close(library, dtype, DX, dx, 16)


@pytest.mark.limit(240)
def test_gelu(library, dtype):
    """Zero or the number itself, and slopes of 0 or 1, beyond 256, whose square is too large."""
    x = numbers(3, 8, 64, scale=2000)
    (X, B, DY), (x, b, dy) = there(library, dtype, x, numbers(4, 64, scale=300),
                                   numbers(5, *x.shape))
    assert_close(library, dtype, functional.bias_gelu_forward(X, B, like(library, X)),
                 functional.bias_gelu_forward(x, b, np.empty(x.shape)))
    DX, DB = functional.bias_gelu_backward(DY, X, B, like(library, X))
    dx, db = functional.bias_gelu_backward(dy, x, b, np.empty(x.shape))
    assert_close(library, dtype, DX, dx)
    assert_close(library, dtype, DB, db, 8)


def test_sums_over_rows(library, dtype):
    """Products of which each one is beyond the range of float16, and their sum is not."""
    x, y = numbers(6, 16, 8, scale=1000), numbers(7, 16, 8, scale=1000)
    (X, Y), (x, y) = there(library, dtype, np.r_[x, x], np.r_[y, -y] + 1e-3 * np.r_[y, y])
    assert np.abs(x * y).max() > 65504 > np.abs((x * y).sum(0)).max()
    assert_close(library, dtype, functional.sum_products(X, Y), functional.sum_products(x, y), 2)


@pytest.mark.limit(240)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head, centre, value, gradient", [
    (1024, 9, 500, 0.1),     # Q K^T is about 83000 before it is scaled
    (128, 0, 2000, 4)],      # and dP = dO V^T up to 300000
    ids=["scores", "values"])
def test_attention(library, dtype, head, centre, value, gradient, causal):
    shape = 2, 24, 2, head
    q, k = (numbers(seed, *shape, centre=centre) for seed in (8, 9))
    (Q, K, V, DO), wide = there(library, dtype, q, k, numbers(10, *shape, scale=value),
                                numbers(11, *shape, scale=gradient))
    Y, LSE = functional.attention_forward(Q, K, V, 0, causal, like(library, Q))
    y, lse = functional.attention_forward(*wide[:3], 0, causal, np.empty(shape))
    assert_close(library, dtype, Y, y, 16)
    sums = LSE.array if isinstance(LSE, Saved) else LSE    # cuDNN's come with the output
    assert np.allclose(library.to_host(sums), lse, rtol=1e-5, atol=1e-5)
    found, expected = [like(library, a) for a in (Q, K, V)], [np.empty(shape) for _ in range(3)]
    functional.attention_backward(DO, Q, K, V, LSE, 0, causal, *found)
    functional.attention_backward(wide[3], *wide[:3], lse, 0, causal, *expected)
    for a, e in zip(found, expected):
        assert_close(library, dtype, a, e, 64)


@pytest.mark.limit(240)
def test_a_model(library, dtype):
    """Two features of thousands in every row, through two layers, forward and backward."""
    def step(name, dtype):
        scheme = mm3d.scheme("serial", MPI.COMM_SELF, backend=name)
        model = mm3d.Transformer(scheme, layers=2, hidden=64, heads=2, batch=2, seq=12,
                                 dtype=dtype, causal=True)
        x = numbers(12, *model.shape)
        x[..., 5] = 3000
        x[..., 40] = -1500
        host = scheme.grid.backend.to_host
        x, dy = (scheme.grid.backend.from_host(a.shape, dtype, lambda a=a: a)
                 for a in (x, numbers(13, *model.shape)))
        y, saved = model.forward(x)
        dx = model.backward(dy, saved)
        found = {"y": host(y), "dx": host(dx), **{p.name: host(p.grad) for p in model.parameters}}
        return found

    found, expected = step(library.name, dtype), step("numpy", "float64")
    for name, a in found.items():
        # What layer norms let through of such rows is small: the type's own rounding of x shows.
        assert relative_error(a, expected[name]) <= 64 * EPS[dtype], name
