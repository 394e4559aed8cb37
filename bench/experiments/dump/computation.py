"""Compute a step of training from a dump's weights and batch, and keep its tensors."""

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import numpy as np
from mpi4py import MPI
from scipy.special import ndtr

from bench.experiments.dump.places import (LOSS, NORM, TensorId, border_names, mask_names,
                                           tensor_names)
from bench.experiments.dump.reordering import Reordering
from bench.experiments.dump.roundings import straightforward_attention
from mm3d.arrays.backend import backend_of, host_dtype
from mm3d.config import Config, Division, Model
from mm3d.hugging_face.names import tensor_shapes
from mm3d.model.functional import gelu_backward
from mm3d.model.layers import Gelu
from mm3d.pretrained.loading import model_pieces
from mm3d.pretrained.shapes import parameter_shapes
from mm3d.training.gpt import GPT
from mm3d.training.optimizers import SGD, AdamW, decays

Tensors = dict[TensorId, np.ndarray]


@dataclass(frozen=True)
class Start:
    """Hold what a step begins with.

    Attributes
    ----------
    family : str
        The family of names, such as "gpt2"; weights have those of Hugging Face.
    tokens, targets : ndarray
        The batch, (batch, seq).
    masks : mapping of str to ndarray
        Masks of dropout by module, where something is dropped.
    erf : bool
        Whether GELU is that of the error function, and not of tanh.
    documents : ndarray of int, optional
        The number of each position's document, (batch, seq), where a position attends only to
        those of its own; such a step is computed by one rank, in one micro-batch.
    """

    family: str
    model: Model
    weights: Mapping[str, np.ndarray]
    tokens: np.ndarray
    targets: np.ndarray
    masks: Mapping[str, np.ndarray]
    erf: bool = False
    documents: np.ndarray | None = None


@dataclass(frozen=True)
class Way:
    """State how a step is computed, in the `dtype` of arrays, and of parameters without `master`.

    Sums are those of its micro-batches, of the order of features and sequences that a seed draws,
    0 for their own, and of the scheme and grid that divide it among the ranks.
    """

    dtype: str
    master: str | None = None
    microbatches: int = 1
    seed: int = 0
    scheme: str = "serial"
    grid: tuple[int, ...] | None = None


def compute_step(start: Start, way: Way, comm: Any,
                 look: Callable[[GPT], None] | None = None) -> Tensors:
    """Compute forward and backward; every rank of `comm` must call it.

    `look` is given the model before the step, which it may change.  The tensors are all up to the
    gradients' norm, global, in float64 and in the dump's order.
    """
    order = Reordering.draw(start.model, way.seed)
    gpt = _build(start, way, comm, order)
    try:
        _fix_masks(gpt, start.masks, order)
        if look is not None:
            look(gpt)
        found = _Found(gpt, start, order.back())
        loss = gpt.step(order.sequences(start.tokens), order.sequences(start.targets))
        found.tensors[TensorId(LOSS)] = np.float64(loss)
        back = order.back()
        gradients = {p.name: back.parameter(p.name, p.gather(wide(p.grad)))
                     for p in gpt.trained}
    finally:
        gpt.free()
    named = to_tensors(start.family, gpt.config.model, gradients)
    found.tensors |= {TensorId("gradient", name): a for name, a in named.items()}
    found.tensors[TensorId(NORM)] = np.sqrt(sum((a * a).sum() for a in named.values()))
    return found.tensors


def compute_alone(start: Start, look: Callable[[GPT], None] | None = None) -> Tensors:
    """Compute an exact step as `compute_step`, on this rank alone."""
    return compute_step(start, Way("float64"), MPI.COMM_SELF, look)


def _build(start: Start, way: Way, comm: Any, order: Reordering) -> GPT:
    """Return the model with its weights, on the ranks."""
    model = replace(start.model, dtype=way.dtype, master=way.master)
    gpt = GPT(Config(model, Division(scheme=way.scheme, grid=way.grid,
                                     microbatches=way.microbatches)), comm)
    state = _to_parameters(start.family, model, start.weights)
    gpt.load({name: order.parameter(name, a) for name, a in state.items()})
    for layer in (layer for block in gpt.chunks[0].layers.layers for layer in block.layers):
        if start.erf and isinstance(layer, Gelu):
            layer.__class__ = ErfGelu
        if start.documents is not None and hasattr(layer, "pair"):
            layer.pair = straightforward_attention(documents=order.sequences(start.documents))
    return gpt


class ErfGelu(Gelu):
    """Compute GELU by the error function, z times the share of normal numbers below z."""

    def forward(self, x: Any, overlap: Any = None) -> tuple[Any, Any]:
        """Compute it for z = x + b; save what the form of tanh does."""
        y, saved = super().forward(x, overlap)
        z = self._argument(*saved)
        y[...] = z * ndtr(z)
        return y, saved

    def backward(self, dy: Any, saved: Any, overlap: Any = None) -> Any:
        """Compute dx and db from those of the form of tanh, by the ratio of both slopes."""
        z = np.float64(self._argument(*saved))
        slope = ndtr(z) + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        other = gelu_backward(np.ones_like(z), z, np.empty_like(z))
        ratio = np.divide(slope, other, out=np.zeros_like(z), where=other != 0)
        return super().backward((dy * ratio).astype(dy.dtype), saved, overlap)

    @staticmethod
    def _argument(x: Any, b: Any) -> Any:
        return x if b is None else x + b.reshape(x.shape[2:])


class _Found:
    """Keep the outputs of modules and their gradients as a model computes them."""

    def __init__(self, gpt: GPT, start: Start, back: Reordering) -> None:
        self.tensors: Tensors = {}
        (chunk,), ends = gpt.chunks, gpt.chains[-1]
        self._parts: dict[TensorId, list[np.ndarray]] = {}
        self._micros, self._back = gpt.schedule.microbatches, back
        first, *layers, norm, head = border_names(start.family, start.model.layers)
        steps = len(chunk.layers.layers) // len(layers)

        def whole(a: Any) -> np.ndarray:
            return chunk.unshard(wide(a))

        def logits(a: Any) -> np.ndarray:
            space = ends.output.loss.space
            shape = (*chunk.shape[:2], start.model.vocab)
            return space.layout().unshard(wide(a), chunk.grid, shape)
        blocks = chunk.layers.layers
        # The input of the first block is what the embedding, and dropout, put out.
        self._watch(blocks[0], "", first, whole, first=True)
        for number, name in enumerate(layers, 1):
            self._watch(blocks[number * steps - 1], name, "", whole)
        for number, name in enumerate(layers[:-1], 1):
            self._watch(blocks[number * steps], "", name, whole)
        self._watch(ends.output.norm, norm, layers[-1], whole)
        self._watch(ends.output.head, head, norm, logits, inputs=whole)
        self._watch(ends.output.loss, "", head, logits)

    def _watch(self, layer: Any, output: str, given: str, whole: Callable, *,
               first: bool = False, inputs: Callable | None = None) -> None:
        """Keep the output of a layer, and the gradient of its input, which `given` put out.

        The input of the `first` layer is kept, too.
        """
        once, back = layer.forward, layer.backward

        def keep_output(x: Any, *rest: Any) -> Any:
            if first:
                self._keep(TensorId("activation", given), whole(x))
            results = once(x, *rest)
            if output:
                self._keep(TensorId("activation", output), whole(results[0]))
            return results

        def keep_gradient(dy: Any, *rest: Any) -> Any:
            dx = back(dy, *rest)
            if given:
                self._keep(TensorId("activation gradient", given), (inputs or whole)(dx))
            return dx
        layer.forward, layer.backward = keep_output, keep_gradient

    def _keep(self, place: TensorId, a: np.ndarray) -> None:
        """Keep the part of a micro-batch; all of it when the last one is there."""
        parts = self._parts.setdefault(place, [])
        parts.append(np.array(a, np.float64))
        if len(parts) == self._micros:
            self.tensors[place] = self._back.output(place, np.concatenate(parts))


def _fix_masks(gpt: GPT, masks: Mapping[str, np.ndarray], order: Reordering) -> None:
    """Let dropout use given masks instead of drawn ones."""
    if not gpt.config.model.dropout:
        return
    drops = [gpt.chains[-1].dropout, *(block.dropout for block in gpt.chunks[0].layers.layers)]
    names = mask_names(gpt.config.model.layers)
    for drop in drops:
        mask = order.output(TensorId("mask"), np.asarray(masks[names[drop.name]]))
        drop.scale = 1 / (1 - gpt.config.model.dropout)

        def factors(drop: Any = drop, mask: np.ndarray = mask) -> np.ndarray:
            rows, *rest = drop.space.layout().slices(drop.space.grid, drop.shape)
            first = drop.key.place[1]
            return mask[(slice(first + rows.start, first + rows.stop), *rest)] * drop.scale
        drop._draw_factors = factors


def target_losses(logits: np.ndarray, targets: np.ndarray, ignored: int) -> np.ndarray:
    """Return the loss of each target, (batch, seq) in float64; 0 for ignored ones."""
    top = logits.max(-1, keepdims=True)
    sums = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    out = targets == ignored
    goals = np.take_along_axis(logits, np.where(out, 0, targets)[..., None], -1)[..., 0]
    return np.where(out, 0.0, sums - goals)


def compute_update(start: Start, way: Way, comm: Any, optimizer: Mapping[str, Any],
                   gradients: Mapping[str, np.ndarray]) -> Tensors:
    """Compute the weights after a first step of an optimizer by given gradients."""
    gpt = _build(start, way, comm, Reordering.draw(start.model, 0))
    try:
        given = _to_parameters(start.family, gpt.config.model, gradients)
        for p in gpt.trained:
            block = given[p.name].reshape(p.shape)[p.layout.slices(p.grid, p.shape)]
            p.grad[...] = p.grid.backend.asarray(
                np.ascontiguousarray(block).astype(host_dtype(p.grad)))
        _make_optimizer(gpt, optimizer, start.family).step()
        state = {p.name: p.gather(wide(p.master)) for p in gpt.trained}
    finally:
        gpt.free()
    named = to_tensors(start.family, gpt.config.model, state)
    return {TensorId("weight after", name): a for name, a in named.items()}


def _make_optimizer(gpt: GPT, settings: Mapping[str, Any], family: str) -> Any:
    """Return the optimizer that settings describe, see `bench.experiments.dump.said.OPTIMIZER`.

    As in PyTorch every parameter decays, unless groups say otherwise.
    """
    decayed, names = settings.get("decayed", "all"), tensor_names(family, gpt.config.model)
    which = decays if decayed == "matrices" else lambda trained: decayed == "all" or any(
        name in decayed for name in names[trained.name])
    options = {"lr": settings["lr"], "clip": settings.get("clip"), "decays": which,
               "weight_decay": settings["weight_decay"]}
    if settings["name"] == "sgd":
        return SGD(gpt, momentum=settings["momentum"], **options)
    return AdamW(gpt, betas=tuple(settings["betas"]), eps=settings["eps"], **options)


def _to_parameters(family: str, model: Model,
                   tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of this library, public shapes in float64, from named tensors."""
    shapes, found = parameter_shapes(model), {}
    for name, pieces in model_pieces(family, model).items():
        whole = np.empty(shapes[name])
        for piece in pieces:
            index, box = piece.within(tuple(slice(0, n) for n in shapes[name]))
            part = np.float64(tensors[piece.tensor][box])
            whole[index] = part.T if piece.transposed else part
        found[name] = whole.reshape(_public(name, shapes[name]))
    return found


def to_tensors(family: str, model: Model,
               parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors by the names of Hugging Face from parameters of this library."""
    shapes, pieces = parameter_shapes(model), model_pieces(family, model)
    found = {name: np.zeros(shape) for name, shape in tensor_shapes(pieces).items()}
    for name, some in pieces.items():
        whole = parameters[name].reshape(shapes[name])
        for piece in some:
            index, box = piece.within(tuple(slice(0, n) for n in shapes[name]))
            part = whole[index]
            found[piece.tensor][box] = part.T if piece.transposed else part
    return found


def _public(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the public shape of a parameter, see `mm3d.model.parameters.Parameter`."""
    if ".experts." in name:
        return shape
    return (shape[0], -1) if name.endswith("weight") and len(shape) > 1 else (-1,)


def wide(a: Any) -> np.ndarray:
    """Return a block in float64 on the host: MPI has no types of 16 bits."""
    return np.asarray(backend_of(a).to_host(a), np.float64)
