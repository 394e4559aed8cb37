"""State what faults of composed parallelisms do to the tensors of a step.

Each function returns the tensors of a step of a workshop with one fault; `FAULTS` lists them, with
the tensor at which it has to be found.
"""

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import numpy as np

from bench.experiments.dump.causes import gradient_terms
from bench.experiments.dump.computation import (Start, Tensors, Way, compute_step, compute_update)
from bench.experiments.dump.envelopes import measure_norm
from bench.experiments.dump.places import LOSS, NORM, TensorId, border_names
from bench.experiments.dump.tensor_files import number_type
from mm3d.model.layers import Linear
from mm3d.model.rotary import Rotary

LAYER = "transformer.h.1"
TABLE = "transformer.wte.weight"


@dataclass(frozen=True)
class Workshop:
    """Make steps on one rank, right ones and parts of them."""

    start: Start
    optimizer: Mapping[str, Any]
    comm: Any

    @property
    def way(self) -> Way:
        """Return how steps are computed: another order than those of the envelope."""
        return Way(self.start.model.dtype, self.start.model.master, 1, 99)

    def step(self, start: Start | None = None, look: Callable | None = None) -> Tensors:
        """Compute a step up to the gradients; what `look` changes is in the dump's own order."""
        way = self.way if look is None else replace(self.way, seed=0)
        return compute_step(start or self.start, way, self.comm, look)

    def finish(self, tensors: Tensors, **optimizer: Any) -> Tensors:
        """Add the norm and the weights after a step, as they follow from the gradients."""
        gradients = self.gradients(tensors)
        tensors[TensorId(NORM)] = measure_norm(gradients)[0]
        return tensors | compute_update(self.start, self.way, self.comm, {
            **self.optimizer, **optimizer}, gradients)

    def gradients(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return the gradients among tensors, as the dump stores them."""
        kept = self.start.model.master or self.start.model.dtype
        return {place.name: np.asarray(a, kept) for place, a in tensors.items()
                if place.kind == "gradient"}

    def change_gradients(self, part: str, change: Callable[[np.ndarray], Any]) -> Tensors:
        """Return a step with other gradients of weights whose names have a part."""
        return self.finish({place: change(a) if place.kind == "gradient" and part in place.name
                            else a for place, a in self.step().items()})

    def with_loss(self, change: Callable[[np.ndarray], Any]) -> Tensors:
        """Return a right step that reports another loss."""
        tensors = self.finish(self.step())
        return tensors | {TensorId(LOSS): change(tensors[TensorId(LOSS)])}

    def with_norm(self, count: Callable[[str], int]) -> Tensors:
        """Return a right step whose norm counts the gradients of each weight so many times."""
        tensors = self.finish(self.step())
        return tensors | {TensorId(NORM): np.sqrt(sum(
            count(name) * (np.float64(a) ** 2).sum()
            for name, a in self.gradients(tensors).items()))}

    def with_gradients(self, factor: float) -> Tensors:
        """Return a step with all gradients times a factor."""
        tensors = self.step()
        return self.finish({place: a * factor if place.kind.endswith("gradient") else a
                            for place, a in tensors.items()})

    def half(self, name: str, dim: int, factor: float = 1.0) -> Tensors:
        """Return a step whose gradient of a weight is that of half the sequences or positions."""
        terms = gradient_terms(self.start, name, dim)
        return self.change_gradients(name, lambda a: factor * terms[:len(terms) // 2].sum(0))

    def without(self, sequences: slice) -> Start:
        """Return the start with ignored targets in some sequences."""
        targets = self.start.targets.copy()
        targets[sequences] = self.start.model.ignored
        return replace(self.start, targets=targets)

    def with_weight(self, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Tensors:
        """Return a step that is computed with another weight than the dump has."""
        weights = {**self.start.weights}
        weights[name] = change(np.array(weights[name]))
        return self.finish(self.step(replace(self.start, weights=weights)))


def tied_parts(shop: Workshop, embedding: float, head: float) -> Tensors:
    """Add the two gradients of the tied table with other factors."""
    gpts: list[Any] = []
    whole = compute_step(shop.start, Way("float64"), shop.comm, gpts.append)
    own = np.float64(gpts[0].chains[-1].output.head.weight.grad)
    total = whole[TensorId("gradient", TABLE)]
    return shop.change_gradients(TABLE, lambda a: embedding * (total - own) + head * own)


def loss_over_all(shop: Workshop) -> Tensors:
    """Divide by all targets, with the ignored ones: loss and gradients are smaller."""
    targets = shop.start.targets
    factor = (targets != shop.start.model.ignored).sum() / targets.size
    tensors = shop.with_gradients(float(factor))
    return tensors | {TensorId(LOSS): tensors[TensorId(LOSS)] * factor}


def mean_of_means(shop: Workshop, loss: bool) -> Tensors:
    """Average the means of two replicas with other numbers of targets."""
    middle = len(shop.start.tokens) // 2
    halves = [shop.step(shop.without(part)) for part in (slice(middle, None), slice(0, middle))]
    mean = {place: (halves[0][place] + halves[1][place]) / 2 for place in halves[0]}
    right = shop.step()
    if not loss:
        mean[TensorId(LOSS)] = right[TensorId(LOSS)]
    forward = {place: a for place, a in right.items() if place.kind == "activation"}
    return shop.finish({place: a for place, a in mean.items()
                        if place.kind in (LOSS, "gradient")} | forward)


def shifted_again(shop: Workshop) -> Tensors:
    """Shift the targets by one more position."""
    targets = np.roll(shop.start.targets, -1, axis=1)
    targets[:, -1] = shop.start.model.ignored
    return shop.finish(shop.step(replace(shop.start, targets=targets)))


def loss_of_one(shop: Workshop) -> Tensors:
    """Report the loss of the first replica alone."""
    middle = len(shop.start.tokens) // 2
    rest = slice(middle, None)
    return shop.with_loss(lambda loss: shop.step(shop.without(rest))[TensorId(LOSS)])


def lost_microbatch(shop: Workshop) -> Tensors:
    """Overwrite the gradients of the first micro-batch instead of adding to them."""
    tensors, middle = shop.step(), len(shop.start.tokens) // 2
    lone = shop.step(shop.without(slice(0, middle)))
    counts = [(start.targets != shop.start.model.ignored).sum()
              for start in (shop.without(slice(0, middle)), shop.start)]
    return shop.finish({place: lone[place] * counts[0] / counts[1]
                        if place.kind == "gradient" else a for place, a in tensors.items()
                        if place.kind != "activation gradient"})


def of_first_stage(name: str) -> bool:
    """Return whether the first of two stages has a weight."""
    return "wte" in name or "wpe" in name or ".h.0." in name


def clip_per_stage(shop: Workshop) -> Tensors:
    """Clip the gradients of each of two stages by their own norm."""
    tensors = shop.finish(shop.step())
    gradients = shop.gradients(tensors)
    first = {*filter(of_first_stage, gradients)}
    for own in (first, gradients.keys() - first):
        part = {name: a if name in own else np.zeros_like(a) for name, a in gradients.items()}
        after = compute_update(shop.start, shop.way, shop.comm, shop.optimizer, part)
        tensors |= {place: a for place, a in after.items() if place.name in own}
    return tensors


def stale(shop: Workshop, name: str, columns: bool) -> Tensors:
    """Leave a weight, or the second half of its columns, as it was before the step."""
    tensors = shop.finish(shop.step())
    place, before = TensorId("weight after", name), np.float64(shop.start.weights[name])
    first = before.shape[-1] // 2 if columns else 0
    tensors[place] = np.array(tensors[place])
    tensors[place][..., first:] = before[..., first:]
    return tensors


def no_last_quarter(a: np.ndarray) -> np.ndarray:
    """Return a gradient without the last quarter of its columns."""
    a = np.array(a)
    a[:, 3 * a.shape[1] // 4:] = 0
    return a


def positions_again(shop: Workshop) -> Tensors:
    """Begin the positions of the second shard of each sequence at 0 again."""
    def table(a: np.ndarray) -> np.ndarray:
        middle = len(a) // 2
        a[middle:] = a[:len(a) - middle]
        return a
    return shop.with_weight("transformer.wpe.weight", table)


def swapped_heads(shop: Workshop) -> Tensors:
    """Give two ranks each other's heads of queries, and not of keys and values."""
    def swap(a: np.ndarray) -> np.ndarray:
        third = a.shape[1] // 3
        a[:, :third] = np.roll(a[:, :third], third // 2, axis=1)
        return a
    return shop.with_weight(f"{LAYER}.attn.c_attn.weight", swap)


def in_attention(shop: Workshop, change: Callable[[Callable, Callable], tuple]) -> Tensors:
    """Change how the last layer's attention computes, forward and backward."""
    def look(gpt: Any) -> None:
        layer = next(one for one in gpt.chunks[0].layers.layers[2].layers if hasattr(one, "pair"))
        layer.pair = change(*layer.pair)
    return shop.finish(shop.step(look=look))


def unmasked(forward: Callable, back: Callable) -> tuple[Callable, Callable]:
    """Let all queries see all keys."""
    return lambda q, k, v, first, limit, out: forward(q, k, v, first, False, out), back


def half_rows(a: np.ndarray) -> np.ndarray:
    """Return a weight without the second half of its rows, which another rank has."""
    a[len(a) // 2:] = 0
    return a


def partial_input_gradient(shop: Workshop) -> Tensors:
    """Do not sum the gradient of a column-parallel layer's input over the two ranks."""
    def look(gpt: Any) -> None:
        layer = next(one for block in gpt.chunks[0].layers.layers for one in block.layers
                     if isinstance(one, Linear) and one.weight.name == "layers.1.mlp.up.weight")
        back = layer.backward

        def backward(dy: Any, saved: Any, *rest: Any) -> Any:
            back(dy, saved, *rest)
            kept, weight = [p.grad.copy() for p in layer.parameters], layer.weight.value
            own = dy.copy()
            own[..., dy.shape[-1] // 2:] = 0
            dx = (own.reshape(-1, own.shape[-1]) @ weight.reshape(len(weight), -1).T).reshape(
                *dy.shape[:-1], -1)
            for p, grad in zip(layer.parameters, kept):
                p.grad[...] = grad
            return np.ascontiguousarray(dx)
        layer.backward = backward
    return shop.finish(shop.step(look=look))


def other_epsilon(shop: Workshop) -> Tensors:
    """Use another epsilon in the norms."""
    model = shop.start.model
    other = replace(model, architecture=replace(model.architecture, epsilon=1e-3))
    return shop.finish(shop.step(replace(shop.start, model=other)))


def stale_replica(shop: Workshop) -> Tensors:
    """Let the second replica compute with a bias as it was before its last step."""
    right, middle = shop.step(), len(shop.start.tokens) // 2
    name = f"{LAYER}.mlp.c_proj.bias"
    other = shop.with_weight(name, lambda a: a + 0.01)
    tensors = {}
    for place, a in right.items():
        tensors[place] = a if place.kind != "activation" else np.concatenate(
            [a[:middle], other[place][middle:]])
    return shop.finish(tensors)


def narrowed(a: np.ndarray) -> np.ndarray:
    """Return numbers after rounding to bfloat16."""
    return a.astype(number_type("bfloat16")).astype(np.float64)


def rotated_again(shop: Workshop) -> Tensors:
    """Begin the rotary positions of the second shard of each sequence at 0 again."""
    def look(gpt: Any) -> None:
        for block in gpt.chunks[0].layers.layers:
            for layer in block.layers:
                if isinstance(layer, Rotary):
                    for a in (layer.turns.cos, layer.turns.sin):
                        a[len(a) // 2:] = a[:len(a) - len(a) // 2]
    return shop.finish(shop.step(look=look))


def swapped_gates(shop: Workshop) -> Tensors:
    """Take the gate of a gated perceptron for the other product, as of one fused weight."""
    weights, layer = {**shop.start.weights}, "model.layers.1.mlp"
    names = f"{layer}.gate_proj.weight", f"{layer}.up_proj.weight"
    weights |= dict(zip(names, (weights[names[1]], weights[names[0]])))
    return shop.finish(shop.step(replace(shop.start, weights=weights)))


def equal_masks(shop: Workshop) -> Tensors:
    """Drop the same elements on both replicas."""
    middle = len(shop.start.tokens) // 2
    masks = {name: np.concatenate([a[:middle]] * 2) for name, a in shop.start.masks.items()}
    tensors = shop.finish(shop.step(replace(shop.start, masks=masks)))
    return tensors | {TensorId("mask", name): a for name, a in masks.items()}


@dataclass(frozen=True)
class Fault:
    """State a fault, and where it has to be found: at the first wrong tensor.

    Attributes
    ----------
    cause : str
        A part of the cause that has to be named; "" where none is known.
    start : str
        Which start it needs: "plain", "dropout", "sgd", "matrices" (which alone decay),
        "balanced" (experts with a loss of routers), or a family.
    report : str
        A public report of it.
    """

    what: str
    plant: Callable[[Workshop], Tensors]
    place: TensorId
    cause: str
    start: str = "plain"
    report: str = ""


def _gradient(name: str) -> TensorId:
    """Return the place of a gradient in the layer that faults are planted in."""
    return TensorId("gradient", f"{LAYER}.{name}")


FIRST, LAST = border_names("gpt2", 2)[0], TensorId("gradient", "transformer.ln_f.bias")
FAULTS = [
    Fault("bias's gradient not averaged over 2 replicas", lambda shop: shop.half(
        f"{LAYER}.mlp.c_fc.bias", 0, 2.0), _gradient("mlp.c_fc.bias"), "2, 0 times"),
    Fault("norm's gradient of one shard of the sequence", lambda shop: shop.half(
        f"{LAYER}.ln_1.weight", 1), _gradient("ln_1.weight"), "parts of the positions"),
    Fault("bias's gradient summed twice, over ranks that have it all", lambda shop: (
        shop.change_gradients(f"{LAYER}.attn.c_proj.bias", lambda a: 2 * a)),
        _gradient("attn.c_proj.bias"),
        "2 times the right one, in this gradient alone"),
    Fault("weight's gradient lost", lambda shop: shop.change_gradients(
        f"{LAYER}.attn.c_proj.weight", np.zeros_like), _gradient("attn.c_proj.weight"),
        "all zeros"),
    Fault("gradient of one shard of 4 lost", lambda shop: shop.change_gradients(
        f"{LAYER}.mlp.c_fc.weight", no_last_quarter), _gradient("mlp.c_fc.weight"),
        "block 3 of 4"),
    Fault("head's gradient of the tied table lost", lambda shop: tied_parts(shop, 1, 0),
          TensorId("gradient", TABLE), "0 times the head's"),
    Fault("embedding's gradient of the tied table doubled", lambda shop: tied_parts(shop, 2, 1),
          TensorId("gradient", TABLE), "2 times the embedding's"),
    Fault("gradients divided by 2 replicas twice", lambda shop: shop.with_gradients(0.5),
          TensorId("activation gradient", "lm_head"), "1/2 times"),
    Fault("gradients summed over 4 replicas", lambda shop: shop.with_gradients(4.0),
          TensorId("activation gradient", "lm_head"), "4 times"),
    Fault("targets shifted twice", shifted_again, TensorId(LOSS), "of targets one position later"),
    Fault("loss divided by all targets, with ignored ones", loss_over_all, TensorId(LOSS),
          "divided by all 128 targets"),
    Fault("loss: mean of 2 replicas' means", lambda shop: mean_of_means(shop, True),
          TensorId(LOSS), "mean over 2 ranks of their means"),
    Fault("gradients: mean of 2 replicas' means", lambda shop: mean_of_means(shop, False), LAST,
          "mean over 2 ranks of their means"),
    Fault("loss of one replica reported", loss_of_one, TensorId(LOSS), "rank 0 of 2 alone"),
    Fault("first micro-batch's gradients overwritten", lost_microbatch, LAST, "0, 1 times"),
    Fault("gradients summed in bfloat16", lambda shop: shop.change_gradients("", narrowed), LAST,
          "bfloat16"),
    Fault("norms' squares counted on 2 ranks", lambda shop: shop.with_norm(
        lambda name: 1 + ("ln_" in name)), TensorId(NORM), "norms count 2 times"),
    Fault("norm of one stage of 2", lambda shop: shop.with_norm(of_first_stage), TensorId(NORM),
          "a part alone"),
    Fault("clipped by each stage's own norm", clip_per_stage, TensorId("weight after", TABLE),
          "another norm in clipping", "sgd"),
    Fault("one shard of 2 stale after the step", lambda shop: stale(
        shop, f"{LAYER}.mlp.c_fc.weight", True),
        TensorId("weight after", f"{LAYER}.mlp.c_fc.weight"), "block 1 of 2"),
    Fault("tied copy stale after the step", lambda shop: stale(shop, TABLE, False),
          TensorId("weight after", TABLE), "did not change"),
    Fault("not clipped", lambda shop: shop.finish(shop.step(), clip=None),
          TensorId("weight after", TABLE), "another norm in clipping", "sgd"),
    Fault("no decay of weights", lambda shop: shop.finish(shop.step(), weight_decay=0.0),
          TensorId("weight after", TABLE), "decays", "plain"),
    Fault("no causal mask", lambda shop: in_attention(shop, unmasked),
          TensorId("activation", LAYER), "but the last"),
    Fault("positions of the second shard begin at 0", positions_again,
          TensorId("activation", FIRST), "positions"),
    Fault("row-parallel bias added on both ranks", lambda shop: shop.with_weight(
        f"{LAYER}.mlp.c_proj.bias", lambda a: 2 * a), TensorId("activation", LAYER),
          "bias is added 2 times"),
    Fault("row-parallel product not summed over 2 ranks", lambda shop: shop.with_weight(
        f"{LAYER}.mlp.c_proj.weight", half_rows), TensorId("activation", LAYER),
          "shard 0 of 2 alone"),
    Fault("heads of queries on the wrong rank", swapped_heads, TensorId("activation", LAYER),
          "but the first"),
    Fault("second replica computes with a stale bias", stale_replica,
          TensorId("activation", LAYER), "sequences"),
    Fault("gradient of a column-parallel input not summed", partial_input_gradient,
          _gradient("ln_2.bias"), "column-parallel"),
    Fault("epsilon 1e-3 and not 1e-5", other_epsilon, TensorId("activation", "transformer.h.0"),
          "epsilon is 0.001"),
    Fault("GELU by erf and not by tanh", lambda shop: shop.finish(shop.step(
        replace(shop.start, erf=True))),
          TensorId("activation", "transformer.h.0"), "error function"),
    Fault("masks of dropout the same on 2 replicas", equal_masks, TensorId("mask", FIRST),
          "same seed", "dropout"),
    Fault("rotary positions of the second shard begin at 0", rotated_again,
          TensorId("activation", "model.layers.0"), "block 1 of 2", "llama"),
    Fault("gate and other product of SwiGLU exchanged", swapped_gates,
          TensorId("activation", "model.layers.1"), "", "llama"),
    Fault("experts' gradients divided by replicas", lambda shop: shop.change_gradients(
        ".experts.", lambda a: a / 2), TensorId(
            "gradient", "model.layers.1.block_sparse_moe.experts.3.w2.weight"), "1/2 times",
        "mixtral")]
