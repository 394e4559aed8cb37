"""Write the tables, the figures and the page of a folder of results, and print a summary."""

import traceback
from pathlib import Path
from typing import Callable

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row
from bench.document import Notes, Part, Table
from bench.records import atomic
from bench.records.folder import (FolderContents, Results, most_oversubscribed, read_folder,
                                  share_cores)
from bench.records.model_run import Run
from bench.records.run_file import report_left_out
from bench.reports import emulated_tables, formats, micro_tables, paper_tables, speed_ups
from bench.reports.emulated import describe_clusters
from bench.reports.emulated_rows import Emulated
from bench.reports.figures.every_figure import draw_figures
from bench.reports.figures.style import report_drawn
from bench.reports.page import write_page
from mm3d.console import complain, say


def write_tables_and_figures(out: Path, figures: bool = True,
                             show: Callable[[list[Part]], None] = lambda parts: say(
                                 formats.render(parts))) -> int:
    """Write tables, figures and one page into the folder `out`; print a summary, and the files.

    ``tables.txt`` has all tables.  Return 1 when a file of results was left out, else 0.

    Raises StoreError when there are no results in `out`; OSError when a file cannot be written.
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
    """Draw the figures and write the page; return lines that name these files.

    Why figures are not drawn is printed.  An error of the program is printed and ends nothing: all
    runs and tables are on the disk, and no picture decides whether a run succeeded.
    """
    try:
        drawn, left_out = draw_figures(found)
        report_drawn([], left_out)
        return [f"page: {write_page(found)[0]}",
                f"figures: {', '.join(path.name for path in drawn) or 'none'}"]
    except Exception:
        complain(traceback.format_exc())
        return []


def summary_parts(found: FolderContents) -> list[Part]:
    """Make the printed summary of a folder: the rows of its latest preset and variant.

    It has the paper's tables, published beside measured, the speed-ups of 3-D, and five lines on
    what these figures show.
    """
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
        parts += [*ratio_parts(results, groups), Notes(
            "What these figures show, and what not:", state_limits(results, groups))]
    return parts


def shown_rows(results: Results, table: str) -> list[Row]:
    """Return the rows of one of the paper's tables; none if none was measured."""
    rows = results.rows(table)
    return rows if any(map(results.get, rows)) else []


def ratio_parts(results: Results, groups: list[list[Emulated]]) -> list[Table]:
    """Make the tables of the speed-ups of 3-D; with predictions where a cluster was emulated."""
    tables = [emulated_tables.speed_ups_table(*one, True) for group in groups
              for one in emulated_tables.by_heading(group)]
    if not groups:
        tables = [speed_ups.speed_up_table(HEADINGS[name], name, results) for name in HEADINGS
                  if is_compared(results, name)]
    return [table for table in tables if table.rows]


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
