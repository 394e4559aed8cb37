"""The benchmark of one layer, at a tiny size, and beside a made-up reference."""
import stat
import sys

import numpy as np
import pytest

from bench.__main__ import parser
from bench.errors import UsageError
from bench.experiments.layer.layer import KINDS
from bench.records import run_file
from bench.reports import layer_table
from bench.verbs import layer
from refused import refused
from support import ROOT, run_ranks

QUICK = ("--hidden", "32", "--head", "8", "--batch", "4", "--seq", "8", "--repetitions", "2",
         "--max-repetitions", "2", "--grid", "1x2x2", "--dtype", "float64")

# In the place of an interpreter with PyTorch: the serial scheme, and FACTOR times its output.
REFERENCE = """#!{python}
import sys
sys.path.insert(0, {root!r})
import numpy as np
import mm3d
from mpi4py import MPI
folder = sys.argv[2]
case = dict(np.load(folder + "/case.npz"))
x = case["input"]
model = mm3d.Transformer(mm3d.scheme("serial", MPI.COMM_SELF), layers=1, hidden=x.shape[2],
                         heads=int(case["heads"]), batch=x.shape[0], seq=x.shape[1],
                         dtype=str(x.dtype))
model.load({{name: a for name, a in case.items() if name.startswith("layers.")}})
y, saved = model.forward(x)
dx = model.backward(case["output gradient"], saved)
np.savez(folder + "/result.npz", **{{"output": {factor} * y, "input gradient": dx}},
         **{{"gradient of " + name: a for name, a in model.gradients().items()}})
print("made up", flush=True)
for line in sys.stdin:
    print(0.25, flush=True)
"""


def reference(folder, factor):
    path = folder / "python"
    path.write_text(REFERENCE.format(python=sys.executable, root=str(ROOT), factor=factor))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def measured(folder, *options, **env):
    done = run_ranks(4, "-m", "bench", "layer", *QUICK, *options, "--out", str(folder), **env)
    files = list(folder.glob("*.h5"))
    return done, run_file.read_run(files[0]) if files else None


def test_a_layer_is_measured_beside_a_reference(tmp_path):
    done, run = measured(tmp_path / "out", "--torch", reference(tmp_path, 1), "--overlap")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: variable.values for name, variable in run.variables.items()}
    assert run.kind == "layer" and len(run.checks) == 2 * 14
    assert all(check.passed for check in run.checks)
    assert found["times"].shape == (2, len(KINDS), 4, 2)
    assert (found["times"][:, 2, 0, 1] == 0.25).all() and np.isnan(found["times"][:, 2, 1:]).all()
    own, products, other, overlapped = found["seconds"][:, 0]
    assert min(own, products, overlapped) > 0 and other == 0.25 and found["hidden"] < 1
    makespans = found["times"][:, 0, :, 1].max(axis=1)
    assert found["ratio"][2, 0] == pytest.approx(np.median(0.25 / makespans))
    assert found["flops"] == 3 * (24 * 32 * 32 ** 2 + 4 * 32 * 8 * 32)
    assert (found["memory"][0] > 0).all()
    assert run.configuration["reference"] == "made up" and "PyTorch / layer" in done.stdout
    assert layer_table.layer_parts([run])[0].rows[0][0] == 32


@pytest.mark.slow
@pytest.mark.parametrize("transport", [
    "mpi", pytest.param("shared", marks=pytest.mark.slow)])
def test_alone_it_is_verified_with_the_serial_scheme(tmp_path, transport):
    done, run = measured(tmp_path, MM3D_TRANSPORT=transport)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(run.checks) == 2 * 14 and run.configuration["reference"] == "none"
    assert np.isnan(run.variables["ratio"].values[2:, 0]).all()
    counted, parameters = run.variables["memory"].values[0], 8 * 2 * (12 * 32 ** 2 + 13 * 32) / 4
    assert (counted > parameters).all() and run.configuration["transport"] == transport


@pytest.mark.slow
def test_what_differs_from_the_reference_gets_no_times(tmp_path):
    done, run = measured(tmp_path / "out", "--torch", reference(tmp_path, 1.001))
    assert done.returncode == 1 and run is None
    assert "differs from PyTorch: output has a relative error of 0.001" in done.stdout


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("hidden, head", [(100, 64), (200, 64), (32, 64)])
def test_no_other_heads_are_measured_than_were_asked_for(comm, hidden, head):
    arguments = parser().parse_args(["layer", "--hidden", f"64,{hidden}", f"--head={head}",
                                     "--out", "/dev/null/out"])
    with pytest.raises(UsageError, match=f"--hidden {hidden} --head {head}: a head of at least"):
        layer.run(arguments, comm)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options, message", [
    (("--torch", "/nowhere/python"), "--torch /nowhere/python: No such file"),
    (("--torch", "false"), "could not do the layer"),
    (("--overlap", "--scheme", "1d"), "--overlap --scheme 1d: only products of 3d can overlap"),
    (("--hidden", "33"), "--hidden 33 --head 8: a head of at least 1 feature"),
    (("--scheme", "4d"), "scheme '4d' is unknown")])
def test_wrong_arguments_get_one_message(comm, shared_tmp_path, options, message):
    said = refused(comm, "layer", *QUICK, *options, "--out", str(shared_tmp_path))
    assert said.count(message) == 1 and not list(shared_tmp_path.glob("*.h5")), said
