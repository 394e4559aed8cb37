"""What fits the memory of a rank and of nodes, and which policy of recomputation makes it fit."""
import math
import re
from dataclasses import replace

import pytest

import mm3d
from bench import verbs
from bench.__main__ import main, parser
from bench.cases.case import make_case
from bench.cases.paper import Row
from bench.cases.selection import rows_by_name, select_rows
from bench.cluster.spec import CLUSTER_ENV, Cluster
from bench.errors import UsageError
from bench.instruments.available_memory import available_memory, total_memory
from bench.prediction import memory_fit, node_memory
from bench.prediction.node_memory import NodeMemory
from bench.records.journal import read_entries
from bench.reports.merit import recomputation_notes
from mm3d.model.recomputation import POLICIES
from mm3d.model.stack import Stack
from mm3d.tracing import dry_run
from records import made_up
from support import run_python

SIZES = dict(layers=4, hidden=64, heads=4, batch=8, seq=32)
GRID = (2, 2, 2)


def test_sizes_of_memory():
    for text, count in (("16 GB", 16 * 10 ** 9), ("15GiB", 15 * 2 ** 30), ("1.5 KiB", 1536),
                        ("7000000", 7000000), ("7 B", 7)):
        assert memory_fit.parse_size(text) == count
    for text in ("", "GB", "-1 GB", "16 gigabytes", "0 GB", "16 iB", "1e9", "80"):
        with pytest.raises(UsageError, match="give it as 16 GB"):
            memory_fit.parse_size(text)


def test_the_policy_is_the_first_that_fits_by_a_dry_run():
    """One byte less than a policy needs, and another one is found."""
    found = {name: memory_fit.predict_peak("3d", GRID, Stack(**SIZES, recompute=name))
             for name in POLICIES}
    for name in ("none", "selective", "full"):
        assert dry_run.trace_step("3d", 8, GRID, **SIZES, recompute=name).peak == found[name]
        assert memory_fit.choose_policy("3d", GRID, Stack(**SIZES), found[name]) == (
            name, found[name])
        other, peak = memory_fit.choose_policy("3d", GRID, Stack(**SIZES), found[name] - 1)
        assert other != name and (other is None or peak == found[other] < found[name])
    none, least = memory_fit.choose_policy("3d", GRID, Stack(**SIZES), min(found.values()) // 2)
    assert none is None and least <= 1.1 * min(found.values())


def test_dry_says_whether_it_fits_and_what_would(capsys):
    options = ["dry", "--ranks", "8", *(f"--{name}={n}" for name, n in SIZES.items())]
    full = memory_fit.predict_peak("3d", GRID, Stack(**SIZES, recompute="full"))
    assert main([*options, f"--memory={full} B"]) == 1
    assert "it does not fit, but --recompute full does" in capsys.readouterr().out
    assert main([*options, f"--memory={full} B", "--recompute", "full"]) == 0
    printed = capsys.readouterr().out
    assert "it fits" in printed and "of these again" in printed and "(again)" in printed
    assert main([*options, "--memory=1 KB"]) == 1
    assert "no policy fits" in capsys.readouterr().out
    assert main([*options, "--memory=lots"]) == 2
    with pytest.raises(SystemExit):
        main([*options, "--recompute", "some"])
    assert "none, selective, full, or uniform:n" in capsys.readouterr().err


def rows(name="3d"):
    return made_up(next(row for row in select_rows("weak", name) if row.gpus == 64))


def test_tables_say_which_rows_recompute():
    run, other = rows(), rows("1d")
    both = run, other
    assert recomputation_notes(both) == []
    run.configuration["recompute"] = "full"
    assert "full: weak 3-D 64" in recomputation_notes(both)[0]
    run.configuration["equal_tokens"] = "1d"
    assert "full: weak 3-D 64 with the batch of 1-D" in recomputation_notes(both)[0]


@pytest.mark.parametrize("dtype, each", [("float16", (2, 4, 4, 8)), ("bfloat16", (2, 4, 4, 8)),
                                         ("float32", (4, 4, 0, 8)), ("float64", (8, 8, 0, 16))])
def test_the_optimizer_has_masters_moments_and_wide_gradients(dtype, each):
    for zero, last in enumerate((0, 2, 3, 4)):    # kinds of the state that 4 shards divide
        parts = [1000 / (4 if 4 - k <= last else 1) for k in range(4)]
        assert [*memory_fit.state_by_kind(dtype, 1000, zero, 4).values()] == [
            count * size for count, size in zip(parts, each)]


def test_a_training_fits_with_its_optimizer_or_not_at_all(capsys):
    command = ["dry", "--ranks", "1", "--scheme", "serial", "--hidden", "256", "--heads", "4",
               "--layers", "2", "--batch", "1", "--seq", "16"]
    said = {}
    for size, data in (("40 MB", ()), ("40 MB", ("--data", "64")), ("20 MB", ("--data", "64")),
                       ("10 MB", ("--data", "64"))):
        for place in (command.index("--ranks"), command.index("--batch")):
            command[place + 1] = data[-1] if data else "1"    # of all replicas
        status = main([*command, "--memory", size, *data])
        said[size, bool(data)] = status, capsys.readouterr().out
    status, out = said["40 MB", False]
    assert status == 0 and "it fits without an optimizer" in out
    status, out = said["40 MB", True]
    assert status == 0 and out.count("which fits") == 2 and "it fits" not in out
    status, out = said["20 MB", True]
    assert status == 0 and "ZeRO 0, which does not fit" in out and "ZeRO 1, which fits" in out
    status, out = said["10 MB", True]
    assert status == 1 and out.count("which does not fit") == 2


def test_plans_of_stages_count_the_optimizer(capsys):
    found = []
    for zero in ("0", "1"):
        assert main(["plan", "--ranks", "128", "--stages", "2", "--data", "16", "--zero", zero,
                     "--hidden", "512", "--layers", "4", "--batch", "128", "--seq", "16",
                     "--top", "1", "--format", "csv"]) == 0
        out = capsys.readouterr().out
        row, = (line.split(",") for line in out.splitlines() if line.split(",")[-1] == "yes")
        found.append(float(row[-2]) * 2 ** 30)
    parameters = 4 * 12 * 512 ** 2 / 8    # of a rank, and no biases
    assert found[0] - found[1] == pytest.approx(8 * parameters * 15 / 16, rel=0.02)


MIB = 2 ** 20
BLOCK = 32768
FEW = ("--preset", "tiny", "--repetitions", "1", "--max-repetitions", "1")


def row_of(name: str, ranks: int) -> Row:
    return next(row for row in rows_by_name(name, ranks) if row.gpus == ranks)


def needed(name: str, ranks: int, recompute: str = "none", preset: str = "tiny") -> float:
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
