"""Join rows at several rates of links, which are alike else, to records of the kind "sweep"."""

from dataclasses import replace
from typing import Callable, Iterable

import numpy as np

from bench.cluster.spec import Cluster
from bench.records.model_run import Run, make_record
from bench.records.kinds.sweep import SweptPlan
from bench.records.measurements import Measurements
from mm3d.tracing.events import PHASES

# What rows of one record share; scheme, grid, placement, batch and overlap make its plans.
ALIKE = ("table", "preset", "layers", "seq", "dtype", "causal", "keep", "recompute", "seed",
         "waited_machine", "waited_scale", "waited_shrink")
PLAN = {"grid", "batch", "overlap"}
GROUPS = {"waits", "software", "predicted"}    # of rows whose work was waited for in a cluster


def join_rates(rows: Iterable[Run]) -> list[Measurements]:
    """Join rows of one emulated cluster that were measured at several rates of its links.

    Plans that were measured at other rates than others have a record of their own.

    Rows are given oldest first: of several of one plan at one rate the last one counts.
    """
    found: dict[tuple, dict[float, Run]] = {}
    for run in rows:
        chosen, where = run.configuration, run.environment.get("emulated_cluster")
        if not (where and GROUPS <= run.groups.keys() and chosen.get("placement")):
            continue
        cluster = Cluster.parse(str(where))
        by_hand = [(name, chosen[name]) for name in str(chosen["overridden"]).split()
                   if name not in PLAN]
        alike = (replace(cluster, link=None), *map(chosen.get, ALIKE), *by_hand)
        rate = np.inf if cluster.link is None else cluster.link
        plan = SweptPlan(chosen["scheme"], run.grid, chosen["placement"], chosen["batch"],
                         int(chosen.get("overlap", 0)))
        found.setdefault((alike, plan.label), {})[rate] = run
    joined: dict[tuple, dict[str, list[Run]]] = {}
    for (alike, plan), at in sorted(found.items(), key=lambda one: one[0][1]):
        links = tuple(sorted(at))
        joined.setdefault((alike, links), {})[plan] = [at[link] for link in links]
    return [_join(links, plans) for (_, links), plans in joined.items() if len(links) > 1]


def _join(links: tuple[float, ...], plans: dict[str, list[Run]]) -> Measurements:
    """Join the rows of plans at these rates; times are those of rows that are not slowed."""
    every = [run for runs in plans.values() for run in runs]
    most = max(len(run.samples["forward"]) for run in every)

    def over(what: Callable[[Run], np.ndarray]) -> np.ndarray:
        return np.array([[what(run) for run in runs] for runs in plans.values()])

    def slowest(run: Run) -> np.ndarray:
        times = np.array([run.times[phase].max(axis=1) for phase in PHASES])
        return np.pad(times, ((0, 0), (0, most - times.shape[1])), constant_values=np.nan)

    chosen = every[0].configuration
    settings = {"recompute": "none", "rows": len(every)} | {
        name: chosen[name] for name in ALIKE if name in chosen}
    record = make_record("sweep", settings, every[0].environment, {
        "s": {"samples": over(slowest),
              "predicted": over(lambda run: run.of_group("predicted", "seconds")),
              "software": over(lambda run: np.median(
                  run.of_group("software", "samples").sum(axis=0)) / run.dilation),
              "work": over(lambda run: (
                  run.of_group("waits", "modelled").max(axis=1) / run.dilation))[:, 0]},
        "1": {"bound": over(lambda run: run.software_bound)}},
        [check for run in every for check in run.checks], plan=list(plans), link=links)
    return replace(record, created=max(run.created for run in every))
