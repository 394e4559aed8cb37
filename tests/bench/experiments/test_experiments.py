"""Experiments measure from Python: plain values in, a verified record out, and nothing printed."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.errors import UsageError
from bench.experiments.layer.layer import MeasuredLayer, measure_layer
from bench.experiments.products.matmul import measure_product
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments.timing import Limits
from records import written
from support import ROOT

FOLDER = ROOT / "bench" / "experiments"
# Another process, which prints its results, and a reproduction, which passes on what jobs say.
SAYING = {"startup.py", "rows/reproduction.py"}
TWICE = Limits(2, 2)


def product(comm):
    grid = product_grid("3d", comm, backend="numpy")
    problem = Problem("3d", "abt", grid, (16, 12, 20), "float64")
    try:
        return measure_product(problem, backward=True, calls=1, limits=TWICE)
    finally:
        problem.grid.free()


def layer(comm):
    scheme = mm3d.scheme("3d", comm, backend="numpy")
    subject = MeasuredLayer(scheme, mm3d.ModelSizes(1, 32, 4, 4, 8), dtype="float64")
    record = measure_layer(subject, None, 1, TWICE)
    scheme.grid.free()
    return record


def test_a_layer_that_cannot_overlap_is_refused():
    subject = MeasuredLayer(mm3d.scheme("1d", MPI.COMM_SELF), mm3d.ModelSizes(1, 8, 2, 1, 2))
    with pytest.raises(UsageError, match="--scheme 1d: only products of 3d can overlap"):
        measure_layer(subject, None, 2, TWICE)


@pytest.mark.ranks(1, 8, first=(8,))
@pytest.mark.parametrize("measure, kind", [(product, "matmul"), (layer, "layer")])
def test_a_record_is_returned_and_nothing_is_printed(comm, shared_tmp_path, capfd, measure, kind):
    """On rank 0, complete: it can be written and validated; the other ranks get None."""
    record = measure(comm)
    assert capfd.readouterr() == ("", "")
    assert (record is not None) == (comm.rank == 0)
    if record:
        assert record.kind == kind and record.checks
        assert all(done.passed for done in record.checks)
        assert (np.asarray(record.variables["seconds"].values)[..., 0] > 0).any()
        written(record, shared_tmp_path)


def test_experiments_write_no_files_and_print_nothing():
    """What else belongs to verbs lies above them; see tests/house/test_imports.py."""
    for path in FOLDER.rglob("*.py"):
        module, text = str(path.relative_to(FOLDER)), path.read_text()
        assert "mm3d.console" not in text or module in SAYING, module
        assert "records.journal" not in text or module.startswith(
            ("rows/", "training/history")), module    # go on where they were stopped
