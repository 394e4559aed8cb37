"""The command line of what goes beyond this machine: ``dry``, ``plan`` and ``predict``."""

import argparse
import importlib

from bench import options
from bench.cases import UsageError

VERBS = ("dry", "plan", "predict")


def run(arguments) -> int:
    """Do what the verb says; the exit status."""
    return importlib.import_module(f"bench.{arguments.verb}").run(arguments)


def grid(text: str | None, scheme: str, ranks: int, machine: str, dtype: str,
         sizes: dict[str, int], recompute: str = "none") -> tuple[int, ...] | None:
    """Sizes as ``16x4x1`` says; ``auto`` for what the planner chooses; None for the default.

    Raises
    ------
    UsageError
        When `text` is neither, the scheme has no grid of so many ranks, or nothing is known of
        the machine or of its rate for `dtype`.
    """
    if text is None:
        return None
    if text == "auto":
        from bench import model, plan
        try:
            return plan.best_grid(scheme, ranks, model.load(machine, dtype), dtype, recompute,
                                  **sizes)
        except ValueError as error:
            raise UsageError(str(error)) from error
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError as error:
        raise UsageError(f"--grid {text}: give sizes as in 16x4x1, or auto") from error


def add_verbs(verbs) -> None:
    """Add these verbs to the sub-parsers `verbs`, and those that measure for them."""
    model = _model()
    _add_dry(verbs, model)
    _add_plan(verbs, model)
    _add_calibrate(verbs)
    _add_check(verbs)
    _add_predict(verbs)


def _model() -> argparse.ArgumentParser:
    """The options that say which model on how many ranks, as a parent of parsers."""
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--ranks", type=int, required=True, metavar="P", help="how many ranks")
    model.add_argument("--hidden", type=int, required=True, metavar="N", help="features")
    for name, default in (("layers", 24), ("batch", 384), ("seq", 512)):
        model.add_argument(f"--{name}", type=int, default=default, metavar="N",
                           help=f"of the model (default {default})")
    model.add_argument("--heads", type=int, metavar="N",
                       help="of attention (default: the tables', or heads of 128 features)")
    model.add_argument("--dtype", default="float32", choices=("float16", "float32", "float64"),
                       help="of every array (default float32)")
    return model


def _add_dry(verbs, model: argparse.ArgumentParser) -> None:
    dry = verbs.add_parser("dry", parents=[model], help=(
        "what a rank would do on any number of ranks: products, collectives, memory"))
    dry.add_argument("--scheme", default="3d", help="the parallelism (default 3d)")
    dry.add_argument("--grid", metavar="XxYxZ",
                     help="sizes of the grid's directions, or auto for the planner's choice")
    dry.add_argument("--rank", type=int, default=0, metavar="N",
                     help="which rank (default 0, whose blocks are the largest)")
    dry.add_argument("--keep", choices=("none", "weight", "both"),
                     help="gathered operands kept for backward in 3d (default none)")
    dry.add_argument("--recompute", type=options.recompute, default="none", metavar="POLICY",
                     help=f"{options.RECOMPUTE} (default none)")
    dry.add_argument("--memory", metavar="SIZE", help=(
        "of a rank, such as '16 GB': say whether the model fits, or which --recompute would, and "
        "end with status 1 if it does not"))
    dry.add_argument("--causal", action="store_true", help="attention looks backward only")
    dry.add_argument("--all-layers", action="store_true",
                     help="run all layers instead of extending three, which gives the same")
    dry.add_argument("--machine", metavar="NAME", help=(
        "also predict seconds on this machine, and plan for it with --grid auto (for longhorn, if "
        "none is given)"))


def _add_plan(verbs, model: argparse.ArgumentParser) -> None:
    plan = verbs.add_parser("plan", parents=[model], help=(
        "rank every scheme and grid by predicted time, with words and memory"))
    _machine_option(plan)
    plan.add_argument("--top", type=int, default=12, metavar="N",
                      help="how many to print (default 12)")
    plan.add_argument("--recompute", type=options.recompute, default="none", metavar="POLICY",
                      help=f"{options.RECOMPUTE} (default none)")
    _pictures_option(plan)


def _add_calibrate(verbs) -> None:
    calibrate = verbs.add_parser("calibrate", help=(
        "alone or under mpirun: measure this machine and write its model for as many ranks"))
    calibrate.add_argument("--out", required=True, metavar="FILE",
                           help="the machine's model, a .toml file for --machine")
    options.add_stall(calibrate)


def _add_check(verbs) -> None:
    check = verbs.add_parser("check", help=(
        "alone or under mpirun: measure every scheme and grid beside the model's predictions"))
    check.add_argument("--machine", required=True, metavar="FILE",
                       help="what calibrate wrote with as many ranks")
    check.add_argument("--matmul", type=options.shape, action="append", metavar="M,N,K",
                       help="C is M x K, the sum has N terms; may be repeated")
    check.add_argument("--layer", type=options.sizes("HIDDEN,HEADS,BATCH,SEQ"), action="append",
                       metavar="HIDDEN,HEADS,BATCH,SEQ", help="may be repeated")
    check.add_argument("--layers", type=int, default=1, metavar="N", help="of each (default 1)")
    check.add_argument("--rounds", type=int, default=20, metavar="N",
                       help="over all, whose median counts (default 20)")
    check.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    check.add_argument("--seed", type=options.whole(0), default=0, metavar="N",
                       help="of numbers and order (default 0)")
    check.add_argument("--out", metavar="DIR",
                       help="where the .h5 file goes (default results/<machine>)")
    options.add_stall(check)


def _add_predict(verbs) -> None:
    predict = verbs.add_parser("predict", help=(
        "the paper's tables as a machine model predicts them, fitted on some rows"))
    _machine_option(predict)
    predict.add_argument("--results", metavar="DIR",
                         help="instead of fitting, set predictions beside what was measured")
    predict.add_argument("--table", metavar="NAMES", help="weak, strong or all (default)")
    _pictures_option(predict)


def _machine_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", default="longhorn", metavar="NAME",
                        help="a supplied machine or a .toml file (default longhorn)")


def _pictures_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pictures", metavar="DIR",
                        help="also draw the figures into this folder")
