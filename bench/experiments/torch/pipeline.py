"""Execute one rank of a pipeline by torch.distributed.pipelining.

Nothing here needs mm3d.
"""

import time
from typing import Any, Callable

import numpy as np

TORCH_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B",
                   "interleaved": "ScheduleInterleaved1F1B",
                   "zb-h1": "ScheduleInterleavedZeroBubble",
                   "zb-v": "ScheduleZBVZeroBubble"}
ONE_STAGE = ("gpipe", "1f1b")    # their classes take the stage itself, the others a list
STEP = 1024    # between the numbers of successive micro-batches; more than there are stages


class Waits:
    """Wait for the `seconds` of F, B and W of a rank's layers, and check arriving blocks.

    `filled` makes a block like another one, filled with a number; `wrong` of the blocks that
    `arrived` were wrong.
    """

    def __init__(self, seconds: dict[str, float], filled: Callable[[Any, float], Any]) -> None:
        self.seconds, self.filled, self.slept = seconds, filled, {step: [] for step in seconds}
        self.wrong = self.arrived = 0

    def result(self, step: str, a: Any, number: float) -> Any:
        """Wait for F or B; check that `a` holds `number`, and return a block of `number` + 1."""
        begin = time.perf_counter()
        self.arrived += 1
        self.wrong += not bool((a == number).all())
        out = self.filled(a, number + 1)
        self.wait(step, begin)
        return out

    def wait(self, step: str, begin: float) -> None:
        """Give the core away until the time of a step has gone by since `begin`."""
        left = begin + self.seconds[step] - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self.slept[step].append(time.perf_counter() - begin)

    def forget(self) -> None:
        """Forget what earlier steps have slept."""
        for each in self.slept.values():
            each.clear()

    def means(self) -> dict[str, float]:
        """Return the mean seconds that F, B and W have taken since; 0 for none."""
        return {step: sum(each) / max(1, len(each)) for step, each in self.slept.items()}


def _layers_class(torch: Any) -> type:
    """Define the module of the layers of a stage."""
    from models import named_below, transformer_layer    # by the process that has PyTorch

    class Layers(torch.nn.Module):
        """The layers of a stage."""

        def __init__(self, arrays: dict[str, np.ndarray], numbers: list[int], heads: int) -> None:
            super().__init__()
            self.heads, self.layers = heads, []
            self.kept = torch.nn.ParameterDict()
            for number in numbers:
                own = {name: torch.nn.Parameter(torch.from_numpy(a))
                       for name, a in named_below(f"layers.{number}.", arrays).items()}
                self.layers.append(own)
                self.kept.update({f"{number}.{name}".replace(".", "_"): p
                                  for name, p in own.items()})

        def forward(self, x):
            for own in self.layers:
                x = transformer_layer(torch, x, own, self.heads)
            return x

    return Layers


def _waiting_class(torch: Any) -> type:
    """Define the module of a stage that waits."""
    class Wait(torch.autograd.Function):
        """Wait for F; in backward, for B."""

        @staticmethod
        def forward(ctx, x, anchor, waits, stage):
            micro = STEP * (float(x.flatten()[0]) // STEP)
            ctx.about = waits, micro - 1 - stage
            return waits.result("F", x, micro + stage)

        @staticmethod
        def backward(ctx, dy):
            waits, number = ctx.about
            return waits.result("B", dy, number), None, None, None

    class WaitingStage(torch.nn.Module):
        """A stage that waits."""

        def __init__(self, waits: Waits, stage: int) -> None:
            super().__init__()
            self.waits, self.stage = waits, stage
            self.anchor = torch.nn.Parameter(torch.zeros(1))    # makes the first stage have a B

        def forward(self, x):
            return Wait.apply(x, self.anchor, self.waits, self.stage)

    return WaitingStage


def _loss_class(torch: Any) -> type:
    """Define the function of a loss whose gradient by the output is given."""
    class Loss(torch.autograd.Function):
        """A loss whose gradient by the output is given."""

        @staticmethod
        def forward(ctx, y, gradient):
            ctx.save_for_backward(gradient)
            return y.new_zeros(())

        @staticmethod
        def backward(ctx, _):
            return ctx.saved_tensors[0], None

    return Loss


class Stages:
    """The stages of one rank of a pipeline.

    `case` has the schedule, its stages and their layers, sizes, waits, and "rank"; `arrays` the
    parameters of its layers, "inputs" in the first stage, "output gradients" in the last.
    """

    def __init__(self, torch: Any, case: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        from torch.distributed import pipelining
        self.torch, self.case, self.actions = torch, case, []
        self.waits = case["seconds"] and Waits(
            case["seconds"], lambda a, number: a.new_full(a.shape, number))
        own = case["stages"][case["rank"]]
        create = _waiting_class(torch) if self.waits else _layers_class(torch)
        self.modules = {stage: create(self.waits, stage) if self.waits else
                        create(arrays, case["layers"][stage], case["heads"]) for stage in own}
        later_weights = {"dw_builder": lambda: lambda *_, **__: self.waits.wait(
            "W", time.perf_counter())} if self.waits else {}    # wait for W, too
        like = torch.empty(case["shape"], dtype=getattr(torch, case["dtype"]))
        stages = [pipelining.PipelineStage(
            self.modules[stage], stage, sum(map(len, case["stages"])), torch.device("cpu"),
            input_args=(like.clone().requires_grad_(stage > 0),),
            output_args=(like.clone().requires_grad_(),), **later_weights)
            for stage in own]
        for stage in stages:
            self._record(stage)
        kind = case["schedule"].partition(":")[0]
        self.schedule = getattr(pipelining, TORCH_SCHEDULES[kind])(
            stages[0] if kind in ONE_STAGE else stages, case["microbatches"],
            loss_fn=_loss_class(torch).apply, scale_grads=False)
        given = {name: torch.from_numpy(a) for name, a in arrays.items()}
        self.inputs = [given["inputs"]] if "inputs" in given else []
        self.target = {"target": given["output gradients"]} if "output gradients" in given else {}

    def _record(self, stage: Any) -> None:
        """Record when the actions of a stage begin and end."""
        def recorded(run, kind):
            def timed(micro, *args, **more):
                begin = time.perf_counter()
                result = run(micro, *args, **more)
                self.actions.append((kind(more), stage.stage_index, micro, begin,
                                     time.perf_counter()))
                return result
            return timed
        for name, kind in (
                ("forward_one_chunk", lambda more: "F"),
                ("backward_one_chunk", lambda more: "BW" if more.get("full_backward", True)
                 else "B"),
                ("backward_weight_one_chunk", lambda more: "W")):
            setattr(stage, name, recorded(getattr(stage, name), kind))

    def step(self) -> dict[str, Any]:
        """Execute the schedule once, from no gradients; return the times of its actions."""
        self.actions.clear()
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        if self.waits:
            self.waits.forget()
        self.torch.distributed.barrier()
        processor = time.process_time()
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)
        processor = time.process_time() - processor
        return {"actions": self.actions, "processor": processor,
                "slept": self.waits.means() if self.waits else {}}

    def check(self) -> dict[str, Any]:
        """Take a step; return also its gradients by name, or how many results were wrong."""
        found = self.step()
        if self.waits:
            return found | {"wrong": np.array([self.waits.wrong, self.waits.arrived])}
        return found | {f"layers.{number}.{name}": p.grad.numpy()
                        for stage, module in self.modules.items()
                        for number, own in zip(self.case["layers"][stage], module.layers)
                        for name, p in own.items()}
