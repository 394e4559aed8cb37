"""Define the Transformer, once for every scheme."""

import math
from collections import Counter
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Iterator, Mapping

import numpy as np

from mm3d.arrays.backend import Array, host_dtype
from mm3d.model.chain_specs import ChainSpec, ModelSpec, RecomputedSpec, Repeated, ResidualSpec
from mm3d.model.initial_values import normal
from mm3d.model.layer_specs import AttentionSpec, GeluSpec, LayerNormSpec, LinearSpec
from mm3d.model.layers import Chain
from mm3d.model.recomputation import policy
from mm3d.model.recomputed_layers import weighted_products
from mm3d.model.sizes import ModelSizes
from mm3d.model.specs import Builder, LayerSpec
from mm3d.schemes.overlap import Overlap
from mm3d.schemes.scheme import Scheme

DTYPES = ("float64", "float32", "float16")


def describe(sizes: Mapping[str, int], causal: bool = False,
             recompute: str = "none") -> ModelSpec:
    """Describe a stack of pre-LN Transformer layers without ranks and arrays.

    Parameters
    ----------
    sizes : ModelSizes
        Of the model.
    causal : bool
        Whether attention looks backward only.
    recompute : str
        Name of a policy, see `mm3d.model.recomputation`.

    Raises
    ------
    ValueError
        When no policy has that name.
    """
    sizes, chosen = ModelSizes(**sizes), policy(recompute)
    block = transformer_layer(sizes, causal, chosen.selective)

    def group(layers: int) -> ChainSpec:
        if layers == 1:
            return Repeated((RecomputedSpec(block),), "layers")
        return RecomputedSpec((Repeated(block, "layers", layers),), "layers")
    groups = Counter(chosen.groups(sizes.layers))
    chain = [Repeated((group(layers),), times=times) for layers, times in groups.items()]
    return ModelSpec(sizes.batch, sizes.seq, sizes.hidden, ChainSpec(tuple(
        chain or [Repeated(block, "layers", sizes.layers)])))


def transformer_layer(sizes: ModelSizes, causal: bool = False,
                      selective: bool = False) -> tuple[ResidualSpec, ResidualSpec]:
    """Describe one Transformer layer: attention, then the multi-layer perceptron.

    With `selective` each linear layer is computed again with the layer before it.
    """
    h, wide, head = sizes.hidden, sizes.mlp_factor * sizes.hidden, sizes.hidden // sizes.heads

    def residual(name: str, *layers: LayerSpec) -> ResidualSpec:
        if selective:
            layers = (RecomputedSpec(layers[:2], name), RecomputedSpec(layers[2:], name))
        return ResidualSpec(layers, name)

    return (residual("attention",
                     LayerNormSpec("ln1", h),
                     LinearSpec("attention.qkv", "up", (h, 3, h), head),
                     AttentionSpec("attention.attention", h, sizes.heads, causal),
                     LinearSpec("attention.proj", "down", (h, h), head)),
            residual("mlp",
                     LayerNormSpec("ln2", h),
                     LinearSpec("mlp.up", "up", (h, wide), adds=False),
                     GeluSpec("mlp.gelu", wide, "mlp.up"),
                     LinearSpec("mlp.down", "down", (wide, h))))


class Transformer:
    """Stack pre-LN Transformer layers, without embedding and head, as in the paper's measurements.

    y = x + Attention(LN(x)); y + MLP(LN(y)), with MLP factor 4 and GELU.  Weights are drawn from
    N(0, 1 / fan-in), biases from N(0, 0.01) and the norms' weights from N(1, 0.01), so that a
    check of results sees all of them.  The same seed gives the same model for every scheme, grid
    and number of ranks.

    Parameters
    ----------
    scheme : Scheme
        Divides all arrays and computes the products.
    layers, hidden, heads : int
        Number of layers, features of the residual stream, attention heads.
    batch, seq : int
        Global number of sequences and positions in each.
    seed : int
        Of the weights.
    dtype : {"float64", "float32", "float16", "bfloat16"}
        The last one on CuPy alone.  Of parameters, gradients and activations.
    causal : bool
        Whether attention looks backward only.
    master : {None, "float32"}
        For types of 16 bits: also a float32 copy of every parameter, which an optimizer changes
        (``p.master -= ...``, then `refresh`) and which `state` and `load` are of.  Gradients
        are then computed, summed over the ranks and accumulated in float32; scaling the loss is
        the trainer's.  A dry run counts all of it, the closed forms of `mm3d.model.cost` do not.
    recompute : str
        What backward computes again instead of finding it kept, by a policy's name; see
        `mm3d.model.recomputation`.  The results are the same to the bit.  Where anything is
        computed again, the input of `forward` is read once more in `backward`, and must be left as
        it is until then.
    describe : callable
        ``describe(sizes, causal, recompute)`` gives the layers of the model; another one than
        `mm3d.model.transformer.describe` makes a model of other layers (`mm3d.model.specs`).

    Raises
    ------
    ValueError
        On every rank alike, for sizes that cannot be divided.

    Attributes
    ----------
    spec : ModelSpec
        Its layers without ranks and arrays.
    parameters : list of Parameter
        In order.
    outer, inner : Space
        Where activations lie outside and inside a pair of linear layers.
    """

    def __init__(self, scheme: Scheme, layers: int, hidden: int, heads: int, batch: int, seq: int,
                 seed: int = 0, dtype: str = "float32", causal: bool = False,
                 master: str | None = None, recompute: str = "none",
                 describe: Callable[..., ModelSpec] = describe) -> None:
        sizes = ModelSizes(layers, hidden, heads, batch, seq)
        sizes.check()
        known = (*DTYPES, *map(str, scheme.grid.backend.more_dtypes))
        if str(dtype) not in known:
            raise ValueError(f"dtype={dtype!r} is unknown to backend "
                             f"{scheme.grid.backend.name!r}: choose one of {', '.join(known)}")
        if master is not None and (master != "float32" or dtype in ("float32", "float64")):
            raise ValueError(f"master={master!r} for a model in {dtype}: float32 masters are for "
                             f"types of 16 bits, such as dtype='float16'; leave master out")
        self.recompute = recompute
        self.policy, keep = policy(recompute), getattr(scheme, "keep", "none")
        if self.policy.selective and keep != "none":
            raise ValueError(f"recompute={recompute!r} keeps nothing that keep={keep!r} of the "
                             f"scheme gathers: leave one of them out, or choose recompute='full'")
        self.scheme, self.grid, self.seed = scheme, scheme.grid, seed
        self.dtype, self.master, self.hidden = str(dtype), master, hidden
        self.shape = (batch, seq, hidden)
        self.outer, self.inner = scheme.spaces(batch, seq)
        self.spec = describe(sizes, causal, recompute)
        builder = Builder(scheme, self.outer, self.inner, self._named(self.dtype),
                          self._named(master))
        self.layers = Chain(*builder.build(self.spec.chain.layers))
        self._products = {backward: weighted_products(self.layers, backward)
                          for backward in (False, True)}
        self.linears = [linear for linear, _ in self._products[False]]
        self.parameters = self.layers.parameters
        self._draw()

    def _named(self, dtype: str | None) -> Any:
        """Return the array library's dtype of that name."""
        return dtype and getattr(self.grid.backend.xp, dtype, dtype)

    def _draw(self) -> None:
        """Draw the initial value of every parameter."""
        for p in self.parameters:
            place = p.layout.slices(self.grid, p.shape)
            if p.name.endswith(".weight") and len(p.shape) > 1:
                p.master[...] = self._normal(p.name, p.shape, place, math.sqrt(p.shape[0]),
                                             self.master)
            else:
                p.master[...] = self._normal(p.name, p.shape, place, 10, self.master)
                if p.name.endswith(".weight"):
                    p.master += 1
            p.refresh()

    def random(self, name: str) -> Array:
        """Draw this rank's block of an activation from N(0, 1), by the model's seed and `name`."""
        place = self.outer.layout().slices(self.grid, self.shape)
        return self._normal(name, self.shape, place)

    def _normal(self, name: str, shape: tuple[int, ...], place: tuple[slice, ...],
                divisor: float = 1.0, dtype: str | None = None) -> Array:
        """Draw this rank's part of `normal`, over `divisor`, in `dtype` (default: the model's)."""
        return self.grid.backend.from_host(
            tuple(s.stop - s.start for s in place), dtype or self.dtype,
            lambda: normal(self.seed, name, shape, place) / divisor)

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the output for this rank's block `x`; return it with the data for `backward`."""
        self._check_block("x", x)
        with self._overlap(backward=False) as overlap:
            return self.layers.forward(x, overlap)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Compute the gradient dx for this rank's block `dy`; add to the parameters' gradients."""
        self._check_block("dy", dy)
        with self._overlap(backward=True) as overlap:
            return self.layers.backward(dy, saved, overlap)

    def _overlap(self, backward: bool) -> ContextManager[Overlap | None]:
        """Return the overlap of one pass as a context; None if no product overlaps."""
        if any(linear.product.overlap for linear in self.linears):
            return Overlap(self._products[backward])
        return nullcontext()

    def _check_block(self, name: str, a: Array) -> None:
        dtype = host_dtype(a)
        if tuple(a.shape) != self.outer.local_shape(self.hidden) or dtype != self.dtype:
            raise ValueError(f"{name}, {tuple(a.shape)} of {dtype}, should be this rank's block "
                             f"of {self.shape} in {self.dtype}, as model.shard(X) gives it")

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for p in self.parameters:
            p.grad[...] = 0

    def refresh(self) -> None:
        """Round the masters to the type of the model; call it after each change of them."""
        for p in self.parameters:
            p.refresh()

    def shard(self, x: np.ndarray) -> Array:
        """Return this rank's block of a global (batch, seq, hidden), in the model's dtype."""
        if np.shape(x) != self.shape:
            raise ValueError(f"the activation has the shape {np.shape(x)}, the model takes "
                             f"(batch, seq, hidden) = {self.shape}")
        return self.outer.layout().shard(np.asarray(x, self.dtype), self.grid)

    def unshard(self, y: Array) -> np.ndarray:
        """Gather the global activation on every rank from the ranks' blocks (collective)."""
        return self.outer.layout().unshard(y, self.grid, self.shape)

    def state(self) -> dict[str, np.ndarray]:
        """Gather every parameter as a global array, on every rank (collective; for checks)."""
        return {p.name: p.gather(p.master) for p in self.parameters}

    def gradients(self) -> dict[str, np.ndarray]:
        """Gather every gradient as a global array, on every rank (collective; for checks)."""
        return {p.name: p.gather(p.grad) for p in self.parameters}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the parameters from global arrays, as returned by `state`."""
        known = {p.name: p.public_shape for p in self.parameters}
        for name in [*known, *state]:
            if name not in known or name not in state:
                raise ValueError(f"parameter {name!r} is "
                                 f"{'missing' if name in known else 'not in the model'}")
            if np.shape(state[name]) != known[name]:
                raise ValueError(f"parameter {name!r} has the shape {known[name]}, not "
                                 f"{np.shape(state[name])}")
        for p in self.parameters:
            p.load(np.asarray(state[p.name]))

    def saved_bytes(self, saved: Any) -> int:
        """Return the bytes that this rank keeps in `saved` between forward and backward."""
        arrays = {id(a): a for a in _arrays(saved)}
        return sum(math.prod(a.shape) * host_dtype(a).itemsize for a in arrays.values())


def _arrays(saved: Any) -> Iterator[Array]:
    """Iterate over all arrays in the data that a layer saved."""
    if isinstance(saved, (tuple, list)):
        for item in saved:
            yield from _arrays(item)
    elif hasattr(saved, "array"):
        yield saved.array
    elif saved is not None:
        yield saved
