"""Measure the training steps of ``--table combined``, one mpirun for each rank count."""

import argparse

from bench.cases.combined import TABLE, list_cases, load_rows, refuse_options
from bench.cases.case import shuffle_cases
from bench.cluster.run import run_verb_inside
from bench.cluster.spec import Cluster
from bench.command_line.measuring import LIMIT_NAMES, limits_of
from bench.command_line.progress import RowProgress
from bench.command_line.row_options import share_of
from bench.errors import UsageError
from bench.experiments.rows import resume
from bench.experiments.rows.reproduction import measure_cases
from bench.records import journal
from bench.records.journal import Journal
from bench.reports.finish import write_tables_and_figures
from mm3d.console import say

PASSED_ON = (*LIMIT_NAMES, "width", "software_share", "stall")    # options of ``measure meshes``


def reproduce(arguments: argparse.Namespace) -> int:
    """Measure the rows that an earlier command has not finished, and report a folder's.

    Return 0 when all was measured and read, 1 when it was not, 128 plus the number of a signal.
    UsageError for options that these rows do not have, impossible limits, or ranks without a row;
    StoreError when the results folder cannot be written, or is in use.
    """
    refuse_options(vars(arguments))
    known = sorted({one.ranks for one in list_cases()})
    cases = [one for one in list_cases() if one.ranks in (arguments.ranks or known)]
    if not cases:
        raise UsageError(f"--table {TABLE} has no row of these --ranks: "
                         f"{', '.join(map(str, known))} would do")
    limits = limits_of(arguments, load_rows())
    if Cluster.from_environment() is None:
        return run_verb_inside(Cluster.parse(load_rows().cluster), arguments.words, False)
    log = Journal(journal.check_folder(arguments.out))
    log.claim()
    resume.remove_parts_of_files(log.folder)
    wanted = {"table": TABLE, **vars(limits), "software_share": share_of(arguments, load_rows()),
              **resume.machine_settings("numpy")}
    begun, finished = resume.begin_or_resume(log, [one.name for one in cases], wanted,
                                             arguments.order, arguments.fresh, say)
    progress = RowProgress(len(cases), len(finished))
    progress.say(f"{progress.total} rows, {progress.done} of them there; results in {log.folder}")
    options = [f"--out={log.folder}", f"--order={begun.order}"] + [
        f"--{name.replace('_', '-')}={getattr(arguments, name) or 'none'}" for name in PASSED_ON
        if getattr(arguments, name) is not None]
    stopped = measure_cases([one for one in shuffle_cases(cases, begun.order)
                             if one.name not in finished], options, progress)
    complete = progress.measured == progress.total
    log.write("end", outcome="stopped" if stopped else "complete" if complete else "incomplete",
              measured=progress.measured, of=progress.total)
    status = int(not complete)
    if progress.measured:
        status |= write_tables_and_figures(log.folder, show=arguments.show)
    return stopped.status if stopped else status
