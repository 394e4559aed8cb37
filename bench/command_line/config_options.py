"""Define options from the fields of configurations, which say what they are, and read them.

A configuration is a dataclass whose fields are made by `mm3d.arrays.plain_numbers.said`, such as
`mm3d.config.Division`.
"""

import argparse
import math
from dataclasses import Field, fields, replace
from typing import Any, Callable, Iterable, Mapping

from bench.command_line import options
from bench.errors import UsageError, as_usage_error
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme


class Told(str):
    """Words that follow "default" in the help of an option that is None where it is not given."""


def told(kind: type, names: Iterable[str], **said: Any) -> dict[str, Told]:
    """Return defaults that are told alone: what is `said`, or those of the fields."""
    found = kind.__dataclass_fields__
    return {name: Told(said.get(name, _shown(found[name], found[name].default)))
            for name in names}


def capacity_factor(text: str) -> float:
    """Read a capacity factor, or "none", which is infinite."""
    try:
        return math.inf if text == "none" else options.number(above=True)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, such as 1.25, or none") from error


# Fields whose values are read from texts of their own.
TYPES: dict[str, Callable[[str], Any]] = {
    "capacity": capacity_factor, "grid": options.grid_sizes, "recompute": options.recompute_policy,
    "schedule": options.schedule,
    "scheme": lambda text: options.name_of(lambda: find_scheme(text).name)}
MESH = ("data", "context", "context_way", "shards", "zero", "stages", "schedule", "microbatches",
        "scheme", "grid", "recompute", "backend")
MEASURED_DTYPES = "float32", "float64"    # of measurements


def add_fields(parser: argparse._ActionsContainer, kind: type, names: Iterable[str],
               defaults: Mapping[str, Any] = {}, about: str = "{}", **particular: Any) -> None:
    """Add an option for each of some fields of a configuration.

    `defaults` are values of options, where they are not those of the fields, or `Told`; `about` is
    the help without the default, with the field's own as {}; `particular` are arguments of
    ``add_argument`` that are those of this verb, such as narrower choices.
    """
    for one in map(kind.__dataclass_fields__.__getitem__, names):
        how, default = one.metadata, defaults.get(one.name, one.default)
        text, shown = how.get("contrary", how["about"]), _shown(one, default)
        if "{schemes}" in text:
            from bench.cases.variants import schemes_with_option
            text = text.format(schemes=" and ".join(schemes_with_option(one.name)))
        if one.name == "schedule":
            from mm3d.training.schedules import all_builders
            text += f": {', '.join(all_builders())}"
        ending = f" (default {shown})".replace(" :", ":") * (shown != "")
        values = {"default": None if isinstance(default, Told) else default, **_values(one)}
        parser.add_argument(f"--{option_of(one).replace('_', '-')}", **{
            **values, "help": about.format(text) + ending, **particular}).field = one


def option_of(one: Field) -> str:
    """Return the name under which a command line has the option of a field; "" for no option."""
    return one.metadata.get("option", one.name).replace("-", "_")


def names_of(kind: type, names: Iterable[str]) -> list[str]:
    """Return the option names of some fields of a configuration."""
    return [option_of(kind.__dataclass_fields__[name]) for name in names]


def _shown(one: Field, default: Any) -> str:
    """Return the words of a help on the default."""
    if isinstance(one.default, bool):
        return ""
    if default == one.default:
        default = one.metadata.get("nothing", default)
    return f"{default:g}" if isinstance(default, float) else options.as_given(default)


def _values(one: Field) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that say how to read an option's values."""
    how, letter = one.metadata, one.metadata.get("letter")
    if isinstance(one.default, bool):
        return {"action": "store_true", "default": False}
    if "choices" in how:
        bare = {"nargs": "?", "const": how["bare"]} if "bare" in how else {}
        return bare | {"choices": how["choices"], "type": type(how["choices"][0]),
                       "metavar": letter}
    if one.name in TYPES:
        return {"type": TYPES[one.name], "metavar": letter or "NAME"}
    if "least" in how:
        return {"type": options.whole(how["least"], how.get("most", options.MOST_NUMBER)),
                "metavar": letter or "N"}
    if "above" in how or isinstance(one.default, float):
        most = options.MOST_SECONDS if letter == "SECONDS" else options.MOST_NUMBER
        return {"type": options.number(above=how.get("above", False), most=most),
                "metavar": letter or "X"}
    return {"metavar": letter or "NAME"}


def given(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a configuration that options of a command line say."""
    found = options.given_of(arguments, map(option_of, fields(kind)))
    return {one.name: "contrary" not in one.metadata and found[option_of(one)]
            for one in fields(kind) if option_of(one) in found}


def read(kind: Any, arguments: argparse.Namespace, **more: Any) -> Any:
    """Make a configuration from the options that a verb has, and `more` fields.

    `kind` is its type, or one whose other fields it shall have, in place of defaults.
    """
    if isinstance(kind, type):
        return kind(**given(kind, arguments) | more)
    return replace(kind, **given(type(kind), arguments) | more)


def add_inside(parser: argparse.ArgumentParser, before: str = "") -> None:
    """Add ``--inside``, the direction of a mesh that lies inside nodes."""
    parser.add_argument("--inside", metavar="AXIS", help=(
        f"{before}the direction of the mesh that varies fastest from rank to rank, and so stays "
        f"inside a node: one of the grid's, s for stages, d for replicas that divide a copy of "
        f"the model, r for those across copies (default: the last of the grid's)"))


def read_grid(text: str | None, scheme: str, ranks: int, machine: str, stack: Stack,
              trace_of: Any = None) -> tuple[int, ...] | None:
    """Read sizes such as ``16x4x1``; ``auto`` is the planner's choice, None the default grid.

    The choice is that for so many ranks of a machine, which `load_machine` reads, and `trace_of`
    is that of `bench.prediction.planner.rank_plans`.  UsageError when `text` is neither, the
    scheme has no grid of that many ranks, or there is no such machine or no rate of it for the
    dtype.
    """
    if text is None:
        return None
    if text == "auto":
        from bench.prediction import machine_model, planner
        with as_usage_error():
            known = machine_model.load_machine(machine, stack.dtype)
            return planner.best_grid(scheme, ranks, known, stack, trace_of).sizes
    try:
        return options.grid_sizes(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--grid {error}, or auto") from error
