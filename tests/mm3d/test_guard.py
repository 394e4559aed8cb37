"""One rank that fails ends the job, which would wait for it for ever; nothing else does."""
import re

import pytest

from support import run_python, run_ranks

# Each rank but the failing one waits for it, so that a job which is not ended hangs.
PROGRAM = """
import atexit, builtins, sys
import mm3d
from mpi4py import MPI
comm = MPI.COMM_WORLD
atexit.register(lambda: print("rank", comm.rank, "has tidied up", flush=True))
if comm.rank == 2:
    {fails}
comm.Barrier()
"""
HOOK = 'sys.excepthook = lambda *what: print("a hook of its own:", what[1], flush=True)'


@pytest.mark.slow_but_first
@pytest.mark.parametrize("fails, status, said", [
    ('raise ValueError("no such shape")', 1, "ValueError: no such shape"),
    ("sys.exit(3)", 3, ""),
    ('builtins.exit("nothing to do")', 1, "nothing to do"),
    (f'{HOOK}; raise ValueError("odd")', 1, "a hook of its own: odd")])
def test_a_rank_that_fails_ends_the_job(fails, status, said):
    done = run_ranks(4, "-c", PROGRAM.format(fails=fails), timeout=60)
    text = done.stdout + done.stderr
    assert "killed: did not end" not in text, text
    assert done.returncode == status, text
    assert said in text and ("Traceback" in text) == ("ValueError:" in said), text
    assert re.findall(r"rank (\d) has tidied up", done.stdout) == ["2"], text


@pytest.mark.slow_but_first
@pytest.mark.parametrize("breaks", [
    "sys.stdout.close()", 'sys.stdout = open("/dev/full", "w"); print("lost")'])
def test_a_rank_that_cannot_write_ends_the_job(breaks):
    source = f"""
import sys
import mm3d
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    {breaks}
    sys.exit(3)
MPI.COMM_WORLD.Barrier()
"""
    done = run_ranks(2, "-c", source, timeout=60)
    text = done.stdout + done.stderr
    assert "killed: did not end" not in text and done.returncode == 3, text


def test_nothing_else_does():
    """An exit that is caught, an exception in a thread, at a prompt or of a child process."""
    source = """
import code, os, sys, threading
import mm3d
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.rank == 2:
    try:
        sys.exit(3)
    except SystemExit as error:
        assert error.code == 3 and str(error) == "3" and repr(error) == "SystemExit(3)"
        error.code = 4
        assert error.code == 4
    for wrong in (lambda: sys.exit(3), lambda: 1 / 0):
        thread = threading.Thread(target=wrong)
        thread.start()
        thread.join()
    prompt = code.InteractiveConsole()
    prompt.push("1 / 0")
    assert isinstance(sys.last_value, ZeroDivisionError)
    child = os.fork()
    if child == 0:
        os._exit(sys.exit.__self__.is_in_charge())
    assert os.waitpid(child, 0)[1] == 0
comm.Barrier()
print("all is well", flush=True)
sys.exit()
"""
    done = run_ranks(3, "-c", source, timeout=60)
    text = done.stdout + done.stderr
    assert done.returncode == 0 and done.stdout.count("all is well") == 3, text
    assert "Abort" not in text and text.count("ZeroDivisionError") == 2, text
    assert text.count("Traceback") == 2, text    # none of the exit in a thread


WHO = 'import mm3d, sys; print(type(getattr(sys.exit, "__self__", None)).__name__, flush=True)'


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks, before, variables, name", [
    (1, (), {}, "module"), (2, (), {}, "Guard"),
    (2, (), {"MM3D_ABORT": "0"}, "module"), (2, ("-m", "mpi4py"), {}, "module")])
def test_where_it_is_installed(ranks, before, variables, name):
    """Not in a job of one rank, where it is declined, and where mpi4py does the same."""
    run = (lambda *words, **env: run_ranks(ranks, *words, **env)) if ranks > 1 else run_python
    done = run(*before, "-c", WHO, **variables)
    assert done.returncode == 0, done.stderr
    assert "".join(done.stdout.split()) == name * ranks    # two ranks may write into one line


def test_ranks_that_leave_together_are_left_alone():
    """As those of bench do when all refuse the same arguments: no word of an aborted job."""
    done = run_ranks(2, "-m", "bench", "matmul", "--shape", "nonsense")
    assert done.returncode == 2 and "Abort" not in done.stderr, done.stderr
