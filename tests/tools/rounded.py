"""Numbers of each type of the kernels, and how far apart results may be."""
import numpy as np
import pytest

DTYPES = [pytest.param("float64", marks=pytest.mark.slow), "float32", "float16"]
try:
    import ml_dtypes
    DTYPES.append(pytest.param("bfloat16", marks=pytest.mark.slow))
except ImportError:
    ml_dtypes = None


def dtype_of(name: str):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def numbers(shape, name: str, seed: int, centre: float = 0) -> np.ndarray:
    draw = centre + np.random.default_rng([seed, *shape]).standard_normal(shape)
    return draw.astype(dtype_of(name))


def close(found: np.ndarray, expected: np.ndarray, name: str, factor: float = 16) -> None:
    """Within some rounding errors of the type, each element of its own or the array's size."""
    eps = {"float64": 2.0 ** -52, "float32": 2.0 ** -23, "float16": 2.0 ** -10,
           "bfloat16": 2.0 ** -7}[name]
    assert found.shape == expected.shape
    found = found.astype(np.float64)
    size = np.abs(expected) + (np.sqrt(np.mean(expected ** 2)) if expected.size else 0)
    assert np.all(np.abs(found - expected) <= factor * eps * (size + 1e-300)), (
        np.max(np.abs(found - expected) / (size + 1e-300)) / eps)
