"""A program that never frees its communicators is told so in one line."""
import pytest

from support import run_ranks

PROGRAM = """
import itertools
import mm3d
from mpi4py import MPI

comm, kept = MPI.COMM_WORLD, []
taken = [MPI.COMM_SELF.Dup() for _ in range(1700)]    # by one rank alone, which is fast
sizes = dict(layers=2, hidden=2, heads=1, vocab=3, batch=2, seq=1)

def make(kind):
    if kind == "scheme":
        return mm3d.scheme("1d", comm).grid
    mesh = mm3d.Mesh(comm, data=comm.size, scheme="serial")
    return mesh if kind == "mesh" else mm3d.GPT(mesh, **sizes)

try:
    for _ in range(800):
        kept.append(make("{kind}"))
    print("enough communicators for all")
except RuntimeError as error:
    print(f"after {{len(kept) > 9}}: {{error}}")
    for one in kept[-9:]:
        one.free()
    make("{kind}").free()
    print("goes on")
"""


@pytest.mark.parametrize("ranks, kind", [
    (1, "scheme"), pytest.param(2, "mesh", marks=pytest.mark.slow), (2, "GPT")])
def test_no_communicators_left_is_one_line_that_says_to_free(ranks, kind):
    done = run_ranks(ranks, "-c", PROGRAM.format(kind=kind), timeout=120)
    if "enough communicators" in done.stdout:
        pytest.skip("this MPI has more communicators")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("goes on") == ranks
    said = "after True: MPI has no communicators left: call free() of the models"
    assert done.stdout.count(said) == ranks
