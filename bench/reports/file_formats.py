"""Describe the formats of files of machines, models and rules, by the docstrings of their classes.

A format is a class whose docstring tells its fields: what is read, refused and printed by
``plan --machine help`` is that class.
"""

import inspect
import re

import msgspec

from bench.text_files import inner_format, read_supplied

HEAD = re.compile(r"(\w+(?:, \w+)*) : (.+)")    # of a field in a docstring


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
        if of := inner_format(field.type):
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
