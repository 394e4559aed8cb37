"""A real Slurm on this machine: one controller and some nodes on the loopback, for the tests.

Everything lives in one folder, key and sockets included, and ends with `Cluster.stop`, by process
id.  Nodes have as many cores and GPUs as they are told to have; jobs take turns on the real
cores.  Each node has a /dev/shm of its own where the kernel allows it: what a killed rank leaves
there goes with the node, and no job of another cluster meets it.

No task is bound to cores (task/none), as nodes pretend to have more than there are: what
``--cpu-bind`` and the second half of ``--distribution=block:block`` do is not shown here, only
that Slurm takes them.
"""
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Iterable, Iterator

import pytest

from support import clean_environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SYSTEM = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ATTEMPTS = 5    # to start: somebody else may have one of the ports
PRIVATE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs node /dev/shm && exec "$@"', "sh"]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=1,batch_sched_delay=0,defer_batch=0
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=2
MessageTimeout=60
MinJobAge=3600
FirstJobId={first_job}
MaxJobCount={most_jobs}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{last}] \
CPUs={cpus} RealMemory=64000 {gres}
PartitionName={partition} Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverTimeLimit=0
"""


def missing() -> str:
    """Why no Slurm can be started here; "" when one can."""
    if os.environ.get("MM3D_SLURM") == "0":
        return "MM3D_SLURM=0 asks for no Slurm"
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=SYSTEM)]
    if lacking:
        return f"Slurm is not installed (no {', '.join(lacking)})"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """A running Slurm in an empty folder, which users may enter: its nodes, what each has, the
    partition that holds them all, how many jobs the queue takes, and the type of GPUs, if any.
    """

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 16, gpus: int = 4,
                 partition: str = "all", most_jobs: int = 1000, gpu_type: str = "") -> None:
        self.folder, self.nodes = Path(folder), nodes
        self.daemons: list[subprocess.Popen] = []
        (self.folder / "state").mkdir()
        devices = [self.folder / f"gpu{i}" for i in range(gpus)]
        for device in devices:
            os.mknod(device, 0o20666, os.makedev(1, 3))    # /dev/null by another name
        (self.folder / "gres.conf").write_text("AutoDetect=off\n" + (
            f"NodeName=n[1-{nodes}] Name=gpu {gpu_type and 'Type=' + gpu_type} "
            f"File={self.folder}/gpu[0-{gpus - 1}]\n"
            if gpus else ""))
        self.conf = self.folder / "slurm.conf"
        gres = f"Gres=gpu:{gpu_type and gpu_type + ':'}{gpus}" if gpus else ""
        self.shape = dict(nodes=nodes, cpus=cpus, gres=gres,
                          partition=partition, most_jobs=most_jobs)
        alone = subprocess.run([*PRIVATE, "true"], capture_output=True).returncode == 0
        self.private = PRIVATE if alone else []

    def configure(self) -> None:
        """Write slurm.conf, with ports below those that the kernel hands out."""
        first = 20000 + secrets.randbelow(12000)
        self.conf.write_text(CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], folder=self.folder,
            ports=(first, first + 1), last=first + self.nodes,
            # MPICH names shared memory after the job; what a killed one left must not be met
            # again.  Longer numbers than these make its lines too long for Slurm's PMI-2.
            first_job=10_000 + secrets.randbelow(80_000), **self.shape))

    def environment(self, **more: str) -> dict[str, str]:
        """What a user of the cluster has set."""
        env = {name: value for name, value in clean_environment().items()
               if not name.startswith(("SLURM", "SBATCH"))}
        return env | {"SLURM_CONF": str(self.conf), "PATH": SYSTEM} | more

    def start(self) -> "Cluster":
        """Start the daemons and wait until all nodes are idle."""
        for left in reversed(range(ATTEMPTS)):
            self.daemons = []
            self.configure()
            try:
                self._start()
                break
            except RuntimeError:
                self.stop()
                if not left:
                    raise
        return self

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)    # munged wants its socket where all can reach it
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}",
                     f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/m.pid",
                     f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/m.seed")
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged has no socket")
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.conf))
        for number in range(1, self.nodes + 1):
            self._daemon("slurmd", "-D", "-N", f"n{number}", "-f", str(self.conf))
        self._wait(lambda: self.idle() == self.nodes, "the nodes do not become idle")

    def idle(self) -> int:
        """How many nodes have nothing to do."""
        found = self.command("sinfo", "-h", "-N", "-o", "%N %T")
        return len({line for line in found.stdout.splitlines() if line.endswith(" idle")})

    def command(self, *argv: str, timeout: float = 200, cwd: str | Path | None = None,
                **env: str) -> subprocess.CompletedProcess:
        """Run a command as a user of the cluster."""
        return subprocess.run(argv, env=self.environment(**env), text=True, cwd=cwd,
                              capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL)

    def quiet(self, seconds: float, jobs: Iterable[str] | None = None) -> bool:
        """Wait until `jobs` (elements of arrays as 12_3), or all, have left the queue; whether
        they do so before so many seconds have passed."""
        def left() -> bool:
            asked = self.command("squeue", "--noheader", "--array", "--format=%i")
            there = set(asked.stdout.split())
            return asked.returncode == 0 and not (there if jobs is None else there & set(jobs))

        return self._until(left, seconds)

    def stop(self) -> None:
        """Cancel all jobs and end the daemons, the nodes' first."""
        if self.daemons and all(daemon.poll() is None for daemon in self.daemons):
            with contextlib.suppress(subprocess.SubprocessError):
                self.command("scancel", "--user=root")
                self.quiet(20)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, name: str, *argv: str) -> None:
        program = shutil.which(name, path=SYSTEM)
        with open(self.folder / f"{name}-{len(self.daemons)}.out", "w") as out:
            # Should the tests be killed, their daemons go with them.
            self.daemons.append(subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *self.private * (name == "slurmd"),
                 program, *argv],
                env=self.environment(), stdout=out, stderr=out,
                stdin=subprocess.DEVNULL, start_new_session=True))

    def _wait(self, condition, message: str, seconds: float = 60) -> None:
        def ended() -> bool:
            return any(daemon.poll() is not None for daemon in self.daemons)

        if not self._until(lambda: ended() or condition(), seconds) or ended():
            logs = "\n".join(f"{path.name}: {path.read_text()[-1000:]}"
                             for path in sorted(self.folder.glob("*.out")))
            raise RuntimeError(f"{'a daemon has ended' if ended() else message}\n{logs}")

    @staticmethod
    def _until(condition, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.2)
        return False


@contextlib.contextmanager
def running(folder: Path, *shape, **more) -> Iterator[Cluster]:
    """A Slurm in a folder within the block; the test is skipped where none can be started."""
    if missing():
        pytest.skip(missing())
    folder.mkdir(exist_ok=True)
    cluster = Cluster(folder, *shape, **more).start()
    try:
        yield cluster
    finally:
        cluster.stop()
