"""Layers of experts under every scheme and grid: the same results and tokens, exact words."""
import functools

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from experts import SIZES, state_of, step
from mm3d.model import cost
from mm3d.model.experts.options import ExpertDesign
from models import Parallelism

# No length but the sequences' number on some grids divides evenly; an expert stays without tokens.
CASES = [mm3d.Experts(5, every=1, capacity=0.8),
         mm3d.Experts(7, top=3, every=2, gate="gshard", capacity=0.6),
         mm3d.Experts(5, top=1, every=2, gate="sigmoid-bias", capacity=None, balance=0, z=0),
         mm3d.Experts(5, every=1, gate="mixtral", capacity=None, balance=0.1),
         mm3d.Experts(6, top=3, every=1, gate="sigmoid-bias", capacity=0.9, design=ExpertDesign(
             5, 7, groups=3, top_groups=2, factor=2.5)),
         mm3d.Experts(5, every=2, gate="switch", capacity=None, design=ExpertDesign(7, 5, True))]
MIXTRAL = dict(norm="rms", positions="rotary", kv_heads=1, perceptron="swiglu", inner=11,
               biases="none")
FIELDS = [{}, {}, dict(perceptron="swiglu", inner=7), MIXTRAL, {}, MIXTRAL]    # of each case
DROPLESS = [mm3d.Experts(6, every=2, capacity=None, gate=one.gate, design=one.design)
            for one in CASES]
GRIDS = {
    4: [Parallelism("1d"), Parallelism("1d-sp"), Parallelism("2d"), Parallelism("2.5d", (1, 1, 4)),
        Parallelism("3d", (1, 2, 2)),
        Parallelism("3d", (2, 2, 1), {"rows": "positions", "keep": "both"}),
        Parallelism("2d-pipelined"), Parallelism("3d", (4, 1, 1)), Parallelism("serial"),
        Parallelism("faces", (1, 2, 2))],
    6: [Parallelism("3d", (3, 2, 1)), Parallelism("3d", (1, 3, 2), {"rows": "sequences"})],
    8: [Parallelism("3d"), Parallelism("3d", (1, 2, 4), {"rows": "positions"}),
        Parallelism("2.5d"), Parallelism("3d", (2, 1, 4), {"overlap": True}),
        Parallelism("faces", (2, 2, 2))]}


@functools.cache
def serial(case: int) -> dict[str, np.ndarray]:
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        return step(mm3d.Transformer(scheme, **SIZES, experts=CASES[case], **FIELDS[case]))


@pytest.mark.ranks(8, slow=(4, 6), first=(8,))
@pytest.mark.parametrize("number", range(10))
def test_results_and_dropped_tokens_are_those_of_one_rank(comm, number):
    grids = GRIDS[comm.size]
    if number >= len(grids):
        pytest.skip(f"{comm.size} ranks have {len(grids)} grids")
    for case in range(len(CASES)) if number == 1 else (number % 3, 3 + number % 3):
        with grids[number].on(comm) as scheme:
            model = mm3d.Transformer(scheme, **SIZES, experts=CASES[case], **FIELDS[case])
            found, expected = step(model), serial(case)
        assert found.keys() == expected.keys()
        for name, a in found.items():
            if name in ("chosen", "dropped"):
                assert np.array_equal(a, expected[name]), (name, case)
            elif expected[name].any():
                error = np.linalg.norm(a - expected[name]) / np.linalg.norm(expected[name])
                assert error < 1e-12, (name, error, case)


@pytest.mark.ranks(4, slow=(8,), first=(4,))
@pytest.mark.parametrize("part", [slice(1, 10, 4), slice(0, 10, 2), slice(3, 10, 4)])
def test_words_are_the_closed_form_of_dropless_experts(comm, part):
    """Whatever the routing, inside a tensor group; also where layers are recomputed."""
    for place, number in enumerate(range(len(GRIDS[comm.size]))[part]):
        compare_words(comm, GRIDS[comm.size][number], ("uniform:2", "none")[place % 2],
                      (number + 2) % len(CASES))    # gated sharing on divided features
    compare_words(comm, Parallelism("1d-sp"), "none", 3, seq=1)    # one rank has all positions


@functools.cache
def output_on_one_rank(case: int, seq: int) -> np.ndarray:
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES | {"seq": seq}, experts=DROPLESS[case],
                                 **FIELDS[case])
        model.load(state_of(model))
        return model.forward(model.random("x"))[0]


def compare_words(comm, parallelism: Parallelism, recompute: str, case: int,
                  seq: int = SIZES["seq"]) -> None:
    with parallelism.on(comm) as scheme:
        model = mm3d.Transformer(scheme, **SIZES | {"seq": seq}, experts=DROPLESS[case],
                                 recompute=recompute, **FIELDS[case])
        phases = []
        model.load(state_of(model))
        scheme.grid.reset_traffic()
        y, saved = model.forward(model.random("x"))
        phases.append(scheme.grid.traffic())
        np.testing.assert_allclose(model.unshard(y), output_on_one_rank(case, seq), atol=1e-12)
        scheme.grid.reset_traffic()
        model.backward(y, saved)
        phases.append(scheme.grid.traffic())
        expected = cost.words(parallelism.name, scheme.grid.shape, model.sizes, recompute,
                              experts=DROPLESS[case], **parallelism.options)
        words = [sum(comm.allreduce(one.words) for _, one in sorted(found.items()))
                 for found in phases]
    stated = [sum(of.values()) for of in expected.values()]
    if parallelism == Parallelism("2.5d"):    # of several squares
        # It leaves out sums over the squares of what gathers in each have gathered.
        assert words[0] == stated[0] and words[1] > stated[1], (words, stated)
    else:
        assert words == stated, parallelism
