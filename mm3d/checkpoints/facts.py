"""Compare the definition of a model and its training with a checkpoint's.

A model of another function is refused.  Facts that change the training alone are reported, and so
are facts that the checkpoint or the model does not state.
"""

from pathlib import Path
from typing import Any

from mm3d.checkpoints.index_file import Index
from mm3d.model.architecture import PLAIN
from mm3d.model.definition import architecture_facts

OPTIMIZER_PREFIX = "optimizer."    # before the names of an optimizer's options


def known_facts(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that define a model, and those of its training alone; both may be empty."""
    definition = getattr(model, "definition", None)
    function, training = (definition.function, definition.training) if definition else ({}, {})
    options = {} if optimizer is None else optimizer.options()
    return function, training | {OPTIMIZER_PREFIX + name: value for name, value in options.items()}


def compare_facts(path: Path, index: Index, model: Any, optimizer: Any) -> list[str]:
    """Compare a model and its optimizer with the facts in an index.

    Returns what the caller should know, one line each; raises ValueError for another function.
    """
    function, training = known_facts(model, optimizer)
    stated = dict(index.model)
    if "epsilon" in stated:    # of layers of this library: earlier ones were those of 2019
        stated = architecture_facts(PLAIN) | stated
    other = [f"{name} is {stated[name]!r} there, {value!r} here"
             for name, value in function.items()
             if name in stated and stated[name] != value]
    if other:
        raise ValueError(f"checkpoint {path} is of another model: {', '.join(other)}")
    there = {name: value for name, value in index.training.items()
             if optimizer is not None or not name.startswith(OPTIMIZER_PREFIX)}
    said = [f"{name} was {there[name]!r}, and is {value!r}" for name, value in training.items()
            if name in there and there[name] != value]
    for one, other, who in ((stated | there, function | training, "the model"),
                            (function | training, stated | there, "the checkpoint")):
        if unknown := [name for name in one if name not in other]:
            said.append(f"{who} does not say {', '.join(unknown)}: whether these are the same "
                        f"cannot be told")
    return said
