"""Cross entropy and lookups of divided rows and vocabularies, beside plain NumPy."""
import numpy as np
import pytest

import mm3d
from compiled import load_compiled
from mm3d.arrays import backend
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.model import token_functions
from mm3d.model.cross_entropy import CrossEntropy, Targets
from mm3d.model.embedding import Embedding
from mm3d.model.builder import Builder
from reference import fits

# By ranks: scheme, grid, and options.
GRIDS = {1: [("serial", None)],
         4: [("2d", None), ("1d-sp", None), ("3d", (1, 2, 2)), ("2d-pipelined", None),
             ("3d", (1, 2, 2), {"rows": "positions"})],
         8: [("3d", None), ("3d", (1, 8, 1)), ("1d", None), ("2.5d", None), ("faces", None)]}
BATCH, SEQ, HIDDEN = 4, 3, 6


def plain_loss(logits, targets, smoothing=0.0, z=0.0):
    """Losses of all rows and their gradient, in one piece; -1 is ignored."""
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    valid, vocab = targets >= 0, logits.shape[-1]
    hot = (1 - smoothing) * (np.arange(vocab) == targets[..., None]) + smoothing / vocab
    loss = lse - (hot * logits).sum(-1) + z * lse ** 2
    gradient = np.exp(logits - lse[..., None]) * (1 + 2 * z * lse)[..., None] - hot
    return (loss * valid).sum(), gradient * valid[..., None]


@pytest.mark.ranks(1, 4, 8, first=(8,))
@pytest.mark.parametrize("vocab", [11, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.2, 0.05)])
def test_loss_is_that_of_whole_rows(comm, transport, vocab, smoothing, z):
    """With blocks of unequal length, or none: nothing that pads a block enters a sum, each row
    counts once, and smoothing is over the whole vocabulary; large logits do no harm.

    Positions of several sequences have gaps between them in the memory that ranks share.

    Guards against padding in the sum of exponentials (pytorch/torchtitan#1136), rows that each
    rank of a row counts (NVIDIA/Megatron-LM#7452), and smoothing over the local vocabulary
    (NVIDIA/Megatron-LM#737).
    """
    rng = np.random.default_rng(vocab)
    logits = 20 * rng.standard_normal((BATCH, SEQ, vocab)) + 600
    targets = rng.integers(-1, vocab, (BATCH, SEQ))
    expected, gradient = plain_loss(logits, targets, smoothing, z)
    for name, grid, *options in GRIDS[comm.size]:
        scheme = mm3d.scheme(name, comm, grid, **dict(*options))
        _, inner = scheme.spaces(BATCH, SEQ)
        layer, layout = CrossEntropy(inner, vocab, -1, smoothing, z), inner.layout()
        own = layout.shard(logits, scheme.grid)
        total, saved = layer.forward(own, Targets(targets))
        found = comm.allreduce(float(total[0]) if layer.counts else 0.0)
        assert abs(found - expected) <= 1e-12 * abs(expected), scheme
        d = layer.backward(Targets(targets, 0.5), saved)
        wanted = 0.5 * gradient[layout.slices(scheme.grid, logits.shape)]
        assert d.shape == wanted.shape and np.allclose(d, wanted, rtol=1e-10, atol=1e-13), scheme


@pytest.mark.ranks(1, 4, 8, first=(8,))
def test_lookups_and_their_gradients(comm, transport):
    """Of a table of few rows, so that some ranks have none and others many of one token."""
    rng = np.random.default_rng(1)
    for vocab in (2, 11):
        tokens = rng.integers(0, vocab, (BATCH, SEQ))
        tables = [rng.standard_normal((n, HIDDEN)) for n in (vocab, SEQ)]
        x, dx = tables[0][tokens] + tables[1], rng.standard_normal((BATCH, SEQ, HIDDEN))
        gradients = [np.zeros((vocab, HIDDEN)), dx.sum(axis=0)]
        np.add.at(gradients[0], tokens, dx)
        for name, grid, *options in GRIDS[comm.size]:
            scheme = mm3d.scheme(name, comm, grid, **dict(*options))
            outer, inner = scheme.spaces(BATCH, SEQ)
            layer = Embedding(Builder(scheme, outer, inner, "float64"), vocab, SEQ, HIDDEN)
            for p, a in zip(layer.parameters, tables):
                p.load(a)
            place = outer.layout()
            found, _ = layer.forward(tokens)
            assert np.array_equal(found, x[place.slices(scheme.grid, x.shape)]), scheme
            for _ in range(2):    # it adds
                layer.backward(place.shard(dx, scheme.grid), tokens)
            for p, a in zip(layer.parameters, gradients):
                assert np.allclose(p.gather(p.grad), 2 * a, rtol=1e-13, atol=1e-13), scheme


def test_rows_of_one_number_are_summed_in_a_fixed_order():
    """In pairs: a sum of 1000 float32 numbers is that of a tree, and in any place the same."""
    library, rng = backend.get("numpy"), np.random.default_rng(2)
    rows = rng.standard_normal((1003, 5)).astype(np.float32)
    ids = np.where(np.arange(1003) % 334 == 3, 9, 4)    # 4 of one number, all others of another

    def tree(a):
        while len(a) > 1:
            pairs = a[:len(a) // 2 * 2].reshape(-1, 2, a.shape[1])
            a = np.concatenate([pairs[:, 0] + pairs[:, 1], a[len(a) // 2 * 2:]])
        return a[0]
    out = library.empty((8, 5), np.float32)
    out[...] = 0
    token_functions.add_rows_by_id(rows, ids, 3, out)
    assert np.array_equal(out[1], tree(rows[ids == 4])) and np.array_equal(
        out[6], tree(rows[ids == 9])) and not out[[0, 2, 3, 4, 5, 7]].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 7, 300])
@pytest.mark.parametrize("how", ["numpy", "as written",
                                 pytest.param("by numba", marks=pytest.mark.slow)])
def test_kernels_are_the_readable_functions(dtype, columns, how, monkeypatch):
    """In blocks of a few rows."""
    library = backend.get("numpy")
    monkeypatch.setattr(library, "block", 2 * columns)
    rng, kernels = np.random.default_rng(3), (Kernels if how == "numpy" else load_compiled(
        how, monkeypatch).CompiledKernels)(library)
    x = (5 * rng.standard_normal((13, columns))).astype(dtype)
    rows = [rng.random((13, 1)).astype(dtype) for _ in range(2)]
    eps = np.finfo(dtype).eps
    for sums in (False, True):
        fast, readable = x.copy(), x.copy()
        found = kernels.softmax_statistics(fast, sums)
        expected = token_functions.softmax_statistics.__wrapped__(readable, sums)
        assert found.dtype == expected.dtype == dtype
        assert np.allclose(found, expected, rtol=20 * eps, atol=20 * eps * columns)
        assert np.allclose(readable, np.exp(x - x.max(-1, keepdims=True)), rtol=20 * eps)
        assert np.allclose(fast, readable, rtol=20 * eps)
    for scale, shift in (rows, (rows[0], None)):
        wanted = token_functions.softmax_gradient.__wrapped__(x, scale, shift, np.empty_like(x))
        assert np.allclose(wanted, x * scale - (0 if shift is None else shift), rtol=20 * eps)
        assert np.allclose(kernels.softmax_gradient(x, scale, shift, x.copy()), wanted,
                           rtol=20 * eps)


def test_schemes_of_the_grids_are_all_there_are():
    """A scheme more is a case more."""
    named = {name for cases in GRIDS.values() for name, *_ in cases}
    assert named == {name for name in mm3d.SCHEMES if any(fits(name, n) for n in GRIDS)}
