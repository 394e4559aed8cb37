"""Attention by cuDNN: on a stand-in that computes what its graphs describe, and on a GPU."""
import sys

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.arrays import backend, cudnn_attention, cupy_backend
from mm3d.arrays.cudnn_attention import Saved
from mm3d.grid.activations import Context
from rounded import DTYPES, attend, close, numbers

HALVES = [one for one in DTYPES if "16" in str(one)]    # also of what is slow


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def cupy(request, monkeypatch):
    """The backend, with cuDNN; on a GPU only where its package is installed."""
    if request.param == "fake":
        request.getfixturevalue("compiled_cupy")
        import fakecudnn
        monkeypatch.setitem(sys.modules, "cudnn", fakecudnn.module())
    else:
        pytest.importorskip("cudnn")
    backend.get("numpy")
    return backend.get("cupy")


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("shape, positions, first, limit", [
    ((2, 5, 3, 8), 5, 0, False), ((2, 70, 2, 48), 70, 0, True), ((1, 6, 2, 16), 11, 3, True),
    ((2, 4, 3, 8), 9, 5, True), ((1, 3, 1, 128), 40, 0, False), ((1, 1, 2, 8), 4, 0, True),
    ((2, 70, 2, 48), 70, 0, 33), ((2, 4, 3, 8), 9, 5, 3), ((1, 6, 2, 16), 11, 3, 5),
    ((1, 5, 2, 8), 5, 0, 2)])
def test_attention_by_cudnn(cupy, name, shape, positions, first, limit):
    """Also of queries that begin anywhere, and to windows; gradients of keys that no query sees
    are zero.  The gradients of one query of one key are left to products."""
    for gaps in (True, False):
        saved, found, expected = attend(cupy, name, shape, positions, first, limit, gaps)
        assert isinstance(saved, Saved)
        for a, e in zip(found, expected):
            close(a, e, name, 64)


@pytest.mark.parametrize("name, shape, positions, first", [
    ("float16", (2, 5, 3, 4), 5, 0),        # features in no packs of 8
    ("float16", (2, 5, 3, 8), 6, 3),        # queries after the last key
    ("float16", (2, 0, 3, 8), 5, 0), ("float32", (2, 5, 3, 8), 5, 0)])
def test_other_attention_is_computed_by_products(cupy, name, shape, positions, first):
    saved, found, expected = attend(cupy, name, shape, positions, first, True)
    assert not isinstance(saved, Saved)
    for a, e in zip(found, expected):
        close(a, e, name, 64)


def test_arrays_that_cudnn_cannot_read(cupy):
    """An output gradient that begins at no multiple of 16 bytes is left to products."""
    _, found, expected = attend(cupy, "float16", (1, 6, 2, 8), 6, 0, True)
    kv, plain = numbers((1, 6, 2, 2, 8), "float16", 1), numbers((1, 6, 2, 2, 8), "float16", 2)
    there, more = cupy.asarray(kv), cupy.asarray(plain)
    K, V, Q = there[:, :, 0, ...], there[:, :, 1, ...], more[:, :, 0, ...]
    shifted = cupy.empty((6 * 2 * 8 + 1,), "float16")
    dO = shifted[1:].reshape(1, 6, 2, 8)
    dO[...] = more[:, :, 1, ...]
    out = cupy.empty(Q.shape, "float16")
    _, saved = cupy.kernels.attention_forward(Q, K, V, 0, True, out)
    made = [cupy.empty(Q.shape, "float16") for _ in range(3)]
    cupy.synchronize()    # the addresses are told, and then cuDNN is not called
    cupy.kernels.attention_backward(dO, Q, K, V, saved, 0, True, *made)
    for a, e in zip(made, expected[2:]):
        close(cupy.to_host(a), e, "float16", 64)


@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_is_planned_once(cupy, monkeypatch, window):
    """A model on the device keeps cuDNN's plans, and gives the same bits each time.  It saves as
    many bytes as with products: the output that cuDNN needs again is saved in any case."""
    planned, library = [], sys.modules["cudnn"]
    graph = library.pygraph
    monkeypatch.setattr(library, "pygraph", lambda **what: planned.append(1) or graph(**what))
    scheme = mm3d.scheme("serial", None, None, "cupy")
    model = mm3d.Transformer(scheme, layers=2, hidden=32, heads=4, batch=2, seq=6, causal=True,
                             dtype="float16", architecture=mm3d.Architecture(window=window))
    x = cupy.asarray(numbers((2, 6, 32), "float16", 5))
    results = []
    for _ in range(2):
        model.zero_gradients()
        y, saved = model.forward(x)
        dx = model.backward(x, saved)
        results.append([cupy.to_host(a).copy() for a in (
            y, dx, *(p.grad for p in model.parameters))])
    assert len(planned) == 2    # forward and backward
    kept = model.saved_bytes(saved)
    monkeypatch.setattr(cupy.kernels, "flash", None)
    assert kept == model.saved_bytes(model.forward(x)[1])
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_a_ring_merges_what_cudnn_finds(cupy):
    """Two chunks of a rank, of which the later meets both, have the output of the whole."""
    scheme, found = mm3d.scheme("serial", None, None, "cupy"), []
    x = cupy.asarray(numbers((2, 7, 32), "float16", 5))
    for context in (None, Context(mm3d.Grid(MPI.COMM_SELF, "cupy", c=1).c, 7, "ring")):
        model = mm3d.Transformer(scheme, layers=1, hidden=32, heads=4, batch=2, seq=7,
                                 causal=True, dtype="float16", context=context)
        y, saved = model.forward(x)
        found.append([cupy.to_host(a).astype(np.float64) for a in (y, model.backward(x, saved))])
    for whole, merged in zip(*found):
        close(merged, whole, "float16", 64)


def test_where_cudnn_is_left_out(compiled_cupy, monkeypatch, tmp_path):
    """Without its package, on old GPUs, or if one says so; a package without its library tells,
    or with one that is broken."""
    library = backend.get("cupy")
    assert "flash_attention" not in library.describe_device()
    import fakecudnn
    monkeypatch.setitem(sys.modules, "cudnn", fakecudnn.module())
    assert cudnn_attention.open_flash(library, 80).version == "9.19.0"
    assert cudnn_attention.open_flash(library, 75) is None
    for asked in ("0", "1", ""):
        monkeypatch.setenv("MM3D_CUDNN", asked)
        library = cupy_backend.CupyBackend()
        assert (cudnn_attention.open_flash(library, 90) is None) == (asked == "0")

    def fail():
        raise RuntimeError("Unable to find symbol cudnnCreate")
    monkeypatch.setattr(sys.modules["cudnn"], "create_handle", fail)
    with pytest.raises(ValueError, match=r"cudnnCreate.*MM3D_CUDNN=0"):
        cudnn_attention.open_flash(library, 90)
    monkeypatch.delitem(sys.modules, "cudnn")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cudnn.py").write_text('raise OSError("libcudnn.so.9: file too short")', "utf-8")
    with pytest.raises(ValueError, match=r"file too short.*MM3D_CUDNN=0"):
        cudnn_attention.open_flash(library, 90)
