"""Traces for Chrome and Perfetto: the format's rules, nesting, and what they add up to."""
import json

import pytest

import mm3d
from bench.__main__ import parser
from bench.errors import StoreError, UsageError
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments import chrome_trace, step_tracing, timing
from bench.instruments.clock import Clock
from bench.instruments.spans import part_names
from bench.records import run_file
from bench.records.journal import Journal
from bench.verbs import run
from bench.command_line.publish import check_trace_file
from mm3d.tracing.events import PHASES
from models import SIZES, Parallelism
from support import run_ranks


def tracks(document: dict) -> dict[int, list[dict]]:
    """The complete events of each rank, after the format's rules have been checked."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    found: dict[int, list[dict]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert event["pid"] == 0 and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named.add(event["tid"])
            continue
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0
        assert event["cat"] in ("phase", "layer", "gemm", "collective", "wait")
        found.setdefault(event["tid"], []).append(event)
    assert named == set(found)
    return found


def nested(events: list[dict]) -> dict[tuple[str, str], float]:
    """Own microseconds by phase and part, of a track whose events lie in each other or apart."""
    own: dict[tuple[str, str], float] = {}
    around: list[tuple[int, int, tuple]] = []
    for event in events:
        start = round(1000 * event["ts"])
        end = start + round(1000 * event["dur"])
        while around and start >= around[-1][1]:
            around.pop()
        key = event["args"]["phase"], event["args"]["part"]
        if around:
            assert around[-1][0] <= start <= end <= around[-1][1], event["name"]
            own[around[-1][2]] -= (end - start) / 1000
        own[key] = own.get(key, 0) + (end - start) / 1000
        around.append((start, end, key))
    return own


@pytest.mark.ranks(1, 4, 8)
def test_a_trace_has_what_the_grid_counts_and_what_the_file_says(comm, tmp_path):
    """Per rank: collectives of one step, and the parts that the record has."""
    grids = {1: (1, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2)}
    folder = comm.bcast(str(tmp_path))
    file = chrome_trace.trace_file(f"{folder}/trace.json", "a", 1)
    with Parallelism("3d", grids[comm.size]).on(comm, "numpy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES["few"])
        x, dy = model.random("input"), model.random("output gradient")
        step = timing.Step(lambda: model.forward(x)[1], lambda saved: model.backward(dy, saved),
                           comm, scheme.grid.backend.synchronize, model.zero_gradients)
        scheme.grid.reset_traffic()
        spans, group = step_tracing.trace_steps(step, model, 1)
        calls = {key: traffic.calls for key, traffic in scheme.grid.traffic().items()}
        everyone = comm.gather(calls)
        chrome_trace.write_trace(file, spans, scheme.grid, step.clock, "a test")
    if comm.rank:
        return
    document = json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert len(document["otherData"]["clock_offset_s"]) == comm.size
    seconds = group.variables["seconds"].values[0]
    found = tracks(document)
    assert sorted(found) == list(range(comm.size))
    for rank, events in found.items():
        seen: dict[tuple, int] = {}
        for event in events:
            if event["cat"] == "collective":
                key = event["args"]["axis"], event["args"]["collective"]
                seen[key] = seen.get(key, 0) + 1
                assert event["args"]["operand"] in event["name"]
        assert seen == everyone[rank]
        for (phase, part), microseconds in nested(events).items():
            if part != "other":    # which has what the clock saw beside the spans, too
                kept = seconds[PHASES.index(phase), rank, part_names("xyz").index(part)]
                assert microseconds == pytest.approx(1e6 * kept, abs=1.0), part
        names = {event["name"] for event in events}
        assert {"layers.0.attention.qkv", "layers.1.mlp.gelu", "forward"} <= names


def test_what_does_not_nest_is_seen():
    """The test's own check: two events that overlap are refused."""
    event = {"ts": 0.0, "dur": 5.0, "name": "a", "args": {"phase": "forward", "part": "gemm"}}
    with pytest.raises(AssertionError):
        nested([event, {**event, "ts": 2.0, "dur": 5.0}])


def test_several_cases_have_a_file_each():
    assert chrome_trace.trace_file("a/t.json", "weak-3d", 1).name == "t.json"
    assert str(chrome_trace.trace_file("a/t.json", "weak-3d", 2)) == "a/t-weak-3d.json"
    assert chrome_trace.trace_file("t", "weak-3d", 2).name == "t-weak-3d.json"


@pytest.mark.ranks(1, 4)
def test_a_trace_that_cannot_be_is_refused_on_every_rank(comm):
    with pytest.raises(UsageError, match="--traced 0: nothing would be traced"):
        check_trace_file("t.json", comm, 0)
    with pytest.raises(StoreError, match=(
            r"^the trace's folder /dev/null/a cannot be written \(Not a directory\): name another "
            "with --trace$")):
        check_trace_file("/dev/null/a/t.json", comm, 1)


@pytest.mark.ranks(1, slow=(4,))
def test_a_trace_that_cannot_be_written_costs_no_row(comm, shared_tmp_path, capsys):
    """It is named, all rows are measured and journalled as done, and the status is not 0."""
    out, bad = shared_tmp_path / "out", f"t-weak-1d-sp-p{comm.size:03d}-tiny.json"
    arguments = parser(["run"]).parse_args([
        "run", "--preset", "tiny", "--scheme", "1d-sp", "--repetitions", "1", "--max-repetitions",
        "1", "--out", str(out), "--trace", str(shared_tmp_path / "t.json")])
    if comm.rank == 0:
        (shared_tmp_path / bad).mkdir()
    assert run.run(arguments, comm) == 1
    said = capsys.readouterr().out.splitlines()
    if comm.rank == 0:
        assert f"not written: the trace {shared_tmp_path / bad} (Is a directory)" in said
        assert sum(line.startswith("done: ") for line in said) == 2 == len(list(out.glob("*.h5")))
        good = bad.replace("weak", "strong")
        assert {path.name for path in shared_tmp_path.iterdir()} == {"out", bad, good}
        entries = Journal(out).entries()
        assert [entry["outcome"] for entry in entries] == ["done", "done"]


# By hand, from the three forms of SUMMA: the collectives of each phase, with what they carry.
SUMMA = {
    "ab": ({("broadcast", "y", "A"), ("broadcast", "x", "B")},
           {("broadcast", "x", "B"), ("reduce", "y", "dA"),
            ("broadcast", "y", "A"), ("reduce", "x", "dB")}),
    "abt": ({("broadcast", "x", "B"), ("reduce", "y", "C")},
            {("broadcast", "y", "dC"), ("broadcast", "x", "B"), ("reduce", "x", "dB")}),
    "atb": ({("broadcast", "y", "A"), ("reduce", "x", "C")},
            {("broadcast", "x", "dC"), ("reduce", "y", "dA"), ("broadcast", "y", "A")})}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", SUMMA)
def test_the_matrices_that_summa_moves_have_names(comm, form):
    grid = product_grid("2d", comm, backend="numpy")
    problem = Problem("2d", form, grid, (6, 10, 14), "float64")
    spans = step_tracing.trace_product(problem, PHASES, Clock(comm))
    problem.grid.free()
    for phase, expected in zip(PHASES, SUMMA[form]):
        assert {(span.collective, span.axis, span.operand) for span in spans
                if span.phase == phase and span.kind == "collective"} == expected


@pytest.mark.slow
def test_run_and_matmul_write_traces(tmp_path):
    done = run_ranks(4, "-m", "bench", "measure", "matmul", "--shape", "24,20,28", "--scheme",
                     "3d",
                     "--grid", "1x2x2", "--form", "abt", "--backward", "--repetitions", "1",
                     "--max-repetitions", "1", "--calls", "1", "--out", str(tmp_path),
                     "--trace", str(tmp_path / "m.json"))
    assert done.returncode == 0, done.stderr
    names = [event["name"] for event in tracks(json.loads(
        (tmp_path / "m.json").read_text()))[3] if event["cat"] in ("phase", "collective")]
    assert names == ["forward", "all-gather A along y", "reduce-scatter C along z", "backward",
                     "all-gather dC along z", "reduce-scatter dA along y",
                     "all-gather A along y"]
    done = run_ranks(8, "-m", "bench", "run", "--table", "weak", "--scheme", "3d,1d", "--preset",
                     "tiny", "--repetitions", "1", "--max-repetitions", "1", "--traced", "1",
                     "--out", str(tmp_path), "--trace", str(tmp_path / "t.json"))
    assert done.returncode == 0, done.stderr
    for scheme in ("1d", "3d"):
        file = tmp_path / f"t-weak-{scheme}-p008-tiny.json"
        assert len(tracks(json.loads(file.read_text()))) == 8
    runs = [run_file.read_run(path) for path in tmp_path.glob("weak-*.h5")]
    assert [set(run.groups) for run in runs] == [{"parts", "machine", "memory"}] * 2
