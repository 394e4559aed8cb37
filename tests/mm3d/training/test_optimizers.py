"""Optimizers compute their formulas, and the same bits however a model is divided."""
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from fakelibs import RawModule
from mm3d.arrays import backend
from mm3d.arrays.elementwise import pieces
from mm3d.training.norms import reproducible_norm
from pipelines import M, SIZES

SHAPES = {"up.weight": (7, 300), "up.bias": (300,), "norm.weight": (11,), "odd.weight": (3, 5, 7)}
MESHES = [(2, "3d", (1, 2, 1)), (1, "2d", (2, 2)), (1, "1d", (4,))]


@pytest.fixture(autouse=True)
def numpy_backend():
    """Arrays of no grid have a backend too."""
    backend.get("numpy")


class Plain:
    """A model of whole arrays on one rank, as an optimizer sees it."""

    comm = MPI.COMM_SELF

    def __init__(self, arrays: dict, dtype: str = "float64", public=None):
        public = public or {name: a.shape for name, a in arrays.items()}
        self.trained = [SimpleNamespace(name=name, public_shape=public[name], counted=True,
                                        master=a.astype(dtype), grad=np.zeros(a.shape, dtype))
                        for name, a in arrays.items()]
        self.refreshed = 0

    def refresh(self):
        self.refreshed += 1

    def values(self) -> dict:
        return {t.name: t.master.copy() for t in self.trained}


def draw(name: str, shape: tuple, seed: int) -> np.ndarray:
    """A global array of many magnitudes."""
    random = np.random.default_rng([seed, *name.encode()])
    return random.standard_normal(shape) * np.exp(random.uniform(-9, 2, shape))


def drawn(seed: int, shapes=SHAPES) -> dict:
    return {name: draw(name, shape, seed) for name, shape in shapes.items()}


def set_gradients(model, seed: int, factor: float = 1.0) -> None:
    """This rank's blocks of the global gradients of a seed."""
    for t in model.trained:
        whole = draw(t.name, t.shape, seed) if hasattr(t, "layout") else draw(
            t.name, t.master.shape, seed)
        place = t.layout.slices(t.grid, t.shape) if hasattr(t, "layout") else ...
        t.grad[...] = whole[place] * factor


def formula(kind: str, w, gradients: list, decay: bool, clip: float | None, norms: list):
    """The textbook's values after steps with these gradients of one array."""
    lr, wd, b1, b2, eps, mu = 0.01, 0.1, 0.9, 0.95, 1e-6, 0.8
    m = v = np.zeros_like(w)
    for t, (g, norm) in enumerate(zip(gradients, norms), 1):
        g = g * min(1, clip / (norm + 1e-6)) if clip else g
        w = w * (1 - lr * wd * decay)
        if kind == "AdamW":
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            w = w - lr * (m / (1 - b1 ** t)) / (np.sqrt(v / (1 - b2 ** t)) + eps)
        else:
            m = (mu if kind == "momentum" else 0) * m + g
            w = w - lr * m
    return w


def optimizer_of(kind: str, model, clip=None, **options):
    options |= dict(weight_decay=0.1, clip=clip)
    if kind == "AdamW":
        return mm3d.AdamW(model, 0.01, betas=(0.9, 0.95), eps=1e-6, **options)
    return mm3d.SGD(model, 0.01, momentum=0.8 * (kind == "momentum"), **options)


@pytest.mark.parametrize("clip", [None, 0, 0.5])
@pytest.mark.parametrize("kind", ["AdamW", "momentum", "SGD"])
def test_values_are_those_of_the_formula(kind, clip):
    """Matrices decay, also of three dimensions; biases and norms do not."""
    before = drawn(0)
    for dtype, rtol in (("float64", 1e-13), ("float32", 2e-5)):
        model = Plain(before, dtype)
        optimizer, gradients = optimizer_of(kind, model, clip), [drawn(s) for s in (1, 2, 3)]
        for seed in (1, 2, 3):
            set_gradients(model, seed)
            assert optimizer.step()
        norms = [math.sqrt(sum((g ** 2).sum() for g in every.values())) for every in gradients]
        for t in model.trained:
            expected = formula(kind, before[t.name], [g[t.name] for g in gradients],
                               t.name in ("up.weight", "odd.weight"), clip, norms)
            np.testing.assert_allclose(t.master, expected, rtol, rtol * 1e-2)
        assert optimizer.steps == model.refreshed == 3


def test_values_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    before = drawn(0)
    for kind, other in (("AdamW", torch.optim.AdamW), ("momentum", torch.optim.SGD)):
        model = Plain(before)
        weights = {name: torch.tensor(a, requires_grad=True) for name, a in before.items()}
        options = (dict(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1) if kind == "AdamW" else
                   dict(momentum=0.8))
        ours = optimizer_of(kind, model, 0.5, decays=lambda t: kind == "AdamW")
        theirs = other(weights.values(), lr=0.01, **options)
        for seed in (1, 2, 3):
            set_gradients(model, seed)
            for name, w in weights.items():
                w.grad = torch.tensor(draw(name, w.shape, seed))
            torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
            ours.step(), theirs.step()
        for t in model.trained:
            np.testing.assert_allclose(t.master, weights[t.name].detach(), 1e-12, 1e-14)


def test_pieces_and_strides_change_no_bit():
    """Arrays of more than one piece, and views that are not contiguous."""
    whole = Plain({"a.weight": draw("a", (300, 500), 0)}, "float32")
    parts = Plain({f"{n}.weight": draw("a", (300, 500), 0)[:, n::2] for n in range(2)}, "float32")
    for t, n in zip(parts.trained, range(2)):
        t.master = np.zeros((300, 250, 2), np.float32)[..., 0]
        t.master[...] = whole.trained[0].master[:, n::2]
    for model in (whole, parts):
        optimizer = optimizer_of("AdamW", model, 0.1)
        for seed in (1, 2):
            for n, t in enumerate(model.trained):
                t.grad[...] = draw("g", (300, 500), seed)[:, slice(n, None, len(model.trained))]
            optimizer.step()
    for n, t in enumerate(parts.trained):
        assert np.array_equal(t.master, whole.trained[0].master[:, n::2])


@pytest.mark.parametrize("dims, block, views", [
    ((64, 8), 512, [64]), ((64, 16), 512, [32, 32]), ((5, 300), 700, [2, 2, 1]),
    ((5, 300), 200, [200, 100] * 5), ((3, 5, 300), 700, [2, 2, 1] * 3), ((2, 4, 16), 128, [2]),
    ((0, 4), 8, [])])
def test_pieces_of_what_is_not_contiguous_are_as_large_as_others(dims, block, views):
    """Guards against a pass a row over weights that lie in a node's shared matrix."""
    a = np.arange(2 * math.prod(dims)).reshape(*dims[:-1], 2 * dims[-1])[..., :dims[-1]]
    found = [piece for piece, _ in pieces(backend.backend_of(a), a, np.zeros(dims), block=block)]
    assert [len(piece) for piece in found] == views
    assert sum((piece.ravel().tolist() for piece in found), []) == a.ravel().tolist()


@pytest.mark.parametrize("kind, launches", [
    ("AdamW", ["adamw"]), pytest.param("momentum", ["round_into"] * 28, marks=pytest.mark.slow)])
def test_a_step_on_a_gpu_is_one_launch(compiled_cupy, kind, launches):
    """With a tied head; values are the rounded masters, whoever rounds them.  Any truth value says
    what decays."""
    models = []
    for name in ("numpy", "cupy"):
        model = mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, scheme="serial", backend=name), layers=2,
                         hidden=8, heads=2, vocab=9, batch=1, seq=4, dtype="float16",
                         master="float32", tied=True, seed=3)
        models.append((model, optimizer_of(
            kind, model, decays=lambda t: re.search("weight$", t.name))))
    library = backend.get("cupy")
    for seed in (1, 2):
        for model, optimizer in models:
            for t in model.trained:
                t.grad[...] = backend.backend_of(t.grad).asarray(
                    draw(t.name, t.grad.shape, seed).astype("float32"))
            RawModule.launched.clear()
            optimizer.step()
        assert RawModule.launched == launches
        for here, there in zip(*(model.trained for model, _ in models)):
            master = library.to_host(there.master)
            assert np.allclose(here.master, master, rtol=1e-5, atol=1e-7)
            assert np.array_equal(library.to_host(there.value), master.astype("float16"))


class Descent(mm3d.AdamW):
    def _update(self, xp, factors, scratch, w, g, *moments):
        xp.subtract(w, g, out=w)


def test_a_rule_of_its_own_is_kept_on_a_gpu(compiled_cupy):
    library = backend.get("cupy")
    model = mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, scheme="serial", backend=library), layers=1,
                     hidden=8, heads=2, vocab=9, batch=1, seq=4, dtype="float32")
    before = [library.to_host(t.master) for t in model.trained]
    for t in model.trained:
        t.grad[...] = 2
    Descent(model, 0.1).step()
    for t, old in zip(model.trained, before):
        assert np.array_equal(library.to_host(t.master), old - 2)


@pytest.mark.parametrize("by_hand", [None, "its stream", "another"])
def test_a_step_is_no_part_of_a_cuda_graph(compiled_cupy, by_hand):
    """It would repeat the first count of steps and learning rate; the model stays as it was, also
    by the run of the step before it is recorded."""
    model = mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, scheme="serial", backend="cupy"), layers=1,
                     hidden=4, heads=2, vocab=5, batch=1, seq=2, dtype="float32")
    library, optimizer = backend.get("cupy"), mm3d.AdamW(model, 0.1)
    before = [library.to_host(t.master) for t in model.trained]
    stream = library.xp.cuda.Stream(non_blocking=True) if by_hand == "another" else library.stream
    if by_hand:
        stream.use().begin_capture()
    with pytest.raises(RuntimeError, match="a CUDA graph would repeat the learning rate"):
        optimizer.step() if by_hand else library.graph(optimizer.step)
    if by_hand:
        stream.end_capture()
    assert optimizer.steps == 0 and all(
        np.array_equal(library.to_host(t.master), old) for t, old in zip(model.trained, before))
    assert optimizer.step() and optimizer.steps == 1


# --- The norm --------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, scale", [
    ("float64", 1), ("float64", 1e300), ("float64", 1e-310), ("float32", 1), ("float32", 1e37),
    ("float32", 1e-40), ("float16", 1)])
def test_norm_is_exact_and_its_bits_do_not_depend_on_the_division(dtype, scale):
    """Guards against norms whose clipping factor depends on the grid."""
    random = np.random.default_rng(0)
    for spread in (0, 3, 30):
        a = random.standard_normal(40000) * np.exp(random.uniform(-spread, 0, 40000))
        a = (a * scale).astype(dtype)
        expected = reproducible_norm([a], MPI.COMM_SELF)
        power = 2.0 ** min(1000, -math.frexp(float(abs(a).max()))[1])
        exact = math.sqrt(math.fsum((a.astype(float) * power) ** 2)) / power
        assert expected == pytest.approx(exact, rel=2e-15 if dtype == "float64" else 2.0 ** -31)
        for cuts in ([1], [7, 20000], sorted(random.integers(0, 40000, 9))):
            parts = np.split(random.permutation(a), cuts)
            assert reproducible_norm(parts, MPI.COMM_SELF) == expected
        assert reproducible_norm([a[::2], a[1::2].reshape(100, 200).T], MPI.COMM_SELF) == expected


def test_norm_of_nothing_and_of_what_is_not_finite():
    assert reproducible_norm([], MPI.COMM_SELF) == 0
    assert reproducible_norm([np.zeros(3), np.zeros((0, 4))], MPI.COMM_SELF) == 0
    for bad in (np.nan, np.inf, -np.inf):
        assert reproducible_norm([np.array([1.0, bad, 2.0])], MPI.COMM_SELF) == math.inf


def test_norm_beyond_all_numbers_is_infinite():
    """Though no element is; clipping refuses it like one that is not finite."""
    for bad in (np.full(4, 1e308), np.array([1.7e308, 1e308, 1e200])):
        assert reproducible_norm([bad], MPI.COMM_SELF) == math.inf
    model = Plain({"a.weight": np.zeros((2, 2))})
    for value in (1e308, np.nan):
        model.trained[0].grad[...] = value
        with pytest.raises(FloatingPointError, match="not finite after 0 steps"):
            optimizer_of("momentum", model, 1.0).step()
        assert not model.trained[0].master.any()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("momentum", marks=pytest.mark.slow)])
def test_clipped_steps_have_the_same_bits_on_every_mesh(comm, kind):
    """With given global gradients; norms and parameters are those of one rank, by ``==``.

    Guards against norms in which replicas or stages are counted twice or not at all
    (pytorch/torchtitan#596, pytorch/torchtune#2420, hpcaitech/ColossalAI#2192).
    """
    for stages, scheme, grid in MESHES:
        mesh = mm3d.Mesh(comm, stages, scheme, grid)
        model = mm3d.Pipeline(mesh, "1f1b", **SIZES, microbatches=M)
        stored = {name: shape for every in comm.allgather(
            {t.name: tuple(t.shape) for t in model.trained}) for name, shape in every.items()}
        state = model.state()
        plain = Plain({name: a.reshape(stored[name]) for name, a in state.items()}, "float32",
                      {name: a.shape for name, a in state.items()})
        both = [optimizer_of(kind, one, 0.5) for one in (model, plain)]
        for seed in (1, 2, 3):
            for optimizer in both:
                set_gradients(optimizer.model, seed)
                optimizer.step()
            assert both[0].norm == both[1].norm, (stages, scheme)
        expected = plain.values()
        for name, a in model.state().items():
            assert np.array_equal(a, expected[name].reshape(a.shape)), (stages, scheme, name)


# --- Loss scaling ----------------------------------------------------------------------------

def test_a_scaled_loss_gives_the_same_step():
    plain, scaled = Plain(drawn(0)), Plain(drawn(0))
    scaling = mm3d.LossScaling(initial=1024.0, interval=2)
    both = optimizer_of("AdamW", plain, 1.0), optimizer_of("AdamW", scaled, 1.0,
                                                           loss_scaling=scaling)
    for seed in (1, 2, 3):
        set_gradients(plain, seed)
        set_gradients(scaled, seed, scaled.loss_scale)
        assert all(optimizer.step() for optimizer in both)
    assert scaled.loss_scale == scaling.scale == 2048 and scaling.good_steps == 1
    assert all(np.array_equal(a, scaled.values()[name]) for name, a in plain.values().items())


def test_an_optimizer_without_scaling_takes_back_that_of_an_earlier_one():
    model = Plain(drawn(0))
    mm3d.SGD(model, 0.1, loss_scaling=mm3d.LossScaling())
    assert model.loss_scale == 65536
    mm3d.SGD(model, 0.1)
    assert model.loss_scale == 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_on_one_rank_skips_the_step_on_all(comm, clip):
    """Guards against a flag that is not reduced over the stages of a pipeline."""
    mesh = mm3d.Mesh(comm, 2, "3d", (1, 2, 1))
    model = mm3d.Pipeline(mesh, "1f1b", **SIZES, microbatches=M, dtype="float16",
                          master="float32")
    optimizer = mm3d.AdamW(model, 0.01, clip=clip, loss_scaling=mm3d.LossScaling(hysteresis=2))
    for rank, bad, scale in ((3, np.inf, 65536), (0, np.nan, 32768), (1, -np.inf, 32768)):
        set_gradients(model, 1)
        before = model.state()
        if comm.rank == rank:
            own = [t.grad for t in model.trained if t.counted and t.grad.size]
            own[-1][..., -1] = bad
        skipped = optimizer.step() is False
        assert comm.allgather(skipped) == [bool(comm.bcast(skipped))] * comm.size
        assert all(np.array_equal(a, before[name]) for name, a in model.state().items())
        assert optimizer.steps == 0 and model.loss_scale == scale
    set_gradients(model, 2)
    assert optimizer.step() and optimizer.steps == 1


def test_an_overflow_that_no_factor_of_the_loss_prevents_is_named():
    """As where the parameters are infinite in 16 bits; with a fixed factor steps are skipped."""
    for options, skipped in ((dict(initial=4.0), 2), (dict(initial=1.0, hysteresis=3), 2),
                             (dict(initial=8.0, smallest=3.0, hysteresis=2), 5)):
        model = Plain(drawn(0))
        optimizer = optimizer_of("SGD", model, loss_scaling=mm3d.LossScaling(**options))
        model.trained[1].grad[0] = np.nan
        assert not any(optimizer.step() for _ in range(skipped))
        with pytest.raises(FloatingPointError, match="smallest factor of the loss, [13], either"):
            optimizer.step()
        assert all(np.array_equal(a, model.values()[name]) for name, a in drawn(0).items())
    fixed = optimizer_of("SGD", model, loss_scaling=mm3d.LossScaling(1.0, backoff=1.0))
    assert not any(fixed.step() for _ in range(20)) and fixed.loss_scaling.skipped == 20


@pytest.mark.parametrize("make, words", [
    (lambda m: mm3d.SGD(m, -1), "lr=-1"), (lambda m: mm3d.SGD(m, math.nan), "lr=nan"),
    (lambda m: mm3d.SGD(m, 1, momentum=1), "momentum=1"), (lambda m: mm3d.SGD(m, "1"), "lr='1'"),
    (lambda m: mm3d.AdamW(m, 1, betas=0.9), "betas=.0.9,.: two numbers"),
    (lambda m: mm3d.AdamW(m, 1, clip=-1), "clip=-1: at least 0, or None would do"),
    (lambda m: mm3d.AdamW(m, 1, clip=math.nan), "clip=nan"),
    (lambda m: mm3d.AdamW(m, 1, betas=(0.9, 1)), "betas"), (lambda m: mm3d.AdamW(m, 1, eps=0),
                                                            "eps=0"),
    (lambda m: mm3d.AdamW(Plain(drawn(0), "float16"), 1), "master='float32'"),
    (lambda m: mm3d.SGD(Plain(drawn(0), "float16"), 1, loss_scaling=mm3d.LossScaling()),
     "loss_scaling cannot train in float16: .* master='float32'"),
    (lambda m: mm3d.SGD(m, 1, loss_scaling=3), "loss_scaling=3: mm3d.LossScaling.., or None"),
    (lambda m: mm3d.SGD(m, 1, decays=3), "decays=3: a function of a parameter would do"),
    (lambda m: mm3d.SGD(m, np.ones(2)), "lr=array.*: at least 0 would do"),
    (lambda m: mm3d.LossScaling(initial=0), "loss scaling"),
    (lambda m: mm3d.LossScaling("1"), "loss scaling")])
def test_numbers_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make(Plain(drawn(0)))


@pytest.mark.parametrize("name, value", [
    ("lr", -0.1), ("lr", math.nan), ("lr", "0.1"), ("lr", None), ("weight_decay", None),
    ("clip", -1), ("eps", 0), ("betas", (1, 1))], ids=str)
def test_a_number_that_is_set_later_is_refused_before_anything_changes(name, value):
    model = Plain(drawn(0))
    for clip in (None, 1.0):
        optimizer = optimizer_of("AdamW", model, clip)
        set_gradients(model, 1)
        setattr(optimizer, name, value)
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ") + ".* would do"):
            optimizer.step()
        assert optimizer.steps == 0
    assert all(np.array_equal(a, model.values()[name]) for name, a in drawn(0).items())


@pytest.mark.parametrize("step, options", [
    (-1, {}), (0, dict(warmup=11)), (0, dict(warmup=-1)), (0, dict(floor=2.0)),
    (0, dict(floor=-0.1))], ids=str)
def test_a_learning_rate_that_makes_no_sense_is_refused(step, options):
    with pytest.raises(ValueError, match=next(iter(options), "step") + "=.* would do"):
        mm3d.warmup_cosine(step, 10, 1.0, **options)


def test_the_learning_rate_rises_and_falls():
    rates = [mm3d.warmup_cosine(step, 10, 1.0, warmup=2, floor=0.1) for step in range(12)]
    assert rates[:2] == [0.5, 1.0] and rates[5] == pytest.approx(0.55)
    assert rates[9:] == [0.1] * 3 and rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)


@pytest.mark.parametrize("steps", [2, 3, 10, 49])
@pytest.mark.parametrize("peak, floor", [(1.0, 0.0), (3e-4, 3e-5), (0.3, 0.1)])
def test_one_step_has_the_peak_and_the_last_the_floor_exactly(steps, peak, floor):
    for warmup in range(steps):
        rates = [mm3d.warmup_cosine(step, steps, peak, warmup, floor) for step in range(steps)]
        assert rates.index(peak) == max(0, warmup - 1) and rates.count(peak) == 1
        falling = rates[rates.index(peak):]
        assert falling[-1] == floor and falling.count(floor) == 1 and max(rates) == peak


def test_a_rise_of_all_steps_ends_with_the_peak():
    assert [mm3d.warmup_cosine(step, 4, 1.0, 4) for step in range(6)] == [.25, .5, .75, 1, 0, 0]
    assert [mm3d.warmup_cosine(step, 1, 0.3, floor=0.1) for step in range(3)] == [.3, .1, .1]
