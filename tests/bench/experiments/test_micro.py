"""The microbenchmarks, at tiny sizes, and the checks that guard them."""
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from bench.checks import freivalds, operation
from bench.checks.passed import require_passed
from bench.errors import WrongResult
from bench.experiments.products import collectives, gemm, operands
from bench.experiments.products.problem import Problem, WholeProduct, product_grid
from bench.instruments import sampling
from bench.instruments.timing import Limits
from bench.records import run_file
from mm3d import Grid, Layout
from mm3d.grid.axis import COLLECTIVES
from mm3d.model import cost
from mm3d.schemes.matrix_product import FORMS
from mm3d.transport.nodes import in_place_collectives
from records import format_record, only_record, read_valid
from refused import done, refused, run_verb
from support import run_ranks

QUICK = ("--repetitions", "2", "--max-repetitions", "2")
MN, NK, MK = 19 * 14, 14 * 23, 19 * 23


# The words of ab, abt, atb forward: which matrices cross directions of two ranks.
@pytest.mark.ranks(4)
@pytest.mark.parametrize("scheme, grid, words", [
    ("3d", "1x2x2", [MN + MK, MN + MK, MN + NK]),
    ("1d", "4", [3 * MN] * 3),
    pytest.param("2d", "2x2", [MN + NK, NK + MK, MN + MK], marks=pytest.mark.slow)])
def test_matmul_measures_verified_products(comm, shared_tmp_path, scheme, grid, words):
    said = done(comm, "measure", "matmul", "--shape", "19,14,23", "--form", "ab,abt,atb",
                "--scheme", scheme, "--grid", grid, "--backward", "--dtype", "float64", "--calls",
                "2", *QUICK, "--out", str(shared_tmp_path))
    runs = [read_valid(path) for path in sorted(shared_tmp_path.glob("*.h5"))]
    assert [run.configuration["form"] for run in runs] == ["ab", "abt", "atb"]
    for run in runs:
        found = {name: variable.values for name, variable in run.variables.items()}
        assert run.kind == "matmul" and len(run.checks) == 12
        assert all(check.passed for check in run.checks)
        assert found["times"].shape == (2, 2, 3, 4, 2)
        assert found["flops"].tolist() == [2 * 19 * 14 * 23, 4 * 19 * 14 * 23]
        assert found["least_words"][0] == cost.lower_bound(19, 14, 23, 4)
        product, _, one = found["seconds"][0, :, 0]
        assert product > 0 and one > 0 and found["efficiency"][0, 0] > 0
        assert run.variables["times"].dims == ("phase", "repetition", "kind", "rank", "edge")
    assert "2 repetitions of 2 calls, ended by repetitions" in " ".join(said.split())
    assert [run.variables["words"].values[0].sum() for run in runs] == words


@pytest.mark.ranks(1)
def test_a_scheme_without_products_of_plain_matrices_is_refused(comm):
    with pytest.raises(ValueError, match="'1d-sp' has no products of plain matrices: choose one "
                                         "of 1d, 2.5d, 2d, 2d-pipelined, 3d, .*cannon"):
        product_grid("1d-sp", comm)


@pytest.mark.ranks(1)
def test_not_a_number_is_wrong_and_zeros_are_right(comm):
    def matrix(values):
        values = np.asarray(values, np.float64)
        place = tuple(slice(0, n) for n in values.shape)
        return freivalds.DistributedMatrix(values, place, values.shape, comm)
    zeros = matrix(np.zeros((3, 3)))
    right = freivalds.check_product("C", zeros, zeros, zeros, 0, "float64")
    assert all(check.passed for check in right)
    bad = matrix(np.full((3, 3), np.nan))
    wrong = freivalds.check_product("C", zeros, zeros, bad, 0, "float64")
    with pytest.raises(WrongResult, match="off by nan"):
        require_passed(wrong)


@pytest.mark.ranks(1)
def test_the_whole_product_is_that_of_its_matrices(comm):
    for form in FORMS:
        problem = Problem("1d", form, product_grid("1d", comm), (5, 4, 3), "float64")
        whole = WholeProduct(problem, 0)
        A, B, dC = (whole.blocks[name] for name in "ABC")
        left, right = (A.T if form == "atb" else A), (B.T if form == "abt" else B)
        np.testing.assert_allclose(whole.forward(), left @ right)
        dA, dB = whole.backward()
        dleft, dright = dC @ right.T, left.T @ dC
        np.testing.assert_allclose(dA, dleft.T if form == "atb" else dleft)
        np.testing.assert_allclose(dB, dright.T if form == "abt" else dright)
        problem.grid.free()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("words, named", [("collectives", "reduce_scatter of "),
                                          ("matmul --shape 32", " is off by ")])
def test_a_wrong_sum_writes_no_times(comm, shared_tmp_path, wrong_sums, words, named):
    """Four ranks name what is wrong on one."""
    status, said = run_verb(comm, "measure", *words.split(), "--grid", "1x2x2", *QUICK, "--out",
                            str(shared_tmp_path / "out"))
    assert status == 1 and named in said and said.count("no times were written") == 1
    assert "GFLOP" not in said and not list((shared_tmp_path / "out").glob("*.h5*"))


@pytest.mark.ranks(1)
def test_a_wrong_product_of_one_rank_writes_no_times(comm, tmp_path, monkeypatch):
    right = gemm.matmul

    def wrong(a, b):
        out = right(a, b)
        out[-1, -1] += 1
        return out
    monkeypatch.setattr(gemm, "matmul", wrong)
    status, said = run_verb(comm, "measure", "gemm", "--sizes", "8", "--threads", "1", *QUICK,
                            "--out", str(tmp_path / "out"))
    assert status == 1 and "C of 8 x 8" in said and "no times were written" in said
    assert not list((tmp_path / "out").glob("*.h5*"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_are_checked_exactly(comm, kind):
    """What is right passes; an element that is one off on the first rank does not, on any rank."""
    grid = Grid(comm, "numpy", x=2, y=2)
    split = Layout("y").split(grid, (13,), "y")
    length = split.counts[grid["y"].rank] if kind == "all_gather" else 13
    a = np.empty(length, np.float32)
    step = operands.collective_call(split, kind, a)
    assert operation.check_collective(split, kind, step, a, comm).passed

    def off():
        found = step()
        if comm.rank == 0:
            found = np.array(found)
            found[-1] += 1
        return found

    with pytest.raises(WrongResult, match=f"{kind} of 13 elements along y is off by 1"):
        operation.check_collective(split, kind, off, a, comm)
    grid.free()


def test_gemm(tmp_path):
    said = done(MPI.COMM_SELF, "measure", "gemm", "--sizes", "8,32", "--threads", "1", *QUICK,
                "--out", str(tmp_path))
    run = only_record(tmp_path)
    assert run.kind == "gemm" and run.scales["size"] == [8, 32]
    assert run.scales["dtype"] == ["float32", "float64"]
    seconds, rate = (run.variables[name].values for name in ("seconds", "rate"))
    np.testing.assert_allclose(rate * seconds[..., 0], [[[1024, 65536]]] * 2)
    assert run.variables["samples"].values.shape == (2, 1, 2, 2)
    assert len(run.checks) == 8 and all(check.passed for check in run.checks)
    assert run.environment["clock_resolution_s"] < 1e-3
    assert "Rate of C = A B" in said


@pytest.mark.ranks(4)
def test_collectives(comm, shared_tmp_path, monkeypatch):
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")
    said = done(comm, "measure", "collectives", "--grid", "2x1x2", "--least", "64", "--most",
                "300", *QUICK, "--out", str(shared_tmp_path))
    run = only_record(shared_tmp_path)
    assert run.scales["axis"] == ["x", "z"] and run.scales["size"] == [64, 256]
    assert run.scales["collective"] == list(COLLECTIVES)
    assert len(run.checks) == 24 and all(check.error == 0 for check in run.checks)
    found = {name: variable.values for name, variable in run.variables.items()}
    assert found["samples"].shape == (2, 6, 2, 2) and (found["samples"] > 0).all()
    # Half of the array for a gather, a scatter or an all-to-all, twice that for an all-reduce,
    # all of it otherwise.
    shares = [[.5], [.5], [1], [1], [1], [.5]]
    assert (found["bytes_moved"] / run.scales["size"] == [shares] * 2).all()
    assert (found["alpha"] >= 0).all() and (found["beta"] >= 0).all()
    # In shared memory the ranks read these where they lie.
    assert run.configuration["transports"] == "shared shared"
    read = [[kind in ("all_gather", "broadcast")] for kind in COLLECTIVES]
    assert (np.isnan(found["bandwidth"]) == [read] * 2).all()
    lines = [line.split() for line in said.splitlines()]
    told = [line[1:] for line in lines if line[:1] == ["measured"]]
    assert told == [[str(count), "of", "24"] for count in range(2, 25, 2)]
    assert {line[0] for line in lines if "copies" in line} == {"all_gather", "broadcast"}
    # Beside the plain calls of MPI.
    assert found["mpi_seconds"].shape == (2, 6, 2, 4) and (found["mpi_samples"] > 0).all()
    text = format_record(run)
    assert "plain MPI call" in text and "2 (P - 1) / P for all-reduce" in " ".join(text.split())
    run = replace(run, raw={name: one for name, one in run.raw.items() if name != "mpi_samples"})
    text = format_record(run)    # as of a device
    assert text.count("copies nothing") == 2 and "plain" not in text
    assert run.variables["beta"].units == "s byte-1"
    assert "transport" in said


@pytest.mark.ranks(2)
def test_the_library_and_plain_mpi_take_turns(comm, monkeypatch, capfd):
    """The rounds of both end where the intervals of both are narrow."""
    made, taken = [], []

    def makespans(step, *more):
        made.append(step)
        side, drawn = len(made) % 2, iter([1, 9, *[5] * 30])    # plain MPI's vary at first
        return lambda: taken.append(side) or 1e-6 * (5 if side else next(drawn))
    monkeypatch.setattr(sampling, "makespans", makespans)
    record = collectives.measure_collectives(Grid(comm, "numpy", y=2), [64], "float32",
                                             Limits(2, 30, 60))
    assert (record is not None) == (comm.rank == 0) and capfd.readouterr() == ("", "")
    rounds = np.reshape(taken, (len(COLLECTIVES), -1, 2))
    assert rounds.shape[1] > 2 and (rounds.sum(axis=-1) == 1).all()
    assert (rounds[..., 0] != rounds[0, 0, 0]).any()    # in random order
    if record is not None:
        found = {name: variable.values for name, variable in record.variables.items()}
        assert found["ended_by_width"].all()
        assert found["samples"].shape == found["mpi_samples"].shape == (1, 6, 1, rounds.shape[1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_what_is_read_in_place_is_not_moved(comm, monkeypatch, transport):
    """What a transport says of its collectives is what it moves, of blocks that were placed."""
    monkeypatch.setenv("MM3D_TRANSPORT", transport)
    grid = Grid(comm, "numpy", y=4)
    for kind in COLLECTIVES:
        grid.reset_traffic()
        split = Layout("y").split(grid, (1 << 16,), "y")
        a = split.empty((1 << 14,), "float32") if kind == "all_gather" else np.zeros(1 << 16)
        operands.collective_call(split, kind, a)()
        moved, words = (comm.allreduce(getattr(grid.y.traffic[kind], name))
                        for name in ("moved", "words"))
        assert (moved < words) == (kind in in_place_collectives(transport)), kind
        copied = {"all_gather": 0, "broadcast": 1 << 16} if moved < words else {}
        assert moved == copied.get(kind, moved) or np.isnan(moved)
    grid.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options, message", [
    (("measure", "gemm",), "measure gemm measures one rank"),
    (("measure", "matmul", "--shape", "8", "--grid", "2x2x2"), "a grid of 2 x 2 x 2 has 8 ranks"),
    (("measure", "matmul", "--shape", "8", "--scheme", "2d"), "2 ranks are no square"),
    (("measure", "matmul", "--shape", "8,8"), "three sizes M,N,K would do"),
    (("measure", "matmul", "--shape", "8", "--calls", "0"), "--calls: '0': a whole number of at"),
    (("measure", "matmul", "--shape", "8", "--grid", "2x1"),
     "scheme 3d has the directions x, y, z: "),
    (("measure", "collectives", "--grid", "2x1x1", "--least", "1"), "at least 4 bytes"),
    (("measure", "collectives", "--grid", "2x1x1", "--repetitions", "0"),
     "a whole number of at least 1")])
def test_wrong_arguments_get_one_message(comm, shared_tmp_path, options, message):
    said = refused(comm, *options, "--out", str(shared_tmp_path / "out"))
    assert said.count(message) == 1, said


@pytest.mark.ranks(1)
def test_what_one_rank_cannot_measure_is_refused(comm, tmp_path):
    assert "collectives needs two ranks or more" in refused(
        comm, "measure", "collectives", "--out", str(tmp_path / "out"))
    said = refused(comm, "measure", "gemm", "--threads", "1,99999", "--out", str(tmp_path / "out"))
    assert said.count("--threads 99999: BLAS takes ") == 1, said


DEAF = """
import os
import sys
from bench.__main__ import command
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
command()
"""


@pytest.mark.slow_but_first
def test_files_are_written_also_where_nobody_reads_the_tables(tmp_path):
    """And what comes after the first table that could not be printed is measured."""
    program = tmp_path / "deaf.py"
    program.write_text(DEAF)
    done = run_ranks(2, str(program), "measure", "matmul", "--shape", "16", "--shape", "8",
                     "--grid", "2x1x1", "--calls", "1", *QUICK, "--out", str(tmp_path))
    assert done.returncode == 0 and not done.stderr, done.stderr    # who has left has seen enough
    assert len([run_file.read_run(path) for path in tmp_path.glob("*.h5")]) == 2
