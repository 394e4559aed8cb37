"""The runs in a folder: the latest of each."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable

from bench.cases.paper import PAPER, Row, load_tables, unpublished_row
from bench.cases.selection import select_rows
from bench.cases.variants import Variant, recorded_variant
from bench.errors import StoreError
from bench.records import merged
from bench.records.measurements import Measurements
from bench.records.run_file import Run

Key = tuple[str, str, int]  # table, scheme, ranks
# Settings that say how long was measured, not what.
EFFORT = {"seed", "order", "warmup", "repetitions", "max_repetitions", "max_seconds", "width",
          "calls", "ended_by"}


@dataclass
class Results:
    """What a folder holds for one preset in one variant, or with one policy of recomputation.

    Attributes
    ----------
    preset : str
        Its name.
    variant : Variant
        How all of its rows are computed.
    recompute : str
        The policy of its rows, where some row was measured with several and so they are apart
        from those of the tables; otherwise empty, and each row has what it was measured with.
    runs : dict
        By (table, scheme, ranks) the latest run of that row.
    equal : dict
        By (table, scheme, ranks) and the scheme whose batch it has, the latest run of a row that
        was measured with another row's batch.
    earlier : int
        How many runs are not shown because a later one of the same row is.
    overridden : int
        How many are not shown because their sizes were given by hand.
    """

    preset: str
    variant: Variant = Variant()
    recompute: str = ""
    runs: dict[Key, Run] = field(default_factory=dict)
    equal: dict[tuple[Key, str], Run] = field(default_factory=dict)
    earlier: int = 0
    overridden: int = 0

    @property
    def title(self) -> str:
        """The preset, and the variant unless it is the tables' own."""
        return f"{self.preset}{self.label}"

    @property
    def label(self) -> str:
        """What the title has after the preset; nothing for the tables' own rows."""
        return f"{self.variant.label}{f', recompute {self.recompute}' * bool(self.recompute)}"

    @property
    def slug(self) -> str:
        """The same in the name of a file."""
        more = f"-recompute-{self.recompute}" * bool(self.recompute)
        return self.variant.slug + re.sub(r"[^\w.-]", "-", more)

    @property
    def plain(self) -> bool:
        """Whether these are the tables' own rows."""
        return self.variant == Variant() and not self.recompute

    def get(self, row: Row) -> Run | None:
        """The run of `row`, if there is one."""
        return self.equal.get((row.key, row.like)) if row.like else self.runs.get(row.key)

    def shown(self) -> list[Run]:
        """All runs that tables show."""
        return [*self.runs.values(), *self.equal.values()]

    def schemes(self) -> list[str]:
        """The paper's schemes, and the others that were run."""
        return list(dict.fromkeys([*PAPER, *sorted(scheme for _, scheme, _ in self.runs)]))

    def rows(self, table: str, scheme: str = "all") -> list[Row]:
        """The paper's rows of `table`, and those of other schemes that were run.

        Of a variant only what was run.
        """
        known = select_rows(table, "all")
        keys = {(row.table, row.scheme, row.gpus) for row in known}
        if not self.plain:
            known = [row for row in known if self.get(row)]
        rows = known + [unpublished_row(*key) for key in sorted(self.runs.keys() - keys)
                        if key[0] == table]
        return [row for row in rows if scheme in ("all", row.scheme)]


@dataclass
class FolderContents:
    """All that a folder holds.

    Attributes
    ----------
    folder : Path
        Which; of a file, the one that it is in.
    results : list of Results
        The rows of the tables, by preset, in the presets' order.
    measurements : list of Measurements
        The microbenchmarks, the latest of each configuration, in the order of their making.
    problems : list of str
        What is wrong with the files that were left out.
    """

    folder: Path
    results: list[Results]
    measurements: list[Measurements]
    problems: list[str]


def read_folder(folder: str | Path) -> FolderContents:
    """Read every file in `folder`, or one file.

    Raises
    ------
    StoreError
        When there is nothing, or no run in it.
    """
    if not Path(folder).exists():
        raise StoreError(f"{folder} is no folder of results, and no file")
    runs, problems = read_runs(folder)
    latest = {run_identity(run): run for run in runs if isinstance(run, Measurements)}
    home = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    return FolderContents(home, by_preset([run for run in runs if isinstance(run, Run)]),
                          sorted(latest.values(), key=lambda run: run.created), problems)


def read_runs(path: str | Path) -> tuple[list[Run | Measurements], list[str]]:
    """The runs in a folder or a file in the order of their making, and what could not be read.

    Raises
    ------
    StoreError
        When there is none.
    """
    runs: list[Run | Measurements] = []
    problems: list[str] = []
    for file in sorted(Path(path).glob("*.h5")) if Path(path).is_dir() else [Path(path)]:
        try:
            runs += merged.runs_in_file(file)
        except StoreError as error:
            problems.append(str(error))
    if not runs:
        raise StoreError("\n".join([f"no results in {path}", *problems]))
    # A merged file may lie beside those it was made of.
    once = {(run.created, str(run.configuration), str(run.environment)): run for run in runs}
    return sorted(once.values(), key=lambda run: run.created), problems


def run_identity(run: Measurements) -> tuple:
    """What two runs of one microbenchmark have in common: all but how long they were measured."""
    return run.kind, tuple(sorted((name, value) for name, value in run.configuration.items()
                                  if name not in EFFORT))


def by_preset(runs: list[Run]) -> list[Results]:
    """The rows of the tables among `runs`, which are in the order of their making.

    Those of each variant are apart; so are those of each policy of recomputation, in a preset
    and variant of which some row was measured with several.
    """
    found: dict[tuple[str, Variant, str], Results] = {}
    several = with_several_policies(runs)
    for run in runs:
        chosen = run.configuration
        kind = chosen["preset"], recorded_variant(chosen)
        name = policy_of(run) if kind in several else "none"
        results = found.setdefault((*kind, name), Results(*kind, "" if name == "none" else name))
        if chosen["overridden"]:
            results.overridden += 1
            continue
        key, like = row_of(run)
        results.earlier += ((key, like) in results.equal) if like else (key in results.runs)
        if like:
            results.equal[key, like] = run
        else:
            results.runs[key] = run
    order = list(load_tables().presets)
    return sorted(found.values(), key=lambda r: (order.index(r.preset) if r.preset in order
                                                 else len(order), r.preset, r.variant.words,
                                                 r.recompute))


def with_several_policies(runs: list[Run]) -> set[tuple[str, Variant]]:
    """The presets and variants of which some row was measured with several policies."""
    found: dict[tuple, set[str]] = {}
    for run in runs:
        chosen = run.configuration
        if not chosen["overridden"]:
            row = chosen["preset"], recorded_variant(chosen), row_of(run)
            found.setdefault(row, set()).add(policy_of(run))
    return {(preset, variant) for (preset, variant, _), names in found.items() if len(names) > 1}


def policy_of(run: Run) -> str:
    """What backward computed again; nothing in files of before."""
    return str(run.configuration.get("recompute", "none"))


def row_of(run: Run) -> tuple[Key, str | None]:
    """Which row of the tables a run is of, and the scheme whose batch it has, if another's."""
    chosen = run.configuration
    return (chosen["table"], chosen["scheme"], run.ranks), chosen.get("equal_tokens") or None


def natural_key(text: str) -> list[tuple[int, str]]:
    """What to sort `text` by, so that 8 comes before 16."""
    return [(int(word), "") if word.isdigit() else (-1, word)
            for word in re.split(r"(\d+)", text) if word]


def most_crowded(runs: list[Run]) -> Run | None:
    """The run with the most ranks a core, where ranks outnumber cores."""
    return max((run for run in runs if run.environment["oversubscribed"]),
               key=lambda run: (run.environment["ranks_per_core"], run.ranks), default=None)


def list_files(sources: Iterable[str]) -> list[Path]:
    """List the files that are named, and those in the folders that are.

    Raises
    ------
    StoreError
        When one is not there, or there is none in a folder.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        here = sorted(source.glob("*.h5")) if source.is_dir() else [source]
        if not here:
            raise StoreError(f"there is no .h5 file in {source}")
        files += here
    return list(dict.fromkeys(files))
