"""State faults that public reports tell, each with its report, beside `planted_faults`."""

from dataclasses import replace
from typing import Any, Callable

import numpy as np

from bench.experiments.dump.computation import Tensors, Way, compute_step
from bench.experiments.dump.places import LOSS, NORM, TensorId
from planted_faults import (LAST, LAYER, TABLE, Fault, Workshop, in_attention, lost_microbatch,
                            narrowed)

LLAMA = "model.layers.1"
EXPERTS = f"{LLAMA}.block_sparse_moe"


def members_alone(forward: Callable, back: Callable) -> tuple[Callable, Callable]:
    """Lose the gradients of keys and values from all queries of a group but the first."""
    calls: list[int] = []

    def backward(*given: Any) -> None:
        back(*given)
        if len(calls) % 2:
            for a in given[-2:]:
                a[...] = 0
        calls.append(1)
    return forward, backward


def positions_alone(forward: Callable, back: Callable) -> tuple[Callable, Callable]:
    """Lose the gradients of the first half of keys and values from later queries."""
    def backward(do: np.ndarray, *given: Any) -> None:
        back(do, *given)
        middle, (dq, dk, dv) = do.shape[1] // 2, given[-3:]
        own, terms = do.copy(), [np.zeros_like(a) for a in (dq, dk, dv)]
        own[:, middle:] = 0
        back(own, *given[:-3], *terms)
        for a, term in zip((dk, dv), terms[1:]):
            a[:, :middle] = term[:, :middle]
    return forward, backward


def half_of_head(shop: Workshop) -> Tensors:
    """Do not sum the gradient of the head's input over two ranks, which divide the vocabulary."""
    def look(gpt: Any) -> None:
        head = gpt.chains[-1].output.head
        back = head.backward

        def backward(dlogits: np.ndarray, *given: Any) -> np.ndarray:
            own = dlogits.copy()
            own[..., own.shape[-1] // 2:] = 0
            dx = back(dlogits, *given)
            dx[...] = (own.reshape(-1, own.shape[-1]) @ head.weight.value).reshape(dx.shape)
            return dx
        head.backward = backward
    return shop.finish(shop.step(look=look))


def stage_forgets(shop: Workshop) -> Tensors:
    """Lose the gradients of the first micro-batch on the second of two stages."""
    right = shop.step()
    lost = lost_microbatch(shop)
    return shop.finish({place: lost[place] if place.kind == "gradient" and (
        LAYER in place.name or "ln_f" in place.name) else a for place, a in right.items()})


def table_by_parts(shop: Workshop) -> Tensors:
    """Sum a tied table's gradients over stages after they were scattered over replicas.

    Each rank of the two stages has summed another half of its rows over the replicas.
    """
    middle, parts = len(shop.start.tokens) // 2, []
    for others in (slice(middle, None), slice(0, middle)):
        gpts: list[Any] = []
        start = shop.without(others)
        found = compute_step(start, Way("float64"), shop.comm, gpts.append)
        share = np.sum(start.targets != -100) / np.sum(shop.start.targets != -100)
        head = np.float64(gpts[0].chains[-1].output.head.weight.grad) * share
        parts.append((found[TensorId("gradient", TABLE)] * share - head, head))
    (first, head), (second, other) = parts
    a, rows = first + second + 2 * other, len(first) // 2
    a[:rows] = (2 * first + head + other)[:rows]
    return shop.change_gradients(TABLE, lambda right: a)


def narrow_weights(shop: Workshop) -> Tensors:
    """Keep the weights after the step in bfloat16, though they are said to be in float32."""
    return {place: narrowed(a) if place.kind == "weight after" else a
            for place, a in shop.finish(shop.step()).items()}


def smaller_step(shop: Workshop) -> Tensors:
    """Change the weights by two thirds of what the optimizer says."""
    tensors = shop.finish(shop.step())
    for place, a in tensors.items():
        if place.kind == "weight after":
            before = np.float64(shop.start.weights[place.name])
            tensors[place] = before + (a - before) / 1.5
    return tensors


def unbalanced(shop: Workshop) -> Tensors:
    """Lose the gradient of the routers' loss, which the loss has."""
    right, model = shop.step(), shop.start.model
    assert model.experts is not None
    lost = shop.step(replace(shop.start, model=replace(model, experts=replace(
        model.experts, balance=0.0))))
    return shop.finish({place: a if place.kind in ("activation", LOSS) else lost[place]
                        for place, a in right.items()})


def norm_of_shards(shop: Workshop) -> Tensors:
    """Let each of two ranks normalize its features by their own mean square."""
    def look(gpt: Any) -> None:
        norm = gpt.chunks[0].layers.layers[2].layers[0]
        once = norm.forward

        def forward(x: np.ndarray, *given: Any) -> Any:
            y, saved = once(x, *given)
            wide = np.asarray(x, np.float64)
            whole = np.sqrt(np.mean(wide ** 2, -1, keepdims=True))
            for half in np.array_split(np.arange(x.shape[-1]), 2):
                part = np.sqrt(np.mean(wide[..., half] ** 2, -1, keepdims=True))
                y[..., half] = (np.asarray(y[..., half], np.float64) * whole / part).astype(
                    y.dtype)
            return y, saved
        norm.forward = forward
    return shop.finish(shop.step(look=look))


def other_masks_again(shop: Workshop) -> Tensors:
    """Recompute the last layer's activations in backward with another mask of dropout."""
    def look(gpt: Any) -> None:
        drop = gpt.chunks[0].layers.layers[-1].dropout
        mask = np.roll(shop.start.masks[f"{LAYER}.mlp.dropout"], 1, axis=0) * drop.scale

        def backward(dy: np.ndarray, *given: Any) -> np.ndarray:
            return (np.asarray(dy, np.float64) * mask).astype(dy.dtype)
        drop.backward = backward
    return shop.finish(shop.step(look=look))


def _llama(name: str) -> TensorId:
    """Return the place of a gradient in the last layer of a Llama."""
    return TensorId("gradient", f"{LLAMA}.{name}.weight")


REPORTED = [
    Fault("grouped keys' gradients of one rank's queries alone", lambda shop: in_attention(
        shop, members_alone), _llama("self_attn.v_proj"), "", "llama",
        "bigcode-project/Megatron-LM#11"),
    Fault("keys' gradients of the own positions' queries alone", lambda shop: in_attention(
        shop, positions_alone), _llama("self_attn.v_proj"), "", "llama",
        "NVIDIA/Megatron-LM#1464"),
    Fault("gradient of the head's input not summed", half_of_head,
          TensorId("activation gradient", "transformer.ln_f"), "",
          "plain", "NovaSky-AI/SkyRL#1886"),
    Fault("norm without the other rank's experts", lambda shop: shop.with_norm(
        lambda name: ".experts.2." not in name and ".experts.3." not in name), TensorId(NORM), "",
        "mixtral", "hpcaitech/ColossalAI#2192"),
    Fault("experts' gradients doubled", lambda shop: shop.change_gradients(
        ".experts.", lambda a: 2 * a),
        TensorId("gradient", f"{EXPERTS}.experts.3.w2.weight"), "2 times", "mixtral",
        "pytorch/pytorch#160285"),
    Fault("micro-batches lost on the second stage", stage_forgets, LAST, "0, 1 times", "plain",
          "NVIDIA-NeMo/Automodel#3530"),
    Fault("tied table summed after it was scattered", table_by_parts, TensorId("gradient", TABLE),
          "", "plain", "NVIDIA/Megatron-LM#844"),
    Fault("weights kept in bfloat16", narrow_weights, TensorId("weight after", TABLE), "bfloat16",
          "plain", "NVIDIA/Megatron-LM#1359"),
    Fault("step of two thirds", smaller_step, TensorId("weight after", TABLE), "its change is",
          "plain", "NVIDIA/Megatron-LM#5974"),
    Fault("gradient of the routers' loss lost", unbalanced,
          TensorId("gradient", f"{EXPERTS}.gate.weight"), "", "balanced",
          "NVIDIA-NeMo/Automodel#1408"),
    Fault("RMSNorm of each shard of the features", norm_of_shards, TensorId("activation", LLAMA),
          "", "llama", "axonn-ai/yalis#36"),
    Fault("recomputed with another mask", other_masks_again,
          TensorId("gradient", f"{LAYER}.mlp.c_proj.bias"), "", "dropout",
          "allenai/OLMo-core#828"),
    Fault("router's gradient of one shard of the sequence", lambda shop: shop.half(
        f"{EXPERTS}.gate.weight", 1), TensorId("gradient", f"{EXPERTS}.gate.weight"),
        "parts of the positions", "mixtral", "pytorch/torchtitan#2387"),
    Fault("loss of gathered logits as of a part", lambda shop: shop.with_loss(
        lambda loss: loss + np.log(2)), TensorId(LOSS), "logarithm", "plain",
        "NVIDIA/Megatron-LM#7452"),
    Fault("norms and biases decay, too", lambda shop: shop.finish(shop.step(), decayed="all"),
          TensorId("weight after", "transformer.h.0.ln_1.weight"), "decays", "matrices",
          "verl-project/verl#5070"),
    Fault("loss divided by ranks of the sequence", lambda shop: shop.with_loss(
        lambda loss: loss / 2), TensorId(LOSS), "1/2 times", "plain", "ByteDance-Seed/VeOmni#338")]
