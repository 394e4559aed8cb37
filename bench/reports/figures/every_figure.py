"""Draw all figures of a folder's results."""

import itertools
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

from bench.errors import UsageError
from bench.records.folder import FolderContents
from bench.records.measurements import Measurements
from bench.reports.figures import style
from bench.reports.figures.style import Drawing, NoFigure


# What draws each figure, FILE.FUNCTION of this folder, and a sentence that describes it, by name.
FIGURES = {
    "average-step-time": ("against_ranks.draw_step_times", (
        "Average step time against ranks, weak and strong scaling, published and measured.")),
    "speed-up-and-efficiency": ("against_ranks.draw_scaling", (
        "Speed-up of strong and efficiency of weak scaling against ranks, published and "
        "measured.")),
    "where-the-time-goes": ("time_shares.draw_time_shares", (
        "Parts of forward and backward: matrix products, collectives by direction, elementwise "
        "work, waiting, other.")),
    "words-per-rank": ("against_ranks.draw_words", (
        "Words per rank and sequence against ranks, counted by the bucket algorithm, and by the "
        "closed form.")),
    "roofline": ("roofline_and_memory.draw_roofline", (
        "Achieved rates of a rank against arithmetic intensity, under the machine's rate of "
        "products and memory bandwidth.")),
    "memory-per-rank": ("roofline_and_memory.draw_memory", (
        "Memory of a rank against ranks, measured, and by the closed form or, its peak, by a dry "
        "run."))}
# For rows whose ranks waited for work on an emulated cluster: one figure replaces the first two.
EMULATED = {"scaling": ("emulation.draw_emulated", (
    "Seconds a sequence against ranks, weak and strong scaling, published beside emulated, and "
    "the words that a rank sends.")), **dict(itertools.islice(FIGURES.items(), 2, None))}
# For a talk: one message, in large letters.
TALK = {"talk": ("emulation.draw_talk", (
    "Speed-ups of 3-D on the most ranks, published beside emulated."))}
# The figures of microbenchmarks, by kind.
MEASURED = {"products": {
    "words-of-products": ("products.draw_words_against_ranks", (
        "Words per rank of every distributed product against ranks: closed forms, and counted.")),
    "words-and-memory-of-products": ("products.draw_words_against_memory", (
        "Words per rank of every distributed product against the peak memory of a rank, with "
        "lower bounds."))},
    "experts": {"parts-of-experts": ("training.draw_parts", (
        "Parts of a layer of experts, forward and backward, with tokens routed uniformly, "
        "unevenly, and to a few experts; and the tokens of each expert."))},
    "pipeline": {"timeline-of-pipeline": ("measured_timelines.draw", (
        "When each action of a pipeline ran in one repetition, above the clock's timeline."))}}


def _by_name(place: str, subject: object) -> Any:
    """Draw by FILE.FUNCTION of this folder, which is imported now."""
    file, _, function = place.partition(".")
    return getattr(import_module(f"bench.reports.figures.{file}"), function)(subject)


def make_drawings(found: FolderContents) -> Iterator[Drawing]:
    """List every figure of a folder."""
    swept = records = found.measurements
    if found.rows:
        from bench.reports.emulated import swept_rates    # what only rows need
        swept = [*records, *swept_rates(found.rows)]
    return itertools.chain(make_row_drawings(found), make_measured_drawings(records),
                           _by_name("training.make_combined_drawings", records),
                           _by_name("link_sweep.make_sweep_drawings", swept))


def make_row_drawings(found: FolderContents, talk: bool = False) -> Iterator[Drawing]:
    """List the figures of the rows of every preset, or those for a `talk`."""
    for results in found.results:
        from bench.reports.emulated import waited_rows    # what only rows need
        # It becomes part of a file's name, and a record may contain any text.
        preset = re.sub(r"[^\w.-]", "-", results.preset) + results.slug
        waited = waited_rows(results)
        chosen = (TALK if waited else {}) if talk else EMULATED if waited else FIGURES
        for name, (draw, about) in chosen.items():
            yield Drawing(f"{name}-{preset}", about, partial(_by_name, draw, results))


def make_measured_drawings(records: Sequence[Measurements]) -> Iterator[Drawing]:
    """List the figures of microbenchmarks."""
    for record in records:
        for name, (draw, about) in MEASURED.get(record.kind, {}).items():
            yield Drawing(f"{name}-{_sizes(record)}-p{record.environment['ranks']:03d}", about,
                          partial(_by_name, draw, record))
    yield from _by_name("training.make_balance_drawings", records)


def _sizes(record: Measurements) -> str:
    """Name the sizes of a microbenchmark, for the name of a figure."""
    chosen = record.configuration
    if record.kind == "experts":
        capacity = f"-capacity{chosen['capacity']:g}" if "capacity" in chosen else ""
        return f"{chosen['count']}-top{chosen['top']}-h{chosen['hidden']}{capacity}"
    if record.kind == "pipeline":
        schedule = re.sub(r"[^\w.-]", "", str(chosen["schedule"]))    # interleaved:2
        return f"{chosen['work']}-{schedule}-m{chosen['microbatches']}"
    return f"{chosen['form']}-{'x'.join(str(chosen[letter]) for letter in 'MNK')}"


def draw_figures(found: FolderContents, formats: Sequence[str] = ("png",),
                 names: str = "", talk: bool = False) -> tuple[list[Path], list[NoFigure]]:
    """Draw the figures of every preset in a folder of results into that folder.

    Each of `names`, with commas between, begins those of figures, or raises UsageError; "" draws
    all.  Returns the files, and the figures that are not drawn, with reasons.
    """
    drawn, left_out = _draw_named(make_row_drawings(found, True) if talk else make_drawings(found),
                                  found.folder, formats, names)
    if not drawn and not left_out:
        left_out.append(NoFigure("all figures: nothing was measured that has one"))
    return drawn, left_out


def draw_trace_file(path: Path, formats: Sequence[str] = ("png",),
                    names: str = "") -> tuple[list[Path], list[NoFigure]]:
    """Draw a trace, the file of ``--trace``, beside it; otherwise as `draw_figures`."""
    return _draw_named([_by_name("time_shares.trace_drawing", path)], path.parent, formats, names)


def _draw_named(drawings: Iterable[Drawing], folder: Path, formats: Sequence[str],
                names: str) -> tuple[list[Path], list[NoFigure]]:
    """Draw the figures whose names begin with one of `names`; see `draw_figures`."""
    every = list(drawings)
    begins = tuple(filter(None, names.casefold().split(",")))
    for begin in begins:
        if not any(one.name.casefold().startswith(begin) for one in every):
            raise UsageError(f"--figures {begin}: no figure's name begins so; there is "
                             f"{', '.join(one.name for one in every) or 'none'}")
    return style.save_drawings([one for one in every if one.name.casefold().startswith(
        begins or "")], folder, formats)
