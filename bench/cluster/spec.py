"""Describe an emulated cluster: its nodes, the ranks of a node, and their links."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from bench.errors import UsageError

# The name of `mm3d.launcher.CLUSTER_VARIABLE`.  This file is also read by processes that must not
# import NumPy, whose threads would keep them from making namespaces.
CLUSTER_ENV = "MM3D_CLUSTER"

NETWORK = "10.77.0"    # of the namespaces alone: no route leads out of them
SWITCH = "switch"      # the device that joins the links
FOLDER = "/dev/shm/mm3d-cluster"    # in the memory of the namespaces, seen from the head alone
MAX_NODES = 250
RATES = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
UNLIMITED = "unlimited"
LEAST_RATE, GREATEST_RATE = 1e3, 1e12    # bit/s: what the kernel's filter can be told
GREATEST_LATENCY = 10.0                  # seconds


@dataclass(frozen=True)
class Cluster:
    """Nodes on one switch, each with a link of its own to it; UsageError if it cannot be built.

    A node has at most `ranks` ranks.  Its `link` carries so many bit/s in each direction, None for
    no limit, and delays what the node sends by the latency, in seconds.
    """

    nodes: int
    ranks: int
    link: float | None = None
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"{self.nodes} nodes: 1 to {MAX_NODES} would do, as many as the "
                             f"emulated network has addresses")
        if self.ranks < 1:
            raise UsageError(f"{self.ranks} ranks a node: at least 1 would do")
        if self.link is not None and not LEAST_RATE <= self.link <= GREATEST_RATE:
            raise UsageError(f"a link of {self.link:g} bit/s: 1kbit to 1000Gbit would do, or "
                             f"{UNLIMITED}")
        if not 0 <= self.latency <= GREATEST_LATENCY:
            raise UsageError(f"a latency of {self.latency:g} s: 0 to {GREATEST_LATENCY:g} s would "
                             f"do")

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read nodes x ranks, link and latency, such as ``16x4``, ``16x4:200Mbit,1ms``."""
        found = re.fullmatch(r"(\d{1,9})x(\d{1,9})(?::([^,]*)(?:,(.*))?)?", text)
        if not found:
            raise UsageError(f"cluster {text!r}: NODESxRANKS, NODESxRANKS:LINK or "
                             f"NODESxRANKS:LINK,LATENCY would do, such as 16x4:200Mbit or "
                             f"16x4:1Gbit,1ms")
        return cls(int(found[1]), int(found[2]),
                   parse_rate(found[3] if found[3] is not None else UNLIMITED),
                   _parse_latency(found[4]) if found[4] is not None else 0.0)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Cluster | None:
        """Return the cluster in which this process runs, or None."""
        about = environ.get(CLUSTER_ENV)
        if not about:
            return None
        try:
            found = json.loads(about)
            return cls(found["nodes"], found["ranks"], found["link"], found["latency"])
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{CLUSTER_ENV}={about!r} describes no cluster: unset it, python -m "
                             f"bench cluster sets it") from error

    def to_environment(self, node: int | None = None) -> str:
        """Return the value of ``MM3D_CLUSTER`` for a process on a node, or on none (None)."""
        return json.dumps({"nodes": self.nodes, "ranks": self.ranks, "link": self.link,
                           "latency": self.latency, "node": node})

    @property
    def size(self) -> int:
        """The number of ranks that the cluster has room for."""
        return self.nodes * self.ranks

    def address(self, node: int) -> str:
        """Return the address of a node."""
        return f"{NETWORK}.{node + 2}"

    def host_name(self, node: int) -> str:
        """Return the host name of a node."""
        return f"node-{node:02d}"

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        latency = f",{_format_unit(self.latency, TIMES)}" if self.latency else ""
        return f"{self.nodes}x{self.ranks}:{rate_text(self.link)}{latency}"

    def describe(self) -> str:
        """Return a heading: "emulated cluster, 16 nodes x 4 ranks, 200 Mbit/s"."""
        node, rank = ("s" * (count != 1) for count in (self.nodes, self.ranks))
        link = f"{UNLIMITED} links" if self.link is None else rate_text(self.link, " ", "/s")
        latency = f", latency {_format_unit(self.latency, TIMES, ' ')}" if self.latency else ""
        return (f"emulated cluster, {self.nodes} node{node} x {self.ranks} rank{rank}, "
                f"{link}{latency}")


def parse_rate(text: str) -> float | None:
    """Read a rate in bit/s, such as ``200Mbit``; None for ``unlimited``."""
    if text == UNLIMITED:
        return None
    rate = _parse_unit(text, RATES)
    if rate is None:
        raise UsageError(f"link {text!r}: a rate in bit, kbit, Mbit or Gbit (per second) would "
                         f"do, such as 200Mbit, or {UNLIMITED}")
    return rate


def rate_text(link: float | None, space: str = "", per: str = "") -> str:
    """Format a rate, by default so that `parse_rate` reads it."""
    return UNLIMITED if link is None else _format_unit(link, RATES, space) + per


def _parse_latency(text: str) -> float:
    """Read a time in seconds, such as ``1ms``."""
    latency = _parse_unit(text, TIMES)
    if latency is None:
        raise UsageError(f"latency {text!r}: a time in us, ms or s would do, such as 1ms")
    return latency


def _parse_unit(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number with its unit; None if the text is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    if not found or found[2] not in units:
        return None
    return float(Decimal(found[1]) * Decimal(repr(units[found[2]])))


def _format_unit(value: float, units: Mapping[str, float], space: str = "") -> str:
    """Format a number in the largest unit that it reaches: "200Mbit"."""
    fitting = [unit for unit, size in units.items() if value >= size * (1 - 1e-9)]
    unit = fitting[-1] if fitting else next(iter(units))
    return f"{value / units[unit]:.6g}{space}{unit}"
