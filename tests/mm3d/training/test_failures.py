"""A rank that dies in the middle of a pipeline ends the job; none waits for ever."""
import pytest

from support import run_ranks

PROGRAM = """
import mm3d
from mpi4py import MPI

comm = MPI.COMM_WORLD
mesh = mm3d.Mesh(comm, stages=4, scheme="serial")

def around(action):
    if comm.rank == 2 and action.kind == "BW" and action.micro == 1:
        raise RuntimeError("no more")
    import contextlib
    return contextlib.nullcontext()

pipeline = mm3d.Pipeline(mesh, "1f1b", layers=4, hidden=8, heads=2, batch=4, seq=2,
                         microbatches=4, around=around, synchronous=True)
draw = pipeline.chunks[0].random
pipeline.step(lambda micro: draw("x"), lambda micro, y: draw("dy"))
"""


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job():
    done = run_ranks(4, "-c", PROGRAM, timeout=60)
    text = done.stdout + done.stderr
    assert "killed: did not end" not in text and done.returncode == 1, text
    assert "RuntimeError: no more" in text
