"""Traces and locks across nodes that have networks, names and memory of their own."""
import json
import sys

import pytest

from support import ROOT, run_in_cluster, run_python, unless_refused

CLAIM = ("import sys, time; from bench.records.journal import Journal; from bench.errors import "
         "StoreError; from pathlib import Path\n"
         "try: Journal(Path(sys.argv[1])).claim(); print('claimed', flush=True); "
         "time.sleep(float(sys.argv[2]))\n"
         "except StoreError as error: print('refused', flush=True)")
pytestmark = [pytest.mark.slow, pytest.mark.limit(400)]


def test_a_trace_across_nodes(tmp_path):
    """The nodes share one kernel's clock, so that no event may be out of order at all."""
    done = unless_refused(run_python(
        "-m", "bench", "run", "--cluster=2x2:100Mbit", "--scheme=1d-sp", "--table=weak",
        "--preset=tiny", "--repetitions=1", "--max-repetitions=1", "--traced=1",
        f"--trace={tmp_path / 'trace.json'}", f"--out={tmp_path}", timeout=300, cwd=ROOT))
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for kind in ("wait", "collective"):
        tracks = [[one for one in events if one.get("cat") == kind and one["tid"] == rank]
                  for rank in range(4)]
        assert len(tracks[0]) > 10
        for together in zip(*tracks, strict=True):
            assert len({one["name"] for one in together}) == 1
            assert (max(one["ts"] for one in together)
                    <= min(one["ts"] + one["dur"] for one in together))


def test_a_folder_has_one_writer_on_all_nodes(tmp_path):
    """The nodes share a file system of this machine: what a network's does is not shown."""
    claim = f"{sys.executable} -c \"$CLAIM\" {tmp_path}"
    script = (f"(on-node 0 {claim} 600 & echo $! > {tmp_path}/first) | "
              f"(read line; echo $line; on-node 1 {claim} 0; kill $(cat {tmp_path}/first))"
              f"; on-node 1 {claim} 0")
    done = run_in_cluster("2x2:100Mbit", "sh", "-c", script, cwd=ROOT, timeout=300, CLAIM=CLAIM)
    assert done.stdout.split() == ["claimed", "refused", "claimed"], done.stderr
