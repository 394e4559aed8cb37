"""Measure the training steps of ``--table combined``: all rows, or some of them under mpirun."""

import argparse
import gc
from typing import Any

from bench.agreement import broadcast_from_rank_0
from bench.cases.combined import TABLE, TrainingCase, cases_by_name, list_cases, load
from bench.cases.selection import shuffle_cases
from bench.cluster.rates import change_links
from bench.cluster.run import run_verb_inside
from bench.cluster.spec import Cluster
from bench.command_line.progress import RowProgress
from bench.errors import Failed, StoreError, UsageError
from bench.experiments.rows import resume
from bench.experiments.rows.dilation import Dilation, set_links
from bench.experiments.rows.reproduction import Stopped, measure_cases
from bench.experiments.rows.settings import ModelledWork
from bench.experiments.rows.training_row import TrainingSettings, measure_training
from bench.instruments.clock import wait_patiently
from bench.instruments.timing import Limits
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import work_seconds
from bench.prediction.similarity import emulating_machine, shrink_machine, work_scale
from bench.prediction.waited_step import predict_waited
from bench.records import journal, run_file
from bench.records.folder import read_folder
from bench.records.journal import Journal, claim_folder
from bench.records.measurements import Measurements
from bench.reports import micro_tables
from bench.reports.finish import write_tables_and_figures
from bench.reports.formats import render
from mm3d.console import say

LIMITS = ("repetitions", "max_repetitions", "max_seconds")
PASSED_ON = (*LIMITS, "width", "software_share", "stall")    # options of ``bench run``
REFUSED = {"scheme": "paper", "preset": None, "equal_tokens": False, "work": None,
           "machine": None, "work_scale": None, "dtype": "float32", "keep": "none", "overlap": 0,
           "causal": False, "recompute": "none", "backend": None, "seed": 0, "warmup": None,
           "traced": None, "node_memory": None, "precise": False}


def reproduce(arguments: argparse.Namespace) -> int:
    """Measure the rows that an earlier command has not finished; write tables and a figure.

    Returns
    -------
    int
        0 when all rows were measured, 1 when one was not, 128 plus the number of a signal.

    Raises
    ------
    UsageError
        For options that these rows do not have, or numbers of ranks without any.
    StoreError
        When the results folder cannot be written, or is in use.
    """
    for name, default in REFUSED.items():
        if getattr(arguments, name, default) != default:
            raise UsageError(f"--table {TABLE} --{name.replace('_', '-')}: its file "
                             f"bench/cases/combined.toml says how its rows are measured; leave "
                             f"one of them out")
    known = sorted({one.ranks for one in list_cases()})
    cases = [one for one in list_cases() if one.ranks in (arguments.ranks or known)]
    if not cases:
        raise UsageError(f"--table {TABLE} has no row of these --ranks: "
                         f"{', '.join(map(str, known))} would do")
    if Cluster.from_environment() is None:
        return run_verb_inside(Cluster.parse(load().cluster), arguments.words, False)
    log = Journal(run_file.check_folder(arguments.out))
    log.claim()
    resume.remove_leftovers(log.folder)
    wanted = {"table": TABLE, **vars(limits_of(arguments)), "software_share": share_of(arguments),
              **resume.describe_machine("numpy")}
    begun, finished = resume.begin_or_resume(log, [one.name for one in cases], wanted,
                                             arguments.order, arguments.fresh, say)
    progress, stopped = RowProgress(len(cases), len(finished)), None
    progress.say(f"{progress.total} rows, {progress.done} of them there; results in {log.folder}")
    options = [f"--out={log.folder}", f"--order={begun.order}"] + [
        f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in PASSED_ON
        if getattr(arguments, name) is not None]
    try:
        measure_cases([one for one in shuffle_cases(cases, begun.order)
                       if one.name not in finished], options, progress)
    except Stopped as error:
        stopped = error
    finally:
        progress.close()
    complete = progress.measured == progress.total
    log.write("end", outcome="stopped" if stopped else "complete" if complete else "incomplete",
              measured=progress.measured, of=progress.total)
    if progress.measured:
        found = [one for one in read_folder(log.folder).measurements if one.kind == TABLE]
        say(f"\n{render(micro_tables.make_parts(found))}")
        write_tables_and_figures(log.folder, figures=not stopped)
    return stopped.status if stopped else int(not complete)


def run(arguments: argparse.Namespace, comm: Any) -> int:
    """Measure the rows of ``--rows`` that have as many ranks as the job.

    Raises
    ------
    UsageError
        When a name is unknown, or no row has that many ranks.
    """
    cases = [one for one in cases_by_name(arguments.rows) if one.ranks == comm.size]
    if not cases:
        raise UsageError(f"no row of --rows {arguments.rows} is for {comm.size} ranks")
    settings = read_settings(arguments, comm)
    out, statuses = claim_folder(arguments.out, comm), []
    for one in shuffle_cases(cases, settings.order):
        gc.collect()    # arrays of the last row
        outcome = 0, ""
        try:
            record = measure_training(one, settings, comm)
            if comm.rank == 0:
                outcome = _write(record, one, out)
        except Failed as error:
            outcome = 1, f"failed: {one.title}: {error}"
        wait_patiently(comm)    # while rank 0 writes
        set_links(settings.dilation.link, comm, settings.dilation.change)
        status, line = comm.bcast(outcome)
        if comm.rank == 0:
            journal.journal_of(out).write("row", row=one.name, outcome=line.partition(":")[0],
                                          line=line)
            say(line)
        statuses.append(status)
    return max(statuses)


def _write(record: Measurements, one: TrainingCase, out: Any) -> tuple[int, str]:
    """Write a record; return the exit status and the line that ends the row."""
    if journal.superseded(out):
        return 1, f"failed: {one.title}: another reproduce has taken over {out.name}"
    try:
        path = run_file.write_run(record, out, one.name)
    except StoreError as error:
        return 1, f"failed: {one.title}: {error}"
    seconds, share = record.values("seconds")[0], float(record.values("share_of_software"))
    return 0, (f"done: {one.title}: {seconds:.3g} s, predicted "
               f"{record.values('predicted').sum():.3g} s, slowed "
               f"{record.configuration['dilation']:.3g} times, software {share:.0%}, {path.name}")


def read_settings(arguments: argparse.Namespace, comm: Any) -> TrainingSettings:
    """Return how the rows are measured; links are slowed in an emulated cluster alone."""
    file, cluster = load(), Cluster.from_environment()
    machine = broadcast_from_rank_0(lambda: load_machine(file.machine), comm)
    scale = work_scale(machine, cluster if cluster and cluster.link else
                       Cluster.parse(file.cluster))
    shrunk = shrink_machine(machine, file.shrink)
    work = ModelledWork(machine.name, lambda event: scale * work_seconds(shrunk, event),
                        machine.elementwise_block, scale, file.shrink)
    link = cluster.link if cluster else None
    emulated = emulating_machine(machine, file.shrink, scale, cluster)
    share = share_of(arguments) if cluster else 0.0
    return TrainingSettings(
        limits_of(arguments), arguments.order or 0, work,
        Dilation(share, link, lambda *given: {}, change_links if cluster else lambda rate: None),
        lambda config, ranks: predict_waited(config, ranks, emulated), arguments.watched)


def limits_of(arguments: argparse.Namespace) -> Limits:
    """Return the limits of repetitions: those given, or else the file's."""
    chosen = {name: getattr(arguments, name) or getattr(load(), name) for name in LIMITS}
    chosen["max_repetitions"] = max(chosen["max_repetitions"], chosen["repetitions"])
    return Limits(**chosen, width=arguments.width)


def share_of(arguments: argparse.Namespace) -> float:
    """Return the share of a step that software may take."""
    given = arguments.software_share
    return load().software_share if given is None else given
