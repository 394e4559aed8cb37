"""Collect the files of the jobs in one folder and one file; make tables and figures."""

from bench.cases.case import Case
from bench.records import atomic, merged, run_file
from bench.reports.finish import write_tables_and_figures
from bench.reports.page import write_page
from jobs import slurm, standings
from jobs.scripts import Work
from jobs.standings import DONE, Standing


def gather(work: Work, case: Case) -> int:
    """Copy the sound files of a row's jobs to the results; how many are new."""
    new = 0
    for path, _ in standings.results(work, case):
        target = work.out / path.name
        if path.parent == work.out or target.exists():
            continue
        atomic.replace(target, path.read_bytes())
        new += 1
    return new


def merge(work: Work, cases: list[Case]) -> str:
    """Join the collected runs of the rows in one file anew; a line that says so.

    It lies beside the scripts: tables and figures read every file of the results' folder.

    Raises
    ------
    StoreError
        When versions of the schema differ, or the file cannot be written.
    """
    target = work.folder / "all.h5"
    paths = [path for one in cases for path, _ in standings.results(work, one)
             if path.parent == work.out]
    if not paths:
        return "nothing to merge"
    run_file.check_folder(work.folder)
    count = merged.merge_files(paths, target, anew=True)
    return f"{count} runs merged in {target}"


def collect(work: Work, cases: list[Case]) -> int:
    """Gather and merge what is there, name what is not, print the tables and draw the figures.

    Returns
    -------
    int
        0 when no row is missing, otherwise 1.
    """
    run_file.check_folder(work.out)
    new = sum(gather(work, one) for one in cases)
    missing = [one for one in standings.survey(work, cases, queue_or_nothing())
               if one.state != DONE]
    done = len(cases) - len(missing)
    if any(work.out.glob("*.h5")):
        write_tables_and_figures(work.out, print)
        print(f"all of it on one page: {write_page(work.out)}")
    print(f"\n{done} of {len(cases)} rows done, {new} files new in {work.out}")
    for one in missing:
        print(f"missing: {line(one)}")
    print(merge(work, cases))
    return int(bool(missing))


def queue_or_nothing() -> dict[str, slurm.State]:
    """Read the queue, empty where there is no Slurm: results can be collected anywhere."""
    try:
        return slurm.queue()
    except slurm.SlurmError:
        return {}


def line(one: Standing) -> str:
    """Format a row and its standing as a line."""
    job = f", job {one.job}" if one.job else ""
    reason = f": {one.reason}" if one.reason else ""
    return f"{one.case.title}: {one.state}{job}{reason}"
