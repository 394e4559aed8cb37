"""Start PyTorch in a process of its own, and let it train what a training has trained."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable

import numpy as np

from bench.errors import UsageError
from bench.experiments.experts.problem import routing_settings
from bench.experiments.layer.torch_process import torch_environment
from bench.experiments.training.history import History
from bench.experiments.training.plain_gpt import State
from bench.experiments.training.plan import Plan
from bench.experiments.training.text import Text
from mm3d import launcher
from mm3d.child_process import CHILDREN_PRINT


@dataclass(frozen=True)
class TorchTraining:
    """Hold a training by PyTorch.

    Attributes
    ----------
    about : str
        Version, threads and instructions of the library.
    history : History
        Losses and seconds of all steps, and validations.
    """

    about: str
    history: History


def check_torch(plan: Plan) -> None:
    """Raise UsageError for a plan that PyTorch cannot follow exactly."""
    if plan.experts is not None and plan.experts.jitter:
        raise UsageError(f"--torch with --jitter {plan.experts.jitter:g}: PyTorch draws other "
                         f"factors; leave one of them out")
    if plan.dropout:
        raise UsageError(f"--torch with --dropout {plan.dropout:g}: PyTorch draws other masks; "
                         f"leave one of them out")
    if plan.dtype not in ("float32", "float64"):
        raise UsageError(f"--torch with --dtype {plan.dtype}: float32 or float64 would do")


def check_interpreter(python: str) -> None:
    """Raise UsageError, with what it says, for an interpreter without torch or numpy."""
    try:
        done = subprocess.run([python, "-c", "import numpy, torch"], env=torch_environment(),
                              encoding=CHILDREN_PRINT, errors="replace", capture_output=True)
    except OSError as error:
        raise UsageError(f"--torch {python}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"]
        raise UsageError(f"--torch {python}: {said[-1]}; an interpreter with torch and numpy "
                         f"would do")


def train_by_torch(python: str, plan: Plan, text: Text, state: State, steps: int,
                   validated: Iterable[int], validation_batches: int,
                   report: Callable[[int, History], None] = lambda step, history: None,
                   microbatches: int = 1) -> TorchTraining:
    """Train a model by PyTorch, from the same state on the same batches in the same order.

    Parameters
    ----------
    python : str
        An interpreter that has PyTorch.
    plan, text : Plan, Text
        What is trained.
    state : mapping
        The initial parameters by name.
    steps : int
        How many steps to train.
    validated : iterable of int
        After how many steps to validate.
    validation_batches : int
        Batches of a validation.
    report : callable
        Called after each step and each validation with the number of steps done.
    microbatches : int
        Parts of a batch whose tokens are routed together; without experts it changes nothing.

    Raises
    ------
    UsageError
        When the interpreter cannot train it.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_case(Path(folder), plan, text, state, steps, validated, validation_batches,
                   microbatches if plan.experts else 1)
        script = Path(__file__).with_name("torch_gpt.py")
        history = History()
        try:
            process = subprocess.Popen([python, str(script), folder, str(launcher.cores())],
                                       env=torch_environment(), encoding=CHILDREN_PRINT,
                                       errors="replace", stdout=subprocess.PIPE)
        except OSError as error:
            raise UsageError(f"--torch {python}: {error.strerror}") from error
        with process:
            about = process.stdout.readline().strip()
            for line in process.stdout:
                entry = json.loads(line)
                history.add(entry)
                report(entry["step"] + ("loss" in entry), history)
    if process.returncode or not about:
        raise UsageError(f"--torch {python} could not train the model, as it says above: an "
                         f"interpreter with torch and numpy would do")
    return TorchTraining(about, history)


def write_case(folder: Path, plan: Plan, text: Text, state: State, steps: int,
               validated: Iterable[int], validation_batches: int, microbatches: int) -> None:
    """Write parameters, tokens and settings for `torch_gpt`."""
    sizes = plan.batch, plan.seq
    count = min(validation_batches, text.validation_batches(*sizes))
    batches = [joined(*text.batch(plan.seed, step, *sizes)) for step in range(steps)]
    held_out = [joined(*text.validation(number, *sizes)) for number in range(count)]
    empty = np.empty((0, plan.batch, plan.seq + 1), np.uint8)
    np.savez(folder / "case.npz", **state, **{
        "tokens of steps": np.array(batches or empty), "tokens of validation": np.array(held_out)})
    routing = None
    if plan.experts is not None:
        routing = routing_settings(plan.experts, plan.batch // microbatches * plan.seq,
                                   plan.layers)
    (folder / "case.json").write_text(json.dumps(
        {**plan.settings(), "rates": [plan.rate(step) for step in range(steps)],
         "validated": sorted(validated), "routing": routing, "microbatches": microbatches}),
        encoding="utf-8")


def joined(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Join tokens and targets to sequences of one token more."""
    return np.concatenate([tokens, targets[:, -1:]], axis=1).astype(np.uint8)
