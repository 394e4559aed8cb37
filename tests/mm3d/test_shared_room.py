"""What MPICH takes of /dev/shm, from made-up sizes and from a real folder that is small."""
import contextlib
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mm3d import launcher, shared_room
from mm3d.shared_room import CELLS, NO_SHARE, TRANSPORTS
from support import run_command

CONTAINER = 64 << 20    # bytes of /dev/shm in a container, by default
ALONE, FEW = {TRANSPORTS: NO_SHARE}, {CELLS: "16"}
PROGRAM = """
import mm3d, json, os
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.allreduce(1) == comm.size and comm.rank == 0:
    print(json.dumps([comm.size, os.environ.get("MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS", "")]))
"""


@pytest.fixture
def folder(monkeypatch, tmp_path_factory):
    """Give /dev/shm a size, and MPICH the form in which PyPI has it."""
    prefix = tmp_path_factory.mktemp("prefix")
    (prefix / "lib" / "mpich").mkdir(parents=True)
    for name in ("libmpi.so.12", "mpich/libucp.so.0", "mpich/libfabric.so.1"):
        (prefix / "lib" / name).touch()
    monkeypatch.setattr(sys, "exec_prefix", str(prefix))

    def sized(total, free=None):
        monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(
            f_frsize=1, f_blocks=total, f_bavail=total if free is None else free))
    return sized


@pytest.mark.parametrize("total, ranks, more, chosen", [
    (16 << 30, 64, {}, ALONE),
    (CONTAINER, 16, {}, ALONE),
    (CONTAINER, 64, {}, ALONE | FEW),
    (1 << 20, 64, {}, ALONE | FEW),            # too few all the same
    (CONTAINER, 64, {TRANSPORTS: "tcp"}, FEW),    # the user has chosen
    (CONTAINER, 64, {CELLS: "64"}, ALONE),
])
def test_the_leanest_start_that_is_needed(folder, total, ranks, more, chosen):
    folder(total)
    assert shared_room.lean_settings(ranks, more) == chosen


@pytest.mark.parametrize("total, ranks, more, said", [
    (16 << 30, 64, {}, ""),
    (CONTAINER, 64, FEW, ""),
    (CONTAINER, 64, {}, "64 ranks of MPICH on one node need 67.8 MB of shared memory, and "
                        "/dev/shm has 67.1 of 67.1 MB free: end other jobs, make it larger "
                        "(docker run --shm-size=1g), or start fewer ranks"),
    (CONTAINER, 16, {CELLS: "256"}, "need 67.3 MB"),
    (CONTAINER, 16, {CELLS: "240"}, ""),
    (CONTAINER, 1024, FEW, "--shm-size=3g"),
    (0, 1, FEW, "1 rank of MPICH on one node needs 0.3 MB of shared memory, and /dev/shm is not "
                "there, or cannot be written"),
    (0, 1, {CELLS: "many"}, ""),               # not known
    (0, 1, {CELLS: "9" * 5000}, ""),
])
def test_ranks_that_cannot_start(folder, total, ranks, more, said):
    folder(total)
    found = shared_room.lack(ranks, more)
    assert said in found and bool(found) == bool(said)


@pytest.mark.parametrize("free, more, said", [
    (3 << 20, {}, "8 ranks of MPICH on one node need 8.5 MB of shared memory, and {} has "
                  "3.1 of 1073.7 MB free: end other jobs"),
    (3 << 20, FEW, ""),
    (1 << 20, FEW, "need 2.2 MB"),
    (20 << 20, {}, ""),
])
def test_the_first_rank_of_a_node_counts_what_other_jobs_have_left(folder, tmp_path, free, more,
                                                                   said):
    folder(1 << 30, free)
    found = shared_room.lack(8, more, str(tmp_path), first=True)
    assert said.format(tmp_path) in found and bool(found) == bool(said)
    assert not shared_room.lack(8, more, str(tmp_path))


def test_the_first_rank_counts_room_that_ranks_of_its_job_have_taken(folder, tmp_path):
    """They may be faster, and would wait for it for ever if it ended."""
    folder(9 << 20, 8 << 20)
    said = shared_room.lack(8, {}, str(tmp_path), first=True)
    assert "need 8.5 MB" in said
    with sibling(tmp_path / "mpich_shm_1_0", 1 << 20):
        assert shared_room.lack(8, {}, str(tmp_path), first=True) == ""
        assert shared_room.bytes_of_siblings(str(tmp_path / "another")) == 0
    assert shared_room.lack(8, {}, str(tmp_path), first=True) == said


@contextlib.contextmanager
def sibling(path, size):
    """Have another child of this process' parent, who maps a file."""
    program = ("import mmap, sys; file = open(sys.argv[1], 'w+b'); file.write(bytes({0})); "
               "file.flush(); found = mmap.mmap(file.fileno(), {0}); print(flush=True); input()")
    process = subprocess.Popen([sys.executable, "-c", program.format(size), str(path)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getppid", os.getpid)
        yield
    process.communicate("\n")


def test_what_other_jobs_have_left_is_said_of_ranks_that_crashed(folder):
    folder(CONTAINER, 3 << 20)
    assert shared_room.hint(16).startswith(
        "/dev/shm has 3.1 MB free, of which MPI may need more for 16 ranks: end other jobs, "
        "make it larger")
    folder(1 << 30)
    assert shared_room.hint(16) == ""


def test_a_folder_that_is_missing_has_no_room(tmp_path):
    assert shared_room.free_bytes(str(tmp_path / "missing")) == (0, 0)
    total, free = shared_room.free_bytes(str(tmp_path))
    assert total >= free > 0


def test_another_mpi_is_not_known():
    assert not shared_room.is_from_pypi({"MPI4PY_LIBMPI": "libmpi.so.40"})


def in_small_memory(size, *command, taken=0):
    """Run a command with a /dev/shm of its own, of which other jobs have taken some bytes."""
    if not shared_room.is_from_pypi():
        pytest.skip("the MPI is not the MPICH of PyPI")
    mount = ["unshare", "-m", "sh", "-c",
             f"mount -t tmpfs -o size={size} tmpfs /dev/shm && "
             f'head -c {taken} /dev/zero > /dev/shm/taken && exec "$@"', "sh"]
    if not shutil.which("unshare") or run_command([*mount, "true"]).returncode:
        pytest.skip("no small /dev/shm can be mounted here")
    return run_command([*mount, *command])


@pytest.mark.slow
@pytest.mark.parametrize("ranks, cells", [(8, ""), (16, ""), (64, "16")])
def test_ranks_start_in_a_container(ranks, cells):
    done = in_small_memory("64m", *launcher.mpirun_command(ranks, sys.executable, "-c", PROGRAM))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [ranks, cells]


@pytest.mark.parametrize("kilobytes", [4300, *(
    pytest.param(n, marks=pytest.mark.slow) for n in (16384, 19000, 24064, 28000))])
def test_ranks_start_with_what_other_jobs_have_left(tmp_path, kilobytes):
    taken = 100 * 1024 - kilobytes
    done = in_small_memory("100m", *launcher.mpirun_command(4, sys.executable, "-c", PROGRAM),
                           taken=taken * 1024)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [4, ""]


def test_a_first_rank_that_is_late_finds_the_room_of_its_job(tmp_path):
    late = "import os, time\nif os.environ['PMI_RANK'] == '0':\n    time.sleep(2)\n" + PROGRAM
    need = -(-shared_room._taken(4) // 4096) * 4096
    done = in_small_memory(str(2 * need), *launcher.mpirun_command(4, sys.executable, "-c", late),
                           taken=need)
    assert done.returncode == 0 and json.loads(done.stdout) == [4, ""], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks, cells", [(1, 64), (2, 64), (2, 16), (8, 64), (8, 16), (8, 7),
                                          (36, 64), (36, 16), (64, 16), (64, 64)])
def test_ranks_start_where_the_need_is_met_and_no_more(tmp_path, monkeypatch, ranks, cells):
    monkeypatch.setenv(CELLS, str(cells))
    command = launcher.mpirun_command(ranks, sys.executable, "-c", PROGRAM)
    need = -(-shared_room._taken(ranks, cells) // 4096) * 4096
    done = in_small_memory(str(need), *command)
    assert done.returncode == 0 and json.loads(done.stdout) == [ranks, str(cells)], done.stderr
    done = in_small_memory(str(need - 4096), *command)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr


def test_the_ranks_that_cannot_are_told_so_once():
    done = in_small_memory("512k", *launcher.mpirun_command(2, sys.executable, "-c", PROGRAM))
    assert done.returncode == 2
    assert done.stderr.count("error: 2 ranks of MPICH") == 1 and "Traceback" not in done.stderr
    done = in_small_memory("512k", sys.executable, "-m", "bench", "doctor", "--ranks", "2")
    assert "launcher" in done.stdout and "--shm-size=1g" in done.stdout, done.stdout
