"""Slow the links of a row and its waits together, until software is a small share of a step.

On an emulated cluster many ranks share few cores for software, which is not waited for: Python,
copies, sums, TCP.  It takes equally long however slow the links are.  With links slower and waits
longer by a factor, a step takes that factor longer, and software a smaller share of it.  Printed
times are divided by the factor again, so that rows compare.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from bench.agreement import agree
from bench.cases.case import Case
from bench.cluster.spec import Cluster
from bench.errors import Failed
from bench.instruments import host
from bench.instruments.waited_work import WorkClock
from bench.records.model_run import make_group
from bench.records.measurements import Group, Measurements
from mm3d.launcher import wait_patiently
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES

STEPS = 2    # without links and waits, after one that does not count
LEAST_LINK = 1e4    # bit/s, below which no link is slowed

Change = Callable[[float | None], None]
Predicted = dict[str, tuple[float, float]]    # seconds of work and of links, by phase
# Of a step here, and of a layer's step on the machine that is emulated, at the published sizes;
# {} where sizes were given by hand.
Both = tuple[Predicted, Predicted]


@dataclass(frozen=True)
class Dilation:
    """How the rows of a job are dilated.

    Attributes
    ----------
    share : float
        The share of a step that software may take; 0 to slow nothing.
    link : float or None
        The rate of the links that are not slowed, in bit/s; None for no limit.
    predict : callable
        Predicts, on rank 0, steps without software: from a case, its grid, the order of the
        directions over the nodes, and the rate of links here.
    change : callable
        Sets the rate of all links in bit/s, None for no limit; called on rank 0.
    """

    share: float
    link: float | None
    predict: Callable[[Case, GridShape, str, float | None], Both]
    change: Change


def dilation_groups(samples: np.ndarray, predicted: Both) -> dict[str, Group]:
    """Return the groups ``software`` and ``predicted`` of a run that is slowed.

    `samples` are seconds of steps without links and waits, (phases, repetitions), and `predicted`
    those of steps that are not slowed, predicted before any was measured.
    """
    seconds = {name: [found[phase] for phase in PHASES]
               for name, found in zip(("seconds", "machine_seconds"), predicted) if found}
    return {"software": make_group("model.software", {"s": {"samples": samples}}),
            "predicted": make_group("model.predicted", {"s": seconds})}


def slow_down(comm: Any, waits: WorkClock, dilation: Dilation,
              sample: Callable[[], list[float]], predicted: float) -> tuple[float, np.ndarray]:
    """Time steps without links and waits, and slow both by the `dilation_factor` for them.

    Every rank calls this.  `sample` times a step and returns the makespans of its phases, the same
    on every rank; rank 0 reads `predicted`, the seconds of a step for links and waits alone.

    Returns the factor, and the seconds of the steps, (phases, repetitions).
    """
    run_free(comm, waits, dilation)
    samples = np.array([sample() for _ in range(1 + STEPS)])[1:].T
    factor = comm.bcast(
        dilation_factor(float(np.median(samples.sum(axis=0))), predicted, dilation.share,
                        dilation.link) if comm.rank == 0 else None)
    waits.pace = factor
    set_links(dilation.link and dilation.link / factor, comm, dilation.change)
    return factor, samples


def run_free(comm: Any, waits: WorkClock, dilation: Dilation) -> None:
    """Let the following steps wait for nothing, and links have no limit."""
    set_links(None, comm, dilation.change)
    waits.pace = 0.0


def note_dilation(record: Measurements, factor: float, dilation: Dilation) -> None:
    """Note in a record that links and waits were slowed; its cluster's rate is not slowed."""
    record.configuration.update(dilation=factor, software_share=dilation.share)
    cluster = Cluster.from_environment()
    if cluster:
        record.environment.update(host.cluster_environment(replace(cluster, link=dilation.link)))


def dilation_factor(software: float, predicted: float, share: float,
                    link: float | None) -> float:
    """Return the least factor, of two digits, at which software takes at most its share of a step.

    `software` are the seconds of a step without links and waits, `predicted` those of links and
    waits alone; a share of 0 is no bound; `link` is the rate of links that are not slowed, in
    bit/s, None for no limit.
    """
    if software <= share * predicted or not share:
        return 1.0
    wanted = software / (share * predicted)
    unit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    most = max(1.0, link / LEAST_LINK) if link else math.inf
    return min(math.ceil(round(wanted / unit, 6)) * unit, most)


def set_links(link: float | None, comm: Any, change: Change) -> None:
    """Let rank 0 set the rate of all links, while the other ranks wait.

    Raises Failed on every rank, when it cannot.
    """
    comm.Barrier()
    problem = ""
    if comm.rank == 0:
        try:
            change(link)
        except OSError as error:
            problem = str(error)
    wait_patiently(comm)    # so that what rank 0 has started gets a core
    agree(problem, comm, Failed)
