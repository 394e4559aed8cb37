"""Read the runs in a folder, and keep the latest of each."""

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bench.cases.paper import HEADINGS, PAPER, Row, load_tables, unpublished_row
from bench.cases.selection import select_rows
from bench.cases.variants import Variant, recorded_variant
from bench.errors import StoreError
from bench.records import merged, run_file
from bench.records.measurements import Measurements
from bench.records.model_run import Run

RowKey = tuple[str, str, int]  # table, scheme, ranks
# Settings of how long a measurement took, not of its subject.
EFFORT = {"seed", "order", "warmup", "repetitions", "max_repetitions", "max_seconds", "width",
          "calls", "ended_by", "dilation"}
# The environment that runs of the same code on the same machine share.
SAME = ("git_commit", "cpu_model", "cores", "mpi", "blas", "backend", "numpy_version",
        "emulated_cluster")


@dataclass(frozen=True)
class Results:
    """The rows that a folder holds of one preset and variant, or also of one policy or cluster."""

    preset: str
    variant: Variant = Variant()
    # The recomputation policy of its rows if some row was measured with several; otherwise empty,
    # and rows may differ in it.
    recompute: str = ""
    # The emulated cluster of its rows if the same preset, variant and policy was also measured
    # elsewhere; otherwise empty.
    cluster: str = ""
    # All runs of each row, oldest first, by ((table, scheme, ranks), scheme of the row whose batch
    # it was measured with, "" for its own).
    history: dict[tuple[RowKey, str], list[Run]] = field(default_factory=dict)
    overridden: int = 0    # number of runs left out because their sizes were given by hand

    @cached_property
    def runs(self) -> dict[RowKey, Run]:
        """The latest run of each row, by (table, scheme, ranks)."""
        return {key: runs[-1] for (key, like), runs in self.history.items() if not like}

    @cached_property
    def equal(self) -> dict[tuple[RowKey, str], Run]:
        """The latest run of each row with another row's batch, by the keys of `history`."""
        return {key: runs[-1] for key, runs in self.history.items() if key[1]}

    @property
    def earlier(self) -> int:
        """The number of runs left out because a later one of the same row is shown."""
        return sum(len(runs) - 1 for runs in self.history.values())

    @property
    def title(self) -> str:
        """The preset, followed by the variant unless it is the tables' own."""
        return f"{self.preset}{self.label}"

    @property
    def label(self) -> str:
        """The part of the title after the preset; empty for the tables' own rows."""
        return (f"{self.variant.label}{f', recompute {self.recompute}' * bool(self.recompute)}"
                f"{f', cluster {self.cluster}' * bool(self.cluster)}")

    @property
    def slug(self) -> str:
        """The label as part of a file's name."""
        more = (f"-recompute-{self.recompute}" * bool(self.recompute)
                + f"-cluster-{self.cluster}" * bool(self.cluster))
        return self.variant.slug + re.sub(r"[^\w.-]", "-", more)

    @property
    def plain(self) -> bool:
        """Whether these are the tables' own rows, without a variant, policy or cluster."""
        return self.variant == Variant() and not self.recompute and not self.cluster

    def get(self, row: Row) -> Run | None:
        """Return the run of `row`, or None."""
        return self.equal.get((row.key, row.like)) if row.like else self.runs.get(row.key)

    def shown_runs(self) -> list[Run]:
        """Return all runs that tables show, in the tables' order, those of one row together."""
        places = {row.key: place for place, row in enumerate(
            row for table in HEADINGS for row in self.rows(table))}
        found = {(key, ""): run for key, run in self.runs.items()} | self.equal
        return [found[key] for key in sorted(
            found, key=lambda one: (places.get(one[0], len(places)), one[1]))]

    def schemes(self) -> list[str]:
        """Return the paper's schemes, then the others that were run."""
        return list(dict.fromkeys([*PAPER, *sorted(scheme for _, scheme, _ in self.runs)]))

    def rows(self, table: str, scheme: str = "all") -> list[Row]:
        """Return the paper's rows, of a variant those run, then those of other schemes."""
        known = select_rows(table)
        keys = {row.key for row in known}
        if not self.plain:
            known = [row for row in known if self.get(row)]
        rows = known + [unpublished_row(*key) for key in sorted(self.runs.keys() - keys)
                        if key[0] == table]
        return [row for row in rows if scheme in ("all", row.scheme)]


@dataclass(frozen=True)
class FolderContents:
    """The contents of a folder of results."""

    folder: Path    # that of the file if a file was read
    results: list[Results]    # the rows of the tables, one entry a preset, in the presets' order
    # The latest microbenchmark of each configuration, in the order of their making.
    measurements: list[Measurements]
    problems: list[str]    # a message for each file that was left out
    rows: list[Run]    # all of them, oldest first


def read_folder(folder: str | Path) -> FolderContents:
    """Read every file in `folder`, or one file; StoreError when there is no run."""
    runs, problems = read_runs(folder)
    latest = {run_identity(run): run for run in runs if not isinstance(run, Run)}
    rows = [run for run in runs if isinstance(run, Run)]
    home = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    return FolderContents(home, results_by_preset(rows),
                          sorted(latest.values(), key=lambda run: run.created), problems, rows)


def read_runs(path: str | Path) -> tuple[list[Measurements], list[str]]:
    """Read the runs in a folder or a file, oldest first, and list the files that are unreadable.

    Raises StoreError when there is none.
    """
    if not os.path.lexists(path):
        raise StoreError(f"{path} is no folder of results, and no file")
    runs: list[Measurements] = []
    problems: list[str] = []
    for file in run_file.list_files(path) if Path(path).is_dir() else [Path(path)]:
        found, unread = merged.runs_in_file(file)
        runs += found
        problems += unread
    if not runs:
        raise StoreError("\n".join([f"no results in {path}", *problems]))
    # A merged file may lie beside those it was made of.
    once = {(run.created, str(run.configuration), str(run.environment)): run for run in runs}
    return sorted(once.values(), key=lambda run: run.created), problems


def run_identity(run: Measurements) -> tuple:
    """Return the key that runs of one microbenchmark share.

    It holds the emulated cluster, and all settings but those of `EFFORT`.  Trainings also differ
    by seed, by the warmup of the learning rate, and by what ended them.
    """
    aside = EFFORT - {"seed", "warmup", "ended_by"} if run.kind == "training" else EFFORT
    return run.kind, cluster_of(run), tuple(sorted(
        (name, value) for name, value in run.configuration.items() if name not in aside))


def cluster_of(run: Measurements) -> str:
    """Return the emulated cluster of a run, as `bench.cluster.spec` writes it; "" if in none."""
    return str(run.environment.get("emulated_cluster", ""))


def results_by_preset(runs: list[Run]) -> list[Results]:
    """Return rows by preset, in the presets' order, variant, policy and emulated cluster.

    Policies are kept apart if some row was measured with several, clusters always; these are named
    if there are several.
    """
    policies: dict[tuple, set[str]] = {}    # of each row of a preset and variant
    for run in runs:
        if not run.configuration["overridden"]:
            row = run.configuration["preset"], recorded_variant(run.configuration), row_of(run)
            policies.setdefault(row, set()).add(policy_of(run))
    several = {row[:2] for row, names in policies.items() if len(names) > 1}
    groups: dict[tuple[str, Variant, str], dict[str, list[Run]]] = {}
    for run in runs:
        kind = run.configuration["preset"], recorded_variant(run.configuration)
        name = policy_of(run) if kind in several else "none"
        group = groups.setdefault((*kind, "" if name == "none" else name), {})
        group.setdefault(cluster_of(run), []).append(run)
    order = list(load_tables().presets)
    found = []
    for key, group in groups.items():
        for cluster, mine in group.items():
            history: dict[tuple[RowKey, str], list[Run]] = {}
            kept = [run for run in mine if not run.configuration["overridden"]]
            for run in kept:
                history.setdefault(row_of(run), []).append(run)
            found.append(Results(*key, cluster * (len(group) > 1), history,
                                 len(mine) - len(kept)))
    return sorted(found, key=lambda r: (
        order.index(r.preset) if r.preset in order else len(order), r.preset, r.variant.words,
        r.recompute, natural_key(r.cluster)))


def policy_of(run: Run) -> str:
    """Return the run's policy of recomputation; "none" where its file predates them."""
    return str(run.configuration.get("recompute", "none"))


def row_of(run: Run) -> tuple[RowKey, str]:
    """Return the run's row of the tables, and the scheme whose batch it has, "" for its own."""
    chosen = run.configuration
    return (chosen["table"], chosen["scheme"], run.ranks), str(chosen.get("equal_tokens", ""))


def natural_key(text: str) -> list[tuple[int, str]]:
    """Return the sort key of `text` by which 8 comes before 16."""
    return [(int(word), "") if word.isdecimal() else (-1, word)
            for word in re.split(r"(\d+)", text) if word]


def is_crowded(run: Measurements) -> bool:
    """Return whether ranks outnumber cores; also those that wait share them (`share_cores`)."""
    return bool(run.environment.get("oversubscribed"))


def share_cores(run: Run) -> str:
    """Say what the ranks of a crowded run do with the cores: "take turns on 2 cores"."""
    cores = f"{run.environment['cores']} cores"
    if recorded_variant(run.configuration).waits:
        return f"share {cores} for all that is not waited for"
    return f"take turns on {cores}"


def most_oversubscribed(runs: list[Run]) -> Run | None:
    """Return the run with the most ranks per core; None if no run has more ranks than cores."""
    return max((run for run in runs if is_crowded(run)),
               key=lambda run: (run.environment["ranks_per_core"], run.ranks), default=None)
