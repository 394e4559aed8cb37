"""Write the tables, the figures and the page of a folder of results, and print a summary."""

import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Callable
from urllib.parse import quote

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row
from bench.document import Notes, Part, Table
from bench.records import atomic
from bench.records.folder import (FolderContents, Results, most_oversubscribed, natural_key,
                                  read_folder, share_cores)
from bench.records.measurements import Measurements
from bench.records.model_run import Run
from bench.records.run_file import report_left_out
from bench.reports import certainty, emulated_tables, formats, merit, micro_tables, paper_tables
from bench.reports.emulated import Emulated, describe_clusters
from bench.reports.figures.every_figure import draw_figures, make_drawings
from bench.reports.figures.style import Drawing, NoFigure, draw_each, draw_image, report_drawn
from mm3d.console import complain, say

UNCHANGED = " !$()*+,-./:;<=>?@[]^_{|}"    # within a data URL, in an attribute of HTML
WARNING = re.compile(r"[A-Z][A-Z ]+(\([^)]*\))?:")    # begins such a note, perhaps with a reason


def write_tables_and_figures(out: Path, figures: bool = True,
                             show: Callable[[list[Part]], None] = lambda parts: say(
                                 formats.render(parts))) -> int:
    """Write tables, figures and one page into the folder `out`; print a summary, and the files.

    Return 1 when a file of results was left out, else 0.  Raises StoreError when there are no
    results in `out`; OSError when a file cannot be written.
    """
    found = read_folder(out)
    text = formats.render(paper_tables.make_file(found))
    say()
    show(summary_parts(found))
    say()
    tables = out / "tables.txt"
    atomic.replace(tables, text + "\n")    # a full disk leaves the old file
    files = [f"all tables: {tables}"]
    if figures:
        files += draw_and_describe(found)
    say("; ".join(files))
    return report_left_out(found.problems)


def draw_and_describe(found: FolderContents) -> list[str]:
    """Draw figures and write the page; name the files; no error ends a run that has measured."""
    try:
        drawn, left_out = draw_figures(found)
        report_drawn([], left_out)
        return [f"page: {write_page(found)[0]}",
                f"figures: {', '.join(path.name for path in drawn) or 'none'}"]
    except Exception:
        complain(traceback.format_exc())
        return []


def summary_parts(found: FolderContents) -> list[Part]:
    """Make the printed summary of a folder: the rows of its latest preset and variant."""
    parts: list[Part] = []
    shown = [results for results in found.results if results.shown_runs()]
    if not shown:
        parts += micro_tables.make_parts(found.measurements)
    if shown:
        results = max(shown, key=lambda one: max(run.created for run in one.shown_runs()))
        groups = emulated_tables.group_rows(emulated_tables.emulated_rows(results))
        parts += [paper_tables.paper_table(paper_tables.heading(results, name), rows,
                                           [results.get(row) for row in rows])
                  for name in HEADINGS if (rows := shown_rows(results, name))]
        tables = [emulated_tables.speed_ups_table(*one, True) for group in groups
                  for one in emulated_tables.by_heading(group)]
        if not groups:
            tables = [certainty.speed_up_table(HEADINGS[name], name, results) for name in HEADINGS
                      if is_compared(results, name)]
        parts += [*(table for table in tables if table.rows), Notes(
            "What these figures show, and what not:", state_limits(results, groups))]
    return parts


def shown_rows(results: Results, table: str) -> list[Row]:
    """Return the rows of one of the paper's tables; none if none was measured."""
    rows = results.rows(table)
    return rows if any(map(results.get, rows)) else []


def is_compared(results: Results, table: str) -> bool:
    """Return whether 3-D and another of the paper's schemes were measured on as many ranks."""
    cubes, others = ({ranks for name, scheme, ranks in results.runs
                      if name == table and scheme in schemes} for schemes in (
                          (PROPOSED,), BASELINES))
    return bool(cubes & others)


def state_limits(results: Results, groups: list[list[Emulated]]) -> list[str]:
    """State in few lines what the figures show and what not; warn of unverified results."""
    runs = results.shown_runs()
    verified = paper_tables.verified_notes(runs)
    lines = (state_emulated(runs, groups) if groups else state_computed(results.preset, runs))
    rows = [row for name in HEADINGS for row in shown_rows(results, name)]
    return [*lines, *paper_tables.inconsistent_notes(rows), verified[0],
            *(note for note in verified[1:] if note.startswith("NOT "))]


def state_emulated(runs: list[Run], groups: list[list[Emulated]]) -> list[str]:
    """State what rows show whose ranks wait for their work on an emulated cluster."""
    machines = " and ".join(sorted({one.machine for group in groups for one in group}))
    crowded = most_oversubscribed(runs)
    cores = f" on {crowded.environment['cores']} cores" if crowded else ""
    above = [share for group in groups for share in emulated_tables.marked_shares(group)]
    shares = sorted({float(run.configuration.get("software_share", 0)) for run in runs})
    allowed = " or ".join(f"{share:.0%}" for share in shares)
    limit = (f"software took more than {allowed} of a step of rows" if any(shares) else
             "links and waits were not slowed until software takes little of a step, in rows")
    shares = (f"{limit} whose ratios have a {emulated_tables.STAR}, which are not to be quoted: "
              f"{'; '.join(above)}"
              if above else f"in all of them software took at most {allowed} of a step")
    return [
        f"EMULATED CLUSTER: {bare_clusters(runs)}{cores}; ranks sleep for {machines}'s modelled "
        f"work.",
        "Shown: traffic, placement, contention for links, what MPI sends, and this software. Not "
        "shown: GPUs, NVLink, real switches, sending while a GPU computes.",
        f"Compare speed-ups, not seconds; {shares}."]


def state_computed(preset: str, runs: list[Run]) -> list[str]:
    """State what rows show whose ranks did their work."""
    clusters, crowded = bare_clusters(runs), most_oversubscribed(runs)
    where = f"EMULATED CLUSTER: {clusters}; " if clusters else ""
    if crowded is None:
        first = f"{where}every rank had a core of its own."
    else:
        warning = "NOT SCALING RESULTS: " * (not clusters)
        first = f"{where}{warning}up to {crowded.ranks} ranks {share_cores(crowded)}."
    return [
        first[0].upper() + first[1:],
        f"Shown: work, copies, messages and waiting of each scheme, at the sizes of {preset}. Not "
        f"shown: the paper's GPUs and their network: compare ratios, not seconds.",
        "Where batches differ, a ratio holds what the larger batch gains (--equal-tokens)."]


def bare_clusters(runs: list[Run]) -> str:
    """Return the different emulated clusters of runs, such as "4 nodes x 2 ranks, 1 Gbit/s"."""
    return describe_clusters(runs).replace("emulated cluster, ", "")


def write_page(found: FolderContents,
               out: str | Path | None = None) -> tuple[Path, list[NoFigure]]:
    """Write the page, by default DIR/report.html; return it, and why figures are not drawn."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(loader=PackageLoader("bench.reports"), autoescape=True,
                              trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)
    environment.tests |= {"table": lambda part: isinstance(part, Table),
                          "notes": lambda part: isinstance(part, Notes)}
    parts = paper_tables.make_file(found)
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
    """Draw a figure as the SVG of a data URL, a fifth shorter than in base64; name and tell it."""
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
    what = certainty.run_name(run) if isinstance(run, Run) else " ".join(filter(None, (
        run.kind, run.configuration.get("table"))))
    return run.created, what, str(run.environment.get("command", ""))
