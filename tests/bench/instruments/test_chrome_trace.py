"""Traces for Chrome and Perfetto: the format's rules, nesting, and what they add up to."""
import json
import re

import pytest

import mm3d
from bench.__main__ import main, parser
from bench.command_line.publish import check_trace_file
from bench.errors import StoreError, UsageError
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments import chrome_trace, step_tracing, timing
from bench.instruments.clock import Clock
from bench.instruments.spans import Span, part_names
from bench.records import run_file
from bench.records.journal import Journal
from bench.reports.figures import style, time_shares
from bench.verbs import run
from mm3d.tracing.events import PHASES
from models import SIZES, Parallelism
from support import ROOT, run_ranks


def tracks(document: dict) -> dict[int, list[dict]]:
    """The complete events of each rank, of a trace that keeps the format's rules."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert chrome_trace.find_problems(json.loads(json.dumps(document))) == []
    assert {event["cat"] for event in document["traceEvents"] if event["ph"] == "X"} <= {
        "phase", "layer", "gemm", "collective", "wait"}
    return {track: events for (_, track), events in chrome_trace.group_tracks(
        document["traceEvents"]).items()}


def own_times(document: dict) -> dict[int, dict[tuple[str, str], float]]:
    """Own microseconds of each track by phase and part, as the figure of the trace has them."""
    found: dict[int, dict[tuple[str, str], float]] = {}
    for (track, events), pieces in zip(tracks(document).items(),
                                       time_shares.lanes_of(document["traceEvents"]).values()):
        own = found.setdefault(track, {})
        for event, piece in zip(events, pieces, strict=True):
            key = event["args"]["phase"], event["args"]["part"]
            own[key] = own.get(key, 0) + 1000 * piece.own
    return found


@pytest.mark.ranks(1, 4, slow=(8,))
@pytest.mark.parametrize("overlap", [0, 2])
def test_a_trace_has_what_the_grid_counts_and_what_the_file_says(comm, tmp_path, overlap):
    """Per rank: collectives of one step, and the parts that the record has."""
    grids = {1: (1, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2)}
    folder = comm.bcast(str(tmp_path))
    file = chrome_trace.trace_file(f"{folder}/trace.json", "a", 1)
    with Parallelism("3d", grids[comm.size], {"overlap": overlap}).on(comm, "numpy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES["few"])
        x, dy = model.random("input"), model.random("output gradient")
        step = timing.Step(lambda: model.forward(x)[1], lambda saved: model.backward(dy, saved),
                           comm, scheme.grid.backend.synchronize, model.zero_gradients)
        assert step_tracing.trace_steps(step, model, 0) == ([], None)
        scheme.grid.reset_traffic()
        spans, group = step_tracing.trace_steps(step, model, 2)
        calls = {key: traffic.calls // 2 for key, traffic in scheme.grid.traffic().items()}
        everyone = comm.gather(calls)
        chrome_trace.write_trace(file, spans, scheme.grid, step.clock, "a test")
    if comm.rank:
        assert group is None
        return
    document = json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert len(document["otherData"]["clock_offset_s"]) == comm.size
    seconds = group.variables["seconds"].values
    assert seconds.shape == (2, 2, comm.size, len(part_names("xyz"))) and seconds.min() >= 0
    assert group.variables["calls"].values[:, 0, 1:-3].sum() == sum(calls.values())
    found = tracks(document)
    assert sorted(found) == list(range(comm.size))
    for rank, events in found.items():
        seen: dict[tuple, int] = {}
        for event in events:
            if event["cat"] == "collective":
                key = event["args"]["axis"], event["args"]["collective"]
                seen[key] = seen.get(key, 0) + 1
                # Overlap gathers vectors ahead, before layers: these alone have no name.
                operand = event["args"].get("operand")
                assert operand in event["name"] if operand else (
                    overlap and event["args"]["phase"] == "forward")
        assert seen == everyone[rank]
        for (phase, part), microseconds in own_times(document)[rank].items():
            kept = 1e6 * seconds[1, PHASES.index(phase), rank, part_names("xyz").index(part)]
            # The other time has what the clock saw beside the spans, too.
            assert (microseconds <= kept + 1 if part == "other" else
                    microseconds == pytest.approx(kept, abs=1.0)), part
        names = {event["name"] for event in events}
        assert {"layers.0.attention.qkv", "layers.1.mlp.gelu", "forward"} <= names


def made_up_trace() -> dict:
    """Two ranks, each with a phase, and in it a product, a wait and a collective."""
    def span(name, kind, start, end, **of):
        return Span(name, kind, "forward", start, end, end - start, **of)
    track = [span("gemm 2 x 3 x 4", "gemm", 1.0, 2.5, flops=48),
             span("wait along y", "wait", 2.5, 3.0, axis="y", collective="all_gather"),
             span("all-gather A along y", "collective", 3.0, 3.75, axis="y",
                  collective="all_gather", operand="A", bytes=24),
             span("forward", "phase", 1.0, 4.0)]
    return chrome_trace.make_trace([track, track[2:]], ["rank 0", "rank 1"], "a test",
                                   {"title": "a test", "clock_offset_error_s": [0.0, 2e-6]})


BREAK = {    # what is changed, and what is said of it
    "no list": (lambda trace: trace.update(traceEvents={}), "there is no list traceEvents"),
    "unit": (lambda trace: trace.update(displayTimeUnit="s"), "displayTimeUnit 's'"),
    "kind": (lambda trace: trace["traceEvents"][-1].update(ph="B"), "ph is 'B'"),
    "no name": (lambda trace: trace["traceEvents"][0].pop("name"), "event 0: name is None"),
    "track": (lambda trace: trace["traceEvents"][-1].update(tid="1"), "tid is '1'"),
    "true": (lambda trace: trace["traceEvents"][-1].update(pid=True), "pid is True"),
    "time": (lambda trace: trace["traceEvents"][-1].update(ts=float("nan")), "ts and dur are"),
    "late": (lambda trace: trace["traceEvents"][-1].update(dur=10 ** 400), "ts and dur are"),
    "length": (lambda trace: trace["traceEvents"][-1].pop("dur"), "ts and dur are"),
    "category": (lambda trace: trace["traceEvents"][-1].pop("cat"), "cat is None"),
    "metadata": (lambda trace: trace["traceEvents"][1].update(args={}), "thread_name states {}"),
    "nameless": (lambda trace: trace["traceEvents"].pop(1), "track (0, 0) has no name"),
    "overlap": (lambda trace: trace["traceEvents"][-1].update(dur=9e6), "ends after the span"),
    "foreign": (lambda trace: [trace.pop("displayTimeUnit"), trace["traceEvents"].append(3)],
                "is no object")}


@pytest.mark.parametrize("name", BREAK)
def test_what_breaks_the_format_is_seen(name, tmp_path):
    change, said = BREAK[name]
    document = made_up_trace()
    assert chrome_trace.find_problems(document) == []
    change(document)
    assert any(said in problem for problem in chrome_trace.find_problems(document))
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"^trace .*t\.json: "):
        chrome_trace.read_trace(tmp_path / "t.json")


def test_the_figure_has_a_lane_a_rank_and_names_the_longest_spans(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert chrome_trace.write_file(path, made_up_trace()) == 0
    assert main(["report", str(path), "--figures"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'step.png'}\n"
    with style.figure_style():
        figure = time_shares.draw_trace(chrome_trace.read_trace(path))
        (panel,) = figure.axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["rank 0", "rank 1"]
    texts = {text.get_text() for text in panel.texts}
    assert texts == {"gemm 2 x 3 x 4", "wait along y", "all-gather A along y", "forward"}
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == {"matrix products: 750 ms", "collectives along y: 750 ms",
                      "waiting: 250 ms", "other: 1.25e+03 ms"}
    path.write_text("{")
    assert main(["report", str(path), "--figures"]) == 2
    assert "step.json: is no JSON" in capsys.readouterr().err


def test_three_verbs_write_traces_and_each_is_tested():
    """`run` and `measure matmul` below, `measure pipeline` in tests/bench/experiments."""
    writers = {path.stem for path in (ROOT / "bench").rglob("*.py")
               if re.search(r"chrome_trace\.write_\w+\(", path.read_text())}
    assert writers == {"run", "matmul", "pipeline"}


def test_several_cases_have_a_file_each():
    assert chrome_trace.trace_file("a/t.json", "weak-3d", 1).name == "t.json"
    assert str(chrome_trace.trace_file("a/t.json", "weak-3d", 2)) == "a/t-weak-3d.json"
    assert chrome_trace.trace_file("t", "weak-3d", 2).name == "t-weak-3d.json"


@pytest.mark.ranks(1, 4)
def test_a_trace_that_cannot_be_is_refused_on_every_rank(comm):
    with pytest.raises(UsageError, match="--traced 0: nothing would be traced"):
        check_trace_file("t.json", comm, 0)
    with pytest.raises(StoreError, match=(
            r"^--trace's folder /dev/null/a cannot be written \(Not a directory\): name "
            "another with --trace$")):
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
        assert len(tracks(json.loads((shared_tmp_path / good).read_text()))) == comm.size
        assert {path.name for path in shared_tmp_path.iterdir()} == {"out", bad, good}
        for path in out.glob("*.h5"):
            assert set(run_file.read_run(path).groups) == {
                "clock", "machine", "memory", "parts", "published", "traffic"}
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
def test_matmul_writes_a_trace(tmp_path):
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
