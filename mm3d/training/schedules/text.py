"""Read and write schedules as text, one line a rank.

An action is its kind, its chunk with a point where the schedule has several chunks a rank, and its
micro-batch: ``F0 F1 BW0 BW1`` or ``F0.3 B1.2 W1.2``.  A ``&`` joins an action with the one before
it: ``F0.5&BW1.3``.  In front of the actions and a colon stand the rank's stages, chunk by chunk;
they may be left out where rank r has stage r alone.  ``#`` begins a comment.
"""

import re

from mm3d.training.schedules.schedule import Action, Schedule, ScheduleError, loop

ACTION = re.compile(r"(&?)(F|BW|B|W)(?:(\d+)\.)?(\d+)")


def format_action(action: Action, chunks: int) -> str:
    """Return an action as text, in a schedule with `chunks` stages a rank; no ``&``."""
    chunk = f"{action.chunk}." if chunks > 1 else ""
    return f"{action.kind}{chunk}{action.micro}"


def format_schedule(schedule: Schedule) -> str:
    """Return a schedule as text, which `parse_schedule` reads back."""
    plain = schedule.stages == loop(schedule.ranks)
    lines = []
    for own, row in zip(schedule.stages, schedule.rows):
        text = "".join(("&" if action.joined else " ") + format_action(action, schedule.chunks)
                       for action in row)
        lines.append(text.lstrip() if plain else f"{' '.join(map(str, own))}:{text}")
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text describes.

    Parameters
    ----------
    text : str
        One line a rank; empty lines and comments do not count.

    Raises
    ------
    ScheduleError
        By the rule "text", with the rank and the number of the action, when the text cannot be
        read.  What it says is not checked; see `mm3d.training.schedules.check.check`.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise ScheduleError("text", "it has no line with actions")
    stages, rows = [], []
    for rank, line in enumerate(lines):
        before, colon, after = line.rpartition(":")
        stages.append(_stages(before, rank) if colon else (rank,))
        rows.append(_row(after, rank))
    return Schedule(tuple(stages), tuple(rows))


def _stages(text: str, rank: int) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split()))
    except ValueError:
        raise ScheduleError("text", f"{text.strip()!r}: the numbers of its stages are expected "
                                    f"before the colon", rank) from None


def _row(text: str, rank: int) -> tuple[Action, ...]:
    row = []
    for index, word in enumerate(text.replace("&", " &").split()):
        found = ACTION.fullmatch(word)
        if not found:
            raise ScheduleError("text", f"{word!r}: F, B, W or BW with a micro-batch is expected, "
                                        f"such as F3, or F1.3 for chunk 1", rank, index)
        joined, kind, chunk, micro = found.groups()
        row.append(Action(kind, int(chunk or 0), int(micro), bool(joined)))
    return tuple(row)
