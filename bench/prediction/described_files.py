"""Read the TOML files that describe machines, models and rules, and describe their formats.

A format is a class whose docstring tells its fields: what is read, refused and printed by
``plan --machine help`` is that class.
"""

import difflib
import inspect
import re
import tomllib
import typing
from typing import Any, Callable

import msgspec

from bench.errors import UsageError
from bench.text_files import read_supplied

KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
         "array": "a list", "object": "a table", "null": "nothing"}
HEAD = re.compile(r"(\w+(?:, \w+)*) : (.+)")    # of a field in a docstring


def read_described(what: str, name: str, kind: type, check: Callable[[Any], str] = lambda _: "",
                   ignored: tuple[str, ...] = ()) -> Any:
    """Read a supplied or a user's file.

    Parameters
    ----------
    what, name : str
        As of `bench.text_files.read_supplied`.
    kind : type of msgspec.Struct
        What the file describes.
    check : callable, optional
        Is given the tree of the file, and returns what is wrong with its values, or "".
    ignored : tuple of str
        Fields of old files.

    Raises
    ------
    UsageError
        When there is no such file, or it does not describe one: in words, with the field.
    """
    text = read_supplied(what, name)
    try:
        tree = {key: value for key, value in tomllib.loads(text).items() if key not in ignored}
        problem = _wrong_field(tree, kind) or check(tree)
        if not problem:
            return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        problem = _in_words(str(error))
    except ValueError as error:    # no TOML
        problem = str(error)
    raise UsageError(f"{what} file {name}: {problem}")


def _wrong_field(tree: dict[str, Any], kind: type, place: str = "") -> str:
    """Describe the first field that a format does not have, or lacks; "" if none."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    inside = f"{place}: " * bool(place)
    for name in tree:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1) or [", ".join(fields)]
            return f"{inside}there is no field {name!r}: {near[0]} would do"
    missing = [name for name, field in fields.items() if field.required and name not in tree]
    if missing:
        return f"{inside}missing required field{'s' * (len(missing) > 1)} {', '.join(missing)}"
    for name, value in tree.items():
        inner, key = _parts(fields[name].type), f"{place}.{name}".lstrip(".")
        tables = {key: value} if inner is fields[name].type else _items(value, key)
        for where, one in tables.items() if inner else ():
            if isinstance(one, dict) and (problem := _wrong_field(one, inner, where)):
                return problem
    return ""


def _parts(annotation: Any) -> type | None:
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
    found = re.fullmatch(r"Expected `(\w+)`, got `(\w+)`(?: - at `\$\.?(.*)`)?", error)
    if not found:
        return error
    wanted, given = (KINDS.get(found[number], found[number]) for number in (1, 2))
    return f"{found[3]}: {wanted} would do, not {given}"


def describe_format(what: str, kind: type, example: str) -> str:
    """Describe the fields of a file, and print a file that has them.

    Parameters
    ----------
    what : str
        What the file describes, such as "machine".
    kind : type of msgspec.Struct
        The format; its docstring, and those of its parts, tell the fields.
    example : str
        The name of a supplied file.
    """
    parts = [f"A {what} file is TOML, given by name as a supplied one or by its path. Its fields:",
             *describe_fields(kind)]
    inner: dict[type, list[str]] = {}
    for field in msgspec.structs.fields(kind):
        if of := _parts(field.type):
            inner.setdefault(of, []).append("each table of " * (of is not field.type) + field.name)
    for of, names in inner.items():
        parts += ["", f"Fields of {' and '.join(names)}:", *describe_fields(of)]
    return "\n".join([*parts, "", f"The supplied {what} {example}:", "",
                      read_supplied(what, example).rstrip()])


def describe_fields(kind: type) -> list[str]:
    """Return the lines of a docstring that tell the fields of a format, with their defaults."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    lines = (inspect.getdoc(kind) or "").partition("----------\n")[2].splitlines()
    found = []
    for line in lines:
        head = HEAD.fullmatch(line)
        if head:
            own = [fields[name] for name in head[1].split(", ")]
            line += "" if own[0].required else "; optional"
        found.append(f"  {line}".rstrip())
    return found
