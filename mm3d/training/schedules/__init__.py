"""Represent pipeline schedules as data: build, read, write, check and time them.

A `schedule.Schedule` lists the actions of each rank.  Sends and receives follow from it
(`messages`), and so do times and activations in flight (`time_actions`).  Nothing here computes
on arrays or communicates; the standard library is all that it needs.
"""

from mm3d.training.schedules.builders import all_builders, build
from mm3d.training.schedules.messages import check
from mm3d.training.schedules.clock import Times, time_actions
from mm3d.training.schedules.schedule import (Action, Schedule, ScheduleError, format_schedule,
                                              parse_schedule)

__all__ = ["Action", "Schedule", "ScheduleError", "Times", "build", "check", "time_actions",
           "format_schedule", "parse_schedule", "all_builders"]
