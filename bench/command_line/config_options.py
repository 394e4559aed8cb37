"""Define options from the fields of `mm3d.config`, which say what they are, and read them."""

import argparse
from dataclasses import Field, fields
from typing import Any, Callable, Iterable, Mapping

from bench.command_line import options, schedule_types, scheme_options
from bench.command_line.number_types import number, whole
from mm3d.config import Division
from mm3d.training.schedules import registry

MESH = ("data", "context", "context_way", "shards", "zero", "stages", "schedule", "microbatches",
        "scheme", "grid", "recompute", "backend")
# Types of options read from text, and texts that a help adds.
TYPES: dict[str, Callable[[str], Any]] = {
    "grid": options.grid_sizes, "recompute": options.recompute,
    "schedule": schedule_types.schedule,
    "scheme": scheme_options.scheme}
MORE = {"recompute": options.RECOMPUTE.partition(": ")[2], "schedule": ", ".join(registry())}
LETTERS = {"stages": "P", "microbatches": "M", "grid": "XxYxZ", "recompute": "POLICY"}


def add_fields(parser: argparse.ArgumentParser, kind: type, names: Iterable[str],
               defaults: Mapping[str, Any] = {}, said: Callable[[str], str] | None = None,
               before: str = "", renamed: Mapping[str, str] = {}) -> None:
    """Add an option for each of some fields.

    Parameters
    ----------
    kind : type
        The dataclass, one of `mm3d.config` or derived from one.
    defaults : mapping
        Default values of options, where they are not those of the fields.
    said : callable, optional
        Returns, for a name, the text of the help on its default.
    before : str
        The beginning of each help, such as when the options have an effect.
    renamed : mapping
        Names of options that are not those of their fields.
    """
    found = {one.name: one for one in fields(kind)}
    for one in map(found.__getitem__, names):
        default = defaults.get(one.name, one.default)
        nothing = one.metadata.get("nothing", default)
        ending = said(one.name) if said else f"default {nothing}"
        about = ": ".join(filter(None, [one.metadata["about"], MORE.get(one.name)]))
        option = renamed.get(one.name, one.name).replace("_", "-")
        parser.add_argument(f"--{option}", default=default, help=f"{before}{about} ({ending})",
                            **_values(one))


def _values(one: Field) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that say how to read an option's values."""
    if "choices" in one.metadata:
        choices = one.metadata["choices"]
        return {"choices": choices, "type": type(choices[0])}
    letter = {"metavar": LETTERS.get(one.name, "NAME")}
    if one.name in TYPES:
        return letter | {"type": TYPES[one.name]}
    if "least" in one.metadata:
        return {"type": whole(one.metadata["least"]), "metavar": LETTERS.get(one.name, "N")}
    return {"type": number(), "metavar": "X"} if isinstance(one.default, float) else letter


def read(kind: type, arguments: argparse.Namespace, **more: Any) -> Any:
    """Make a dataclass from the options that a verb has, and defaults for other fields."""
    return kind(**{one.name: getattr(arguments, one.name) for one in fields(kind)
                   if hasattr(arguments, one.name)} | more)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options that say on which mesh a GPT is trained, and how ranks divide it."""
    add_fields(parser, Division, MESH)


def add_inside(parser: argparse.ArgumentParser, before: str = "") -> None:
    """Add ``--inside``, the direction of a mesh that lies inside nodes."""
    parser.add_argument("--inside", metavar="AXIS", help=(
        f"{before}the direction of the mesh that varies fastest from rank to rank, and so stays "
        f"inside a node: one of the grid's, s for stages, d for replicas that divide a copy of "
        f"the model, r for those across copies (default: the last of the grid's)"))
