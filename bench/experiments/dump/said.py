"""Read what a program says of its step, in ``dump.json``, and check each value."""

import json
from math import inf
from pathlib import Path
from typing import Any, Callable

from bench.errors import UsageError
from mm3d.arrays.plain_numbers import is_number

COMPUTED = ("float64", "float32", "float16", "bfloat16")
ALONG = {"data", "tensor", "sequence", "stages"}    # what ranks divide
ValueCheck = tuple[Callable[[Any], bool], str]


def _number(least: float, most: float, wanted: str, *, above: bool = False) -> ValueCheck:
    """Return a check of a number of `least` to below `most`, or above `least`."""
    def good(value: Any) -> bool:
        return is_number(value) and (
            least < value < most if above else least <= value < most)
    return good, wanted


def _texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


AT_LEAST_0, SHARE = _number(0, inf, "a number of at least 0"), _number(
    0, 1, "a number of at least 0 and below 1")
ABOUT: dict[str, ValueCheck] = {
    "dtype": (lambda value: value in COMPUTED, ", ".join(COMPUTED)),
    "ignored": (lambda value: type(value) is int and abs(value) < 2 ** 31, "a whole number"),
    "ranks": (lambda value: isinstance(value, dict) and value.keys() <= ALONG and all(
        type(n) is int and 0 < n < 2 ** 31 for n in value.values()),
        'an object such as {"data": 2}, of data, tensor, sequence and stages,'),
    "optimizer": (lambda value: isinstance(value, dict), "an object with name and lr"),
    "dropout": SHARE, "skipped": (_texts, "a list of weights"),
    "unseen": (_texts, "a list of texts")}
OPTIMIZER: dict[str, ValueCheck] = {
    "name": (lambda value: value in ("adamw", "sgd"), "adamw or sgd"), "lr": AT_LEAST_0,
    "betas": (lambda value: isinstance(value, list) and len(value) == 2 and all(
        map(SHARE[0], value)), "two numbers of at least 0 and below 1"),
    "eps": _number(0, inf, "a number above 0", above=True), "weight_decay": AT_LEAST_0,
    "momentum": SHARE, "clip": AT_LEAST_0,
    "decayed": (lambda value: value in ("all", "matrices") or _texts(value),
                "all, matrices, or a list of weights")}


DEFAULTS: dict[str, dict[str, Any]] = {    # those of PyTorch
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "sgd": {"momentum": 0.0, "weight_decay": 0.0}}


def read_about(folder: Path) -> dict[str, Any]:
    """Return what ``dump.json`` says, without what is null; nothing where there is none.

    Raises UsageError when it is no object of JSON, or has a key that is not known or a value that
    makes no sense; or an optimizer has no name or rate.
    """
    path = folder / "dump.json"
    try:
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    found = _checked(path, found, ABOUT, "")
    if "optimizer" in found:
        found["optimizer"] = optimizer = _checked(path, found["optimizer"], OPTIMIZER,
                                                  "optimizer's ")
        for key in ("name", "lr"):
            if key not in optimizer:
                raise UsageError(f"{path}: the optimizer has no {key}: {OPTIMIZER[key][1]} would "
                                 f"do, or no optimizer")
        found["optimizer"] = DEFAULTS[optimizer["name"]] | optimizer
    return found


def _checked(path: Path, found: Any, checks: dict[str, ValueCheck], what: str) -> dict[str, Any]:
    """Return an object without what is null, after checking it."""
    if not isinstance(found, dict):
        raise UsageError(f"{path} is {found!r}: an object would do")
    for key, value in found.items():
        if key not in checks:
            raise UsageError(f"{path}: {what}{key} is unknown: {', '.join(sorted(ABOUT))} would "
                             f"do, and for an optimizer {', '.join(sorted(OPTIMIZER))}")
        good, wanted = checks[key]
        if value is not None and not good(value):
            raise UsageError(f"{path}: {what}{key} = {value!r}: {wanted} would do")
    return {key: value for key, value in found.items() if value is not None}
