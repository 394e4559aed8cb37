"""Pipelines: the bubble, and the clock's beside it, from the times of their actions.

The ranks of a stage begin and end an action nearly together: its times are the means of theirs.
"""

from typing import Sequence

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, medians, named
from bench.records.measurements import Measurements, Place
from bench.records.notes import describe_cluster, equal_rate_notes
from bench.statistics import elapsed
from mm3d.training.schedules import Schedule, Times, check, parse_schedule, time_actions
from mm3d.training.schedules.clock import Timeline

SCHEMAS = {
    "pipeline": {
        "verified": True,
        "positive": "clock_seconds seconds reference_seconds ratio",
        "signed": "memory",
        "environment": "ranks cores oversubscribed",
        "settings": (
            "about_work batch dtype ended_by grid heads hidden layers microbatches recompute "
            "reference schedule schedule_text scheme seq stage_grids transport work"),
        "needs": {"reference": "reference_order reference_times processor"},
        "variables": {
            "expected_memory": "rank", "expected_words": "", "hop_samples": "round",
            "memory": "account rank", "times": "repetition rank action edge", "words": "rank"},
        "optional": {
            "processor": "side repetition rank",
            "reference_times": "repetition rank action edge",
            "slept": "side repetition rank step"},
        "derived": {
            "bubble": "bound", "clock_bubble": "", "clock_seconds": "",
            "durations": "step stage", "hop": "", "seconds": "bound", "overhead": "side bound",
            "ratio": "bound", "reference_seconds": "bound"},
        "labels": {
            "side": [["mm3d"], ["mm3d", "PyTorch"]],
            "step": [["F", "B", "W"]]}}}

# Settings that are equal in all rows of a table, as its notes say.
OF_A_TABLE = ("work", "about_work", "wait_F", "wait_B", "wait_W", "scheme", "grid", "stage_grids",
              "layers", "hidden", "heads", "seq", "dtype", "recompute", "reference")


def derive(record: Measurements) -> Derived:
    """Return seconds and bubble of a step, those of the clock, and those of a reference."""
    schedule = parse_schedule(str(record.configuration["schedule_text"]))
    raw = {name: variable.values for name, variable in record.raw.items()}
    times = raw["times"]
    steps, hop = durations(times, schedule), float(np.median(raw["hop_samples"]))
    timeline = clock_timeline(schedule, steps, hop)
    found = {"seconds": (medians(repetition_seconds(times)), "s"),
             "bubble": (medians(bubble_rates(times, schedule)), "1"),
             "durations": (steps, "s"), "hop": (hop, "s"),
             "clock_seconds": (float(timeline.makespan), "s"),
             "clock_bubble": (float(timeline.bubble_rate), "1")}
    if "reference_times" in raw:
        sides = [times, raw["reference_times"]]
        own, reference = map(repetition_seconds, sides)
        found |= {"reference_seconds": (medians(reference), "s"),
                  "ratio": (medians(reference / own), "1")}
        if "slept" in raw:
            found["overhead"] = [medians(overheads(*side, schedule))
                                 for side in zip(sides, raw["slept"])], "s"
    return found


def check_texts(run: Measurements) -> None:
    """Check that the schedule can be kept, and has the ranks, actions and stages measured."""
    schedule = named("configuration/schedule_text", parse_schedule,
                     str(run.configuration["schedule_text"]))
    named("configuration/schedule_text", check, schedule)
    _, ranks, actions, _ = np.shape(run.raw["times"].values)
    if (ranks % schedule.ranks or actions != max(map(len, schedule.rows))
            or len(run.scales["stage"]) != schedule.stage_count):
        raise ValueError(f"configuration/schedule_text has {schedule.ranks} ranks, "
                         f"{schedule.stage_count} stages and at most "
                         f"{max(map(len, schedule.rows))} actions a rank: not those of the "
                         f"{ranks} ranks, {len(run.scales['stage'])} stages and {actions} actions "
                         f"that were measured")
    chosen = run.configuration
    if chosen["reference"] != "none" and chosen["work"] == "wait" and "slept" not in run.raw:
        raise ValueError("measurements/slept is missing, of waits beside a reference")


def stage_times(times: np.ndarray, stages: int) -> np.ndarray:
    """Return (repetition, stage, action, edge) from (repetition, rank, action, edge)."""
    return times.reshape(len(times), stages, -1, *times.shape[2:]).mean(axis=2)


def bubble_rates(times: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Compute the bubble of each repetition, as a share of the cost.

    As in a timeline, the cost is the longest time from a stage's first begin to its last end; the
    bubble is the cost less the mean time that stages spend in actions.

    `times`: seconds, (repetition, rank, action, begin and end); NaN beyond the actions of a rank.
    """
    found = stage_times(times, schedule.ranks)
    cost = (np.nanmax(found[..., 1], axis=2) - np.nanmin(found[..., 0], axis=2)).max(axis=1)
    work = np.nansum(found[..., 1] - found[..., 0], axis=2).mean(axis=1)
    return 1 - work / cost


def repetition_seconds(times: np.ndarray) -> np.ndarray:
    """Compute the makespan of each repetition, from the first begin to the last end of all."""
    return elapsed(times.reshape(len(times), -1, 2))


def durations(times: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Return the median seconds of F, B and W, (step, stage); of both together as B, with W 0."""
    found = stage_times(times, schedule.ranks)
    took: dict[tuple[str, int], list[np.ndarray]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            key = action.kind, schedule.stage_of(rank, action.chunk)
            took.setdefault(key, []).append(found[:, rank, index, 1] - found[:, rank, index, 0])
    median = {key: float(np.median(values)) for key, values in took.items()}
    both = np.zeros((3, schedule.stage_count))
    for stage in range(schedule.stage_count):
        together = median.get(("BW", stage), 0.0)
        both[:, stage] = (median["F", stage], median.get(("B", stage), together),
                          median.get(("W", stage), 0.0))
    return both


def clock_timeline(schedule: Schedule, steps: np.ndarray, hop: float) -> Timeline:
    """Return the clock's timeline for `durations` and seconds of a hop."""
    return time_actions(schedule,
                        Times.by_stage(*(map(float, row) for row in steps), hop=float(hop)))


def overheads(times: np.ndarray, slept: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Compute the overhead of an action in each repetition of waits, in seconds.

    It is the measured makespan less that of the clock, run without hops on the times that the
    waits really took, over the number of actions on the clock's critical path.

    `slept` has the mean seconds of F, B and W of a chunk, (repetition, rank, step).
    """
    found = []
    by_rank = slept.reshape(len(slept), schedule.ranks, -1, slept.shape[-1]).mean(axis=2)
    for seconds, repetition in zip(repetition_seconds(times), by_rank):
        steps = np.zeros((slept.shape[-1], schedule.stage_count))
        for rank, stages in enumerate(schedule.stages):
            steps[:, list(stages)] = repetition[rank][:, np.newaxis]
        timeline = clock_timeline(schedule, steps, 0.0)
        found.append((seconds - float(timeline.makespan)) / len(timeline.critical_path()))
    return np.array(found)


def tables(records: Sequence[Measurements]) -> list[Part]:
    """Make the tables of pipelines, one for each model, mesh, and kind of work."""
    groups: dict[tuple, list[Measurements]] = {}
    for record in records:
        chosen, env = record.configuration, record.environment
        settings = [str(chosen.get(name)) for name in OF_A_TABLE]
        rows = int(chosen["batch"]) // int(chosen["microbatches"])
        groups.setdefault((*settings, rows, env["ranks"], env["cores"], describe_cluster(env)),
                          []).append(record)
    return [part for group in groups.values() for part in _of_one_model(group)]


def _of_one_model(records: Sequence[Measurements]) -> list[Part]:
    """Make the table of pipelines of one model and mesh, and that of PyTorch's beside them."""
    parts = [make_table("Pipelines", COLUMNS, [Place(record, {}) for record in records]),
             Notes("About these pipelines:", _notes(records))]
    beside = [one for one in records if one.configuration["reference"] != "none"]
    if beside:
        waits = beside[0].configuration["work"] == "wait"
        parts += [make_table("Beside torch.distributed.pipelining", _beside(waits),
                             [Place(record, {}) for record in beside]),
                  Notes("About these comparisons:", _beside_notes(beside, waits))]
    return parts


def _schedule(at: Place) -> Schedule:
    return parse_schedule(str(at["schedule_text"]))


def _of_step(step: int) -> Column:
    """Describe the milliseconds of F, B or W of all layers of a rank, the mean over stages."""
    def of(at: Place) -> float:
        durations = at("durations")
        chunks = durations.shape[1] // _schedule(at).ranks
        return 1e3 * (durations.mean(axis=1) * chunks)[step]
    return Column("FBW"[step], "(ms)", of=of, form=".3g")


def _of_busiest(at: Place, name: str) -> float:
    """Return the megabytes of the rank that holds the most."""
    peaks = at("memory")[0]
    return (peaks if name == "memory" else at(name))[int(np.argmax(peaks))] / 1e6


FIRST = [Column("schedule", of=lambda at: str(at["schedule"])),
         Column("micro-", "batches", of=lambda at: int(at["microbatches"]))]
BUBBLE, MEMORY, WORDS = "bubble / cost (%)", "peak memory of a rank (MB)", "words of all hops"
COLUMNS = [
    *FIRST, Column("step", "(ms)", of=lambda at: 1e3 * at("seconds")[0], form=".1f"),
    Column("clock's", "(ms)", of=lambda at: 1e3 * at("clock_seconds"), form=".1f"),
    *spread(lambda at: 100 * at("bubble"), ".1f", BUBBLE, ("measured", "low", "high")),
    Column("clock's", "", BUBBLE, of=lambda at: 100 * at("clock_bubble"), form=".1f"),
    Column("points", "apart", BUBBLE, form="+.1f",
           of=lambda at: 100 * (at("bubble")[0] - at("clock_bubble"))),
    *map(_of_step, range(3)), Column("hop", "(ms)", of=lambda at: 1e3 * at("hop"), form=".3g"),
    Column("counted", "", MEMORY, of=lambda at: _of_busiest(at, "memory"), form=".2f"),
    Column("closed form", "", MEMORY, of=lambda at: _of_busiest(at, "expected_memory"),
           form=".2f"),
    Column("counted", "", WORDS, of=lambda at: int(at("words").sum())),
    Column("closed form", "", WORDS, of=lambda at: int(at("expected_words")))]


def _both(at: Place) -> np.ndarray:
    """Return the seconds of a step of mm3d, and of PyTorch."""
    return np.array([at("seconds")[0], at("reference_seconds")[0]])


def _processor(at: Place) -> np.ndarray:
    """Return the processor time of an action in microseconds, of both sides."""
    actions = np.mean([len(row) for row in _schedule(at).rows])
    return 1e6 * np.median(at("processor").mean(axis=2), axis=1) / actions


def _beside(waits: bool) -> list[Column]:
    """Describe the table of pipelines beside PyTorch's."""
    sides = ("mm3d", "PyTorch")
    own = [*spread(lambda at: 1e6 * at("overhead")[:, 0], ".0f", "overhead of an action (us)",
                   sides),
           Column("mm3d /", "PyTorch", of=lambda at: np.divide(*(1e6 * at("overhead")[:, 0])),
                  form=".2f")] if waits else spread(
        lambda at: int(at["batch"]) * int(at["seq"]) / _both(at), ".0f", "tokens a second", sides)
    clock = Column("mm3d / clock", of=lambda at: _both(at)[0] / at("clock_seconds"), form=".3f")
    return [*FIRST, *spread(lambda at: 1e3 * _both(at), ".1f", "step", sides, ("(ms)", "(ms)")),
            *spread(lambda at: at("ratio"), ".2f", "PyTorch / mm3d"), *own,
            *spread(_processor, ".0f", "processor, an action (us)", sides),
            *[clock] * (not waits)]


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
    notes = []
    for record in records:
        chosen = record.configuration
        if "reference_times" not in record.variables:
            continue
        at = Place(record, {})
        bubble = np.median(bubble_rates(at("reference_times"), _schedule(at)))
        name = f"{chosen['schedule']}, {chosen['microbatches']} micro-batches"
        notes += equal_rate_notes(record, {name: (_both(at)[1], at("ratio")[0])},
                                  1 - bubble)
    return notes


def _notes(records: Sequence[Measurements]) -> list[str]:
    chosen, env = records[0].configuration, records[0].environment
    waits = chosen["work"] == "wait"
    cluster = describe_cluster(env)
    rows = int(chosen["batch"]) // int(chosen["microbatches"])
    repetitions = sorted({len(record.scales["repetition"]) for record in records})
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
        f"{', '.join(map(str, repetitions))} repetitions.",
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
    """Describe the verification and its errors."""
    if records[0].configuration["work"] == "wait":
        return "each result that arrived was the right one"
    tolerance = max(check.tolerance for record in records for check in record.checks
                    if not check.quantity.startswith("PyTorch"))
    return "gradients are equal to those of the model in one stage, " + (
        f"each to a relative error of {tolerance:g}" if tolerance else "each to the bit")
