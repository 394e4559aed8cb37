"""Keep the builders of schedules by name."""

from typing import Callable

from mm3d.training.schedules.schedule import Schedule

BUILDERS: dict[str, Callable[..., Schedule]] = {}
LARGEST = 2 ** 18    # forward steps, ranks x chunks x micro-batches: a minute and half a GB
MOST: dict[str, int] = {}    # of each builder


def builder(name: str, most: int = LARGEST) -> Callable[[Callable[..., Schedule]],
                                                        Callable[..., Schedule]]:
    """Decorate a builder of schedules called `name`, which have at most `most` forward steps."""
    def named(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        BUILDERS[name], MOST[name] = function, most
        return function
    return named
