"""The closed forms of a whole GPT are what is counted, in a real step and a dry one."""
import math
from collections import Counter
from itertools import cycle

import pytest

import mm3d
from mm3d.grid.layout import divided_directions
from mm3d.model import cost
from mm3d.model.gpt_spec import gpt_spec
from mm3d.tracing import dry_run
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from models import CHOSEN, PARALLELISMS, SIZES, Parallelism
from reference import total

CASES = {1: [Parallelism("serial"), Parallelism("3d")],
         4: [Parallelism("serial"), *PARALLELISMS[4]],
         8: [*CHOSEN[8], Parallelism("3d", (2, 4, 1)), Parallelism("3d", (2, 1, 4)),
             Parallelism("3d", (2, 2, 2), {"keep": "both"})]}
VOCAB = 13
KINDS = [dict(tied=True), dict(tied=False, label_smoothing=0.1, z_loss=1e-3)]


@pytest.mark.ranks(1, 4, slow=(8,))
def test_closed_forms_are_what_is_counted(comm):
    """Words and calls by direction and kind, and operations; of each scheme with one of the sizes
    in turn."""
    for case, (size, kind) in zip(CASES[comm.size], cycle([
            ("uneven", 1), ("uneven", 0), ("even", 1), ("few", 0)])):
        sizes, kind = SIZES[size], KINDS[kind]
        described = gpt_spec(sizes, VOCAB, **kind)
        mesh = mm3d.Mesh(comm, scheme=case.name, grid=case.grid, backend="numpy", **case.options)
        model, trace, expected = mm3d.GPT(mesh, **sizes, vocab=VOCAB, **kind), Trace(), Counter()
        model.reset_traffic()
        with observed(model.grids, trace, *model.chains):
            model.rehearse()
        counted = {key: one for key, one in model.traffic().items() if one.calls}
        calls = Counter()
        for moves in cost.moves(case.name, mesh.grids[0], described, **case.options).values():
            expected.update({key: move.words for key, move in moves.items()})
            calls.update({key: move.calls for key, move in moves.items()})
        assert total(comm, {key: t.words for key, t in counted.items()}) == expected, case
        assert {key: t.calls for key, t in counted.items()} == calls, case
        ranks = comm.size if case.name == "serial" else 1
        batch, seq, hidden = model.chunks[0].shape    # the head's product is in no pass
        assert comm.allreduce(trace.flops("forward")) == ranks * (
            cost.flops(described)["forward"] - 2 * batch * seq * hidden * VOCAB)
        assert sum(math.prod(p.shape) for p in model.trained) == cost.parameters(described)
        model.free()
        mesh.free()


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
        assert made.product(inner, outer, (7, 5), (1, 1)).weight.spec == scheme.down_weight
        vocabulary, features = scheme.down_weight.split(",")
        assert features.startswith(outer.features)
        # The rows that are left when these directions are gathered are next to each other.
        assert all(part.endswith("".join(c for c in part if c in vocabulary))
                   for part in map(divided_directions, outer.rows.split(",")))
        made.grid.free()
