"""SUMMA with blocks under way: the bits and words of SUMMA, and what is in flight meanwhile."""
import pytest

import mm3d
from mirror import InFlight, mirrored
from mm3d.tracing.observe import observed
from models import SIZES, Parallelism, different, passes


def step(scheme):
    """Results of a step on this rank, and its traffic."""
    model = mm3d.Transformer(scheme, **SIZES["uneven"])
    scheme.grid.reset_traffic()
    return passes(model, "Fx Dx"), scheme.grid.traffic()


@pytest.mark.ranks(1, 4)
def test_it_gives_the_bits_of_summa_and_moves_its_words(comm, transport):
    """On 2 x 2 ranks; of three terms and more an MPI library may add in another order."""
    found = []
    for name in ("2d", "2d-pipelined"):
        with Parallelism(name).on(comm, "numpy") as scheme:
            found.append(step(scheme))
    (plain, moved), (pipelined, moved_too) = found
    assert moved == moved_too
    assert not different(plain, pipelined)


def during_products(way: str) -> list[list[str]]:
    """What is in flight during each step of the product of "mlp.up" on 3 x 3 ranks."""
    with mirrored("2d-pipelined", (3, 3)) as (scheme, in_flight):
        model = mm3d.Transformer(scheme, layers=1, hidden=12, heads=3, batch=6, seq=4)
        observer = InFlight(in_flight)
        with observed(scheme.grid, observer, model):
            y, saved = model.forward(model.random("x"))
            if way == "backward":
                observer.found.clear()
                model.backward(model.random("dy"), saved)
    return [names for part, names in observer.found if part == "mlp.up"]


def test_the_next_blocks_are_under_way_during_each_product():
    both = ["broadcast along x", "broadcast along y"]
    assert during_products("forward") == [both, both, []]
    # Three products of dA, whose terms are summed along y, and three of dB, along x.
    assert during_products("backward") == [
        ["broadcast along x"], ["broadcast along x", "sum along y"], ["sum along y"],
        ["broadcast along y"], ["broadcast along y", "sum along x"], ["sum along x"]]
