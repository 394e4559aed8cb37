"""The steps of a product on all ranks: their words are the closed forms, and errors are found."""
from collections import Counter
from dataclasses import replace

import pytest

import mm3d
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing import block_moves, block_replay
from mm3d.tracing.block_moves import layer_story, product_story, small_sizes

GRIDS = [("3d", (2, 2, 2)), ("3d", (4, 2, 1)), ("3d", (1, 1, 3)), ("faces", (2, 2, 2)),
         ("1d", (4,)), ("1d-sp", (4,)), ("2d", (3, 3)), ("2.5d", (2, 2, 2)), ("serial", (1,))]


def story_of(scheme, sizes, form, shape=None, backward=False):
    kind = find_scheme(scheme)
    grid = kind.grid_shape(sizes)
    return product_story(kind, grid, form, shape or (max(2, grid.ranks),) * 3, backward)


def words_of(moves) -> Counter:
    found = Counter()
    for direction, kind, words in moves:
        found[direction, kind] += words
    return found


@pytest.mark.parametrize("scheme, sizes", GRIDS)
@pytest.mark.parametrize("form", ["ab", "abt", "atb", "up", "down"])
@pytest.mark.parametrize("backward", [False, True])
def test_words_of_the_steps_are_the_closed_form(scheme, sizes, form, backward):
    if form not in block_moves.LINEAR_LAYERS and find_scheme(scheme).matrix_product is None:
        pytest.skip("has no products of plain matrices")
    story = story_of(scheme, sizes, form, backward=backward)
    assert {step.result for step in story.steps} == ({"dA", "dB"} if backward else {"C"})
    if story.closed_form is not None:
        assert words_of((step.direction, step.kind, sum(step.words)) for step in story.steps
                        if step.direction) == words_of(
                            (move.axis, move.collective, move.words) for move in story.closed_form)


def test_blocks_travel_as_in_the_paper():
    """A_ijl is gathered along y to A_il, B_lji along x to B_lj, and C_ij scattered along z."""
    story = story_of("3d", (2, 2, 2), "ab")
    assert [(step.kind, step.matrix, step.direction) for step in story.steps] == [
        ("all_gather", "A", "y"), ("all_gather", "B", "x"), ("multiply", "C", ""),
        ("reduce_scatter", "C", "z"), ("keep", "", "")]
    gathered, _, multiplied, scattered, kept = (step.held for step in story.steps)
    assert {(one.source, one.target) for one in story.steps[0].travels} == {
        (0, 2), (2, 0), (1, 3), (3, 1), (4, 6), (6, 4), (5, 7), (7, 5)}
    assert [(block.owner, block.rows) for block in gathered[0]["A"]] == [(0, (0, 2)), (2, (2, 4))]
    assert [block.owner for block in multiplied[0]["C"]] == [None]
    assert scattered[0]["C"] == kept[0]["C"] == (block_replay.MatrixBlock(0, (0, 2), (0, 4)),)
    for name in "ABC":    # every element is on one rank
        assert sum(held[name][0].size for held in kept) == 64


def test_blocks_may_be_uneven():
    story = story_of("3d", (2, 2, 2), "ab", (7, 5, 9))
    assert sum(step.words[0] for step in story.steps) > sum(step.words[7] for step in story.steps)


def test_a_layer_moves_the_closed_form():
    for scheme, sizes in GRIDS:
        kind = find_scheme(scheme)
        grid = kind.grid_shape(sizes)
        for backward in (False, True):
            story = layer_story(kind, grid, small_sizes(kind, grid), backward)
            assert words_of((one.direction, one.kind, sum(one.words)) for part in story.parts
                            for one in part.moved) == words_of(
                                (move.axis, move.collective, move.words)
                                for move in story.closed_form)


def test_attention_gathers_keys_and_values_where_positions_are_divided():
    kind, grid = find_scheme("3d"), GridShape("xyz", (2, 2, 2))
    parts = {part.name: part for part in layer_story(kind, grid, small_sizes(kind, grid)).parts}
    assert [(one.operand, one.kind, one.direction) for one in parts["attention"].moved] == [
        ("KV", "all_gather", "z")]
    assert (parts["mlp.up"].space, parts["mlp.up"].layout) == ("inner", "x,z,y")
    assert (parts["ln1"].space, parts["ln1"].layout) == ("outer", "x,y,z")


@pytest.mark.parametrize("scheme, form, said", [
    ("serial", "ab", "no products of plain matrices: the form up or down, of a layer, would do"),
    ("2d-pipelined", "ab", "under way while ranks multiply"),
    ("2d", "ab", "needs a square grid, not 2 x 1")])
def test_products_without_steps_are_refused(scheme, form, said):
    with pytest.raises(ValueError, match=said):
        story_of(scheme, {"serial": (1,), "2d": (2, 1)}.get(scheme, (2, 2)), form)


@pytest.mark.parametrize("wrong, problem", [
    ("words", "counts 13 words of A"), ("layout", "holds another block of C than it stores"),
    ("form", "do not fit")])
def test_a_picture_that_would_lie_is_an_error(monkeypatch, wrong, problem):
    """Other words than the code counts, another layout of C, another product."""
    plain = block_replay.Replay.__init__
    if wrong == "words":
        traffic = mm3d.Grid.traffic
        monkeypatch.setattr(mm3d.Grid, "traffic", lambda grid: {
            key: replace(one, words=one.words + 1) for key, one in traffic(grid).items()})

    def init(replay, form, grid, layouts, shape):
        if wrong == "layout":
            layouts = layouts | {"C": (Layout("xy,z"), layouts["C"][1])}
        plain(replay, "abt" if wrong == "form" else form, grid, layouts, shape)
    monkeypatch.setattr(block_replay.Replay, "__init__", init)
    with pytest.raises(RuntimeError, match=problem):
        story_of("3d", (2, 2, 1), "ab", (8, 6, 4))
