"""Collect the files of the jobs in one folder and one file; make tables, figures and a page."""

from bench.records import atomic, journal, merged, run_file
from bench.records.notes import counted
from bench.reports.finish import write_tables_and_figures
from jobs import standings
from jobs.scripts import Row, Work
from jobs.standings import DONE, Standing
from mm3d.console import complain, say


def copy_results(work: Work, case: Row) -> int:
    """Copy the readable files of a row's jobs to the results; return the number of new ones."""
    new = 0
    for path, _ in standings.read_results(work, case)[0]:
        target = work.out / path.name
        if path.parent == work.out or target.exists():
            continue
        atomic.replace(target, path.read_bytes())
        new += 1
    return new


def merge_runs(work: Work, cases: list[Row]) -> tuple[str, list[str]]:
    """Merge the collected runs of the rows into one new file.

    It is written beside the scripts, since tables and figures read every file of the results.

    Returns
    -------
    str, list of str
        A line that names the file, and a message for each run that was left out.

    Raises
    ------
    StoreError
        When versions of the schema differ, or the file cannot be written.
    """
    target = work.folder / "all.h5"
    paths = [path for one in cases for path, _ in standings.read_results(work, one)[0]
             if path.parent == work.out]
    if not paths:
        return "nothing to merge", []
    journal.check_folder(work.folder)
    count, problems = merged.merge_files(paths, target, anew=True)
    return f"{counted(count, 'run')} merged in {target}", problems


def collect(work: Work, cases: list[Row]) -> int:
    """Collect and merge results, print a summary, draw the figures, and name missing rows.

    Returns
    -------
    int
        0 when no row is missing, and all files are read and all runs merged, otherwise 1.
    """
    journal.check_folder(work.out)
    new = sum(copy_results(work, one) for one in cases)
    found = standings.list_standings(work, cases, standings.read_queue(work))
    missing = [one for one in found if one.state != DONE]
    done = len(cases) - len(missing)
    unread = run_file.list_files(work.out) and write_tables_and_figures(work.out)
    say(f"\n{done} of {len(cases)} rows done, {counted(new, 'new file')} in {work.out}")
    for one in missing:
        say(f"missing: {format_standing(one)}")
    for warning in standings.list_other_sources(work, found):
        complain(f"warning: {warning}")
    line, left_out = merge_runs(work, cases)
    say(line)
    return run_file.report_left_out(left_out) or int(bool(missing or unread))


def format_standing(one: Standing) -> str:
    """Format a row and its standing as a line."""
    job = f", job {one.job}" if one.job else ""
    reason = f": {one.reason}" if one.reason else ""
    return f"{one.case.title}: {one.state}{job}{reason}"
