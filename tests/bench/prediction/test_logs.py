"""Logs of nccl-tests, OSU and IMB, and tables of products: what is read, fitted and written.

The logs are made here, by the headings and columns that these programs print, of links whose
latency and rate are known.
"""
import re
import tomllib

import numpy as np
import pytest

from bench.__main__ import main
from bench.errors import UsageError
from bench.prediction.logs import fitting
from bench.prediction.logs.reading import MESSAGE, STREAM, LogFile, LogReader
from bench.prediction.machine_file import format_tree
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import collective_terms, gemm_seconds, message_steps, ring_bytes
from bench.verbs.calibrate import log_file
from mm3d.tracing.events import Collective, Gemm

LATENCY, RATE = 5e-6, 80e9    # of all links
SIZES = [8 << 3 * k for k in range(10)]


def seconds(kind, ranks, size):
    event = Collective(kind, "", ranks, 1, size)
    return message_steps(event) * LATENCY + ring_bytes(event) / RATE


def nccl(name="all_reduce", ranks=16, hosts=2, newer=True, sizes=SIZES):
    """A log of nccl-tests; older ones have neither the name nor the column of the root."""
    kind = {"alltoall": "all_to_all"}.get(name, name)
    lines = [f"# Collective test starting: {name}_perf"] * newer + ["# Using devices"]
    lines += [f"#  Rank {rank:2} Group  0 Pid {99 + rank:6} on node{rank * hosts // ranks} device "
              f"{rank % 8:2} [0000:0f:00] Some GPU" for rank in range(ranks)]
    columns = ["size", "count", "type", "redop", *["root"] * newer]
    columns += ["time", "algbw", "busbw", "#wrong" if newer else "error"] * 2
    lines += ["#", "#          out-of-place    in-place", "# " + "  ".join(columns),
              "#  (B)  (elements)  (us)  (GB/s)  (GB/s)"]
    for size in sizes:
        took = seconds(kind, ranks, size)
        bus = ring_bytes(Collective(kind, "", ranks, 1, size)) / took / 1e9
        lines.append("  ".join(map(str, [
            size, size // 4, "float", "sum", *["-1"] * newer,
            *[f"{1e6 * took:.6f}", f"{size / took / 1e9:.2f}", f"{bus:.2f}",
              "0" if newer else "5e-07"], *[f"{2e6 * took:.2f}", "0.00", "0.00", "N/A"]])))
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0"])


def osu(title="Latency", value=lambda size: 1e6 * (LATENCY + size / RATE), head="Latency (us)",
        sizes=(0, *SIZES)):
    return "\n".join([f"# OSU MPI {title} Test v7.1", "# Datatype: MPI_CHAR.",
                      f"# Size          {head}",
                      *(f"{size:<10}{value(size):20.6f}" for size in sizes)])


def imb(name="PingPong", ranks=2, value=lambda size: LATENCY + size / RATE, sizes=(0, *SIZES)):
    pair = ranks == 2 and name == "PingPong"
    heads = "t[usec]   Mbytes/sec" if pair else "t_min[usec]  t_max[usec]  t_avg[usec]"
    rows = [f"{size:13}  1000  " + (f"{1e6 * value(size):.6f}  1.00" if pair else
                                    f"0.01  {1e6 * value(size):.6f}  0.02") for size in sizes]
    return "\n".join([
        "#-------------", f"# Benchmarking {name} ", f"# #processes = {ranks} ",
        "# ( 6 additional processes waiting in MPI_Barrier)", "#-------------",
        f"       #bytes #repetitions      {heads}", *rows])


def read(text, name="all_reduce_perf.txt", link="", ranks=0):
    reader = LogReader(LogFile(name, link, ranks))
    reader.read(text)
    return reader


def times(text, **more):
    (series,) = read(text, **more).series
    return series


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("name, ranks, hosts", [
    ("all_reduce", 16, 2), ("all_gather", 8, 1), ("reduce_scatter", 4, 4), ("broadcast", 8, 1),
    ("alltoall", 6, 2)])
def test_nccl_tests_of_all_versions_are_read(newer, name, ranks, hosts):
    found = times(nccl(name, ranks, hosts, newer), name=f"my_{name}_perf.log")
    assert (found.ranks, found.link) == (ranks, "network" if hosts > 1 else "node")
    (fit,) = fitting.fit_logged_links([found])
    assert [size for size, _ in found.points] == SIZES
    assert (fit.latency, fit.rate) == (pytest.approx(LATENCY, 1e-4), pytest.approx(RATE, 1e-4))
    assert np.abs(fit.fitted_errors).max() < 1e-4


def test_programs_of_mpi_are_read():
    """Latency and rate of messages; the bytes of an all-gather are those of one block."""
    cases = [(osu(), MESSAGE, 2), (osu("Bandwidth", lambda size: RATE / 1e6, "Bandwidth (MB/s)"),
                                   STREAM, 2), (imb(), MESSAGE, 2),
             (osu("Allreduce Latency", lambda size: 1e6 * seconds("all_reduce", 16, size),
                  "Avg Latency(us)   Min Latency(us)"), "all_reduce", 16),
             (osu("Allgather Latency", lambda size: 1e6 * seconds("all_gather", 16, 16 * size),
                  "Avg Latency(us)"), "all_gather", 16),
             (imb("Allgather", 4, lambda size: seconds("all_gather", 4, 4 * size)),
              "all_gather", 4),
             (imb("Bcast", 8, lambda size: seconds("broadcast", 8, size)), "broadcast", 8)]
    for text, kind, ranks in cases:
        found = times(text, link="network", ranks=16)
        assert (found.kind, found.ranks, found.link) == (kind, ranks, "network")
        (fit,) = fitting.fit_logged_links([found])
        assert fit.rate == pytest.approx(RATE, 1e-3), kind
        assert fit.latency == (None if kind == STREAM else pytest.approx(LATENCY, 1e-3))
    assert len(read("\n".join([imb(), imb("Allreduce", 4), imb("Barrier", 4)]), link="node").series
               ) == 2


def test_a_stream_has_the_rate_where_it_is_bound_by_the_link():
    """Its small messages, at less than half of the rate, do not count; latency has the other."""
    slow = osu("Bandwidth", lambda size: min(RATE / 1e6, size / 1e-6 / 1e6), "Bandwidth (MB/s)")
    pair = [times(osu(sizes=(0, 8, 64)), link="network"), times(slow, link="network")]
    (fit,) = fitting.fit_logged_links(pair)
    assert (fit.latency, fit.rate) == (pytest.approx(LATENCY, 1e-3), pytest.approx(RATE, 1e-3))


def test_collectives_of_the_most_ranks_count_and_the_others_are_compared():
    series = [times(nccl(ranks=4, hosts=2)), times(nccl(ranks=16, hosts=2)),
              times(osu(value=lambda size: 1e6 * (LATENCY + 2 * size / RATE)), link="network")]
    (fit,) = fitting.fit_logged_links(series)
    assert fit.fitted == [series[1]] and sorted(fit.errors) == [0, 1, 2]
    assert np.abs(fit.errors[0]).max() < 1e-4 and fit.errors[2].min() == pytest.approx(-.5, .01)


GOOD = nccl(sizes=SIZES[-2:]).splitlines()
BAD = {    # a line, and what is said of it
    "1024 256 float sum -1 9.0 0.1 0.2 0": "9 columns, where the heading on line 21 has 13",
    "1024 256 float sum -1 fast 0.1 0.2 0 9.0 0.1 0.2 0": "no numbers in '1024 256",
    "1024 256 float sum -1 -9.0 0.1 0.2 0 9.0 0.1 0.2 0": "1024 bytes, -9: no size and time",
    "1024 256 float sum -1 1e-320 0.1 0.2 0 9.0 0.1 0.2 0": "1024 bytes, 9.99989e-321: no size",
    f"{10 ** 400} 256 float sum -1 9.0 0.1 0.2 0 9.0 0.1 0.2 0": f"{10 ** 400} bytes, 9: no size",
    "1024 256 float sum -1 9.0 0.1 0.2 3 9.0 0.1 0.2 0": "3 wrong results",
    "1024 256 float sum -1 9.0 0.1 50.0 0 9.0 0.1 0.2 0":
        "busbw is 50 GB/s, where all_reduce of 16 ranks has 0.2133"}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_and_the_rest_goes_on(line):
    reader = read("\n".join([*GOOD[:-2], "node0:99:99 [0] NCCL INFO a word", line, GOOD[-2]]))
    (problem,) = reader.problems
    assert problem.startswith(f"all_reduce_perf.txt:{len(GOOD)}: {BAD[line]}")
    assert [size for size, _ in reader.series[0].points] == SIZES[-2:]


@pytest.mark.parametrize("text, more, said", [
    (osu(), {}, "x.txt:3: OSU does not say whether they were on one node: network=x.txt would do"),
    (osu("Allreduce Latency"), {"link": "node"},
     "x.txt:3: OSU does not say how many ranks ran: node:16=x.txt would do"),
    (osu("Bi-Directional Bandwidth"), {"link": "node"},
     "x.txt:3: OSU's Bi-Directional Bandwidth says nothing of a link, and is left out"),
    (imb("Allreduce", 1), {"link": "node"}, "Allreduce of one rank, which sends nothing"),
    (nccl(newer=False), {}, "x.txt:20: the log does not name its collective")])
def test_what_a_log_does_not_say_is_asked_for(text, more, said):
    reader = read(text, name="x.txt", **more)
    assert reader.series == [] and said in reader.problems[0]


def test_a_log_is_named_with_or_without_its_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.log").touch()
    for name in ("a=b.log", "x/y=z.log"):
        assert log_file(name) == LogFile(name)
    long = 300 * "a"    # longer than any file's name
    assert log_file(f"network:16={long}") == LogFile(long, "network", 16)


RATES = "\n".join(["DType, M, N, K, TFLOPS", "# a comment", *(
    f"fp16,{m},{n},{k},{2e-12 * m * n * k / (3e-6 + 2 * m * n * k / 200e12)}"
    for m in (64, 512, 4096) for n in (64, 512, 4096) for k in (64, 512, 4096)),
    "float32,64,64,64,1.5", "int8,64,64,64,1", "fp16,64,64,0,1", "fp16,64,64,64",
    "fp16,64,64,64,many"])


def test_tables_of_products_are_read_and_fitted():
    found, problems = fitting.read_rates("gemm.csv", RATES)
    assert [line.partition(": ")[0] for line in problems] == [
        f"gemm.csv:{number}" for number in (31, 32, 33, 34)]
    assert "4 columns, where the heading has 5" in problems[2]
    assert "no numbers in 'fp16,64,64,64,many'" in problems[3]
    rates = fitting.fit_rates(found)
    assert list(rates) == ["float16", "float32"]
    assert rates["float16"].rate == pytest.approx(200e12, 1e-3)
    assert rates["float16"].start == pytest.approx(3e-6, 1e-3)
    assert rates["float32"].rate == pytest.approx(1.5e12)
    quoted = re.sub("[^,\n]+", '"\\g<0>"', RATES)
    assert fitting.read_heading(quoted) == ["dtype", "m", "n", "k", "tflops"]
    assert fitting.read_rates("gemm.csv", quoted)[0] == found
    for row in (f"{10 ** 400},1,1,1", "1,1,1,1e-320", "1,1,1,1e300"):
        said = fitting.read_rates("gemm.csv", f"dtype,m,n,k,us\nfp16,{row}")[1]
        assert "no product and time" in said[0]
    apart, _ = fitting.read_rates("gemm.csv", "dtype,m,n,k,us\nfp16,1,1,1,1e20\nfp16,2,1,1,1e-9")
    assert fitting.fit_rates(apart)["float16"].deviations
    assert fitting.read_heading("m,n,k," + "x" * 200_000) == []
    assert fitting.read_rates("a.csv", "m,n,k,us\n1,1,1,1")[1] == [
        "a.csv:1: columns dtype, m, n, k and one of seconds, ms, us, flops, gflops, tflops would "
        "do, not m, n, k, us"]


def test_a_machine_of_logs_predicts_what_the_logs_say(tmp_path, capsys):
    files = {"inside.txt": nccl("all_gather", 8, 1), "between.log": nccl(), "gemm.csv": RATES}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    out = tmp_path / "mine.toml"
    words = ["calibrate", "--out", str(out), "--from", *(str(tmp_path / name) for name in files)]
    assert main([*words, "--machine", "dgx-h100"]) == 0
    said = capsys.readouterr().out
    assert "gemm.csv:31: dtype 'int8'" in said and "Missing" not in said
    machine = load_machine(str(out))
    base = load_machine("dgx-h100")
    assert machine.ranks_per_node == 8 and machine.memory_bytes == base.memory_bytes
    for size in SIZES:
        for kind, ranks in (("all_gather", 8), ("all_reduce", 16)):
            terms = collective_terms(machine, Collective(kind, "x", ranks, 1, size))
            assert sum(terms.values()) == pytest.approx(seconds(kind, ranks, size), 1e-3)
    assert machine.achieved.node == machine.achieved.network == machine.achieved.gemm == 1
    assert gemm_seconds(machine, Gemm(1, 512, 512, 512, "float16")) == pytest.approx(
        3e-6 + 2 * 512 ** 3 / 200e12, 0.01)
    assert "between.log: nccl-tests all_reduce of 16 ranks; 10 sizes" in machine.sources["network"]
    assert machine.sources["memory_bytes"].startswith("of dgx-h100: NVIDIA")
    assert str(tmp_path) not in out.read_text() + said.rpartition("machine file: ")[0]


def test_names_in_another_encoding_are_escaped():
    text = format_tree({"name": "a\udcff"})
    assert tomllib.loads(text.encode().decode())["name"] == r"a\udcff"


def test_without_a_machine_what_is_missing_is_said_and_written(tmp_path, capsys):
    (tmp_path / "a.log").write_text(nccl())
    out = tmp_path / "mine.toml"
    assert main(["calibrate", "--out", str(out), "--from", str(tmp_path / "a.log")]) == 0
    said = capsys.readouterr().out
    missing = [line.removeprefix("# missing: ") for line in out.read_text().splitlines()
               if line.startswith("# missing: ")]
    assert missing == ["memory_bytes", "memory_bandwidth", "launch_seconds", "gemm_half_size",
                       "gemm_rate", "node", "achieved.gemm", "achieved.memory", "achieved.node"]
    assert all(f"- {name}: " in said for name in missing)
    assert "memory_bandwidth: Memory of a rank, and its bandwidth in bytes a second." in said
    with pytest.raises(UsageError, match="missing required fields memory_bytes"):
        load_machine(str(out))


@pytest.mark.parametrize("words, said", [
    (["--from", "{}/none.txt"], "none.txt: there is no such file"),
    (["--from", "{}/prose.txt"], "no line of these files can be used"),
    (["--machine", "dgx-h100"], "give --from too"),
    (["--from", "{}/a.log", "--samples", "a.h5"], "one of them would do"),
    (["--from", "{}/a.log", "--machine", "{}/mine.toml"], "missing required fields")])
def test_what_cannot_be_used_is_refused(words, said, tmp_path, capsys):
    (tmp_path / "prose.txt").write_text("1 word, and no table")
    (tmp_path / "a.log").write_text(nccl())
    (tmp_path / "mine.toml").write_text("name = 'mine'")
    out = tmp_path / "out.toml"
    assert main(["calibrate", "--out", str(out), *(one.format(tmp_path) for one in words)]) == 2
    assert said in capsys.readouterr().err and not out.exists()
