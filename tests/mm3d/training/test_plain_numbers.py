"""A caller's scalars of NumPy give the bits of Python's numbers: float32 arrays stay float32."""
import inspect
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.arrays.plain_numbers import plain_number
from checkpoint_models import everything, same

GPT = dict(layers=2, hidden=12, heads=2, vocab=11, batch=4, seq=6, seed=3, microbatches=2,
           label_smoothing=0.1, z_loss=0.01, ignored=-1, dropout=0.3)
EXPERTS = dict(count=4, top=2, every=1, capacity=1.1, balance=0.01, z=0.001,
               min_capacity=1, bias_rate=0.001, gate="sigmoid-bias")
SCALING = dict(initial=512.0, growth=2.0, backoff=0.5, interval=2, hysteresis=1, smallest=1.0)
OPTIMIZERS = {
    mm3d.SGD: dict(lr=0.3, momentum=0.9, weight_decay=0.1, clip=0.5),
    mm3d.AdamW: dict(lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, clip=0.5)}
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 2, 4, 6))


def unlike(options: dict, kind=np.float64) -> dict:
    """The same numbers as NumPy's scalars: of `kind`, or whole ones of 64 bits."""
    def convert(value):
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if isinstance(value, int):
            return np.int64(value)
        return kind(value) if isinstance(value, float) else value
    return {name: convert(value) for name, value in options.items()}


def train(kind, convert, experts: bool, convert_rate=lambda rate: rate) -> tuple:
    """Losses of three steps, all arrays, and what a checkpoint would say of the optimizer."""
    scheme = mm3d.Mesh(MPI.COMM_SELF, 1, "serial")
    more = {"experts": mm3d.Experts(**convert(EXPERTS))} if experts else {}
    model = mm3d.GPT(scheme, **convert(GPT), **more)
    optimizer = kind(model, **convert(OPTIMIZERS[kind]),
                     loss_scaling=mm3d.LossScaling(**convert(SCALING)))
    losses = []
    for tokens, targets in TOKENS:
        losses.append(model.step(tokens, targets))
        optimizer.lr = convert_rate(optimizer.lr / 2)
        optimizer.step()
    found = losses, everything(model, optimizer), optimizer.numbers()
    return found


@pytest.mark.parametrize("experts", (False, True))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_number_of_numpy_gives_the_bits_of_pythons(kind, experts):
    for one, of in ((GPT, mm3d.GPT), (EXPERTS, mm3d.Experts), (SCALING, mm3d.LossScaling)):
        names = {name for name, p in inspect.signature(of).parameters.items()
                 if isinstance(p.default, (int, float)) and not isinstance(p.default, bool)}
        assert names <= one.keys(), "each number is given"
    losses, arrays, numbers = train(kind, dict, experts)
    others = train(kind, unlike, experts, np.float64)
    assert others[0] == losses and same(others[1], arrays) and others[2] == numbers
    assert {type(value) for value in others[2].values()} <= {int, float}


@pytest.mark.parametrize("name", ("lr", "weight_decay", "clip", "betas", "eps"))
def test_a_number_that_is_set_later_is_pythons_too(name):
    model = mm3d.Transformer(mm3d.scheme("serial", MPI.COMM_SELF), layers=1, hidden=4, heads=1,
                             batch=1, seq=1)
    optimizer = mm3d.AdamW(model, **OPTIMIZERS[mm3d.AdamW])
    setattr(optimizer, name, unlike(OPTIMIZERS[mm3d.AdamW])[name])
    found = getattr(optimizer, name)
    assert {type(n) for n in (found if isinstance(found, tuple) else (found,))} == {float}


@pytest.mark.parametrize("kind", (list, np.array, lambda betas: list(map(Decimal, betas))))
def test_betas_that_are_set_later_in_no_tuple(kind):
    found = []
    for convert in (tuple, kind):
        model = mm3d.Transformer(mm3d.scheme("serial", MPI.COMM_SELF), layers=1, hidden=4, heads=1,
                                 batch=1, seq=1)
        optimizer = mm3d.AdamW(model, 0.1)
        optimizer.betas = convert([np.float64(0.7), np.float64(0.9)])
        for t in model.trained:
            t.grad[...] = model.random("gradient").ravel()[0]
        for _ in range(3):
            optimizer.step()
        found.append(everything(model, optimizer) | {"betas": optimizer.options()["beta1"]})
    assert type(found[1].pop("betas")) is float is type(found[0].pop("betas"))
    assert same(*found)


def test_a_scale_of_the_loss_that_the_caller_sets():
    found = []
    for scale in (3.1, np.float64(3.1)):
        model = mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, 1, "serial"), **GPT,
                         experts=mm3d.Experts(**EXPERTS))
        model.loss_scale = scale
        model.step(*TOKENS[0])
        found.append(model.gradients())
    assert same(*found)


def test_initial_values_and_rates_of_numpy():
    scheme, found = mm3d.scheme("serial", MPI.COMM_SELF), []
    for kind in (float, np.float64):
        model = mm3d.Transformer(scheme, layers=1, hidden=4, heads=1, batch=1, seq=1,
                                 initial_values=lambda name, shape: (kind(0.1), kind(3)))
        found.append(model.state())
    assert same(*found)
    rates = [mm3d.warmup_cosine(3, 10, kind(0.1), 5) for kind in (float, np.float32)]
    assert rates[1] == mm3d.warmup_cosine(3, 10, float(np.float32(0.1)), 5) != rates[0]


@pytest.mark.parametrize("given, expected", [
    (np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.longdouble(0.5), 0.5),
    (np.float16(0.5), 0.5), (np.array(0.5), 0.5), (np.int32(7), 7), (np.array(7), 7), (3, 3),
    (Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5),
    ((np.float64(0.9), 0.5), (0.9, 0.5))])
def test_plain_numbers(given, expected):
    found = plain_number(given)
    assert found == expected and type(found) is type(expected)
    assert not isinstance(found, tuple) or {type(n) for n in found} == {float}


@pytest.mark.parametrize("given", (None, True, np.bool_(True), "0.5", [0.5], np.array([0.5])))
def test_what_is_no_number_stays(given):
    assert plain_number(given) is given
