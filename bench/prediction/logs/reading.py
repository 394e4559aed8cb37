"""Read what nccl-tests, the OSU micro-benchmarks and the Intel MPI Benchmarks (IMB) print.

The columns are found by their names, so that rows of old and new versions are read.  Of a log that
other programs have written into, only rows under a known heading count.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from bench.prediction.seconds import ring_bytes
from mm3d.tracing.events import Collective

MESSAGE, STREAM = "message", "stream"    # one at a time, or many under way, between two ranks
# Kinds of series by the letters of their names in the logs.
KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
         "broadcast": "broadcast", "bcast": "broadcast", "reduce": "reduce",
         "alltoall": "all_to_all", "alltoallpersonalizedexchange": "all_to_all",
         "latency": MESSAGE, "pingpong": MESSAGE, "sendrecv": MESSAGE, "bandwidth": STREAM}
# MPI's benchmarks give the bytes of one block of these, nccl-tests those of all.
BLOCKS = ("all_gather", "all_to_all")
NCCL, OSU, IMB = "nccl-tests", "OSU", "IMB"
RANK = re.compile(r"#\s+Rank\s+\d+\b.*\bon\s+(\S+)\s+device\b")
PERF = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|reduce|"
                  r"sendrecv|gather|scatter|hypercube)_perf")
TITLE = re.compile(r"# OSU MPI\S* (.+?) Test\b")
BENCHMARK = re.compile(r"#\s*Benchmarking\s+(\S+)")
PROCESSES = re.compile(r"#\s*#processes\s*=\s*(\d+)")
MOST_BYTES = 2 ** 60    # of a message
LEAST = 1e-30    # of a time or a rate that is given, whatever its unit; its inverse is the most
TOLERANCE = 0.02    # of the printed bus bandwidth, which is rounded


@dataclass(frozen=True)
class LogFile:
    """Name a log, with what it may not say: its link, "node" or "network", and number of ranks.

    They are "" and 0 if the log says them.
    """

    path: str
    link: str = ""
    ranks: int = 0

    @property
    def name(self) -> str:
        """Return the file's name without its folder."""
        return re.split(r"[/\\]", self.path)[-1]


@dataclass(frozen=True)
class Series:
    """Hold the times of one benchmark: points of bytes of the whole array, and seconds.

    Its kind is a collective, `MESSAGE` or `STREAM`, and its link "node" or "network".
    """

    file: str
    program: str
    kind: str
    link: str
    ranks: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Columns:
    """Describe the rows under a heading: the place of the time, and what they are of."""

    program: str
    kind: str
    ranks: int
    names: list[str]
    line: int
    points: list[tuple[float, float]] = field(default_factory=list)


class LogReader:
    """Read one log: its series, and a line for each row, or heading, that is not used.

    `hosts` are the ranks of each host, where the log lists them.
    """

    def __init__(self, given: LogFile) -> None:
        self.given, self.series, self.problems = given, [], []
        self.hosts: Counter[str] = Counter()
        self._title, self._ranks, self._open = "", 0, None
        found = PERF.search(given.name)
        self._perf = found[1] if found else ""

    def read(self, text: str) -> None:
        """Read the lines of a text."""
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if found := PERF.search(line):
                self._perf = found[1]
            if stripped.startswith("#"):
                self._head(number, stripped)
            elif self._open and stripped[:1].isdecimal() and len(stripped.split()) > 1:
                self._row(number, stripped.split())
        self._close()

    def _problem(self, number: int, what: str) -> None:
        self.problems.append(f"{self.given.name}:{number}: {what}")

    def _head(self, number: int, line: str) -> None:
        """Read a line of a heading."""
        words = [word.lstrip("#") for word in line.lstrip("#").split()]
        if "Using devices" in line:
            self.hosts.clear()
        elif found := RANK.match(line):
            self.hosts[found[1]] += 1
        elif found := TITLE.match(line):
            self._close()
            self._title, self._ranks = found[1], 0
        elif found := BENCHMARK.match(line):
            self._close()
            self._title, self._ranks = found[1], 0
        elif found := PROCESSES.match(line):
            self._ranks = int(found[1])
        elif words[:1] == ["size"] and "algbw" in words:
            self._begin(number, NCCL, self._perf, words)
        elif words[:1] == ["Size"] and self._title:
            name = re.sub(r" Latency$", "", self._title)
            self._begin(number, OSU, name, ["size", "MB/s" if "MB/s" in line else "us"])
        elif words[:2] == ["bytes", "repetitions"]:
            self._begin(number, IMB, self._title, words)

    def _begin(self, number: int, program: str, name: str, words: list[str]) -> None:
        """Begin the rows under a heading, of a benchmark of this name."""
        self._close()
        kind, link = KINDS.get(re.sub("[^a-z]", "", name.lower()), ""), self._link(program)
        ranks = 2 if kind in (MESSAGE, STREAM) else (
            self.hosts.total() if program == NCCL else self._ranks) or self.given.ranks
        if not name:
            self._problem(number, "the log does not name its collective: a file name such as "
                                  "all_reduce_perf.txt would do")
        elif not kind:
            self._problem(number, f"{program}'s {name} says nothing of a link, and is left out")
        elif not ranks or not link:
            unsaid = [*["how many ranks ran"] * (not ranks),
                      *["whether they were on one node"] * (not link)]
            self._problem(number, f"{program} does not say {' or '.join(unsaid)}: "
                                  f"{link or 'network'}{'' if ranks else ':16'}="
                                  f"{self.given.path} would do")
        elif ranks < 2:
            self._problem(number, f"{name} of one rank, which sends nothing, is left out")
        else:
            self._open = Columns(program, kind, ranks, words, number)

    def _link(self, program: str) -> str:
        """Return the link that is measured; "" if nobody says."""
        if program == NCCL and self.hosts:
            return "network" if len(self.hosts) > 1 else "node"
        return self.given.link

    def _row(self, number: int, words: list[str]) -> None:
        """Read a row of numbers."""
        head = self._open
        if head.program == OSU:
            words = words[:2]
        if len(words) != len(head.names):
            return self._problem(number, f"{len(words)} columns, where the heading on line "
                                         f"{head.line} has {len(head.names)}")
        try:
            size, value = int(words[0]), float(words[self._place(head.names)])
        except ValueError:
            return self._problem(number, f"no numbers in {' '.join(words)!r}")
        if size == 0 and head.kind != MESSAGE:
            return None    # which moves nothing
        if not LEAST < value < 1 / LEAST or not 0 <= size <= MOST_BYTES:
            return self._problem(number, f"{size} bytes, {value:g}: no size and time")
        seconds = size / value / 1e6 if head.kind == STREAM else value / 1e6
        whole = size * head.ranks if head.program != NCCL and head.kind in BLOCKS else size
        if head.program == NCCL and (wrong := self._contradiction(words, size, seconds)):
            return self._problem(number, wrong)
        return head.points.append((float(whole), seconds))

    @staticmethod
    def _place(names: list[str]) -> int:
        """Return the place of the time, or of the rate, among columns: IMB's slowest rank's."""
        return next(names.index(name) for name in ("time", "t_max[usec]", "t[usec]", "us", "MB/s")
                    if name in names)

    def _contradiction(self, words: list[str], size: int, seconds: float) -> str:
        """Say what contradicts itself in a row of nccl-tests; "" if nothing does."""
        head = self._open
        found = dict(zip(reversed(head.names), reversed(words)))    # of the first of two sets
        if found.get("wrong", "0") not in ("0", "N/A"):
            return f"{found['wrong']} wrong results"
        moved = ring_bytes(Collective(head.kind, "", head.ranks, 1, size))
        try:
            printed, computed = float(found["busbw"]), moved / seconds / 1e9
        except (KeyError, ValueError):
            return ""
        if printed >= 1 and abs(computed / printed - 1) > TOLERANCE:
            return (f"busbw is {printed:g} GB/s, where {head.kind} of {head.ranks} ranks has "
                    f"{computed:.4g}")
        return ""

    def _close(self) -> None:
        """End the rows under a heading."""
        head, self._open = self._open, None
        if head and head.points:
            self.series.append(Series(self.given.name, head.program, head.kind,
                                      self._link(head.program), head.ranks, tuple(head.points)))
