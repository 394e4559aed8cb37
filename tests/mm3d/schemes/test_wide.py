"""Cubes of p = 3 and p = 4, squares, and lines longer than there are heads, at tiny sizes."""
import pytest

import wide
from support import run_ranks


@pytest.mark.limit(400)
@pytest.mark.slow
@pytest.mark.parametrize("ranks, products", [(9, 0), (27, 1), (36, 0), (64, 1)])
def test_equals_serial_with_the_closed_form_s_words(ranks, products):
    """Each line stands for a model that `wide.py` has checked, on a cube one for the products."""
    run = run_ranks(ranks, "-m", "mpi4py", wide.__file__, timeout=300)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == len(wide.CASES[ranks]) + products
