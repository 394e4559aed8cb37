"""Every distributed product of one shape in one table: counts, bounds, pictures, refusals."""
import numpy as np
import pytest
from mpi4py import MPI

from bench.errors import UsageError, WrongResult
from bench.experiments.products import side_by_side
from bench.experiments.products.counts import count_dry
from bench.experiments.products.matmul import Limits, check_results
from bench.experiments.products.problem import Problem, product_grid
from bench.records import run_file
from bench.records.folder import read_folder
from bench.records.kinds.products import copied_operands
from bench.reports.figures import every_figure
from bench.validation.files import check_file
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.schemes import cannon
from mm3d.transport.communicators import DryCommunicator
from records import format_record, written
from refused import refused

SHAPE = (9, 12, 10)
LIMITS = Limits(2, 2, 1.0)


@pytest.mark.ranks(4)
def test_a_wrong_product_is_found(comm, monkeypatch):
    def wrong(*operands):
        C = right(*operands)
        return C * 1.001 if comm.rank == 3 else C
    right = cannon.ab
    monkeypatch.setitem(cannon.CannonMatrixProduct.ALGORITHMS, "ab", wrong)
    with pytest.raises(WrongResult, match="off by"):
        side_by_side.measure_side_by_side("ab", SHAPE, "float64", comm, "numpy", LIMITS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layer, found", [(0, 3), (3, 1)])
def test_a_wrong_copy_is_found(comm, layer, found):
    """The first copy is compared with the product, the others with the first."""
    problem = Problem("2.5d", "atb", product_grid("2.5d", comm, (1, 1, 4), "numpy"), SHAPE,
                      "float64")
    results = problem.forward()
    check_results(problem, results, 0)
    if problem.grid.z.rank == layer:
        results["C"] *= 1.001
    with pytest.raises(WrongResult, match=f"^copies of C .*{found} of 3 checks fail"):
        check_results(problem, results, 0)
    problem.grid.free()


@pytest.mark.ranks(4, slow=(8,))
def test_products_in_turns(comm, tmp_path):
    """Two on 4 ranks, all on 8: each has a sample in every round; words are the closed form's;
    operations are exact, and so is what is stored; what does not fit says why; it is drawn."""
    few = ["2d", "2d-pipelined"] * (comm.size == 4)
    record = side_by_side.measure_side_by_side("atb", SHAPE, "float64", comm, "numpy", LIMITS,
                                               names=few or None)
    if comm.rank:
        assert record is None
        return
    names, found = record.scales["scheme"], {
        name: variable.values for name, variable in record.variables.items()}
    assert found["samples"].shape == (len(names), 2) and np.isfinite(found["samples"]).all()
    assert (found["operations"].sum(axis=1) == 2 * 9 * 12 * 10).all()
    assert np.array_equal(found["words"].sum(axis=1), found["closed_form_words"])
    if few:
        assert names == few
        assert (found["stored"].sum(axis=1) == 9 * 12 + 12 * 10 + 9 * 10).all()
    else:
        assert {"1d", "3d", "agarwal", "2.5d-sd"} <= set(names)
        assert "cannon: 8 ranks are no square" in record.configuration["left_out"]
        same = [found["words"][names.index(name)].tolist() for name in ("3d", "agarwal")]
        assert same[0] == same[1]
    text = format_record(record)
    assert "ratios of 2 rounds" in text and "Balance of the" in text and " NO " not in text
    written(record, tmp_path)
    drawn, left_out = every_figure.draw_figures(read_folder(tmp_path))
    assert len(drawn) == 2 and not left_out and all(one.stat().st_size > 1000 for one in drawn)
    found["operations"][0, 0] += 1
    assert any("operations" in one for one in check_file(
        run_file.write_run(record, tmp_path, "wrong"))[0])
    found["words"][0, 0] += 1
    assert " NO " in format_record(record)


def test_a_named_product_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="--scheme 3d,2d: .*square"):
        side_by_side.measure_side_by_side("ab", SHAPE, "float64", DryCommunicator(8), "numpy",
                                          LIMITS, names=["3d", "2d"])


def test_faces_are_unbalanced_and_operands_with_copies_have_no_bound():
    counts = {name: count_dry(name, "ab", GridShape("xyz", (2, 2, 2)), (8, 8, 8), "float64")
              for name in ("faces", "3d", "2.5d")}
    stored = {name: [one.stored for one in found] for name, found in counts.items()}
    assert stored["faces"] == [48, 32, 32, 16, 32, 16, 16, 0] and stored["3d"] == [24] * 8
    assert all(one.operations == 2 * 8 ** 3 / 8 for found in counts.values() for one in found)
    assert sum(stored["2.5d"]) == 8 * 8 * 4    # two copies of B
    assert copied_operands("2.5d", "ab", GridShape("xyz", (2, 2, 2))) == ["B"]
    assert copied_operands("2.5d", "atb", GridShape("xyz", (2, 2, 2))) == []
    assert copied_operands("2.5d", "atb", GridShape("xyz", (2, 2, 2)), "backward") == ["C"]
    assert copied_operands("2.5d", "ab", GridShape("xyz", (2, 2, 1))) == []


def test_the_bound_with_memory():
    """MNK / (2 sqrt(2) P sqrt(S)) - S, and never below 0."""
    assert cost.lower_bound_with_memory(64, 64, 64, 1, 2) == pytest.approx(64 ** 3 / 4 - 2)
    assert cost.lower_bound_with_memory(64, 64, 64, 64, 4096) == 0


def test_all_refuses_what_it_does_not_measure(tmp_path):
    assert "leave out --backward" in refused(
        MPI.COMM_SELF, "measure", "matmul", "--scheme", "all", "--shape", "8", "--backward",
        "--out", str(tmp_path))
