"""The checks of a GPU that the doctor makes, on a CuPy that needs none."""
import sys

import pytest

from bench.doctor import gpu_checks
from bench.doctor.checks import FAILED, OK, SKIPPED, WARNING
from bench.doctor.child_jobs import Facts
from bench.errors import UsageError
from bench.experiments.gpu import device_checks, parts
from mm3d.arrays import backend

FACTS = Facts(1, [], limit=30)


@pytest.fixture
def cupy(monkeypatch, compiled_cupy):
    monkeypatch.setattr(device_checks, "SIZES", dict(layers=1, hidden=8, heads=2, batch=1, seq=4))
    return backend.get("cupy")


def test_without_a_gpu_nothing_is_claimed(monkeypatch, no_backends):
    monkeypatch.setitem(sys.modules, "cupy", None)
    findings = [check(FACTS) for check in gpu_checks.GPU_CHECKS]
    assert [one.state for one in findings] == [FAILED] + [SKIPPED] * 6
    assert "needs the package cupy" in findings[0].text


def test_what_computes_right_is_found_right(cupy):
    for check in (gpu_checks.device, gpu_checks.products, gpu_checks.model, gpu_checks.graph):
        finding = check(FACTS)
        assert finding.state == OK, finding


def test_what_computes_wrong_is_found(cupy, monkeypatch):
    """A product that is 1 % off, a kernel that forgets a factor."""
    gemms, gelu = type(cupy).gemms, type(cupy.kernels).bias_gelu_backward

    def off(self, a, b, out):
        gemms(self, a, b, out)
        out *= 1.01
    monkeypatch.setattr(type(cupy), "gemms", off)
    assert gpu_checks.products(FACTS).state == FAILED
    monkeypatch.setattr(type(cupy), "gemms", gemms)
    monkeypatch.setattr(type(cupy.kernels), "bias_gelu_backward",
                        lambda self, dy, x, *rest: gelu(self, dy, dy, *rest))
    assert gpu_checks.model(FACTS).state == FAILED


def test_products_that_refuse_a_capture_are_no_graph(cupy, monkeypatch):
    """As CuPy's own do, which call cuBLAS through wrappers that set the stream."""
    monkeypatch.setattr(type(cupy), "gemm",
                        lambda self, a, b, out, progress: self.xp.matmul(a, b, out=out))
    finding = gpu_checks.graph(FACTS)
    assert finding.state == WARNING and "while a stream is captured" in finding.text
    with pytest.raises(UsageError, match="--graph: .*while a stream is captured"):
        parts.GpuBenchmark(cupy, graph=True)


@pytest.mark.parametrize("program, kind, state, text", [
    ("print('staged: all collectives are right on 8 ranks')", "staged", OK, "right on 8 ranks"),
    ("raise SystemExit('error: a broadcast')", "staged", FAILED, "MM3D_TRANSPORT=staged ended"),
    ("import os; os.abort()", "device", WARNING, "signal 6")])
def test_transports_are_tried_in_child_jobs(cupy, program, kind, state, text):
    facts = Facts(1, [sys.executable, "-c", program], limit=30)
    finding = gpu_checks.transport_check(kind)(facts)
    assert finding.state == state and text in finding.text
