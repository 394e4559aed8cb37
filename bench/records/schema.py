"""Check a record against what its kind has: names, kinds and ranges of settings, shapes, labels.

A record that passes can be shown: readers of records find what they look for.  Whether its numbers
are right is for `bench.validation` to say.
"""

import functools
import math
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, Callable, Container, Mapping, Sequence

import numpy as np

from bench.records import kinds
from mm3d.model.recomputation import parse_policy

MOST = 10 ** 12    # of whole numbers: counts made from sizes stay exact in a float
MOST_LAYERS = 10 ** 4    # readers look at each layer alone
UNKNOWN = "unknown"    # the commit where git cannot tell it
INFINITE = re.compile(r"(\w+_)?loss|\w*difference")    # may be infinite: losses that diverged


def _whole(least: int, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def printable(value: Any) -> Any:
    """Return a text with escapes for signs that nothing prints; any other value as it is."""
    return value if not isinstance(value, str) else "".join(
        one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in value)


def _is_policy(value: str) -> bool:
    try:
        return parse_policy(value).group_size <= MOST
    except ValueError:
        return False


# Types of settings, named as the lists in settings.toml: a description, and a test of a value.
SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": (f"a whole number of 1 to {MOST:.0e}", functools.partial(_whole, 1)),
    "whole": (f"a whole number of 0 to {MOST:.0e}", functools.partial(_whole, 0)),
    "number": ("a number of at least 0", _number),
    "rate": ("a finite number greater than 0",
             lambda value: _number(value) and 0 < value < math.inf),
    "panels": (f"a whole number of 0 to {MOST:.0e}, true or false",    # the last of older files
               lambda value: isinstance(value, bool) or _whole(0, value)),
    "policy": ("none, selective, full, uniform:N, or one of the last two with +selective",
               lambda value: isinstance(value, str) and _is_policy(value)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str) and printable(value) == value)}


@functools.cache
def load_schema() -> dict[str, Any]:
    """Read the settings and groups that all kinds have in common."""
    return tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))


def of_kind(name: str) -> dict[str, Any]:
    """Return the schema of a kind, or of KIND.GROUP; empty if it is unknown."""
    own = kinds.schemas_of(name.partition(".")[0]).get(name)
    return own or load_schema()["groups"].get(name, {})


@functools.cache
def _setting_kinds() -> dict[str, str]:
    return {name: kind for kind, names in load_schema()["settings"].items()
            for name in names.split()}


def check_settings(group: str, settings: Mapping[str, Any], required: Sequence[str]) -> None:
    """Check the settings of a group; ValueError names one that is missing, or not of its kind."""
    for name in required:
        if name not in settings:
            raise ValueError(f"{group}/{name} is missing")
    for name, value in settings.items():
        about, fits = SETTINGS.get(_setting_kinds().get(name, ""), ("", lambda value: True))
        choices = load_schema()["choices"].get(name, "").split()
        if choices:
            about, fits = " or ".join(choices), choices.__contains__
        if not fits(value):
            raise ValueError(f"{group}/{name} is {value!r:.60}, which should be {about}")
    if settings.get("layers", 1) > MOST_LAYERS:
        raise ValueError(f"{group}/layers is {settings['layers']}: at most {MOST_LAYERS} would do")


def main_group(kind: str) -> str:
    """Return the group that holds the samples of this kind."""
    return of_kind(kind).get("group", "measurements")


def further_groups(kind: str, found: Container[str]) -> list[str]:
    """List the further groups of this kind: those in `found`, and all that are required."""
    names = {name.partition(".")[2]: about for name, about in kinds.schemas_of(kind).items()
             if name.startswith(f"{kind}.")}
    return [name for name, about in names.items() if name in found or about.get("required")]


def required(kind: str, group: str) -> list[str]:
    """Return the "settings" or "environment" values, by `group`, that readers of a kind need."""
    return of_kind(kind).get(group, "").split()


def dimensions(kind: str) -> dict[str, str]:
    """Return the dimensions of the variables that files of a kind have, or may have, by name."""
    known = of_kind(kind)
    return {**load_schema()["common"]["optional"], **known.get("variables", {}),
            **known.get("optional", {})}


def labels(kind: str) -> dict[str, list[list[str]]]:
    """Return the labels that dimensions may have, by name."""
    return {**load_schema()["labels"], **of_kind(kind).get("labels", {})}


def derived(kind: str) -> dict[str, str]:
    """Return the dimensions of the variables that follow from others, by name."""
    return of_kind(kind).get("derived", {})


def check_needs(kind: str, found: Mapping[str, Any]) -> None:
    """Check that a record has what its variables and settings, all in `found`, require."""
    for name, needed in {**load_schema()["common"]["needs"],
                         **of_kind(kind).get("needs", {})}.items():
        value = found.get(name)
        if value is None or isinstance(value, str) and value in ("", "none"):
            continue
        for other in needed.split():
            if other not in found:
                raise ValueError(f"{other} is missing, which belongs to {name}")


def check_group(kind: str, scales: Mapping[str, Sequence], variables: Mapping[str, Any]) -> None:
    """Check dimensions, labels and numbers of a group; ValueError names what is wrong."""
    known, common = of_kind(kind), load_schema()["common"]
    for name in known.get("variables", {}):
        if name not in variables:
            raise ValueError(f"{name} is missing")
    for name, dims in {**dimensions(kind), **derived(kind)}.items():
        if name in variables and " ".join(variables[name].dims) != dims:
            raise ValueError(f"{name} has the dimensions "
                             f"{' '.join(variables[name].dims) or 'none'}, which should be "
                             f"{dims or 'none'}")
    for dim, choices in labels(kind).items():
        if dim in scales and list(scales[dim]) not in choices:
            raise ValueError(f"{dim} has the labels {', '.join(map(str, scales[dim]))[:80]}, "
                             f"which should be {' or '.join(map(', '.join, choices))}")
    positive = f"{common['positive']} {known.get('positive', '')}".split()
    signed = known.get("signed", "").split()
    may_be_empty = known.get("empty", "").split()    # of a run that was stopped before its first
    for name, variable in variables.items():
        shape = tuple(len(scales[dim]) for dim in variable.dims)
        if np.shape(variable.values) != shape:
            raise ValueError(f"{name} has the shape {np.shape(variable.values)}, which should be "
                             f"{shape}")
        if 0 in (shape[n] for n, dim in enumerate(variable.dims) if dim not in may_be_empty):
            raise ValueError(f"{name} is empty")
        if np.asarray(variable.values).dtype.kind not in "biuf":
            raise ValueError(f"{name} holds no numbers, but {np.asarray(variable.values).dtype}")
        if name not in signed and (variable.values < 0).any():
            raise ValueError(f"{name} has numbers below 0")
        if not INFINITE.fullmatch(name) and np.isinf(variable.values).any():
            raise ValueError(f"{name} has infinite numbers")
        if name in positive:
            # A bound's last number is its confidence, 0 where there are too few repetitions.
            numbers = variable.values[..., :-1] if variable.dims[-1:] == ("bound",) else (
                variable.values)
            if (numbers <= 0).any():
                raise ValueError(f"{name} has numbers that are not greater than 0")
        if name in known.get("complete", "").split() and np.isnan(variable.values).any():
            raise ValueError(f"{name} has no number for some")
        if name in known.get("whole", "").split() and variable.values.dtype.kind not in "iu":
            raise ValueError(f"{name} holds {variable.values.dtype}, and no whole numbers")
        if name in known.get("spent", "").split() and not (variable.values.sum(axis=-1) > 0).all():
            raise ValueError(f"{name} has some whose parts take no time")


def describe_files() -> str:
    """Describe files of every kind: settings, and variables by dimensions."""
    common = load_schema()
    lines = ["Settings, and what each is in files of every kind"]
    lines += [f"  {about}: {' '.join(common['settings'][name].split())}"
              for name, (about, _) in SETTINGS.items()]
    lines += [f"  {name}: {' or '.join(choices.split())}"
              for name, choices in common["choices"].items()]
    every = {"common": common["common"], **common["groups"]}
    for kind in sorted(kinds.KIND_NAMES):
        every |= kinds.schemas_of(kind)
    for name, known in every.items():
        kind, _, group = name.partition(".")
        lines += ["", {"common": "Any kind may have", "verification": "Verified kinds have"}.get(
            kind, f"Kind {kind}" + f", group {group}" * bool(group))]
        group = group or ("verification" if kind == "verification" else main_group(kind))
        lines += [f"  /{place}: {' '.join(known[key].split())}" for key, place in (
            ("settings", "configuration"), ("environment", "environment")) if key in known]
        for key, about in (("variables", ""), ("optional", ", not in all"),
                           ("derived", ", computed when a file is read")):
            lines += [f"  /{group}/{variable} ({', '.join(dims.split())}){about}"
                      for variable, dims in known.get(key, {}).items()]
    return "\n".join(textwrap.fill(line, 99, subsequent_indent=4 * " ") for line in lines)
