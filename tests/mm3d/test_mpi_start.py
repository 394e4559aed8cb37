"""MPI starts in any locale; what a rank starts is no rank, unless a launcher starts it."""
import os
import shutil
import socket
import sys

import pytest

from mm3d import launcher, mpi_start
from support import run_command, run_python, run_ranks

# Started on each rank; its workers import it, too, and with it mm3d and MPI in some order.
WORKERS = """
import multiprocessing, os, sys
{imports}

def world(number):
    return MPI.COMM_WORLD.size

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        seen = pool.map(world, range(2))
        os.write(1, f"{{MPI.COMM_WORLD.size}} {{seen}} \\n".encode())
    MPI.COMM_WORLD.Barrier()
"""
ORDERS = {"mm3d first": "import mm3d\nfrom mpi4py import MPI",
          "MPI first": "from mpi4py import MPI\nimport mm3d"}
# Words are written at once, so that no other rank's come between.
CHILD = ("import mm3d, os; from mpi4py import MPI; "
         "os.write(1, str(MPI.COMM_WORLD.size).encode() + bytes([10]))")
STARTED = f"""
import os, subprocess, sys
import mm3d
from mpi4py import MPI
command = [*sys.argv[2:], sys.executable, "-c", {CHILD!r}]
options = eval(sys.argv[1])
done = subprocess.run(command, capture_output=True, text=True, **options)
said = f"{{MPI.COMM_WORLD.size}} {{done.stdout.split()}} {{done.stderr}} \\n"
os.write(1, said.encode())
MPI.COMM_WORLD.Barrier()
assert "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ
"""


def test_an_mpi_that_is_not_there_is_said_in_one_line(tmp_path):
    """As where the module of the MPI with which mpi4py was built is not loaded."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc:\n    initialize = True\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise ImportError('libmpi.so.40: no such file')")
    done = run_python("-m", "bench", "doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and not done.stdout and done.stderr == (
        "error: mpi4py cannot load an MPI library (libmpi.so.40: no such file): load the module "
        "of the MPI that it was built with, or pip install mpich\n")


@pytest.mark.parametrize("missing", ["mpi4py", "numpy"])
@pytest.mark.parametrize("program", [("-c", "import mm3d"), ("-m", "bench"), ("-m", "jobs")])
def test_a_python_without_the_packages_of_mm3d_says_so_in_one_line(tmp_path, missing, program):
    (tmp_path / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')")
    done = run_python(*program, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and not done.stdout and done.stderr == (
        f"error: {sys.executable} has no {missing}: activate the environment where mm3d is "
        "installed, or pip install -e '.[mpi]' in its clone\n")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how, size", [("spawn", 1), ("forkserver", 1), ("fork", 2)])
def test_workers_of_a_rank_are_no_ranks(tmp_path, how, size, order):
    program = tmp_path / "program.py"
    program.write_text(WORKERS.format(imports=ORDERS[order]))
    done = run_ranks(2, str(program), how)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == 2 * [f"2 [{size}, {size}]"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options", [
    "{'env': os.environ | {'MORE': '1'}}", "{}", "{'close_fds': False}",
    "{'env': os.environ | {'MORE': '1'}, 'close_fds': False}"])
def test_what_a_rank_starts_is_no_rank(options):
    done = run_ranks(2, "-c", STARTED, options)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == 2 * ["2 ['1']"]


@pytest.mark.slow
def test_an_mpirun_that_a_rank_starts_has_ranks():
    """Its ranks have the same numbers as this one, and what it has passed on."""
    mpirun = launcher.mpirun_command(3)
    if "HYDRA" not in run_command([mpirun[0], "--version"]).stdout:
        pytest.skip("Open MPI's mpirun does not start from within a rank")
    done = run_ranks(1, "-c", STARTED, "{'env': os.environ | {'MORE': '1'}}", *mpirun)
    assert done.stdout.split() == ["1", *f"{['3', '3', '3']}".split()], done.stderr


def left(environ):
    """What is left of a rank's environment after `leave_job`."""
    mpi_start.leave_job(environ)
    return environ


def test_launches_are_told_apart(capsys):
    with socket.socket() as mine, socket.socket() as others, open(os.devnull) as file:
        rank = {"PMI_RANK": "0", "PMI_SIZE": "2", "OMPI_MCA_pml": "ob1"}
        own = rank | {"PMI_FD": str(mine.fileno())}
        parent = f"1 {mpi_start.launch(own)}"
        free = {"OMPI_MCA_pml": "ob1"}
        assert left({**own}) == own
        assert left(own | {mpi_start.MARK: parent}) == free | {mpi_start.MARK: parent}
        # The process itself, and one that another launcher has started below it.
        itself = own | {mpi_start.MARK: f"{os.getpid()} {mpi_start.launch(own)}"}
        below = rank | {"PMI_FD": str(others.fileno()), mpi_start.MARK: parent}
        assert left({**itself}) == itself and left({**below}) == below
        assert not capsys.readouterr().err
        # The connection is closed, or its number that of another file: no rank has said that
        # this is its child, so it may be a rank that has lost its job.
        assert left(rank | {"PMI_FD": str(file.fileno())}) == free
    assert left(rank | {"PMI_FD": "9999"}) == free
    assert capsys.readouterr().err.count("of rank 0 of 2, but not its connection") == 2


def test_launches_of_open_mpi_are_told_apart():
    rank = {"PMIX_NAMESPACE": "prterun-7@1", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_MCA_ess": "^singleton", "OMPI_MCA_btl": "self", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    child = rank | {mpi_start.MARK: f"1 {mpi_start.launch(rank)}"}
    other = child | {"PMIX_NAMESPACE": "prterun-8@1"}
    assert left({**other}) == other
    assert left({**child}).keys() == {"OMPI_MCA_btl", "OMPI_ALLOW_RUN_AS_ROOT", mpi_start.MARK}
    assert left({}) == {}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("language", ["tr_TR", "az_AZ"])
def test_mpi_starts_where_small_letters_differ(tmp_path, language):
    if not shutil.which("localedef"):
        pytest.skip("no localedef to make a locale")
    made = run_command(["localedef", "-i", language, "-f", "UTF-8",
                        str(tmp_path / f"{language}.UTF-8")])
    if made.returncode:
        pytest.skip(made.stderr)
    program = ("import locale, mm3d, os\nfrom mpi4py import MPI\n"    # one write, told whole
               "os.write(1, f'{MPI.COMM_WORLD.size} {locale.setlocale(locale.LC_CTYPE)}\\n'"
               ".encode())")
    done = run_ranks(2, "-c", program, LOCPATH=str(tmp_path), LC_ALL=f"{language}.UTF-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 2 * ["2", f"{language}.UTF-8"]    # it is as it was before


@pytest.mark.parametrize("name", ["POSIX", "xx_YY.UTF-8"])
def test_mpi_starts_in_any_other_locale(name):
    done = run_command([sys.executable, "-c", CHILD], LC_ALL=name)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
