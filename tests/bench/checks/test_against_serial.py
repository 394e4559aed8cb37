"""What is compared with the serial scheme, and how."""
import math

import numpy as np
import pytest

import mm3d
from bench.checks import against_serial
from bench.checks.against_serial import worst_error

WHOLE = np.arange(1.0, 13.0).reshape(3, 4)
LEFT, RIGHT = np.s_[0:3, 0:2], np.s_[0:3, 2:4]


def dealt(*extra) -> list:
    """The two halves, and further blocks."""
    return [(LEFT, WHOLE[LEFT]), (RIGHT, WHOLE[RIGHT]), *extra]


WORSE = dealt((LEFT, 1.5 * WHOLE[LEFT]), (LEFT, 1.25 * WHOLE[LEFT]))


@pytest.mark.parametrize("blocks, error", [
    (dealt((LEFT, WHOLE[LEFT])), 0.0),
    ([(LEFT, 1.5 * WHOLE[LEFT]), (RIGHT, 1.5 * WHOLE[RIGHT])], 0.5),    # of several places
    *((order, 0.5 * np.linalg.norm(WHOLE[LEFT]) / np.linalg.norm(WHOLE)) for order in (
        WORSE, WORSE[::-1]))])    # wherever the worst copy stands
def test_the_worst_copy_of_each_place_counts(blocks, error):
    assert worst_error(blocks, WHOLE) == pytest.approx(error)


@pytest.mark.parametrize("blocks", [
    dealt()[:1],
    dealt((LEFT, np.full((3, 2), math.nan)), (LEFT, WHOLE[LEFT])),
    dealt((LEFT, WHOLE[RIGHT][:2])),
    dealt((np.s_[0:0, 0:0], np.ones((1, 1))))],
    ids=["a place that nothing covers", "not a number", "another shape", "a block of no place"])
def test_what_cannot_be_compared_is_not_a_number(blocks):
    assert math.isnan(worst_error(blocks, WHOLE))


@pytest.mark.ranks(1, 4, 8)
@pytest.mark.parametrize("batch", [1, 1000, against_serial.WORDS_PER_GATHER])
def test_every_copy_is_compared_however_many_are_sent_at_once(comm, batch):
    sizes = mm3d.ModelSizes(layers=1, hidden=16, heads=8, batch=4, seq=4)
    model = mm3d.Transformer(mm3d.scheme("1d", comm), **sizes, dtype="float64")
    model.zero_gradients()
    y, saved = model.forward(model.random("input"))
    dx = model.backward(model.random("output gradient"), saved)
    right = against_serial.compare_with_serial(model, y, dx, "float64", words_per_gather=batch)
    assert all(check.passed for check in right)
    # In 1-D every rank has a copy of this one: a fault in the last of them alone.
    bias = next(p for p in model.parameters if p.name.endswith("mlp.down.bias"))
    if comm.rank == comm.size - 1:
        bias.grad[3] += 1.0
    checks = against_serial.compare_with_serial(model, y, dx, "float64", words_per_gather=batch)
    assert [c.quantity for c in checks if not c.passed] == [f"gradient of {bias.name}"]
