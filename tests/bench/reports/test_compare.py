"""Two sets of results told apart, and what is refused."""
from dataclasses import replace

import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.records import run_file
from bench.records.measurements import Measurements, Variable
from bench.reports import comparison
from mm3d.tracing.events import PHASES
from records import made_up

ROWS = select_rows("weak", "1d,3d")


def write_set(folder, seed, factors=None, runs=3, between=0.01, rows=ROWS, **changes):
    """Runs of each row, every row slower by its factor; runs differ more than repetitions do."""
    random = np.random.default_rng(seed)
    for number, row in enumerate(rows):
        for again in range(runs):
            run = made_up(row, repetitions=12, created=f"2030-01-02T03:04:{again:02d}+00:00")
            level = (factors or {}).get(number, 1.0) * random.lognormal(0, between)
            for phase in PHASES:
                noise = random.lognormal(0, 0.002, (12, 1))
                run.samples[phase][:] = level * noise * np.ones(row.gpus)
            run.configuration.update(changes.get("configuration", {}))
            run.environment.update(changes.get("environment", {}))
            run_file.write_run(run, folder, f"row{number}")
    return str(folder)


@pytest.fixture
def sets(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def verdicts(text):
    """Of each line of the table: case, ratio and verdict."""
    found = {}
    for line in text.splitlines():
        if " ranks, laptop " in line and "|" in line:
            left, right = line.split("|", 1)
            words = right.split("|")[-1].split()
            found[left.split(",")[0]] = (float(words[0]), " ".join(words[4:]))
    return found


def test_each_case_gets_the_verdict_it_deserves(sets, capsys):
    rows = [*ROWS[:2], ROWS[4]]
    a = write_set(sets[0], 0, rows=rows)
    b = write_set(sets[1], 1, {1: 1.2, 2: 0.7}, rows=rows)
    assert main(["compare", a, b]) == 0
    text = capsys.readouterr().out
    found = verdicts(text)
    assert len(found) == len(rows)
    ratio, word = found.pop("weak 1-D 16 ranks")
    assert ratio == pytest.approx(1.2, rel=0.05) and word == "slower"
    ratio, word = found.pop("weak 3-D 8 ranks")
    assert ratio == pytest.approx(0.7, rel=0.05) and word == "faster"
    assert {word for _, word in found.values()} == {"no difference shown"}
    assert "B is faster in 1, slower in 1; in 1 no difference" in " ".join(text.split())
    assert "same in both" in text and "WARNING" not in text


def test_a_regression_beyond_the_limit_fails(sets, capsys):
    a = write_set(sets[0], 0, rows=ROWS[:2])
    b = write_set(sets[1], 1, {0: 0.7, 1: 1.2}, rows=ROWS[:2])
    for limit, status in (("15", 1), ("30", 0), ("0", 1)):
        assert main(["compare", a, b, "--fail-on-regression", limit]) == status
        said = capsys.readouterr().err
        assert said.startswith(f"slower by more than {limit} %: weak 1-D 16" * status)
        assert said.count("\n") == status
    # The other way round the third of 1 / 0.7 is the regression.
    assert main(["compare", b, a, "--fail-on-regression", "30"]) == 1
    assert "weak 1-D 8 ranks, laptop: 4" in capsys.readouterr().err


def test_a_case_that_is_lost_is_no_success(sets, capsys):
    """Of A: a new one, which B has alone, has nothing to be compared with."""
    a, b = write_set(sets[0], 0, rows=ROWS[:2]), write_set(sets[1], 0, rows=ROWS[:1])
    for sides, status in (((a, b), 1), ((b, a), 0)):
        assert main(["compare", *sides]) == 0
        capsys.readouterr()
        assert main(["compare", *sides, "--format=csv", "--fail-on-regression=5"]) == status
        assert capsys.readouterr().err == (
            "only in A, and so not judged: weak 1-D 16 ranks, laptop\n" * status)


def test_slower_without_proof_is_no_regression(sets, capsys):
    """Three runs of each that are far apart show nothing, though one case is slower by a half."""
    a = write_set(sets[0], 0, between=0.3, rows=ROWS[:2])
    b = write_set(sets[1], 1, {0: 1.5}, between=0.3, rows=ROWS[:2])
    assert main(["compare", a, b, "--fail-on-regression", "5"]) == 0
    assert {word for _, word in verdicts(capsys.readouterr().out).values()} == {
        "no difference shown"}


@pytest.mark.parametrize("runs", [(2, 3), (3, 1)])
def test_fewer_than_three_runs_a_side_give_no_verdict(sets, capsys, runs):
    """However many repetitions they have, and however far they are apart."""
    a = write_set(sets[0], 0, runs=runs[0], rows=ROWS[:2])
    b = write_set(sets[1], 1, {1: 3.0}, runs=runs[1], rows=ROWS[:2])
    assert main(["compare", a, b]) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert "No verdict on 2 of 2 cases, which have fewer than 3 runs a side" in flat
    line, = [line for line in text.splitlines() if line.startswith("weak 1-D 16 ranks")]
    assert line.split("|")[1].split() == list(map(str, runs))
    assert float(line.split("|")[-1]) == pytest.approx(3, rel=0.05)
    for word in ("faster", "slower", "corrected"):
        assert word not in text
    assert main(["compare", a, b, "--fail-on-regression", "5"]) == 2
    error = capsys.readouterr().err
    assert "--fail-on-regression takes at least 3 runs of each case on either side" in error
    assert f"weak 1-D 8 ranks, laptop: {runs[0]} and {runs[1]}" in error


def test_runs_may_lie_in_folders_of_their_own(tmp_path, capsys):
    """Named one by one, in folders or as files; a run that is named twice is one run."""
    names = {}
    for side, factor in (("before", 1.0), ("after", 1.2)):
        names[side] = []
        for again in range(3):
            folder = tmp_path / f"{side}-{again}"
            folder.mkdir()
            run = made_up(ROWS[0], factor * (1 + again / 1000), factor,
                          created=f"2030-01-02T03:04:{again:02d}+00:00")
            names[side].append(str(run_file.write_run(run, folder, "row") if again else folder))
            if not again:
                run_file.write_run(run, folder, "row")
    command = ["compare", "--before", *names["before"], "--after", *names["after"]]
    assert main([*command, "--fail-on-regression", "5"]) == 1
    assert "slower in 1" in " ".join(capsys.readouterr().out.split())
    twice = ["compare", "--before", *names["before"][:1] * 3, "--after", *names["after"]]
    assert main([*twice, "--fail-on-regression", "5"]) == 2
    assert "weak 1-D 8 ranks, laptop: 1 and 3" in capsys.readouterr().err


def test_runs_of_one_side_that_differ_are_said(sets, capsys):
    a = write_set(sets[0], 0, rows=ROWS[:1],
                  environment={"git_commit": "a" * 40})
    run_file.write_run(made_up(ROWS[0], created="2031-01-01T00:00:00+00:00"), sets[0], "row0")
    b = write_set(sets[1], 1, rows=ROWS[:1],
                  environment={"git_commit": "b" * 40})
    assert main(["compare", a, b]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"WARNING: runs of A differ in git_commit: {'a' * 40} and 0123456789abcdef" in text
    assert "runs of B differ" not in text


def test_other_environments_are_named(sets, capsys):
    a = write_set(sets[0], 0, runs=1, rows=ROWS[:1], environment={"git_commit": "a" * 40})
    b = write_set(sets[1], 0, runs=1, rows=ROWS[:1], configuration={"transport": "shared"},
                  environment={"mpi": "Other MPI 2", "git_commit": "b" * 40})
    assert main(["compare", a, b]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Differs: mpi is Some MPI 1.0 in A and Other MPI 2 in B." in text
    assert "transport is not recorded in A and shared in B" in text
    assert f"git_commit is {'a' * 40} in A and {'b' * 40} in B" in text


def test_crowded_cases_and_cases_of_one_set_are_named(sets, capsys):
    a = write_set(sets[0], 0, runs=1, rows=ROWS[:2])
    extra = select_rows("strong", "2d")[0]
    run_file.write_run(made_up(extra, oversubscribed=True), sets[0], "extra")
    b = write_set(sets[1], 0, runs=1, rows=ROWS[:2], environment={"oversubscribed": True})
    assert main(["compare", a, b]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Only in A, 1: strong 2-D 16 ranks, laptop." in text
    assert "in 2 of 4 runs ranks outnumber cores" in text


def test_runs_that_did_other_work_are_refused(sets, capsys):
    a = write_set(sets[0], 0, runs=1)
    b = write_set(sets[1], 0, runs=1, configuration={"hidden": 1152, "seq": 48})
    assert main(["compare", a, b]) == 2
    error = capsys.readouterr().err
    assert "different work under the same name cannot be compared" in error
    assert "weak 1-D 8 ranks, laptop: hidden 256 and 1152" in error and "and 9 more" in error


def test_nothing_in_common_is_refused(sets, capsys):
    run_file.write_run(made_up(ROWS[0]), sets[0], "one")
    run_file.write_run(made_up(ROWS[5]), sets[1], "other")
    assert main(["compare", *map(str, sets)]) == 2
    error = capsys.readouterr().err
    assert "nothing in common" in error
    assert "weak 1-D 8 ranks" in error and "weak 3-D 64 ranks" in error


def test_damaged_files_are_named_and_a_folder_of_them_is_refused(sets, capsys):
    a, b = (write_set(folder, 0, runs=1, rows=ROWS[:1]) for folder in sets)
    (sets[1] / "cut.h5").write_bytes(next(sets[0].glob("*.h5")).read_bytes()[:3000])
    assert main(["compare", a, b]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"left out: {b}/cut.h5 is truncated, damaged")
    assert said.err.count("\n") == 1 and "cut.h5" not in said.out
    assert main(["compare", a, str(sets[1] / "cut.h5")]) == 2
    assert "no results in" in capsys.readouterr().err
    assert main(["compare", a, str(sets[1] / "none")]) == 2
    assert capsys.readouterr().err == (
        f"error: {sets[1] / 'none'} is no folder of results, and no file\n")


def products(factor, transport):
    """A made-up run of some kind: the second rank ends last."""
    times = np.zeros((1, 8, 2, 2, 2))
    spread = np.linspace(1, 1.1, 8)[:, None]
    times[0, :, :, 0, 1], times[0, :, :, 1, 1] = 0.5 * spread, spread
    times[0, :, 0] *= factor
    times[0, :, 1, 1] = np.nan    # one process has no second rank
    return Measurements("mine", {"M": 8, "transport": transport, "seed": 0}, {"cores": 2}, {
        "phase": ["forward"], "repetition": range(8), "kind": ["product", "one process"],
        "rank": range(2), "edge": ["begin", "end"]}, {"times": Variable(
            times, "s", ("phase", "repetition", "kind", "rank", "edge"))}, [])


def test_points_of_microbenchmarks_are_cases(sets, capsys):
    for again in range(3):
        for folder, factor, transport in zip(sets, (1.0, 0.5), ("mpi", "shared")):
            run = replace(products(factor * (1 + again / 1000), transport),
                          created=f"2030-01-02T03:04:{again:02d}+00:00")
            run_file.write_run(run, folder, "mine")
    assert main(["compare", *map(str, sets)]) == 0
    text = capsys.readouterr().out
    lines = {" ".join(line.split("|")[0].split()[:-2]): line for line in text.splitlines()
             if "|" in line}
    product = lines["mine phase forward kind product"]
    assert product.endswith("faster") and " 1.051 " in product and " 0.5255 " in product
    assert lines["mine phase forward kind one process"].endswith("no difference shown")
    assert "transport is mpi in A and shared in B" in text


def test_what_took_no_time_is_no_case(sets, capsys):
    run = products(1.0, "mpi")
    run.raw["times"].values[:, :, 1] = 0
    run_file.write_run(run, sets[0], "mine")
    assert main(["compare", *[str(sets[0])] * 2]) == 0
    text = capsys.readouterr().out
    assert "kind product" in text and "one process" not in text


def test_transports_of_one_set_are_cases_of_their_own(sets, capsys):
    """Of products and of rows; what only one set has is said, not dropped."""
    for transport, factor in (("mpi", 1.0), ("shared", 0.5)):
        run_file.write_run(products(factor, transport), sets[0], "mine")
        run = made_up(ROWS[0], factor, factor)
        run.configuration["transport"] = transport
        run_file.write_run(run, sets[0], "row")
    run_file.write_run(products(0.5, "shared"), sets[1], "mine")
    run = made_up(ROWS[0], 0.5, 0.5)
    run.configuration["transport"] = "shared"
    run_file.write_run(run, sets[1], "row")
    both, one = comparison.name_cases(*(comparison.read_cases([folder])[0] for folder in sets))
    names = ["mine phase forward kind one process, M 8", "weak 1-D 8 ranks, laptop",
             "mine phase forward kind product, M 8"]
    assert both.keys() == {f"{name}, transport {transport}" for name in names
                           for transport in ("mpi", "shared")}
    assert one.keys() == {f"{name}, transport shared" for name in names}
    assert [both[f"{names[2]}, transport {transport}"][0].median
            for transport in ("mpi", "shared")] == pytest.approx([1.05, 0.525])
    for pair in (sets, sets[::-1]):
        assert main(["compare", *map(str, pair)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "No verdict on 3 of 3 cases" in text
        assert f"Only in {'AB'[pair is not sets]}, 3: " in text
        # What no case differs in is said once.
        assert "The same in all cases of microbenchmarks: M 8." in text
        assert "process, M 8" not in text.partition("About this comparison")[0]


def test_recomputation_makes_a_case_of_its_own(sets, capsys):
    """Runs that compute more are neither repetitions of the others nor slower than they."""
    a = write_set(sets[0], 0, rows=ROWS[:1])
    full = {"configuration": {"recompute": "full"}}
    assert main(["compare", a, write_set(sets[1], 1, rows=ROWS[:1], **full)]) == 2
    assert "weak 1-D 8 ranks, laptop, recompute full" in capsys.readouterr().err
