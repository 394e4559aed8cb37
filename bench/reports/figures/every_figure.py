"""Draw all figures of a folder's results."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

from bench.errors import UsageError
from bench.records.folder import FolderContents, Results, read_folder
from bench.records.measurements import Measurements
from bench.reports.figures import (against_ranks, experts, products, roofline_and_memory, style,
                                   time_shares)

# The function that draws each figure, and a sentence that describes it, by name.
FIGURES: dict[str, tuple[Callable[[Results], object], str]] = {
    "average-step-time": (against_ranks.draw_step_times,
                          "Average step time against ranks, weak and strong "
                          "scaling, published and measured."),
    "speed-up-and-efficiency": (against_ranks.draw_scaling,
                                "Speed-up of strong and efficiency of weak scaling against ranks, "
                                "published and measured."),
    "where-the-time-goes": (time_shares.draw_time_shares,
                            "Parts of forward and backward: matrix products, collectives by "
                            "direction, elementwise work, waiting, other."),
    "words-per-rank": (against_ranks.draw_words,
                       "Words per rank and sequence against ranks, counted by the "
                       "bucket algorithm, and by the closed form."),
    "roofline": (roofline_and_memory.draw_roofline,
                 "Achieved rates of a rank against arithmetic intensity, under "
                 "the machine's rate of products and memory bandwidth."),
    "memory-per-rank": (roofline_and_memory.draw_memory,
                        "Memory of a rank against ranks, measured, and by the "
                        "closed form or, its peak, by a dry run.")}
# The same of a kind of microbenchmark.
MEASURED: dict[str, dict[str, tuple[Callable[[Measurements], object], str]]] = {"products": {
    "words-of-products": (products.draw_words_against_ranks,
                          "Words per rank of every distributed product against ranks: closed "
                          "forms, and counted."),
    "words-and-memory-of-products": (products.draw_words_against_memory,
                                     "Words per rank of every distributed product against the "
                                     "peak memory of a rank, with lower bounds.")},
    "experts": {
    "parts-of-experts": (experts.draw_parts,
                         "Parts of a layer of experts, forward and backward, with tokens routed "
                         "uniformly, unevenly, and to a few experts; and the tokens of each "
                         "expert.")}}
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class Drawing:
    """A figure of one preset, or the reason why there is none.

    Attributes
    ----------
    name : str
        The name, such as "roofline-laptop".
    about : str
        Its description, or the reason why it was left out.
    figure : matplotlib.figure.Figure or None
        The figure; None if it was left out.
    """

    name: str
    about: str
    figure: object


def make_drawings(found: FolderContents) -> Iterator[Drawing]:
    """Make every figure of every preset, to be iterated over within `style.figure_style`."""
    for results in found.results:
        # It becomes part of a file's name, and a record may contain any text.
        preset = re.sub(r"[^\w.-]", "-", results.preset) + results.slug
        for name, (draw, about) in FIGURES.items():
            try:
                yield Drawing(f"{name}-{preset}", about, draw(results))
            except style.LeftOut as reason:
                yield Drawing(f"{name}-{preset}", str(reason), None)


def make_measured_drawings(found: FolderContents) -> Iterator[Drawing]:
    """Make the figures of microbenchmarks, to be iterated over within `style.figure_style`."""
    for record in found.measurements:
        for name, (draw, about) in MEASURED.get(record.kind, {}).items():
            yield Drawing(f"{name}-{_sizes(record)}-p{record.environment['ranks']:03d}", about,
                          draw(record))
    if trainings := experts.comparable_trainings(found.measurements):
        yield Drawing("balance-of-experts", "Validation loss and use of the experts by step, for "
                      "several coefficients of the balance loss.",
                      experts.draw_balance(trainings))


def _sizes(record: Measurements) -> str:
    """Name what a microbenchmark has measured, for the name of a figure."""
    chosen = record.configuration
    if record.kind == "experts":
        capacity = f"-capacity{chosen['capacity']:g}" if "capacity" in chosen else ""
        return f"{chosen['count']}-top{chosen['top']}-h{chosen['hidden']}{capacity}"
    return f"{chosen['form']}-{'x'.join(str(chosen[letter]) for letter in 'MNK')}"


def draw_figures(folder: str | Path,
                 formats: tuple[str, ...] = ("png",)) -> tuple[list[Path], list[str]]:
    """Draw the figures of every preset in a folder of results into that folder.

    Parameters
    ----------
    folder : path
        With the results.
    formats : tuple of str
        Of `METADATA`.

    Returns
    -------
    list of Path, list of str
        The files, and the figures left out with the reasons.

    Raises
    ------
    StoreError
        When there are no results in `folder`.
    UsageError
        When a format is unknown.
    """
    unknown = [form for form in formats if form not in METADATA]
    if unknown:
        raise UsageError(f"--format {','.join(formats)}: {', '.join(METADATA)} would do, with "
                         f"commas between")
    drawn, left_out = [], []
    found = read_folder(folder)
    if not found.results and not (any(one.kind in MEASURED for one in found.measurements)
                                  or experts.comparable_trainings(found.measurements)):
        left_out.append(f"all figures: no row of the tables was measured in {folder}")
    with style.figure_style():
        for one in itertools.chain(make_drawings(found), make_measured_drawings(found)):
            if one.figure is None:
                left_out.append(f"{one.name}: {one.about}")
                continue
            for form in formats:
                path = found.folder / f"{one.name}.{form}"
                style.save_figure(one.figure, path, metadata=METADATA[form])
                drawn.append(path)
    return drawn, left_out
