"""Name what usually causes the first tensor outside the envelope.

What a fault does to a tensor is tried, kind by kind: a factor, another tensor in its place, a part
of a sum, another setting.  The first that explains the tensor is named.
"""

import copy
from dataclasses import replace
from itertools import islice
from typing import Any, Callable, Iterator

import numpy as np

from bench.experiments.dump import patterns
from bench.experiments.dump.computation import Start, compute_alone, to_tensors, wide
from bench.experiments.dump.dumps import StepDump
from bench.experiments.dump.losses import loss_causes, norm_causes
from bench.experiments.dump.places import LOSS, NORM, tensor_names
from bench.experiments.dump.updates import update_causes
from bench.experiments.dump.verdicts import Judged, Verdict
from mm3d.model.embedding import TiedHead
from mm3d.model.layers import Gelu, Linear

FEW = 10       # elements for each number that is fitted, which fewer do not show
WEAK = 10.0    # envelopes, below which other causes than the first may explain as much
TOLD = 3       # causes that are named of such a tensor, and of a number
EPSILONS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
ROW_PARALLEL = ("attn.c_proj", "mlp.c_proj", "self_attn.o_proj", "mlp.down_proj")


def explain(dump: StepDump, verdict: Verdict) -> str:
    """Return what explains the first tensor outside the envelope of a dump."""
    dump, verdict = _of_first(dump, verdict)
    one = verdict.first
    assert one is not None
    if one.place.kind == "mask":
        return ("replicas drop the same elements: their generators had the same seed"
                if one.error.whole else "another share of the elements stays than dump.json says")
    a, exact = np.float64(dump.tensors[one.place]), verdict.exact[one.place]
    if not np.isfinite(a).all():
        return "it has elements that are infinite or not a number"
    find: dict[str, Callable[..., Iterator[str]]] = {
        LOSS: loss_causes, NORM: norm_causes, "gradient": _gradient, "activation": _activation,
        "activation gradient": _passed_back, "weight after": update_causes}
    causes = find[one.place.kind](dump, verdict, one)
    told = islice(causes, TOLD if one.ratio < WEAK or not a.ndim else 1)
    where = _where(a, exact, one) if one.ratio >= WEAK else None
    return "; or ".join(told) or where or "no pattern that is known here"


def _of_first(dump: StepDump, verdict: Verdict) -> tuple[StepDump, Verdict]:
    """Return them with the first wrong tensor in its place, if it is a copy, and no others."""
    assert verdict.first is not None
    wrong = verdict.first.place
    tensors = {place: a for place, a in dump.tensors.items() if not place.rank}
    judged = [replace(one, place=one.place.first) for one in verdict.judged
              if one.place == wrong or one.place != wrong.first and not one.place.rank]
    return (replace(dump, tensors=tensors | {wrong.first: dump.tensors[wrong]}),
            replace(verdict, judged=judged))


def _where(a: np.ndarray, exact: np.ndarray, one: Judged) -> str | None:
    """Return where a tensor is wrong, if not everywhere."""
    region = patterns.wrong_region(a, exact, one.envelope)
    if region is None:
        return None
    packed = one.place.kind == "activation" and region.dim == 1
    return f"wrong only in {region}" + packed * (
        ": the mask is another, or documents are packed, with no token between them or all at one "
        "position")


def _gradient(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield what explains a gradient."""
    a, exact = np.float64(dump.tensors[one.place]), verdict.exact[one.place]
    if not a.any():
        yield "all zeros: it was lost, or never computed"
    alike = [other for other in verdict.judged if other.place.kind == "gradient"]
    c, scaled = _factor(dump, verdict, one), []
    if c is not None:
        others = (_factor(dump, verdict, other) for other in alike)
        same = [own for own in others if own and np.isclose(own, c, rtol=0.02)]
        where = f"in {len(same)} of {len(alike)} gradients" if len(same) > 1 else (
            "in this gradient alone")
        scaled = [f"{patterns.say_number(c)} times the right one, {where}: {_said_of(dump, c)}"]
    if c == patterns.simple(c or 0):
        yield from scaled
    if dump.model.tied and one.place.name.endswith(("wte.weight", "embed_tokens.weight")):
        yield from _tied(dump, verdict, one)
    yield from _another(dump, verdict, one)
    region = patterns.wrong_shard(a, exact, one.envelope)
    if region is not None:
        part, right = region.of(a), region.of(exact)
        own = 0.0 if not part.any() else patterns.factor_of(part, right, one.left)
        if own is not None:
            yield (f"{patterns.say_number(own)} times the right one, only in {region}: "
                   f"{_said_of(dump, own)}, for one shard")
    if dump.model.dtype in ("float32", "float64") and (narrow := patterns.narrower(a)):
        yield f"all of its numbers are those of {narrow}: it was summed or sent in that type"
    for dim in (0, 1):
        yield from _parts(dump, verdict, one, dim)
    yield from _missing_input_sum(dump, verdict, one)
    if c != patterns.simple(c or 0):    # of which a fit finds one for anything alike
        yield from scaled
    if len(alike) > 1 and all(other.outside for other in alike):
        yield (f"all {len(alike)} gradients are outside: something is added, such as those of an "
               f"earlier step, of another batch or loss, or decay")


def _another(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield which other tensor a gradient is, or in which order its elements are."""
    a, exact, name = np.float64(dump.tensors[one.place]), verdict.exact[one.place], one.place.name
    if moved := patterns.moved_blocks(a, exact, one.left):
        yield moved
    if a.ndim == 2 and a.shape == a.T.shape and patterns.explained(a.T, exact, one.left):
        yield "it is transposed"
    for place, other in verdict.exact.items():
        if place.kind == "gradient" and place.name != name and other.shape == a.shape and (
                a.any() and patterns.explained(a, other, one.left)):
            yield f"it is the gradient of {place.name}"
    most = np.abs(a).max(initial=0.0)
    if 0 < most < np.abs(exact).max() and patterns.explained(a, np.clip(exact, -most, most),
                                                             one.left):
        yield f"it is cut at {most:.3g}, element by element: clipped by value, and before the dump"
    if name.endswith(("wte.weight", "embed_tokens.weight")) and not dump.model.tied:
        counts = np.bincount(dump.tokens.ravel(), minlength=len(a))[:, None]
        if counts.max() > 1 and patterns.explained(a, exact / np.maximum(counts, 1), one.left):
            yield "rows are divided by the number of their tokens: scale_grad_by_freq"


def _factor(dump: StepDump, verdict: Verdict, one: Judged) -> float | None:
    """Return the factor of a tensor, if it has one."""
    return patterns.factor_of(np.float64(dump.tensors[one.place]), verdict.exact[one.place],
                              one.left)


def _said_of(dump: StepDump, c: float) -> str:
    """Return what usually makes a factor."""
    counted = int((dump.targets != dump.model.ignored).sum())
    if counted < dump.targets.size and np.isclose(c, counted / dump.targets.size, rtol=2e-3):
        return "a mean over all targets, with the ignored ones"
    if c == 0:
        return "lost"
    if c < 0:
        return "its sign is wrong"
    if c > max(patterns.RANK_COUNTS):
        return "the scale of a loss, which was not taken away again"
    if min(abs(many - round(many)) for many in (c, 1 / c)) > 0.01 * max(c, 1 / c):
        return "scaled, by a factor of clipping before the dump, or by another count"
    if c > 1.5:
        return f"a sum over {patterns.say_number(c)} ranks that should be a mean, or added twice"
    if 0 < c < 0.7:
        return (f"divided by {patterns.say_number(1 / c)} once too often, or a sum over ranks "
                f"that is missing")
    return "scaled, by another count"


def _tied(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield how the two gradients of a tied table are in the dump's."""
    gpts: list[Any] = []
    exact = compute_alone(verdict.start, gpts.append)[one.place]
    head = np.float64(gpts[0].chains[-1].output.head.weight.grad)
    c = patterns.coefficients([exact - head, head], np.float64(dump.tensors[one.place]), one.left)
    if c is not None:
        c = np.where(np.abs(c) < 1e-3, 0, c)
        embedding, output = map(patterns.say_number, c)
        kind = ("lost" if not c.all() else "doubled" if max(c) > 1.5 else "scaled")
        yield (f"the tied table has {embedding} times the embedding's gradient and {output} times "
               f"the head's: one of them is {kind}")


def _parts(dump: StepDump, verdict: Verdict, one: Judged, dim: int) -> Iterator[str]:
    """Yield which parts of the sum over sequences or positions are in a gradient, how often."""
    a, what = np.float64(dump.tensors[one.place]), ("sequences", "positions")[dim]
    said = dump.ranks.get("data" if dim == 0 else "sequence") or dump.ranks.get("tensor")
    terms = gradient_terms(verdict.start, one.place.name, dim)
    for n in patterns.divisions(len(terms), said):
        sums = [part.sum(0) for part in np.array_split(terms, n)]
        counts = [(part != dump.model.ignored).sum() for part in np.array_split(dump.targets, n)]
        c = sum(counts) / (n * np.maximum(counts, 1))
        of_means = dim == 0 and len({*counts}) > 1 and patterns.explained(
            a, np.tensordot(c, sums, 1), one.left, c.max())
        c = c if of_means else patterns.coefficients(sums, a, one.left)
        if c is None or FEW * n > a.size and (c != patterns.simple(c)).any() and not of_means:
            continue
        c = np.where(np.abs(c) < 1e-3, 0, c)
        told = f"count {', '.join(map(patterns.say_number, c))} times"
        if of_means:
            yield (f"a mean over {n} ranks of their means, with other numbers of targets: parts "
                   f"of the {what} {told}")
        elif not np.allclose(c, c[0], rtol=0.02):    # else it is a factor
            yield f"parts of the {what}, divided among {n} ranks, {told}" + (
                ": a sum over ranks is missing" if (c == 0).any() else "")
        return    # of which other divisions are parts


def gradient_terms(start: Start, name: str, dim: int) -> np.ndarray:
    """Return the terms of a gradient, one for each sequence (dim 0) or position (dim 1).

    The backward pass of the layer that has the weight is computed again, by the output's gradient
    in one sequence or position alone.
    """
    calls: list[tuple[Any, Any, tuple]] = []
    gpts: list[Any] = []

    def remember(gpt: Any) -> None:
        gpts.append(gpt)
        ends, (chunk,) = gpt.chains[-1], gpt.chunks
        for layer in (ends.output.norm, ends.output.head, ends.embedding, *(
                layer for block in chunk.layers.layers for layer in block.layers)):
            layer.backward = _remembering(layer, layer.backward, calls)
    compute_alone(start, remember)
    gpt, terms = gpts[0], []
    for at in range(start.tokens.shape[dim]):
        gpt.zero_gradients()
        for back, dy, more in calls:
            own = np.zeros_like(dy)
            box = (slice(None),) * dim + (at,)
            own[box] = dy[box]
            back(own, *copy.deepcopy(more))
        gpt.chains[-1].output.add_tied_gradient()
        gradients = {p.name: wide(p.grad) for p in gpt.trained}
        terms.append(to_tensors(start.family, gpt.config.model, gradients)[name])
    return np.array(terms)


def _remembering(layer: Any, back: Callable, calls: list) -> Callable:
    """Return a backward pass that copies what it is given."""
    def backward(dy: Any, *more: Any) -> Any:
        if layer.parameters or isinstance(layer, (Gelu, TiedHead)):
            own = type(layer).backward.__get__(layer)    # which keeps nothing
            calls.append((own, np.array(dy), copy.deepcopy(more)))
        return back(dy, *more)
    return backward


def _missing_input_sum(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield whether a norm's gradient has a part of the product after it alone."""
    a, found = np.float64(dump.tensors[one.place]), []
    names = tensor_names(dump.family, dump.model)
    for n in (2, 4, 8):
        for shard in range(n):
            def look(gpt: Any, n: int = n, shard: int = shard) -> None:
                for block in gpt.chunks[0].layers.layers:
                    norm, linear = block.layers[:2]
                    if isinstance(linear, Linear) and any(
                            one.place.name in names[p.name] for p in norm.parameters):
                        found.append(norm)
                        linear.backward = _shard_alone(linear, n, shard)
            tensors = compute_alone(verdict.start, look)
            if not found:
                return
            if patterns.explained(a, tensors[one.place], one.left):
                yield (f"it has the gradient of shard {shard} of {n} of the product after it "
                       f"alone: the sum over ranks of a column-parallel layer's input gradient is "
                       f"missing")


def _shard_alone(linear: Linear, n: int, shard: int) -> Callable:
    """Return the backward pass whose input gradient is that of a shard of the features."""
    back = linear.backward

    def backward(dy: Any, saved: Any, *rest: Any) -> Any:
        own = np.zeros_like(dy)
        part = np.array_split(np.arange(dy.shape[-1]), n)[shard]
        own[..., part] = dy[..., part]
        return back(own, saved, *rest)
    return backward


def _row_parallel(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield what of a row-parallel layer explains an activation: its bias, or its sum."""
    a, start = np.float64(dump.tensors[one.place]), verdict.start

    def same(name: str, other: np.ndarray) -> bool:
        weights = {**dump.weights, name: other}
        found = compute_alone(replace(start, weights=weights))
        return patterns.explained(a, found[one.place], one.left)
    for part in ROW_PARALLEL:
        name = f"{one.place.name}.{part}"
        bias = dump.weights.get(f"{name}.bias")
        for n in (0, 2, 4, 8) if bias is not None else ():
            if same(f"{name}.bias", n * np.float64(bias)):
                yield f"{name}.bias is added {n} times: once on each rank of a row-parallel layer"
        weight = dump.weights.get(f"{name}.weight")
        for n in (2, 4) if weight is not None else ():
            for shard in range(n):
                part_of, dim = np.zeros(weight.shape), 0 if dump.family == "gpt2" else 1
                rows = np.array_split(np.arange(weight.shape[dim]), n)[shard]
                box = (slice(None),) * dim + (rows,)
                part_of[box] = np.float64(weight)[box]
                if same(f"{name}.weight", part_of):
                    yield (f"{name} has the product of shard {shard} of {n} alone: a sum over "
                           f"the ranks of a row-parallel layer is missing")


def _activation(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield which other setting, or which place, explains an activation."""
    a, exact = np.float64(dump.tensors[one.place]), verdict.exact[one.place]
    c = _factor(dump, verdict, one)
    if c is not None and c == patterns.simple(c):
        yield (f"{patterns.say_number(c)} times the right one: a sum over ranks that is missing "
               f"or done twice")
    region, ends = patterns.wrong_shard(a, exact, one.envelope), _seen(a, exact, one)
    if ends and region is None:
        yield ends
    if region is not None:
        what = ("sequences", "positions", "features")[region.dim]
        more = {"positions": ": positions or the mask of a shard of the sequence are wrong",
                "sequences": f": {ends or 'what one replica was given'}",
                "features": ": one shard's weights or bias are stale, doubled or missing"}[what]
        c = patterns.factor_of(region.of(a), region.of(exact), one.left)
        yield f"wrong only in {what} {region}" + (
            more if c is None else f", {patterns.say_number(c)} times the right one{more}")
    start = verdict.start
    for epsilon in EPSILONS:
        how = dump.model.architecture
        if epsilon != how.epsilon:
            other = replace(start, model=replace(dump.model, architecture=replace(
                how, epsilon=epsilon)))
            if patterns.explained(a, compute_alone(other)[one.place], one.left):
                yield f"epsilon is {epsilon:g} in the norms, not {how.epsilon:g}"
    other = compute_alone(replace(start, erf=not start.erf))[one.place]
    if patterns.explained(a, other, one.left):
        names = ("by the error function", "by tanh")
        yield "GELU {}, and not {}".format(*names[::-1] if start.erf else names)
    yield from _row_parallel(dump, verdict, one)
    if c is not None and c != patterns.simple(c):
        yield f"{patterns.say_number(c)} times the right one"


def _seen(a: np.ndarray, exact: np.ndarray, one: Judged) -> str | None:
    """Return what is wrong in attention if only the first or the last position is right."""
    count = a.shape[1]
    wrong = np.flatnonzero((np.abs(a - exact) > one.envelope.largest).any((0, 2)))
    if np.array_equal(wrong, np.arange(1, count)):
        return ("wrong in all positions but the first, which sees itself alone: queries or keys, "
                "their heads, angles, scale or mask")
    if np.array_equal(wrong, np.arange(count - 1)):
        return ("wrong in all positions but the last, which sees all: there was no causal mask, "
                "or one of other positions")
    return None


def _passed_back(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield what explains the gradient of a module's output."""
    c = _factor(dump, verdict, one)
    if c is not None:
        yield f"{patterns.say_number(c)} times the right one: {_said_of(dump, c)}"
