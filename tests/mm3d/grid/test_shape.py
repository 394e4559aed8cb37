"""The shape of a grid as a value: numbers, coordinates, strides and texts, without any ranks."""
import itertools
import pickle

import numpy as np
import pytest

from mm3d.grid.shape import GridShape

NAMES = "dxyz"
EVERY = [GridShape(NAMES[:n], sizes) for n in range(5)
         for sizes in itertools.product(range(1, 4), repeat=n)]


@pytest.mark.parametrize("directions", range(5))
def test_coordinates_are_numpys(directions):
    """Of all grids of up to four directions with sizes of up to 3, against np.unravel_index."""
    for shape in (one for one in EVERY if len(one) == directions):
        assert shape.ranks == np.prod(shape.sizes, dtype=int)
        places = list(shape.all_coordinates())
        assert len(places) == shape.ranks
        for rank, place in enumerate(places):
            expected = map(int, np.unravel_index(rank, shape.sizes)) if shape.sizes else ()
            assert place == shape.coordinates(rank) == dict(zip(shape.directions, expected))
            assert list(place) == list(shape)
            assert shape.rank(place) == rank
            assert shape.rank(dict(reversed(place.items()))) == rank


def test_strides_are_numpys():
    """A stride in ranks is that of an array of single bytes with one element a rank."""
    for shape in EVERY:
        strides = np.empty(shape.sizes, np.int8).strides
        assert tuple(map(shape.stride, shape)) == strides
        for direction, place in itertools.product(shape, shape.all_coordinates()):
            if place[direction]:
                before = {**place, direction: place[direction] - 1}
                assert shape.rank(place) - shape.rank(before) == shape.stride(direction)


def test_ranks_along_directions_are_those_that_differ_in_them_alone():
    shape = GridShape("dxyz", (2, 3, 1, 4))
    for count in range(5):
        for letters in itertools.combinations(shape, count):
            alike = [place for place in shape.all_coordinates()
                     if not any(place[c] for c in shape if c not in letters)]
            assert shape.ranks_along(letters) == len(alike)


@pytest.mark.parametrize("text, directions, sizes, names", [
    ("8", "x", (8,), "x"), ("2x1x2x2", "dxyz", (2, 1, 2, 2), "dxyz"),
    ("2 x 1 x 2 x 2", "d x y z", (2, 1, 2, 2), "dxyz"), ("2 x 4", "s e", (2, 4), "se"),
    ("", "", (), "")])
def test_texts_are_read(text, directions, sizes, names):
    shape = GridShape.parse(text, directions)
    assert (shape.sizes, shape.directions) == (sizes, names)
    assert shape == GridShape.parse(str(shape), " ".join(shape))
    assert shape == GridShape.parse(shape.compact, shape.directions)


def test_texts_are_written():
    shape = GridShape("dxyz", (2, 2, 16, 1))
    assert (str(shape), shape.compact) == ("2 x 2 x 16 x 1", "2x2x16x1")
    assert repr(shape) == "GridShape('dxyz', (2, 2, 16, 1))"


@pytest.mark.parametrize("sizes, directions, match", [
    ("2xax2", "xyz", "'2xax2' is no shape of a grid: give sizes as in 2x2x2"),
    ("2.5x2", "xy", "is no shape of a grid"), ("2x", "xy", "is no shape of a grid"),
    ("2x0x2", "xyz", "sizes of at least 1, not y=0"), ("2x-2", "xy", "not y=-2"),
    ("2x2x2x2", "xyz", "4 sizes, 2 x 2 x 2 x 2, for the 3 grid directions x, y, z"),
    ("2x2", "xyz", "2 sizes, 2 x 2, for the 3 grid directions x, y, z"),
    ("2x2", "xx", "one appears twice"), ((2, 2), ("xy", "z"), "single letters .* not xy=2"),
    ((2, 2), ("", "z"), "not =2"), ((2, 2), "x,", "single letters"),
    ((2, 2.0), "xy", "not y=2.0"), ((2,), "xy", "1 sizes, 2, for the 2 grid")])
def test_what_is_no_shape_is_refused(sizes, directions, match):
    """Written, or as sizes and directions."""
    with pytest.raises(ValueError, match=match):
        if isinstance(sizes, str):
            GridShape.parse(sizes, directions)
        GridShape(directions, sizes)


def test_it_is_a_value():
    """It can be a key, compares by its sizes in their order, and cannot be changed."""
    shape = GridShape("xy", (2, 3))
    assert shape == GridShape.from_sizes({"x": 2, "y": 3})
    assert shape == GridShape("xy", [np.int64(2), np.int32(3)])
    assert {shape: 1}[GridShape("xy", (2, 3))] == 1
    assert shape != GridShape("yx", (3, 2)) and shape != GridShape("xz", (2, 3))
    assert shape == {"x": 2, "y": 3} and dict(shape) == {"y": 3, "x": 2}
    assert type(GridShape("x", (np.int64(2),)).sizes[0]) is int
    assert GridShape.from_sizes(shape) is shape and pickle.loads(pickle.dumps(shape)) == shape
    with pytest.raises(AttributeError):
        shape.sizes = (3, 3)
    with pytest.raises(TypeError):
        shape["x"] = 3


def test_what_a_grid_does_not_have_is_refused():
    shape = GridShape("xyz", (2, 2, 2))
    for wrong in "d", "xy", "":
        assert wrong not in shape
        with pytest.raises(KeyError):
            shape[wrong]
        with pytest.raises(KeyError):
            shape.stride(wrong)
    for rank in -1, 8:
        with pytest.raises(ValueError, match=f"has the ranks 0 to 7, not {rank}"):
            shape.coordinates(rank)
    with pytest.raises(ValueError, match="coordinate y=2 .* 0 to 1 would do"):
        shape.rank({"x": 0, "y": 2, "z": 1})
    with pytest.raises(KeyError):
        shape.rank({"x": 0, "y": 1})
