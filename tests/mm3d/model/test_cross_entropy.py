"""Cross entropy and lookups of divided rows and vocabularies, beside plain NumPy."""
import math

import numpy as np
import pytest
from compiled import load_compiled
from reference import fits

import mm3d
from mm3d.arrays import backend
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.grid.layout import divided_directions
from mm3d.model import token_functions
from mm3d.model.builder import Builder
from mm3d.model.cross_entropy import CrossEntropy, Targets
from mm3d.model.embedding import Embedding
from mm3d.schemes.words import Words
from mm3d.tracing import dry_run

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


VOCAB = 13


def words_of_ends(comm, grid, scheme="3d", **options) -> int:
    """Words that the ends of a GPT of one layer move in a step, over all ranks."""
    sizes = dict(layers=1, hidden=12, heads=2, batch=8, seq=6)
    mesh = mm3d.Mesh(comm, scheme=scheme, grid=grid)
    model = mm3d.GPT(mesh, **sizes, vocab=VOCAB, **options)
    model.reset_traffic()
    model.rehearse()
    found = sum(comm.allreduce(one.words) for _, one in sorted(model.traffic().items()))
    inside = mm3d.cost.words(scheme, mesh.grids[0], mm3d.ModelSizes(**sizes))
    return found - sum(sum(words.values()) for words in inside.values())


@pytest.mark.ranks(8, slow=(4,))
@pytest.mark.parametrize("tied", [True, False])
def test_words_of_the_ends_by_hand(comm, tied):
    """In 3-D, of M tokens, a vocabulary V and h features.

    Embedding: both tables are gathered along x, terms of x are scattered along y, and backward
    moves the same.  Head: a product M x h by h x V, forward and backward, which gathers A and B
    again.  Loss: three numbers a row, four with smoothing, of every rank along y.  Norm: as any.
    """
    M, h, V, seq = 48, 12, VOCAB, 6
    for X, Y, Z in {4: [(2, 2, 1), (1, 2, 2)], 8: [(2, 2, 2), (8, 1, 1)]}[comm.size]:
        A, B, C = (Y - 1) * M * h, (X - 1) * h * V, (Z - 1) * M * V
        tables = 2 * (X - 1) * (V + seq) * h + 2 * (Y - 1) * M * h
        # Tied logits are x E^T with the directions of a product down: the same words.
        head = 3 * A + 3 * B + 2 * C
        loss = (Y - 1) * 4 * M * Y
        of = Words("3d", dict(x=X, y=Y, z=Z), 8, seq)
        vectors = [*of.outer.vector_gather_moves(h), *of.outer.vector_reduce_moves(h)]
        norm = sum(move.words for move in [*of.outer.row_sum_moves(M, 4), *vectors, *vectors])
        found = words_of_ends(comm, (X, Y, Z), tied=tied, label_smoothing=0.1)
        assert found == tables + head + loss + norm, (X, Y, Z)


@pytest.mark.parametrize("name, grid, hidden", [
    ("3d", (1, 1, 8), 4), ("faces", (1, 2, 8), 4), ("2d", (3, 3), 2), ("2.5d", (3, 3, 1), 2)])
def test_ranks_without_features_run_the_whole_step(name, grid, hidden):
    """The last rank has none; the others would wait for one that fails."""
    ranks = math.prod(grid)

    def build(comm, backend):
        mesh = mm3d.Mesh(comm, scheme=name, grid=grid, backend=backend)
        return mm3d.GPT(mesh, vocab=5, layers=1, hidden=hidden, heads=2, batch=9, seq=3)
    trace = dry_run.trace(build, ranks, ranks - 1)
    assert trace.phase == "done" and trace.traffic["backward"]


def test_the_layout_of_the_table_is_that_of_a_product_down(comm):
    """So tied logits can be computed by the scheme's product."""
    for name, scheme in mm3d.SCHEMES.items():
        made = mm3d.scheme(name, comm)
        outer, inner = made.spaces(2, 3)
        product = made.product(inner, outer, (7, 5), (1, 1))
        assert product.weight.spec == scheme.down_weight
        vocabulary, features = scheme.down_weight.split(",")
        assert features.startswith(outer.features)
        if product.gathered_along:
            vocabulary = vocabulary.replace(product.gathered_along.axis.name, "")
        # The rows that are left when these directions are gathered are next to each other.
        assert all(part.endswith("".join(c for c in part if c in vocabulary))
                   for part in map(divided_directions, outer.rows.split(",")))
