"""Numbers of each type of the kernels, attention of them, and how far apart results may be."""
import numpy as np
import pytest

from mm3d.arrays.cudnn_attention import Saved
from mm3d.model import functional
from mm3d.model.attention import windows

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


def attend(cupy, name: str, shape, positions: int, first: int, limit: int, gaps: bool = True):
    """What is computed there and in float64: output, logarithms of sums, dQ, dK, dV.

    `shape` is that of the queries; `limit` is whether a mask is causal, or a window.  With `gaps`
    arrays are parts of larger ones, as a layer's are.
    """
    prefix, module = ("", functional) if isinstance(limit, bool) else ("window_", windows)
    names = [f"{prefix}attention_{way}" for way in ("forward", "backward")]
    readable = [getattr(module, one).__wrapped__ for one in names]
    kernels = [getattr(cupy.kernels, one) for one in names]
    batch, queries, heads, d = shape
    kv, both = (numbers((batch, rows, 2, heads, d), name, n)
                for n, rows in ((1, positions), (2, queries)))
    there, more = cupy.asarray(kv), cupy.asarray(both)
    parts = [a[:, :, n, ...] for a in (there, more) for n in (0, 1)]
    K, V, Q, dO = parts if gaps else map(cupy.contiguous, parts)
    wide = [a.astype(np.float64) for a in (both[:, :, 1], both[:, :, 0], kv[:, :, 0], kv[:, :, 1])]
    out, expected = cupy.empty(shape, kv.dtype), [np.empty(shape)]
    _, lse = readable[0](*wide[1:], first, limit, expected[0])
    _, saved = kernels[0](Q, K, V, first, limit, out)
    gradients = [np.empty(a.shape) for a in wide[1:]]
    readable[1](*wide, lse, first, limit, *gradients)
    dq, dkv = cupy.empty(shape, kv.dtype), cupy.empty(kv.shape, kv.dtype)
    dq[...], dkv[...] = 7, 7    # what is not written shows
    found = [dq, dkv[:, :, 0, ...], dkv[:, :, 1, ...]]
    kernels[1](dO, Q, K, V, saved, first, limit, *found)
    found = [out, saved.array if isinstance(saved, Saved) else saved, *found]
    return saved, [cupy.to_host(a) for a in found], [*expected, lse, *gradients]
