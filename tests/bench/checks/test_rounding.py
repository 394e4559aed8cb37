"""References that round where a device does, and what they let through."""
import numpy as np
import pytest

from bench.checks import operation, tolerances
from bench.checks.rounding import RoundedBackend, rounding_backend, to_tf32
from bench.errors import WrongResult
from bench.experiments.gpu import device_checks
from bench.experiments.gpu.gpu_cases import Mode
from mm3d.arrays import backend
from mm3d.model import functional
from support import use_only


def test_tf32_has_ten_binary_places():
    """Halves go away from zero, and what has few places stays."""
    unit = 2.0 ** -10
    x = np.float32([1, 1 + unit, 1 + unit / 2, -1 - unit / 2, 1 + unit / 4, 1e30, 0])
    assert np.array_equal(to_tf32(x)[:5], np.float32([1, 1 + unit, 1 + unit, -1 - unit, 1]))
    assert np.all(np.abs(to_tf32(x) - x) <= np.abs(x) * unit / 2)


def test_the_eps_of_a_product_is_that_of_its_type():
    """Also of bfloat16, which `numpy.finfo` does not know."""
    for name, eps in (("float64", 2.0 ** -52), ("bfloat16", 2.0 ** -7)):
        if name == "bfloat16":
            pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
        a = np.eye(4).astype(name)
        checks = operation.check_own_product("C", (a, a, a), seed=0)
        assert [one.tolerance for one in checks] == [8 * eps] * 2


def test_numpy_is_itself_again_after_the_block():
    plain = backend.get("numpy")
    with pytest.raises(KeyError), rounding_backend() as library:
        assert backend.backend_of(np.zeros(1)) is library is not plain
        raise KeyError
    assert backend.get("numpy") is plain and backend.backend_of(np.zeros(1)) is plain


class Device(RoundedBackend):
    """A device that rounds as it should."""

    name = "device"

    def owns(self, a):
        return isinstance(a, np.ndarray)


PLAIN = backend.get("numpy")
MODES = [("float16", False), ("bfloat16", False), ("float32", True)]


@pytest.fixture(params=MODES, ids=["float16", "bfloat16", "tf32"])
def mode(request):
    """Such a device in a mode with few digits."""
    dtype, tf32 = request.param
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    with use_only(PLAIN):
        yield Mode(Device(tf32), dtype, tf32)


def run_step(library, dtype):
    """A step whose arrays are told apart from NumPy's by turns."""
    with use_only(library, PLAIN):
        return device_checks.run_model_step(library, dtype)


def test_what_rounds_in_the_same_places_is_the_same(mode):
    assert device_checks.check_model(mode, run_step).error == 0
    tolerance = tolerances.beside_serial(str(mode), 1)[1]
    assert device_checks.check_layer(mode, run_step)[0].tolerance == tolerance


def scaled(name):
    right = getattr(functional, name).__wrapped__

    def wrong(*arrays, **more):
        out = right(*arrays, **more)
        first = out[0] if isinstance(out, tuple) else out
        first *= np.asarray(1.02, first.dtype)
        return out
    return wrong


@pytest.mark.parametrize("what", ["scale_rows", "bias_gelu_backward", "normalize_backward",
                                  "attention_forward"])
def test_a_kernel_that_is_off_by_two_per_cent_is_seen(mode, what):
    """Though the results have the roundings of a whole layer."""
    class Kernels:
        dtypes = (np.dtype(np.float16), np.dtype(np.float32), *mode.backend.more_dtypes)
    setattr(Kernels, what, staticmethod(scaled(what)))
    mode.backend.kernels = Kernels
    with pytest.raises(WrongResult, match="a layer of hidden"):
        device_checks.check_layer(mode, run_step)


def test_a_missing_term_is_seen(mode):
    """Of one sum over rows: a gradient without its mean."""
    calls = []

    def wrong(library, dtype):
        found, name = run_step(library, dtype), "gradient of layers.0.mlp.up.bias"
        calls.append(library)
        found[name] -= (len(calls) == 2) * found[name].mean()
        return found
    with pytest.raises(WrongResult, match="a layer of hidden"):
        device_checks.check_layer(mode, wrong)
