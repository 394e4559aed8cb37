"""The harness judged by itself: small pytest runs on four ranks that go wrong on purpose; and what
tests replace."""
import ast
import re
import shutil
import threading
import time

import pytest

from support import (ROOT, clean_environment, kill_running, run_command, run_python, run_ranks,
                     runs)


@pytest.fixture
def write(tmp_path):
    """Write a file of tests beside what pytest needs to run it."""
    for file in ("setup.cfg", "tests/conftest.py", "tests/tools/support.py"):
        shutil.copy(ROOT / file, tmp_path)

    def write(body: str) -> None:
        (tmp_path / "test_it.py").write_text("import sys, time\nimport pytest\n"
                                             "from mpi4py import MPI\n" + body)
    return write


@pytest.fixture
def run(tmp_path, write):
    """Run a file of tests under pytest on four ranks, to its end."""
    def run(body: str, *options: str, limit: float = 60, ranks: int = 4):
        write(body)
        argv = "-m", "pytest", "-rs", "--color=no", *options, "test_it.py"
        done = run_ranks(ranks, *argv, cwd=tmp_path, MM3D_TEST_TIMEOUT=str(limit))
        done.text = done.stdout + done.stderr
        assert "killed:" not in done.stderr, done.text    # it has ended by itself
        return done
    return run


def on_four(*lines: str) -> str:
    """The source of a test on four ranks."""
    return "\n    ".join(["@pytest.mark.ranks(4)\ndef test_it(comm):", *lines]) + "\n"


def test_one_failure_fails_all_and_passes_are_reported_once(run):
    """The run goes on after it, and temporary folders are shared."""
    done = run("def test_alone(tmp_path): assert MPI.COMM_WORLD.rank == 0\n"
               + on_four("print('said by', comm.rank)", "assert comm.rank != 2", "comm.rank")
               + "@pytest.mark.ranks(1, 2, 4)\n"
                 "def test_counts(comm, shared_tmp_path):\n"
                 "    (shared_tmp_path / str(comm.rank)).touch()\n"
                 "    comm.barrier()\n"
                 "    assert len(list(shared_tmp_path.iterdir())) == comm.size\n")
    assert done.returncode == 1, done.text
    assert done.stdout.count("test session starts") == 1
    assert "1 failed, 4 passed" in done.stdout
    assert "failed on rank 2 of 4: assert 2 != 2" in done.stdout
    assert "said by 2" in done.stdout and "said by 1" not in done.stdout


def test_one_process_runs_what_one_rank_can(tmp_path, write):
    write("@pytest.mark.ranks(1, 4)\ndef test_it(comm): assert comm.size == 1\n")
    done = run_python("-m", "pytest", "-rs", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert "needs mpirun -n 4" in done.stdout


@pytest.mark.slow
def test_two_processes_share_the_tests_and_a_hang_ends_both(tmp_path, run):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    body = "def test_one(): pass\ndef test_two(): assert 1 == 2\n"
    assert run(body, "-n", "2").stderr.count("-n 2 is for pytest without mpirun") == 1
    done = run_python("-m", "pytest", "-n", "2", cwd=tmp_path)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    with (tmp_path / "test_it.py").open("a") as file:
        file.write("def test_three(): time.sleep(1000)\n")
    done = run_python("-m", "pytest", "-n", "2", cwd=tmp_path, MM3D_TEST_TIMEOUT="5")
    assert done.returncode == 1 and "crashed while running" in done.stdout, done.stdout
    assert "test_three: not finished within 5 s" in done.stderr
    assert "worker restarting disabled" in done.stdout


@pytest.mark.slow
def test_what_one_rank_runs_can_be_left_out(run):
    done = run("def test_alone(): pass\n"
               "@pytest.mark.ranks(1, 2, 4)\ndef test_it(comm): assert comm.size > 1\n",
               "--several-ranks")
    assert done.returncode == 0, done.text
    assert "2 passed, 1 deselected" in done.stdout    # the other is not even made


def test_what_is_slow_needs_an_option(run):
    """What is chosen depends on no number of ranks, so one is enough to collect it."""
    body = ("@pytest.mark.slow\ndef test_slow(): pass\n"
            "@pytest.mark.parametrize('n', range(2))\n"
            "@pytest.mark.ranks(1, 2, slow=(3, 4))\ndef test_it(comm, transport, n): pass\n"
            "@pytest.mark.every_transport\n@pytest.mark.parametrize('n', range(2))\n"
            "@pytest.mark.ranks(2)\ndef test_both(comm, transport, n): pass\n"
            "@pytest.mark.ranks(2, 4, first=(4,))\n@pytest.mark.parametrize('n', range(3))\n"
            "def test_first(comm, n): assert comm.size == 2 or n == 0\n")
    # One rank needs one transport alone, several ranks both, but shared memory only once.
    done = run(body, "--collect-only", ranks=1)
    assert done.returncode == 0, done.text
    assert "12/27 tests collected (15 deselected)" in done.stdout
    assert "10 slow tests are left out: --slow runs them too" in done.stdout
    done = run(body, "--slow", "-m", "slow", "--collect-only", ranks=1)
    assert "10/27 tests collected (17 deselected)" in done.stdout, done.text
    assert done.stdout.count("test_first[4ranks-") == 2 and "left out" not in done.stdout


def test_a_hang_is_ended_and_every_rank_says_where_it_was(run):
    done = run(on_four("if comm.rank == 1:", "    time.sleep(1000)", "comm.barrier()"), limit=3)
    assert done.returncode != 0
    for rank, line in enumerate(("comm.barrier()", "time.sleep(1000)") + 2 * ("comm.barrier()",)):
        assert re.search(rf"rank {rank} of 4: test_it.py::test_it\[4ranks\]: not finished within "
                         rf"3 s, at\n[^=]*\n +{re.escape(line)}", done.stderr), done.text
    assert "pluggy" not in done.stderr


@pytest.mark.slow
def test_a_hang_of_one_rank_is_told_from_waiting(run):
    body = on_four("if comm.rank == 1:", "    time.sleep(1000)")
    done = run("def test_bad(): assert 1 == 2\n" + body, limit=5)
    assert done.returncode != 0
    assert len(re.findall("rank [023] of 4: .* passed, and the other ranks do not come",
                          done.stderr)) == 3, done.text
    assert re.search("rank 1 of 4: .* not finished within 5 s", done.stderr)
    assert "failed earlier: test_it.py::test_bad" in done.stderr


# What goes wrong on ranks, whether the run fails, and patterns of what it says.
OUTCOMES = {
    "a failure ends the others that wait for it": (
        on_four("assert comm.rank != 2", "comm.barrier()"), True,
        r"rank 2 of 4: test_it.py::test_it\[4ranks\]: failed.*assert 2 != 2"),
    "an exit": (on_four("if comm.rank == 3:", "    sys.exit(3)"), True,
                "failed on rank 3 of 4: SystemExit: 3"),
    "pytest's exit": (on_four("if comm.rank == 1:", "    pytest.exit('enough')",
                              "comm.barrier()"), True, "rank 1 of 4: stopped: .*enough"),
    "a skip on all": (on_four("pytest.skip('no reason')"), False, "1 skipped"),
    "a skip on one": (on_four("if comm.rank == 1:", "    pytest.skip('no reason')"), True,
                      "skipped on rank 1 of 4"),
    "the marker limit overrules the variable": (
        "@pytest.mark.limit(30)\ndef test_it(): time.sleep(16)\n", False, "1 passed"),
    "a fixture": (    # of a module is undone by rank 3, idle
        "@pytest.fixture\ndef odd(comm):\n    assert comm.rank != 3\n    yield\n"
        "    assert comm.rank != 1\n"
        "@pytest.mark.ranks(1, 2, 4)\ndef test_it(comm, odd): pass\n"
        "@pytest.fixture(scope='module')\ndef whole():\n    yield\n"
        "    assert MPI.COMM_WORLD.rank != 3, 'undone'\n"
        "@pytest.mark.ranks(4)\ndef test_whole(comm, whole): pass\n"
        "@pytest.mark.ranks(2)\ndef test_idle(comm): pass\n", True,
        "failed on rank 3 of 4", "failed on rank 1 of 2",
        r"_ test_idle\[2ranks\] _+\nfailed on rank 3 of 4: AssertionError: undone"),
    "different tests": (
        "@pytest.mark.parametrize('n', range(MPI.COMM_WORLD.rank // 3 + 1))\n"
        "def test_it(n): pass\n", True, "the ranks have found different tests; here 2"),
    "the marker without the fixture": (
        "@pytest.mark.ranks(4)\ndef test_it(): pass\n", True,
        "the marker `ranks` is for tests that use the fixture `comm`")}


@pytest.mark.slow
@pytest.mark.parametrize("what", OUTCOMES)
def test_what_goes_wrong_on_some_ranks_is_told_of_all(run, what):
    body, fails, *patterns = OUTCOMES[what]
    done = run(body, limit=15)
    assert bool(done.returncode) == fails and "not finished" not in done.stderr, done.text
    assert all(re.search(one, done.text, re.DOTALL) for one in patterns), done.text


def test_a_launcher_of_another_mpi_is_refused(tmp_path, write):
    write("def test_it(): pass\n")
    done = run_python("-m", "pytest", cwd=tmp_path, OMPI_COMM_WORLD_LOCAL_SIZE="4")
    assert done.returncode == 2
    assert "started 4 ranks, each alone in its world" in done.stdout + done.stderr


def test_a_late_program_is_killed_and_says_so():
    done = run_command(["sh", "-c", "echo here; exec sleep 1000"], timeout=2)
    assert done.returncode != 0
    assert done.stdout == "here\n"
    assert "killed: did not end within 2 s" in done.stderr


def test_killing_mpirun_ends_its_ranks(tmp_path):
    source = (f"import mm3d, os, pathlib, time\nfrom mpi4py import MPI\n"
              f"(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()\ntime.sleep(1000)\n")
    pids: set[str] = set()

    def kill_once_started():
        while len(pids) < 3:
            time.sleep(0.1)
            pids.update(file.name for file in tmp_path.iterdir())
        kill_running()
    threading.Thread(target=kill_once_started, daemon=True).start()
    done = run_ranks(3, "-c", source)
    assert done.returncode != 0 and "killed" not in done.stderr
    end = time.monotonic() + 60
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert len(pids) == 3 and not any(map(runs, pids))


def test_a_clean_environment_has_no_trace_of_a_launcher(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("MPI_LOCALNRANKS", "8")
    env = clean_environment(MORE="1")
    assert not {"PMI_RANK", "MPI_LOCALNRANKS"} & env.keys()
    assert env["MORE"] == "1"


# Replacements of a name of the project, or of an item in its tables, by a MonkeyPatch, under any
# name of it: they may only get fewer.
REPLACED = 60
# Kernels have one place where all are launched, also on a GPU, whose functions are kept.
PRIVATE = ["_launch", "_launch"]


def replaced_names(source: str) -> tuple[list[str], list[str]]:
    """Names of the project that a file of tests replaces, and of all private ones."""
    tree, project = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for one in node.names:
                place = f"{getattr(node, 'module', None) or one.name}"
                if place.partition(".")[0] in ("mm3d", "bench", "jobs"):
                    project.add((one.asname or one.name).partition(".")[0])
    found, private = [], []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(
                (".setattr", ".setitem"))):    # of the fixture, whatever its name is
            continue
        owner, name = [*node.args, None][:2]
        text = owner.value if isinstance(owner, ast.Constant) else getattr(name, "value", "")
        word = str(text).rpartition(".")[2]
        if re.match("_[^_]", word):
            private.append(word)
        names = {one.id for one in ast.walk(owner) if isinstance(one, ast.Name)}
        if isinstance(owner, (ast.Constant, ast.JoinedStr)) or names & project:
            found.append(word)
    return found, private


def test_what_tests_replace_is_seen():
    source = ("from bench import a\nimport os\nmonkeypatch.setattr(a.B, '_c', 1)\n"
              "monkeypatch.setattr('mm3d.x.y', 1)\nmonkeypatch.setattr(os, 'write', 1)\n"
              "patch.setattr(a, 'd', 1)\npatch.setattr('mm3d.e', value=1)\nsetattr(a, 'f', 1)\n"
              "patch.setitem(a.g, 'h', 1)\npatch.setitem(os.environ, 'i', '1')\n")
    assert replaced_names(source) == (["_c", "y", "d", "e", "h"], ["_c"])


def test_tests_replace_few_names():
    """What a test hands in by a parameter, a variable or a file survives another inside."""
    found = [replaced_names(path.read_text()) for path in (ROOT / "tests").rglob("*.py")]
    private = [name for _, names in found for name in names]
    assert private == PRIVATE
    assert sum(len(names) for names, _ in found) <= REPLACED
