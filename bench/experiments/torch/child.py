"""Start processes in which PyTorch computes a subject, asleep until they are asked.

Before steps of both sides are compared, the same local products are measured by one thread of mm3d
and of PyTorch: the ratio of steps that remains when both multiply equally fast is not due to
kernels.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from bench.agreement import agree
from bench.errors import UsageError
from bench.experiments.torch import serve
from bench.experiments.torch.serve import TimedProduct, product_seconds
from bench.instruments.host import mask_variables
from bench.instruments.sampling import SETTLE, Sample, compare_in_turns, time_alone
from bench.instruments.timing import Limits
from bench.records.model_run import Numbers
from mm3d import launcher
from mm3d.arrays.backend import Backend
from mm3d.child_process import CHILDREN_PRINT
from mm3d.launcher import wait_patiently

# Variables that mm3d or its launcher sets for ranks; the child is no rank.
OF_RANKS = ("MPI", "OPENBLAS_")
LIMITS = Limits(5, 15, 10.0)    # of products
SIDES = ("mm3d", "PyTorch")


class TorchProcesses:
    """Processes of PyTorch beside the first ranks, asleep between two questions.

    `about` is the version, threads, products and settings of the library, on ranks with a process;
    `cores` says how many all processes can use.

    Parameters
    ----------
    subject : str
        The file of this folder and its class that compute, such as "models:TorchLayer".
    case : dict
        Settings for all processes, with the "dtype"; needed on rank 0.
    arrays : mapping of str to ndarray, or None
        The arrays of this rank's process; None for those of rank 0's.
    comm : mpi4py.MPI.Intracomm
        The ranks, on one node; each creates it.
    what : str
        The work, for the message that PyTorch could not do it.
    ranks : int
        Number of processes, one beside each of the first ranks, which share the cores.

    Raises UsageError on all ranks, when the interpreter cannot do it.
    """

    def __init__(self, python: str, subject: str, case: Mapping[str, Any],
                 arrays: Mapping[str, np.ndarray] | None, comm: Any, what: str,
                 ranks: int = 1) -> None:
        self.comm, self.ranks, self.what, self._process = comm, ranks, what, None
        self._made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
        self._folder = Path(comm.bcast(self._made and self._made.name))
        threads = max(1, launcher.cores() // ranks)
        self.cores = min(launcher.cores(), threads * ranks)
        if comm.rank == 0:
            (self._folder / "case.json").write_text(json.dumps({**case, "subject": subject}),
                                                    encoding="utf-8")
        if arrays is not None:
            np.savez(self._folder / f"arrays-{comm.rank}.npz", **arrays)
        comm.Barrier()
        library = "colossal" if subject.startswith("colossal:") else "torch"
        self._asked = f"--{library} {python}"
        problem = self._start(python, threads, library) if comm.rank < ranks else None
        wait_patiently(comm)
        try:
            agree(problem, comm)
        except UsageError:
            self.close()
            raise

    def _start(self, python: str, threads: int, library: str) -> str | None:
        """Start this rank's process; return why it cannot do its work, None if it can."""
        needed = {"torch": "torch and numpy", "colossal": "colossalai, torch and numpy"}
        command = [python, serve.__file__, self._folder, self.comm.rank, self.ranks, threads]
        try:
            self._process = subprocess.Popen(
                [str(word) for word in command], env=_torch_environment(), encoding=CHILDREN_PRINT,
                errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            return f"{self._asked}: {error.strerror}"
        line = self._process.stdout.readline()
        try:
            about = json.loads(line) if line else {"problem": "it says above why"}
        except ValueError:    # of a program that is no Python
            about = {"problem": f"it answers {line.strip()!r}"}
        if "problem" in about:
            return (f"{self._asked} could not {self.what}: {about['problem']}; an interpreter "
                    f"with {needed[library]} would do")
        self.about = _describe(about, self.ranks)
        return None

    def answer(self, *words: str) -> dict[str, Any]:
        """Have this rank's process alone do something; return its answer, {} without a process.

        Raises UsageError on this rank, when the process has ended, such as for want of memory.
        """
        if not self._process:
            return {}
        line = ""
        with contextlib.suppress(BrokenPipeError):    # it ended while it was asleep
            self._process.stdin.write(f"{' '.join(words)}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            how = f"by signal {-status}" if status < 0 else "as it says above"
            raise UsageError(f"{self._asked} could not {self.what}: its process has ended, {how}")
        found = json.loads(line)
        if found.pop("arrays", False):
            with np.load(self._folder / f"answer-{self.comm.rank}.npz") as arrays:
                found |= dict(arrays)
        return found

    def ask(self, *words: str, settle: float = 0.0) -> dict[str, Any]:
        """Have all processes do something as `answer`, then sleep some seconds where one has.

        Raises UsageError on all ranks, when a process has ended.
        """
        found, problem = {}, None
        try:
            found = self.answer(*words)
        except UsageError as error:
            problem = str(error)
        if found:
            time.sleep(settle)
        wait_patiently(self.comm)
        agree(problem, self.comm)
        return found

    def take_turn(self, *words: str) -> dict[str, Any]:
        """Have all processes do something as `ask`, when the other sides sleep."""
        wait_patiently(self.comm)
        return self.ask(*words, settle=SETTLE)

    def sample(self, *words: str) -> Sample:
        """Have all processes take a step, by default; return their times and answers.

        Both are the same on every rank; the times are NaN on ranks without a process.
        """
        every = self.comm.allgather(self.take_turn(*words or ("step",)))[:self.ranks]
        times = np.full((self.comm.size, 2), np.nan)
        times[:self.ranks] = [(one["begin"], one["end"]) for one in every]
        return Sample(times - np.nanmin(times), every)

    def close(self) -> None:
        """End the processes; every rank must call it."""
        if self._process:
            with contextlib.suppress(BrokenPipeError):    # of a question that none has read
                self._process.stdin.close()
            self._process.wait()
        wait_patiently(self.comm)
        if self._made:
            self._made.cleanup()


def check_interpreter(python: str) -> None:
    """Raise UsageError, with the interpreter's own error, if it lacks torch or numpy."""
    try:
        done = subprocess.run([python, "-c", "import numpy, torch"], env=_torch_environment(),
                              encoding=CHILDREN_PRINT, errors="replace", capture_output=True)
    except OSError as error:
        raise UsageError(f"--torch {python}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"]
        raise UsageError(f"--torch {python}: {said[-1]}; an interpreter with torch and numpy "
                         f"would do")


def _torch_environment() -> dict[str, str]:
    """Return the environment of a process that is no rank: the user's settings stay."""
    hidden = (*launcher.LAUNCHER_PREFIXES, *OF_RANKS)
    return {"GLOO_SOCKET_IFNAME": "lo"} | {
        name: value for name, value in os.environ.items()
        if not name.startswith(hidden) and name not in launcher.BLAS_THREAD_VARIABLES}


def _describe(about: Mapping[str, Any], ranks: int) -> str:
    """Describe PyTorch: version, threads, products and settings."""
    words = [f"ColossalAI {about['colossal']}"] if "colossal" in about else []
    words += [f"PyTorch {about['version']}", *["gloo"] * (ranks > 1),
              f"{about['threads']} thread{'s' * (about['threads'] != 1)}{' a rank' * (ranks > 1)}"]
    if about["blas"]:
        words.append(f"products by {about['blas'].upper()} "
                     f"({about['instructions'] or 'it does not say by which instructions'})")
    settings = mask_variables(about["settings"])
    return ", ".join([*words, *[settings] * bool(settings)])


def compare_kernels(products: Sequence[TimedProduct], dtype: str, backend: Backend,
                    reference: TorchProcesses, seed: int, torch_flops: float) -> Numbers:
    """Measure products by one thread of rank 0 and one of PyTorch's, in turns.

    Parameters
    ----------
    products : sequence of TimedProduct
        The products of rank 0 in a step; every rank calls this.
    torch_flops : float
        The operations of PyTorch's step.

    Returns
    -------
    Numbers
        For the record on rank 0: the seconds of (`SIDES`, rounds), their operations and those of
        PyTorch's step, and the cores that its processes can use; {} where the products are a
        device's, or there are none.

    Raises
    ------
    UsageError
        On all ranks, when PyTorch's process has ended.
    """
    comm = reference.comm
    if not comm.bcast(bool(products) and backend.host_buffers):
        return {}

    def mine() -> float:
        with threadpool_limits(1, user_api="blas"):
            return product_seconds(
                products, lambda *shape: backend.asarray(np.ones(shape, dtype)),
                lambda a, b, out: backend.xp.matmul(a, b, out=out))

    def theirs() -> float:
        text = json.dumps(products, separators=(",", ":"))
        return reference.answer("products", dtype, text)["seconds"]

    found, _ = compare_in_turns({side: partial(time_alone, measure, comm)
                                 for side, measure in zip(SIDES, (mine, theirs))},
                                LIMITS, seed, comm)
    return {"s": {"product_samples": [[one.seconds for one in found[side]] for side in SIDES]},
            "1": {"product_flops": sum(2 * rows * n * columns * count
                                       for rows, n, columns, *_, count in products),
                  "torch_flops": float(torch_flops), "torch_cores": reference.cores}}


def gpt_step_flops(tokens: int, layers: int, hidden: int, seq: int, vocab: int = 0,
                   causal: bool = False, wide: float = 4.0) -> float:
    """Compute the operations of the products of a training step of a GPT, or of its layers.

    `wide` is the width of the MLP over that of a token; with experts, of all those of a token.
    """
    scores = seq / 2 if causal else seq
    layer = (4 + 2 * wide) * hidden ** 2 + 2 * scores * hidden
    return 6.0 * tokens * (layers * layer + vocab * hidden)
