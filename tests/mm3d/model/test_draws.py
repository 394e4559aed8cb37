"""Random numbers: the same whoever draws them, and each rank draws its own part."""
import numpy as np
import pytest

from mm3d.model import draws


@pytest.fixture
def drawn(monkeypatch):
    """How many numbers each call of a generator has made."""
    counts = []

    class Counting(np.random.Generator):
        def standard_normal(self, size=None, *rest, **more):
            counts.append(int(np.prod(size)))
            return super().standard_normal(size, *rest, **more)

    monkeypatch.setattr(np.random, "Generator", Counting)
    return counts


def cuts(length: int) -> list[slice]:
    """Parts that begin and end at, before and after the blocks' borders, and inside them."""
    marks = sorted({0, 1, 5, 31, 32, 33, 63, 64, 65, length - 1, length})
    marks = [m for m in marks if 0 <= m <= length]
    return [slice(a, b) for a in marks for b in marks if a < b][::3] + [slice(0, length)]


@pytest.mark.parametrize("shape", [(70, 67), (33, 3, 66), (3, 20, 37), (2, 1030), (1027,), (1,)])
def test_a_part_is_a_part_of_the_whole(shape):
    """To the bit, wherever it begins and ends."""
    whole = draws.draw_normal(3, "a", shape, tuple(slice(0, n) for n in shape))
    assert whole.shape == shape and len(np.unique(whole)) == whole.size
    places = [()]
    for n in shape:
        places = [(*place, part) for place in places for part in cuts(n)[:: 1 + len(shape)]]
    for place in places:
        part = draws.draw_normal(3, "a", shape, place)
        assert np.array_equal(part, whole[place]), place


def test_nothing_is_drawn_for_an_empty_part(drawn):
    assert draws.draw_normal(0, "a", (4, 5), (slice(2, 2), slice(0, 5))).shape == (0, 5)
    assert not drawn


@pytest.mark.parametrize("shape, place", [
    ((2048, 8192), (slice(0, 2048), slice(128, 256))),             # 1-D, into the wide space
    ((8192, 2048), (slice(128, 256), slice(0, 2048))),             # and back
    ((2048, 3, 2048), (slice(0, 2048), slice(0, 3), slice(32, 64))),
    ((2048, 8192), (slice(512, 1024), slice(100, 612))),           # a part of a cube
    ((16, 512, 1024), (slice(4, 8), slice(37, 77), slice(0, 256))),
    ((65536,), (slice(1000, 3000),))])
def test_a_rank_draws_little_more_than_its_part(drawn, shape, place):
    """At most one block beyond each of its borders."""
    part = draws.draw_normal(0, "a", shape, place)
    *leading, columns = (s.stop - s.start for s in place)
    if len(shape) == 1:
        most = columns + 2 * draws.BLOCK_ELEMENTS
    else:
        runs = 1 if leading[1:] == list(shape[1:-1]) else leading[0]
        rows = part.size // columns + runs * 2 * (draws.BLOCK_ROWS - 1)
        block_columns = draws.BLOCK_ELEMENTS // draws.BLOCK_ROWS
        most = rows * (columns + 2 * (block_columns - 1))
    assert part.size <= sum(drawn) <= most


def test_every_block_has_a_stream_of_its_own():
    """No number comes twice, in blocks side by side, one below the other, and of other arrays."""
    numbers = [draws.draw_normal(seed, name, (128, 128), (slice(0, 128),) * 2)
               for seed in (0, 1) for name in ("a", "b")]
    assert len(np.unique(numbers)) == 4 * 128 * 128
    assert abs(np.mean(numbers)) < 0.02 and abs(np.std(numbers) - 1) < 0.02
