"""Write all results of a folder into one HTML page that loads no other file."""

import re
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from bench.document import Notes, Part, Table
from bench.records import atomic
from bench.records.folder import FolderContents, natural_key
from bench.records.measurements import Measurements
from bench.records.model_run import Run
from bench.reports import merit
from bench.reports.certainty import run_name
from bench.reports.figures.every_figure import make_drawings
from bench.reports.figures.style import Drawing, NoFigure, draw_each, draw_image
from bench.reports.paper_tables import make_file

UNCHANGED = " !$()*+,-./:;<=>?@[]^_{|}"    # within a data URL, in an attribute of HTML
WARNING = re.compile(r"[A-Z][A-Z ]+(\([^)]*\))?:")    # begins such a note, perhaps with a reason


def write_page(found: FolderContents,
               out: str | Path | None = None) -> tuple[Path, list[NoFigure]]:
    """Write the page; return its path, and why figures are not drawn.

    Parameters
    ----------
    out : path, optional
        The page; by default ``report.html`` in the folder of the results.

    Raises OSError when the page cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(loader=PackageLoader("bench.reports"), autoescape=True,
                              trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)
    environment.tests |= {"table": lambda part: isinstance(part, Table),
                          "notes": lambda part: isinstance(part, Notes)}
    parts = make_file(found)
    runs: list[Measurements] = [run for results in found.results
                                for run in results.shown_runs()]
    runs += found.measurements
    # In the order of the tables; those of each run are folded.
    details = [(run_summary(run)[1], merit.run_parts(run)) for run in runs if isinstance(run, Run)]
    drawn, left_out = draw_each(make_drawings(found), embed_figure)
    path = Path(out) if out else found.folder / "report.html"
    atomic.replace(path, environment.get_template("report.html").render(
        name=found.folder.absolute().name, parts=parts, warnings=warning_notes(parts),
        details=details, figures=drawn, left_out=left_out,
        environment=summarize_environments(runs), runs=sorted(map(run_summary, runs))))
    return path, left_out


def embed_figure(one: Drawing) -> list[dict[str, str]]:
    """Draw a figure as the SVG of a data URL, with its name and meaning.

    A URL that encodes what it must alone is a fifth shorter than one in base64.
    """
    drawn = draw_image(one.make, "svg").decode().replace("\n", " ")
    return [{"name": one.name, "about": one.about, "image": quote(drawn, safe=UNCHANGED)}]


def warning_notes(parts: list[Part]) -> list[str]:
    """List the notes that are warnings."""
    return list(dict.fromkeys(note for part in parts if isinstance(part, Notes)
                              for note in part.items if WARNING.match(note)))


def summarize_environments(runs: list[Measurements]) -> dict[str, list[str]]:
    """List the values in the runs' environments by name, each with its number of runs."""
    counts: dict[str, Counter] = {}
    for run in runs:
        for name, value in run.environment.items():
            if name != "command":
                counts.setdefault(name, Counter())[str(value)] += 1
    return {name: [value if count == len(runs) else f"{value} ({count} of {len(runs)} runs)"
                   for value, count in sorted(found.items(),
                                              key=lambda item: natural_key(item[0]))]
            for name, found in sorted(counts.items())}


def run_summary(run: Measurements) -> tuple[str, str, str]:
    """Return the creation time of a run, its name, and its command."""
    what = run_name(run) if isinstance(run, Run) else " ".join(filter(None, (
        run.kind, run.configuration.get("table"))))
    return run.created, what, str(run.environment.get("command", ""))
