"""Cubes of p = 3 and p = 4, squares, and lines longer than there are heads, at tiny sizes."""
from pathlib import Path

import pytest

from support import run_ranks

EXPECTED = {
    9: ["2d 3x3 [x,] uneven", "3d 3x1x3 [x,y] uneven"],
    27: ["1d 27 [,] uneven", "1d-sp 27 [,x] uneven", "3d 3x3x3 [x,y] uneven",
         "3d 3x3x3 [x,y] odd", "3d 3x3x3 [x,y] thin", "products 3x3x3"],
    36: ["1d 36 [,] table 1", "2d 6x6 [x,] uneven"],
    64: ["3d 4x4x4 [x,y] table 2", "3d 4x4x4 [xy,] whole sequences", "3d 4x4x4 [x,y] uneven",
         "3d 4x4x4 [x,y] odd", "3d 4x4x4 [x,y] thin",
         "2d 8x8 [x,] uneven", "1d 64 [,] uneven", "products 4x4x4"]}


@pytest.mark.limit(400)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", EXPECTED)
def test_equals_serial_with_the_closed_form_s_words(ranks):
    """Each line stands for a model that `wide.py` has checked."""
    program = Path(__file__).parents[2] / "tools" / "wide.py"
    run = run_ranks(ranks, "-m", "mpi4py", str(program), timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == EXPECTED[ranks]
