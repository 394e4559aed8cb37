"""The verb ``gpu``, rehearsed: on NumPy, and on a CuPy that needs no GPU."""
import sys
from argparse import Namespace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.__main__ import parser
from bench.cases.paper import load_tables
from bench.errors import UsageError, WrongResult
from bench.experiments.gpu import device_checks, gpu_cases, parts
from bench.experiments.gpu.gpt_steps import GptStep
from bench.experiments.gpu.parts import GpuBenchmark, measure_part
from bench.instruments.timing import Limits
from bench.prediction.pipelines.training_step import predict_gpu_step
from bench.records import run_file
from bench.validation.files import check_file
from bench.verbs.measure import gpu
from mm3d.arrays import backend
from mm3d.config import Model


def arguments(tmp_path, library: str, *more: str) -> Namespace:
    return parser(["measure", "gpu"]).parse_args([
        "measure", "gpu", "--backend", library, "--scale", "tiny", "--repetitions", "2",
        "--max-repetitions", "2", "--out", str(tmp_path), *more])


def records(tmp_path) -> dict:
    found = [run_file.read_run(path) for path in tmp_path.glob("*.h5")]
    return {record.kind: record for record in found}


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.slow)])
def test_every_part_is_measured_and_written(tmp_path, monkeypatch, capsys, request, library,
                                            no_backends):
    """One row of each scheme."""
    tables = load_tables()
    few = {row.scheme: row for row in reversed(tables.rows)}
    tables = msgspec.structs.replace(tables, rows=[*few.values()])
    monkeypatch.setattr(parts, "load_tables", lambda: tables)
    if library == "cupy":
        request.getfixturevalue("compiled_cupy")
    monkeypatch.setitem(sys.modules, "torch", None)
    chosen = arguments(tmp_path, library, *["--graph"] * (library == "cupy"))
    if library == "cupy":
        # Minutes, where the threads of a GPU take turns on a processor.
        chosen.part.remove("rows")
        monkeypatch.setitem(gpu_cases.SCALES, "tiny",
                            gpu_cases.Scale([8], (2, 16), [16], (1, 4), "tiny", dict(
                                layers=1, hidden=16, heads=2, batch=1, seq=4, vocab=9)))
        monkeypatch.setattr(device_checks, "SIZES",
                            dict(layers=1, hidden=16, heads=2, batch=2, seq=5))
    assert gpu.run(chosen, MPI.COMM_SELF) == 0
    found = records(tmp_path)
    assert found.keys() == {f"gpu-{part}" for part in chosen.part}
    modes = found["gpu-gemm"].scales["mode"]
    assert modes[0] == "float32" and ("tf32" in modes) == (library == "cupy")
    for kind in found.keys() - {"gpu-layer", "gpu-step"}:
        assert (found[kind].variables["samples"].values > 0).all(), kind
    layers = found["gpu-layer"].variables["samples"].values
    assert (layers[:, :, 0::2] > 0).all() and np.isnan(layers[:, :, 1]).all()    # no PyTorch
    assert len(found["gpu-layer"].scales["library"]) == 2 + (library == "cupy")    # the graph
    steps = found["gpu-step"].variables["samples"].values
    assert (steps[:, 0] > 0).all() and np.isnan(steps[:, 1]).all()
    assert set(found["gpu-step"].scales["mode"]) <= {"float32", "bfloat16"}
    if library == "numpy":
        assert len(found["gpu-rows"].scales["row"]) == len(tables.rows)
    assert ("gpu" in found["gpu-gemm"].environment) == (library == "cupy")
    assert [check_file(path)[0] for path in tmp_path.glob("*.h5")] == [[]] * len(found)
    assert "gpu-layer" in capsys.readouterr().out
    assert not getattr(backend.get(library), "tf32", False)


LLAMA = """
name = "small"
layers = 2
hidden = 24
heads = 6
vocab = 31
seq = 12
tied = false
[architecture]
norm = "rms"
positions = "rotary"
kv_heads = 3
perceptron = "swiglu"
inner = 40
biases = "none"
"""


def test_a_step_of_a_model_stands_beside_its_prediction(tmp_path, monkeypatch, capsys):
    """In the file, with its sizes; PyTorch has no such layers."""
    (tmp_path / "small.toml").write_text(LLAMA)
    monkeypatch.setitem(sys.modules, "torch", None)
    chosen = arguments(tmp_path, "numpy", "--part", "step", "--mode", "float32", "--batch", "3",
                       "--model", str(tmp_path / "small.toml"), "--machine", "dgx-h100")
    asked = []
    monkeypatch.setattr(gpu, "predict_gpu_step", lambda model, *named: asked.append(
        (model, *named)) or ({"own": 2.0, "fused": 1.0}, 2 ** 30))
    assert gpu.run(chosen, MPI.COMM_SELF) == 0
    (model, *named), = asked
    assert named == ["float32", "dgx-h100"] and model.architecture.kv_heads == 3
    record, = records(tmp_path).values()
    assert record.scales["mode"] == ["float32"] and record.scales["kernels"] == ["own", "fused"]
    assert record.configuration["batch"] == 3 and record.configuration["vocab"] == 31
    assert record.configuration["architecture_norm"] == "rms"
    assert record.values("predicted").tolist() == [[2, 1]]
    parameters = 2 * 31 * 24 + 24 + 2 * (2 * 24 + 4 * 24 * 24 + 3 * 24 * 40)
    assert record.values("peak") > 4 * 4 * parameters    # and AdamW's moments
    assert [check_file(path)[0] for path in tmp_path.glob("*.h5")] == [[]]
    row, = [line for line in capsys.readouterr().out.splitlines() if " 1.00 " in line]
    assert row.split()[:9] == ["2", "x", "24,", "31", "tokens,", "3", "x", "12", "float32"]


def test_memory_of_a_step_is_that_of_its_dry_run(tmp_path, monkeypatch):
    """To a number, on NumPy."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu.run(arguments(tmp_path, "numpy", "--part", "step", "--mode", "float32",
                             "--machine", "dgx-h100"), MPI.COMM_SELF) == 0
    record, = records(tmp_path).values()
    assert abs(record.values("peak") - record.values("predicted_peak")) <= 8


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"architecture": mm3d.Architecture(
    norm="rms", positions="rotary", kv_heads=2, perceptron="swiglu", inner=1408, biases="none")}])
def test_memory_of_a_step_on_a_gpu_is_that_of_its_dry_run(more):
    """Where cuDNN computes attention; its workspaces come on top."""
    library = backend.get("cupy")
    if not library.more_dtypes or library.kernels.flash is None:
        pytest.skip("needs cuDNN and bfloat16 on this GPU")
    sizes = dict(layers=4, hidden=512, heads=8, batch=8, seq=512, vocab=8192) | more
    step = GptStep(gpu_cases.Mode(library, "bfloat16"), sizes, 0)
    step.peak()
    _, predicted = predict_gpu_step(Model(**sizes), "bfloat16", "dgx-h100")
    assert predicted == pytest.approx(step.peak(), abs=2 ** 26)


@pytest.mark.parametrize("more, said", [
    (["--layers", "4"], "--layers 4: give --model too"),
    (["--model", "mixtral-8x7b"], "--model mixtral-8x7b has experts"),
    (["--mode", "tf32"], "--mode tf32: float32, float16"),
    (["--machine", "dgx-h1000"], "dgx-h1000"),
    (["--part", "gemm", "--model", "gpt2"], "--model gpt2: it is of --part step"),
    (["--part", "step", "--graph"], "--graph: it is of --part layer")])
def test_options_that_would_do_nothing(tmp_path, more, said):
    with pytest.raises(UsageError, match=said):
        gpu.run(arguments(tmp_path, "numpy", *more), MPI.COMM_SELF)


def test_a_case_leaves_no_idle_memory(monkeypatch, no_backends):
    """PyTorch's pool kept what an H100 had for the next layer."""
    benchmark, released = GpuBenchmark("numpy", "tiny", limits=Limits(1, 1, 1.0)), []
    monkeypatch.setattr(type(benchmark.backend), "release_idle_memory",
                        lambda self: released.append("mm3d"))
    monkeypatch.setitem(sys.modules, "torch", None)
    for part in ("layer", "step"):
        released.clear()
        found = measure_part(benchmark, part)
        cases = found.variables["samples"].values[..., 0, 0].size    # of mm3d alone
        assert len(released) == 1 + cases, part
    released.clear()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(
        is_available=lambda: True, empty_cache=lambda: released.append("PyTorch"))))
    benchmark.backend.host_buffers = False    # as of a device
    benchmark.release_memory()
    assert released == ["mm3d", "PyTorch"]


@pytest.mark.parametrize("part, owner, name", [
    ("gemm", backend.Backend, "gemm"), ("elementwise", gpu_cases.functional, "scale_rows"),
    ("elementwise", gpu_cases.functional, "sum_products"), ("layer", backend.Backend, "gemm"),
    ("step", backend.Backend, "gemm"), ("rows", backend.Backend, "gemm")])
def test_what_is_wrong_by_a_thousandth_gets_no_times(tmp_path, monkeypatch, capsys, part, owner,
                                                     name):
    """In float32, that is: what it is compared with is float64."""
    right = getattr(owner, name)

    def wrong(*arrays):
        out = right(*arrays)
        if out.dtype == np.float32:
            out *= 1.001
        return out
    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WrongResult, match="is off by"):
        measure_part(GpuBenchmark("numpy", "tiny", limits=Limits(2, 2)), part)
    assert not any(capsys.readouterr())
    if part == "gemm":
        assert gpu.run(arguments(tmp_path, "numpy", "--part", part), MPI.COMM_SELF) == 1
        said = capsys.readouterr().err
        assert f"failed: gpu-{part}: " in said and "no times were written" in said
        assert not list(tmp_path.glob("*.h5"))


def test_a_check_within_a_mode_leaves_it_in_force():
    """A layer's small model is checked in the mode in which the layer is timed."""
    numpy = backend.get("numpy")
    with gpu_cases.Mode(numpy, "float32", tf32=True), gpu_cases.Mode(numpy, "float32", tf32=True):
        assert numpy.tf32
        with gpu_cases.Mode(numpy, "float64"):
            assert not numpy.tf32
        assert numpy.tf32
    assert not numpy.tf32


def test_what_is_no_number_is_found():
    numpy, a = backend.get("numpy"), np.ones(3, np.float16)
    assert device_checks.check_finite(numpy, "ones", lambda: (a, a))[0].passed
    a[1] = np.inf
    with pytest.raises(WrongResult, match="of ones that are not finite is off by 2"):
        device_checks.check_finite(numpy, "ones", lambda: (a, a))
    right = {"output": np.ones(1), "gradient": np.ones(1)}
    steps = iter((right, right | {"gradient": np.full(1, np.nan)}))
    found = device_checks.check_model(gpu_cases.Mode(numpy, "float32"),
                                      lambda library, dtype: next(steps))
    assert not found.passed    # behind an output that is right


def test_the_reference_is_wide_but_for_few_digits():
    asked = []
    for name in ("float64", "float32", "float16"):
        device_checks.check_model(gpu_cases.Mode(backend.get("numpy"), name),
                                  lambda library, dtype: asked.append(dtype) or {"y": np.ones(1)})
    assert asked == ["float64", "float64", "float64", "float32", "float16", "float16"]


@pytest.mark.parametrize("ours, wrong", [
    ((5, 4, 3), ""), ((5, 4, 3.09), ""), ((5.01, 4, 3), "loss 0"), ((5, 4.2, 3), "loss 1"),
    ((5, 4, np.nan), "loss 2")])
def test_losses_are_those_of_pytorch_s_steps(ours, wrong):
    """To a tenth of what a step changes: an optimizer that does nothing is found."""
    mode = gpu_cases.Mode(backend.get("numpy"), "float32")
    sides = [iter(losses).__next__ for losses in (ours, (5, 4, 3))]
    if not wrong:
        assert len(device_checks.check_losses(mode, *sides)) == 3
        return
    with pytest.raises(WrongResult, match=f"{wrong} of float32 beside PyTorch's is off by"):
        device_checks.check_losses(mode, *sides)


def test_without_a_device_there_are_no_graphs():
    with pytest.raises(UsageError, match="--graph: backend .numpy. cannot record a step as"):
        GpuBenchmark("numpy", graph=True)


def test_it_measures_one_rank(tmp_path):
    class Two:
        size = 2
    with pytest.raises(UsageError, match="gpu measures one rank"):
        gpu.run(arguments(tmp_path, "numpy"), Two)


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, no_backends):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match="backend 'cupy' needs the package cupy"):
        gpu.run(arguments(tmp_path, "cupy"), MPI.COMM_SELF)
