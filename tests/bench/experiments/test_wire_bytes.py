"""What collectives and schemes send between nodes, beside the closed forms."""
import sys
from dataclasses import replace

import numpy as np
import pytest

from bench.cases.selection import select_rows
from bench.records.kinds.collectives import least_words, wire_parts
from bench.records.measurements import Group, Variable
from bench.reports import merit
from bench.reports.formats import render
from bench.validation import rules
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES
from records import invented, made_up, only_record, read_valid
from support import run_in_cluster

OVERHEAD = .05    # of headers, acknowledgements and barriers, over what has to be received


def test_least_words():
    """A direction inside nodes brings nothing; lines of another share the links."""
    shape, nodes = GridShape("xy", (2, 2)), [0, 0, 1, 1]
    for kind in COLLECTIVES:
        assert least_words(shape, "y", kind, 10, nodes) == [0, 0]
    assert [least_words(shape, "x", kind, 10, nodes) for kind in COLLECTIVES] == [
        [10, 10], [10, 10], [20, 20], [0, 20], [20, 0], [10, 10]]
    assert least_words(GridShape("x", (3,)), "x", "all_gather", 7, [0, 0, 1]) == [2, 5]


def test_the_table_of_the_wire():
    """The busiest node's medians beside what it has to receive; no row inside nodes."""
    dims = ("axis", "collective", "round", "way")
    received = np.array([[[[[11e6, 9e6], [20e6, 3e6]]]], [[[[1., 1.], [1., 1.]]]]])
    record = invented(
        "collectives", {"wire_size": 2 ** 23}, {"emulated_cluster": "2x1:200Mbit"},
        {"axis": ["x", "y"], "collective": ["all_gather"], "round": [0], "way": ["grid", "mpi"],
         "node": [0, 1]},
        {"wire_received": Variable(received, "byte", (*dims, "node")),
         "wire_sent": Variable(received / 2, "byte", (*dims, "node")),
         "wire_seconds": Variable(np.full((2, 1, 1, 2), .5), "s", dims),
         "wire_least": Variable(np.array([[[10e6, 8e6]], [[0., 0.]]]), "byte",
                                ("axis", "collective", "node"))}, [])
    text = render(wire_parts(record))
    line = next(line.split() for line in text.splitlines() if line.startswith("all_gather"))
    assert [word for word in line if word != "|"] == [
        "all_gather", "x", "10.00", "11.00", "10.0", "%", "5.50", "500.0",
        "20.00", "100.0", "%", "10.00", "500.0"]
    assert "8 MiB" in text and "cluster 2x1:200Mbit" in text and text.count("all_gather") == 1


def in_cluster(spec: str, *argv: str, **variables: str):
    """Run a command in an emulated cluster; the test is skipped where the kernel refuses."""
    nodes, _, ranks = spec.partition("x")
    done = run_in_cluster(f"{spec}:200Mbit", "mpirun", "-n", str(int(nodes) * int(ranks)),
                          sys.executable, *argv, timeout=400, **variables)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.limit(600)
def test_the_wire_carries_what_collectives_must_send(tmp_path):
    """By the default transport of a line of several ranks a node, in a valid file."""
    in_cluster("4x2", "-m", "bench", "measure", "collectives", "--grid", "8", "--least", "4194304",
               "--most", "4194304", "--repetitions", "1", "--max-repetitions", "1", "--out",
               str(tmp_path), MM3D_TRANSPORT="")
    run = only_record(tmp_path)
    assert run.configuration["transport"] == "hierarchical"
    received = np.median(run.variables["wire_received"].values, axis=2)[0, :, 0]
    least = run.variables["wire_least"].values[0]
    over = received.max(axis=-1) / least.max(axis=-1) - 1
    assert ((over > 0) & (over < OVERHEAD)).all(), dict(zip(COLLECTIVES, over))


@pytest.mark.slow
@pytest.mark.limit(600)
@pytest.mark.parametrize("spec, schemes", [("4x2", "3d,1d-sp"), ("2x4", "3d,1d,1d-sp"),
                                           ("2x2", "2d-pipelined")], ids=str)
def test_rows_have_their_bytes_on_the_wire(spec, schemes, tmp_path):
    """Each phase beside the closed form of the words that cross nodes, in a valid file."""
    rows = ",".join(f"weak:{name}" for name in schemes.split(","))
    in_cluster(spec, "-m", "bench", "run", "--rows", rows, "--preset", "tiny", "--hidden", "256",
               "--seq", "64", "--heads", "4", "--batch", "16", "--traced", "0",
               "--max-repetitions", "2", "--out", str(tmp_path), MM3D_TRANSPORT="hierarchical")
    paths = sorted(tmp_path.glob("*.h5"))
    assert len(paths) == len(rows.split(","))
    for path in paths:
        run = read_valid(path)
        found = {name: one.values for name, one in run.groups["wire"].variables.items()}
        over = found["received"].sum(axis=1) / found["least"].sum(axis=1) - 1
        assert ((over > 0) & (over < OVERHEAD)).all(), (path.name, over)
        assert "received from others, forward, on the wire" in render(merit.run_parts(run))


def test_the_wire_in_tables_and_rules():
    """What a node received less than it has to breaks a rule."""
    group = Group({"phase": PHASES, "node": [0, 1], "axis": ["x"]}, {
        "received": Variable(np.array([[5e6, 6e6], [1e6, 1e6]]), "byte", ("phase", "node")),
        "sent": Variable(np.array([[6e6, 5e6], [1e6, 1e6]]), "byte", ("phase", "node")),
        "least": Variable(np.array([[10e6], [4e6]]), "byte", ("phase", "axis"))})
    row = next(row for row in select_rows("weak", "3d") if row.gpus == 8)
    run = made_up(row)
    run = replace(run, groups=run.groups | {"wire": group},
                  environment=run.environment | {"emulated_cluster": "2x4:50Mbit"})
    text = render([merit.wire_table("Bytes", [(row, run)])])
    words = [word for word in text.splitlines()[-1].split() if word != "|"]
    assert words[:2] == ["3-D", "8"] and words[3:7] == ["10", "11", "10.0", "%"]
    [problem] = rules.check_wire(run)
    assert "wire/received of backward is 2e+06 bytes in all, less than the 4e+06" in problem
