"""Draw all figures of a folder's results."""

import re
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from bench.errors import UsageError
from bench.records.folder import FolderContents, Results, read_folder
from bench.reports.figures import against_ranks, roofline_and_memory, style, time_shares

# By name: what draws the figure, and what it shows in a sentence.
FIGURES: dict[str, tuple[Callable[[Results], object], str]] = {
    "average-step-time": (against_ranks.step_times,
                          "Average step time against ranks, weak and strong "
                          "scaling, published and measured."),
    "speed-up-and-efficiency": (against_ranks.scaling, "Speed-up of strong and efficiency of weak "
                                "scaling against ranks, published and measured."),
    "where-the-time-goes": (time_shares.where, "Parts of forward and backward: matrix products, "
                            "collectives by direction, elementwise work, waiting, other."),
    "words-per-rank": (against_ranks.words,
                       "Words per rank and sequence against ranks, counted by the "
                       "bucket algorithm, and by the closed form."),
    "roofline": (roofline_and_memory.roofline,
                 "Achieved rates of a rank against arithmetic intensity, under "
                 "the machine's rate of products and memory bandwidth."),
    "memory-per-rank": (roofline_and_memory.memory,
                        "Memory of a rank against ranks, measured, and by the "
                        "closed form or, its peak, by a dry run.")}
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


class Drawing(NamedTuple):
    """A figure of one preset, or why there is none.

    Attributes
    ----------
    name : str
        Such as "roofline-laptop".
    about : str
        What it shows, or why it was left out.
    figure : matplotlib.figure.Figure or None
        None where it was left out.
    """

    name: str
    about: str
    figure: object


def drawings(found: FolderContents) -> Iterator[Drawing]:
    """Make every figure of every preset, to be used under `bench.reports.figures.style.look`."""
    for results in found.results:
        # It becomes part of a file's name, and a file may hold anything.
        preset = re.sub(r"[^\w.-]", "-", results.preset) + results.slug
        for name, (draw, about) in FIGURES.items():
            try:
                yield Drawing(f"{name}-{preset}", about, draw(results))
            except style.LeftOut as reason:
                yield Drawing(f"{name}-{preset}", str(reason), None)


def plots(folder: str | Path, formats: tuple[str, ...] = ("png",)) -> tuple[list[Path], list[str]]:
    """Draw the figures of every preset that `folder` has results of, into `folder`.

    Parameters
    ----------
    folder : path
        With the results.
    formats : tuple of str
        Of `METADATA`.

    Returns
    -------
    list of Path, list of str
        The files, and which figures were left out and why.

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
    if not found.results:
        left_out.append(f"all figures: no row of the tables was measured in {folder}")
    with style.look():
        for one in drawings(found):
            if one.figure is None:
                left_out.append(f"{one.name}: {one.about}")
                continue
            for form in formats:
                path = found.folder / f"{one.name}.{form}"
                style.save(one.figure, path, metadata=METADATA[form])
                drawn.append(path)
    return drawn, left_out
