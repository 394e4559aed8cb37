"""Keep the builders by name, and the rows that several of them have in common."""

from typing import Callable, Sequence

from mm3d.training.schedules.schedule import Action, Schedule

BUILDERS: dict[str, Callable[..., Schedule]] = {}
LARGEST = 2 ** 18    # forward steps, ranks x chunks x micro-batches: a minute and half a GB
MOST: dict[str, int] = {}    # of each builder
Unit = tuple[int, int]    # a chunk and a micro-batch


def builder(name: str, most: int = LARGEST) -> Callable[[Callable[..., Schedule]],
                                                        Callable[..., Schedule]]:
    """Return a decorator that makes a function the builder of schedules called `name`, of which
    none has more than `most` forward steps."""
    def named(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        BUILDERS[name], MOST[name] = function, most
        return function
    return named


def forwards_then_pairs(forwards: Sequence[Unit], backwards: Sequence[Unit],
                        first: int) -> tuple[Action, ...]:
    """Return a row: `first` forwards, then forward and backward in turns, then backwards."""
    row = [Action("F", *unit) for unit in forwards[:first]]
    for unit, following in zip(backwards, [*forwards[first:], *[None] * first]):
        if following is not None:
            row.append(Action("F", *following))
        row.append(Action("BW", *unit))
    return tuple(row)
