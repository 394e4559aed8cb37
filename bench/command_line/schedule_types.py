"""Read the names of pipeline schedules from options."""

from bench.command_line.options import name_of
from mm3d.training.schedules.builders import full_name


def schedule(text: str) -> str:
    """Return the name of the schedule that `text` stands for, such as ``interleaved:3``."""
    return name_of(lambda: full_name(text))


def schedules(text: str) -> list[str]:
    """Return the names of schedules with commas between."""
    return [*map(schedule, text.split(","))]
