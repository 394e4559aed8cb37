"""Measure this machine, with as many ranks as mpirun starts, and write its model."""

import argparse
from pathlib import Path

from bench.console import say
from bench.errors import WrongResult
from bench.prediction import calibration, machine_file, machine_model
from bench.command_line import options
from bench.command_line.publish import publish_machine, report_failure
from mm3d.transport.choice import in_place_collectives

GROUP = "Plan and predict"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    parser.add_argument("--out", required=True, metavar="FILE",
                        help="the machine's model, a .toml file for --machine")
    options.add_stall(parser)
    options.add_cluster(parser)


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write the file; 0 when it was written."""
    path = Path(arguments.out)
    machine_file.check_writable("--out", path, comm)
    try:
        machine = calibration.measure_machine(
            comm, lambda line: say(line) if comm.rank == 0 else None)
    except WrongResult as wrong:
        return report_failure("calibrate", f"{wrong}; no file was written", comm)
    status = publish_machine(machine, path, comm)
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
