"""A layer of another kind is one class; dry runs and traces count it."""
import math

import pytest

import mm3d
from mm3d import ModelSizes
from mm3d.arrays import backend
from mm3d.model import cost
from mm3d.model.recomputation import POLICIES
from mm3d.model.transformer_layers import transformer_layers
from mm3d.schemes.closed_form import ProductShape
from mm3d.schemes.words import Words
from mm3d.tracing import dry_run
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from models import SIZES, SOME
from reference import total

RANK = 6    # of the factors


class Factors:
    """y = x W V, without a bias, as an embedding in two factors has it."""

    def __init__(self, builder, name, hidden):
        builder.named(self, name, name)
        scheme, spaces = builder.scheme, builder.spaces("up")
        self.into = scheme.product(*spaces, (hidden, RANK), (1, 1))
        self.back = scheme.product(*spaces[::-1], (RANK, hidden), (1, 1))
        self.weight, self.factor = (
            builder.create_parameter(f"{name}.{end}", product.weight, shape,
                                     product.gathered_along)
            for end, product, shape in (("weight", self.into, (hidden, RANK)),
                                        ("factor", self.back, (RANK, hidden))))
        self.parameters = [self.weight, self.factor]

    def forward(self, x, within=None):
        u, first = self.into.forward(x, self.weight.value)
        y, second = self.back.forward(u, self.factor.value)
        return y, (first, second)

    def backward(self, dy, saved, within=None):
        du, dV = self.back.backward(dy, self.factor.value, saved[1])
        self.factor.accumulate(dV)
        dx, dW = self.into.backward(du, self.weight.value, saved[0])
        self.weight.accumulate(dW)
        return dx


def with_embedding(build, stack):
    """A Transformer between an embedding and a head."""
    return [Factors(build, "embedding", stack.hidden), *transformer_layers(build, stack),
            Factors(build, "head", stack.hidden)]


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


@pytest.mark.ranks(1, 4, slow=(8,), first=(4,))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dry_runs_are_what_is_counted_with_another_layer(comm, recompute):
    """Traffic and kept bytes of a model between two such layers; words are those of the model
    without them, and of the two products of each."""
    sizes = SIZES["few"]
    S = ModelSizes(**sizes)
    own = [ProductShape("up", S.tokens, S.hidden, RANK), ProductShape("down", S.tokens, RANK,
                                                                      S.hidden)]
    for parallelism in SOME[comm.size]:
        name, options = parallelism.name, parallelism.options
        if recompute == "selective" and "keep" in options:
            continue
        trace = Trace()
        with parallelism.on(comm, "numpy") as scheme:
            model = mm3d.Transformer(scheme, **sizes, recompute=recompute,
                                     make_layers=with_embedding)
            counted, kept = counted_step(model, comm, trace)
            shape = scheme.grid.shape
        names = [p.name for p in model.parameters]
        assert names[:2] == ["embedding.weight", "embedding.factor"]
        assert {part for _, part, _ in trace.events} > {"embedding", "head", "mlp.up"}
        case = str(parallelism)
        of = Words(name, shape, S.batch, S.seq, **options)
        for phase, expected in cost.words(name, shape, S, recompute, **options).items():
            for product in own:
                for move in of.product_moves(product)[phase == "backward"]:
                    if shape[move.axis] > 1:
                        key = move.axis, move.collective
                        expected[key] = expected.get(key, 0) + 2 * move.words
            words = total(comm, {key: t.words for key, t in counted[phase].items()})
            assert words == expected, case
        dried = dry_run.trace_step(name, comm.size, tuple(shape.values()), comm.rank,
                                   backend.Backend.block, options, **sizes, recompute=recompute,
                                   make_layers=with_embedding)
        assert (dried.traffic, dried.saved) == (counted, kept), case
        assert dried.flops() == trace.flops(), case


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("layers", [1, 4, 7])
def test_parameters_have_the_names_of_their_layers(layers, recompute):
    """In their order, whatever is computed again; checkpoints have them."""
    scheme = mm3d.scheme("serial", mm3d.grid.grid.MPI.COMM_SELF)
    model = mm3d.Transformer(scheme, layers=layers, hidden=8, heads=2, batch=1, seq=2,
                             recompute=recompute)
    of_layer = [f"{name}.{end}" for name in ("ln1", "attention.qkv", "attention.proj", "ln2",
                                             "mlp.up", "mlp.down") for end in ("weight", "bias")]
    assert [p.name for p in model.parameters] == [
        f"layers.{n}.{name}" for n in range(layers) for name in of_layer]
    assert len(of_layer) == cost.parameter_arrays(model.sizes)
    assert sum(math.prod(p.shape) for p in model.parameters) == cost.parameters(model.sizes)
