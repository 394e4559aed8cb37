"""Make the table of measured pipelines from their records, and the rows for their pictures."""

from typing import Sequence

import numpy as np

from bench.records.kinds import pipeline as derived
from bench.records.measurements import Measurements
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell
from bench.reports.emulated import describe_cluster
from bench.reports.layer_table import equal_rate_notes
from mm3d.training.schedules import parse_schedule
from mm3d.training.schedules.clock import Timeline


# Settings that are equal in all rows of a table, as its notes say.
OF_A_TABLE = ("work", "about_work", "wait_F", "wait_B", "wait_W", "scheme", "grid", "stage_grids",
              "layers", "hidden", "heads", "seq", "dtype", "recompute", "reference")


def pipeline_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make the tables of pipelines, a row a schedule and number of micro-batches.

    Pipelines of another model, on other ranks, or whose actions wait, have a table of their own.
    """
    groups: dict[tuple, list[Measurements]] = {}
    for record in records:
        chosen, env = record.configuration, record.environment
        settings = [str(chosen.get(name)) for name in OF_A_TABLE]
        rows = int(chosen["batch"]) // int(chosen["microbatches"])
        groups.setdefault((*settings, rows, env["ranks"], env["cores"], describe_cluster(env)),
                          []).append(record)
    return [part for group in groups.values() for part in _parts_of_one_model(group)]


def _parts_of_one_model(records: Sequence[Measurements]) -> list[Part]:
    """Make the table of pipelines of one model and mesh, and that of PyTorch's beside them."""
    bubble, memory, words = "bubble / cost (%)", "peak memory of a rank (MB)", "words of all hops"
    columns = [Column("schedule"), Column("micro-", "batches"), Column("step", "(ms)"),
               Column("clock's", "(ms)"), Column("measured", "", bubble),
               Column("low", "", bubble), Column("high", "", bubble),
               Column("clock's", "", bubble), Column("points", "apart", bubble),
               *(Column(name, "(ms)") for name in ("F", "B", "W", "hop")),
               Column("counted", "", memory), Column("closed form", "", memory),
               Column("counted", "", words), Column("closed form", "", words)]
    rows: Rows = []
    for record in records:
        found = {name: variable.values for name, variable in record.variables.items()}
        chunks = np.shape(found["durations"])[1] // parse_schedule(
            str(record.configuration["schedule_text"])).ranks
        steps = found["durations"].mean(axis=1) * chunks
        busiest = int(np.argmax(found["memory"][0]))
        rows.append([
            str(record.configuration["schedule"]), int(record.configuration["microbatches"]),
            number_cell(1e3 * found["seconds"][0], ".1f"),
            number_cell(1e3 * found["clock_seconds"], ".1f"),
            *(number_cell(100 * value, ".1f")
              for value in (*found["bubble"][:3], found["clock_bubble"])),
            number_cell(100 * (found["bubble"][0] - found["clock_bubble"]), "+.1f"),
            *(number_cell(1e3 * value, ".3g") for value in (*steps, found["hop"])),
            number_cell(found["memory"][0, busiest] / 1e6, ".2f"),
            number_cell(found["expected_memory"][busiest] / 1e6, ".2f"),
            int(found["words"].sum()), int(found["expected_words"])])
    return [Table("Pipelines", columns, rows), Notes("About these pipelines:", _notes(records)),
            *_beside_parts([one for one in records
                            if one.configuration.get("reference", "none") != "none"])]


def _beside_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make the table of pipelines that were measured beside PyTorch's; nothing without any."""
    if not records:
        return []
    waits = records[0].configuration["work"] == "wait"
    names = ("overhead of an action (us)",) * waits or ("tokens a second",)
    columns = [Column("schedule"), Column("micro-", "batches"), Column("mm3d", "(ms)", "step"),
               Column("PyTorch", "(ms)", "step"),
               *(Column(name, "", "PyTorch / mm3d") for name in ("median", "low", "high")),
               *(Column(name, "", names[0]) for name in ("mm3d", "PyTorch")),
               *[Column("mm3d /", "PyTorch")] * waits,
               *(Column(name, "", "processor, an action (us)") for name in ("mm3d", "PyTorch")),
               *[Column("mm3d / clock")] * (not waits)]
    rows = [_beside_row(record, waits) for record in records]
    return [Table("Beside torch.distributed.pipelining", columns, rows),
            Notes("About these comparisons:", _beside_notes(records, waits))]


def _beside_row(record: Measurements, waits: bool) -> list:
    chosen = record.configuration
    found = {name: variable.values for name, variable in record.variables.items()}
    both = np.array([found["seconds"][0], found["reference_seconds"][0]])
    schedule = parse_schedule(str(chosen["schedule_text"]))
    processor = 1e6 * np.median(found["processor"].mean(axis=2), axis=1) / np.mean(
        [len(row) for row in schedule.rows])
    if waits:
        own = 1e6 * found["overhead"][:, 0]
        middle = [*(number_cell(value, ".0f") for value in own),
                  number_cell(own[0] / own[1], ".2f")]
    else:
        tokens = int(chosen["batch"]) * int(chosen["seq"])
        middle = [number_cell(tokens / seconds, ".0f") for seconds in both]
    return [str(chosen["schedule"]), int(chosen["microbatches"]),
            *(number_cell(1e3 * seconds, ".1f") for seconds in both),
            *(number_cell(value, ".2f") for value in found["ratio"][:3]), *middle,
            *(number_cell(value, ".0f") for value in processor),
            *[number_cell(both[0] / found["clock_seconds"], ".3f")] * (not waits)]


def _beside_notes(records: Sequence[Measurements], waits: bool) -> list[str]:
    """Say what was compared, and what the columns mean."""
    chosen = records[0].configuration
    orders = ", ".join(sorted({str(one.configuration["reference_order"]) for one in records}))
    notes = [
        f"{chosen['reference']}; {orders}; a process of PyTorch's beside each rank, in turns with "
        f"it, in random order, one side asleep while the other works.",
        "PyTorch / mm3d: of the seconds of a step, the median of the ratios of all repetitions "
        "with its interval. Processor: time that a rank uses in a step over its actions."]
    if waits:
        return notes + [
            "Overhead: the step less the clock's without hops and with the times that the waits "
            "really took, over the actions that the last end waits for: messages, autograd and "
            "Python. Every result that arrived was the right one on both sides."]
    return notes + [
        "The gradients of both are equal within rounding. PyTorch computes no gradient of the "
        "first layer's input, mm3d does. mm3d / clock: its step over the clock's, with measured "
        "F, B, W and hop.", *_kernels(records)]


def _kernels(records: Sequence[Measurements]) -> list[str]:
    """Say how fast both sides multiply."""
    notes = []
    for record in records:
        chosen, found = record.configuration, record.variables
        if "reference_times" not in found:
            continue
        bubble = np.median(derived.bubble_rates(found["reference_times"].values, parse_schedule(
            str(chosen["schedule_text"]))))
        name = f"{chosen['schedule']}, {chosen['microbatches']} micro-batches"
        notes += equal_rate_notes(record, {name: (found["reference_seconds"].values[0],
                                                  found["seconds"].values[0])}, 1 - bubble)
    return notes


def _notes(records: Sequence[Measurements]) -> list[str]:
    chosen, env = records[0].configuration, records[0].environment
    waits = chosen["work"] == "wait"
    cluster = describe_cluster(env)
    rows = int(chosen["batch"]) // int(chosen["microbatches"])
    notes = [f"WAITS stand in for layers: {chosen['about_work'].partition(': ')[2]}. Steps of "
             f"real layers take other times."] if waits else [
        f"{chosen['layers']} layers of {chosen['hidden']} features, {chosen['heads']} heads; "
        f"micro-batches of {rows} sequence{'s' * (rows > 1)} of {chosen['seq']}; "
        f"{chosen['dtype']}, recompute {chosen['recompute']}."]
    if env["oversubscribed"] and not waits:
        notes.append(f"RANKS OUTNUMBER CORES: {env['ranks']} ranks take turns on {env['cores']} "
                     f"cores; such times say nothing about a schedule (--work wait does).")
    return notes + [
        f"{chosen['grid']} ranks (stages, ranks of a stage), scheme {chosen['scheme']}, grid "
        f"{str(chosen['stage_grids']).partition(';')[0]}"
        f"{' in stage 0' if len(set(str(chosen['stage_grids']).split('; '))) > 1 else ''}; "
        f"{env['ranks']} ranks on {env['cores']} cores{', ' * bool(cluster)}{cluster}; verified: "
        f"{_checked(records)}, before the first repetition and after the last; "
        f"{', '.join(_repetitions(records))} repetitions.",
        "Step: from the first begin of an action to the last end of all ranks, median. Bubble: "
        "the longest time of a stage from its own first begin to its own last end, less the mean "
        "time of a stage in actions; low and high: of its median, at 95 % where there are at "
        "least six repetitions, otherwise the least and the greatest. Waiting inside an action "
        "for ranks of the same stage "
        "belongs to the action. Not timed: drawing parameters and activations, setting gradients "
        "to zero, the optimizer, verification.",
        "Clock's: the exact time of the schedule with the measured medians of F, B, W of each "
        "stage and of a hop; F, B and W are of all layers of a rank, a mean over the stages; "
        "where B is not divided, W is part of it. Hop: half of a round trip of a block between "
        "two idle stages.",
        "Memory: of the rank with the most; the closed form leaves out messages that are being "
        "sent and blocks of elementwise work."]


def _checked(records: Sequence[Measurements]) -> str:
    """Return what was verified, and how closely."""
    if records[0].configuration["work"] == "wait":
        return "each result that arrived was the right one"
    tolerance = max(check.tolerance for record in records for check in record.checks
                    if not check.quantity.startswith("PyTorch"))
    return "gradients are equal to those of the model in one stage, " + (
        f"each to a relative error of {tolerance:g}" if tolerance else "each to the bit")


def _repetitions(records: Sequence[Measurements]) -> list[str]:
    return sorted({str(len(record.scales["repetition"])) for record in records}, key=int)


def timelines(record: Measurements) -> dict[str, Timeline]:
    """Return the measured timeline and the clock's, in seconds, by the title of a picture."""
    chosen = record.configuration
    schedule = parse_schedule(str(chosen["schedule_text"]))
    found = {name: variable.values for name, variable in record.variables.items()}
    clock = derived.clock_timeline(schedule, found["durations"], float(found["hop"]))
    title = f"{chosen['schedule']}, {chosen['microbatches']} micro-batches"
    about = [*["WAITS stand in for layers"] * (chosen["work"] == "wait"),
             *filter(None, [describe_cluster(record.environment)])]
    if record.environment["oversubscribed"] and chosen["work"] != "wait":
        about.append(f"{record.environment['ranks']} RANKS TAKE TURNS on "
                     f"{record.environment['cores']} cores")
    work = f" ({'; '.join(about)})" if about else ""
    measured = derived.measured_timeline(schedule, found["times"], clock)
    return {f"{title}, measured in one repetition{work}": measured,
            f"{title}, the clock's with measured F, B, W and hop{work}": clock}
