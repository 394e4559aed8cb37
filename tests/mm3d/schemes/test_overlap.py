"""Communication that goes on while a rank multiplies changes no bit of any result."""
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.checks import layer_residuals
from mirror import InFlight, Mirror, during_products, mirrored
from mm3d.arrays.backend import MAX_PANELS
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.config import Config, Division, Model
from mm3d.grid.axis import Axis
from mm3d.grid.split import Split
from mm3d.model.builder import Builder
from mm3d.model.joined_vectors import FlatVectors
from mm3d.model.layers import Linear
from mm3d.schemes.overlap import Overlap
from mm3d.schemes.row_panels import RowPanels
from mm3d.tracing.observe import observed
from mm3d.transport.communicators import DryCommunicator
from mm3d.transport.mpi import MpiTransport
from models import different, passes

SIZES = dict(layers=1, hidden=512, heads=8, batch=4, seq=32)    # weights of several panels
SMALL = dict(layers=3, hidden=16, heads=4, batch=8, seq=4)
GRIDS = {4: [(1, 4, 1), (1, 2, 2), (4, 1, 1)],
         8: [(2, 2, 2), (1, 2, 4), (1, 8, 1), (1, 1, 8)]}
ORDERS = ("F1 F2 D1 D2", "F1 F2 D2 D1", "F1 F2 D1 F3 D3 D2")


def mirror_axis(size: int) -> Axis:
    mirror = Mirror("y", size, [])
    return Axis("y", mirror, NumpyBackend(), MpiTransport(mirror, NumpyBackend()))


def same(found, expected) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.ranks(4, slow=(8,), first=(4,))    # of GRIDS
def test_the_same_bits_and_words_with_overlap_and_without(comm, transport):
    """With two micro-batches in flight; another MPI than MPICH may add in another order."""
    ordered = transport != "mpi" or "MPICH" in MPI.Get_library_version()
    for grid in GRIDS[comm.size]:
        found, moved = [], []
        for overlap in (False, True):
            scheme = mm3d.scheme("3d", comm, grid=grid, backend="numpy", overlap=overlap)
            found.append(passes(mm3d.Transformer(scheme, **SIZES), "F1 F2 D1 D2"))
            moved.append(scheme.grid.traffic())
        assert not (different(*found) if ordered else [name for name, a in found[0].items() if (
            np.linalg.norm(a - found[1][name]) > 1e-6 * np.linalg.norm(a))]), grid
        assert moved[0] == moved[1], grid


@pytest.mark.ranks(4)
@pytest.mark.parametrize("node_size, wanted, chosen", [
    ("2", {}, True), ("4", {}, False), ("2", {"overlap": 0}, False), ("4", {"overlap": 2}, 2)])
def test_ranks_on_several_nodes_overlap_unless_told(comm, monkeypatch, node_size, wanted, chosen):
    """A model's configuration says what was chosen; bits and words are the same."""
    monkeypatch.setenv("MM3D_TRANSPORT", "hierarchical")
    monkeypatch.setenv("MM3D_NODE_SIZE", node_size)
    model = Model(**SMALL | {"layers": 2, "vocab": 8}, dtype="float64")
    found = []
    for how in ({"overlap": False}, wanted):
        config = Config(model, Division(grid=(1, 2, 2), backend="numpy", **how))
        gpt = mm3d.GPT(config, comm)
        if chosen is True:    # panels are calls of their own
            tokens = np.arange(8 * 4).reshape(8, 4) % 8
            found.append(([gpt.step(tokens, tokens), *gpt.gradients().values()],
                          gpt.mesh.scheme.grid.traffic()))
    assert gpt.config.division.overlap == gpt.mesh.options["overlap"] == chosen
    assert "overlap" in str(gpt.config.division) or not chosen
    assert gpt.mesh.scheme.grid.nodes == 4 // int(node_size)
    if found:
        assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_a_dry_run_knows_no_nodes_and_a_number_of_panels_is_a_whole_one():
    assert mm3d.scheme("3d", DryCommunicator(8), (2, 2, 2)).overlap is False
    assert type(mm3d.scheme("3d", DryCommunicator(8), (2, 2, 2), overlap=2.0).overlap) is int


@pytest.mark.slow_but_first
@pytest.mark.parametrize("keep, policies", [
    ("none", ("none", "selective", "full", "uniform:2", "uniform:2+selective")),
    ("weight", ("none", "full")), ("both", ("none", "uniform:2"))])
@pytest.mark.parametrize("grid", [(2, 2, 2), (4, 1, 1)])
def test_micro_batches_are_in_flight_in_any_order(grid, keep, policies):
    """With each policy of recomputation; nothing is used before it is there or left behind."""
    for policy in policies:
        found, moved = [], []
        for overlap in (False, True):
            with mirrored("3d", grid, keep=keep, overlap=overlap) as (scheme, in_flight):
                model = mm3d.Transformer(scheme, **SMALL, recompute=policy)
                orders = ORDERS if policy == keep == "none" else ORDERS[-1:]
                found.append({(order, name): a for order in orders
                              for name, a in passes(model, order).items()})
                moved.append(scheme.grid.traffic())
        assert not different(*found), policy
        assert moved[0] == moved[1], policy


@contextmanager
def failing(layer, way: str):
    """In the block a layer fails in one pass, forward or backward."""
    def fail(*arguments):
        raise FloatingPointError
    setattr(layer, way, fail)
    with pytest.raises(FloatingPointError):
        yield
    delattr(layer, way)


def after_failure(model, in_flight: list, number: int, way: str) -> list[np.ndarray]:
    """Copies of the results of other passes when one has failed in a layer of the first block."""
    model.zero_gradients()
    _, first = model.forward(model.random("x1"))
    _, second = model.forward(model.random("x2"))
    with failing(model.layers.layers[number // 4].layers[number % 4], way):
        if way == "forward":
            model.forward(model.random("x3"))
        else:
            model.backward(model.random("dy1"), first)
    assert in_flight == []
    found = [linear.weight.grad.copy() for linear in model.linears]
    for linear in model.linears:
        linear.weight.value *= 2
    found.append(model.backward(model.random("dy2"), second).copy())
    for linear in model.linears:
        linear.weight.value /= 2
    return found + [linear.weight.grad.copy() for linear in model.linears]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_pass_that_fails_leaves_nothing_in_flight(way):
    """Wherever it fails; other micro-batches go on, and what it has added to gradients of weights
    before is what a pass without overlap has added.  No collective begins after a failure, so
    gradients of vectors are not summed.  Weights that change afterwards are gathered anew."""
    found = []
    for overlap in (False, True):
        with mirrored("3d", (2, 2, 2), overlap=overlap) as (scheme, in_flight):
            model = mm3d.Transformer(scheme, **{**SMALL, "layers": 2})
            found.append([a for number in range(8)
                          for a in after_failure(model, in_flight, number, way)])
    assert same(*found)


QKV, PROJ, UP, DOWN = "attention.qkv", "attention.proj", "mlp.up", "mlp.down"
WEIGHT, SUM = "gather along x", "sum along x"    # of the next weight, of the dB before


def test_in_forward_the_next_weight_is_gathered_during_each_product():
    for grid in ((2, 2, 2), (2, 1, 1)):
        for keep in ("none", "weight", "both"):
            assert during_products(grid, "forward", keep=keep) == [
                (QKV, [WEIGHT]), (PROJ, [WEIGHT]), (UP, [WEIGHT]), (DOWN, [])]
    assert all(found == [] for _, found in during_products((1, 2, 2), "forward"))


def test_in_backward_gathers_and_sums_go_on_during_the_products():
    """Of two a layer, dA and dB: A is gathered during the first, dA summed during the second, and
    the dB of the layer before during both."""
    y, z = "along y", "along z"
    assert during_products((2, 2, 2), "backward") == [
        (DOWN, [f"gather {z}"]), (DOWN, [WEIGHT, f"sum {z}"]),
        (UP, [f"gather {y}", SUM]), (UP, [WEIGHT, SUM, f"sum {y}"]),
        (PROJ, [f"gather {z}", SUM]), (PROJ, [WEIGHT, SUM, f"sum {z}"]),
        (QKV, [f"gather {y}", SUM]), (QKV, [SUM, f"sum {y}"])]
    assert during_products((2, 1, 1), "backward") == [
        (DOWN, []), (DOWN, [WEIGHT]), (UP, [SUM]), (UP, [WEIGHT, SUM]),
        (PROJ, [SUM]), (PROJ, [WEIGHT, SUM]), (QKV, [SUM]), (QKV, [SUM])]
    # Where an operand has been kept it is not gathered again.
    assert [found for _, found in during_products((2, 2, 2), "backward", keep="both")] == [
        [], [f"sum {z}"], [SUM], [SUM, f"sum {y}"], [SUM], [SUM, f"sum {z}"], [SUM],
        [SUM, f"sum {y}"]]


def test_in_halves_of_backward_the_first_gathers_weights_and_the_second_sums():
    """The next weight in the first, and in the second the dB before."""
    assert during_products((2, 2, 2), "backward_input") == [
        (DOWN, [WEIGHT]), (UP, [WEIGHT]), (PROJ, [WEIGHT]), (QKV, [])]
    assert during_products((2, 2, 2), "backward_weights") == [
        (DOWN, []), (UP, [SUM]), (PROJ, [SUM]), (QKV, [SUM])]


PANELLED = [((2, 2, 2), 8, 4), ((1, 4, 2), 8, 4), ((2, 4, 1), 16, 4), ((1, 1, 4), 16, 4),
            ((1, 2, 3), 12, 4), ((1, 2, 2), 1, 16)]    # grids, batches and sequences


@pytest.mark.parametrize("grid, batch, seq", PANELLED)
def test_panels_of_rows_are_the_same_rows(grid, batch, seq):
    """Also in the two halves of backward, and where rows are divided by position: the results of
    whole rows but for rounding, as many words, and more calls, of the activations' alone."""
    sizes = {**SMALL, "batch": batch, "seq": seq, "layers": 1, "dtype": "float64"}
    for keep in ("none", "weight", "both"):
        found, moved = [], []
        for overlap in (False, 2):
            with mirrored("3d", grid, keep=keep, overlap=overlap) as (scheme, _):
                model = mm3d.Transformer(scheme, **sizes)
                found.append(passes(model, "F1 F2 D1 D2 F3 B3 W3"))
                moved.append(scheme.grid.traffic())
        for name, a in found[0].items():
            assert np.abs(a - found[1][name]).max(initial=0) <= 1e-13 * np.abs(a).max(
                initial=0), (keep, name)
        whole, panelled = moved
        assert {key: t.words for key, t in whole.items()} == {
            key: t.words for key, t in panelled.items()}
        more = {axis for (axis, _), t in panelled.items() if t.calls > whole[axis, _].calls}
        assert more == {name for name, size in zip("xyz", grid) if name != "x" and size > 1}


@pytest.mark.ranks(4)
def test_panels_of_exact_integers(comm, transport):
    """C = A B and its gradients, of integers: to the bit, by the collectives of all ranks."""
    for sizes in ((1, 2, 2), (1, 4, 1), (1, 1, 4)):
        found = []
        for overlap in (0, 4):
            scheme = mm3d.scheme("3d", comm, grid=sizes, backend="numpy", overlap=overlap)
            outer, inner = scheme.spaces(16, 3)
            layer = Linear(Builder(scheme, outer, inner, np.float64), "alone", "up", (24, 24))
            draw = np.random.default_rng(comm.rank)
            for p in layer.parameters:
                p.value[...] = draw.integers(-9, 9, p.value.shape)
            x = draw.integers(-9, 9, outer.local_shape(24)).astype(float)
            dy = draw.integers(-9, 9, inner.local_shape(24)).astype(float)
            pass_of = [(layer, False)] if overlap else None
            with Overlap(pass_of, scheme.grid.backend) if overlap else nullcontext() as during:
                y, saved = layer.forward(x, during)
            pass_of = [(layer, True)] if overlap else None
            with Overlap(pass_of, scheme.grid.backend) if overlap else nullcontext() as during:
                dx = layer.backward(dy, saved, during)
            found.append([y, dx, layer.weight.grad])
        assert same(*found), sizes


@pytest.mark.parametrize("rows, sizes, most, count", [
    (24, (2, 3), 4, 4), (12, (2, 3), 4, 2), (6, (2, 3), 4, 1), (8, (3, 2), 4, 1),
    (8, (1, 1), 4, 1), (8, (4, 1), 4, 2), (12, (2, 2), 4, 3)])
def test_panels_divide_the_blocks_of_all_ranks(rows, sizes, most, count):
    a, c = (Split(mirror_axis(size), 0, rows) for size in sizes)
    assert RowPanels(a, c, most).count == count


def test_rows_of_activations_travel_during_the_products_of_others():
    """In each panel but the first the sum of the one before, in each but the last the next gather;
    and in backward dC and dA as A and C in forward."""
    first, last = [flying for part, flying in during_products((2, 2, 2), "forward", 2)
                   if part == QKV]
    assert "gather along y" in first and "sum along z" not in first
    assert "gather along y" not in last and "sum along z" in last
    first, last, weights = [flying for part, flying in during_products((2, 2, 2), "backward", 2)
                            if part == QKV]
    assert "gather along z" in first and "gather along z" not in last
    assert "gather along y" in last and {"sum along y"} <= {*last} & {*weights}


@pytest.mark.parametrize("causal", [False, True])
def test_two_weights_travel_during_elementwise_work_and_mpi_makes_progress(monkeypatch, causal):
    """Before the first product of forward those of the first two, then the one after the next;
    backward has the gradient of the layer above in flight, and nothing else of its own."""
    with mirrored("3d", (2, 2, 2), overlap=True) as (scheme, in_flight):
        model, backend = mm3d.Transformer(scheme, **SMALL, causal=causal), scheme.grid.backend
        seen = []
        during = {name: getattr(backend.kernels, name) for name in
                  ("normalize_forward", "attention_forward", "bias_gelu_forward",
                   "attention_backward")}

        def look(name, *arguments, **options):
            before = sum(axis.transport.comm.tests for axis in scheme.grid.axes.values())
            flying = sorted(one.name for one in in_flight)
            result = during[name](*arguments, **options)
            tests = sum(axis.transport.comm.tests for axis in scheme.grid.axes.values()) - before
            seen.append((name, flying, tests > 0))
            return result
        for name in during:
            monkeypatch.setattr(backend.kernels, name, partial(look, name))
        _, saved = model.forward(model.random("x"))
        layer = ["normalize_forward", "attention_forward", "normalize_forward",
                 "bias_gelu_forward"]
        last = len(layer) * SMALL["layers"] - 1
        assert seen == [(layer[n % 4], [WEIGHT] * (2 if n < last else 1), True)
                        for n in range(last + 1)]
        assert backend.between_blocks is None
        seen.clear()
        model.backward(model.random("dy"), saved)
        assert seen == [("attention_backward", [WEIGHT, SUM], True)] * SMALL["layers"]
        assert backend.between_blocks is None


def test_vectors_travel_while_nothing_else_does(monkeypatch):
    """Forward gathers them before any weight, backward sums their gradients after the last dB."""
    with mirrored("3d", (2, 2, 2), overlap=True) as (scheme, in_flight):
        model, seen = mm3d.Transformer(scheme, **SMALL), []
        for name in ("gather_features", "reduce_gradient"):
            method = getattr(FlatVectors, name)
            monkeypatch.setattr(FlatVectors, name, lambda self, b, method=method: (
                seen.append(len(in_flight)), method(self, b))[1])
        _, saved = model.forward(model.random("x"))
        model.backward(model.random("dy"), saved)
        assert seen == [0] * 2 * SMALL["layers"]    # those of a block at once


def test_without_overlap_nothing_is_in_flight():
    with mirrored("3d", (2, 2, 2)) as (scheme, in_flight):
        model, observer = mm3d.Transformer(scheme, **SMALL), InFlight(in_flight)
        with observed(scheme.grid, observer, model):
            model.backward(model.random("dy"), model.forward(model.random("x"))[1])
        assert len(observer.found) == 3 * 4 * 3
        assert all(found == [] for _, found in observer.found)


def test_a_layer_holds_what_it_was_made_with_alone():
    """Between forward and backward, after a step and in the middle of a pass."""
    with mirrored("3d", (2, 2, 2), overlap=True) as (scheme, _):
        model = mm3d.Transformer(scheme, **SMALL)

        def held():
            return [dict(vars(part)) for linear in model.linears
                    for part in (linear, linear.product, linear.weight, linear.bias, scheme.grid)]
        before = held()
        look, seen = model.linears[5].product.b, []
        begin = look.begin_reduce_scatter
        look.begin_reduce_scatter = lambda term: (seen.append(held()), begin(term))[1]
        _, saved = model.forward(model.random("x"))
        assert held() == before
        model.backward(model.random("dy"), saved)
        assert seen == [before] and held() == before


@pytest.mark.ranks(1, 4)
def test_a_layer_that_is_looked_at_has_its_whole_gradient(comm):
    """The checks of the measured step read gradients in the middle of the pass."""
    scheme = mm3d.scheme("3d", comm, grid=(comm.size, 1, 1), backend="numpy", overlap=True)
    model = mm3d.Transformer(scheme, **SMALL)
    checks = layer_residuals.check_step(model, model.random("x"), model.random("dy"), 3)
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("rows", [0, 1, 95, 97, 500, 768, 769, 5000])
def test_panels_are_whole_blocks_of_rows(monkeypatch, rows):
    """BLAS rounds in another way in a block of rows that is cut short, some kernels do."""
    numpy, lengths, multiply = NumpyBackend(), [], np.matmul

    def told(a, b, out):
        lengths.append(len(out))
        return multiply(a, b, out=out)
    monkeypatch.setattr(np, "matmul", told)
    a, out = np.arange(2.0 * rows).reshape(rows, 2), np.empty((rows, 3))
    product = numpy.gemm(a, np.ones((2, 3)), out, progress=lambda: None)
    assert (product == a.sum(1, keepdims=True)).all()
    assert sum(lengths) == rows and len(lengths) <= MAX_PANELS
    assert not any(length % 48 for length in lengths[:-1])
