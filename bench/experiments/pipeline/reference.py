"""Start PyTorch's own pipeline, a process beside each rank, to be measured in the same run."""

from typing import Any

import numpy as np
from mpi4py import MPI

from bench.agreement import agree
from bench.checks import tolerances
from bench.experiments.pipeline.subject import PipelineCase, squared_error
from bench.experiments.torch.child import TorchProcesses
from bench.experiments.torch.pipeline import TORCH_SCHEDULES
from bench.instruments.sampling import Sample
from bench.records.measurements import Check
from mm3d.training.mesh import Mesh

STEP_LETTERS = ("F", "B", "W")


def gather_actions(comm: Any, case: PipelineCase, times: np.ndarray, processor: float,
                   slept: np.ndarray) -> Sample:
    """Gather what all ranks measured into the sample of a step.

    Times, (ranks, actions, begin and end), count from the begin of the first action; NaN beyond
    the actions of a rank.  The result has of each rank the seconds of `processor` time, and the
    mean seconds `slept` that it waited for F, B and W; NaN with layers.
    """
    own = np.full((max(map(len, case.schedule.rows)), 2), np.nan)
    own[:len(times)] = times
    every = np.empty((comm.size, *own.shape))
    comm.Allgather(own, every)
    return Sample(every - np.nanmin(every), comm.allgather((processor, slept)))


def refuse_pipeline(mesh: Mesh, case: PipelineCase) -> None:
    """Raise UsageError, on all ranks alike, for cases that PyTorch's schedules cannot execute."""
    kind = case.name.partition(":")[0]
    problem = None
    if kind not in TORCH_SCHEDULES:
        problem = (f"PyTorch has no such schedule: {', '.join(TORCH_SCHEDULES)} would do")
    elif kind == "interleaved" and case.schedule.chunks == 1:
        problem = "PyTorch's has two chunks a rank or more: interleaved:2 would do"
    elif mesh.shape["t"] > 1:
        problem = (f"a stage of PyTorch's is one process: a grid of 1 rank would do, not of "
                   f"{mesh.shape['t']}")
    elif case.stack.recompute != "none":
        problem = f"--recompute {case.stack.recompute} is not PyTorch's: leave it out"
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
    mesh : Mesh
        The ranks; each makes it, and starts one of PyTorch's.
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
        sizes, waits, schedule = case.sizes, case.chunk_seconds, case.schedule
        self.processes = TorchProcesses(python, "Stages", {
            "schedule": case.name, "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "shape": (sizes.batch // schedule.microbatches, sizes.seq, sizes.hidden),
            "layers": [list(part) for part in case.parts], "heads": sizes.heads,
            "dtype": case.stack.dtype, "seconds": waits and dict(zip(STEP_LETTERS, waits))},
            subject.arrays(), mesh.comm, "execute the pipeline", mesh.comm.size)
        self.about = self.processes.about

    def sample(self) -> Sample:
        """Execute another step; see `gather_actions`."""
        found = self.processes.take_turn("step")
        slept = np.array([found["slept"].get(step, np.nan) for step in STEP_LETTERS])
        return gather_actions(self.mesh.comm, self.case, np.array(
            [action[3:] for action in found["actions"]]), found["processor"], slept)

    def check(self) -> list[Check]:
        """Execute a step, and check its results and that its actions are the schedule's.

        Raises UsageError on all ranks, when it takes other actions.
        """
        found = self.processes.ask("check")
        self._compare_order([(kind, stage, micro) for kind, stage, micro, *_ in found["actions"]])
        if self.case.waits is not None:
            wrong, arrived = self.mesh.comm.allreduce(found["wrong"])
            return [Check("PyTorch's results that arrived", wrong / arrived, 0.0)]
        squares: dict[str, np.ndarray] = {
            p.name: squared_error(found[p.name],
                                  p.grid.backend.to_host(p.grad).reshape(p.public_shape))
            for p in self.subject.pipeline.parameters}
        tolerance = tolerances.beside_serial(self.case.stack.dtype, self.case.sizes.layers)[1]
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
