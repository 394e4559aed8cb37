"""Rows that the memory of a node cannot hold are left out before they begin."""

import math
import re
from dataclasses import replace

import pytest

import mm3d
from bench import verbs
from bench.__main__ import main, parser
from bench.cases.case import make_case
from bench.cases.paper import Row
from bench.cases.selection import rows_by_name
from bench.cluster.spec import CLUSTER_ENV, Cluster
from bench.instruments.available_memory import available_memory, total_memory
from bench.prediction import memory_fit, node_memory
from bench.prediction.node_memory import NodeMemory
from bench.records.journal import read_entries
from support import run_python

MIB = 2 ** 20
BLOCK = 32768
FEW = ("--preset", "tiny", "--repetitions", "1", "--max-repetitions", "1")


def row_of(name: str, ranks: int) -> Row:
    return next(row for row in rows_by_name(name, ranks) if row.gpus == ranks)


def needed(name: str, ranks: int, recompute: str = "none", preset: str = "tiny") -> float:
    """What a node with all ranks of a row needs, by dry runs."""
    one = make_case(row_of(name, ranks), preset)
    grid = mm3d.SCHEMES[one.row.scheme].default_grid(ranks)
    need = node_memory.estimate_by_dry_runs(one, grid, recompute, BLOCK)
    return need.on(NodeMemory(ranks, True, 0))


def said(name: str, ranks: int, *nodes: NodeMemory) -> str | None:
    one = make_case(row_of(name, ranks), "laptop")
    grid = mm3d.SCHEMES[one.row.scheme].default_grid(ranks)
    return node_memory.explain_shortage(one, grid, "none", list(nodes), BLOCK)


def test_a_policy_that_fits_is_named():
    none, selective = (needed("weak:1d:3d", 8, policy, "laptop")
                       for policy in ("none", "selective"))
    assert selective < none
    name = "weak:1d:3d"
    assert said(name, 8, NodeMemory(8, True, none)) is None
    line = said(name, 8, NodeMemory(8, True, none - 1))
    assert "--recompute selective would fit" in line and "on a node of 8 ranks" in line
    assert f"needs about {memory_fit.format_gib(none)} by an estimate" in line
    assert "no policy of recomputation fits" in said(name, 8, NodeMemory(8, True, selective / 2))


def test_every_node_has_to_hold_its_own_ranks():
    """The serial model is on rank 0's alone."""
    one = make_case(row_of("weak:1d", 8), "laptop")
    need = node_memory.estimate_by_dry_runs(one, (8,), "none", BLOCK)
    first, second = (NodeMemory(4, here, 4 * need.rank + here * need.check)
                     for here in (True, False))
    assert said("weak:1d", 8, first, second) is None
    assert said("weak:1d", 8, first, replace(second, available=second.available - 1))
    assert said("weak:1d", 8, replace(first, available=second.available), second)


@pytest.mark.ranks(1, slow=(8,))
def test_a_row_that_does_not_fit_is_not_begun(comm, shared_tmp_path, monkeypatch, capsys):
    """No rank makes a model of it; a row that nobody has named may be left out."""
    def run(out: str, *words: str) -> int:
        out = str(shared_tmp_path / out)    # of its own: a folder is claimed until the job ends
        arguments = parser(["run"]).parse_args(["run", *FEW, *words, "--out", out])
        return verbs.load_verb("run").run(arguments, comm)

    def made(*arguments, **options):
        raise AssertionError("a model was made")
    scheme = "serial" if comm.size == 1 else "1d"
    with monkeypatch.context() as patch:
        patch.setattr(mm3d, "Transformer", made)
        assert run("none", "--rows", f"weak:{scheme}", "--node-memory", "1 MiB") == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (comm.rank == 0)
    assert all(re.match(r"left out: weak .* needs about 0\.\d+ GiB by an estimate on a node", line)
               for line in lines)
    assert not list(shared_tmp_path.glob("*/*.h5"))
    if comm.size == 8:
        extra, most = ("--table", "weak", "--scheme", "1d", "--equal-tokens"), needed("weak:1d", 8)
        assert run("one", *extra, "--node-memory", f"{math.ceil(most)} B") == 0
        assert run("named", "--rows", "weak:1d:3d", "--node-memory", f"{math.ceil(most)} B") == 1
        assert len(list(shared_tmp_path.glob("*/*.h5"))) == 1


@pytest.mark.slow
@pytest.mark.limit(300)
def test_reproduce_measures_the_others_and_says_so(tmp_path):
    """An extra row is no failure, a row of the tables is."""
    words = ("-m", "bench", "reproduce", *FEW, "--out", str(tmp_path))
    done = run_python(*words, "--ranks", "8", "--table", "weak", "--scheme", "1d", "--node-memory",
                      f"{math.ceil(needed('weak:1d', 8))} B", "--equal-tokens", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("] done: ") == 1
    assert ("1 of 2 rows left out for lack of memory:\n  left out: weak 1-D 8 ranks, batch of "
            "3-D: needs about") in done.stderr
    assert "failed" not in done.stderr and "still to measure" not in done.stdout
    assert read_entries(tmp_path / "journal.jsonl")[-1]["outcome"] == "complete"
    done = run_python(*words, "--ranks", "1", "--scheme", "serial", "--node-memory",
                      f"{math.ceil(needed('strong:serial', 1))} B")
    assert done.returncode == 1 and done.stdout.count("] done: ") == 1
    assert "1 of 2 rows left out for lack of memory:\n  left out: weak" in done.stderr
    assert "Ended: 1 of 2 rows are in" in done.stderr


def test_a_limit_that_is_no_size_is_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    assert main(["reproduce", *FEW, "--node-memory", "much", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("'much' is no size of memory") == 1


@pytest.mark.parametrize("group, files, expected", [
    ("0::/", {}, 8 * MIB),
    ("0::/job/step", {"job/memory.max": "max", "job/step/memory.max": str(5 * MIB)}, 4 * MIB),
    ("0::/job/step", {"job/memory.max": str(3 * MIB), "job/step/memory.max": "max"}, 2 * MIB),
    ("0::/elsewhere", {"memory.max": str(6 * MIB)}, 5 * MIB),
    ("4:memory:/job", {"memory/job/memory.limit_in_bytes": str(7 * MIB)}, 6 * MIB),
    ("4:memory:/job", {"memory/job/memory.limit_in_bytes": str(2 ** 63 - 4096)}, 8 * MIB),
    ("5:cpu:/job", {"memory/job/memory.limit_in_bytes": str(MIB)}, 8 * MIB)])
def test_the_least_of_what_is_left(tmp_path, monkeypatch, group, files, expected):
    """Of the machine's memory and of the limits of control groups, in each of which 1 MiB is used
    beyond what the kernel would drop."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8192 kB\n")
    (tmp_path / "cgroup").write_text(group + "\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        old = "limit_in_bytes" in name
        (path.parent / ("memory.usage_in_bytes" if old else "memory.current")).write_text(
            str(2 * MIB))
        (path.parent / "memory.stat").write_text(f"total_inactive_file {MIB}\ninactive_file {MIB}")
    places = [tmp_path / name for name in ("meminfo", "cgroup", "groups")]
    assert available_memory(*places) == expected
    assert total_memory(places[0]) == 9000 * 1024
    monkeypatch.setenv(CLUSTER_ENV, Cluster(4, 2).to_environment())
    assert available_memory(*places) == expected // 4
    for path in places[:2]:
        path.unlink()
    if not files:
        assert available_memory(*places) is None
    assert total_memory(places[0]) is None
