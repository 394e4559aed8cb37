"""pytest on one rank or on many: `pytest` and `mpirun -n 8 pytest` run the same tests.  With
`pytest -n 2` (pytest-xdist) two processes share those of one rank.

A test says with `@pytest.mark.ranks(1, 4, 8)` on how many ranks it runs, once for each, and gets
the first n ranks of the world as the fixture `comm`; the others do not run it but learn the
verdict. A test without the marker runs on rank 0 alone. After each test all ranks meet: what fails
on one fails on all, and rank 0 reports. A rank that does not come to the meeting in time
(MM3D_TEST_TIMEOUT in seconds, or the marker `limit`) ends the run on all ranks, and each says
where it was.

Tests with the marker `slow` need the option --slow. `ranks(1, 8, slow=(4, 6))` gives it to some
numbers of ranks, `ranks(1, 4, 8, first=(8,))` to all but the first case of a test on 8 ranks,
`slow_but_first` to all but the first case on any. Of the cases that take the fixture `transport`
the first one alone also runs by shared memory, with --slow too; `every_transport` makes the others
slow ones.
"""
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: the threads of one would wait, spinning, for those of the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import mm3d    # noqa: E402, F401  before mpi4py: sets variables that MPI reads when it starts

import functools
import gc
import inspect
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from mm3d import launcher
from support import LIMIT, ROOT, gpu_problem, kill_running, use_only

# Tests that mean another transport, or both, say so.
os.environ.setdefault("MM3D_TRANSPORT", "mpi")
launcher.PAUSE = 1e-3         # a barrier of 8 ranks takes three; no figure of a test is published
WORLD = MPI.COMM_WORLD
MEETING = WORLD.Dup()         # no message of a test can be taken for one of the meeting's
# The files whose slow tests wait longest, for jobs and links; with --slow they come first.
WAITING = ("test_slurm.py", "test_slurm_limits.py", "test_slurm_placement.py",
           "test_slurm_hosts.py", "test_faults.py", "test_kills.py", "test_wire_bytes.py")
# Those whose other tests take longest: of these no worker has the last one while others idle.
LONGEST = ("test_training_plans.py", "test_user_settings.py", "test_bench.py", "test_harness.py",
           "test_device.py", "test_shared_room.py", "test_guard.py", "test_figures.py",
           "test_pictures.py", "test_report.py", "test_validate.py", "test_full_disks.py",
           "test_dump.py", "test_meshes.py", "test_mpi_start.py", "test_doctor.py")
GRACE = min(LIMIT / 3, 10)    # seconds that a failed rank waits: it may be all the others wait for
STDERR = os.dup(2)            # replaced in pytest_configure: pytest captures 2 while tests run


def say(text: str) -> None:
    """Write to the real stderr, from any rank and any thread, in one piece."""
    os.write(STDERR, f"\n=== rank {WORLD.rank} of {WORLD.size}: {text.rstrip()}\n".encode())


def abort() -> None:
    """End the run on all ranks, once they have spoken and the launcher has passed it on."""
    kill_running()
    time.sleep(2)
    WORLD.Abort(1)


class Watch:
    """Ends the run on all ranks when `task`, or the meeting after it, takes too long."""

    earlier: list[str] = []    # failures, which pytest would have shown at the end

    def __init__(self, task: str, seconds: float = LIMIT):
        self.task, self.seconds, self.verdict, self.timers = task, seconds, None, []
        self.start(seconds)

    def start(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.give_up)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def finished(self, outcome: str, text: str) -> None:
        self.verdict = f"{outcome}, and the other ranks do not come\n{text}"
        if outcome == "failed":
            self.start(GRACE)

    def close(self) -> None:
        for timer in self.timers:
            timer.cancel()

    def give_up(self) -> None:
        try:
            for text in self.earlier if WORLD.rank == 0 else ():
                say(f"failed earlier: {text}")
            say(f"{self.task}: {self.verdict or self.place()}")
        finally:
            abort()

    def place(self) -> str:
        """Where the test is: the main thread's stack, below pytest's own frames."""
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        own = [i for i, at in enumerate(stack) if re.search(r"\b(_pytest|pluggy)\b", at.filename)]
        stack = traceback.StackSummary.from_list(stack[max(own, default=-1) + 1:] or stack)
        return f"not finished within {self.seconds:g} s, at\n{''.join(stack.format())}"


def receive(source: int) -> object:
    """Receive an object, asleep while waiting: ranks may share cores."""
    pause = 1e-4
    while not MEETING.Iprobe(source):
        time.sleep(pause)
        pause = min(1.2 * pause, 3e-3)
    return MEETING.recv(source=source)


def meet(mine: object) -> list:
    """Exchange one object with all ranks: rank 0 hears all and tells all."""
    if WORLD.rank:
        MEETING.send(mine, 0)
        return receive(0)
    everyone = [mine, *map(receive, range(1, WORLD.size))]
    for rank in range(1, WORLD.size):
        MEETING.send(everyone, rank)
    return everyone


def parameters(item: pytest.Item) -> dict[str, object]:
    """Names and values of a test's parameters."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def rank_count(item: pytest.Item) -> int:
    """On how many ranks a test runs."""
    return parameters(item).get("comm", 1)


@functools.cache
def first_ranks(n: int) -> MPI.Intracomm:
    """The first n ranks of the world: one communicator for the session, as MPI has few."""
    return WORLD.Create_group(WORLD.group.Incl(range(n)))


@pytest.fixture
def comm(request) -> MPI.Intracomm:
    """The ranks that run this test."""
    return first_ranks(request.param)


@pytest.fixture(params=["mpi", "shared"])
def transport(request, monkeypatch) -> str:
    """How blocks travel; what holds for one must hold for the other."""
    monkeypatch.setenv("MM3D_TRANSPORT", request.param)
    return request.param


@pytest.fixture
def no_backends():
    """No array library is in use yet; those of other tests are back after this one."""
    with use_only():
        yield


@pytest.fixture
def compiled_cupy(monkeypatch, no_backends):
    """Put the stand-in in CuPy's place, with kernels that g++ compiles; skip without g++."""
    import fakelibs    # many tests need none of it
    if not shutil.which("g++"):
        pytest.skip("no g++ to compile kernels")
    fakelibs.replace_cupy(monkeypatch)


@pytest.fixture
def shared_tmp_path(comm, tmp_path):
    """Rank 0's `tmp_path`, on all the ranks that run this test."""
    return comm.bcast(tmp_path)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if launcher.local_ranks() > WORLD.size == 1:
        pytest.exit(f"the launcher started {launcher.local_ranks()} ranks, each alone in its "
                    "world: its MPI is not the one that mpi4py uses", returncode=2)
    os.dup2(sys.__stderr__.fileno(), STDERR)
    if WORLD.rank:
        config.pluginmanager.unregister(name="terminalreporter")


def deals_out(config) -> bool:
    """Whether this process runs no test itself, but hands them to workers (``pytest -n 2``)."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Choose for ``pytest -n 2`` what suits these tests, whatever the command line leaves open."""
    if deals_out(config):
        if launcher.local_ranks() > 1:
            if WORLD.rank == 0:
                say(f"-n {config.option.numprocesses} is for pytest without mpirun")
            return pytest.ExitCode.USAGE_ERROR
        if config.option.dist == "no":
            config.option.dist = "loadfile"    # fixtures of a module are made once
            # The files in tests/bench take longest, and come first.
            config.option.loadscopereorder = False
        if config.option.maxworkerrestart is None:
            config.option.maxworkerrestart = "0"    # what has hung would hang again
        if not sys.dont_write_bytecode:    # else each worker would compile the whole for itself
            subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "2", *(
                str(ROOT / name) for name in ("mm3d", "bench", "jobs", "tests/tools"))])


def pytest_sessionstart(session):
    if not deals_out(session.config):
        # Where workers share few cores, far longer than a test: it only guards against hanging.
        session.watch = Watch("collecting the tests", max(5 * LIMIT, 60))
        gc.disable()    # nearly all that is made until they are collected stays


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    if "comm" in metafunc.fixturenames:
        counts = marker.args if marker else (1,)
        slow = marker.kwargs.get("slow", ()) if marker else ()
        metafunc.parametrize("comm", indirect=True, argvalues=[
            *(pytest.param(n, id=f"{n}ranks") for n in counts),
            *(pytest.param(n, id=f"{n}ranks", marks=pytest.mark.slow) for n in slow)])
    elif marker:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: the marker `ranks` is for tests "
                                "that use the fixture `comm`")


def pytest_addoption(parser):
    parser.addoption("--several-ranks", action="store_true", help=(
        "leave out what one rank runs: for `mpirun -n 8 pytest` right after `pytest`"))
    parser.addoption("--slow", action="store_true", help=(
        "also run the tests with the marker `slow`; with `-m slow` these alone"))


def leave_out(config, items, unwanted) -> int:
    """Deselect the items for which `unwanted` is true; their number."""
    out = [item for item in items if unwanted(item)]
    left = set(items).difference(out)
    items[:] = [item for item in items if item in left]
    config.hook.pytest_deselected(items=out)
    return len(out)


def pytest_ignore_collect(collection_path, config):
    """With --several-ranks, spare all ranks the import of files without a test for them."""
    if config.getoption("several_ranks") and collection_path.suffix == ".py":
        return True if not re.search(r"\bmark\.ranks\b", collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """With --several-ranks, spare all ranks the making of tests without the marker `ranks`."""
    if (collector.config.getoption("several_ranks") and inspect.isfunction(obj)
            and name.startswith("test_") and not collector.get_closest_marker("ranks")):
        marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
        return None if "ranks" in marks else []


def by_shared_memory(item: pytest.Item) -> bool:
    """Whether a test takes the fixture `transport` and is the case of shared memory."""
    return parameters(item).get("transport") == "shared"


def is_shown_by_another(item: pytest.Item, seen: set[tuple]) -> bool:
    """Whether a case by shared memory shows nothing: one rank sends nothing, and beside the first
    case the others differ in what the transport is used for, which they show by MPI."""
    test = item.path, getattr(item, "originalname", ""), rank_count(item)
    if not by_shared_memory(item):
        return False
    before = test in seen and not item.get_closest_marker("every_transport")
    seen.add(test)
    return rank_count(item) == 1 or before


def pytest_collection_modifyitems(config, items):
    if config.getoption("several_ranks"):
        leave_out(config, items, lambda item: rank_count(item) == 1)
    first = WAITING if config.getoption("slow") else LONGEST
    if config.getoption("slow") or hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in first)
    seen: set[tuple] = set()
    leave_out(config, items, lambda item: is_shown_by_another(item, seen))
    seen.clear()
    for item in items:
        n, marker = rank_count(item), item.get_closest_marker("ranks")
        shared, first_only = by_shared_memory(item), marker and n in marker.kwargs.get("first", ())
        if first_only or shared or item.get_closest_marker("slow_but_first"):
            test = item.path, item.originalname, n, shared and not first_only
            if test in seen:
                item.add_marker(pytest.mark.slow)
            elif not item.get_closest_marker("slow"):
                seen.add(test)
    config.slow_left_out = 0 if config.getoption("slow") else leave_out(
        config, items, lambda item: item.get_closest_marker("slow"))
    for item in items:
        n = rank_count(item)
        if n > WORLD.size:
            item.add_marker(pytest.mark.skip(reason=f"needs mpirun -n {n}"))
        if item.get_closest_marker("gpu") and gpu_problem():
            item.add_marker(pytest.mark.skip(reason=gpu_problem()))


def pytest_report_collectionfinish(config):
    if getattr(config, "slow_left_out", 0):    # not there when nothing was collected
        return f"{config.slow_left_out} slow tests are left out: --slow runs them too"


def pytest_collection_finish(session):
    gc.freeze()    # modules and tests stay: what tests collect is not searched for in them
    gc.set_threshold(10_000)    # with Python's 700 it takes up to a tenth of the time
    gc.enable()
    if deals_out(session.config):
        return
    mine = session.testsfailed, [item.nodeid for item in session.items]
    session.watch.finished("done", "")
    everyone = meet(mine)
    session.watch.close()
    if everyone.count(mine) < WORLD.size:
        errors, names = mine
        say(f"the ranks have found different tests; here {len(names)} and {errors} errors")
        abort()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    n = rank_count(item)
    marker = item.get_closest_marker("limit")
    watch = Watch(item.nodeid, *(marker.args if marker else ()))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if WORLD.rank < n:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    else:    # it only hears the verdict, and undoes what the next test does not need
        undone = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
        reports = [item.ihook.pytest_runtest_makereport(item=item, call=undone)]
    verdict = judge(reports)
    watch.finished(verdict[0], verdict[-1])
    everyone = meet(verdict)
    idle_failed = any(outcome != "passed" for outcome, _, _ in everyone[n:])
    share(reports, everyone if idle_failed else everyone[:n])
    watch.close()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def judge(reports) -> tuple[str, str, str]:
    """This rank's outcome of a test, in a word, in a line and in full."""
    for outcome in ("failed", "skipped"):
        bad = [report for report in reports if report.outcome == outcome]
        if bad:
            crash = getattr(bad[0].longrepr, "reprcrash", None)
            line = (f"{crash.message.splitlines()[0]} ({os.path.basename(crash.path)}:"
                    f"{crash.lineno})" if crash else bad[0].longreprtext)
            output = [f"{title}\n{text}" for title, text in bad[-1].sections]
            return outcome, line, "\n".join([report.longreprtext for report in bad] + output)
    return "passed", "", ""


def share(reports, verdicts) -> None:
    """Make of this rank's reports what all ranks say: one that fails makes all fail."""
    outcomes = {outcome for outcome, _, _ in verdicts}
    if outcomes <= {"passed"} or outcomes == {"skipped"}:
        return
    first_ranks.cache_clear()    # messages may be left on the communicator
    stories: dict[tuple, list[int]] = {}
    for rank, (outcome, line, _) in enumerate(verdicts):
        if outcome != "passed":
            stories.setdefault((outcome, line), []).append(rank)
    text = "\n".join(
        f"{outcome} on rank {', '.join(map(str, ranks))} of {len(verdicts)}: {line}\n\n"
        f"{verdicts[ranks[0]][-1]}\n" for (outcome, line), ranks in stories.items())
    report = next((report for report in reports if report.failed), reports[len(reports) // 2])
    Watch.earlier.append(f"{report.nodeid}\n{text}")
    if len(verdicts) > 1 or not report.failed:    # else it is rank 0's own, in colour
        report.outcome, report.longrepr, report.sections = "failed", text, []


def pytest_keyboard_interrupt(excinfo):
    # Interrupted is what all ranks have agreed on, such as errors during the collection.
    if WORLD.size > 1 and not isinstance(excinfo.value, pytest.Session.Interrupted):
        say(f"stopped: {excinfo.exconly()}")
        abort()


def pytest_internalerror(excrepr):
    if WORLD.size > 1:
        say(f"error inside pytest or its plugins: {excrepr}")
        abort()
