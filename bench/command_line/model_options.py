"""Define and read ``--model``, which names a model or a file instead of sizes."""

import argparse
import math
import shlex

from bench.command_line import expert_options, options
from bench.command_line.number_types import MOST_RANKS
from bench.errors import UsageError
from bench.prediction.model_file import ModelFile, load_model

LAYERS = {"layers": 24, "seq": 512}    # without --model
CHANGES = ("layers", "seq", "vocab")    # of a model, where a verb has such an option
SAID = ("hidden", "heads", "untied", "experts", *expert_options.LAYERS)    # by the model


def add_named(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``."""
    parser.add_argument("--model", metavar="NAME", help=(
        "sizes, architecture and experts of a published model, such as llama-3-70b, or of a file, "
        "a .toml or a config.json of Hugging Face; --layers and --seq are then other numbers of "
        "its layers, and of tokens in a sequence"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of ranks and the model that is predicted."""
    parser.add_argument("--ranks", type=options.whole(1, MOST_RANKS), required=True,
                        metavar="N", help="ranks of the job, of all replicas")
    add_named(parser)
    options.add_sizes(parser, hidden="that of --model", **LAYERS, batch=384, heads=(
        "those of the paper's row of this --hidden, or heads of 128 features"))
    options.add_dtype(parser, "float16", "bfloat16", "float32", "float64")
    parser.set_defaults(**dict.fromkeys(LAYERS))


def read_model(arguments: argparse.Namespace) -> ModelFile | None:
    """Return the model that ``--model`` names, with the sizes of `CHANGES` that were given.

    All of its sizes are set as options.  None without ``--model``.

    Raises
    ------
    UsageError
        When there is no such model, or an option says what it says.
    """
    if arguments.model is None:
        return None
    for name in SAID:
        value = getattr(arguments, name, None)
        if value is not None and value is not False:
            said = "" if value is True else " none" if value == math.inf else f" {value}"
            raise UsageError(f"--{name.replace('_', '-')}{said}: --model {arguments.model} says "
                             f"it: leave one of them out")
    found = load_model(arguments.model, **_changes(arguments))
    for name in ("layers", "hidden", "heads", "seq"):
        setattr(arguments, name, getattr(found, name))
    return found


def read_sizes(arguments: argparse.Namespace) -> ModelFile | None:
    """Return the result of `read_model`; set the sizes that are not given without ``--model``."""
    found = read_model(arguments)
    if found is None and arguments.hidden is None:
        raise UsageError("--hidden is missing: --hidden 1024 would do, or --model llama-3-8b")
    for name, default in LAYERS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return found


def words_of(arguments: argparse.Namespace) -> str:
    """Return the options that name the model, before `read_model` sets others."""
    changed = [f" --{name} {value}" for name, value in _changes(arguments).items()
               if value is not None and name != "seq"]
    return f"--model {shlex.quote(arguments.model)}{''.join(changed)}"


def _changes(arguments: argparse.Namespace) -> dict[str, int | None]:
    """Return the sizes that were given beside ``--model``."""
    return {name: getattr(arguments, name, None) for name in CHANGES}
