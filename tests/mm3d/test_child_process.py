"""A child process ends in time, with all that it has started, and its output is kept."""
import os
import signal
import subprocess
import sys
import time

import pytest

from mm3d import child_process
from mm3d.child_process import ChildResult, run_child, start_child
from support import runs

# A child and a grandchild that print their numbers; neither ends when it is told to.
STUBBORN = ["bash", "-c", "trap '' TERM; sleep 1000 & echo $$ $!; wait"]
# A child that leaves a grandchild, which holds its standard output.
LEAVING = ["bash", "-c", "sleep 60 & echo $!"]


def wait_until(condition) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_status_and_output_are_returned(tmp_path):
    program = "cat; echo out; echo err >&2; echo $GIVEN; pwd; exit 3"
    found = run_child(["bash", "-c", program], env={**os.environ, "GIVEN": "this"}, cwd=tmp_path)
    assert found == ChildResult(3, f"out\nthis\n{tmp_path}\n", "err\n")
    log = tmp_path / "log"
    found = run_child(["bash", "-c", "echo out; echo err >&2; printf '\\xff'; kill -9 $$"],
                      log=log)
    assert found == ChildResult(-9, "out\nerr\n\ufffd", "")
    assert log.read_bytes() == b"out\nerr\n\xff"


@pytest.mark.parametrize("logged", [False, True])
def test_at_the_limit_the_whole_group_ends_and_its_output_is_kept(tmp_path, logged):
    """Also where neither child nor grandchild heeds SIGTERM."""
    for limit in (1, 5, 25):    # until both have printed before it, on a busy machine too
        found = run_child(STUBBORN, limit, tmp_path / "log" if logged else None, grace=0.2)
        if found.out:
            break
    child, grandchild = map(int, found.out.split())
    assert found.status is None and not runs(child) and wait_until(lambda: not runs(grandchild))


def test_what_outlives_a_child_that_ends_well_is_ended():
    begun = time.monotonic()
    found = run_child(LEAVING, 60)
    assert found.status == 0 and wait_until(lambda: not runs(int(found.out)))
    assert time.monotonic() - begun < 50    # nobody has waited for the grandchild


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_block_leaves_nothing_behind(error):
    with pytest.raises(error):
        with start_child(STUBBORN, grace=0.2) as child:
            pids = [int(word) for word in child.stdout.readline().split()]
            assert pids[0] == child.pid and all(map(runs, pids))
            raise error
    assert child.returncode == -signal.SIGKILL and wait_until(lambda: not any(map(runs, pids)))


def test_a_second_interrupt_ends_the_patience(monkeypatch):
    def interrupted(self, timeout=None):
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(self)

    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with start_child(STUBBORN, grace=60) as child:
            pids = [int(word) for word in child.stdout.readline().split()]
    assert wait_until(lambda: not any(map(runs, pids)))


def test_a_child_that_ends_itself_has_time_to_do_so(tmp_path):
    """As mpirun, which ends its ranks when it is told to end."""
    program = "trap 'touch done; exit 0' TERM; echo; while :; do sleep 0.02; done"
    with start_child(["bash", "-c", program], cwd=tmp_path) as child:
        child.stdout.readline()
    assert (tmp_path / "done").exists() and child.returncode == 0


def test_a_program_that_is_not_there_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_child([str(tmp_path / "nothing")])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of it")
def test_a_child_ends_with_a_parent_that_is_killed():
    source = (f"exec(open({child_process.__file__!r}).read())\n"
              "with start_child(['sleep', '60'], with_parent=True) as child:\n"
              "    print(child.pid, flush=True)\n    child.wait()\n")
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: not runs(pid))
