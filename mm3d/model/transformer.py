"""Define the Transformer, once for every scheme."""

from dataclasses import replace
from typing import Any, Callable

import numpy as np

from mm3d.arrays.backend import DTYPES, Array, host_dtype
from mm3d.arrays.host_arrays import check_real, check_unmasked
from mm3d.arrays.plain_numbers import check_types
from mm3d.grid.activations import Context
from mm3d.grid.agreement import same_arguments
from mm3d.grid.axis import TrafficCounts
from mm3d.grid.grid import Grid
from mm3d.model.architecture import gather_architecture
from mm3d.model.builder import Builder, ExpertRanks
from mm3d.model.chains import Chain, saved_bytes, vectors_of, weighted_products
from mm3d.model.transformer_layers import define_transformer
from mm3d.model.experts.options import check_experts_given
from mm3d.model.experts.totals import Routings
from mm3d.model.draws import InitialValues, MaskKey, draw_normal, draw_parameter, varied_values
from mm3d.model.joined_vectors import join_vectors
from mm3d.model.parameters import Parameter, Trained
from mm3d.model.recomputation import parse_policy
from mm3d.model.stack import Stack
from mm3d.model.transformer_layers import transformer_layers
from mm3d.schemes.overlap import Overlap
from mm3d.schemes.passes import LaterWeights, Pass
from mm3d.schemes.scheme import Scheme


class Transformer(Trained):
    """Stack pre-LN Transformer layers, without embedding and head, as in the paper's measurements.

    Each layer computes y = x + Attention(LN(x)), then y + MLP(LN(y)), with MLP factor 4 and GELU
    unless an `mm3d.Architecture` says otherwise.  The same seed gives the same model for every
    scheme, grid and number of ranks.

    Parameters
    ----------
    scheme : Scheme
        Divides all arrays and computes the products.
    stack : Stack, optional
        The layers, and the batch that they take; or its fields as keywords.
    make_layers : callable
        ``make_layers(build, stack)`` returns the layers, whose parameters and names the
        `mm3d.model.builder.Builder` gives; by default
        `mm3d.model.transformer_layers.transformer_layers`.  Other layers make another model.
    parameter : callable
        Makes the parameters, see `mm3d.model.builder.Builder`.
    initial_values : callable
        Mean and 1 / deviation of each parameter; by default
        `mm3d.model.draws.varied_values`, so that checks are sensitive to all of them.
    expert_ranks : ExpertRanks, optional
        Ranks with other sequences of the same batch, and the ranks that divide the experts.
    context : Context, optional
        Ranks with other positions of the same sequences.
    **fields
        Those of `mm3d.model.stack.Stack`: layers, hidden, heads, batch, seq, seed, dtype, causal,
        master, recompute, dropout, experts, architecture; or fields of `mm3d.Architecture`.

    Raises
    ------
    ValueError
        On every rank alike, for sizes that cannot be divided, an unknown dtype, or options that
        do not go together.
    TypeError
        For a field that there is not, sizes that are missing, and what is no scheme.

    Attributes
    ----------
    stack : Stack
        What it computes.
    sizes : ModelSizes
        The sizes.
    layers : Chain
        The layers, one after another.
    parameters, trained : list of Parameter
        All parameters, in the order of the layers; and the arrays that an optimizer changes and
        that a checkpoint stores, which are the same ones.
    definition : Definition
        What it computes, as checkpoints hold it.
    comm : mpi4py.MPI.Intracomm
        All ranks that hold a part of the model.
    outer, inner : Space
        The spaces of activations outside and inside a pair of linear layers.
    mask_key : MaskKey
        Key of the masks of dropout.  Set its `place` before each forward, else nothing is
        dropped; backward sets it to the place of its own forward.
    joined : dict of int to JoinedVectors
        By the identity of a vector's parameter, those whose collectives are joined with its own.
    routings : Routings
        Scale of the router's losses, and how the tokens of each forward were routed.
    """

    def __init__(self, scheme: Scheme, stack: Stack | None = None, *,
                 make_layers: Callable[[Builder, Stack], list] = transformer_layers,
                 parameter: Callable[..., Parameter] = Parameter,
                 initial_values: InitialValues = varied_values,
                 expert_ranks: ExpertRanks | None = None, context: Context | None = None,
                 **fields: Any) -> None:
        if not isinstance(scheme, Scheme):
            raise TypeError(f"Transformer: {scheme!r} is no scheme, as mm3d.scheme('3d') is")
        if stack is not None and not isinstance(stack, Stack):
            raise TypeError(f"Transformer: {stack!r} is no Stack: sizes have names, such as "
                            f"layers=2, hidden=48, heads=4, batch=8, seq=16")
        self.stack = stack = Stack.of(fields) if stack is None else replace(
            stack, **gather_architecture(fields, stack.architecture))
        with same_arguments(scheme.grid.comm, "Transformer") as given:
            given |= stack.fields()
        self.sizes = stack.sizes
        self.sizes.check()
        check_types(stack)
        if stack.architecture.window and not stack.causal:
            raise ValueError(f"window={stack.architecture.window} of positions before one's own: "
                             f"causal=True would do, or window=None")
        check_experts_given(stack.experts, stack.layers)
        _check_dtypes(scheme, stack.dtype, stack.master)
        keep = getattr(scheme, "keep", "none")
        if parse_policy(stack.recompute).selective and keep != "none":
            raise ValueError(f"recompute={stack.recompute!r} keeps nothing that keep={keep!r} of "
                             f"the scheme gathers: leave one of them out, or choose "
                             f"recompute='full'")
        self.scheme, self.grid, self.seed = scheme, scheme.grid, stack.seed
        self.dtype, self.master, self.hidden = str(stack.dtype), stack.master, stack.hidden
        self.recompute, self.dropout = stack.recompute, stack.dropout
        own = sum(map(len, context.chunks())) if context else stack.seq
        self.outer, self.inner = (replace(one, context=context)
                                  for one in scheme.spaces(stack.batch, own))
        self.shape = (stack.batch, self.outer.seq, stack.hidden)
        self._block = self.outer.local_shape(stack.hidden)
        self.mask_key = MaskKey(stack.seed)
        types = [name and getattr(self.grid.backend.xp, name, name)
                 for name in (self.dtype, self.master)]    # the array library's own types
        self.builder = Builder(scheme, self.outer, self.inner, *types, self.mask_key, parameter,
                               expert_ranks)
        self.routings: Routings = self.builder.routings
        self.layers = Chain(*make_layers(self.builder, stack))
        self.linears = [linear for linear, _ in weighted_products(self.layers)]
        # Nothing is gathered ahead if reading it is a collective already.
        ahead = not any(linear.weight.gathered_when_read for linear in self.linears)
        self._products = {backward: weighted_products(self.layers, backward) if ahead else []
                          for backward in (False, True)} | {None: []}
        self.joined = join_vectors(vectors_of(self.layers))
        self.parameters = self.trained = self.layers.parameters
        self.definition = define_transformer(stack, make_layers)
        self.comm = self.grid.comm
        for p in self.parameters:
            draw_parameter(p, stack.seed, initial_values)

    @property
    def grids(self) -> list[Grid]:
        """Return the grid, in a list, for observers of its collectives."""
        return [self.grid]

    @property
    def chunks(self) -> list["Transformer"]:
        """Return the model: all of its layers are on this rank's grid."""
        return [self]

    chains = chunks

    def random(self, name: str) -> Array:
        """Draw this rank's block of an activation from N(0, 1).

        The same seed of the model and the same `name` give the same global activation.
        """
        place = self.outer.layout().slices(self.grid, self.shape)
        return self.grid.backend.from_host(
            tuple(s.stop - s.start for s in place), self.dtype,
            lambda: draw_normal(self.seed, name, self.shape, place))

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the output of the model, and the data that `backward` needs.

        Parameters
        ----------
        x : Array
            This rank's block of the input, global (batch, seq, hidden), in the model's dtype.

        Returns
        -------
        y, saved : Array, Any
            This rank's block of the output, in the layout of x; and the saved data.

        Raises
        ------
        ValueError
            When `x` does not have the shape or dtype of this rank's block.
        """
        self._check_block("x", x)
        with self._begin_pass(backward=False) as within:
            y, saved = self.layers.forward(x, within)
        return y, ((self.mask_key.place, saved) if self.dropout else saved)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Compute the gradient of the input, and add to the gradients of the parameters.

        Parameters
        ----------
        dy : Array
            This rank's block of the output's gradient, like the output.
        saved : Any
            The data that `forward` returned.

        Returns
        -------
        Array
            This rank's block of the input's gradient.  Errors as in `forward`.
        """
        return self._backward(dy, saved)

    def _backward(self, dy: Array, saved: Any, later: LaterWeights | None = None) -> Array:
        """Compute `backward`, or without the gradients of weights, which `later` then gets."""
        self._check_block("dy", dy)
        if self.dropout:
            self.mask_key.place, saved = saved
        with self._begin_pass(backward=True, later=later) as within:
            return self.layers.backward(dy, saved, within)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, LaterWeights]:
        """Compute the gradient of the input, without the gradients of weights.

        This and `backward_weights` are the two halves of `backward`, with the same results to the
        bit.  Any number of micro-batches may be between them, and the second halves may come in
        any order, in which they add to the gradients of the weights.  The gradients of biases and
        norms are added here.

        Parameters and errors as in `backward`.

        Returns
        -------
        dx, operands : Array, list of (layer, operands)
            This rank's block of the input's gradient; and the operands of the gradients of the
            weights.  These may contain `dy`, and the input of `forward`, which must not change
            before `backward_weights`; all other saved data can be dropped now.
        """
        later: LaterWeights = []
        return self._backward(dy, saved, later), later

    def backward_weights(self, operands: LaterWeights) -> None:
        """Add to the gradients of the weights, from the operands that `backward_input` returned.

        Every rank must call it, since it communicates, once for each micro-batch.
        """
        with self._begin_pass(None) as within:
            for layer, operands_of_layer in operands:
                layer.backward_weights(operands_of_layer, within)

    def _begin_pass(self, backward: bool | None, later: LaterWeights | None = None) -> Pass:
        """Return one pass, a context; `backward` is None for the half that uses no weight."""
        shared = self.joined, backward is False, later
        if any(linear.product.overlap for linear in self.linears):
            return Overlap(self._products[backward], self.grid.backend, *shared)
        return Pass(*shared)

    def _check_block(self, name: str, a: Array) -> None:
        """Raise ValueError unless `a` has the shape and dtype of this rank's block."""
        if not hasattr(a, "dtype"):
            raise TypeError(f"{name}: {type(a).__name__} is no array, as model.shard(X) gives it")
        dtype = host_dtype(a)
        check_unmasked(name, a)
        if tuple(a.shape) != self._block or dtype != self.dtype:
            raise ValueError(f"{name}, {tuple(a.shape)} of {dtype}, should be this rank's block "
                             f"of {self.shape} in {self.dtype}, as model.shard(X) gives it")

    def traffic(self) -> TrafficCounts:
        """Return the traffic of this rank, as `Grid.traffic`."""
        return self.grid.traffic()

    def reset_traffic(self) -> None:
        """Reset the counts of traffic to zero."""
        self.grid.reset_traffic()

    def shard(self, x: np.ndarray) -> Array:
        """Return this rank's block of a global (batch, seq, hidden), in the model's dtype.

        Raises
        ------
        ValueError
            When the array does not have the global shape, or not real numbers alone.
        """
        shape = check_real("the activation", x)
        if shape != self.shape:
            raise ValueError(f"the activation has the shape {shape}, the model takes "
                             f"(batch, seq, hidden) = {self.shape}")
        return self.outer.layout().shard(np.asarray(x, self.dtype), self.grid)

    def unshard(self, y: Array) -> np.ndarray:
        """Gather the global activation on every rank from the ranks' blocks `y`.

        Every rank must call it; for checks.
        """
        return self.outer.layout().unshard(y, self.grid, self.shape)

    # Counts the data that `forward` saved, or the operands that `backward_input` returned.
    saved_bytes = staticmethod(saved_bytes)


def _check_dtypes(scheme: Scheme, dtype: str, master: str | None) -> None:
    """Raise ValueError for a dtype that the backend does not have, or masters without use."""
    known = DTYPES
    if str(dtype) not in known:
        known += tuple(map(str, scheme.grid.backend.more_dtypes))
    if str(dtype) not in known:
        raise ValueError(f"dtype={dtype!r} is unknown to backend {scheme.grid.backend.name!r}: "
                         f"choose one of {', '.join(known)}, or pip install ml_dtypes for "
                         f"bfloat16")
    if master is not None and (master != "float32" or dtype in ("float32", "float64")):
        raise ValueError(f"master={master!r} for a model in {dtype}: float32 masters are for "
                         f"types of 16 bits, such as dtype='float16'; leave master out")
