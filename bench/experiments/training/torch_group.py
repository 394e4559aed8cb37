"""Start PyTorch's own parallel trainings, a process beside each rank, to be measured in turns."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from bench.agreement import agree
from bench.errors import UsageError
from bench.experiments.layer.torch_process import torch_environment
from bench.experiments.training import torch_parallel
from bench.instruments.clock import wait_patiently
from mm3d import launcher
from mm3d.child_process import CHILDREN_PRINT

TIMEOUT = 300.0    # seconds; a rank of PyTorch that waits longer for another ends
KINDS = tuple(torch_parallel.KINDS)


class TorchGroup:
    """A training by each kind of PyTorch's parallelism, asleep between two steps.

    Parameters
    ----------
    python : str
        An interpreter that has PyTorch.
    kinds : sequence of str
        Of `KINDS`; "one" is one process with all cores, the others have one for each rank.
    case : dict
        Sizes and optimizer, see `torch_parallel`.
    arrays : mapping
        On rank 0 parameters by name, "tokens" and "targets".
    comm : mpi4py.MPI.Intracomm
        The ranks, on one node; all create it.

    Attributes
    ----------
    about : dict of str to str
        By kind: version, parallelism, threads and instructions of the library; on rank 0.

    Raises
    ------
    UsageError
        On all ranks, when the interpreter cannot train so.
    """

    def __init__(self, python: str, kinds: Sequence[str], case: dict[str, Any],
                 arrays: Mapping[str, np.ndarray], comm: Any) -> None:
        self.comm, self.about = comm, {}
        self._processes: dict[str, subprocess.Popen] = {}
        self._made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
        self._folder = comm.bcast(self._made and self._made.name)
        if comm.rank == 0:
            Path(self._folder, "case.json").write_text(
                json.dumps({**case, "timeout": TIMEOUT}), encoding="utf-8")
            np.savez(Path(self._folder, "case.npz"), **arrays)
        comm.Barrier()
        try:
            for kind in kinds:
                self._start(python, kind)
        except UsageError:
            self.close()
            raise

    def _start(self, python: str, kind: str) -> None:
        """Start the processes of one kind."""
        problem, ranks = None, 1 if kind == "one" else self.comm.size
        if self.comm.rank < ranks:
            env = torch_environment()
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
            words = [python, torch_parallel.__file__, self._folder, kind, str(self.comm.rank),
                     str(ranks), str(max(1, launcher.cores() // ranks))]
            try:
                process = self._processes[kind] = subprocess.Popen(
                    words, env=env, encoding=CHILDREN_PRINT, errors="replace",
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self.about[kind] = process.stdout.readline().strip()
                if not self.about[kind]:
                    problem = (f"--torch {python} could not train by --torch-parallel {kind}, as "
                               f"it says above: an interpreter with torch and numpy would do")
            except OSError as error:
                problem = f"--torch {python}: {error.strerror}"
        wait_patiently(self.comm)
        agree(problem, self.comm)

    def step(self, kind: str, check: bool = False) -> list[dict[str, float]]:
        """Have one kind take a step, while the others sleep; every rank must call it.

        Returns
        -------
        list of dict
            What each of its processes prints, see `torch_parallel`; the same on every rank.
        """
        found = None
        if kind in self._processes:
            process = self._processes[kind]
            process.stdin.write("check\n" if check else "step\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a process of PyTorch's {torch_parallel.KINDS[kind]} has "
                                   f"ended, as it says above")
            found = json.loads(line)
        wait_patiently(self.comm)
        return [one for one in self.comm.allgather(found) if one]

    def close(self) -> None:
        """End the processes; every rank must call it."""
        for process in self._processes.values():
            process.stdin.close()
            process.wait()
        wait_patiently(self.comm)
        if self._made:
            self._made.cleanup()
