"""ScaLAPACK's product beside ours."""
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from bench.errors import UsageError, WrongResult
from bench.experiments.products import scalapack
from bench.experiments.products.problem import Problem, product_grid
from bench.experiments.rows import settings
from bench.instruments.timing import Limits
from support import run_python, run_ranks

SMALL = ("-m", "bench", "measure", "matmul", "--beside", "scalapack", "--shape", "48,40,56",
         "--block", "8,16", "--grid", "1x2x2",
         "--repetitions", "1", "--max-repetitions", "1", "--calls", "1")


@pytest.fixture
def installed():
    """Skip where there is no ScaLAPACK."""
    if not any(map(scalapack.find_library, ("scalapack-mpich", "scalapack-openmpi"))):
        pytest.skip("ScaLAPACK is not installed")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_products_are_verified_and_compared(installed, dtype):
    done = run_ranks(4, *SMALL, "--dtype", dtype, MM3D_TRANSPORT="shared")
    assert done.returncode == 0, done.stderr
    assert f"48 x 40 x 56 {dtype}, 4 ranks" in done.stdout
    assert "3d, shared, is ahead" in done.stdout and "3d, mpi, is ahead" in done.stdout
    rows = {line.split("  ")[0]: line.split("  ") for line in done.stdout.splitlines()}
    numbers = {name: len([cell for cell in row if cell.strip(" |")]) for name, row in rows.items()}
    for transport in ("shared", "mpi"):
        assert numbers[f"3d on 1 x 2 x 2, transport {transport}"] == 3
    # ScaLAPACK beside both of them.
    assert numbers["ScaLAPACK on 2 x 2, blocks of 8"] == 7
    assert numbers["the same, by NumPy's own BLAS"] == 3
    assert sum(name.startswith("local products of 3d alone, by lib") for name in rows) == 1
    assert "multiply by one function, of lib" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_where_mpi_is_usual_the_product_is_measured_by_it_alone(installed):
    done = run_ranks(4, *SMALL, MM3D_TRANSPORT="mpi")
    assert done.returncode == 0 and "transport mpi" in done.stdout, done.stderr
    assert "shared" not in done.stdout


GEMM = """
import numpy as np
from bench.experiments.products import scalapack
library = scalapack.load_scalapack()
for dtype in ("float32", "float64"):
    gemm = scalapack.FortranGemm(library, dtype)
    draw = np.random.default_rng(0)
    for m, n, k in ((5, 3, 4), (1, 3, 4), (5, 1, 4), (5, 3, 1), (1, 1, 1), (0, 3, 4), (5, 0, 4)):
        for rows in (slice(None), slice(1, -1)):    # whole, and part of a larger one
            a, b = (draw.integers(-3, 4, (x + 2, y + 2)).astype(dtype)[1:-1, rows][:, :y][:x]
                    for x, y in ((m, n), (n, k)))
            turned = [draw.integers(-3, 4, (y, x + 1)).astype(dtype).T[:x] for x, y in (
                (m, n), (n, k))]
            for left in (a, turned[0]):
                for right in (b, turned[1]):
                    found = gemm(left, right, np.full((m, k), 7, dtype))
                    assert np.array_equal(found, left @ right), (left.strides, right.strides)
    for a, b in ((np.ones((2, 2), "float16"), np.ones((2, 2), dtype)),
                 (np.ones((4, 4), dtype)[::2, ::2], np.ones((2, 2), dtype))):
        try:
            gemm(a, b, np.ones((2, 2), dtype))
        except ValueError:
            print("refused")
places = iter(range(2))    # as if another library had been loaded for all before
scalapack.address_of = lambda function: next(places)
scalapack.library_name = lambda function: "libone.so"
try:
    scalapack.FortranGemm(library, "float64")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_products_of_any_order_by_the_function_that_scalapack_calls(installed):
    done = run_python("-c", GEMM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused"] * 4 + [
        "dgemm_ of ScaLAPACK's BLAS is in libone.so, but its calls end in libone.so, which was "
        "loaded before"]


def test_a_wrong_product_of_scalapack_is_noticed(installed, tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text("""
import mm3d
from mpi4py import MPI
from bench.experiments.products import scalapack
library = scalapack.load_scalapack()
product = scalapack.Pgemm(library, MPI.COMM_WORLD, (48, 40, 56), "float64", 8, 0)
product()
right = [check.passed for check in product.check(1)]
if MPI.COMM_WORLD.rank == 1:
    product.blocks["C"][0, 0] += 1e-6
told = MPI.COMM_WORLD.gather(all(right) and not product.check(1)[0].passed)
if told:
    print(*told)
""")
    done = run_ranks(4, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4


def test_without_scalapack_it_is_said_what_to_install():
    with pytest.raises(UsageError, match="apt-get install libscalapack"):
        scalapack.load_scalapack(lambda name: None)


@pytest.mark.ranks(4)
def test_what_one_rank_lacks_all_learn(comm, monkeypatch):
    """As when ScaLAPACK is missing on one node, or its MPI library cannot be opened."""
    def library():
        if comm.rank == 2:
            raise error("not here")

    for error in (UsageError, OSError):
        with pytest.raises(UsageError, match=r"^not here \(1 of 4 ranks\)$"):
            scalapack.load_libraries(comm, "float32", library)
    error = RuntimeError    # of the program, not of what is installed: ends the job
    if comm.rank == 2:
        with pytest.raises(RuntimeError):
            scalapack.load_libraries(MPI.COMM_SELF, "float32", library)
    if comm.rank == 2:
        monkeypatch.setenv("MM3D_BACKEND", "nowhere")
    with pytest.raises(UsageError, match=r"'nowhere' is unknown: .* \(1 of 4 ranks\)$"):
        settings.check_backend(None, comm)


class Gemm:
    """Stands for ScaLAPACK's function: multiplies, and adds an error."""

    file = "a.so"

    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, a, b, out, progress=None):
        self.calls += 1
        return np.add(a @ b, self.error, out=out)


@pytest.mark.parametrize("error", [0, 1])
def test_the_other_function_makes_our_products_while_they_are_compared(error):
    grid, gemm = product_grid("3d", MPI.COMM_SELF, (1, 1, 1), "numpy"), Gemm(error)
    products = object.__new__(scalapack.ScalapackProducts)
    vars(products).update(gemm=gemm, comm=MPI.COMM_SELF, seed=0, theirs=[], ours={
        "none": Problem("3d", "ab", grid, (4, 4, 4), "float64", 0)})
    with pytest.raises(WrongResult, match="off by") if error else nullcontext():
        found = scalapack.compare_products(products, 1, Limits(2, 2, 60))
        assert len(found) == 3 and {len(each) for each in found.values()} == {2}
    assert gemm.calls > 4 * (not error) and "gemm" not in vars(grid.backend)
    grid.free()
