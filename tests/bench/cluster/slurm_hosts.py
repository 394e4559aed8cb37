"""Run jobs in a Slurm whose nodes are those of an emulated cluster; started in one, as its head.

``slurm_hosts.py FOLDER LAUNCHER...``: for each launcher, srun or mpirun, a row of 8 ranks on two
nodes of four.  The last line is JSON: of each job its result, and what its log says.
"""
import json
import sys
from pathlib import Path

import slurm_cluster
from bench.cluster.spec import NETWORK
from bench.cluster.spec import Cluster as EmulatedCluster
from slurm_user import User


class HostsCluster(slurm_cluster.Cluster):
    """A Slurm with its controller on the switch and a daemon on each node."""

    def configure(self) -> None:
        super().configure()
        lines = self.conf.read_text().splitlines()
        port = next(line.rpartition("=")[2] for line in lines if line.startswith("SlurmctldPort"))
        for place, line in enumerate(lines):
            if line.startswith("SlurmctldHost"):
                lines[place] = f"SlurmctldHost=head({NETWORK}.1)"
            if line.startswith("NodeName"):
                lines[place] = (
                    f"NodeName=n[1-{self.nodes}] NodeHostname=node-[00-{self.nodes - 1:02d}] "
                    f"NodeAddr={NETWORK}.[2-{self.nodes + 1}] Port={int(port) + 1} "
                    f"CPUs={self.shape['cpus']} RealMemory=64000")
        self.conf.write_text("\n".join([*lines, ""]))

    def _daemon(self, name: str, *argv: str) -> None:
        if name == "slurmd":
            number = int(argv[argv.index("-N") + 1].removeprefix("n"))
            self.private = ["on-node", str(number - 1)]
        super()._daemon(name, *argv)


def run_job(cluster: HostsCluster, folder: Path, launcher: str) -> dict[str, object]:
    """Submit a row, wait for it, and return its outcome."""
    folder.mkdir()
    user = User(cluster, folder, ranks=4, gpus=0, environment={"FI_TCP_IFACE": "eth0"},
                launch={"mpi": "pmi2"} if launcher == "srun" else {"launcher": launcher})
    user.submit()
    ended = user.quiet()
    runs = user.runs()
    found: dict[str, object] = {"ended": ended, "log": user.logs(),
                                "status": user.jobs("status")[1]}
    if runs:
        run, = runs
        found |= {"nodes": run.configuration["nodes"], "ranks": run.ranks,
                  "within_nodes": run.configuration["within_nodes"],
                  "placement": run.configuration["placement"],
                  "checks": [bool(check.passed) for check in run.checks]}
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    emulated = EmulatedCluster.from_environment()
    (folder / "slurm").mkdir()
    slurm = HostsCluster(folder / "slurm", nodes=emulated.nodes, cpus=4, gpus=0).start()
    try:
        print(json.dumps({launcher: run_job(slurm, folder / launcher, launcher)
                          for launcher in sys.argv[2:]}))
    finally:
        slurm.stop()
