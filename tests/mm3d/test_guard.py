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
    (f'{HOOK}; raise ValueError("odd")', 1, "a hook of its own: odd"),
    ("sys.stdout.close(); sys.exit(3)", 3, ""),
    ('sys.stdout = open("/dev/full", "w"); print("lost"); sys.exit(3)', 3, "")])
def test_a_rank_that_fails_ends_the_job(fails, status, said):
    """After its own functions for the exit; also one that cannot write."""
    done = run_ranks(4, "-c", PROGRAM.format(fails=fails), timeout=60)
    text = done.stdout + done.stderr
    assert "killed: did not end" not in text, text
    assert done.returncode == status, text
    if "stdout" not in fails:    # else nothing more can be printed
        assert said in text and ("Traceback" in text) == ("ValueError:" in said), text
        assert re.findall(r"rank (\d) has tidied up", done.stdout) == ["2"], text


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
    (2, (), {"MM3D_ABORT": "0"}, "module"), (2, ("-m", "mpi4py"), {}, "Guard")])
def test_where_it_is_installed(ranks, before, variables, name):
    """Not in a job of one rank, nor where it is declined."""
    run = (lambda *words, **env: run_ranks(ranks, *words, **env)) if ranks > 1 else run_python
    done = run(*before, "-c", WHO, **variables)
    assert done.returncode == 0, done.stderr
    assert "".join(done.stdout.split()) == name * ranks    # two ranks may write into one line


def test_ranks_that_leave_together_are_left_alone():
    """As those of bench do when all refuse the same arguments: no word of an aborted job."""
    done = run_ranks(2, "-m", "bench", "measure", "matmul", "--shape", "nonsense")
    assert done.returncode == 2 and "Abort" not in done.stderr, done.stderr


# Ranks that fail at once hear of each other, also where this machine is busy: they begin together,
# with all imported, and wait for twice the usual time.
TOGETHER = """
import sys
import mm3d
from mm3d import guard
from mpi4py import MPI
guard.EARLIER_SECONDS *= 2
comm = MPI.COMM_WORLD
for name in "scheme", "Mesh", "Transformer":
    getattr(mm3d, name)
comm.Barrier()
"""


def tell(ranks, source, *before):
    """Run ranks that fail, and return what they print; the job must end by itself."""
    done = run_ranks(ranks, *before, "-c", f"{TOGETHER}\n{source}\ncomm.Barrier()\n", timeout=90)
    text = done.stdout + done.stderr
    assert "killed: did not end" not in text and done.returncode, text
    return text


@pytest.mark.slow_but_first
@pytest.mark.parametrize("source, said", [
    ('mm3d.scheme("3d", comm, grid=(2, 2, 3))', "ValueError:"),
    ('mm3d.Mesh(comm, data=3, scheme="serial")', "ValueError:"),
    ('mm3d.Transformer(mm3d.scheme("1d", comm), layers=1, hidden=5, heads=2, batch=1, seq=1)',
     "ValueError:"),
    ('raise ValueError(f"not {object()}")', "ValueError:"),
    ('sys.exit("no such file")', "no such file")])
@pytest.mark.parametrize("before", [(), ("-m", "mpi4py")])
def test_an_error_of_all_ranks_is_printed_once(source, said, before):
    text = tell(4, source, *before)
    assert len(re.findall(f"^{said}", text, re.M)) == 1, text
    assert text.count("Traceback") == (said == "ValueError:"), text
    assert len(text.splitlines()) < 40, text


@pytest.mark.slow_but_first
@pytest.mark.parametrize("breaks", ["sys.stderr.close()", "sys.stderr = None"])
@pytest.mark.parametrize("fails", ['raise ValueError("the same")', 'sys.exit("the same")'])
def test_a_rank_that_cannot_write_leaves_an_error_to_another(breaks, fails):
    text = tell(3, f"""
if comm.rank == 0:
    {breaks}
{fails}
""")
    assert len(re.findall("^(ValueError: )?the same", text, re.M)) == 1, text


@pytest.mark.slow_but_first
def test_an_interrupt_is_a_word():
    """Ctrl-C finds ranks at other lines: no tracebacks, which differ, and the shell's status."""
    text = tell(3, """
try:
    raise KeyboardInterrupt(comm.rank)
except KeyboardInterrupt as error:
    guard.end_job(error)
""")
    assert text.count("interrupted") == 1 and "Traceback" not in text, text


def test_errors_that_differ_are_all_printed():
    """Each with its rank and its whole traceback; those that are the same once."""
    text = tell(4, """
guard.FLUSH_SECONDS *= 3
def fail(what):
    raise ValueError(what)
fail("odd" if comm.rank % 2 else f"even {comm.rank}")
""")
    assert [text.count(f"ValueError: {what}") for what in ("odd", "even 0", "even 2")
            ] == [1, 1, 1], text
    assert text.count("Traceback") == 3 and text.count("in fail") == 3, text
    assert {"0", "2"} < set(re.findall(r"^rank (\d) of 4;", text, re.M)), text


@pytest.mark.slow
def test_ranks_that_fail_long_after_the_first_say_nothing():
    text = tell(3, """
import time
time.sleep({2: 0, 0: 1.5, 1: 2.0}[comm.rank])
raise ValueError("the same")
""")
    assert text.count("ValueError: the same") == 1 and "rank 2 of 3;" in text, text


def test_an_error_of_the_program_itself_on_all_ranks_is_printed_once():
    done = run_ranks(2, "-c", """
from bench import verbs, __main__ as program
from mpi4py import MPI
verb = verbs.load_verb("measure gemm")
def run(*_):
    MPI.COMM_WORLD.Barrier()
    raise ZeroDivisionError("a mistake")
verb.run = run
program.main(["measure", "gemm", "--sizes", "8"])
""")
    text = done.stdout + done.stderr
    assert done.returncode and text.count("ZeroDivisionError: a mistake") == 1, text
