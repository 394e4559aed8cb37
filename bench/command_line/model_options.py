"""Define and read ``--model``, which names a model or a file instead of sizes."""

import argparse

from bench.command_line import options
from bench.command_line.number_types import MOST_RANKS
from bench.errors import UsageError
from bench.prediction.model_file import GptFile, load_model

LAYERS = {"layers": 24, "seq": 512}    # without --model
SAID = ("layers", "hidden", "heads", "experts")    # by the model


def add_named(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``."""
    parser.add_argument("--model", metavar="NAME", help=(
        "sizes, architecture and experts of a published model, such as llama-3-70b, or of a file, "
        "a .toml or a config.json of Hugging Face; --seq changes the length of its sequences"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of ranks and the model that is predicted."""
    parser.add_argument("--ranks", type=options.whole(1, MOST_RANKS), required=True,
                        metavar="N", help="ranks of the job, of all replicas")
    add_named(parser)
    options.add_sizes(parser, hidden="that of --model", **LAYERS, batch=384, heads=(
        "those of the paper's row of this --hidden, or heads of 128 features"))
    options.add_dtype(parser, "float16", "float32", "float64")
    parser.set_defaults(**dict.fromkeys(LAYERS))


def read_model(arguments: argparse.Namespace) -> GptFile | None:
    """Return the model that ``--model`` names; set the sizes that are not given.

    Raises
    ------
    UsageError
        When there is no such model, or sizes are given twice or not at all.
    """
    if arguments.model is None:
        if arguments.hidden is None:
            raise UsageError("--hidden is missing: --hidden 1024 would do, or --model llama-3-8b")
        found = None
    else:
        for name in SAID:
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name} {getattr(arguments, name)}: --model "
                                 f"{arguments.model} says it: leave one of them out")
        found = load_model(arguments.model)
    for name in ("layers", "hidden", "heads", "seq"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(found, name, LAYERS.get(name)))
    return found
