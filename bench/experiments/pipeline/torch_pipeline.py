"""Start PyTorch's own pipeline, a process beside each rank, to be measured in the same run."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.agreement import agree
from bench.checks import against_serial
from bench.errors import UsageError
from bench.experiments.layer import torch_layer
from bench.experiments.layer.torch_process import torch_environment
from bench.experiments.pipeline import torch_stages
from bench.experiments.pipeline.subject import PipelineCase, squared_error
from bench.instruments.clock import wait_patiently
from bench.records.measurements import Check
from mm3d import launcher
from mm3d.child_process import CHILDREN_PRINT
from mm3d.training.mesh import Mesh

TIMEOUT = 120.0    # seconds; a rank of PyTorch that waits longer for another ends
STEPS = ("F", "B", "W")


@dataclass(frozen=True)
class RankStep:
    """What this rank did in a step.

    Attributes
    ----------
    times : ndarray
        Seconds, (actions, begin and end).
    processor : float
        Seconds of the processor that the rank has used.
    slept : ndarray
        Mean seconds of its waits for F, B and W; NaN with layers.
    """

    times: np.ndarray
    processor: float
    slept: np.ndarray


def refuse_case(mesh: Mesh, case: PipelineCase) -> None:
    """Raise UsageError, on all ranks alike, for what PyTorch's schedules cannot execute beside."""
    kind = case.name.partition(":")[0]
    problem = None
    if kind not in torch_stages.SCHEDULES:
        problem = (f"PyTorch has no such schedule: {', '.join(torch_stages.SCHEDULES)} would do")
    elif kind == "interleaved" and case.schedule.chunks == 1:
        problem = "PyTorch's has two chunks a rank or more: interleaved:2 would do"
    elif mesh.shape["t"] > 1:
        problem = (f"a stage of PyTorch's is one process: a grid of 1 rank would do, not of "
                   f"{mesh.shape['t']}")
    elif case.recompute != "none":
        problem = f"--recompute {case.recompute} is not PyTorch's: leave it out"
    elif mesh.scheme.grid.backend.name != "numpy":
        problem = "PyTorch computes on the host: --backend numpy would do"
    node = mesh.comm.Split_type(MPI.COMM_TYPE_SHARED)
    several = node.size != mesh.comm.size
    node.Free()
    if several and not problem:
        problem = "PyTorch's ranks are started on one node: as many ranks as it can hold would do"
    agree(problem and f"--torch, schedule {case.name}: {problem}", mesh.comm)


class TorchPipeline:
    """The same schedule and stages by PyTorch, asleep between two steps.

    Parameters
    ----------
    python : str
        An interpreter that has PyTorch.
    mesh : Mesh
        The ranks, all of which make it; each starts one of PyTorch's.
    case : PipelineCase
        What is measured.
    subject : LayersSubject or WaitingSubject
        The pipeline whose parameters, inputs and gradients it uses.

    Attributes
    ----------
    about : str
        Version, transport, threads and instructions of the library.
    order : str
        How its order of actions compares with the schedule's; known after `check`.

    Raises
    ------
    UsageError
        On all ranks, when the interpreter cannot execute it.
    """

    def __init__(self, python: str, mesh: Mesh, case: PipelineCase, subject: Any) -> None:
        self.mesh, self.case, self.subject, self.order = mesh, case, subject, ""
        refuse_case(mesh, case)
        comm = mesh.comm
        self._made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
        self._folder = Path(comm.bcast(self._made and self._made.name))
        if comm.rank == 0:
            (self._folder / "case.json").write_text(
                json.dumps(self._describe()), encoding="utf-8")
        np.savez(self._folder / f"rank-{comm.rank}.npz", **subject.arrays())
        comm.Barrier()
        env = torch_environment()
        env["PYTHONPATH"] = str(Path(torch_layer.__file__).parent)
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        problem = self._process = None
        try:
            self._process = subprocess.Popen(
                [python, torch_stages.__file__, str(self._folder), str(comm.rank)], env=env,
                encoding=CHILDREN_PRINT, errors="replace",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.about = self._process.stdout.readline().strip()
            if not self.about:
                problem = (f"--torch {python} could not execute the pipeline, as it says above: "
                           f"an interpreter with torch and numpy would do")
        except OSError as error:
            problem = f"--torch {python}: {error.strerror}"
        wait_patiently(comm)
        try:
            agree(problem, comm)
        except UsageError:
            self.close()
            raise

    def _describe(self) -> dict[str, Any]:
        """Return what every rank of PyTorch's must know."""
        case, mesh = self.case, self.mesh
        sizes, waits = case.sizes, case.chunk_seconds
        return {"schedule": case.name, "stages": case.schedule.stages,
                "microbatches": case.schedule.microbatches,
                "shape": (sizes.batch // case.schedule.microbatches, sizes.seq, sizes.hidden),
                "layers": [list(part) for part in case.parts], "heads": sizes.heads,
                "dtype": case.dtype, "timeout": TIMEOUT,
                "threads": max(1, launcher.cores() // mesh.comm.size),
                "seconds": waits and dict(zip(STEPS, waits))}

    def step(self) -> RankStep:
        """Execute another step; every rank must call it."""
        return self._parse(self._ask("step"))

    def check(self) -> list[Check]:
        """Execute a step, and check its results and that its actions are the schedule's.

        Raises
        ------
        UsageError
            On all ranks, when it takes other actions.
        """
        found = self._ask("check")
        self._compare_order([(kind, stage, micro) for kind, stage, micro, *_ in found["actions"]])
        with np.load(self._folder / f"result-{self.mesh.comm.rank}.npz") as file:
            results = dict(file)
        if self.case.waits is not None:
            wrong, arrived = self.mesh.comm.allreduce(results["wrong"])
            return [Check("PyTorch's results that arrived", wrong / arrived, 0.0)]
        squares: dict[str, np.ndarray] = {
            p.name: squared_error(results[p.name],
                                  p.grid.backend.to_host(p.grad).reshape(p.public_shape))
            for p in self.subject.pipeline.parameters}
        tolerance = against_serial.tolerances(self.case.dtype, self.case.sizes.layers)[1]
        return [Check(f"PyTorch's gradient of {name}", float(np.sqrt(error / norm)), tolerance)
                for one in self.mesh.comm.allgather(squares)
                for name, (error, norm) in one.items()]

    def _compare_order(self, found: list[tuple[str, int, int]]) -> None:
        """Set `order`; UsageError when the actions are not the schedule's, in any order."""
        schedule, rank = self.case.schedule, self.mesh.stage
        wanted = [(action.kind, schedule.stage_of(rank, action.chunk), action.micro)
                  for action in schedule.rows[rank]]
        agree(None if sorted(found) == sorted(wanted) else
              f"--torch, schedule {self.case.name}: PyTorch takes other actions than this "
              f"schedule, so times cannot be compared", self.mesh.comm)
        other = self.mesh.comm.allgather(found != wanted)
        self.order = ("the same actions in the same order" if not any(other) else
                      f"the same actions, in another order on {sum(other)} of {len(other)} ranks")

    def _ask(self, what: str) -> dict[str, Any]:
        """Have this rank of PyTorch's execute a step; RuntimeError when it has ended."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a rank of PyTorch's pipeline has ended, as it says above")
        return json.loads(line)

    @staticmethod
    def _parse(found: dict[str, Any]) -> RankStep:
        slept = found["slept"]
        return RankStep(np.array([action[3:] for action in found["actions"]]), found["processor"],
                        np.array([slept.get(step, np.nan) for step in STEPS]))

    def close(self) -> None:
        """End the process; every rank must call it."""
        if self._process:
            self._process.stdin.close()
            self._process.wait()
        wait_patiently(self.mesh.comm)
        if self._made:
            self._made.cleanup()
