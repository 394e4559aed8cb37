"""Recognise wrong means of losses, and wrong norms: one number each."""

import math
from itertools import combinations
from typing import Iterable, Iterator

import numpy as np

from bench.experiments.dump import patterns
from bench.experiments.dump.computation import target_losses
from bench.experiments.dump.dumps import StepDump
from bench.experiments.dump.places import TensorId
from bench.experiments.dump.verdicts import Judged, Verdict

SMOOTHED = (0.01, 0.02, 0.05, 0.1, 0.2)    # shares of a target that all words have


def loss_causes(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield which other mean of the losses of all targets the dump's loss is."""
    loss, exact = float(dump.tensors[one.place]), float(verdict.exact[one.place])
    ignored = dump.targets == dump.model.ignored
    logits = verdict.exact[TensorId("activation", "lm_head")]
    losses = target_losses(logits, dump.targets, dump.model.ignored)

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
        if same(float(np.sum(means))):
            yield f"a sum of the means of {n} micro-batches or ranks, and not their mean"
        alone += [f"the mean of rank {rank} of {n} alone: it was not averaged over ranks"
                  for rank, mean in enumerate(means) if same(mean)]
    for n in patterns.RANK_COUNTS:
        if same(exact * n) or same(exact / n):
            yield f"{'' if same(exact * n) else '1/'}{n} times the right one: a factor of ranks"
    for n in patterns.RANK_COUNTS:
        if same(exact + math.log(n)):
            yield (f"the right one and the logarithm of {n}: {n} ranks have all logits, and add "
                   f"their exponentials as if each had a part")
    for by, what in ((1, "later"), (-1, "earlier")):
        moved = np.full_like(dump.targets, dump.model.ignored)
        moved[:, max(0, -by):moved.shape[1] - max(0, by)] = dump.targets[
            :, max(0, by):moved.shape[1] - max(0, -by)]
        count = (moved != dump.model.ignored).sum()
        other = target_losses(logits, moved, dump.model.ignored)
        if same(other.sum() / max(count, 1)) or same(other.sum() / (~ignored).sum()):
            yield f"of targets one position {what}: they were shifted twice, or not at all"
    for value, what in (
            (losses.sum(), "a sum over all targets, and not a mean"),
            (losses.sum() / len(losses), "a sum over targets, divided by the sequences alone"),
            (exact / math.log(2), "in bits, and not by the natural logarithm"),
            (math.exp(min(exact, 700.0)), "the exponential of the right one: a perplexity")):
        if same(float(value)):
            yield what
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


def norm_causes(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield what other number of the gradients the dump's norm is, such as one of a part."""
    norm = float(dump.tensors[one.place])
    own = {place.name: np.float64(a) for place, a in dump.tensors.items()
           if place.kind == "gradient"}
    if not own:
        return
    total = sum(float((a * a).sum()) for a in own.values())
    first = next(iter(verdict.judged)).place.name    # of a root module, for what it names
    clip = (dump.optimizer or {}).get("clip") or 0.0
    for tried, (square, what) in enumerate(_squares(own, first, clip), 1):
        if 100 * tried > one.ratio:    # of which one may be near by chance
            return
        if square > 0 and patterns.explained(
                np.asarray(norm), np.sqrt(square), one.left, np.sqrt(square / total)):
            yield what


def _squares(own: dict[str, np.ndarray], first: str, clip: float) -> Iterator[tuple[float, str]]:
    """Yield squares of what may be taken for the norm, the more plausible first, and its name."""
    squares = {name: float((a * a).sum()) for name, a in own.items()}
    total = sum(squares.values())
    groups = {"norms": [name for name in own if "ln_" in name or "norm" in name],
              "norms and biases": [name for name in own if "ln_" in name or "norm" in name
                                   or name.endswith("bias")],
              "biases": [name for name in own if name.endswith("bias")],
              "the table of tokens": [name for name in own if "wte" in name
                                      or "embed_tokens" in name],
              "embeddings": [name for name in own if "wte" in name or "wpe" in name
                             or "embed" in name]}
    yield from _counted(squares, groups, (2, 0))
    for n in patterns.RANK_COUNTS:
        same = f"squares of {n} ranks that have the same gradients are added"
        yield n * total, f"sqrt({n}) times the right one: {same}"
        yield total / n, f"1/sqrt({n}) times the right one: {same}"
        yield n * n * total, f"{n} times the right one"
        yield total / n / n, f"1/{n} times the right one"
    magnitudes = [np.abs(a) for a in own.values()]
    for value, what in (
            (min(clip, math.sqrt(total)), "the norm after clipping"),
            (total, "the sum of squares, without its root"),
            (max(a.max(initial=0.0) for a in magnitudes), "the largest element"),
            (sum(a.sum() for a in magnitudes), "the sum of all magnitudes"),
            (max(squares.values()) ** 0.5, "the largest norm of a tensor"),
            (sum(square ** 0.5 for square in squares.values()), "the sum of the tensors' norms"),
            (math.sqrt(total / sum(a.size for a in magnitudes)),
             "the root of the mean of squares, and not of their sum")):
        yield value * value, what
    names, sums = list(squares), np.cumsum([0.0, *squares.values()])
    runs = sorted(((i, j) for i in range(len(names)) for j in range(i, len(names))
                   if j - i + 1 < len(names)),
                  key=lambda run: run[0] > 0 and run[1] + 1 < len(names))    # stages first
    parts = [(float(sums[j + 1] - sums[i]),
              f"the norm of a part alone, {names[i]} to {names[j]}: norms of stages or shards "
              f"were not added") for i, j in runs]
    yield from parts[:2 * len(names)]
    alone = {name: [name] for name in own if name != first}
    yield from _counted(squares, alone, (2, 0))
    yield from _counted(squares, groups | alone, patterns.RANK_COUNTS[1:])
    yield from parts[2 * len(names):]


def _counted(squares: dict[str, float], groups: dict[str, list[str]],
             counts: Iterable[int]) -> Iterator[tuple[float, str]]:
    """Yield the sum of squares where those of a group count so many times."""
    for n, (what, names) in ((n, group) for n in counts for group in groups.items()):
        if part := sum(squares[name] for name in names):
            yield sum(squares.values()) + (n - 1) * part, (
                f"{what} count {n} times: {'they are' if n else 'not'} "
                f"{'the same on several ranks' if n else 'added on any rank'}")
