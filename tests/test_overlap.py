"""Communication that goes on while a rank multiplies changes no bit of any result."""
import numpy as np
import pytest

import mm3d
from mm3d.backend import PANELS, Backend
from mm3d.grid import Grid
from mm3d.transport import MpiTransport, Pending

SIZES = dict(layers=1, hidden=512, heads=8, batch=4, seq=32)    # weights of several panels
GRIDS = {1: [(1, 1, 1)], 4: [(1, 4, 1), (1, 2, 2), (4, 1, 1)],
         8: [(2, 2, 2), (1, 2, 4), (1, 8, 1), (1, 1, 8)]}


def results(comm, grid, overlap, settled=True):
    """This rank's results and what it moved; `settled` or not when backward returns."""
    scheme = mm3d.scheme("3d", comm, grid=grid, backend="numpy", overlap=overlap)
    model = mm3d.Transformer(scheme, **SIZES)
    y, saved = model.forward(model.random("x"))
    backward = model.backward if settled else model.layers.backward
    dx = backward(model.random("dy"), saved)
    assert scheme.grid.arriving is None or not settled
    moved = scheme.grid.traffic()
    found = [a.copy() for a in (y, dx, *(p.grad for p in model.parameters))]
    scheme.grid.free()
    return found, moved


@pytest.mark.ranks(*GRIDS)
def test_the_same_bits_and_words_with_overlap_and_without(comm, transport, monkeypatch):
    panels = []
    progress = Pending.progress
    monkeypatch.setattr(Pending, "progress",
                        lambda self: (panels.append(self), progress(self))[1])
    for grid in GRIDS[comm.size]:
        (plain, words), (hidden, same_words), (read, _) = (
            results(comm, grid, overlap, settled)
            for overlap, settled in ((False, True), (True, True), (True, False)))
        for found in (hidden, read):
            assert all(np.array_equal(a, b) for a, b in zip(plain, found, strict=True)), grid
        assert words == same_words, grid
        if transport == "mpi" and comm.size > 1:
            assert len(panels) >= 4, grid
        panels.clear()


@pytest.fixture
def gathers(monkeypatch):
    """The names of MPI's gathers of weights as they are called."""
    called = []
    for name in ("all_gather", "begin_all_gather"):
        def told(self, a, *where, name=name, move=getattr(MpiTransport, name)):
            called.extend([name] * (a.size > 3 * 32))    # a vector is gathered where it is added
            return move(self, a, *where)
        monkeypatch.setattr(MpiTransport, name, told)
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")
    return called


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("keep, again", [("none", 8), ("weight", 0)])
def test_each_weight_sets_out_while_the_product_before_is_computed(comm, gathers, keep, again):
    """Of all products but the first of each pass; nothing is gathered twice or left behind."""
    scheme = mm3d.scheme("3d", comm, grid=(comm.size, 1, 1), backend="numpy", overlap=True,
                         keep=keep)
    model = mm3d.Transformer(scheme, **{**SIZES, "hidden": 32, "layers": 2})
    for _ in range(2):
        _, saved = model.forward(model.random("x"))
        assert gathers == ["all_gather"] + ["begin_all_gather"] * 7
        gathers.clear()
        model.backward(model.random("dy"), saved)
        assert gathers == (["all_gather"] + ["begin_all_gather"] * (again - 1))[:again]
        gathers.clear()
        assert all(linear.sent is None for linear in model.linears)
    scheme.grid.free()


def fail(x):
    """A layer in which a pass ends."""
    raise FloatingPointError("no number")


@pytest.mark.ranks(2)
def test_what_was_sent_in_a_pass_that_failed_is_not_multiplied_with(comm, monkeypatch):
    """The weights may have changed since."""
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")
    found = []
    for fails in (True, False):
        scheme = mm3d.scheme("3d", comm, grid=(2, 1, 1), backend="numpy", overlap=True)
        model = mm3d.Transformer(scheme, **{**SIZES, "hidden": 32})
        x, last = model.random("x"), model.linears[-1]
        _, saved = model.forward(x)
        if fails:
            gelu = model.layers.layers[1].layers[2]
            with monkeypatch.context() as broken, pytest.raises(FloatingPointError):
                broken.setattr(gelu, "forward", fail)
                model.forward(x)
            assert last.sent is not None
        for linear in model.linears:
            linear.weight.value *= 2
        found.append(model.backward(x, saved).copy())
        scheme.grid.free()
    assert np.array_equal(*found)


@pytest.mark.ranks(1, 2, 3)
def test_a_sum_that_goes_on_is_the_sum(comm, transport):
    """In exact integers, of even and of uneven blocks; products meanwhile are right too."""
    grid = Grid(comm, "numpy", x=comm.size)
    a, b = np.arange(300.0 * 70).reshape(300, 70) % 7, np.arange(70.0 * 5).reshape(70, 5) % 5
    for rows in (6 * comm.size, 6 * comm.size + 1):
        split = grid["x"].split(0, rows)
        every = [np.random.default_rng(rank).integers(-9, 9, (rows, 40)).astype(float)
                 for rank in range(comm.size)]
        with split.begin_reduce_scatter(every[comm.rank].copy()) as pending:
            product = grid.backend.gemm(a, b, np.empty((300, 5)))
        assert np.array_equal(product, a @ b) and grid.backend.progress is None
        start = sum(split.counts[:comm.rank])
        expected = sum(every)[start:start + split.counts[comm.rank]]
        assert np.array_equal(pending.wait(), expected) and pending.wait() is pending.out
    grid.free()


@pytest.mark.parametrize("rows", [0, 1, 95, 97, 500, 768, 769, 5000])
def test_panels_are_whole_blocks_of_rows(monkeypatch, rows):
    """BLAS rounds in another way in a block of rows that is cut short, some kernels do."""
    numpy, lengths, multiply = Backend(), [], np.matmul

    def told(a, b, out):
        lengths.append(len(out))
        return multiply(a, b, out=out)
    numpy.progress = lambda: None
    monkeypatch.setattr(np, "matmul", told)
    a, out = np.arange(2.0 * rows).reshape(rows, 2), np.empty((rows, 3))
    assert (numpy.gemm(a, np.ones((2, 3)), out) == a.sum(1, keepdims=True)).all()
    assert sum(lengths) == rows and len(lengths) <= PANELS
    assert not any(length % 48 for length in lengths[:-1])
