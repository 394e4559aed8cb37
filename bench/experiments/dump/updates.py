"""Recognise wrong steps of an optimizer: what a weight after the step tells of its change."""

from typing import Any, Iterator

import numpy as np

from bench.experiments.dump import patterns
from bench.experiments.dump.dumps import StepDump
from bench.experiments.dump.envelopes import measure_norm
from bench.experiments.dump.verdicts import Judged, Verdict

EPSILONS = (1e-15, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def update_causes(dump: StepDump, verdict: Verdict, one: Judged) -> Iterator[str]:
    """Yield what explains a weight after the step."""
    name, settings = one.place.name, dict(dump.optimizer or {})
    before, right = np.float64(dump.weights[name]), verdict.exact[one.place]
    a = np.float64(dump.tensors[one.place])
    if np.array_equal(a, before):
        yield "it did not change: stale, the step did not reach it or its copy"
    if dump.weights[name].dtype.itemsize > 2 and (narrow := patterns.narrower(a)):
        yield f"all of its numbers are those of {narrow}: it was kept in that type"
    region = patterns.wrong_shard(a, right, one.envelope)
    if region is not None and np.array_equal(region.of(a), region.of(before)):
        yield f"it did not change in {region}: one shard is stale"
    if moved := patterns.moved_blocks(a, right, one.left):
        yield moved
    every = [other for other in verdict.judged if other.place.kind == "weight after"]
    wrong = f"{sum(other.outside for other in every)} of {len(every)} weights are outside"
    decays = settings.get("decayed", "all")
    decays = before.ndim > 1 if decays == "matrices" else decays == "all" or name in decays
    said = settings["lr"] * settings["weight_decay"] * decays
    kept = (1 - said) * before
    step = right - kept    # of the gradient alone
    if said and patterns.explained(a, (before + step) * (1 - said), one.left):
        yield "it decays after the step, and not before"
    whole = patterns.factor_of(a - before, right - before, one.left)
    own = patterns.factor_of(a - kept, step, one.left)
    for c, what in ((whole, "its change"), (own, "its change but for decay")):
        if c is not None and abs(c - 1) > 2e-3:
            yield (f"{what} is {patterns.say_number(c)} times the right one, {wrong}: "
                   f"{_said_of(c, settings)}")
    c = patterns.fit([before], a - right)
    if c is not None and patterns.explained(a, right + c[0] * before, one.left):
        found = said - c[0] if abs(said - c[0]) > 1e-3 * said else 0.0
        yield (f"it decays by {found:.3g} of its size, and not by lr times weight_decay = "
               f"{said:.3g}")
    for other, what in _other_steps(dump, name, settings):
        if patterns.explained(a, kept - settings["lr"] * other(kept - a), one.left):
            yield what


def _said_of(c: float, settings: dict[str, Any]) -> str:
    """Return what usually makes a factor of a change."""
    b1, b2 = settings.get("betas", (0.0, 0.0))
    if c == 0:
        return "the gradients have no part in it, as if they were zero"
    if c < 0:
        return "it goes the other way"
    if settings["name"] == "adamw" and np.isclose(c, (1 - b1) / np.sqrt(1 - b2), rtol=2e-3):
        return "the moments are not divided by 1 - beta, to correct their bias"
    return ("another norm in clipping, such as of a part of the model, another rate" + (
        ", or it is done twice" if c > 1.9 else ""))


def _other_steps(dump: StepDump, name: str, settings: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield what else the optimizer may subtract, in units of its rate, from the dump's change."""
    gradients = {place.name: a for place, a in dump.tensors.items() if place.kind == "gradient"}
    g = np.float64(gradients[name])
    if settings["name"] == "sgd":
        yield (lambda change: np.clip(g, -(most := np.abs(change).max() / settings["lr"]), most),
               "its gradient is cut, element by element: clipped by value, and not by the norm")
        return
    clip, norm = settings.get("clip"), float(measure_norm(gradients)[0])
    g = g * min(1.0, clip / (norm + 1e-6)) if clip else g
    eps, root = settings["eps"], np.sqrt(1 - settings["betas"][1])
    yield lambda change: g / np.sqrt(g * g + eps), "epsilon is added inside the root"
    yield (lambda change: g / (np.abs(g) + eps / root),
           "epsilon is added before the bias of moments is corrected")
    for other in EPSILONS:
        if other != eps:
            yield (lambda change, other=other: g / (np.abs(g) + other),
                   f"epsilon is {other:g}, and not {eps:g}")
