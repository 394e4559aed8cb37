"""Measure this machine with all ranks, or read others' logs; write the machine's model."""

import argparse
import os
import re
from pathlib import Path
from typing import Callable

from bench.agreement import make_on_rank_0
from bench.command_line import measuring, options
from bench.command_line.publish import publish, report_failure
from bench.errors import UsageError, WrongResult
from bench.prediction import machine_file, machine_model
from bench.prediction.calibration import fit, measure
from bench.prediction.calibration.record import read_calibration
from bench.prediction.logs import fitting
from bench.prediction.logs.reading import LogFile
from bench.reports.log_tables import log_parts
from mm3d.console import say
from mm3d.transport.nodes import in_place_collectives

GROUP = "Plan and predict"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    parser.add_argument("--out", required=True, metavar="FILE",
                        help="the machine's model, a .toml file for --machine; all samples are "
                             "written beside it")
    parser.add_argument("--samples", metavar="FILE",
                        help="measure nothing, and fit the model to the samples in this file, "
                             "which calibrate wrote")
    parser.add_argument("--from", dest="logs", nargs="+", type=log_file, metavar="FILE", help=(
        "measure nothing, and fit links and products to logs of nccl-tests, OSU and IMB and to "
        "CSV tables with columns dtype, m, n, k and tflops (or gflops, seconds, ms, us); "
        "network:16=FILE says what a log does not: its link (node or network), and its ranks"))
    parser.add_argument("--machine", metavar="NAME", help=(
        "with --from, take what the logs do not say from this machine: a supplied one or a .toml "
        "file"))
    measuring.add_stall(parser)
    measuring.add_shared(parser, "cluster")


def log_file(text: str) -> LogFile:
    """Return the log that ``FILE``, ``LINK=FILE`` or ``LINK:RANKS=FILE`` names."""
    place, equals, file = text.partition("=")
    if not equals or "/" in place or os.path.exists(text):
        return LogFile(text)
    if found := re.fullmatch(r"(node|network)(?::([1-9]\d{0,6}))?", place):
        return LogFile(file, found[1], int(found[2] or 0))
    raise options.refused(text, "FILE, LINK=FILE or LINK:RANKS=FILE, where LINK is node or "
                                "network,")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure or read samples, and write the file of a model fitted to them; 0 when written."""
    if arguments.machine and not arguments.logs:
        raise UsageError(f"--machine {arguments.machine} would do nothing here: give --from too, "
                         f"or leave it out")
    if arguments.logs and arguments.samples:
        raise UsageError("--from and --samples: one of them would do")
    if arguments.logs or arguments.samples:
        options.refuse(arguments, ("stall", "cluster"), "nothing is measured: leave it out")
    if arguments.logs:
        path = Path(arguments.out)
        machine_file.check_writable(path, comm)
        return comm.bcast(make_on_rank_0(lambda: fit_logs(path, arguments), comm))
    return calibrate(arguments, comm, measure.measure_samples)


def fit_logs(path: Path, arguments: argparse.Namespace) -> int:
    """Fit a machine to logs, print the fit and its residuals; 1 when no file can be written.

    UsageError when a file cannot be read, no line can be used, or ``--machine`` was measured.
    """
    base = machine_model.load_machine(arguments.machine) if arguments.machine else None
    if base and (base.passes or base.collectives):
        raise UsageError(f"--machine {arguments.machine} has what calibrate measured, which "
                         f"would hide what logs say: a supplied machine such as dgx-a100 would do")
    logs = fitting.read_logs(arguments.logs)
    links, rates = fitting.fit_logged_links(logs.series), fitting.fit_rates(logs.products)
    tree = fitting.make_tree(path.stem, logs, links, rates, base)
    missing = fitting.missing_fields(tree)
    arguments.show(log_parts(logs, links, rates, missing))
    say()
    return int(bool(machine_file.write_machine(path, tree, missing)))


def calibrate(arguments: argparse.Namespace, comm, measure_samples: Callable) -> int:
    """Do what `run` does, with samples that `measure_samples` takes.

    UsageError or StoreError when ``--out`` cannot be written; or the file of samples cannot be
    read, or has others.
    """
    path, status = Path(arguments.out), 0
    machine_file.check_writable(path, comm)
    if arguments.samples:
        record = make_on_rank_0(lambda: read_calibration(arguments.samples), comm)
    else:
        try:
            record = measure_samples(comm, lambda line: say(line) if comm.rank == 0 else None)
        except WrongResult as wrong:
            return report_failure("calibrate", f"{wrong}; no file was written", comm)
        status = publish(record, path.parent, f"{path.stem}-samples", comm)
    machine = fit.fit_machine(record) if comm.rank == 0 else None
    status = max(status, machine_file.publish_machine(machine, path, comm))
    if machine:
        say(figures(machine))
    return status


def bandwidth(line: machine_model.Line) -> str:
    """Format the bytes a second that a collective reaches beyond its latency."""
    if not line.beta:
        return "inf GB/s"
    return f"{1e-9 / line.beta:.2f} GB/s" if line.beta < 1e-8 else f"{1e-6 / line.beta:.1f} MB/s"


def figures(machine: machine_model.Machine) -> str:
    """Summarize the figures of the model in a few lines."""
    half = ", ".join(f"{edge:.0f}" for edge in machine.gemm_half_size)
    rates = ", ".join(f"{d} {rate / 1e9:.1f}" for d, rate in machine.gemm_rate.items())
    lines = [machine.about,
             f"products: {rates} GFLOP/s a rank, half sizes {half}, "
             f"{1e6 * machine.gemm_seconds:.1f} us each",
             "passes: " + ", ".join(
                 f"{name} {curve.bytes[-1] / curve.seconds[-1] / 1e9:.1f} GB/s"
                 for name, curve in machine.passes.items() if name != "other"),
             f"Python: {1e6 * machine.launch_seconds:.1f} us an operation"]
    lines.append(f"in a step: {machine.achieved.gemm:.0%} of all rates" + "".join(
        f"; waiting{where} " + ", ".join(f"{1e6 * seconds:.0f} us for {size} ranks"
                                         for size, seconds in waits.items())
        for waits, where in ((machine.waiting, ""), (machine.node_waiting, " inside nodes"))
        if waits))
    placed = in_place_collectives(machine.transport)
    lines += [f"{line.kind}{' of columns' * line.pieces} of {line.size} ranks {line.stride} "
              f"apart: {1e6 * line.alpha:.0f} us, "
              + ("read where it lies" if line.kind in placed else
                 bandwidth(line))
              for line in machine.collectives]
    return "\n".join(lines)
