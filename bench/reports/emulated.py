"""State that figures were measured in an emulated cluster."""

from collections.abc import Sequence

from msgspec.structs import replace

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row
from bench.cases.selection import select_rows
from bench.cases.variants import recorded_variant
from bench.records.folder import Results, most_oversubscribed, share_cores
from bench.records.measurements import Measurements
from bench.records.model_run import Run
from bench.records.notes import MODELLED, describe_cluster


def emulated_runs(runs: Sequence[Run | None]) -> list[Run]:
    """Return the runs that ran in an emulated cluster."""
    return [run for run in runs if run and "emulated_cluster" in run.environment]


def other_runs(runs: Sequence[Run | None]) -> list[Run]:
    """Return the runs that ran in no emulated cluster."""
    return [run for run in runs if run and "emulated_cluster" not in run.environment]


def describe_clusters(runs: Sequence[Run | None]) -> str:
    """Return the different emulated clusters of runs; "" if there are none."""
    return " and ".join(dict.fromkeys(describe_cluster(run.environment)
                                      for run in emulated_runs(runs)))


def swept_rates(runs: Sequence[Run]) -> list[Measurements]:
    """Join the rows of emulated clusters that differ in the rates of links alone."""
    if len({run.environment["emulated_cluster"] for run in emulated_runs(runs)}) < 2:
        return []    # as in almost all folders
    from bench.records.at_rates import join_rates
    return join_rates(runs)


def waited_rows(results: Results) -> list[tuple[Row, Run]]:
    """List the rows that were measured on an emulated cluster, with waited work."""
    rows = [row for name in HEADINGS for row in select_rows(name)]
    likes = [replace(row, like=like) for row in rows for like in (PROPOSED, *BASELINES)]
    pairs = [(row, results.get(row)) for row in [*rows, *likes]]
    return [(row, run) for row, run in pairs if run and recorded_variant(run.configuration).waits
            and "emulated_cluster" in run.environment]


def state_conditions(runs: Sequence[Run | None]) -> str:
    """Return the conditions of figures in brackets, for their heading; "" for plain conditions.

    They name emulated clusters, and warn of ranks that waited instead of computing and of ranks
    that outnumber cores: without links that take time, such figures are no scaling results.
    """
    clusters, emulated = describe_clusters(runs), emulated_runs(runs)
    others = most_oversubscribed(other_runs(runs))
    crowded = most_oversubscribed(emulated)
    said = [clusters] if clusters else []
    waits = any(run and recorded_variant(run.configuration).waits for run in runs)
    if waits:
        said.append(MODELLED if clusters else "NOT COMPUTED: work is waited for")
    for most, warning in ((crowded, ""), (others, "NOT SCALING RESULTS: " * (not waits))):
        if most:
            said.append(f"{warning}up to {most.ranks} ranks {share_cores(most)}")
    return f" ({'; '.join(said)})" if said else ""


def emulation_notes(runs: Sequence[Run]) -> list[str]:
    """State what figures from emulated clusters show, and what they do not."""
    found = emulated_runs(runs)
    if not found:
        return []
    kernels, controls = (" and ".join(sorted({str(run.environment.get(name, "unknown"))
                                              for run in found}))
                         for name in ("kernel", "emulated_congestion_control"))
    most = most_oversubscribed(found)
    turns = "" if most is None else f" The ranks of all nodes {share_cores(most)}" + (
        ": copies, sums, TCP and Python take longer than with a core for each."
        if recorded_variant(most.configuration).waits else
        ", so computing does not get faster with more of them.")
    return [f"EMULATED CLUSTER: {len(found)} of {len(runs)} rows were measured in an "
            f"{describe_clusters(found)}: network namespaces of one machine, Linux {kernels}. "
            f"Between nodes every byte goes through TCP (congestion control: {controls}) and "
            f"links of that rate, whose time is real; inside a node ranks share memory.{turns} No "
            f"GPU, and no network hardware, was measured."]
