"""Read measured products and Transformers from files of results."""

import math
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from bench.errors import StoreError
from bench.instruments import timing
from bench.prediction.machine_model import Machine
from bench.prediction.work import NAMES, Seconds, Work
from bench.records import run_file
from bench.records.folder import read_runs
from bench.records.measurements import Measurements, grid_shape
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Measured:
    """Measured products or Transformers: what ran, where, and how long it took.

    Attributes
    ----------
    work, dtype : Work, str
        The work, and the dtype of its arrays.
    seconds : dict of str to float
        Medians by phase, or of a "step".
    published : float or None
        The published average step time, if any.
    transport : str
        How its collectives travelled; "" where that is not known.
    """

    work: Work
    dtype: str
    seconds: Seconds
    published: float | None = None
    transport: str = ""

    def fits(self, machine: Machine) -> bool:
        """Check whether `machine` is a model for these ranks and this transport.

        A measured one is for as many ranks as measured it; nothing is said of a transport that
        is not known.
        """
        same = not machine.passes or self.work.ranks == machine.ranks_per_node
        return same and machine.travels(self.transport)


def measured(run: run_file.Run | Measurements) -> Iterator[Measured]:
    """Read the products and Transformers in a file of results."""
    chosen = run.configuration
    more = {"transport": chosen.get("transport", "")}
    if isinstance(run, run_file.Run):
        published = run.published["recomputed_step_time"]
        work = Work("layer", chosen["scheme"], grid_shape(chosen),
                    tuple(chosen[name] for name in NAMES["layer"]))
        yield Measured(work, chosen["dtype"],
                       {phase: timing.typical(run.samples[phase]) for phase in PHASES},
                       None if math.isnan(published) else published, **more)
    elif run.kind == "matmul":
        work = Work("matmul", chosen["scheme"], grid_shape(chosen),
                    tuple(chosen[name] for name in "MNK"), chosen["form"])
        seconds = run.variables["seconds"].values[:, 0, 0]
        yield Measured(work, chosen["dtype"], dict(zip(run.scales["phase"], seconds.tolist())),
                       **more)
    elif run.kind == "layer":
        work = Work("layer", chosen["scheme"], grid_shape(chosen),
                    tuple(chosen[name] for name in NAMES["layer"]))
        yield Measured(work, chosen["dtype"], {"step": run.variables["seconds"].values[0, 0]},
                       **more)
    elif run.kind == "check":
        for label, times in zip(run.scales["work"], run.variables["samples"].values):
            seconds = dict(zip(run.scales["phase"], np.median(times, axis=-1).tolist()))
            yield Measured(Work.of(label), chosen["dtype"], seconds, **more)


def collected(folder: str) -> tuple[list[Measured], list[str]]:
    """Read what the files in `folder` have measured, and say which could not be read.

    Raises
    ------
    StoreError
        When there is no such folder, or nothing in it.
    """
    runs, problems = read_runs(folder)
    found = [one for run in runs for one in measured(run)]
    if not found:
        raise StoreError(f"{folder}: no measured products or Transformers")
    return found, problems
