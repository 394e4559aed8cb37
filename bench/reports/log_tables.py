"""Make tables of fits to logs; describe formats of files by the docstrings of their classes."""

import inspect
import itertools
import re
from typing import Sequence

import msgspec
import numpy as np

from bench.document import Column, Notes, Part, Table, make_table
from bench.prediction.calibration.fit import ProductFit
from bench.prediction.logs.fitting import LinkFit, Logs
from bench.prediction.machine_model import Achieved, Level, Machine
from bench.text_files import inner_format, read_supplied

FORMATS = {"node": Level, "network": Level, "achieved": Achieved}


def log_parts(logs: Logs, links: Sequence[LinkFit], rates: dict[str, ProductFit],
              missing: Sequence[str]) -> list[Part]:
    """Make the document: fits with their residuals, lines that were not used, and what lacks."""
    parts: list[Part] = []
    if links:
        parts += [_links(links), _series(logs, links)]
    if rates:
        parts.append(_products(rates))

    wanted = [f"{name}: {_meaning(name)}" for name in missing]
    return [*parts, *[Notes("Lines that were not used:", logs.problems)] * bool(logs.problems),
            *[Notes("Missing for a full machine file (--machine NAME takes it from there):",
                    wanted)] * bool(wanted)]


def _meaning(name: str) -> str:
    """Return what a field of a machine file is, by the docstring of its class."""
    head, *parts = name.split(".")
    lines = describe_fields(FORMATS[head] if parts else Machine)
    start = next(number for number, line in enumerate(lines, 1)
                 if (parts or [head])[0] in line.strip().partition(" : ")[0].split(", "))
    return " ".join(line.strip() for line in itertools.takewhile(
        lambda line: line.startswith(" " * 6), lines[start:]))


def _links(links: Sequence[LinkFit]) -> Table:
    rows = [(one, np.abs(one.fitted_errors)) for one in links]
    return make_table("Links, fitted", [
        Column("link", of=lambda row: row[0].link),
        Column("latency", "us", of=lambda row: float("nan") if row[0].latency is None else
               1e6 * row[0].latency),
        Column("rate", "GB/s", of=lambda row: float("nan") if row[0].rate is None else
               row[0].rate / 1e9),
        Column("sizes", of=lambda row: len(row[1])),
        Column("median", "%", "error", of=lambda row: 100 * np.median(row[1]), form=".1f"),
        Column("at most", "%", "error", of=lambda row: 100 * row[1].max(), form=".1f")], rows)


def _series(logs: Logs, links: Sequence[LinkFit]) -> Table:
    errors = {place: one for link in links for place, one in link.errors.items()}
    fitted = {id(one) for link in links for one in link.fitted}
    rows = [(one, errors[place]) for place, one in enumerate(logs.series)]
    return make_table("What was read, and how far the fits are off: fitted less measured", [
        Column("file", of=lambda row: row[0].file),
        Column("program", align="<", of=lambda row: row[0].program),
        Column("of", align="<", of=lambda row: row[0].kind),
        Column("ranks", of=lambda row: row[0].ranks),
        Column("link", align="<", of=lambda row: row[0].link),
        Column("sizes", of=lambda row: len(row[0].points)),
        Column("least", "bytes", of=lambda row: int(min(row[0].points)[0])),
        Column("largest", "bytes", of=lambda row: int(max(row[0].points)[0])),
        Column("fitted", align="<", of=lambda row: "yes" if id(row[0]) in fitted else "no"),
        Column("lowest", "%", "error", of=lambda row: 100 * row[1].min(), form="+.1f"),
        Column("median", "%", "error", of=lambda row: 100 * np.median(row[1]), form="+.1f"),
        Column("highest", "%", "error", of=lambda row: 100 * row[1].max(), form="+.1f")], rows)


def _products(rates: dict[str, ProductFit]) -> Table:
    def off(row) -> np.ndarray:
        return 100 * np.abs([*row[1].errors.values()])
    return make_table("Products, fitted", [
        Column("dtype", of=lambda row: row[0]),
        Column("shapes", of=lambda row: len(row[1].errors)),
        Column("rate", "Tflop/s", of=lambda row: row[1].rate / 1e12),
        Column("start", "us", of=lambda row: 1e6 * row[1].start),
        *(Column(name, "", "half size", of=lambda row, k=k: row[1].half[k])
          for k, name in enumerate("mnk")),
        Column("median", "%", "error", of=lambda row: np.median(off(row)), form=".1f"),
        Column("at most", "%", "error", of=lambda row: off(row).max(), form=".1f")], rates.items())


HEAD = re.compile(r"(\w+(?:, \w+)*) : (.+)")    # of a field in a docstring


def describe_format(what: str, kind: type, example: str) -> str:
    """Describe `what` a file is by the docstrings of its format, `kind`; print the `example`."""
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
