"""The closed forms of a whole GPT are what is counted, in a real step and a dry one."""
import math
from collections import Counter
from itertools import cycle

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d import ModelSizes
from mm3d.arrays import backend
from mm3d.grid.layout import divided_directions
from mm3d.model import cost
from mm3d.model.cross_entropy import Targets
from mm3d.model.gpt_ends import WholeGPT
from mm3d.model.gpt_spec import gpt_spec
from mm3d.tracing import dry_run
from mm3d.tracing.events import Gemm
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


def counted_step(model, trace):
    """Traffic of each phase, and bytes kept between them."""
    grid, counted = model.inside.grid, {}
    tokens = np.arange(math.prod(model.shape)).reshape(model.shape) % VOCAB
    with observed(grid, trace, model):
        grid.reset_traffic()
        _, saved = model.forward(tokens, Targets(tokens))
        kept, counted["forward"] = model.inside.saved_bytes(saved), grid.traffic()
        grid.reset_traffic()
        model.backward(tokens, Targets(tokens), saved)
        counted["backward"] = grid.traffic()
    return counted, kept


@pytest.mark.ranks(1, 4, slow=(8,))
def test_closed_forms_are_what_is_counted(comm):
    """Words and calls by direction and kind, operations, kept words; and the dry run's traffic,
    products, kept bytes and bytes of parameters; of each scheme with one of the sizes in turn."""
    for case, (size, kind) in zip(CASES[comm.size], cycle([
            ("uneven", 1), ("uneven", 0), ("even", 1), ("few", 0)])):
        sizes, kind = SIZES[size], KINDS[kind]
        described = gpt_spec(sizes, VOCAB, **kind)
        name, options, trace = case.name, case.options, Trace()
        with case.on(comm, "numpy") as scheme:
            model = WholeGPT(scheme, VOCAB, **sizes, **kind)
            counted, kept = counted_step(model, trace)
            shape, held = scheme.grid.shape, model.nbytes
        for phase, moves in cost.moves(name, shape, described, **options).items():
            words = total(comm, {key: t.words for key, t in counted[phase].items()})
            assert words == {key: move.words for key, move in moves.items()}, (case, phase)
            calls = {key: t.calls for key, t in counted[phase].items()}
            assert calls == {key: move.calls for key, move in moves.items()}, (case, phase)
        ranks = comm.size if name == "serial" else 1
        assert comm.allreduce(trace.flops("forward")) == ranks * cost.flops(described)["forward"]
        assert comm.allreduce(kept) == 4 * cost.saved_words(name, shape, described, **options)
        assert sum(math.prod(p.shape) for p in model.parameters) == cost.parameters(described)
        dried = dry_run.trace_gpt(name, comm.size, tuple(shape.values()), comm.rank,
                                  backend.Backend.block, options, vocab=VOCAB, **sizes, **kind)
        assert (dried.traffic, dried.saved, dried.parameters) == (counted, kept, held), case
        assert products(dried) == products(trace), case


def products(trace) -> Counter:
    """How often each product was made, by layer."""
    found = Counter()
    for (phase, layer, event), times in trace.events.items():
        if isinstance(event, Gemm):
            found[phase, layer, event] += times
    return found


@pytest.mark.parametrize("name, grid", [("3d", (2, 2, 2)), ("3d", (4, 2, 1)), ("1d-sp", (8,)),
                                        ("1d", (4,)), ("2d", (2, 2)), ("serial", (1,))])
@pytest.mark.parametrize("tied", [True, False])
def test_memory_of_a_dry_run_is_the_closed_form(name, grid, tied):
    """The peak is where the loss is, beside all that the layers have saved."""
    sizes = ModelSizes(layers=2, hidden=512, heads=8, batch=16, seq=128)
    shape = dict(zip(mm3d.SCHEMES[name].directions, grid))
    trace = dry_run.trace_gpt(name, math.prod(grid), grid, block=backend.Backend.block,
                              vocab=4096, tied=tied, **sizes)
    closed = 4 * cost.peak_words(name, shape, gpt_spec(sizes, 4096, tied))
    assert 0.9 <= trace.pool_peak / closed <= 1.1


def test_a_second_backward_adds_the_same_gradients_again():
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        model = WholeGPT(scheme, VOCAB, **SIZES["uneven"], dtype="float64")
        tokens, found = np.arange(math.prod(model.shape)).reshape(model.shape) % VOCAB, []
        for _ in range(2):
            model.backward(tokens, Targets(tokens), model.forward(tokens, Targets(tokens))[1])
            found.append([np.array(p.grad) for p in model.parameters])
    for one, twice in zip(*found):
        assert np.allclose(twice, 2 * one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name, grid, hidden", [
    ("3d", (1, 1, 8), 4), ("faces", (1, 2, 8), 4), ("2d", (3, 3), 2), ("2.5d", (3, 3, 1), 2)])
def test_ranks_without_features_run_the_whole_step(name, grid, hidden):
    """The last rank has none; the others would wait for one that fails."""
    ranks = math.prod(grid)
    trace = dry_run.trace_gpt(name, ranks, grid, ranks - 1, vocab=5, layers=1, hidden=hidden,
                              heads=2, batch=9, seq=3)
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
