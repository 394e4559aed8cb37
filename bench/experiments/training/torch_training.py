"""Repeat a training by PyTorch, in a process of its own."""

from dataclasses import dataclass
from typing import Callable, Iterable, Sequence

import numpy as np
from mpi4py import MPI

from bench.errors import UsageError, as_usage_error
from bench.experiments.experts.problem import routing_settings
from bench.experiments.torch.child import TorchProcesses, compare_kernels, gpt_step_flops
from bench.experiments.torch.serve import TimedProduct
from bench.experiments.training.history import History
from bench.experiments.training.plain_gpt import State
from bench.experiments.training.plan import Plan
from bench.experiments.training.text import Text, VOCAB
from bench.records.model_run import Numbers
from mm3d.arrays import backend as backends


@dataclass(frozen=True)
class TorchTraining:
    """The results of a training by PyTorch.

    Attributes
    ----------
    about : str
        Version, threads and instructions of the library.
    history : History
        Losses and seconds of all steps, and validations.
    kernels : Numbers
        See `bench.experiments.torch.child.compare_kernels`.
    """

    about: str
    history: History
    kernels: Numbers


def check_torch(plan: Plan) -> None:
    """Raise UsageError for a plan that PyTorch cannot follow exactly."""
    if plan.dropout:
        raise UsageError(f"--torch with --dropout {plan.dropout:g}: PyTorch draws other masks; "
                         f"leave one of them out")
    with as_usage_error():
        plan.architecture.require_plain("--torch")
    if plan.dtype not in ("float32", "float64"):
        raise UsageError(f"--torch with --dtype {plan.dtype}: float32 or float64 would do")


def train_by_torch(python: str, plan: Plan, text: Text, state: State, steps: int,
                   validated: Iterable[int], validation_batches: int,
                   report: Callable[[int, History], None] = lambda step, history: None,
                   microbatches: int = 1, products: Sequence[TimedProduct] = ()) -> TorchTraining:
    """Train a model by PyTorch, from the same state on the same batches in the same order.

    Parameters
    ----------
    validated : iterable of int
        After how many steps to validate.
    report : callable
        Called after each step and each validation with the number of steps done.
    microbatches : int
        Parts of a batch whose tokens are routed together; without experts it changes nothing.
    products : sequence of TimedProduct
        Products whose seconds compare the kernels of both sides.

    Raises UsageError when the interpreter cannot train it.
    """
    together = microbatches if plan.experts else 1
    routing = plan.experts and routing_settings(
        plan.experts, plan.batch // together * plan.seq, plan.layers)
    case = {**plan.settings(), "rates": [plan.rate(step) for step in range(steps)],
            "routing": routing, "microbatches": together}
    # Beside this rank alone: the others may have PyTorch, too, or do something else.
    process = TorchProcesses(python, "models:TorchSteps", case,
                             {**state, **_draw_tokens(plan, text, steps, validation_batches)},
                             MPI.COMM_SELF, "train the model")
    history, at = History(), {*validated}
    try:
        kernels = compare_kernels(products, plan.dtype, backends.get("numpy"), process, plan.seed,
                                  _products_flops(plan))
        for step in range(steps + 1):
            if step in at:
                history.add({"step": step, **process.ask("validate")})
                report(step, history)
            if step < steps:
                found = process.ask("step", str(step))
                history.add({"step": step, "loss": found["loss"],
                             "seconds": found["end"] - found["begin"]})
                report(step + 1, history)
    finally:
        process.close()
    return TorchTraining(process.about, history, kernels)


def _draw_tokens(plan: Plan, text: Text, steps: int,
                 validation_batches: int) -> dict[str, np.ndarray]:
    """Return the tokens of all steps, and of a validation."""
    sizes = plan.batch, plan.seq
    count = min(validation_batches, text.validation_batches(*sizes))
    batches = [_joined(*text.batch(plan.seed, step, *sizes)) for step in range(steps)]
    held_out = [_joined(*text.validation(number, *sizes)) for number in range(count)]
    empty = np.empty((0, plan.batch, plan.seq + 1), np.uint8)
    return {"tokens of steps": np.array(batches or empty),
            "tokens of validation": np.array(held_out)}


def _products_flops(plan: Plan) -> float:
    """Compute the operations of PyTorch's products in a step."""
    sizes = plan.batch * plan.seq, plan.layers, plan.hidden, plan.seq, VOCAB, True
    if plan.experts is None:
        return gpt_step_flops(*sizes)
    with_experts = plan.layers // plan.experts.every
    return gpt_step_flops(*sizes, wide=4 + 4 * (plan.experts.top - 1) * with_experts / plan.layers)


def _joined(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Join tokens and targets to sequences of one token more."""
    return np.concatenate([tokens, targets[:, -1:]], axis=1).astype(np.uint8)
