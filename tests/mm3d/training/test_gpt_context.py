"""What is moved and multiplied where sequences are divided among ranks, and what is refused."""
import pytest

import mm3d
from gpts import SIZES, tokens_and_targets
from llamas import architecture
from mm3d.grid.activations import chunks_of
from mm3d.model.attention.costs import context_moves, context_pairs
from mm3d.model.attention.windows import visible
from mm3d.model.sizes import ModelSizes
from mm3d.tracing import dry_run
from mm3d.tracing.events import Gemm
from reference import all_refuse

# --- What is moved and multiplied -----------------------------------------------------------

COUNTED = {4: [(dict(context=4, scheme="serial"), {}), (dict(context=2, scheme="1d"), {})],
           8: [(dict(context=4, scheme="3d", grid=(1, 2, 1), rows="positions"), {}),
               (dict(context=2, scheme="3d", grid=(2, 2, 1)), dict(recompute="full")),
               (dict(data=2, context=2, scheme="1d-sp"), dict(recompute="selective"))]}


@pytest.mark.ranks(4, slow=(8,))
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_words_are_those_of_the_closed_form(comm, way):
    """Exactly, with uneven chunks and grouped queries."""
    how = architecture("llama")
    sizes = SIZES | dict(hidden=10, heads=6, seq=13, batch=4)
    for where, more in COUNTED[comm.size]:
        mesh = mm3d.Mesh(comm, **where, backend="numpy")
        model = mm3d.GPT(mesh, **sizes, **more, architecture=how, context_way=way)
        model.step(*tokens_and_targets(sizes))
        found = model.traffic()
        scheme = {"rows": "positions"} if "rows" in where else {}
        data = where.get("data", 1)
        expected = context_moves(
            where["scheme"], mesh.scheme.grid.shape, ModelSizes(
                sizes["layers"], 10, 6, sizes["batch"] // data, 13, how), where["context"], way,
            more.get("recompute", "none"), **scheme)
        every = {key for phase in expected.values() for key in phase}
        assert every == {key for key in found if key[0] == "c"}
        for key in sorted(every):
            both = [phase[key] for phase in expected.values() if key in phase]
            words = comm.allreduce(found[key].words)
            assert words == data * sum(one.words for one in both), (where, key)
            assert found[key].calls == sum(one.calls for one in both), (where, key)


@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("ranks, seq", [(2, 16), (4, 32), (8, 64), (3, 14)])
def test_two_chunks_a_rank_balance_the_products_of_causal_attention(way, ranks, seq):
    """As a dry run counts them: equal on all ranks, and (2 n + 1) / 4 n of a rank's share of all.
    """
    found = []
    for rank in range(ranks):
        def build(comm, backend):
            mesh = mm3d.Mesh(comm, context=ranks, scheme="serial", backend=backend)
            return mm3d.Pipeline(mesh, "gpipe", 1, layers=1, hidden=8, heads=2, batch=1, seq=seq,
                                 causal=True, context_way=way)
        trace = dry_run.trace(build, ranks, rank)
        flops = {name: sum(times * event.flops for (phase, part, event), times
                           in trace.events.items() if isinstance(event, Gemm)
                           and (phase, part) == (name, "attention"))
                 for name in ("forward", "backward")}
        assert flops["forward"] == 4 * 8 * context_pairs(seq, ranks, rank)
        more = 2 * 2 * (way == "gather")    # the kernel's scores less their lse, in each head
        assert flops["backward"] == (10 * 8 + more) * context_pairs(seq, ranks, rank)
        found.append(flops["forward"])
    if not seq % (2 * ranks):
        assert set(found) == {4 * 8 * (2 * ranks + 1) * (seq // (2 * ranks)) ** 2}
    else:
        assert max(found) - min(found) <= .2 * max(found)


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 1), (True, 3)])
def test_what_is_visible_is_all_that_a_mask_shows(causal, window):
    """Nothing that is seen is cut off, and each query that is left sees a key."""
    for seq, ranks in ((5, 2), (13, 3), (16, 4), (4, 4)):
        every = [chunk for rank in range(ranks) for chunk in chunks_of(seq, ranks, rank)]
        assert sorted(n for chunk in every for n in chunk) == [*range(seq)]
        for own in every:
            for keys in (*every, range(seq)):
                left, right = visible(own, keys, causal, window)
                seen = {(i, j) for i in own for j in keys
                        if not causal or 0 <= i - j < (window or seq)}
                assert seen == {(i, j) for i, j in seen if i in left and j in right}
                if left and right:
                    assert {i for i, _ in seen} == {*left}


# --- What is refused ------------------------------------------------------------------------

@pytest.mark.ranks(4)
@pytest.mark.parametrize("where, more, said", [
    (dict(context=3), {}, "context=3 does not divide 4 ranks into equal parts: 1, 2, 4 would do"),
    (dict(context=0), {}, "context=0 does not divide 4 ranks into equal parts: 1, 2, 4 would do"),
    (dict(context=2, data=4), {}, "data=4 does not divide 2 ranks into equal replicas: 1, 2 "),
    (dict(context=2, data=2, shards=3), {}, "shards=3 does not divide data=2 x context=2 repl"),
    (dict(context=4), dict(seq=3), "seq=3 positions cannot be divided by context=4: at least 4 "),
    (dict(context=4), dict(context_way="star"), "context_way='star' is unknown: choose one of ga"),
    (dict(context=4), dict(experts=mm3d.Experts(2)), "context=4 divides sequences, which experts"),
], ids=str)
def test_what_cannot_be_divided_is_refused_on_every_rank(comm, where, more, said):
    with all_refuse(comm, said):
        mm3d.GPT(mm3d.Mesh(comm, scheme="serial", **where), **SIZES | more)
