"""Recognise wrong means of losses, and wrong norms: one number each."""

import math
from itertools import combinations
from typing import Any, Iterator

import numpy as np

from bench.experiments.dump import patterns
from bench.experiments.dump.computation import target_losses
from bench.experiments.dump.dumps import Dump
from bench.experiments.dump.places import Place
from bench.experiments.dump.verdicts import Judged, Verdict

SMOOTHED = (0.01, 0.02, 0.05, 0.1, 0.2)    # shares of a target that all words have


def loss_causes(dump: Dump, verdict: Verdict, one: Judged, comm: Any) -> Iterator[str]:
    """Yield which other mean of the losses of all targets the dump's loss is."""
    loss, exact = float(dump.tensors[one.place]), float(verdict.exact[one.place])
    ignored = dump.targets == dump.model.ignored
    losses = target_losses(verdict.exact[Place("activation", "lm_head")], dump.targets,
                           dump.model.ignored)

    def same(value: float) -> bool:
        return patterns.explained(np.asarray(loss), np.asarray(value), one.left,
                                  value / exact if exact else 1.0)
    if ignored.any() and same(losses.mean()):
        yield (f"the sum is divided by all {ignored.size} targets, and not by the "
               f"{ignored.size - ignored.sum()} that count")
    alone: list[str] = []    # of which there are many, so that one may be near by chance
    for n in patterns.divisions(len(losses), dump.ranks.get("data")):
        pairs = [(part.sum(), (~out).sum()) for part, out in zip(
            np.array_split(losses, n), np.array_split(ignored, n))]
        means = [total / max(count, 1) for total, count in pairs]
        if ignored.any() and same(float(np.mean(means))):
            yield f"a mean over {n} ranks of their means, with other numbers of targets"
        alone += [f"the mean of rank {rank} of {n} alone: it was not averaged over ranks"
                  for rank, mean in enumerate(means) if same(mean)]
    for n in patterns.COUNTS:
        if same(exact * n) or same(exact / n):
            yield f"{'' if same(exact * n) else '1/'}{n} times the right one: a factor of ranks"
    for n in patterns.COUNTS:
        if same(exact + math.log(n)):
            yield (f"the right one and the logarithm of {n}: {n} ranks have all logits, and add "
                   f"their exponentials as if each had a part")
    for by, what in ((1, "later"), (-1, "earlier")):
        moved = np.full_like(dump.targets, dump.model.ignored)
        moved[:, max(0, -by):moved.shape[1] - max(0, by)] = dump.targets[
            :, max(0, by):moved.shape[1] - max(0, -by)]
        count = (moved != dump.model.ignored).sum()
        other = target_losses(verdict.exact[Place("activation", "lm_head")], moved,
                              dump.model.ignored)
        if same(other.sum() / max(count, 1)) or same(other.sum() / (~ignored).sum()):
            yield f"of targets one position {what}: they were shifted twice, or not at all"
    if same(float(losses.sum())):
        yield "a sum over all targets, and not a mean"
    logits = verdict.exact[Place("activation", "lm_head")]
    goals = np.take_along_axis(logits, np.where(ignored, 0, dump.targets)[..., None], -1)
    more = (goals - logits.mean(-1, keepdims=True))[~ignored].mean()
    for share in SMOOTHED:
        if same(exact + share * float(more)):
            yield f"of targets that are smoothed by {share}"
    yield from alone
    tried = 0
    for parts in (2, 3, 4):
        tried += math.comb(len(losses) - 1, parts - 1)
        if 100 * tried > one.ratio:    # of which one may be near by chance
            break
        for cuts in combinations(range(1, len(losses)), parts - 1):
            means = [part[~out].mean() for part, out in zip(
                np.split(losses, cuts), np.split(ignored, cuts)) if not out.all()]
            unequal = np.ptp(np.diff((0, *cuts, len(losses))))
            if unequal and same(float(np.mean(means))):
                yield (f"a mean of the means of {parts} micro-batches or ranks, of the sequences "
                       f"before {', '.join(map(str, cuts))} and the rest")


def norm_causes(dump: Dump, verdict: Verdict, one: Judged, comm: Any) -> Iterator[str]:
    """Yield which gradients the dump's norm has too often, or not at all."""
    norm = float(dump.tensors[one.place])
    own = {place.name: float((np.float64(a) ** 2).sum()) for place, a in dump.tensors.items()
           if place.kind == "gradient"}
    if not own:
        return
    total = sum(own.values())
    first = next(iter(verdict.judged)).place.name    # of a root module, for what it names
    groups = {"norms and biases": [name for name in own if "ln_" in name or "norm" in name
                                   or name.endswith("bias")],
              "norms": [name for name in own if "ln_" in name or "norm" in name],
              "biases": [name for name in own if name.endswith("bias")],
              "embeddings": [name for name in own if "wte" in name or "wpe" in name
                             or "embed" in name],
              "the table of tokens": [name for name in own if "wte" in name
                                      or "embed_tokens" in name]}
    groups |= {name: [name] for name in own if name != first}

    def same(square: float) -> bool:
        return square > 0 and patterns.explained(
            np.asarray(norm), np.sqrt(square), one.left, np.sqrt(square / total))
    for n in patterns.COUNTS:
        if same(n * total) or same(total / n):
            yield (f"{'' if same(n * total) else '1/'}sqrt({n}) times the right one: squares of "
                   f"{n} ranks that have the same gradients are added")
        if same(n * n * total) or same(total / n / n):
            yield f"{'' if same(n * n * total) else '1/'}{n} times the right one"
    for what, names in groups.items():
        part = sum(own[name] for name in names)
        for n in (0, *patterns.COUNTS):
            if part and same(total + (n - 1) * part):
                yield (f"{what} count {n} times: {'they are' if n else 'not'} "
                       f"{'the same on several ranks' if n else 'added on any rank'}")
    for name, square in _runs(own):
        if same(square):
            yield f"the norm of a part alone, {name}: norms of stages or shards were not added"


def _runs(own: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield neighbouring tensors, from one to another, and the sum of their squares."""
    names, sums = list(own), np.cumsum([0.0, *own.values()])
    for first in range(len(names)):
        for last in range(first, len(names)):
            if last - first + 1 < len(names):
                yield f"{names[first]} to {names[last]}", float(sums[last + 1] - sums[first])
