"""Read the text files that users write."""

import re
import tomllib
import typing
from importlib import resources
from pathlib import Path
from typing import Any, Callable

import msgspec

from bench.errors import UsageError, require_known
from mm3d.names import unknown_name

KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
         "array": "a list", "object": "a table", "null": "nothing"}


def read_text(path: Any, what: str, remedy: str) -> str:
    """Return the text of a file, read as UTF-8 in every locale, without a byte order mark.

    UsageError when there is no such file, it cannot be read, or has another encoding; `what` is
    the option and its value, and `remedy` the kind of file that would do, for the message.
    """
    try:
        return (Path(path) if isinstance(path, str) else path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = "there is no such file" if isinstance(error, FileNotFoundError) else (
            f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        problem = f"is no text in UTF-8, as its byte {error.start} shows"
    raise UsageError(f"{what}: {problem}; {remedy} would do")


def read_supplied(what: str, name: str) -> str:
    """Return the text of a file of `bench.prediction`, such as that of a machine.

    `what` is what it describes, such as "machine", whose plural is the folder; `name` that of a
    supplied file, or the path of a TOML file.  UsageError when there is no such file.
    """
    folder = resources.files("bench.prediction").joinpath(f"{what}s")
    supplied = {Path(file.name).stem: file for file in sorted(folder.iterdir(), key=str)
                if file.name.endswith(".toml")}
    file: Any = (Path(name) if name.endswith(".toml") else
                 require_known(supplied, name, what, "name a .toml file"))
    return read_text(file, f"{what} file {name}",
                     f"a .toml file, or one of {', '.join(supplied)},")


def read_described(what: str, name: str, kind: type, make: Callable[[Any], Any],
                   check: Callable[[Any], str] = lambda tree: "",
                   ignored: tuple[str, ...] = ()) -> Any:
    """Read what a supplied or a user's TOML file describes; see `read_supplied`.

    The fields of `kind`, a msgspec.Struct, are those of the file, but for those `ignored`, of old
    files.  `check` is given the tree of the file, and returns what is wrong with its values, or
    ""; `make` makes the result of it.

    UsageError when there is no such file, or it does not describe one: in words, with the field.
    """
    text = read_supplied(what, name)
    try:
        return decode(text, kind, make, check, ignored)
    except ValueError as error:
        raise UsageError(f"{what} file {name}: {error}" + (
            f"; python -m bench plan --{what} help describes all" if what in ("machine", "model")
            and "missing required" in str(error) else "")) from error


def read_toml(text: str) -> dict[str, Any]:
    """Return the tree of a text in TOML; ValueError when it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("too many lists or tables in each other") from error


def decode(text: str, kind: type, make: Callable[[Any], Any] | None = None,
           check: Callable[[Any], str] = lambda tree: "", ignored: tuple[str, ...] = ()) -> Any:
    """Decode TOML, as `read_described` does; ValueError names a wrong field, or line, in words."""
    tree = {key: value for key, value in read_toml(text).items() if key not in ignored}
    if problem := _wrong_field(tree, kind) or check(tree):
        raise ValueError(problem)
    try:
        return make(tree) if make else msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error))) from error


def _wrong_field(tree: dict[str, Any], kind: type, place: str = "") -> str:
    """Describe the first field that is unknown, missing, or none of its choices; "" if none."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    inside = f"{place}: " * bool(place)
    for name in tree:
        if name not in fields:
            return unknown_name(f"{inside}field {name!r}", name, fields)
    missing = [name for name, field in fields.items() if field.required and name not in tree]
    if missing:
        return f"{inside}missing required field{'s' * (len(missing) > 1)} {', '.join(missing)}"
    for name, value in tree.items():
        declared, key = fields[name].type, f"{place}.{name}".lstrip(".")
        choices, inner = typing.get_args(declared), inner_format(declared)
        if typing.get_origin(declared) is typing.Literal and value not in choices:
            return unknown_name(f"{key}: {value!r}", value, choices)
        tables = {key: value} if inner is declared else _items(value, key)
        for where, one in tables.items() if inner else ():
            if isinstance(one, dict) and (problem := _wrong_field(one, inner, where)):
                return problem
    return ""


def inner_format(annotation: Any) -> type | None:
    """Return the format of a field, or of the items of a list or table; None for plain values."""
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def _items(value: Any, place: str) -> dict[str, Any]:
    """Return the items of a list or table by their places; {} for a plain value."""
    if isinstance(value, list):
        return {f"{place}[{number}]": one for number, one in enumerate(value)}
    return {f"{place}.{name}": one for name, one in value.items()} if isinstance(
        value, dict) else {}


def _in_words(error: str) -> str:
    """Return an error of msgspec in words, the field first."""
    place = re.search(r" - at `\$\.?(.*)`$", error)
    found = re.fullmatch(r"Expected `(\w+)`, got `(\w+)`(?: - at `\$\.?(.*)`)?", error)
    if not found:
        said = (error[:place.start()] if place else error).replace("`", "")
        return f"{place[1]}: {said}" if place else said
    wanted, given = (KINDS.get(found[number], found[number]) for number in (1, 2))
    return f"{found[3]}: {wanted} would do, not {given}"
