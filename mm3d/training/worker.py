"""Execute one rank's row of a pipeline schedule.

Receives, actions and sends are in the order of `mm3d.training.schedules.messages.operations`,
which the check of a schedule plays through.  Sends are asynchronous, so a schedule that passes it
completes here.
"""

from collections import deque
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Sequence

from mm3d.arrays.backend import Array
from mm3d.training.hops import Hops
from mm3d.training.schedules.messages import Operation, operations
from mm3d.training.schedules.schedule import Action, Completion, Schedule


class Worker:
    """Execute the row of this rank's stage of the mesh.

    `hops` has the schedule; each of the `chunks` has the passes of a `mm3d.Transformer`, halves
    too; `around` returns, for an action, a context in which it is executed.
    """

    def __init__(self, hops: Hops, chunks: Sequence[Any],
                 around: Callable[[Action], ContextManager] | None = None) -> None:
        self.schedule, self.hops, self.chunks = hops.schedule, hops, chunks
        self.rank, self.around = hops.mesh.stage, around or (lambda action: nullcontext())
        self.program = operations(self.schedule, self.rank)

    def step(self, inputs: Callable[[int], Array],
             output_gradient: Callable[[int, Array], Array],
             input_gradient: Callable[[int, Array], Any] = lambda micro, dx: None) -> None:
        """Execute all actions of a step; see `mm3d.training.pipeline.Pipeline.step`."""
        self._inputs, self._output_gradient = inputs, output_gradient
        self._input_gradient = input_gradient
        self._saved: dict[Completion, Any] = {}        # for B, then for W, by the step F

        def run(action: Action) -> None:
            with self.around(action):
                self._run(action)
        self._execute(self.program, run)

    def forward(self, inputs: Callable[[int], Array],
                output: Callable[[int, Array], Any]) -> None:
        """Compute forward alone; see `mm3d.training.pipeline.Pipeline.forward`."""
        self._inputs, stages = inputs, self.schedule.stages
        rows = (tuple(Action("F", chunk, micro) for _, chunk in sorted(zip(own, range(len(own))))
                      for micro in range(self.schedule.microbatches)) for own in stages)

        def run(action: Action) -> None:
            own, y = self._completion(action), self.chunks[action.chunk].forward(
                self._input(action))[0]
            if own.stage + 1 == self.schedule.stage_count:
                output(action.micro, y)
            else:
                self._results[own] = y
        self._execute(operations(Schedule(stages, tuple(rows)), self.rank), run)

    def _execute(self, program: list[Operation], run: Callable[[Action], None]) -> None:
        """Receive, `run` actions and send; results for the next action arrive meanwhile."""
        self._results: dict[Completion, Array] = {}    # on this rank and not used yet
        receives = deque(one for one in program if one.kind == "receive")
        # Kept, as an error may leave receives pending, into whose buffers MPI may still write.
        self._begun: dict[Completion, Any] = {}
        for operation in program:
            last = operation.index + len(operation.actions)
            while operation.kind != "send" and receives and receives[0].index <= last:
                one = receives.popleft()
                self._begun[one.event] = self.hops.begin_receive(one.event, one.other)
            if operation.kind == "receive":
                arriving = self._begun.pop(operation.event)
                self._results[operation.event] = self.hops.complete(arriving)
            elif operation.kind == "send":
                self.hops.send(operation.event, self._results.pop(operation.event),
                               operation.other)
            else:
                self.hops.messages.release_sent()
                for action in operation.actions:
                    run(action)
        self.hops.messages.finish()

    def _completion(self, action: Action) -> Completion:
        """Return the completion of the forward of an action's micro-batch in its stage."""
        return Completion("F", self.schedule.stage_of(self.rank, action.chunk), action.micro)

    def _input(self, action: Action) -> Array:
        """Return the input of the forward of an action's micro-batch in its stage."""
        _, stage, micro = self._completion(action)
        before = Completion("F", stage - 1, micro)
        return self._results.pop(before) if stage else self._inputs(micro)

    def _run(self, action: Action) -> None:
        """Run one action: take its input, and keep its result."""
        _, stage, micro = own = self._completion(action)
        model = self.chunks[action.chunk]
        if action.kind == "F":
            x = self._input(action)
            y, self._saved[own] = model.forward(x)
            if stage + 1 < self.schedule.stage_count:
                self._results[own] = y
            else:
                self._results[Completion("B", stage + 1, micro)] = self._output_gradient(micro, y)
        elif action.kind == "W":
            model.backward_weights(self._saved.pop(own))
        else:
            dy = self._results.pop(Completion("B", stage + 1, micro))
            if action.kind == "BW":
                dx = model.backward(dy, self._saved.pop(own))
            else:
                dx, self._saved[own] = model.backward_input(dy, self._saved.pop(own))
            if stage:
                self._results[Completion("B", stage, micro)] = dx
            else:
                self._input_gradient(micro, dx)
