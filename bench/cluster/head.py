"""Build an emulated cluster, run a command in it, and take it down: the processes above the nodes.

``python -m bench.cluster.head REPORTS PARENT CLUSTER MPIRUN LIBRARY COMMAND...`` is started by
`bench.cluster.run`.  It makes the namespaces; its child, process 1 in them, builds the cluster
and runs the command.  When that child ends the kernel kills every process of the cluster, and
removes its devices and mounts.  It ends with its parent, and that with its own, also by SIGKILL.

Neither NumPy nor MPI is imported: a process of several threads can make no user namespace.
"""
from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bench.cluster import namespaces
from bench.cluster.mpirun import LIBRARY, REAL
from bench.cluster.spec import CLUSTER_ENV, FOLDER, NETWORK, Cluster

STARTED = b"started"    # what the process that asked for the cluster is told
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_NAMESPACES = (
    "this kernel does not let this user make namespaces ({}): as root, allow them by sysctl "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone or "
    "kernel.apparmor_restrict_unprivileged_userns, or run as root; in a container, allow unshare")
ROOT = Path(__file__).resolve().parents[2]
# Commands on PATH inside, and the functions that they call.
COMMANDS = {"mpirun": "mpirun.main", "mpiexec": "mpirun.main", "on-node": "nodes.run_on_node",
            "remote-shell": "nodes.run_shell"}


def main(argv: Sequence[str]) -> int:
    """Make the namespaces, and wait for the command's exit status."""
    reports = socket.socket(fileno=int(argv[0]))
    namespaces.die_with_parent()
    first = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not first:    # nothing is there yet that it would have to wait for
            os._exit(128 + number)
        os.kill(first, number)
    _catch(pass_on)
    if os.getppid() != int(argv[1]):
        return 1    # it has ended before it could be watched
    cluster = Cluster.from_environment({CLUSTER_ENV: argv[2]})
    assert cluster is not None
    try:
        namespaces.map_users()
    except OSError as error:
        return _report(reports, NO_NAMESPACES.format(error.strerror.rpartition(": ")[2]))
    namespaces.die_with_parent()    # new credentials have undone it
    ours, theirs = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(theirs)
        namespaces.die_with_parent()
        os.set_blocking(ours, False)
        try:
            os.read(ours, 1)    # empty at once if the parent has ended already
            os._exit(1)
        except BlockingIOError:
            _run_as_init(cluster, (argv[3], argv[4]), argv[5:], reports)
    reports.close()
    return _exit_status(os.waitpid(first, 0)[1])


def _catch(handler: Callable[[int, FrameType | None], None]) -> None:
    """Set the handler of `SIGNALS`, except for signals that this process ignores."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _report(reports: socket.socket, text: str) -> int:
    """Tell the process that asked for the cluster why it cannot exist; return status 2."""
    reports.sendall(text.encode())
    return 2


def _exit_status(status: int) -> int:
    """Convert the status from `os.waitpid` to a shell's exit status."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run_as_init(cluster: Cluster, mpirun: tuple[str, str], command: Sequence[str],
                 reports: socket.socket) -> NoReturn:
    """Build the cluster, run the command, and exit with its status, as process 1."""
    from bench.cluster.links import Refused
    status = 1
    try:
        _build_cluster(cluster, mpirun)
        status = _run_in_cluster(cluster, command, reports)
    except Refused as error:
        status = _report(reports, str(error))
    except OSError as error:
        status = _report(reports, f"the emulated cluster cannot be built: {error}")
    except BaseException as error:    # of netlink, whose errors have no common type
        status = _report(reports, f"the emulated cluster cannot be built: {error!r}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _build_cluster(cluster: Cluster, mpirun: tuple[str, str]) -> None:
    """Make the file systems, the nodes and the links."""
    from bench.cluster import links, nodes
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
    namespaces.mount("proc", "/proc", "proc", namespaces.MS_NOSUID | namespaces.MS_NODEV
                     | namespaces.MS_NOEXEC)
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV,
                     "mode=1777")
    namespaces.set_hostname("head")
    _write_commands(mpirun)
    _name_hosts(cluster)
    held = nodes.Nodes(cluster)
    links.make_switch(held.processes)
    held.connect()
    links.open_ports(cluster)
    (Path(FOLDER) / nodes.DESCRIPTION).write_text(json.dumps(
        {"cluster": asdict(cluster), "processes": held.processes}), encoding="utf-8")


def _write_commands(mpirun: tuple[str, str]) -> None:
    """Write the commands that come first on PATH inside, for an mpirun and its MPI library."""
    os.mkdir(FOLDER)
    real = "".join(f"{name}={shlex.quote(value)} "
                   for name, value in zip((REAL, LIBRARY), mpirun))
    for name, function in COMMANDS.items():
        module, _, main = function.partition(".")
        call = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
                f"from bench.cluster.{module} import {main}; sys.exit({main}())")
        known = real * (module == "mpirun")
        path = Path(FOLDER) / name
        path.write_bytes(os.fsencode(f"#!/bin/sh\n{known}exec {shlex.quote(sys.executable)} -S "
                                     f"-c {shlex.quote(call)} \"$@\"\n"))
        path.chmod(0o755)


def _name_hosts(cluster: Cluster) -> None:
    """Let the nodes know each other's names, if this machine has a file of names."""
    if not os.path.exists("/etc/hosts"):
        return
    lines = ["127.0.0.1 localhost", f"{NETWORK}.1 head"]
    lines += [f"{cluster.address(node)} {cluster.host_name(node)}"
              for node in range(cluster.nodes)]
    path = Path(FOLDER) / "hosts"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    namespaces.mount(str(path), "/etc/hosts", flags=namespaces.MS_BIND)


def _run_in_cluster(cluster: Cluster, command: Sequence[str], reports: socket.socket) -> int:
    """Run the command, pass signals on to its processes, and return its exit status."""
    path = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PATH", os.defpath))))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        child = subprocess.Popen(
            command, start_new_session=True, env=os.environ | {
                "PATH": path, CLUSTER_ENV: cluster.to_environment()},
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS))
    except OSError as error:
        return _report(reports, f"{command[0]} cannot be started: {error.strerror}")

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            pass
    _catch(pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    reports.sendall(STARTED)
    reports.close()
    while True:    # orphans of the cluster end here too
        process, status = os.wait()
        if process == child.pid:
            return _exit_status(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
