"""Define and read ``--model``, which names a model or a file instead of sizes."""

import argparse
import shlex
from typing import Iterable

import msgspec

from bench.command_line import expert_options, options
from bench.command_line.config_options import add_fields, read, told
from bench.errors import UsageError
from bench.prediction.model_file import ModelFile, load_model
from mm3d import ModelSizes
from mm3d.config import Model
from mm3d.model.sizes import SIZES

LAYERS = {"layers": 24, "seq": 512}    # without --model
HEADS = ": those of the paper's row of this --hidden, or heads of 128 features"
CHANGES = ("layers", "seq", "vocab")    # of a model, where a verb has such an option
SAID = ("hidden", "heads", "untied")    # by the model
EXPERT_OPTIONS = ("experts", *expert_options.OPTIONS)    # by a model that has some


def add_named(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``."""
    parser.add_argument("--model", metavar="NAME", help=(
        "sizes, architecture and experts of a published model, such as llama-3-70b, or of a file, "
        "a .toml or a config.json of Hugging Face; --layers and --seq are then other numbers of "
        "its layers, and of tokens in a sequence"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of ranks and the model that is predicted."""
    parser.add_argument("--ranks", type=options.ranks, required=True,
                        metavar="N", help="ranks of the job, of all replicas")
    add_named(parser)
    add_fields(parser, Model, (*SIZES, "dtype"), {"batch": 384, **told(
        Model, ("layers", "hidden", "heads", "seq"), hidden=": that of --model", heads=HEADS,
        **LAYERS)})


def read_model(arguments: argparse.Namespace) -> ModelFile | None:
    """Return the model that ``--model`` names, with the sizes of `CHANGES` that were given.

    One without experts has those of the options.  All sizes are set as options.  None without
    ``--model``.  UsageError when there is no such model, or an option says what it says.
    """
    if arguments.model is None:
        return None
    found = load_model(arguments.model, **{
        name: getattr(arguments, name, None) for name in CHANGES})
    for word in _words(arguments, SAID if found.experts is None else (*SAID, *EXPERT_OPTIONS)):
        raise UsageError(f"{word}: --model {arguments.model} says it: leave one of them out")
    if found.experts is None:
        found = msgspec.structs.replace(found, experts=expert_options.experts_of(arguments))
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


def model_sizes(arguments: argparse.Namespace) -> ModelSizes:
    """Return the sizes of a Transformer; by default the tables' heads, or heads of 128 features.

    UsageError when the heads do not divide the features.
    """
    hidden, heads = arguments.hidden, arguments.heads
    if heads is None:
        from bench.cases.paper import load_tables    # which a training does without
        heads = load_tables().settings.heads.get(hidden) or max(1, hidden // 128)
    if hidden % heads:
        near = heads * max(1, round(hidden / heads))
        raise UsageError(f"--hidden {hidden}: must be a multiple of --heads {heads}, such as "
                         f"{near}, or --heads another number")
    return read(ModelSizes, arguments, heads=heads)


def words_of(arguments: argparse.Namespace) -> str:
    """Return the options that name the model, before `read_model` sets others."""
    changed = _words(arguments, ("layers", "vocab", *EXPERT_OPTIONS))
    return " ".join([f"--model {shlex.quote(arguments.model)}", *changed])


def _words(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return those of some options that were given, as words."""
    return [options.written(*one) for one in options.given_of(arguments, names).items()]
