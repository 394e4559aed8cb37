"""Make tables of pipeline schedules and their costs."""

import itertools
from typing import Mapping

from bench.document import Column, Notes, Number, Table, number_cell
from mm3d.training.schedules.clock import Timeline, peak_in_flight
from mm3d.training.schedules.messages import message_count, pending_needed


def costs(timelines: Mapping[str, Timeline]) -> Table:
    """Make the table of what schedules cost, one a line, by name."""
    columns = [Column("schedule"), *(Column(name, unit, group, ".") for name, unit, group in (
        ("cost", "", ""), ("bubble", "", ""), ("bubble", "/ cost", ""), ("bubble", "/ work", ""),
        ("idle", "share", ""), ("to B", "", "in flight"), ("to W", "", "in flight"),
        ("messages", "", ""), ("sends", "pending", "")))]
    return Table("Pipeline schedules", columns, [[name, *_costs(timeline)]
                                                 for name, timeline in timelines.items()])


def _costs(timeline: Timeline) -> list[Number | int]:
    schedule = timeline.schedule
    flights = [max(peak_in_flight(schedule, kept)) / schedule.chunks for kept in (0, 1)]
    return [*(number_cell(float(value)) for value in (
        timeline.cost, timeline.bubble, timeline.bubble_rate, timeline.bubble_over_work,
        timeline.idle_share, *flights)), message_count(schedule), pending_needed(schedule)]


def cost_notes() -> Notes:
    """Say what the columns of `costs` mean."""
    return Notes("Meaning", [
        "cost: the longest time of a rank from its own first begin to its own last end; bubble: "
        "the cost less the mean work of a rank; bubble / cost is the rate of the zero-bubble "
        "paper, bubble / work that of Narayanan et al., the idle share of all ranks from the "
        "first begin to the last end that of GPipe",
        "in flight: the most micro-batches of any rank, from F to the end of B or W, in "
        "activations of all its layers",
        "sends pending: how many messages a rank must be able to leave unreceived to another "
        "rank; 0 says that synchronous sends do",
        "all exact, by these times; a message keeps neither rank busy"])


def chains(timelines: Mapping[str, Timeline]) -> Notes:
    """Name for each schedule its critical path: the actions that its last end waits for."""
    lines = []
    for name, timeline in timelines.items():
        path = timeline.critical_path()
        ranks = [rank for rank, _ in path]
        hops = sum(rank != following for rank, following in itertools.pairwise(ranks))
        lines.append(f"{name}: {len(path)} actions and {hops} messages, from rank {ranks[0]} to "
                     f"rank {ranks[-1]}")
    return Notes("Critical path", lines)
