"""Mistakes of the library on one rank, which measurements must see."""
import pytest

from mm3d.grid.split import Split
from mm3d.tracing.trace import Trace


@pytest.fixture
def wrong_sums(comm, monkeypatch):
    """What rank 1 gets of a sum over ranks is a thousandth too large."""
    right = Split.reduce_scatter

    def wrong(*given):
        out = right(*given)
        if comm.rank == 1:
            out *= 1.001
        return out
    monkeypatch.setattr(Split, "reduce_scatter", wrong)


@pytest.fixture
def wrong_work(comm, monkeypatch):
    """The work that rank 1 finds in a dry run is a thousandth too large."""
    right = Trace.work
    monkeypatch.setattr(Trace, "work", lambda *given: right(*given) * (
        1.001 if comm.rank == 1 else 1))
