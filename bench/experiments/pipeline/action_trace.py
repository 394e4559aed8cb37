"""Make the trace of a measured pipeline for Chrome and Perfetto, beside the clock's."""

from typing import Any, Callable

import numpy as np

from bench.instruments import chrome_trace
from bench.instruments.spans import Span
from bench.records.kinds import pipeline as derived
from bench.records.measurements import Measurements
from mm3d.training.schedules import Schedule, parse_schedule

Edges = Callable[[int, int], tuple[float, float]]    # begin and end, of a rank and an action


def make_action_trace(record: Measurements) -> dict[str, Any]:
    """Make a trace of the actions: a track for each rank, then the clock's, then PyTorch's.

    Measured tracks are those of the repetition with the median bubble.  Each of the groups begins
    at 0.
    """
    chosen = record.configuration
    schedule = parse_schedule(str(chosen["schedule_text"]))
    found = {name: variable.values for name, variable in record.variables.items()}
    places = found["times"].shape[1] // schedule.ranks
    timeline = derived.clock_timeline(schedule, found["durations"], float(found["hop"]))
    tracks, names = _measured(found["times"], schedule, places)
    names = [f"{name}, measured" for name in names]
    tracks += _tracks(schedule, 1, lambda rank, index: (
        float(timeline.starts[rank][index]), float(timeline.ends[rank][index])))
    names += [f"stage {stage}, the clock's" for stage in range(schedule.ranks)]
    if "reference_times" in found:
        more, ranks = _measured(found["reference_times"], schedule, places)
        tracks, names = tracks + more, names + [f"{name}, PyTorch" for name in ranks]
    title = f"{chosen['schedule']}, {chosen['microbatches']} micro-batches"
    return chrome_trace.make_trace(tracks, names, title, {
        "title": title, "work": chosen["about_work"], "grid": chosen["grid"],
        "reference": chosen.get("reference", "none"),
        "spans": "names are those of a schedule's text, with the stage before the point"})


def _measured(times: np.ndarray, schedule: Schedule,
              places: int) -> tuple[list[list[Span]], list[str]]:
    """Return the tracks of the repetition with the median bubble, and the ranks' names."""
    rates = derived.bubble_rates(times, schedule)
    one = times[int(np.argsort(rates)[len(rates) // 2])]
    one = one - np.nanmin(one)
    return (_tracks(schedule, places, lambda rank, index: tuple(map(float, one[rank, index]))),
            [f"rank {rank} (stage {rank // places})" for rank in range(len(one))])


def _tracks(schedule: Schedule, places: int, edges: Edges) -> list[list[Span]]:
    """Return the spans of each of `places` ranks a stage."""
    found = []
    for rank in range(schedule.ranks * places):
        row, track = schedule.rows[rank // places], []
        for index, action in enumerate(row):
            stage = schedule.stage_of(rank // places, action.chunk)
            start, end = edges(rank, index)
            track.append(Span(f"{action.kind}{stage}.{action.micro}", "phase",
                              "forward" if action.kind == "F" else "backward",
                              start, end, end - start))
        found.append(track)
    return found
