"""Traces as Chrome and Perfetto read them: a track a rank, its spans in each other.

The format is the "JSON object format" of the Trace Event Format: complete events (``"ph": "X"``)
with ``ts`` and ``dur`` in microseconds, and metadata events (``"M"``) that name the tracks.
"""

import json
from pathlib import Path
from typing import Any, Sequence

from bench import textfile
from bench.cases import UsageError
from bench.output import say
from mm3d import store
from mm3d.spans import Span
from mm3d.timing import Clock

NANO = 10 ** 9


def document(spans: Sequence[Sequence[Span]], names: Sequence[str], title: str,
             about: dict[str, Any]) -> dict[str, Any]:
    """The trace of all ranks.

    Parameters
    ----------
    spans : sequence of sequence of Span
        Of each rank, on one clock.
    names : sequence of str
        Of each rank.
    title : str
        Of all of it.
    about : dict
        What else is to be known, put under ``otherData``.
    """
    first = min((span.start for track in spans for span in track), default=0.0)
    events: list[dict[str, Any]] = [_metadata("process_name", 0, name=title)]
    for rank, (track, name) in enumerate(zip(spans, names, strict=True)):
        events += [_metadata("thread_name", rank, name=name),
                   _metadata("thread_sort_index", rank, sort_index=rank)]
        events += [_complete(span, rank, first) for span in sorted(
            track, key=lambda span: (span.start, -span.end))]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _metadata(kind: str, rank: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": rank, "ts": 0, "args": arguments}


def _complete(span: Span, rank: int, first: float) -> dict[str, Any]:
    """Whole nanoseconds, so that what nests in seconds nests in microseconds too."""
    start, end = (round((time - first) * NANO) for time in (span.start, span.end))
    details = {"phase": span.phase, "part": span.part, "axis": span.axis,
               "collective": span.collective, "operand": span.operand, "bytes": span.bytes,
               "flops": span.flops}
    return {"ph": "X", "name": span.name, "cat": span.kind, "pid": 0, "tid": rank,
            "ts": start / 1000, "dur": (end - start) / 1000,
            "args": {key: value for key, value in details.items() if value}}


def write(path: Path, spans: list[Span], grid: Any, clock: Clock, title: str) -> int:
    """Write the trace of all ranks of `grid`; each must call it with its own spans.

    Parameters
    ----------
    path : Path
        The file, which rank 0 writes, at once or not at all.
    spans : list of Span
        Of this rank, on `clock`.
    grid : Grid
        The ranks.
    clock : Clock
        Rank 0's on every rank; the trace says by how much it may be wrong.
    title : str
        What was traced.

    Returns
    -------
    int
        0 when it was written, and 1 when it could not be, which rank 0 says; the same on every
        rank.
    """
    place = ", ".join(map(str, grid.coords.values()))
    everyone = grid.comm.gather((spans, f"rank {grid.rank} ({place})", clock.offset,
                                 clock.offset_error))
    if everyone is None:
        return grid.comm.bcast(None)
    tracks, names, offsets, errors = zip(*everyone)
    about = {"title": title, "grid": " x ".join(f"{axis}={n}" for axis, n in grid.shape.items()),
             "clock": "rank 0's; the offset of a rank on another kernel was measured by the "
                      "fastest of 100 round trips, and is wrong by at most half of that one",
             "clock_offset_s": list(offsets), "clock_offset_error_s": list(errors),
             "spans": "each collective follows a barrier of its ranks, a span of its own"}
    status = 0
    try:
        textfile.replace(path, json.dumps(document(tracks, names, title, about)))
    except OSError as error:
        status = 1
        say(f"not written: the trace {path} ({error.strerror})")
    return grid.comm.bcast(status)


def asked_for(arguments, comm) -> str | None:
    """The file of ``--trace``, in a folder that rank 0 has found writable.

    Raises
    ------
    UsageError
        When nothing would be in it.
    StoreError
        The same on every rank, when its folder cannot be written.
    """
    if not arguments.trace:
        return None
    if getattr(arguments, "traced", None) == 0:
        raise UsageError(f"--trace {arguments.trace} --traced 0: nothing would be traced; leave "
                         f"one of them out")
    problem = None
    if comm.rank == 0:
        try:
            store.check_folder(Path(arguments.trace).parent, "the trace's folder", "--trace")
        except store.StoreError as error:
            problem = str(error)
    problem = comm.bcast(problem)
    if problem:
        raise store.StoreError(problem)
    return arguments.trace


def named(file: str, name: str, cases: int) -> Path:
    """The file for the case `name`, one of so many: `file`, with its name in it if need be."""
    path = Path(file)
    return path if cases == 1 else path.with_name(f"{path.stem}-{name}{path.suffix or '.json'}")
