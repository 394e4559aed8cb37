"""The same error on every rank, whichever rank has it."""

import pytest

from bench.agreement import agree, broadcast_from_rank_0, make_on_each_rank, make_on_rank_0
from bench.errors import StoreError, UsageError

pytestmark = pytest.mark.ranks(4)


def fail(error: Exception):
    raise error


def test_the_problem_of_the_first_rank_that_has_one(comm):
    agree(None, comm)
    agree("", comm)
    with pytest.raises(StoreError, match="^rank 2$"):
        agree(f"rank {comm.rank}" if comm.rank >= 2 else "", comm, StoreError)
    with pytest.raises(UsageError, match="^rank 3$"):
        agree("rank 3" if comm.rank == 3 else None, comm)


@pytest.mark.parametrize("error", [ValueError("gone"), OSError("gone")])
def test_each_rank_has_its_own_result_or_all_have_an_error(comm, error):
    assert make_on_each_rank(lambda: comm.rank, comm) == comm.rank
    with pytest.raises(UsageError, match=r"^gone \(3 of 4 ranks\)$"):
        make_on_each_rank(lambda: comm.rank and fail(error), comm)


def test_what_rank_0_makes(comm):
    called = []
    assert broadcast_from_rank_0(lambda: called.append(comm.rank) or "made", comm) == "made"
    assert make_on_rank_0(lambda: "made", comm) == (None if comm.rank else "made")
    assert called == [0] * (comm.rank == 0)
    with pytest.raises(UsageError, match="^wrong$"):
        broadcast_from_rank_0(lambda: fail(ValueError("wrong")), comm)
    waited = []
    with pytest.raises(StoreError, match="^full$"):
        make_on_rank_0(lambda: fail(StoreError("full")), comm, waited.append)
    assert waited == [comm]


def test_an_error_of_the_program_is_not_caught(comm):
    if comm.rank == 0:
        with pytest.raises(KeyError):
            make_on_rank_0(lambda: fail(KeyError("name")), comm)
