"""List what breaks no rule for citing a run, but must be known to its reader."""

import math
from typing import Iterator

import numpy as np

from bench.cases.variants import recorded_variant
from bench.checks.names import split_checks
from bench.instruments import step_seconds
from bench.records.schema import UNKNOWN
from bench.records.measurements import Measurements
from bench.records.model_run import Run
from mm3d.schemes import registry
from mm3d.tracing.events import PHASES

# What waited work means, by the kind of run.
WAITED = {"model": "ranks waited for the modelled seconds of their work: only collectives were "
                   "real",
          "pipeline": "ranks waited for seconds that were chosen, in place of layers: only "
                      "messages and their order were real"}


def list_warnings(run: Measurements) -> Iterator[str]:
    """List the warnings: facts that break no rule, but must be known to the reader."""
    if run.environment["git_commit"] == UNKNOWN:
        yield "the commit of the source is unknown: nobody can tell what was measured"
    elif not run.environment["git_clean"]:
        yield "the source had changes that were not committed: nobody else can build it"
    waits = recorded_variant(run.configuration).waits
    if waits:
        yield WAITED.get(run.kind, WAITED["model"])
    if run.environment["oversubscribed"]:
        yield ("ranks outnumber cores, which they share for all that is not waited for" if waits
               else "ranks outnumber cores: its times are no scaling results")
    count = count_repetitions(run)
    if count < 6:
        yield f"{count} repetitions give no 95 % interval: at least six do"
    if not isinstance(run, Run):
        return
    for phase in PHASES if count > 5 else ():
        found = step_seconds.slowest(run.samples[phase])
        if found[0] == found.max() and found[0] > 1.5 * np.median(found):
            yield (f"the first {phase} that counts took {found[0] / np.median(found):.1f} times "
                   f"the median: more than {run.configuration['warmup']} steps to warm up would "
                   f"do")
    measured = split_checks(run.checks)[1]
    if not run.configuration["verified_measured_model"] and not measured:
        yield "a smaller model was verified, the measured one was not: measure it again"
    if run.ended_by == "stopped":
        yield "it was told to stop before its repetitions were done"
    if run.configuration["scheme"] not in registry():
        yield f"scheme {run.configuration['scheme']} is unknown: its words were not checked"


def count_repetitions(run: Measurements) -> float:
    """Return the number of repetitions; infinite where a microbenchmark has no such dimension.

    Where its cases have different numbers it is that of the case with the most.
    """
    return len(run.scales["repetition"]) if "repetition" in run.scales else math.inf
