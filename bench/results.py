"""The runs in a folder: the latest of each row."""

from dataclasses import dataclass, field
from pathlib import Path

from bench.cases import PAPER, Row, load, own, select
from mm3d import store
from mm3d.store import Run, StoreError

Key = tuple[str, str, int]  # table, scheme, ranks


@dataclass
class Results:
    """What a folder holds for one preset.

    Attributes
    ----------
    preset : str
        Its name.
    runs : dict
        By (table, scheme, ranks) the latest run of that row.
    earlier : int
        How many runs are not shown because a later one of the same row is.
    overridden : int
        How many are not shown because their sizes were given by hand.
    """

    preset: str
    runs: dict[Key, Run] = field(default_factory=dict)
    earlier: int = 0
    overridden: int = 0

    def get(self, row: Row) -> Run | None:
        """The run of `row`, if there is one."""
        return self.runs.get((row.table, row.scheme, row.gpus))

    def schemes(self) -> list[str]:
        """The paper's schemes, and the others that were run."""
        return list(dict.fromkeys([*PAPER, *sorted(scheme for _, scheme, _ in self.runs)]))

    def rows(self, table: str, scheme: str = "all") -> list[Row]:
        """The paper's rows of `table`, and those of other schemes that were run."""
        known = select(table, "all")
        keys = {(row.table, row.scheme, row.gpus) for row in known}
        rows = known + [own(*key) for key in sorted(self.runs.keys() - keys) if key[0] == table]
        return [row for row in rows if scheme in ("all", row.scheme)]


def collect(folder: str | Path) -> tuple[list[Results], list[str]]:
    """The results in `folder` by preset, and what is wrong with the files that were left out.

    Raises
    ------
    StoreError
        When there is no folder, or no run in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder of results")
    runs: list[Run] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.h5")):
        try:
            run = store.read(path)
        except StoreError as error:
            problems.append(str(error))
            continue
        if isinstance(run, Run):
            runs.append(run)
    found: dict[str, Results] = {}
    for run in sorted(runs, key=lambda run: run.created):
        chosen = run.configuration
        results = found.setdefault(chosen["preset"], Results(chosen["preset"]))
        if chosen["overridden"]:
            results.overridden += 1
            continue
        key = (chosen["table"], chosen["scheme"], run.ranks)
        results.earlier += key in results.runs
        results.runs[key] = run
    if not found:
        raise StoreError("\n".join([f"no results in {folder}", *problems]))
    order = list(load().presets)
    return sorted(found.values(), key=lambda r: (order.index(r.preset) if r.preset in order
                                                 else len(order), r.preset)), problems
