"""Measure all selected rows, starting mpirun for each rank count; print a summary, draw figures.

It resumes an earlier one that was stopped.  A row that fails, or is left out as its nodes lack
memory, is reported; the others are measured all the same.
"""

import argparse
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any, Mapping, Sequence

from bench.cases import combined, variants
from bench.cases.case import Case, check_verifiable, make_case, shuffle_cases
from bench.cases.paper import Preset, Row, load_tables
from bench.cases.selection import equal_token_rows, select_rows
from bench.cluster.run import run_verb_inside
from bench.cluster.spec import Cluster
from bench.command_line import combined_rows, options, row_options
from bench.command_line.best_preset import choose_preset
from bench.command_line.progress import RowProgress
from bench.errors import UsageError, as_usage_error
from bench.experiments.rows import resume
from bench.experiments.rows.reproduction import Stopped, measure_cases
from bench.instruments import host, leftover_memory
from bench.records import journal, notes
from bench.records.journal import Journal, Reproduction
from bench.reports import emulated_tables
from bench.reports.finish import write_tables_and_figures
from bench.reports.predicted_rows import of_case
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.console import complain, say

GROUP = "Measure the paper's tables"
ROUNDS = 3    # of --precise
PRECISE = {"software_share": 0.1, "repetitions": 3, "traced": 1}    # on an emulated cluster


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``reproduce``."""
    row_options.add_row_options(parser, preset=None)
    parser.add_argument("--ranks", type=options.numbers, metavar="N,...", help=(
        "measure only the rows of these numbers of ranks, any number for schemes that the paper "
        "lacks (default: all; with --preset emulated-tiny 8 and 64)"))
    parser.add_argument("--fresh", action="store_true", help=(
        "measure every row again, also those that an earlier reproduction has finished"))
    parser.add_argument("--precise", action="store_true", help=(
        f"measure all rows, and then those with the most ranks twice more, so that their "
        f"speed-ups have intervals over {ROUNDS} runs; in an emulated cluster software takes "
        f"{100 * PRECISE['software_share']:g} %% of a step or less, and a step is traced, to show "
        f"where the time goes"))
    parser.add_argument("--paper", metavar="NAME", help=(
        "instead, without other options, compute the printed numbers of a paper again from those "
        "beside them, and say of each if it follows; list names the papers, all computes each, "
        "findings lists what does not follow; NAME.toml is a file of yours"))


def run(arguments: argparse.Namespace) -> int:
    """Measure every selected row, then print a summary, and write tables, figures and a page.

    The default preset is the best that this machine can run.  Rows that an earlier reproduction,
    stopped or killed, has finished with the same settings are not measured again.

    Return 0 when all rows were measured, but for rows of ``--equal-tokens`` left out for lack of
    memory; 1 when others were not; 128 plus the number of a signal.  With ``--paper`` 1 when a
    cell is not as its file expects.
    """
    if arguments.paper:
        others = [word.partition("=")[0] for word in arguments.words if word.startswith("--")
                  and word.partition("=")[0] not in ("--paper", "--format")]
        if others:
            raise UsageError(f"--paper {arguments.paper} computes tables and measures nothing: "
                             f"leave {', '.join(others)} out")
        from bench.papers.tables import recompute    # not needed to measure
        return recompute(arguments.paper, arguments.show)
    if launcher.local_ranks() > 1:
        raise UsageError("reproduce starts mpirun itself: run it without, as in "
                         "python -m bench reproduce")
    if arguments.table == combined.TABLE:
        return combined_rows.reproduce(arguments)
    why = add_preset(arguments) if arguments.preset is None else ""
    preset = load_tables().presets[arguments.preset]
    outside = preset.cluster and Cluster.from_environment() is None
    said = (f"preset {arguments.preset}" + f", {why}" * bool(why)
            + f"; {expected_time(arguments, preset)}")
    if why or outside:
        say(said)
    if arguments.precise and preset.software_share:
        for name, value in PRECISE.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, value)
    if outside:
        return run_verb_inside(Cluster.parse(preset.cluster), arguments.words, False)
    wanted = row_settings(arguments)
    row_options.node_memory(arguments)    # refused here once, not by every job
    row_options.check_share(arguments)
    cases = cases_of_options(arguments)
    check_cluster(cases)
    check_verifiable(cases)
    log = Journal(journal.check_folder(arguments.out))
    log.claim()
    if not (why or preset.cluster):    # else it was said before the cluster was started
        say(said)
    resume.remove_parts_of_files(log.folder)
    print_predictions(arguments, cases)
    if not arguments.precise:
        return measure_round(arguments, cases, wanted, log)
    status = 0
    for number in range(1 if arguments.fresh else resume.next_round(
            log.entries(), wanted, ROUNDS), 1 + ROUNDS):
        say(f"round {number} of {ROUNDS}")
        status = measure_round(arguments, cases if number == 1 else most_ranks(cases),
                               wanted | {resume.ROUND: number}, log)
        if status:
            break
    return status


def measure_round(arguments: argparse.Namespace, cases: list[Case], wanted: dict[str, Any],
                  log: Journal) -> int:
    """Measure the unfinished rows of one reproduction, report its end, and return the status."""
    reproduction, finished = resume.begin_or_resume(
        log, [one.name for one in cases], wanted, arguments.order, arguments.fresh, say)
    progress = RowProgress(len(cases), len(finished))
    announce_start(progress, arguments.preset, log.folder, reproduction)
    left = [one for one in shuffle_cases(cases, reproduction.order) if one.name not in finished]
    stopped = measure_cases(left, run_options(arguments, log.folder, reproduction.order), progress)
    return report_end(log, reproduction, progress, stopped,
                      {one.title: one.name for one in cases if one.row.like},
                      arguments)


def most_ranks(cases: list[Case]) -> list[Case]:
    """Return the cases with the most ranks."""
    most = max(one.row.gpus for one in cases)
    return [one for one in cases if one.row.gpus == most]


def add_preset(arguments: argparse.Namespace) -> str:
    """Choose the preset, add it to the words of the command, and return why."""
    arguments.preset, why = choose_preset(arguments)
    preset = load_tables().presets[arguments.preset]
    chosen = [f"--preset={arguments.preset}"]
    if preset.cluster:
        arguments.equal_tokens = True
        chosen.append("--equal-tokens")
    arguments.words = [*arguments.words, *chosen]
    return why


def expected_time(arguments: argparse.Namespace, preset: Preset) -> str:
    """Say how long the selected rows take: by ranks, their part of what all of a preset take."""
    rows = rows_of_options(arguments)
    said = notes.counted(len(rows), "row")
    if not preset.minutes:
        return said
    every = list_rows(preset, "all", "paper", None, bool(preset.cluster))
    part = sum(row.gpus for row in rows) / sum(row.gpus for row in every)
    minutes = notes.counted(math.ceil(preset.minutes * part), "minute")
    return (f"{said}, about {minutes} on two cores"
            + f", as {len(every)} take {preset.minutes:g}" * (len(rows) != len(every))
            + ", and several times as long with --precise" * arguments.precise)


def row_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all settings that rows must have in common to belong to one reproduction.

    These are the sizes, repetitions and seed that are asked for, the source, the machine, its
    libraries and the variables that tune them; not the names of the rows, nor their order.
    """
    warmup, limits = row_options.step_counts(arguments)
    with as_usage_error():
        library = backends.get(arguments.backend)
    waits = row_options.waited_machine(arguments)
    if waits is None and arguments.machine:
        raise UsageError(f"--machine {arguments.machine}: only --work wait waits for the seconds "
                         f"of a machine; give both, or leave --machine out")
    return {"preset": arguments.preset, "warmup": warmup, **vars(limits),
            "traced": row_options.traced_steps(arguments), "seed": arguments.seed,
            "recompute": arguments.recompute, "software_share": arguments.software_share,
            **asdict(row_options.variant(arguments, library)),
            **(dict(zip(resume.WAITED, (waits[0].name, waits[1]))) if waits else {}),
            **resume.machine_settings(library.name)}


def cases_of_options(arguments: argparse.Namespace) -> list[Case]:
    """Make the cases of the selected rows; UsageError if they cannot have the variant."""
    rows = rows_of_options(arguments)
    library = backends.get(arguments.backend)
    variant = row_options.variant(arguments, library)
    variants.check_variant(variant, (row.scheme for row in rows), library, arguments.recompute)
    return [make_case(row, arguments.preset, variant) for row in rows]


def rows_of_options(arguments: argparse.Namespace) -> list[Row]:
    """List the rows that the options select; UsageError for none."""
    return list_rows(load_tables().presets[arguments.preset], arguments.table, arguments.scheme,
                     arguments.ranks, arguments.equal_tokens)


def list_rows(preset: Preset, table: str, scheme: str, ranks: Sequence[int] | None,
              equal_tokens: bool) -> list[Row]:
    """List the rows of tables and schemes on these ranks, by default those of the preset."""
    wanted = ranks or preset.ranks
    if not wanted:
        found = select_rows(table, scheme)
    else:
        found = [row for count in wanted for row in select_rows(table, scheme, count)
                 if row.gpus == count]
    if not found:
        counts = sorted({row.gpus for row in select_rows(table, scheme)})
        raise UsageError(f"--ranks {','.join(map(str, wanted))}: no row of --table {table} "
                         f"--scheme {scheme} has so many: {', '.join(map(str, counts))} would do")
    return found + (equal_token_rows(found) if equal_tokens else [])


def check_cluster(cases: list[Case]) -> None:
    """Raise UsageError for rows of more ranks than the emulated cluster of this process has."""
    cluster, most = Cluster.from_environment(), max(one.row.gpus for one in cases)
    if cluster and most > cluster.size:
        raise UsageError(f"rows of {most} ranks do not fit into the emulated cluster {cluster} of "
                         f"{cluster.size}: a larger one would do, or --ranks with smaller numbers")


def run_options(arguments: argparse.Namespace, out: Path, order: int) -> list[str]:
    """Return the options of ``run`` by which every row is measured."""
    words = [f"--preset={arguments.preset}", f"--out={out}", f"--order={order}",
             *row_options.variant(arguments).arguments(),
             *[f"--work={arguments.work}"] * (arguments.work == "compute")]
    if arguments.software_share is not None:
        words.append(f"--software-share={arguments.software_share or 'none'}")
    for name in ("warmup", "repetitions", "max_repetitions", "max_seconds", "width", "traced",
                 "backend", "seed", "stall", "recompute", "node_memory", "machine", "work_scale"):
        value = getattr(arguments, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


def announce_start(progress: RowProgress, preset: str, out: Path,
                   reproduction: Reproduction) -> None:
    """Show the number of rows, the machine, the folder, and the rows that are there already."""
    where = f"{cluster.describe()}; " if (cluster := Cluster.from_environment()) else ""
    progress.say(f"{notes.counted(progress.total, 'row')}, preset {preset}, on "
                 f"{host.cpu_model()}, {launcher.cores()} cores; {where}results in {out}; order "
                 f"{reproduction.order}")
    for line in _left_behind():
        progress.say(line)
    if progress.done:
        progress.say(f"going on with what was begun at {reproduction.begun[:19]} UTC: "
                     f"{notes.counted(progress.done, 'row')} of it measured before")


def print_predictions(arguments: argparse.Namespace, cases: list[Case]) -> None:
    """Print the predictions of rows on an emulated cluster whose ranks wait for their work."""
    found, cluster = row_options.waited_machine(arguments), Cluster.from_environment()
    if found is None or cluster is None:
        return
    rows = [of_case(one, *found, cluster, arguments.recompute) for one in cases]
    arguments.show(["predicted before the run:",
                    *emulated_tables.tables_of(rows, measured=False)])
    say()


def report_end(log: Journal, reproduction: Reproduction, progress: RowProgress,
               stopped: Stopped | None, spare: Mapping[str, str],
               arguments: argparse.Namespace) -> int:
    """Record and print how a reproduction ended, and show its results; return the exit status.

    `spare` has titles and names of the rows that may be left out for lack of memory.
    """
    spared = {name for title, name in spare.items()
              if any(line.startswith(f"left out: {title}:") for line in progress.left_out)}
    lacking = len(progress.failures) + len(progress.left_out) - len(spared)
    # It may have begun with more rows than this command asks for: they are still to do.
    missing = set(resume.missing_rows(reproduction, log.folder)) - spared
    outcome = "stopped" if stopped else "incomplete" if lacking or missing else "complete"
    log.write("end", outcome=outcome, measured=progress.measured, of=progress.total)
    for what, lines in (("failed", progress.failures),
                        ("left out for lack of memory", progress.left_out)):
        if lines:
            complain(f"\n{len(lines)} of {progress.total} rows {what}:",
                     *(f"  {line}" for line in lines))
    status = int(lacking > 0)
    goes_on = reproduction.settings.get(resume.ROUND, ROUNDS) < ROUNDS and outcome == "complete"
    if progress.measured and not goes_on:
        status |= write_tables_and_figures(log.folder, not stopped, arguments.show)
    if stopped or lacking:
        complain(f"\n{stopped or 'Ended'}: {progress.measured} of {progress.total} rows are in "
                 f"{log.folder}; {command_for_rest(arguments.words)}", *_left_behind())
    elif missing:
        say(f"\nstill to measure of what was begun at {reproduction.begun[:19]} UTC: "
            f"{notes.counted(len(missing), 'row')}, with which the command that began it goes on")
    return stopped.status if stopped else status


def _left_behind() -> list[str]:
    """Say, in a line, how to remove what killed jobs have left in shared memory; [] for none."""
    advice = leftover_memory.removal_advice(leftover_memory.abandoned_segments())
    return [advice] * bool(advice)


def command_for_rest(words: list[str]) -> str:
    """Return the command that measures the rows left by a command with these `words`."""
    left = [word for word in words if word != "--fresh"]
    return (f"the same command{' without --fresh' * (left != words)} measures the others:\n  "
            f"{shlex.join(['python', '-m', 'bench', *left])}")
