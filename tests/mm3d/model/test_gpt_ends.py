"""The ends of a GPT: words by hand, grids on which a rank has no features, and the table."""
import math

import pytest

import mm3d
from mm3d.grid.layout import divided_directions
from mm3d.schemes.words import Words
from mm3d.tracing import dry_run

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
