"""A machine shrunk with a model's lengths keeps the ratio of computing to communicating."""
import math
from dataclasses import replace

import msgspec
import pytest

from bench.__main__ import parser
from bench.cases.case import make_case
from bench.cases.paper import load_tables
from bench.cases.selection import equal_token_rows, select_rows
from bench.cases.variants import Variant
from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.instruments.placement import direction_order
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import collective_terms, work_seconds
from bench.prediction.similarity import (emulating_machine, shrink_machine, split_seconds,
                                         work_scale)
from bench.records import run_file
from bench.reports import certainty
from bench.reports import emulated, emulated_tables
from bench.reports.predicted_rows import of_case
from bench.reports.formats import render
from bench.validation.files import list_warnings
from bench.verbs import reproduce
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, Gemm, MemoryPass, PHASES
from records import emulated_run, format_tables

LONGHORN = load_machine("longhorn")
EMULATED = load_tables().presets["emulated"]
CLUSTER = Cluster.parse(EMULATED.cluster)


def row_of(table: str, scheme: str, ranks: int):
    return next(row for row in select_rows(table, scheme) if row.gpus == ranks)


def trace_of(row, preset: str):
    one = make_case(row, preset, layers=1)
    return one.sizes, dry_run.trace_step(row.scheme, row.gpus, **one.sizes)


@pytest.mark.parametrize("table, scheme, ranks", [("weak", "3d", 8), ("strong", "1d", 64),
                                                  ("strong", "2d", 16)])
def test_every_row_is_similar_to_the_published_one(table, scheme, ranks):
    """Words and waited seconds are divided by the same square, so links of one rate fit all."""
    row = row_of(table, scheme, ranks)
    shrink = EMULATED.of_table(table).shrink
    (whole, paper), (small, here) = (trace_of(row, preset) for preset in ("paper", "emulated"))
    assert whole.hidden == shrink * small.hidden and whole.seq == shrink * small.seq
    for phase in PHASES:
        moved = [sum(times * event.bytes for event, times in one.count(Collective, phase).items())
                 for one in (paper, here)]
        # Biases and sums of rows are divided by less.
        assert moved[0] == pytest.approx(shrink ** 2 * moved[1], rel=1e-2)
    shrunk, seconds = shrink_machine(LONGHORN, shrink), []
    for machine, one in ((LONGHORN, paper), (shrunk, here)):
        seconds.append([sum(times * work_seconds(machine, event)
                            for (when, _, event), times in one.events.items()
                            if when == phase and isinstance(event, (Gemm, MemoryPass)))
                        for phase in PHASES])
    assert seconds[0] == pytest.approx([shrink ** 2 * each for each in seconds[1]], rel=1e-2)


def test_a_step_keeps_the_share_of_its_work():
    """Where all that is sent crosses the links, as in 1-D on 64 ranks, by equal collectives."""
    row = row_of("strong", "1d", 64)
    scale = work_scale(LONGHORN, CLUSTER)
    assert scale == pytest.approx(12.5e9 * 0.8 / (6.25e6 * 1448 / 1514))
    shrink = EMULATED.of_table("strong").shrink
    shares = []
    likewise = msgspec.structs.replace(LONGHORN, transport="hierarchical")
    for preset, machine in (("paper", likewise), ("emulated", emulating_machine(
            LONGHORN, shrink, scale, CLUSTER))):
        found = split_seconds(machine, trace_of(row, preset)[1]).values()
        work, moving = (sum(each) for each in zip(*found))
        shares.append(work / (work + moving))
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    assert 0.1 < shares[0] < 0.9


def test_launches_of_kernels_are_work():
    sizes, trace = trace_of(row_of("weak", "1d", 8), "emulated-tiny")
    assert LONGHORN.launch_seconds and any(moving for _, moving in split_seconds(
        LONGHORN, trace).values())
    alone = split_seconds(LONGHORN, dry_run.trace_step("serial", 1, **sizes))
    assert [moving for _, moving in alone.values()] == [0.0, 0.0]


def test_links_without_a_limit_have_no_scale():
    with pytest.raises(UsageError, match="give --work-scale"):
        work_scale(LONGHORN, Cluster.parse("16x4:unlimited"))


def test_all_rows_are_predicted_before_they_are_measured():
    rows = [row_of("strong", scheme, 64) for scheme in ("1d", "2d", "3d")]
    cases = [make_case(row, "emulated-tiny", Variant(work="wait")) for row in rows]
    text = render(emulated_tables.tables_of(
        [of_case(one, LONGHORN, 1600.0, CLUSTER) for one in cases], measured=False))
    assert "emulated cluster, 16 nodes x 4 ranks, 50 Mbit/s: rows" in text
    assert [line.split()[:4] for line in text.splitlines() if line.startswith("over")] == [
        ["over", "1-D", "64", "1.53"], ["over", "2-D", "64", "1.38"]]
    one = of_case(cases[0], LONGHORN, work_scale(LONGHORN, CLUSTER), CLUSTER)
    # A step here, times to_paper, is one of 24 layers on the machine, whose rings pass 63 of 64
    # blocks through each link, where 60 come from other nodes.
    assert 60 / 63 < one.predicted_average / one.original_average < 1


@pytest.mark.parametrize("slowed", [1.0, 4.0])
def test_measured_rows_are_set_beside_published_and_predicted_ones(tmp_path, slowed):
    """With the seconds that are predicted, times what is slowed, the error is 0."""
    for scheme in ("1d", "3d"):
        run_file.write_run(emulated_run(row_of("weak", scheme, 8), slowed, slowed), tmp_path,
                           scheme)
    lines = [line.split() for line in format_tables(tmp_path).splitlines()]
    rows = [line for line in lines if line[:2] in (["1-D", "8"], ["3-D", "8"])
            and {"+0%", "-0%"} & {*line}]
    assert len(rows) == 2 and all(line[6] == line[7] for line in rows)
    assert {(line[11], line[12]) for line in rows} == {
        (f"{slowed:g}", f"{100 * 0.1 / slowed:.0f}%" if slowed == 1 else "2%")}
    one = next(line for line in lines if line[:3] == ["over", "1-D", "8"] and len(line) == 11)
    assert one[5] == one[6] and one[3] == "0.587" and one[9:] in (["1", "+0%"], ["1", "-0%"])


def test_rows_of_too_much_software_are_marked(tmp_path):
    """And the ratios of which they are a side; of files that do not tell, too."""
    for scheme, software in (("1d", 0.3), ("3d", 0.2)):
        run = emulated_run(row_of("weak", scheme, 8), 1.0, software=software)
        run_file.write_run(run, tmp_path, scheme)
    text = format_tables(tmp_path)
    assert "30.0%*" in text and " 20% " in text.replace("20%\n", "20% ")
    one = next(line.split() for line in text.splitlines()
               if line.split()[:3] == ["over", "1-D", "8"] and len(line.split()) == 11)
    assert one[6] == "3.20*"
    run = emulated_run(row_of("weak", "1d", 8), 1.0)
    del run.groups["software"]
    assert not emulated.of_run(row_of("weak", "1d", 8), run).quotable


def test_speed_ups_have_intervals_over_runs(tmp_path):
    for k, seconds in enumerate((1.0, 3.0)):
        for scheme in ("1d", "3d"):
            run = emulated_run(row_of("weak", scheme, 8), seconds if scheme == "1d" else 1.0)
            run_file.write_run(replace(run, created=f"2030-01-02T03:04:0{k}+00:00"), tmp_path,
                               f"{scheme}-{k}")
    one = next(line.split() for line in format_tables(tmp_path).splitlines()
               if line.split()[:3] == ["over", "1-D", "8"] and len(line.split()) == 11)
    # Batches of 60 and 192 sequences; steps of 1 and 3 seconds over steps of 1.
    assert [float(word) for word in one[6:9]] == pytest.approx([3.2 * 3 ** .5, 3.2, 9.6], rel=1e-2)
    assert one[9] == "2"


def test_a_short_emulation_has_the_rows_of_the_speed_ups():
    command = parser(["reproduce"]).parse_args(["reproduce", "--preset=emulated-tiny"])
    assert {row.gpus for row in reproduce.rows_of_options(command)} == {8, 64}
    command.ranks = [16]
    assert {row.gpus for row in reproduce.rows_of_options(command)} == {16}
    command.ranks, command.preset = None, "emulated"
    assert len(reproduce.rows_of_options(command)) == 18


def test_crowded_rows_that_wait_say_so(tmp_path):
    """Ranks share the cores for what is not waited for: nothing is tested of such rows."""
    runs = [emulated_run(row_of("weak", scheme, 8), 3.0) for scheme in ("1d", "3d")]
    for n, run in enumerate(runs):
        run_file.write_run(run, tmp_path, str(n))
    text = " ".join(format_tables(tmp_path).split())
    shared = "ranks share 4 cores for all that is not waited for"
    assert f"real messages, modelled arithmetic; up to 8 {shared})" in text
    assert "The ranks of all nodes share 4 cores for all that is not waited for: copies" in text
    assert certainty.compare_repetitions(*runs) == "not tested"
    warnings = list(list_warnings(runs[0]))
    assert "ranks outnumber cores, which they share for all that is not waited for" in warnings


def test_rows_are_compared_within_one_cluster_and_scale():
    one = emulated.of_run(row_of("weak", "1d", 8), emulated_run(row_of("weak", "1d", 8), 3.0))
    others = [replace(one, scale=2.0), replace(one, cluster=Cluster.parse("2x4:1Gbit"))]
    assert [len(group) for group in emulated_tables.group_rows([one, *others, one])] == [2, 1, 1]


def test_predictions_repeat_what_is_recomputed():
    case = make_case(row_of("weak", "1d", 8), "emulated-tiny", Variant(work="wait"))
    plain, again = (of_case(case, LONGHORN, 1600.0, CLUSTER, policy)
                    for policy in ("none", "full"))
    assert again.predicted > 1.2 * plain.predicted
    assert again.original > 1.2 * plain.original


def test_the_machine_s_seconds_are_those_of_its_model():
    """Those known of the paper's rows, for files without their own; a run's own come first."""
    rows, every = select_rows(), set()
    for row in [*rows, *equal_token_rows(rows)]:
        case = make_case(row, "emulated", Variant(work="wait"))
        kind = find_scheme(row.scheme)
        grid = kind.grid_shape(kind.default_grid(row.gpus))
        order = direction_order("auto", kind.name, grid, case.sizes)
        key = "longhorn", row.scheme, grid.compact, order, row.hidden, case.sizes.batch
        assert emulated.known_seconds()[key] == of_case(case, LONGHORN, 1600.0, None).original
        every.add(key)
    assert every == emulated.known_seconds().keys()
    run = emulated_run(row_of("weak", "1d", 8), 3.0)
    run.configuration["placement"] = "x"
    key = "longhorn", "1d", "8", "x", 2048, 60
    assert emulated.of_run(row_of("weak", "1d", 8), run).original == (
        emulated.known_seconds()[key])
    for name, value in (("recompute", "full"), ("causal", True), ("waited_machine", "other")):
        other = replace(run, configuration=run.configuration | {name: value})
        assert math.isnan(emulated.of_run(row_of("weak", "1d", 8), other).original)
    run.groups["predicted"].variables["machine_seconds"] = run.groups["predicted"].variables[
        "seconds"]
    one = emulated.of_run(row_of("weak", "1d", 8), run)
    assert one.original == one.predicted == pytest.approx(1.0)


def test_sums_of_replicas_between_nodes_are_exchanges():
    """Each of a node's 4 ranks sends half of its array to the other node, through one link."""
    machine = emulating_machine(load_machine("longhorn"), 1.0, 20.0, Cluster.parse("2x4:50Mbit"))

    def seconds(kind: str, direction: str) -> float:
        return collective_terms(machine, Collective(kind, direction, 8, 1, 8000))["network"]
    once = 4 * 8000 / 2 / machine.network.bytes_per_second
    assert seconds("reduce_scatter", "d") == seconds("all_gather", "d") == pytest.approx(once)
    assert seconds("all_reduce", "d") == pytest.approx(2 * once)
    assert seconds("reduce_scatter", "x") < once / 3    # a ring through both nodes
