"""Define actions and schedules, and the results that each action needs; read and write them.

In a text, of one line a rank, an action is its kind, its chunk with a point where the schedule has
several chunks a rank, and its micro-batch: ``F0 F1 BW0 BW1`` or ``F0.3 B1.2 W1.2``.  A ``&`` joins
an action with the one before it: ``F0.5&BW1.3``.  In front of the actions and a colon stand the
rank's stages, chunk by chunk; they may be left out where rank r has stage r alone.  ``#`` begins a
comment.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, NamedTuple

# The steps of a micro-batch in a stage that an action of each kind takes.
STEPS = {"F": ("F",), "B": ("B",), "W": ("W",), "BW": ("B", "W")}


class ScheduleError(ValueError):
    """Report a schedule that breaks a rule.

    Attributes
    ----------
    rule : str
        The name of the rule; see `mm3d.training.schedules.messages.check`.
    rank, index : int or None
        The rank, and the number of the action in its row, counted from 0; None where the rule
        does not concern one rank or action.
    """

    def __init__(self, rule: str, problem: str, rank: int | None = None,
                 index: int | None = None) -> None:
        self.rule, self.rank, self.index = rule, rank, index
        place = [f"rank {rank}"] * (rank is not None) + [f"action {index}"] * (index is not None)
        super().__init__(f"rule {rule!r} of a schedule: {', '.join([*place, problem])}")


class Action(NamedTuple):
    """Describe one entry in the row of a rank."""

    # {"F", "B", "W", "BW"}: forward; backward to the input; backward to the weights; both backward
    # parts at once.
    kind: str
    chunk: int    # which of the rank's stages, counted from 0
    micro: int    # the micro-batch
    # Whether it runs together with the action before it: both begin when the inputs of both have
    # arrived, take the sum of their times, and release their results at the end.
    joined: bool = False


class Completion(NamedTuple):
    """Name the completion of step "F", "B" or "W" of a micro-batch in a stage."""

    step: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.step} of micro-batch {self.micro} in stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """Hold the rows of actions of a pipeline, and which rank has which stage."""

    # ``stages[rank][chunk]`` is the number of a stage, from 0 at the input.
    stages: tuple[tuple[int, ...], ...]
    # The actions of each rank in the order in which it takes them.
    rows: tuple[tuple[Action, ...], ...]

    def __repr__(self) -> str:
        return f"Schedule(stages={self.stages}, microbatches={self.microbatches})"

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.rows)

    @property
    def chunks(self) -> int:
        """Return the largest number of stages that a rank has."""
        return max(map(len, self.stages))

    @cached_property
    def stage_count(self) -> int:
        """Return the number of stages of the pipeline."""
        return sum(map(len, self.stages))

    @cached_property
    def microbatches(self) -> int:
        """Return the number of micro-batches."""
        return 1 + max((action.micro for row in self.rows for action in row), default=-1)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Return the rank that has each stage."""
        return {stage: rank for rank, own in enumerate(self.stages) for stage in own}

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage that is chunk `chunk` of `rank`."""
        return self.stages[rank][chunk]

    def groups(self, rank: int) -> list[tuple[Action, ...]]:
        """Return the row of `rank` with joined actions in one tuple."""
        found: list[tuple[Action, ...]] = []
        for action in self.rows[rank]:
            if action.joined and found:
                found[-1] += (action,)
            else:
                found.append((action,))
        return found

    def inputs(self, rank: int, action: Action) -> list[Completion]:
        """Return the events that must have happened before an action of `rank`."""
        stage, micro = self.stages[rank][action.chunk], action.micro
        if action.kind == "F":
            return [Completion("F", stage - 1, micro)] if stage else []
        if action.kind == "W":
            return [Completion("B", stage, micro)]
        last = stage == self.stage_count - 1
        return [Completion("F", stage, micro),
                *([] if last else [Completion("B", stage + 1, micro)])]

    def outputs(self, rank: int, action: Action) -> list[Completion]:
        """Return the events that an action of `rank` completes."""
        stage = self.stages[rank][action.chunk]
        return [Completion(step, stage, action.micro) for step in STEPS[action.kind]]


def loop(ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Place stage ``chunk * ranks + rank`` on each rank, so that the last is followed by 0."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def vee(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Place two stages on each rank, down and up again, so that rank 0 has the first and last."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


MOST_STEPS = 2 ** 18    # forward steps, ranks x chunks x micro-batches: a minute and half a GB
# By name: the function, the most forward steps, and the chunks a rank without a choice.
BUILDERS: dict[str, tuple[Callable[..., Schedule], int, int]] = {}


def builder(name: str, most: int = MOST_STEPS, chunks: int = 1) -> Callable[
        [Callable[..., Schedule]], Callable[..., Schedule]]:
    """Decorate a builder of schedules called `name`.

    They have at most `most` forward steps, and `chunks` a rank; a builder with a choice has a
    parameter `chunks` instead, with a default.
    """
    def named(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        BUILDERS[name] = function, most, chunks
        return function
    return named


_ACTION = re.compile(r"(&?)(F|BW|B|W)(?:(\d+)\.)?(\d+)")


def format_schedule(schedule: Schedule) -> str:
    """Return a schedule as text, which `parse_schedule` reads back."""
    plain = schedule.stages == loop(schedule.ranks)
    lines = []
    for own, row in zip(schedule.stages, schedule.rows):
        text = "".join(("&" if action.joined else " ") + action.kind
                       + f"{action.chunk}." * (schedule.chunks > 1) + str(action.micro)
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
        read.  What it says is not checked; see `mm3d.training.schedules.messages.check`.
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
        found = _ACTION.fullmatch(word)
        if not found:
            raise ScheduleError("text", f"{word!r}: F, B, W or BW with a micro-batch is expected, "
                                        f"such as F3, or F1.3 for chunk 1", rank, index)
        joined, kind, chunk, micro = found.groups()
        row.append(Action(kind, int(chunk or 0), int(micro), bool(joined)))
    return tuple(row)
