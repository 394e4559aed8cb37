"""Change the rate of all links of the emulated cluster in which this process runs."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.cluster.spec import rate_text
from mm3d.child_process import CHILDREN_PRINT

ROOT = Path(__file__).resolve().parents[2]


def change_links(link: float | None) -> None:
    """Set the bit/s of all links of this cluster, None for no limit, from a rank on any node.

    Nothing should be on its way: what waits in the queues of links is lost, and sent again.
    Raises OSError when the kernel refuses.
    """
    # A process of its own: this one may have threads, and must stay in its namespaces.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-m", "bench.cluster.faults", "slow", "all", rate_text(link)]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
                          encoding=CHILDREN_PRINT, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines() or ["no reason is known"]
        raise OSError(f"the links of the emulated cluster cannot be set to {rate_text(link)}: "
                      f"{lines[-1]}")
