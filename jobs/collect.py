"""Collect the files of the jobs in one folder and one file; make tables, figures and a page."""

from pathlib import Path

from bench.cases.combined import AnyCase
from bench.records import atomic, journal, merged, run_file
from bench.records.notes import counted
from bench.reports.finish import write_tables_and_figures
from jobs import standings
from jobs.scripts import JobSettings
from jobs.standings import DONE, Standing
from mm3d.console import complain, say


def collect(work: JobSettings, cases: list[AnyCase]) -> int:
    """Collect and merge results, print a summary, draw the figures, and name missing rows.

    The merged file lies beside the scripts, since tables and figures read every file of the
    results.  Return 0 when no row is missing, and all files are read and all runs merged,
    otherwise 1.  StoreError when versions of the schema differ, or a file cannot be written.
    """
    journal.check_folder(work.out)
    new = 0
    for path in _results(work, cases):
        if not (work.out / path.name).exists():
            atomic.replace(work.out / path.name, path.read_bytes())
            new += 1
    found = standings.list_standings(work, cases, standings.read_queues(work))
    missing = [one for one in found if one.state != DONE]
    done = len(cases) - len(missing)
    unread = run_file.list_files(work.out) and write_tables_and_figures(work.out)
    say(f"\n{done} of {len(cases)} rows done, {counted(new, 'new file')} in {work.out}")
    for one in missing:
        say(f"missing: {format_standing(one)}")
    for warning in standings.list_other_sources(work, found):
        complain(f"warning: {warning}")
    left_out: list[str] = []
    if paths := [path for path in _results(work, cases) if path.parent == work.out]:
        journal.check_folder(work.folder)
        target = work.folder / "all.h5"
        count, left_out = merged.merge_files(paths, target, anew=True)
        say(f"{counted(count, 'run')} merged in {target}")
    else:
        say("nothing to merge")
    return run_file.report_left_out(left_out) or int(bool(missing or unread))


def _results(work: JobSettings, cases: list[AnyCase]) -> list[Path]:
    """List the readable files of rows."""
    return [path for one in cases for path, _ in standings.read_results(work, one)[0]]


def format_standing(one: Standing) -> str:
    """Format a row and its standing as a line."""
    job = f", job {one.job}" if one.job else ""
    reason = f": {one.reason}" if one.reason else ""
    return f"{one.case.title}: {one.state}{job}{reason}"
