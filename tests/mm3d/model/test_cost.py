"""The closed forms: words, flops and memory as counted, bounds, and what lines of ranks are."""
import math
from itertools import product

import numpy as np
import pytest

import mm3d
from llamas import architecture
from mm3d import ModelSizes
from mm3d.grid.axis import Axis
from mm3d.model import cost
from mm3d.schemes import cube
from mm3d.schemes.closed_form import ProductShape
from models import EACH_ONCE, Parallelism
from reference import relative_error, total, words

# Everything divides; nothing does, and there are fewer sequences and heads than ranks.
MODELS = {"even": dict(layers=1, hidden=16, heads=8, batch=16, seq=8),
          "uneven": dict(layers=1, hidden=15, heads=3, batch=3, seq=5),
          **{name: dict(layers=1, hidden=15, heads=6, batch=3, seq=5,
                        architecture=architecture(name)) for name in ("llama", "qwen", "biases")}}


def of_phases(model, count) -> dict:
    """`count()` of a forward and of a backward pass, counting started anew for each."""
    counts = {}
    model.grid.reset_traffic()
    y, saved = model.forward(model.random("x"))
    counts["forward"] = count()
    model.grid.reset_traffic()
    model.backward(model.random("dy"), saved)
    counts["backward"] = count()
    return counts


def spy(monkeypatch, owner, *names) -> list:
    """The arguments of every call of these functions from now on, in a list that grows."""
    calls = []
    for name in names:
        def spied(*args, name=name, original=getattr(owner, name), **kwargs):
            calls.append((name, *args))
            return original(*args, **kwargs)
        monkeypatch.setattr(owner, name, spied)
    return calls


# --- The model as counted ------------------------------------------------------------------

@pytest.mark.ranks(1, 4, 8, slow=(6,))
def test_collectives_words_flops_and_parameters_of_the_model(comm, monkeypatch):
    """Where nothing divides, and in 3-D where everything does; in 3-D of more architectures. On 8
    ranks others have one of two architectures in turn."""
    for number, parallelism in enumerate([Parallelism("serial"), *EACH_ONCE[comm.size]]):
        with parallelism.on(comm) as scheme:
            some = ["uneven", "llama"] if comm.size < 8 else [("uneven", "llama")[number % 2]]
            some = [*MODELS] if parallelism == Parallelism("3d") else some
            for name in some:
                check_model(comm, scheme, MODELS[name], parallelism.options, monkeypatch)


def check_model(comm, scheme, sizes, options, monkeypatch):
    """By direction and kind of collective: words over all ranks, and calls on each. No
    multiplication is done twice; backward computes the scores again, less the logarithms of their
    sums, which is one more term for each head and which `flops` leaves out.  In 3-D and on
    squares each parameter is on one rank."""
    described, model = ModelSizes(**sizes), mm3d.Transformer(scheme, **sizes)
    with monkeypatch.context() as patch:
        matmuls = spy(patch, np, "matmul")

        def count():
            done = sum(2 * math.prod(a.shape) * b.shape[-1] for _, a, b in matmuls)
            matmuls.clear()
            return scheme.grid.traffic(), done
        counted = of_phases(model, count)
    flops = cost.flops(described)
    flops["backward"] += (2 * math.prod(sizes[key] for key in ("layers", "batch", "seq", "seq"))
                          * described.heads * (described.head + 1))
    moves = cost.moves(scheme.name, scheme.grid.shape, described, **options)
    closed = cost.words(scheme.name, scheme.grid.shape, described, **options)
    for phase, (traffic, done) in counted.items():
        sums = total(comm, {key: t.words for key, t in traffic.items()})
        calls = {key: t.calls for key, t in traffic.items()}
        assert sums == closed[phase], (scheme, phase)
        assert sums == {key: move.words for key, move in moves[phase].items()}
        assert calls == {key: move.calls for key, move in moves[phase].items()}, scheme
        assert all(t.bytes == 4 * t.words for t in traffic.values())
        assert comm.allreduce(done) == flops[phase] * (
            comm.size if scheme.name == "serial" else 1)
    expected = cost.parameters(described)
    assert sum(math.prod(p.shape) for p in model.parameters) == expected
    if scheme.name in ("3d", "2d"):
        assert comm.allreduce(sum(p.value.size for p in model.parameters)) == expected, scheme


# --- One product: the formula and the bound ------------------------------------------------

@pytest.mark.parametrize("sizes, shape", [
    ((4, 2, 1), (16, 2, 8)), ((1, 1, 8), (8, 64, 8)),    # flat, and long; then cubes
    *(((p, p, p), 3 * (p ** 2 * 6,)) for p in range(1, 9))])
@pytest.mark.parametrize("way", ["up", "down"])
def test_words_reach_the_lower_bound(sizes, shape, way):
    """Ratio 1.000 in each of its three regimes."""
    if way == "down":
        sizes = sizes[0], sizes[2], sizes[1]
    moves = cube.Cube.product_moves(dict(zip("xyz", sizes)), ProductShape(way, *shape))[0]
    ranks = math.prod(sizes)
    assert sum(move.words for move in moves) / ranks == pytest.approx(
        cost.lower_bound(*shape, ranks), rel=1e-12, abs=1e-6)


@pytest.mark.parametrize("m, n, k", [(64, 64, 64), (4096, 64, 256), (128, 1024, 64), (16, 8, 512)])
@pytest.mark.parametrize("ranks", [1, 8, 12, 64])
def test_no_grid_moves_less_than_the_lower_bound(m, n, k, ranks):
    bound = cost.lower_bound(m, n, k, ranks)
    for X, Y in product(range(1, ranks + 1), repeat=2):
        if ranks % (X * Y) == 0:
            sizes = dict(x=X, y=Y, z=ranks // (X * Y))
            forward, _ = cube.Cube.product_moves(sizes, ProductShape("up", m, n, k))
            assert sum(move.words for move in forward) / ranks >= bound * (1 - 1e-12), sizes


def test_the_bound_is_continuous_where_its_regimes_meet():
    """At P = m/n and P = mn/k^2, for sides m >= n >= k."""
    m, n, k = 4096, 512, 64
    for ranks in (m // n, m * n // k ** 2):
        below, at, above = (cost.lower_bound(m, n, k, ranks + d) for d in (-1e-9, 0, 1e-9))
        assert below == pytest.approx(at) == pytest.approx(above)


@pytest.mark.parametrize("keep, forward, backward", [
    ("none", 19, 25), ("weight", 19, 21), ("both", 19, 17)])
def test_calls_and_words_of_a_layer_on_a_cube(keep, forward, backward):
    """Three calls for each of four products, and in backward two more, less one for each operand
    that is kept; a sum for mean, variance and gradients of each norm; and for all vectors a
    broadcast in each space and a gather along x, and the reverse for their gradients."""
    found = cost.moves("3d", dict(x=2, y=2, z=2), ModelSizes(1, 32, 4, 8, 16), keep=keep)
    calls = [sum(move.calls for move in moves.values()) for moves in found.values()]
    again = {"none": 2, "weight": 1, "both": 0}[keep]
    assert calls == [forward, backward] == [4 * 3 + 2 * 2 + 3, 4 * (3 + again) + 2 + 3]
    words = sum(move.words for moves in found.values() for move in moves.values())
    assert words == 8 * {"none": 25144, "weight": 23608, "both": 20024}[keep]


# --- Lines of ranks are old friends --------------------------------------------------------

@pytest.mark.ranks(3)
def test_ranks_along_x_are_fully_sharded_data_parallelism(comm):
    """ZeRO-3: all parameters gathered forward, the weights again in backward, all gradients
    reduce-scattered; besides, nothing. Each rank moves all but what it stores."""
    sizes = MODELS["uneven"]
    scheme = mm3d.scheme("3d", comm, grid=(comm.size, 1, 1))
    model = mm3d.Transformer(scheme, **sizes)
    every = model.parameters
    weights = [p for p in every if p.name.endswith("weight") and len(p.shape) > 1]

    def elsewhere(parameters):
        return sum(math.prod(p.shape) - p.value.size for p in parameters)
    counted = of_phases(model, lambda: words(scheme.grid))
    assert counted["forward"] == {("x", "all_gather"): elsewhere(every)}
    assert counted["backward"] == {("x", "all_gather"): elsewhere(weights),
                                   ("x", "reduce_scatter"): elsewhere(every)}
    whole = (comm.size - 1) * cost.parameters(ModelSizes(**sizes))
    assert total(comm, counted["forward"]) == {("x", "all_gather"): whole}


@pytest.mark.ranks(3)
def test_ranks_along_y_are_megatron_with_sequence_parallelism(comm, monkeypatch):
    """The same gathers and reduce-scatters in the same order, block for block, and the same
    numbers; vectors, which one stores on the diagonal and the other in copies, apart."""
    sizes = MODELS["uneven"]
    calls = spy(monkeypatch, Axis, "all_gather", "reduce_scatter")
    found = []
    for name, options in (("3d", dict(grid=(1, comm.size, 1), rows="positions")), ("1d-sp", {})):
        scheme = mm3d.scheme(name, comm, **options)
        model = mm3d.Transformer(scheme, dtype="float64", **sizes)
        calls.clear()
        y, saved = model.forward(model.random("x"))
        dx = model.backward(model.random("dy"), saved)
        moved = [(kind, dim, counts) for kind, axis, _, dim, counts in calls if axis.size > 1]
        counted = {kind: n for (_, kind), n in words(scheme.grid).items()
                   if kind in ("all_gather", "reduce_scatter")}
        found.append((moved, counted, y, dx, model.gradients()))
    (moves, counted, y, dx, gradients), (moves_sp, counted_sp, y_sp, dx_sp, gradients_sp) = found
    assert moves == moves_sp and len(moves) == sizes["layers"] * (4 + 6)
    assert counted == counted_sp
    for a, b in ((y, y_sp), (dx, dx_sp), *((gradients[k], gradients_sp[k]) for k in gradients)):
        assert a.shape == b.shape and relative_error(a, b) < 1e-13


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "uniform:3",
                                       "full+selective", "uniform:4+selective"])
@pytest.mark.parametrize("every", [None, 1, 2, 3])
def test_passes_of_many_layers_are_those_of_each(recompute, every):
    """Layers repeat in periods, so that their number takes no time."""
    experts = every and mm3d.Experts(4, every=every)
    for layers in range(1, 40):
        one_by_one = cost._count_passes(layers, recompute, experts)
        assert +cost.passes(ModelSizes(layers, 8, 2, 4, 4), recompute, experts) == one_by_one
    many = cost.passes(ModelSizes(10 ** 9, 8, 2, 4, 4), recompute, experts)
    assert many["norm", "forward"] == 2 * 10 ** 9
