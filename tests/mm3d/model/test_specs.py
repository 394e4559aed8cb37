"""A layer of another kind states its own costs: closed forms and traces are sums over layers."""
import math
from dataclasses import dataclass

import numpy as np
import pytest

import mm3d
from mm3d import ModelSizes
from mm3d.arrays import backend
from mm3d.model import cost
from mm3d.model.chain_specs import ChainSpec, ModelSpec
from mm3d.model.recomputation import POLICIES
from mm3d.model.specs import LayerSpec
from mm3d.model.transformer_spec import model_spec
from mm3d.schemes.closed_form import ProductShape
from mm3d.tracing import dry_run
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from models import SIZES, SOME
from reference import total

RANK = 6    # of the factors


class Factors:
    """y = x W V, without a bias, as an embedding in two factors has it."""

    def __init__(self, builder, name, hidden):
        scheme, spaces = builder.scheme, (builder.outer, builder.inner)
        self.into = scheme.product(*spaces, (hidden, RANK), (1, 1))
        self.back = scheme.product(*spaces[::-1], (RANK, hidden), (1, 1))
        self.weight, self.factor = (
            builder.create_parameter(f"{name}.{end}", product.weight, shape,
                                     product.gathered_along)
            for end, product, shape in (("weight", self.into, (hidden, RANK)),
                                        ("factor", self.back, (RANK, hidden))))
        self.parameters = [self.weight, self.factor]

    def forward(self, x, overlap=None):
        u, first = self.into.forward(x, self.weight.value)
        y, second = self.back.forward(u, self.factor.value)
        return y, (first, second)

    def backward(self, dy, saved, overlap=None):
        du, dV = self.back.backward(dy, self.factor.value, saved[1])
        self.factor.accumulate(dV)
        dx, dW = self.into.backward(du, self.weight.value, saved[0])
        self.weight.accumulate(dW)
        return dx


@dataclass(frozen=True)
class FactorsSpec(LayerSpec):
    """What `Factors` has, multiplies, moves and keeps."""

    hidden: int

    def parameters(self):
        return {"weight": (self.hidden, RANK), "factor": (RANK, self.hidden)}

    def products(self, batch, seq):
        return [ProductShape("up", batch * seq, self.hidden, RANK),
                ProductShape("down", batch * seq, RANK, self.hidden)]

    def moves(self, parallelism, recomputed=False):
        each = [parallelism.product_moves(one)
                for one in self.products(parallelism.batch, parallelism.seq)]
        return tuple([move for phase in phases for move in phase] for phases in zip(*each))

    def make_layer(self, builder, name):
        return Factors(builder, name, self.hidden)


def with_embedding(sizes, causal=False, recompute="none"):
    """A Transformer between an embedding and a head."""
    model = model_spec(sizes, causal, recompute)
    return ModelSpec(model.batch, model.seq, model.hidden, ChainSpec((
        FactorsSpec("embedding", model.hidden), *model.chain.layers,
        FactorsSpec("head", model.hidden))))


def counted_step(model, comm, trace):
    """Traffic of each phase, and bytes kept between them, as counted by `trace`."""
    grid, counted = model.grid, {}
    with observed(grid, trace, model):
        trace.phase = "forward"
        grid.reset_traffic()
        _, saved = model.forward(model.random("x"))
        kept, counted["forward"] = model.saved_bytes(saved), grid.traffic()
        trace.phase = "backward"
        grid.reset_traffic()
        model.backward(model.random("dy"), saved)
        counted["backward"] = grid.traffic()
    return counted, kept


@pytest.mark.ranks(1, 4, slow=(8,))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_closed_forms_are_what_is_counted_with_another_layer(comm, recompute):
    """Words, calls, operations and parameters of a model between two such layers, in the real step
    and the dry one."""
    sizes = SIZES["few"]
    described = with_embedding(sizes, recompute=recompute)
    for parallelism in SOME[comm.size]:
        name, options = parallelism.name, parallelism.options
        if recompute == "selective" and "keep" in options:
            continue
        trace = Trace()
        with parallelism.on(comm, "numpy") as scheme:
            model = mm3d.Transformer(scheme, **sizes, recompute=recompute, describe=with_embedding)
            counted, kept = counted_step(model, comm, trace)
            shape = scheme.grid.shape
            stored = sum(p.value.size for p in model.parameters)
        names = [p.name for p in model.parameters]
        assert names[:2] == ["embedding.weight", "embedding.factor"]
        assert {part for _, part, _ in trace.events} > {"embedding", "head", "mlp.up"}
        case = str(parallelism)
        for phase, moves in cost.moves(name, shape, described, **options).items():
            words = total(comm, {key: t.words for key, t in counted[phase].items()})
            assert words == {key: move.words for key, move in moves.items()}, case
            calls = {key: t.calls for key, t in counted[phase].items()}
            assert calls == {key: move.calls for key, move in moves.items()}, case
        ranks = comm.size if name == "serial" else 1
        assert comm.allreduce(trace.flops("forward")) == ranks * cost.flops(described)["forward"]
        assert comm.allreduce(trace.flops_again()) == ranks * cost.flops_again(described)
        assert sum(math.prod(p.shape) for p in model.parameters) == cost.parameters(described)
        if name in ("2d", "3d"):
            assert comm.allreduce(stored) == cost.parameters(described)
        dried = dry_run.trace_step(name, comm.size, tuple(shape.values()), comm.rank,
                                   backend.Backend.block, options, **sizes, recompute=recompute,
                                   describe=with_embedding)
        assert (dried.traffic, dried.saved) == (counted, kept), case
        assert dried.flops() == trace.flops(), case


def test_gradients_of_another_layer():
    """Both matrices of the embedding, by central differences along one direction each."""
    scheme = mm3d.scheme("serial", mm3d.grid.grid.MPI.COMM_SELF)
    model = mm3d.Transformer(scheme, **SIZES["few"], dtype="float64", describe=with_embedding)
    x, dy = model.random("x"), model.random("dy")
    model.backward(dy, model.forward(x)[1])
    for parameter in model.parameters[:2]:
        values = []
        for step in (1e-6, -2e-6):
            parameter.value += step
            values.append(np.sum(model.forward(x)[0] * dy))
        parameter.value += 1e-6
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(parameter.grad.sum(), rel=1e-6), parameter.name


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("layers", [1, 4, 7])
def test_the_model_that_runs_has_the_layers_of_its_spec(layers, recompute):
    """Names and shapes of parameters, in order, whatever is computed again."""
    scheme = mm3d.scheme("serial", mm3d.grid.grid.MPI.COMM_SELF)
    model = mm3d.Transformer(scheme, layers, hidden=8, heads=2, batch=1, seq=2,
                             recompute=recompute)
    passes = [*model.spec.chain.forward_passes()]
    each = [(one.times, end, shape) for one in passes
            for end, shape in one.layer.parameters().items()]
    assert sum(times for times, _, _ in each) == len(model.parameters) == 12 * layers
    assert {p.name.split(".")[1] for p in model.parameters} == set(map(str, range(layers)))
    shapes = {(p.name.split(".", 2)[2], p.shape) for p in model.parameters}
    assert shapes == {(f"{one.layer.name}.{end}", shape) for one in passes
                      for end, shape in one.layer.parameters().items()}


def test_sizes_are_a_value():
    sizes = ModelSizes(2, 48, 4, 8, 16)
    assert dict(sizes) == dict(layers=2, hidden=48, heads=4, batch=8, seq=16)
    assert ModelSizes(**sizes) == sizes and {sizes: 1}[ModelSizes(**sizes)] == 1
    assert ModelSizes.from_settings({"seed": 0, **sizes}) == sizes and sizes.tokens == 128
    with pytest.raises(KeyError):
        sizes["mlp_factor"]
    with pytest.raises(ValueError, match="hidden=47 .* heads=4 .*hidden=44 or hidden=48"):
        ModelSizes(2, 47, 4, 8, 16).check()
