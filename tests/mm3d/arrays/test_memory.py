"""Memory is obtained from one place and used again: none is new once a step has been done."""
import gc
import tracemalloc

import pytest

import mm3d
from mm3d.arrays import backend
from models import SOME

SIZES = dict(layers=1, hidden=256, heads=4, batch=8, seq=256)
# The least activation of a rank of 8; what Python needs for its own objects is less than that.
LARGE = 4 * 8 * 256 * 256 // 8


@pytest.fixture
def fresh(monkeypatch, no_backends):
    """A backend of its own, so that nothing that other tests gave back is there to be reused."""
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")
    return backend.get("numpy")


@pytest.mark.ranks(1, 4, slow=(8,))
def test_steps_after_the_first_take_no_new_memory(comm, fresh):
    """In step 2 the pool makes no storage, and NumPy nothing as large as an activation."""
    for parallelism in SOME[comm.size]:
        fresh.release_idle_memory()    # what others left idle may go back at any time
        with parallelism.on(comm, fresh) as scheme:
            model = mm3d.Transformer(scheme, **SIZES, causal=True)
            x, dy = model.random("x"), model.random("dy")

            def step():
                _, saved = model.forward(x)
                model.backward(dy, saved)

            step()
            reserved = fresh.memory()["reserved"]
            gc.collect()
            tracemalloc.start()
            try:
                step()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert most < LARGE, (str(parallelism), most)
            assert fresh.memory()["reserved"] == reserved, str(parallelism)
