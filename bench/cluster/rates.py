"""Change the rate of all links of the emulated cluster in which this process runs.

``python -m bench.cluster.rates RATE`` does it; ranks start it by `change_links`.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster import faults, namespaces
from bench.cluster.spec import Cluster, format_unit, parse_rate, RATES, UNLIMITED
from bench.errors import UsageError
from mm3d.child_process import CHILDREN_PRINT

ROOT = Path(__file__).resolve().parents[2]
HEAD = 1    # the process that built the cluster; its namespaces hold the switch


def rate_text(link: float | None) -> str:
    """Format a rate so that `bench.cluster.spec.parse_rate` reads it."""
    return UNLIMITED if link is None else format_unit(link, RATES)


def change_links(link: float | None) -> None:
    """Set the rate of every link of this cluster, in both directions, from a rank on any node.

    Nothing should be on its way: what waits in the queues of links is lost, and sent again.

    Parameters
    ----------
    link : float or None
        Bit/s; None for no limit.

    Raises
    ------
    OSError
        When the kernel refuses.
    """
    # A process of its own: this one may have threads, and must stay in its namespaces.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-m", "bench.cluster.rates", rate_text(link)],
                          env=os.environ | {"PYTHONPATH": path}, capture_output=True,
                          encoding=CHILDREN_PRINT, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines() or ["no reason is known"]
        raise OSError(f"the links of the emulated cluster cannot be set to {rate_text(link)}: "
                      f"{lines[-1]}")


def main(words: Sequence[str]) -> None:
    """Set the rate that the command line names.

    Raises
    ------
    UsageError
        When it names none, or this is no emulated cluster.
    """
    if len(words) != 1:
        raise UsageError(f"{' '.join(words)!r}: one rate would do, such as 100Mbit")
    link, cluster = parse_rate(words[0]), Cluster.from_environment()
    if cluster is None:
        raise UsageError("rates of links are changed inside an emulated cluster")
    namespaces.enter(HEAD)
    for node in range(cluster.nodes):
        faults.set_link_rate(node, link)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"error: {error}")
