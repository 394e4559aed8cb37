"""Find a name among known names, without regard to case, hyphens and underscores."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any


def plain(name: str) -> str:
    """Return `name` without case, hyphens and underscores: ``zbh1`` for ``ZB_H1``."""
    return name.casefold().replace("-", "").replace("_", "").strip()


def find_name(name: str, known: Iterable[str], what: str) -> str:
    """Return the one of the `known` names that `name` stands for.

    Raises ValueError when it is none of them; the line says what is named, such as ``scheme``, and
    has all names, and the most similar one.
    """
    known = list(known)
    found = name if name in known else {plain(one): one for one in known}.get(plain(str(name)))
    if found is None:
        raise ValueError(unknown_name(f"{what} {name!r}", name, known))
    return found


def check_name(field: str, value: Any, known: Collection) -> None:
    """Raise ValueError unless the value of a field is one of the known names."""
    if value not in known:
        raise ValueError(unknown_name(f"{field}={value!r}", value, known))


def unknown_name(said: str, name: Any, known: Iterable, also: Iterable[str] = ()) -> str:
    """Return the line that refuses `name`, as `said`; it may suggest one of `also`."""
    choices = [*map(str, known)]
    return (f"{said} is unknown: choose one of {', '.join(choices)}"
            f"{suggestion(str(name), [*choices, *also])}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` for the known name most similar to `name`; "" for none.

    Where none is similar, a known name that contains `name` is suggested.
    """
    ordered, given = {plain(one): one for one in known}, plain(name[:100])
    if len(given) < 5:    # with two of few letters wrong, and not exchanged, it is another word
        ordered = {one: ordered[one] for one in ordered if len(one) != len(given) or sum(
            map(str.__ne__, one, given)) < 2 or sorted(one) == sorted(given)}
    similar = (difflib.get_close_matches(given, ordered, 1, 0.75)
               or [one for one in ordered if len(given) > 2 and given in one]
               or difflib.get_close_matches(given, ordered, 1, 0.6))
    return f"; did you mean {ordered[similar[0]]}?" if similar else ""
