"""Speed-ups over several runs of two rows, and their intervals."""
import math
from dataclasses import astuple

import pytest

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.records import run_file
from bench.records.folder import read_folder
from bench.reports.certainty import SEVERAL_RUNS, SpeedUp, repeated_runs, speed_up
from records import format_tables, made_up

T_OF_2 = 4.302652729749462    # Student's t of two degrees of freedom, 97.5 %
CUBE, LINE = (next(row for row in select_rows("weak", scheme) if row.gpus == 8)
              for scheme in ("3d", "1d"))


def test_pairs_of_runs():
    """The latest with the latest; earlier runs of one side alone are left out."""
    found = speed_up([100, 6, 3, 12], [2, 2, 2])
    half = T_OF_2 * math.log(2) / math.sqrt(3)
    assert found.ratio == pytest.approx(3) and found.runs == 3
    assert (found.low, found.high) == pytest.approx((3 * math.exp(-half), 3 * math.exp(half)))


def test_one_and_two_runs():
    """Of two the geometric mean, as of more."""
    for slow, found in (([6], SpeedUp(3, 3, 3, 1)), ([4, 16], SpeedUp(4, 2, 8, 2))):
        assert astuple(speed_up(slow, [2] * len(slow))) == pytest.approx(astuple(found))
    with pytest.raises(ValueError, match="a run of both rows"):
        speed_up([], [2])


def write_runs(folder, seconds, **changes):
    """Write a run of 1-D for each number of seconds a sequence, and of 3-D with a second each."""
    for k, each in enumerate(seconds):
        for row, average in ((LINE, each), (CUBE, 1.0)):
            whole = average * make_case(row, "laptop").sizes.batch
            run = made_up(row, whole / 4, 3 * whole / 4,
                          created=f"2030-01-02T03:04:{10 * len(changes) + k:02d}+00:00")
            run.configuration["order"] = k    # another order is no other setting
            run.environment.update(changes)
            run_file.write_run(run, folder, f"{row.scheme}-{k}-{len(changes)}")


def lines_of(folder):
    """The words of lines of speed-ups over 1-D that were measured."""
    return [line.split("|")[1].split() for line in format_tables(folder).splitlines()
            if line.startswith("over 1-D") and "missing" not in line]


def test_tables_have_intervals_over_runs(tmp_path):
    write_runs(tmp_path, [2, 8, 4])
    half = T_OF_2 * math.log(2) / math.sqrt(3)
    assert [words[4:8] for words in lines_of(tmp_path)] == [
        ["4.00x", f"{4 * math.exp(-half):.2f}x", f"{4 * math.exp(half):.2f}x", "3"]]
    assert SEVERAL_RUNS in " ".join(format_tables(tmp_path).split())


def test_runs_of_another_commit_do_not_count(tmp_path):
    write_runs(tmp_path, [2, 8, 4])
    write_runs(tmp_path, [3, 5], git_commit="another")
    assert [words[4:8] for words in lines_of(tmp_path)] == [["3.87x", "3.00x", "5.00x", "2"]]
    results, = read_folder(tmp_path).results
    assert len(repeated_runs(results, LINE)) == 2 and results.earlier == 8


def test_one_run_has_no_interval_over_runs(tmp_path):
    write_runs(tmp_path, [2])
    assert [words[4:6] for words in lines_of(tmp_path)] == [["2.00x", "1"]]
    assert SEVERAL_RUNS not in " ".join(format_tables(tmp_path).split())
