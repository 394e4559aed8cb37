"""The functional pairs and the layers: plain NumPy forward, central differences backward."""
import math

import numpy as np
import pytest

import mm3d
from mm3d.arrays import backend
from mm3d.arrays.elementwise import row_blocks
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.model import functional
from mm3d.model.attention.layer import Attention
from mm3d.model.builder import Builder
from mm3d.model.chains import Chain, Residual
from mm3d.model.layers import Gelu, LayerNorm, Linear, RMSNorm, SwiGLU
from mm3d.model.rotary import Rotary, Turns
from compiled import load_compiled
from models import SOME
from reference import relative_error


@pytest.fixture(params=[8, 16384], ids=["blocks", "whole"])
def blocks(request, no_backends):
    """Work in blocks of two rows of 4, of some heads and of two queries, and a last smaller one;
    and in one go."""
    library = backend.get("numpy")
    library.block, library.kernels.query_block = request.param, 2


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def slope(f, x, dy, v, h=1e-5):
    """<dy, f'(x) v> by central differences."""
    return np.vdot(dy, f(x + h * v) - f(x - h * v)) / (2 * h)


def check_gradient(f, x, dy, dx, scale=1.0):
    """<dy, f'(x) v> = <dx, v> for a random direction v of length 1."""
    v = normal(1, *x.shape)
    v /= np.linalg.norm(v)
    assert abs(slope(f, x, dy, v) - np.vdot(dx, v)) <= 1e-6 * scale * np.linalg.norm(dx)


def plain_gelu(x):
    return np.array([u / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u ** 3)))
                     for u in x.ravel()]).reshape(x.shape)


def gelu(x):
    return functional.gelu_forward(x, np.empty_like(x))


def test_gelu(blocks):
    x, dy = 3 * normal(2, 5, 3, 4), normal(3, 5, 3, 4)
    assert relative_error(gelu(x), plain_gelu(x)) <= 1e-15
    check_gradient(plain_gelu, x, dy, functional.gelu_backward(dy, x, np.empty_like(x)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_far_from_zero(dtype):
    """0 or x, and slopes of 0 or 1, without overflow, also in the fast version."""
    x, b = np.array([[-1e6, -30, 0, 30, 1e6]], dtype), np.zeros(5, dtype)
    for kernels in (backend.get("numpy").kernels, None):
        with np.errstate(all="raise", under="ignore"):
            if kernels is None:
                y, slopes = gelu(x), functional.gelu_backward(np.ones_like(x), x, np.empty_like(x))
            else:
                y = kernels.bias_gelu_forward(x, b, np.empty_like(x))
                slopes, _ = kernels.bias_gelu_backward(np.ones_like(x), x, b, np.empty_like(x))
        assert np.allclose(y, [[0, 0, 0, 30, 1e6]], rtol=0, atol=1e-30)
        assert np.allclose(slopes, [[0, 0, 0.5, 1, 1]], rtol=0, atol=1e-15)


def itself(sums):
    """The sum over one rank."""
    return sums


def normalize(x, eps=1e-5):
    return functional.normalize_forward(x, x.shape[-1], eps, itself, np.empty_like(x))


def test_normalize(blocks):
    x, dy = 2 + 3 * normal(4, 5, 3, 4), normal(5, 5, 3, 4)
    xhat, rstd = normalize(x)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    assert relative_error(rstd, 1 / np.sqrt(variance + 1e-5)) <= 1e-14
    assert relative_error(xhat, (x - mean) / np.sqrt(variance + 1e-5)) <= 1e-14
    dx = functional.normalize_backward(dy, xhat, rstd, 4, itself, np.empty_like(x))
    check_gradient(lambda x: normalize(x)[0], x, dy, dx)


@pytest.mark.ranks(*SOME)
def test_layer_norm_with_a_large_mean(comm):
    """Mean 1000 and deviation 1 in float32: E[x^2] - E[x]^2 would lose every digit.

    The features are divided over ranks in 2-D and 3-D; the error allowed is that of x itself,
    whose last digit is 6e-5.
    """
    hidden = 96
    X = np.float32(1000 + normal(6, 3, 5, hidden))
    expected = X - X.mean(-1, keepdims=True, dtype=float)
    expected /= np.sqrt(expected.var(-1, keepdims=True) + 1e-5)
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm) as scheme:
            space, inner = scheme.spaces(3, 5)
            layer = LayerNorm(Builder(scheme, space, inner, np.float32), "norm", hidden, 1e-5)
            layer.weight.value[...] = 1
            layer.bias.value[...] = 0
            y, _ = layer.forward(space.layout().shard(X, scheme.grid))
            place = space.layout().slices(scheme.grid, X.shape)
        assert y.dtype == np.float32
        assert np.abs(y - expected[place]).max(initial=0) <= 2e-4, parallelism


def plain_attention(q, k, v, first=0, causal=False):
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    later = np.arange(k.shape[1]) > first + np.arange(q.shape[1])[:, None]
    P = np.exp(np.where(later & causal, -np.inf, scores))
    return np.einsum("bhqk,bkhd->bqhd", P / P.sum(-1, keepdims=True), v), np.log(P.sum(-1))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(blocks, causal):
    """Queries 2 to 4 of 6 positions: the mask counts from the first one's position."""
    (q, dy), (k, v) = normal(7, 2, 2, 3, 8, 4), normal(8, 2, 2, 6, 8, 4)
    y, lse = functional.attention_forward(q, k, v, 2, causal, np.empty_like(q))
    expected, expected_lse = plain_attention(q, k, v, 2, causal)
    assert relative_error(y, expected) <= 1e-14 and relative_error(lse, expected_lse) <= 1e-14
    dq, dk, dv = (np.empty_like(a) for a in (q, k, v))
    functional.attention_backward(dy, q, k, v, lse, 2, causal, dq, dk, dv)
    check_gradient(lambda q: plain_attention(q, k, v, 2, causal)[0], q, dy, dq)
    check_gradient(lambda k: plain_attention(q, k, v, 2, causal)[0], k, dy, dk)
    check_gradient(lambda v: plain_attention(q, k, v, 2, causal)[0], v, dy, dv)
    if causal:    # no query sees position 5
        assert not dk[:, 5].any() and not dv[:, 5].any() and dk[:, 4].all() and dv[:, 4].all()


def test_attention_with_large_scores():
    """Scores of thousands neither overflow nor vanish: each query takes its best position."""
    k = 100 * np.eye(4)[None, :, None, :]
    q, v = k[:, ::-1], normal(9, 1, 4, 1, 4)
    y, lse = functional.attention_forward(q, k, v, 0, False, np.empty_like(q))
    assert np.array_equal(y, v[:, ::-1]) and np.array_equal(lse, np.full((1, 1, 4), 5000.0))


def test_hidden_scores_are_left_out(no_backends):
    """Under a causal mask, block by block: 1 + 2 + 3 + 4 of 16 parts, in backward as well."""
    library, counted = backend.get("numpy"), []
    library.block = 8

    class Counting:
        """NumPy, but for its products."""

        def __getattr__(self, name):
            return getattr(np, name)

        def matmul(self, a, b, out):
            counted.append(a.size * b.shape[-1])
            return np.matmul(a, b, out=out)
    library.xp = Counting()
    library.kernels.query_block = 2
    q, k, v, dy = (normal(n, 1, 8, 3, 4) for n in range(4))
    parts = [3 * 2 * 2 * 4] * 10    # of two queries and two positions
    _, lse = functional.attention_forward(q, k, v, 0, True, np.empty_like(q))
    assert sum(counted) == 2 * sum(parts)
    counted.clear()
    functional.attention_backward(dy, q, k, v, lse, 0, True, *(np.empty_like(q) for _ in "qkv"))
    assert sum(counted) == 5 * sum(parts) + 3 * 2 * 2 * 10    # one term more for the sums


def pairs(dtype):
    """Every function that has a faster version, with its arguments, contiguous and not."""
    def arrays(n, *shape):
        whole = 2 * normal(n, n, shape[0], 2, *shape[1:]).astype(dtype)
        apart = whole[:, :, 0]
        rows_apart = np.concatenate([apart, apart], -1)[..., :shape[-1]]
        return (list(apart), list(np.ascontiguousarray(apart)), list(rows_apart),
                [np.asfortranarray(a) for a in apart])

    for x, dy, out in arrays(3, 5, 3, 6):
        b = x[0, 0].copy()
        yield "bias_gelu_forward", (x, b), 1
        yield "bias_gelu_backward", (dy, x, b), 1
        yield "add_rows", (x, b), 1
        yield "scale_rows", (x, b), 1
        yield "sum_rows", (x,), 0
        yield "sum_products", (x, dy), 0
        yield "normalize_forward", (x, 6, 1e-5, itself), 1
        rstd = abs(dy[:, :, :1]).copy()
        yield "normalize_backward", (dy, x, rstd, 6, itself), 1
    for q, k, v, dy in arrays(4, 2, 6, 5, 4):
        for causal in (False, True):
            yield "attention_forward", (q, k, v, 0, causal), 1
            _, lse = plain_attention(q, k, v, 0, causal)
            yield "attention_backward", (dy, q, k, v, lse.astype(dtype), 0, causal), 3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("how", ["numpy", "as written",
                                 pytest.param("by numba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-14), ("float32", 2e-6)])
def test_fast_versions_are_the_readable_ones(blocks, dtype, tolerance, how, monkeypatch):
    """The same results and types from NumPy's and compiled kernels and from the pairs."""
    seen, kernels = set(), (Kernels if how == "numpy" else load_compiled(
        how, monkeypatch).CompiledKernels)(backend.get("numpy"))
    for name, arguments, outputs in pairs(dtype):
        results = []
        for function in (getattr(functional, name).__wrapped__, getattr(kernels, name)):
            out = [np.empty_like(arguments[0]) for _ in range(outputs)]
            found = function(*arguments, *out)
            found = found if isinstance(found, tuple) else [found]
            results.append([*out, *(a for a in found if a is not None)])
        for readable, fast in zip(*results, strict=True):
            assert fast.dtype == readable.dtype == dtype, name
            assert relative_error(fast, readable) <= tolerance, name
        seen.add(name)
    softmax = {"softmax_statistics", "softmax_gradient"}    # see test_cross_entropy.py
    assert seen == {name for name in vars(Kernels) if not name.startswith("_")} - {
        "dtypes", "query_block", "np"} - softmax


def layers(scheme):
    """Each kind of layer with space, features and unit of its input and output."""
    outer, inner = scheme.spaces(3, 4)
    ten, wide = (outer, 10, 1), (inner, 15, 1)

    build = Builder(scheme, outer, inner, np.float64)

    def linear(adds_bias=True):
        return Linear(build, "linear", "up", (10, 15), adds_bias=adds_bias)

    def back():
        return Linear(build, "back", "down", (15, 10))

    def qkv():
        return Linear(build, "qkv", "up", (10, 3, 10), unit=5)

    yield "linear into", linear(), ten, wide
    yield "linear back", back(), wide, ten
    yield "layer norm", LayerNorm(build, "norm", 10, 1e-5), ten, ten
    up = linear(adds_bias=False)
    yield "gelu", Chain(up, Gelu(up, inner, 15)), ten, wide
    yield "residual", Residual(linear(), back()), ten, ten
    plain, turned = (mm3d.Architecture(rotary_base=base) for base in (10.0, 3.0))
    yield "rms norm", RMSNorm(build, "norm", 10, 1e-5), ten, ten
    both = Linear(build, "both", "up", (10, 2, 15))
    yield "swiglu", Chain(both, SwiGLU(inner, 15)), ten, wide
    for window, how in ((None, plain), (2, turned)):    # 4 heads of 6 that share 2 keys
        grouped = Linear(build, "qkv", "up", (10, 4, 12), unit=6, has_bias=False)
        rotary = Rotary(inner, 3, 12, Turns(inner, 6, "float64", how))
        attention = Attention(inner, 24, 6, True, 2, window)
        yield f"grouped attention {window}", Chain(grouped, rotary, attention), ten, (
            inner, 24, 12)
    for causal in (False, True):    # 2 heads of 5
        attention = Attention(inner, 10, 5, causal)
        yield f"attention {causal}", Chain(qkv(), attention), ten, (inner, 10, 5)


def derivative_error(grid, layer, source, target):
    """How far <dy, f'(x, p) (v, w)>, by central differences, is from <dx, v> + <dp, w>."""
    rng = np.random.default_rng(4)
    (x_layout, X, V), (y_layout, DY) = (
        (space.layout(unit=unit), *rng.standard_normal((n, 3, 4, features)))
        for n, (space, features, unit) in ((2, source), (1, target)))
    values = [rng.standard_normal((2, *p.shape)) for p in layer.parameters]

    def output(t):
        for p, (value, direction) in zip(layer.parameters, values):
            p.load(value + t * direction)
        y, saved = layer.forward(x_layout.shard(X + t * V, grid))
        return y_layout.unshard(y, grid, DY.shape), saved

    h = 1e-5
    numeric = np.vdot(DY, output(h)[0] - output(-h)[0]) / (2 * h)
    dx = layer.backward(y_layout.shard(DY, grid), output(0)[1])
    terms = [np.vdot(x_layout.unshard(dx, grid, X.shape), V)]
    for p, (_, direction) in zip(layer.parameters, values):
        terms.append(np.vdot(p.gather(p.grad), direction))
    return abs(numeric - sum(terms)) / np.linalg.norm(terms)


@pytest.mark.ranks(1, 4, slow=(8,))
def test_layers_by_directional_derivatives(comm):
    """Inputs and parameters of every layer, on one rank and dealt."""
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm) as scheme:
            for name, layer, source, target in layers(scheme):
                error = derivative_error(scheme.grid, layer, source, target)
                assert error <= 1e-6, f"{parallelism}: {name}, {error:.1e}"


def test_rows_that_lie_apart_stay_together_in_blocks():
    """A block of columns is taken sequence by sequence, not row by row."""
    library, whole = backend.get("numpy"), np.arange(2 * 64 * 16.0).reshape(2, 64, 16)
    found = [a for a, in row_blocks(library, whole[..., 8:])]
    assert [a.shape for a in found] == [(64, 8)] * 2
    assert np.array_equal(np.stack(found), whole[..., 8:])
