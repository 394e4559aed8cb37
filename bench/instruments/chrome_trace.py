"""Write and read traces for Chrome and Perfetto: one track a rank, with nested spans.

The format is the "JSON object format" of the Trace Event Format: complete events (``"ph": "X"``)
with ``ts`` and ``dur`` in microseconds, and metadata events (``"M"``) that name the tracks.
"""

import json
from pathlib import Path
from typing import Any, Iterator, Sequence

from bench.errors import StoreError
from bench.instruments.clock import ROUND_TRIPS, Clock
from bench.instruments.spans import Span
from bench.records import atomic
from mm3d.console import say

NANO = 10 ** 9


def make_trace(spans: Sequence[Sequence[Span]], names: Sequence[str], title: str,
               about: dict[str, Any]) -> dict[str, Any]:
    """Make the trace of all ranks, whose spans are on one clock; `about` is its ``otherData``."""
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
    """Make a complete event in whole nanoseconds, so that spans nest in microseconds, too."""
    start, end = (round((time - first) * NANO) for time in (span.start, span.end))
    details = {"phase": span.phase, "part": span.part, "axis": span.axis,
               "collective": span.collective, "operand": span.operand, "bytes": span.bytes,
               "flops": span.flops}
    return {"ph": "X", "name": span.name, "cat": span.kind, "pid": 0, "tid": rank,
            "ts": start / 1000, "dur": (end - start) / 1000,
            "args": {key: value for key, value in details.items() if value}}


def gather_trace(spans: list[Span], grid: Any, clock: Clock, title: str) -> dict[str, Any] | None:
    """Make the trace of all ranks of `grid`, on rank 0; each must call this with its own spans.

    They are on `clock`, whose error the trace states.  Returns None on the other ranks.
    """
    place = ", ".join(map(str, grid.coords.values()))
    everyone = grid.comm.gather((spans, f"rank {grid.rank} ({place})", clock.offset,
                                 clock.offset_error))
    if everyone is None:
        return None
    tracks, names, offsets, errors = zip(*everyone)
    about = {"title": title, "grid": " x ".join(f"{axis}={n}" for axis, n in grid.shape.items()),
             "clock": "rank 0's; the offset of a rank on another kernel was measured by the "
                      f"fastest of {ROUND_TRIPS} round trips, and is wrong by at most half of "
                      f"that one",
             "clock_offset_s": list(offsets), "clock_offset_error_s": list(errors),
             "spans": "each collective follows a barrier of its ranks, a span of its own"}
    return make_trace(tracks, names, title, about)


def write_file(path: Path, trace: dict[str, Any]) -> int:
    """Write a trace as a whole; return 0, or 1 after printing why it cannot be written."""
    try:
        atomic.replace(path, json.dumps(trace, allow_nan=False))
    except OSError as error:
        say(f"not written: the trace {path} ({error.strerror})")
        return 1
    return 0


def write_trace(path: Path, spans: list[Span], grid: Any, clock: Clock, title: str) -> int:
    """Gather and write a trace; return 0 if it was written, the same on every rank."""
    trace = gather_trace(spans, grid, clock, title)
    return grid.comm.bcast(trace and write_file(path, trace))


def trace_file(file: str, name: str, cases: int) -> Path:
    """Return the file of the case `name`: `file`, with its name in it if there are several."""
    path = Path(file)
    return path if cases == 1 else path.with_name(f"{path.stem}-{name}{path.suffix or '.json'}")


# What each kind of metadata event states.
STATED = {"process_name": ("name", str), "thread_name": ("name", str),
          "thread_sort_index": ("sort_index", int)}
MOST = 1e18    # microseconds
FIELDS = {"name": str, "ph": str, "ts": (int, float), "pid": int, "tid": int, "args": dict}


def find_problems(document: Any) -> list[str]:
    """List what breaks the Trace Event Format, of what this program writes of it; [] if nothing.

    Spans of a track must lie within each other or apart, to the nanosecond: Perfetto leaves out
    others.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        return ["there is no list traceEvents"]
    unit = document.get("displayTimeUnit", "ms")
    found = [f"displayTimeUnit {unit!r}: ms or ns would do"] * (unit not in ("ms", "ns"))
    found += [f"event {number}: {problem}" for number, event in enumerate(events)
              if (problem := _event_problem(event))]
    return found or [*_track_problems(events)]


def _event_problem(event: Any) -> str:
    """Describe what is wrong with one event; "" if nothing is."""
    if not isinstance(event, dict):
        return "is no object"
    for key, kind in FIELDS.items():
        if not isinstance(event.get(key), kind) or isinstance(event[key], bool):
            return f"{key} is {event.get(key)!r}"
    if event["ph"] == "M":
        key, kind = STATED.get(event["name"], ("", object))
        return "" if isinstance(event["args"].get(key), kind) and key else (
            f"{event['name']} states {event['args']!r}")
    if event["ph"] != "X":
        return f"ph is {event['ph']!r}, where X and M are written"
    numbers = event["ts"], event.get("dur")
    if not all(isinstance(one, (int, float)) and 0 <= one <= MOST for one in numbers):
        return f"ts and dur are {numbers}"
    return "" if isinstance(event.get("cat"), str) else f"cat is {event.get('cat')!r}"


def _track_problems(events: list[dict[str, Any]]) -> Iterator[str]:
    """Find tracks without a name, and spans that overlap another of their track."""
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    for track, spans in group_tracks(events).items():
        if track not in named:
            yield f"track {track} has no name"
        around: list[int] = []
        for one in spans:
            start, end = nanoseconds(one)
            while around and start >= around[-1]:
                around.pop()
            if around and end > around[-1]:
                yield f"track {track}: {one['name']} at {one['ts']} us ends after the span around"
            around.append(end)


def group_tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the spans by process and track as they begin, outer ones first."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in events:
        if one["ph"] == "X":
            found.setdefault((one["pid"], one["tid"]), []).append(one)
    for spans in found.values():
        spans.sort(key=lambda one: (nanoseconds(one)[0], -one["dur"]))
    return found


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """Return begin and end of a span in whole nanoseconds, as Perfetto stores them."""
    start, length = (round(1000 * event[key]) for key in ("ts", "dur"))
    return start, start + length


def read_trace(path: str | Path) -> dict[str, Any]:
    """Read a trace that this program has written; StoreError names the first problem of others."""
    try:
        document = json.loads(Path(path).read_bytes())
        problems = find_problems(document)
    except OSError as error:
        problems = [f"cannot be read ({error.strerror})"]
    except (ValueError, RecursionError) as error:
        problems = [f"is no JSON ({error})"]
    if problems:
        more = f", and {len(problems) - 1} more" * (len(problems) > 1)
        raise StoreError(f"trace {path}: {problems[0]}{more}")
    return document
