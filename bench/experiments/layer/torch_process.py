"""Start PyTorch in a process of its own, to verify a layer and to measure it beside."""

import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mm3d
from bench.checks.against_serial import build_model
from bench.errors import UsageError
from mm3d import ModelSizes, launcher
from mm3d.child_process import CHILDREN_PRINT


class TorchScript:
    """A process in which PyTorch runs a script of this package, asleep between two steps.

    The script reads ``case.npz`` in the folder that it is given, with the number of threads, and
    runs a step; it writes the results to ``result.npz`` and prints a line about the library.
    Then, for each line on its standard input, it runs another step and prints its seconds.

    Parameters
    ----------
    python : str
        An interpreter that has PyTorch.
    script : path
        The script.
    case : dict of str to ndarray
        What it reads.
    what : str
        What it computes, for the message.

    Attributes
    ----------
    about : str
        Version, threads and instructions of the library.
    results : dict of str to ndarray
        The results of its first step, by quantity.

    Raises
    ------
    UsageError
        When the interpreter cannot compute it.
    """

    def __init__(self, python: str, script: Path, case: dict[str, np.ndarray], what: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "case.npz", **case)
            try:
                self._process = subprocess.Popen(
                    [python, str(script), folder, str(launcher.cores())],
                    env=torch_environment(), encoding=CHILDREN_PRINT, errors="replace",
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                raise UsageError(f"--torch {python}: {error.strerror}") from error
            self.about = self._process.stdout.readline().strip()
            if not self.about:
                self._process.wait()
                raise UsageError(f"--torch {python} could not do the {what}, as it says above: an "
                                 f"interpreter with torch and numpy would do")
            with np.load(Path(folder) / "result.npz") as found:
                self.results = dict(found)

    def step(self, which: str = "") -> float:
        """Run another step, the one that the script calls `which`; return its seconds."""
        self._process.stdin.write(f"{which}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


class TorchProcess(TorchScript):
    """A process in which PyTorch computes the layer of `sizes`, asleep between two steps.

    Parameters
    ----------
    python : str
        An interpreter that has PyTorch.
    sizes, seed, dtype
        The layer; see `bench.checks.against_serial.build_model`.
    """

    def __init__(self, python: str, sizes: ModelSizes, seed: int, dtype: str) -> None:
        case = {"heads": np.array(sizes.heads), **global_arrays(sizes, seed, dtype)}
        super().__init__(python, Path(__file__).with_name("torch_layer.py"), case, "layer")


def torch_environment() -> dict[str, str]:
    """Return the environment of a process that is no rank and chooses its own threads."""
    hidden = (*launcher.LAUNCHER_PREFIXES, "MPI", "OMP_", "MKL_", "OPENBLAS_")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)}


def global_arrays(sizes: ModelSizes, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Draw the input, the output's gradient and the parameters of the layer as global arrays."""
    model = build_model(mm3d.scheme("serial", MPI.COMM_SELF, backend="numpy"), sizes, seed, dtype)
    arrays = {p.name: p.value.reshape(p.public_shape) for p in model.parameters}
    return arrays | {name: model.random(name) for name in ("input", "output gradient")}
