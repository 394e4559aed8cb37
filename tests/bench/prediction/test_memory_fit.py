"""What fits the memory of a rank, and which policy of recomputation makes it fit."""

import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.errors import UsageError
from bench.prediction import memory_fit
from bench.reports.merit import recomputation_notes
from mm3d.model.recomputation import POLICIES
from mm3d.model.stack import Stack
from mm3d.tracing import dry_run
from records import made_up

SIZES = dict(layers=4, hidden=64, heads=4, batch=8, seq=32)
GRID = (2, 2, 2)


@pytest.mark.parametrize("text, count", [("16 GB", 16 * 10 ** 9), ("15GiB", 15 * 2 ** 30),
                                         ("1.5 KiB", 1536), ("7000000", 7000000), ("7 B", 7)])
def test_sizes_of_memory(text, count):
    assert memory_fit.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1 GB", "16 gigabytes", "0 GB", "16 iB", "1e9", "80"])
def test_what_is_no_size_is_refused(text):
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
    """A row of a table, as a made-up run."""
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
    """What fits without one is called that; with --data its state is counted."""
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
    """ZeRO 1 divides its state among the replicas, so it needs less."""
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


def test_plans_of_one_replica_say_that_there_is_no_optimizer(capsys):
    assert main(["plan", "--ranks", "4", "--hidden", "64", "--layers", "1", "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "fits without" in out and "an optimizer" in out
    assert main(["dry", "--ranks", "4", "--scheme", "1d", "--hidden", "64", "--layers", "1",
                 "--machine", "dgx-h100"]) == 0
    assert "fits without an optimizer into" in capsys.readouterr().out
