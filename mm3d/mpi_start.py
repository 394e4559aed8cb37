"""Start MPI where it can start, and keep child processes of a rank out of its job.

MPI libraries need three things when they start that they do not provide themselves:

- The letters "I" and "i" must be one to C.  In Turkish they are not, and UCX, which looks its
  options up without regard to case, does not find them.
- There must be room in ``/dev/shm``; see `mm3d.shared_room`.
- The launcher's variables must be this process' own.  A process that a rank starts, such as a
  worker of `multiprocessing`, would otherwise be that rank once more, and wait for ever.
"""
from __future__ import annotations

import contextlib
import locale
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping, MutableMapping

from mm3d import launcher, shared_room
from mm3d.console import complain

MARK = "_MM3D_LAUNCH"    # a process that a launcher has started, and by which variables
NO_CONNECTION = "no connection"


def check_packages() -> None:
    """Raise SystemExit with status 2 where this Python lacks what `import mm3d` needs.

    The first rank says so: most likely the environment that has it is not activated.
    """
    try:
        import mpi4py  # noqa: F401
        import numpy  # noqa: F401
    except ModuleNotFoundError as error:
        if not launcher.launcher_rank():
            complain(f"error: {sys.executable} has no {error.name}: activate the environment "
                     "where mm3d is installed, or pip install -e '.[mpi]' in its clone")
        raise SystemExit(2) from error


def import_mpi() -> None:
    """Import ``mpi4py.MPI``, which starts MPI unless ``mpi4py.rc`` says otherwise.

    Raises SystemExit with status 2, after the first rank has said that there is no MPI library;
    see `starting`.
    """
    import mpi4py
    new = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
    try:
        with starting() if new else contextlib.nullcontext():
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not launcher.launcher_rank():
            complain(f"error: mpi4py cannot load an MPI library ({' '.join(str(error).split())}): "
                     "load the module of the MPI that it was built with, or pip install mpich")
        raise SystemExit(2) from error
    if not new and MPI.Is_initialized():
        hide_launcher()


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Let MPI start within the block; processes that start later do not see the launcher.

    Raises SystemExit with status 2, after the first rank of this node has said why, if shared
    memory lacks room: on every rank of the node, or on the first, if it is other jobs that have
    the room.
    """
    ranks, place = launcher.local_ranks(), launcher.local_rank()
    first = not (launcher.launcher_rank() if place is None else place)
    os.environ.update(shared_room.lean_settings(ranks))
    if problem := shared_room.lack(ranks, first=first):
        if first:
            complain(f"error: {problem}")
        raise SystemExit(2)
    with neutral_letters():
        yield
    hide_launcher()


@contextlib.contextmanager
def neutral_letters() -> Iterator[None]:
    """Let C compare letters as in English within the block."""
    before = locale.setlocale(locale.LC_CTYPE)
    for name in ("C.UTF-8", "C"):    # some systems have no C.UTF-8
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            break
    try:
        yield
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def hide_launcher() -> None:
    """Hide the launcher's variables from the processes that this one starts.

    `os.environ` keeps them, for programs that read them there.
    """
    names = list(filter(launcher.makes_a_rank, os.environ))
    if names:
        os.environ[MARK] = f"{os.getpid()} {launch(os.environ)}"
    for name in names:
        os.unsetenv(name)


def leave_job(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the launcher's variables from `environ` where they belong to another process.

    Such a process has passed all of `os.environ` on; or it has not imported mm3d.
    """
    process, _, others = environ.get(MARK, "").partition(" ")
    own = launch(environ)
    if own == NO_CONNECTION and not others and not _is_worker():
        complain(f"warning: this process has the variables of rank {environ.get('PMI_RANK')} of "
                 f"{environ.get('PMI_SIZE')}, but not its connection to the launcher (PMI_FD): it "
                 "runs as one rank alone; what starts ranks has to pass open files on")
    if own == NO_CONNECTION or own == others and process != str(os.getpid()):
        for name in list(filter(launcher.makes_a_rank, environ)):
            del environ[name]


def _is_worker() -> bool:
    """Return whether `multiprocessing` has started this process, which is meant to be alone."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.current_process().name != "MainProcess"


def launch(environ: Mapping[str, str]) -> str:
    """Return an identifier of this start of a rank by a launcher.

    It is `NO_CONNECTION` if the environment names a connection to the launcher that is not open.
    """
    if environ.get("PMI_FD", "").isdecimal():    # the numbers are the same in any job
        try:
            found = os.fstat(int(environ["PMI_FD"]))
        except OSError:
            return NO_CONNECTION
        return f"socket {found.st_ino}" if stat.S_ISSOCK(found.st_mode) else NO_CONNECTION
    values = [f"{name}={environ[name]}" for name in sorted(environ)
              if launcher.makes_a_rank(name)]
    return f"{zlib.crc32(os.fsencode(' '.join(values))):x}"
