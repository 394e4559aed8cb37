"""What goes from stage to stage: each block once, straight to the ranks that need it."""
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.schemes import find_scheme
from mm3d.training.hops import Hops, activation_blocks, transfers
from mm3d.training.schedules import parse_schedule
from mm3d.training.schedules.schedule import Completion
from mm3d.transport.point_to_point import tag_count

GRIDS = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2)]


def blocks(grid, shape=(3, 5, 7), scheme="3d", **options):
    kind = find_scheme(scheme)
    return activation_blocks(kind, kind.grid_shape(grid), shape, kind.complete_options(options))


@pytest.mark.parametrize("before, after", [*product(GRIDS, GRIDS)])
def test_every_element_arrives_once(before, after):
    sources, targets = blocks(before), blocks(after)
    for number, wanted in enumerate(targets):
        arrived = np.zeros((3, 5, 7), int)
        for one in transfers(sources, targets):
            place = tuple(slice(*bounds) for bounds in one.box)
            own = np.zeros_like(arrived)
            own[tuple(slice(*bounds) for bounds in sources[one.source])] = 1
            assert own[place].all()    # the source has it
            arrived[place] += one.target == number
        inside = np.zeros_like(arrived)
        inside[tuple(slice(*bounds) for bounds in wanted)] = 1
        assert np.array_equal(arrived, inside)


@pytest.mark.parametrize("scheme, grid", [("3d", (2, 1, 2)), ("1d", (4,)), ("1d-sp", (4,)),
                                          ("2d", (2, 2)), ("serial", (1,))])
def test_between_equal_grids_each_rank_sends_one_message_to_its_own_like(scheme, grid):
    own = blocks(grid, (4, 4, 8), scheme)
    found = transfers(own, own)
    assert [(one.source, one.target) for one in found] == [(n, n) for n in range(len(own))]
    assert [one.box for one in found] == own


def test_holders_of_copies_share_the_sending():
    """Four ranks hold all of it, and four others a part each: none sends two."""
    sources, targets = blocks((4,), (4, 4, 8), "1d"), blocks((4,), (4, 4, 8), "1d-sp")
    assert sorted(one.source for one in transfers(sources, targets)) == [0, 1, 2, 3]


@pytest.mark.parametrize("before, after", [((2, 1, 2), (4, 1, 1)), ((4,), (2, 2)),
                                           ((1, 2, 2), (1, 2, 2))])
def test_transfers_of_one_rank_are_its_part_of_all(before, after):
    names = {1: "1d", 2: "2d", 3: "3d"}
    sources, targets = (blocks(grid, (4, 4, 8), names[len(grid)]) for grid in (before, after))
    every = transfers(sources, targets)
    for rank in range(4):
        assert transfers(sources, targets, source=rank) == [
            one for one in every if one.source == rank]
        assert transfers(sources, targets, target=rank) == [
            one for one in every if one.target == rank]


@pytest.mark.parametrize("rank", ["source", "target"])
def test_transfers_of_one_rank_take_a_time_linear_in_the_blocks(rank):
    """Counted: how often a block is compared."""
    class Counted(tuple):
        comparisons = 0

        def __iter__(self):
            Counted.comparisons += 1
            return super().__iter__()
    own = [Counted(((n, n + 1), (0, 5))) for n in range(300)]
    assert len(transfers(own, own, **{rank: 7})) == 1
    assert Counted.comparisons <= 2 * len(own)


@pytest.mark.ranks(2)
def test_results_are_told_apart_whatever_the_order_of_receiving(comm):
    """Guards against confusing forward and backward: with two stages the next is the one before.
    """
    schedule = parse_schedule("0 2: F0.0 F0.1 F1.0 F1.1 BW1.0 BW1.1 BW0.0 BW0.1\n"
                              "1 3: F0.0 F0.1 F1.0 F1.1 BW1.0 BW1.1 BW0.0 BW0.1\n")
    mesh = mm3d.Mesh(comm, stages=2, scheme="serial")
    hops = Hops(mesh, schedule, (1, 2, 3), np.dtype("float32"))
    events = [Completion(step, 2 - 2 * back, micro)
              for step, back in (("F", 0), ("B", 0), ("F", 1)) for micro in (0, 1)]
    assert len({hops.tag(event) for event in events}) == len(events)
    backend = mesh.scheme.grid.backend
    if comm.rank == 0:
        for value, event in enumerate(events):
            hops.send(event, backend.asarray(np.full((1, 2, 3), value, np.float32)), 1)
    else:
        for value, event in reversed([*enumerate(events)]):
            block = hops.complete(hops.begin_receive(event, 0))
            assert (block == value).all(), event
    hops.messages.finish()
    assert hops.traffic.words == 36 * (comm.rank == 0)
    hops.messages.free()
    mesh.free()


@pytest.mark.ranks(2)
def test_more_messages_than_tags_are_refused_before_a_communicator_is_made(comm):
    mesh = mm3d.Mesh(comm, stages=2, scheme="serial")
    schedule = parse_schedule("F0 BW0\nF0 BW0\n")
    limit = tag_count(comm)
    object.__setattr__(schedule, "microbatches", limit)
    whole, mesh.comm = mesh.comm, Limit(limit)
    with pytest.raises(ValueError, match=f"2 stages of {limit} micro-batches need {4 * limit}"):
        Hops(mesh, schedule, (1, 1, 1), np.dtype("float32"))
    mesh.comm = whole
    mesh.free()


def test_an_mpi_that_knows_tags_of_the_world_alone():
    assert tag_count(Limit(None)) == tag_count(MPI.COMM_WORLD)


class Limit:
    """A communicator that says how many tags there are, and can do nothing else."""

    def __init__(self, tags: int | None) -> None:
        self.tags = tags

    def Get_attr(self, key: int) -> int | None:
        assert key == MPI.TAG_UB
        return self.tags and self.tags - 1
