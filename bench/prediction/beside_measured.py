"""Read measured products and Transformers from files of results."""

import math
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from bench.errors import StoreError
from bench.prediction.machine_model import Machine
from bench.prediction.work import SIZE_NAMES, Seconds, Work
from bench.records import model_run
from bench.records.folder import read_runs
from bench.records.measurements import Measurements, grid_shape
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Measured:
    """A measured product or Transformer: median seconds by phase, or of a whole "step".

    `published` is the published average step time, if there is one; the transport of its
    collectives is "" if unknown.
    """

    work: Work
    dtype: str
    seconds: Seconds
    published: float | None = None
    transport: str = ""

    def matches(self, machine: Machine) -> bool:
        """Return whether `machine` is a model for these ranks and this transport.

        A measured model is for the number of ranks that measured it.  An unknown transport
        matches all.
        """
        same = not machine.passes or self.work.grid.ranks == machine.measured_ranks
        return same and machine.matches_transport(self.transport)


def read_measured(run: Measurements) -> Iterator[Measured]:
    """Read the products and Transformers in a file of results."""
    chosen = run.configuration
    more = {"transport": chosen.get("transport", "")}

    def work(kind: str, form: str = "") -> Work:
        return Work(kind, chosen["scheme"], grid_shape(chosen),
                    tuple(chosen[name] for name in SIZE_NAMES[kind]), form)

    if isinstance(run, model_run.Run):
        published = run.published["recomputed_step_time"]
        yield Measured(work("layer"), chosen["dtype"],
                       {phase: model_run.typical(run.times[phase]) for phase in PHASES},
                       None if math.isnan(published) else published, **more)
    elif run.kind == "matmul":
        seconds = run.variables["seconds"].values[:, 0, 0]
        yield Measured(work("matmul", chosen["form"]), chosen["dtype"],
                       dict(zip(run.scales["phase"], seconds.tolist())), **more)
    elif run.kind == "layer":
        yield Measured(work("layer"), chosen["dtype"],
                       {"step": run.variables["seconds"].values[0, 0]}, **more)
    elif run.kind == "check":
        for label, times in zip(run.scales["work"], run.variables["samples"].values):
            seconds = dict(zip(run.scales["phase"], np.median(times, axis=-1).tolist()))
            yield Measured(Work.parse(label), chosen["dtype"], seconds, **more)


def read_measured_folder(folder: str) -> tuple[list[Measured], list[str]]:
    """Read all measured products and Transformers of a folder.

    Returns the measurements, and a line for each file that could not be read.  Raises StoreError
    when there is no such folder, or no measurement in it.
    """
    runs, problems = read_runs(folder)
    found = [one for run in runs for one in read_measured(run)]
    if not found:
        raise StoreError("; ".join([f"{folder}: no measured products or Transformers", *problems]))
    return found, problems
