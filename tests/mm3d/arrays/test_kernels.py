"""The GPU's kernels, launched as on a GPU: their arithmetic on this processor, beside the readable
pairs in float64; and their source, compiled for GPUs where NVRTC is installed."""
import ctypes
import os
from types import SimpleNamespace

import numpy as np
import pytest

from mm3d.arrays import backend, cupy_kernels
from mm3d.arrays.cupy_attention import GpuAttention
from mm3d.model import functional, layers, rotary, token_functions
from rounded import DTYPES, attend, close, dtype_of, numbers

READABLE = functional, layers, rotary
# Odd lengths, one column, one row, more columns than threads; packs of 16 bytes and not.
SHAPES = [(3, 5, 7), (2, 4, 64), (1, 1, 1), (1, 1, 2056), (300, 1), (70, 33), (0, 8), (5, 0)]


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def cupy(request):
    """The backend: on this processor, and on a GPU where there is one."""
    if request.param == "fake":
        request.getfixturevalue("compiled_cupy")
    backend.get("numpy")
    library = backend.get("cupy")
    yield library
    for bound in ("max_across", "max_score_bytes", "query_block", "all_queries", "key_step"):
        vars(library.kernels).pop(bound, None)    # that a test has set, on a GPU for all tests


def both(cupy, name: str, function: str, arrays, out_like: int | None, *rest, **options):
    """What the kernel and the readable pair, in float64, make of the same numbers."""
    wide = [a.astype(np.float64) for a in arrays]
    there = [cupy.asarray(a) for a in arrays]
    readable = next(getattr(one, function).__wrapped__ for one in READABLE
                    if hasattr(one, function))
    if out_like is not None:
        host_out = np.empty(wide[out_like].shape)
        out = cupy.empty(arrays[out_like].shape, arrays[out_like].dtype)
        options_host, options = dict(options, out=host_out), dict(options, out=out)
    else:
        options_host = options
    expected = readable(*wide, *rest, **options_host)
    found = getattr(cupy.kernels, function)(*there, *rest, **options)
    as_tuple = (lambda x: x if isinstance(x, tuple) else (x,))
    return [(cupy.to_host(f), e) for f, e in zip(as_tuple(found), as_tuple(expected))]


@pytest.mark.limit(240)
@pytest.mark.parametrize("name", DTYPES)
def test_elementwise(cupy, name):
    for shape in SHAPES:
        x, dy = numbers(shape, name, 1), numbers(shape, name, 2)
        b = numbers(shape[-1:], name, 3)
        for function in ("add_rows", "scale_rows", "bias_gelu_forward", "scale_add_rows"):
            vectors = [b, numbers(shape[-1:], name, 4)][:1 + (function == "scale_add_rows")]
            for found, expected in both(cupy, name, function, [x, *vectors], 0):
                close(found, expected, name)
        gated = numbers((*shape[:-1], 2, shape[-1]), name, 5)
        for found, expected in both(cupy, name, "swiglu_backward", [dy, gated], 1):
            close(found, expected, name)
        expected = layers.swiglu_forward.__wrapped__(gated.astype(float), np.empty(shape))
        close(cupy.to_host(cupy.kernels.swiglu_forward(
            cupy.asarray(gated), cupy.empty(shape, x.dtype))), expected, name)
        for wide in (False, True):
            (dx, expected), db = both(cupy, name, "bias_gelu_backward", [dy, x, b], 0,
                                      keep_float32=wide)
            close(dx, expected, name)
            sums = "float64" if name == "float64" else "float32" if wide else name
            assert str(db[0].dtype) == sums
            close(*db, sums, 64 + shape[0])
        for function, arrays in (("sum_rows", [x]), ("sum_products", [x, dy]),
                                 ("sum_rows_and_products", [x, dy])):
            if 0 not in shape:
                for found, expected in both(cupy, name, function, arrays, None):
                    close(found, expected, name, 16 + shape[0])
                sums = "float64" if name == "float64" else "float32"
                for found, expected in both(cupy, name, function, arrays, None, True):
                    assert str(found.dtype) == sums
                    close(found, expected, sums, 64 + shape[0])


@pytest.mark.parametrize("across", [cupy_kernels.GpuKernels.max_across, 2])
def test_sums_over_blocks_of_rows(cupy, across):
    """The last block of each three adds them up, twice; more beside each other do not meet."""
    cupy.kernels.max_across = across
    a = numbers((150, 300), "float32", 1)
    for _ in range(2):
        for wide in (False, True):
            there = cupy.asarray(a)
            one, two = cupy.kernels.sum_rows_and_products(there, there, wide)
            for found, terms in ((cupy.kernels.sum_rows(there, wide), a), (one, a), (two, a * a)):
                close(cupy.to_host(found), terms.sum(axis=0, dtype=float), "float32", 64)


@pytest.mark.parametrize("name", DTYPES)
def test_sums_of_arrays_and_copies_of_rows(cupy, name):
    """Whole packs, others, and none; rows with gaps, in packs and not."""
    for size in (0, 1, 30, 2048, 4100):
        a, b = numbers((size,), name, 1), numbers((size,), name, 2)
        total = cupy.add_to(cupy.asarray(a), cupy.asarray(b))
        close(cupy.to_host(total), a.astype(float) + b.astype(float), name)
    for start in (1, 2, 3):    # no pack begins there: a GPU refuses to read one
        part = cupy.add_to(cupy.asarray(a)[start:], cupy.asarray(b)[:-start])
        close(cupy.to_host(part), a[start:].astype(float) + b[:-start].astype(float), name)
    rows = cupy.add_to(cupy.asarray(np.ones((300, 8), dtype_of(name))),
                       cupy.asarray(np.ones(8, dtype_of(name))))
    assert (cupy.to_host(rows) == 2).all()    # of another shape: no kernel reads beyond it
    for shape in ((2, 3, 5, 7), (2, 3, 5, 48), (1, 2, 0, 4)):
        a = numbers(shape, name, 3)
        out = cupy.asarray(np.zeros((shape[0], shape[2], 3, *shape[1::2]), a.dtype))
        there = out[:, :, 1, ...].transpose(0, 2, 1, 3)
        cupy.kernels.copy_rows(cupy.asarray(a), there)
        expected = np.zeros(out.shape, a.dtype)
        expected[:, :, 1] = a.transpose(0, 2, 1, 3)
        assert np.array_equal(cupy.to_host(out), expected)
        back = cupy.kernels.copy_rows(there, cupy.empty(shape, a.dtype))
        assert np.array_equal(cupy.to_host(back), a)


@pytest.mark.parametrize("name", DTYPES)
def test_into_arrays_with_gaps_and_in_place(cupy, name):
    """The rows of `out` need not follow each other, and `out` may be the input."""
    x, b = numbers((4, 6, 10), name, 1), numbers((5,), name, 2)
    wide = cupy.asarray(x)
    part = wide[:, 2:5, 5:]
    expected = x[:, 2:5, 5:].astype(float) + b.astype(float)
    cupy.kernels.add_rows(part, cupy.asarray(b), part)
    close(cupy.to_host(wide)[:, 2:5, 5:], expected, name)
    assert np.array_equal(cupy.to_host(wide)[:, :2], x[:, :2])
    dy, given = numbers((4, 3, 5), name, 3), cupy.to_host(part).astype(float)
    dx = np.empty(given.shape)
    _, db = functional.bias_gelu_backward.__wrapped__(dy.astype(float), given, b.astype(float), dx)
    _, found = cupy.kernels.bias_gelu_backward(cupy.asarray(dy), part, cupy.asarray(b), part)
    close(cupy.to_host(part), dx, name)
    close(cupy.to_host(found), db, name)


def test_kernels_are_looked_up_once(cupy, monkeypatch):
    """For each type."""
    looked, compiled = [], cupy.compile_module

    class Module:
        def __init__(self, *source) -> None:
            self.module = compiled(*source)

        def get_function(self, name: str):
            looked.append(name)
            return self.module.get_function(name)
    monkeypatch.setattr(cupy, "compile_module", Module)
    own = cupy_kernels.GpuKernels(cupy)
    for name in ("float32", "float64", "float32"):
        a, b = cupy.asarray(numbers((3, 4), name, 1)), cupy.asarray(numbers((4,), name, 2))
        own.add_rows(a, b, cupy.empty((3, 4), name))
    assert looked == ["add_rows<float>", "add_rows<double>"]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape, rotated", [((2, 3, 4, 32), 3), ((1, 5, 2, 12), 1),
                                            ((2, 3, 1, 8), 1), ((2, 0, 3, 32), 2)])
def test_rotations(cupy, name, shape, rotated):
    """Packs, and halves that are none; what is not rotated is copied, to rows with gaps, too."""
    half, kind = (16 if shape[-1] == 32 else 2), "float64" if name == "float64" else "float32"
    x = numbers(shape, name, 1)
    angles = np.outer(np.arange(shape[1]), [1, *range(2, half + 1)])
    cos, sin = np.cos(angles), np.sin(angles)
    expected = rotary.rotate.__wrapped__(x.astype(float), cos, sin, rotated, np.empty(shape))
    turns = [cupy.asarray(a.astype(kind)) for a in (cos, sin)]
    wide = cupy.empty((*shape[:2], 2 * shape[2], shape[3]), x.dtype)
    for out in (cupy.empty(shape, x.dtype), wide[:, :, ::2, :]):
        found = cupy.to_host(cupy.kernels.rotate(cupy.asarray(x), *turns, rotated, out))
        close(found, expected, name)
        assert np.array_equal(found[:, :, rotated:], x[:, :, rotated:])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5), (7, 304), (1, 1), (2, 8200)])
@pytest.mark.parametrize("pair", ["normalize", "rms"])
def test_normalization(cupy, name, whole, shape, pair):
    """A mean of 1000 does not cancel; rows whose rest others hold have twice the features.  Rows
    of packs, others, and ones too long for the registers."""
    centre = 1000 if name in ("float32", "float64") else 3
    x, dy = numbers(shape, name, 1, centre), numbers(shape, name, 2)
    features = shape[-1] * (1 if whole else 2)

    def total(a):    # the other rank holds the same
        return a if whole else a + a
    results = both(cupy, name, f"{pair}_forward", [x], 0, features, 1e-5, total)
    close(*results[0], name, 16 * (centre / 10 if centre > 3 else 1))
    close(*results[1], name, 64)
    xhat, rstd = (e for _, e in results)
    xhat = xhat.astype(dtype_of(name))
    rstd = rstd.astype(np.float64 if name == "float64" else np.float32)
    by = rstd.astype(float) * dy.astype(float)    # of which a single feature has nothing left
    for found, expected in both(cupy, name, f"{pair}_backward", [dy, xhat, rstd], 0, features,
                                total):
        close(found.astype(float) + by, expected + by, name, 16)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (2, 64), (1, 1), (2, 4104), (0, 8), (4, 0)])
def test_softmax_over_a_vocabulary(cupy, name, shape):
    """Rows of packs and others; logits of 1000 do not overflow.  In place, and elsewhere."""
    logits = numbers(shape, name, 1, 100 if name == "float16" else 1000)
    for sums in (False, True):
        there, wide = cupy.asarray(logits), logits.astype(np.float64)
        expected = token_functions.softmax_statistics.__wrapped__(wide, sums)
        found = cupy.to_host(cupy.kernels.softmax_statistics(there, sums))
        kind = "float64" if name == "float64" else "float32"
        assert str(found.dtype) == kind and np.array_equal(found[:, 0], expected[:, 0])
        close(found[:, 1:], expected[:, 1:], kind, 64 + shape[1])
        exponentials = cupy.to_host(there)
        close(exponentials, wide, name, 256 if name in ("float32", "float64") else 4)
        scale, shift = (numbers((shape[0], 1), kind, n) for n in (2, 3))
        for less in (None, shift):
            out, given = cupy.empty(shape, logits.dtype), [scale] + [less] * (less is not None)
            more = [cupy.asarray(a) for a in given] + [None] * (less is None)
            expected = exponentials.astype(np.float64) * scale - (0 if less is None else less)
            close(cupy.to_host(cupy.kernels.softmax_gradient(there, *more, out)), expected, name)
            close(cupy.to_host(there), exponentials.astype(np.float64), name, 0)
        cupy.kernels.softmax_gradient(there, *more, there)
        close(cupy.to_host(there), expected, name)


def test_softmax_in_the_place_of_rows_with_gaps(cupy):
    """What they hold is read, and what is beside them stays."""
    x, scale = numbers((3, 8), "float32", 1), numbers((3, 1), "float32", 2)
    wide = cupy.asarray(np.full((3, 16), 7, np.float32))
    part, other = wide[:, :8], wide[:, 8:]
    part[...] = cupy.asarray(x)
    found = cupy.to_host(cupy.kernels.softmax_statistics(part, False))
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    close(found[:, 1], exponentials.sum(axis=1), "float32", 16)
    close(cupy.to_host(part), exponentials, "float32", 16)
    assert (cupy.to_host(other) == 7).all()
    for out in (other, part):
        cupy.kernels.softmax_gradient(part, cupy.asarray(scale), None, out)
        close(cupy.to_host(out), exponentials * scale, "float32", 16)


ADAMW = (.2, .9, .7, .99, 1e-3, .05, .98)    # what decays is multiplied by the last one


def adamw(w, g, m, v, decays: bool) -> tuple:
    """The textbook's step, in float64."""
    w, g, m, v = (np.asarray(a, np.float64) for a in (w, g, m, v))
    s = g * .2
    m, v = m * .9 + s, v * .99 + .7 * s * s
    return w * (.98 if decays else 1) - .05 * m / (np.sqrt(v) + 1e-3), g, m, v


@pytest.mark.parametrize("name", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_adamw_of_all_parameters(cupy, monkeypatch, name):
    """Several blocks of a parameter, whole packs, and rest; arrays that begin at no pack; none.

    Values of a type have one launch, with one table until an array is elsewhere.
    """
    narrow = "bfloat16" if cupy.more_dtypes else "float16"
    values = ([None, "float16", narrow, None, "float16", narrow] if name == "float32" else
              [None] * 5 + ["float32"])    # which `round_into` rounds
    tables: dict[str, list] = {}
    launch = cupy.kernels._launch

    def keep(called, like, *rest, **options):
        tables.setdefault(str(like.dtype), []).append(rest[1])
        launch(called, like, *rest, **options)
    monkeypatch.setattr(cupy.kernels, "_launch", keep)

    def there(host, start):
        return cupy.asarray(np.append(np.zeros(start, host.dtype), host))[start:]
    hosts, parameters, decay = [], [], [True, False] * 3
    sizes = (9001, 0), (1, 0), (2048, 1), (0, 0), (5, 0), (4096, 0)
    for n, ((size, start), kind) in enumerate(zip(sizes, values)):
        w, g, m, v = (numbers((size,), name, 4 * n + k) for k in range(4))
        hosts.append((w, g, m, np.abs(v)))
        value = kind and there(np.full(size, 7, dtype_of(kind)), start)
        parameters.append((*(there(a, start) for a in hosts[-1]), value))
    for step in range(3):
        if step == 2:
            w, _, *others = parameters[2]
            parameters[2] = w, there(hosts[2][1].astype(name), 0), *others
        rounded = {n for n, kind in enumerate(values) if kind and name == "float32"}
        assert cupy.kernels.adamw_of_all(parameters, decay, ADAMW) == (set(range(6)), rounded)
        for n, (*arrays, value) in enumerate(parameters):
            hosts[n] = adamw(*hosts[n], decay[n])
            for a, expected in zip(arrays, hosts[n]):
                close(cupy.to_host(a), expected, name)
            if value is not None:
                now = cupy.to_host(arrays[0]) if n in rounded else np.full(sizes[n][0], 7)
                assert np.array_equal(cupy.to_host(value), now.astype(value.dtype))
    assert all(first is second is not third for first, second, third in tables.values())
    assert set(tables) == {name, *(values if name == "float32" else ())} - {None}


def test_adamw_leaves_what_its_kernel_does_not_take(cupy):
    """Masters with gaps, and of 16 bits, as they are; values with gaps to `round_into`."""
    w, g, m, v = (cupy.asarray(np.ones(6, "float32")) for _ in range(4))
    gaps, narrow = (cupy.asarray(np.ones(12, kind))[::2] for kind in ("float32", "float16"))
    half = cupy.asarray(np.ones(6, "float16"))
    parameters = [(gaps, g, m, v, None), (half, half, half, half, None), (w, g, m, v, narrow)]
    assert cupy.kernels.adamw_of_all(parameters, [True] * 3, ADAMW) == ({2}, set())
    assert all((cupy.to_host(a) == 1).all() for a in (gaps, half, narrow))
    close(cupy.to_host(w), adamw(*[np.ones(6)] * 4, True)[0], "float32")


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_rounding_of_masters(cupy, name):
    """Whole packs and the rest; arrays that begin at no pack, and ones with gaps."""
    for size, start in ((1, 0), (2051, 0), (2048, 1)):
        host = numbers((size + start,), name, 1)[start:]
        master = cupy.asarray(np.append(np.zeros(start, name), host))[start:]
        for kind in ("float16", name):
            for out in (cupy.empty((size,), kind), cupy.empty((2 * size,), kind)[::2]):
                cupy.kernels.round_into(master, out)
                assert np.array_equal(cupy.to_host(out), host.astype(kind))


@pytest.mark.limit(240)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("batch, heads, limit, first, queries, positions", [
    (2, 3, False, 0, 5, 5), (2, 3, True, 0, 6, 6), (2, 3, True, 2, 3, 7), (2, 3, True, 3, 0, 3),
    (1, 1, True, 130, 2, 136), (1, 1, False, 0, 1, 1030), (2, 3, False, 0, 0, 3),
    (0, 3, True, 0, 3, 3), (2, 0, True, 0, 3, 3), (0, 0, False, 0, 0, 3),
    (2, 3, 3, 0, 6, 6), (1, 2, 1, 1, 5, 7), (1, 1, 20, 130, 2, 136), (1, 1, 7, 10, 3, 15)])
def test_attention(cupy, name, batch, heads, limit, first, queries, positions):
    """Forward and backward, without a mask, causal, and to a window; also a part of the heads at a
    time; queries of a part of rows; rows of four neighbours a lane, others, and ones too long for
    the registers.  A rank without queries fills dK and dV all the same: they are added to those of
    others.  Under a mask a block has two queries."""
    d = 4
    kernels = cupy.kernels
    kernels.max_score_bytes = 2 * queries * positions * 8
    kernels.query_block, kernels.all_queries, kernels.key_step = 2, 1, 4
    _, found, expected = attend(cupy, name, (batch, queries, heads, d), positions, first, limit)
    # Of one key dQ and dK are roundings of zero, and compared beside 1.
    least = float(limit is not True and limit == 1)
    for n, (a, e) in enumerate(zip(found, expected)):
        # 36 on an H200: each P is a few off, dK 8 times that
        beside = least * (n > 1)
        close(a.astype(np.float64) + beside, e + beside, name, 64 if n > 1 else 16)


def attend_from_1(cupy, shape, positions: int, name: str) -> list[np.ndarray]:
    """Output, logarithms of sums, dQ, dK and dV of causal queries that begin at position 1."""
    batch, queries, heads, d = shape
    qkv = cupy.asarray(numbers((batch, positions, 3, heads, d), name, 1))
    q, k, v = qkv[:, 1:queries + 1, 0, ...], qkv[:, :, 1, ...], qkv[:, :, 2, ...]
    out, do = cupy.empty(shape, q.dtype), cupy.asarray(numbers(shape, name, 2))
    _, lse = cupy.kernels.attention_forward(q, k, v, 1, True, out)
    made = cupy.empty((batch, positions, 3, heads, d), q.dtype)
    made[...] = 0
    dq, dk, dv = made[:, 1:queries + 1, 0, ...], made[:, :, 1, ...], made[:, :, 2, ...]
    cupy.kernels.attention_backward(do, q, k, v, lse, 1, True, dq, dk, dv)
    return [cupy.to_host(a).copy() for a in (out, lse, made)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_scores_stay_within_their_bound(cupy, monkeypatch, name):
    """All sequences at once, some, some heads of one, some queries of one: nowhere are there more
    bytes of scores than `max_score_bytes`; on the stand-in the bits are the same until queries are
    divided."""
    (batch, queries, heads, d), positions, empty = (3, 3, 3, 2), 4, cupy.empty
    one = positions * (4 + (4 if name == "float32" else 2))    # of a query, in backward
    held: list[int] = []

    def counted(shape, dtype):
        held.append(np.dtype(dtype).itemsize * int(np.prod(shape)) * (len(shape) == 1))
        return empty(shape, dtype)
    monkeypatch.setattr(cupy, "empty", counted)
    expected = attend_from_1(cupy, (batch, queries, heads, d), positions, name)
    assert sum(held) > batch * heads * queries * one    # both passes
    for some, parts in ((2 * heads * queries, 2), (heads * queries, 3), (2 * queries, 3 * 2),
                        (queries, 3 * 3), (2, 3 * 3 * 2), (1, 3 * 3 * 3)):
        cupy.kernels.max_score_bytes = some * one
        blocks = cupy.kernels.query_blocks((batch, queries, heads, d), positions, 1,
                                           queries + 1, one // positions)
        rows = max(block[0].stop - block[0].start for block in blocks)
        groups = cupy.kernels.divide_heads(batch, heads, rows * one)
        assert len(groups) * len(blocks) == parts
        held.clear()
        found = attend_from_1(cupy, (batch, queries, heads, d), positions, name)
        scores = [size for size in held if size]
        backward = sum(scores[-2:])
        assert 0 < backward <= some * one and sum(scores[:-2]) <= some * one
        for a, b in zip(found, expected):
            if some >= queries and hasattr(cupy.xp, "pinned"):    # cuBLAS has other ways
                assert np.array_equal(a, b), some
            close(a, b.astype(np.float64), name, 16)


@pytest.mark.parametrize("pairs, positions, size, rows", [
    ((8, 16), 1024, 8, 256), ((1, 16), 1024, 8, 1024), ((2, 16), 1024, 8, 512),
    ((1, 16), 8192, 8, 256), ((1, 2), 8192, 8, 2048), ((1, 1), 2 ** 18, 8, 128)])
def test_blocks_are_large_enough_for_a_gpu(pairs, positions, size, rows):
    """Of many heads 256 queries; of fewer so many that all heads have 2^14, as far as their scores
    fit into memory."""
    batch, heads = pairs
    blocks = GpuAttention().query_blocks((batch, positions, heads, 64), positions, 0, positions,
                                         size)
    assert blocks == [(slice(at, at + rows), slice(0, at + rows))
                      for at in reversed(range(0, positions, rows))]


@pytest.mark.parametrize("window, seen", [(None, (520, 512, 256)), (100, (120, 368, 256))])
def test_blocks_leave_out_what_a_mask_hides(cupy, monkeypatch, window, seen):
    """Products and kernels have the keys alone that a query of their block sees, rounded to whole
    packs; sums over blocks go straight to the gradients."""
    cupy.kernels.all_queries = 1
    products: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    gemms, launch, n, d = cupy.gemms, cupy.kernels._launch, 520, 4

    def noted(a, b, out, add=False):
        products.append((*a.shape[1:], b.shape[2], add))
        gemms(a, b, out, add)
    monkeypatch.setattr(cupy, "gemms", noted)
    monkeypatch.setattr(cupy.kernels, "_launch", lambda name, like, blocks, *given: (
        rows.append(given[0].shape), launch(name, like, blocks, *given)))
    q, k, v = (cupy.asarray(numbers((1, n, 1, d), "float32", c)) for c in range(3))
    made = [cupy.empty(q.shape, q.dtype) for _ in range(4)]
    names = [f"{'window_' if window else ''}attention_{way}" for way in ("forward", "backward")]
    _, lse = getattr(cupy.kernels, names[0])(q, k, v, 0, window or True, made[0])
    getattr(cupy.kernels, names[1])(made[0], q, k, v, lse, 0, window or True, *made[1:])
    blocks = list(zip((8, 256, 256), seen, (False, True, True)))
    assert products == [one for r, c, _ in blocks for one in ((r, d, c, False), (r, c, d, False))
                        ] + [one for r, c, add in blocks for one in (
                            (r, d, c, False), (c, r, d, add), (r, d, c, False), (r, c, d, False),
                            (c, r, d, add))]
    assert rows == [(1, r, c) for r, c, _ in blocks] + [
        (1, r, c) for r, c, _ in blocks for _ in range(2)]


@pytest.mark.parametrize("gaps", [1, 2])
@pytest.mark.parametrize("several", [(), (3,)])
def test_products_of_one_matrix_or_several_are_exact_and_add(cupy, several, gaps):
    """Also of factors with gaps in rows and columns, which are copied."""
    A, B = (np.arange(1.0, 1 + np.prod(several) * m * n).reshape(*several, m, n)
            for m, n in ((6, 8), (8, 10)))
    a, b = (cupy.asarray(one)[..., ::gaps, ::gaps] for one in (A, B))
    A, B = (one[..., ::gaps, ::gaps] for one in (A, B))
    out = cupy.empty((*several, A.shape[-2], B.shape[-1]), A.dtype)
    for times in (1, 2):
        cupy.gemms(a, b, out, add=times == 2)
        assert np.array_equal(cupy.to_host(out), times * (A @ B))


def test_only_products_of_float32_use_tensorfloat(cupy, monkeypatch):
    """As the backend says at the call: modes change it."""
    told, binding = [], cupy.cublas.binding
    monkeypatch.setattr(cupy.cublas, "library", SimpleNamespace(
        cublasGemmStridedBatchedEx=lambda *given: told.append(given[-2])))
    for tf32 in (True, False):
        monkeypatch.setattr(cupy, "tf32", tf32)
        for name in ("float32", "float16", "float64"):
            cupy.gemm(*(cupy.empty((2, 2), name) for _ in range(3)))
    plain, wide = binding.CUBLAS_COMPUTE_32F, binding.CUBLAS_COMPUTE_64F
    assert told == [binding.CUBLAS_COMPUTE_32F_FAST_TF32, plain, wide, plain, plain, wide]


def test_launches_of_attention_do_not_grow_with_sequences(cupy):
    """Seven forward and fourteen backward for any number of sequences, where one at a time takes
    three and seven for each."""
    if not hasattr(cupy.xp, "pinned"):
        pytest.skip("the stand-in counts what a graph holds")
    for batch, counts in ((1, [3, 7]), (2, [7, 14]), (9, [7, 14])):
        q, k, v, do = (cupy.asarray(numbers((batch, 3, 2, 4), "float32", n)) for n in range(4))
        made = [cupy.empty(q.shape, q.dtype) for _ in range(4)]
        lse = cupy.empty((batch, 2, 3), "float32")
        steps = (lambda: cupy.kernels.attention_forward(q, k, v, 0, True, made[0]),
                 lambda: cupy.kernels.attention_backward(do, q, k, v, lse, 0, True, *made[1:]))
        assert [len(cupy.graph(step)._graph.kernels) for step in steps] == counts, batch


# --- For GPUs ------------------------------------------------------------------------------

def nvrtc():
    """The compiler: ``MM3D_NVRTC`` names the library, or the system finds it."""
    for name in filter(None, (os.environ.get("MM3D_NVRTC"), "libnvrtc.so.13", "libnvrtc.so.12",
                              "libnvrtc.so")):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc, and set MM3D_NVRTC to "
                "its libnvrtc.so")


@pytest.mark.parametrize("architecture", [70, 80, 90])
@pytest.mark.limit(240)
def test_kernels_compile_for(architecture):
    """To machine code of the architecture, every kernel for every type."""
    library = nvrtc()
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(known)
    if architecture not in list(known):
        pytest.skip(f"this NVRTC knows sm_{known[0]} and later, not sm_{architecture}")
    program = ctypes.c_void_p()
    code = cupy_kernels.read_source().encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, b"kernels.cu", 0, None,
                                      None) == 0
    for expression in cupy_kernels.TEMPLATE_INSTANCES:
        assert library.nvrtcAddNameExpression(program, expression.encode()) == 0
    options = [*(text.encode() for text in cupy_kernels.COMPILER_OPTIONS),
               f"-arch=sm_{architecture}".encode()]
    status = library.nvrtcCompileProgram(program, len(options),
                                         (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, binary)
    for name in cupy_kernels.KERNEL_NAMES:
        assert name.encode() in binary.raw, f"{name} is missing"
