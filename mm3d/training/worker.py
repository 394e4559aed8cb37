"""Execute one rank's row of a pipeline schedule.

Receives, actions and sends are in the order of `mm3d.training.schedules.messages.operations`,
which the check of a schedule plays through.  Sends are asynchronous, so a schedule that passes it
completes here.
"""

from collections import deque
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, Callable, ContextManager, Sequence

from mm3d.arrays.backend import Array
from mm3d.training.hops import Hops
from mm3d.training.schedules.messages import Operation, operations
from mm3d.training.schedules.schedule import Action, Completion


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
        self._results: dict[Completion, Array] = {}    # on this rank and not used yet
        self._saved: dict[Completion, Any] = {}        # for B, then for W, by the step F
        self._receives = deque(one for one in self.program if one.kind == "receive")
        self._begun: dict[Completion, Any] = {}
        for operation in self.program:
            if operation.kind == "receive":
                self._begin_receives(operation.index)
                arriving = self._begun.pop(operation.event)
                self._results[operation.event] = self.hops.complete(arriving)
            elif operation.kind == "send":
                self.hops.send(operation.event, self._results.pop(operation.event),
                               operation.other)
            else:
                self._run_actions(operation)
        self.hops.messages.finish()

    def forward(self, inputs: Callable[[int], Array],
                output: Callable[[int, Array], Any]) -> None:
        """Compute forward alone; see `mm3d.training.pipeline.Pipeline.forward`."""
        stages, rank_of = self.schedule.stages[self.rank], self.schedule.rank_of
        results: dict[Completion, Array] = {}    # that stay on this rank
        for chunk, stage in sorted(enumerate(stages), key=itemgetter(1)):
            for micro in range(self.schedule.microbatches):
                self.hops.messages.release_sent()
                before, own = Completion("F", stage - 1, micro), Completion("F", stage, micro)
                if not stage:
                    x = inputs(micro)
                elif before in results:
                    x = results.pop(before)
                else:
                    x = self.hops.complete(self.hops.begin_receive(before, rank_of[stage - 1]))
                y = self.chunks[chunk].forward(x)[0]
                if stage + 1 == self.schedule.stage_count:
                    output(micro, y)
                elif rank_of[stage + 1] == self.rank:
                    results[own] = y
                else:
                    self.hops.send(own, y, rank_of[stage + 1])
        self.hops.messages.finish()

    def _begin_receives(self, index: int) -> None:
        """Begin all receives up to the action numbered `index`."""
        while self._receives and self._receives[0].index <= index:
            receive = self._receives.popleft()
            self._begun[receive.event] = self.hops.begin_receive(receive.event, receive.other)

    def _run_actions(self, operation: Operation) -> None:
        """Run joined actions, or one, while the results for the next are being received."""
        self._begin_receives(operation.index + len(operation.actions))
        self.hops.messages.release_sent()
        for action in operation.actions:
            with self.around(action):
                self._run(action)

    def _run(self, action: Action) -> None:
        """Run one action: take its input, and keep its result."""
        stage, micro = self.schedule.stage_of(self.rank, action.chunk), action.micro
        model, own = self.chunks[action.chunk], Completion("F", stage, micro)
        if action.kind == "F":
            before = Completion("F", stage - 1, micro)
            x = self._results.pop(before) if stage else self._inputs(micro)
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
