"""Write all results of a folder as one HTML page that loads nothing else."""

import base64
import re
from collections import Counter
from pathlib import Path

from bench.cases.paper import title
from bench.records import atomic
from bench.records.folder import FolderContents, read_folder, natural_key
from bench.records.measurements import Measurements
from bench.records.run_file import Run
from bench.reports import merit
from bench.reports.document import Notes, Part, Table
from bench.reports.figures.every_figure import METADATA, drawings
from bench.reports.figures.style import image_bytes, look
from bench.reports.paper_tables import document

# Remarks that begin with a word or more in capitals.
WARNING = re.compile(r"[A-Z][A-Z ]+:")


def report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page; return its path.

    Parameters
    ----------
    folder : path
        With the results.
    out : path, optional
        The page; by default ``report.html`` in `folder`.

    Raises
    ------
    StoreError
        When there are no results in `folder`.
    OSError
        When the page cannot be written.
    """
    found = read_folder(folder)
    path = Path(out) if out else Path(folder) / "report.html"
    atomic.replace(path, page(found))
    return path


def page(found: FolderContents) -> str:
    """Return the page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(loader=PackageLoader("bench.reports"), autoescape=True,
                              trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)
    environment.tests |= {"table": lambda part: isinstance(part, Table),
                          "notes": lambda part: isinstance(part, Notes)}
    parts = document(found)
    runs: list[Run | Measurements] = [run for results in found.results
                                      for run in results.shown()]
    runs += found.measurements
    # In the folder's order; each run's own tables are folded away.
    details = [(history(run)[1], merit.one(run)) for run in runs if isinstance(run, Run)]
    drawn, left_out = figures(found)
    return environment.get_template("report.html").render(
        name=found.folder.resolve().name, parts=parts, warnings=warnings(parts),
        details=details, figures=drawn, left_out=left_out, environment=surroundings(runs),
        runs=sorted(map(history, runs)))


def figures(found: FolderContents) -> tuple[list[dict[str, str]], list[str]]:
    """Draw every figure: name, meaning and SVG (base64); and those left out, with the reason."""
    drawn, left_out = [], []
    with look():
        for one in drawings(found):
            if one.figure is None:
                left_out.append(f"{one.name}: {one.about}")
                continue
            image = image_bytes(one.figure, "svg", metadata=METADATA["svg"])
            drawn.append({"name": one.name, "about": one.about,
                          "image": base64.b64encode(image).decode()})
    return drawn, left_out


def warnings(parts: list[Part]) -> list[str]:
    """List the remarks that are warnings."""
    return list(dict.fromkeys(note for part in parts if isinstance(part, Notes)
                              for note in part.items if WARNING.match(note)))


def surroundings(runs: list[Run | Measurements]) -> dict[str, list[str]]:
    """List the runs' environments: by name the values, with the number of runs of each."""
    counts: dict[str, Counter] = {}
    for run in runs:
        for name, value in run.environment.items():
            if name != "command":
                counts.setdefault(name, Counter())[str(value)] += 1
    return {name: [value if count == len(runs) else f"{value} ({count} of {len(runs)} runs)"
                   for value, count in sorted(found.items(),
                                              key=lambda item: natural_key(item[0]))]
            for name, found in sorted(counts.items())}


def history(run: Run | Measurements) -> tuple[str, str, str]:
    """Return when a run was made, its name, and the command."""
    chosen = run.configuration
    what = (f"{chosen['table']} {title(chosen['scheme'])} {run.ranks} ranks, {chosen['preset']}"
            if isinstance(run, Run) else run.kind)
    return run.created, what, str(run.environment.get("command", ""))
