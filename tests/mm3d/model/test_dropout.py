"""Dropout: one mask on every grid, in every micro-batch, in backward and under recomputation."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.model.dropout import Dropout
from mm3d.model.draws import MaskKey, draw_kept, dropped_of_65536
from mm3d.tracing.dry_run import trace_step
from models import PARALLELISMS, SOME, Parallelism, policies

SIZES = dict(layers=2, hidden=20, heads=5, batch=6, seq=7)
OPTIONS = dict(dtype="float64", causal=True, dropout=0.25)
WHOLE = (slice(0, 5), slice(0, 7), slice(0, 150))


def kept(*place: slice, seed=0, step=0, name="a", dropped=20000) -> np.ndarray:
    """A part of a mask of (5, 7, 150)."""
    return draw_kept(seed, step, name, 7, place or WHOLE, dropped)


def test_a_part_of_a_mask_is_a_part_of_the_whole():
    """Wherever it begins and ends, also inside the blocks of features."""
    whole = kept()
    for sequences in (slice(0, 5), slice(2, 3), slice(1, 5)):
        for positions in (slice(0, 7), slice(0, 3), slice(3, 7), slice(6, 7), slice(2, 2)):
            for features in (slice(0, 150), slice(0, 64), slice(60, 70), slice(128, 150)):
                place = sequences, positions, features
                assert np.array_equal(kept(*place), whole[place]), place


def test_masks_differ_by_seed_step_and_layer_and_drop_the_right_share():
    masks = [kept(), kept(seed=1), kept(step=1), kept(name="b")]
    masks += [np.roll(masks[0], 1, axis) for axis in range(3)]
    for n, one in enumerate(masks):
        assert abs(1 - one.mean() - 20000 / 65536) < 4 * (0.21 / one.size) ** 0.5
        assert all(0.5 < np.mean(one == other) < 0.65 for other in masks[:n])    # independent
    assert kept(dropped=0).all() and dropped_of_65536(0.5) == 2 ** 15


@pytest.mark.parametrize("probability", [-0.1, 0.99999, 1.0, 1.5, float("nan")])
def test_what_is_no_probability_is_refused(probability):
    with pytest.raises(ValueError, match=r"below 1 - 2\^-16 would do"):
        trace_step("serial", 1, **SIZES, dropout=probability)


def test_masks_are_no_part_of_a_cuda_graph(compiled_cupy):
    """It would repeat the first ones; of a step that drops nothing it is one."""
    with Parallelism("serial").on(MPI.COMM_SELF, "cupy") as scheme:
        model, key = mm3d.Transformer(scheme, **SIZES), MaskKey(3)
        layer, x = Dropout(model.outer, 20, 0.25, "here", key), model.random("x")
        key.place = 0, 0
        for step in (lambda: layer.forward(x), lambda: layer.backward(x, None)):
            with pytest.raises(RuntimeError, match="repeat the masks of this one step"):
                scheme.grid.graph(step)
        key.place = None
        assert np.array_equal(*map(scheme.grid.backend.to_host, (
            scheme.grid.graph(lambda: layer.forward(x)[0])(), x)))


@pytest.mark.ranks(1, 4, slow=(6, 8))
def test_every_grid_has_the_same_mask(comm):
    """To the bit: the mask of a layer, unsharded, and of the rows of a micro-batch."""
    place = slice(2, 8), slice(0, 7), slice(0, 20)
    expected = draw_kept(3, 5, "here", 7, place, dropped_of_65536(0.25)) / 0.75
    for parallelism in PARALLELISMS[comm.size]:
        with parallelism.on(comm, "numpy") as scheme:
            model, key = mm3d.Transformer(scheme, **SIZES, dtype="float64"), MaskKey(3)
            key.place = 5, 2
            layer = Dropout(model.outer, 20, 0.25, "here", key)
            y, saved = layer.forward(model.shard(np.ones(model.shape)))
            assert np.array_equal(model.unshard(y), expected), str(parallelism)
            dx = layer.backward(model.shard(np.ones(model.shape)), saved)
            assert np.array_equal(model.unshard(dx), expected), str(parallelism)
            key.place = None
            assert np.array_equal(layer.forward(dx)[0], dx)


def results(model, place=(4, 6), passes=("a",), halves=False) -> list[np.ndarray]:
    """Global outputs and gradients, all of `passes` being in flight at one time.

    The model is left at the place of the last pass: backward has to find its own.
    """
    found = []
    model.zero_gradients()
    for number, name in enumerate(passes):
        model.mask_key.place = place[0], place[1] + number * model.shape[0]
        found.append((name, *model.forward(model.random(name))))
    ends = []
    for name, _, saved in found:
        if halves:
            dx, operands = model.backward_input(model.random(f"d{name}"), saved)
            model.backward_weights(operands)
        else:
            dx = model.backward(model.random(f"d{name}"), saved)
        ends.append(dx)
    return [*(model.unshard(y) for _, y, _ in found), *map(model.unshard, ends),
            *model.gradients().values()]


@pytest.mark.ranks(1, slow=(8,))
def test_the_same_bits_with_recomputation_and_in_halves(comm):
    """Two micro-batches in flight: one mask drawn for another of them would be seen.

    Guards against a mask that differs when it is drawn again (NVIDIA/Megatron-LM#1256).
    """
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm, "numpy") as scheme:
            def found(recompute, **more):
                model = mm3d.Transformer(scheme, **SIZES, **OPTIONS, recompute=recompute)
                return results(model, passes=("a", "b"), **more)
            expected = found("none")
            for policy in policies(parallelism, "selective", "full", "uniform:2+selective"):
                assert all(map(np.array_equal, found(policy, halves=policy != "selective"),
                               expected)), (str(parallelism), policy)


def test_gradients_are_central_differences():
    """Along random directions of input and parameters."""
    with Parallelism("serial").on(MPI.COMM_SELF) as scheme:
        model = mm3d.Transformer(scheme, **SIZES, **OPTIONS)
        model.mask_key.place = 0, 0
        x, dy, u = (np.array(model.random(name)) for name in ("x", "dy", "u"))
        dx = model.backward(dy, model.forward(x)[1])
        step = 1e-5
        plus, minus = (np.vdot(model.forward(x + sign * step * u)[0], dy) for sign in (1, -1))
        assert np.isclose((plus - minus) / (2 * step), np.vdot(dx, u), rtol=1e-7)


def test_nothing_is_dropped_before_a_place_is_set():
    """So a forward of validation by itself is right; a dry run is one of training."""
    with Parallelism("serial").on(MPI.COMM_SELF) as scheme:
        model, plain = (mm3d.Transformer(scheme, **SIZES, **OPTIONS | {"dropout": p})
                        for p in (0.25, 0.0))
        x = model.random("x")
        assert np.array_equal(model.forward(x)[0], plain.forward(x)[0])
    events = trace_step("serial", 1, **SIZES, dropout=0.25).events
    assert any(where == "residual" and "multiply" in str(event) for _, where, event in events)


def test_it_moves_nothing():
    plain, dropped = (trace_step("3d", 4, (1, 2, 2), **SIZES, recompute="full", dropout=p)
                      for p in (0.0, 0.5))
    assert plain.traffic == dropped.traffic and plain.flops() == dropped.flops()
