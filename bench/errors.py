"""Errors that the benchmark reports to its user, and their exit status."""

import re
from contextlib import contextmanager
from typing import Any, Callable, Container, Iterator

WORD, MESSAGE = 300, 1000    # letters
# Arguments of the library whose options have other names.
OPTIONS = {"count": "experts", "warmup": "lr_warmup", "shared": "shared_expert"}
ARGUMENT = re.compile(r"(?<![\w.-])([a-z_]+)=(\([^()]*\)|'[^']*'|[^\s,;:()]+)")


def status_of(work: Callable[[], int], *known: type[Exception]) -> int:
    """Call `work`, return its exit status; 2 after printing why it cannot be done, 130 on Ctrl-C.

    Reported are UsageError, StoreError, OSError, MemoryError and the types `known`.  All others
    are errors of the program and are not caught.
    """
    try:
        return work()
    except (UsageError, StoreError, OSError, MemoryError, *known) as error:
        from mm3d.console import complain    # here: other programs import neither NumPy nor MPI
        named = isinstance(error, OSError) and error.filename and error.strerror
        what = too_large(error) if isinstance(error, MemoryError) else error
        if isinstance(error, UsageError):
            what = in_short(str(what))
        complain(f"error: {f'{error.filename}: {error.strerror}' if named else what}")
        return 2
    except KeyboardInterrupt:
        from mm3d.console import complain
        complain("interrupted")
        return 130


def in_short(message: str) -> str:
    """Cut long words of a message, such as values, short, and the middle of a long message."""
    message = re.sub(rf"\S{{{WORD},}}", lambda word: f"{word[0][:WORD // 2]}...", message)
    if len(message) > MESSAGE:    # the choices are at the end
        message = f"{message[:MESSAGE // 2]} ... {message[-MESSAGE // 2:]}"
    return message


def too_large(error: MemoryError) -> str:
    """Return the message for sizes that exceed the memory."""
    return f"too little memory: {error or 'an array is too large'}; smaller sizes would do"


class UsageError(ValueError):
    """An invalid argument; raised on every rank alike, before any communication."""


@contextmanager
def as_usage_error(known: type[Exception] = ValueError) -> Iterator[None]:
    """Return a context in which an error of the `known` type becomes a UsageError."""
    try:
        yield
    except known as error:
        raise UsageError(str(error)) from error


def in_options(text: str, names: Container[str]) -> str:
    """Return a message that names arguments of the library with options in their place.

    ``grid=(2, 1, 1)`` becomes ``--grid 2x1x1`` if ``grid`` is among the `names` of the verb's
    arguments; all other text stays.
    """
    def option(found: re.Match[str]) -> str:
        names_of_it = (f"expert_{found[1]}", found[1], OPTIONS.get(found[1]))
        name = next((one for one in names_of_it if one in names), None)
        if name is None:
            return found[0]
        if found[2] in ("True", "False"):    # an option without a value
            return f"{'no ' * (found[2] == 'False')}--{name.replace('_', '-')}"
        value = "none" if found[2] == "None" else found[2].strip("'")
        if value.startswith("("):
            value = "x".join(part.strip() for part in value.strip("()").split(",") if part.strip())
        return f"--{name.replace('_', '-')} {value}"
    return ARGUMENT.sub(option, text)


def require_known(known: dict, name: str, what: str, *also: str) -> Any:
    """Return the value of `name`, in any case, with or without hyphens, in `known`.

    UsageError when it is unknown: it lists the choices, and `also` further ones.  `what` is the
    option, or the kind of thing that is named.
    """
    from mm3d.names import find_name    # here: other programs import neither NumPy nor MPI
    try:
        return known[find_name(name, known, what)]
    except ValueError as error:
        raise UsageError("; or ".join([str(error), *also])) from error


class WrongResult(Exception):
    """A wrong result, whose times are not reported; the message names it."""


class Failed(Exception):
    """A row that could not be measured; raised on every rank alike."""


class LeftOut(Failed):
    """A row that was not begun, since its nodes lack memory; raised on every rank alike."""


class StoreError(Exception):
    """A folder that cannot be written, or a file that is not a run; the message names it."""


class Unreadable(StoreError):
    """A file that exists but cannot be read, so that its contents may be good or bad."""
