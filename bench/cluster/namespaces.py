"""Make and enter namespaces of Linux, through the C library.

Imports nothing that starts threads: a process of several threads can make no user namespace.
"""
from __future__ import annotations

import ctypes
import os
import signal

# <sched.h>, <sys/mount.h>, <sys/prctl.h>
MOUNT, UTS, USER, PID, NET = 0x20000, 0x4000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
# As /proc/PID/ns names them.  The mount namespace comes last: paths change with it.
OF_A_NODE = {"uts": UTS, "net": NET, "mnt": MOUNT}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the kinds in `flags`; OSError if it may not.

    Into one of the kind `PID` only its next children move.
    """
    _check(_libc.unshare(ctypes.c_int(flags)), "new namespaces")


def enter(process: int) -> None:
    """Move this process into the network, mount and host name namespaces of a process."""
    folder, files = os.getcwd(), []
    for name, kind in OF_A_NODE.items():
        files.append((os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY), kind, name))
    for file, kind, name in files:
        _check(_libc.setns(ctypes.c_int(file), ctypes.c_int(kind)), f"namespace {name}")
        os.close(file)
    os.chdir(folder)    # a mount namespace is entered at its root


def mount(source: str, target: str, kind: str | None = None, flags: int = 0,
          data: str | None = None) -> None:
    """Mount a file system, or change a mount."""
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None),
           f"mounting {kind or source} on {target}")


def set_hostname(name: str) -> None:
    """Set the host name in this process' namespace."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "host name")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent has ended, whatever ended it."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "end with the parent")


def map_users() -> None:
    """Make new user and other namespaces of a cluster's head, and map the users into them.

    A process of root maps all users to themselves; any other one only its own user, to root of
    the namespace.  Raises OSError when the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    begin, go = os.pipe()
    # A process outside: only there it may have the right to map more than one user.
    helper = os.fork() if user == 0 else None
    if helper == 0:
        os.close(go)
        os.read(begin, 1)
        os._exit(_map_all(os.getppid()))
    unshare(USER | MOUNT | PID | NET | UTS)
    os.write(go, b"x")
    os.close(go)
    os.close(begin)
    if helper is not None and os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) == 0:
        return
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                       ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)


def _map_all(process: int) -> int:
    """Map all users of this namespace to themselves in that of a process; 0 when it is done."""
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/self/{name}", encoding="ascii") as file:
                own = [line.split() for line in file]
            with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
                file.write("".join(f"{inside} {inside} {count}\n" for inside, _, count in own))
        return 0
    except OSError:
        return 1
