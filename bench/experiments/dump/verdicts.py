"""Judge the tensors of a dump, in the order of computation, by exact ones and an envelope.

The norm and the weights after the step are computed from the dump's own gradients where it has
all of them: each stage is judged by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.experiments.dump.computation import Start, Tensors
from bench.experiments.dump.dumps import StepDump
from bench.experiments.dump.envelopes import (OF_NORM, Distance, Reference, measure_norm,
                                              measure_reference, measure_update, rounding)
from bench.experiments.dump.patterns import packed_documents
from bench.experiments.dump.places import LOSS, NORM, TensorId, in_order
from bench.experiments.dump.roundings import Program, epsilon, is_narrow

PLURALS = {"mask": "masks", "activation": "activations", LOSS: "loss",
           "activation gradient": "activation gradients", "gradient": "gradients", NORM: "norm",
           "weight after": "weights after"}
SLACK = 4.0    # of an envelope, what is left of a much larger error by its cause
IMITATED = ("activation", LOSS, "activation gradient", "gradient")    # in steps with roundings


@dataclass(frozen=True)
class Judged:
    """State how far a tensor of a dump is from the exact one.

    The error is its distance, and the envelope what that of right implementations does not exceed.
    The scale is the size of the exact tensor, or of the change of a weight: the root of the sum of
    squares.
    """

    place: TensorId
    error: Distance
    envelope: Distance
    scale: float

    @property
    def ratio(self) -> float:
        """Return how many envelopes the error is."""
        return self.error.over(self.envelope)

    @property
    def left(self) -> Distance:
        """Return what its cause may leave of the error: an envelope, as of right ones.

        Of an error of ten envelopes and more a tenth, up to `SLACK` envelopes: causes such as
        another epsilon change roundings, too.
        """
        return Distance(*(max(its, min(SLACK * its, mine / 10)) for mine, its in (
            (self.error.whole, self.envelope.whole),
            (self.error.largest, self.envelope.largest))))

    @property
    def outside(self) -> bool:
        """Return whether no right implementation is that far."""
        return not self.ratio <= 1


@dataclass(frozen=True)
class Verdict:
    """Hold what was judged, in the order of computation, and what was not.

    Attributes
    ----------
    left : dict of str to str
        What was not judged, with the reason.
    program, start : Program, Start
        How the program computes whose envelopes were taken, and what the exact step began with,
        see `judge` for documents.
    scale : float
        By which factor the loss was scaled whose gradients went back; 1 for none.
    """

    judged: list[Judged]
    left: dict[str, str]
    exact: Tensors
    program: Program
    start: Start
    scale: float = 1.0

    @property
    def first(self) -> Judged | None:
        """Return the first tensor outside the envelope; None where all are right."""
        return next((one for one in self.judged if one.outside), None)

    @property
    def imitated(self) -> bool:
        """Return whether steps with roundings were computed for it."""
        return any(one.place.kind in IMITATED for one in self.judged)


def program_of(dump: StepDump) -> Program:
    """Return how the program of a dump computes, as far as the dump says.

    A loss of 16 bits was computed in these, also if it is stored in more: a sum of such ones has
    few bits more.  Else it was computed in float32 at least.
    """
    model, value = dump.model, dump.tensors.get(TensorId(LOSS), np.float32(0.1))
    loss = str(value.dtype)
    if is_narrow(model.dtype) and np.frexp(float(value))[0] * 32 / epsilon(model.dtype) % 1 == 0:
        loss = model.dtype
    elif not is_narrow(loss) and model.dtype != "float64":
        loss = "float32"
    return Program(model.dtype, model.master or model.dtype, loss, dump.ranks)


def judge(dump: StepDump, comm: Any, reference: Reference | None = None) -> Verdict:
    """Judge a dump; every rank of `comm` must call it, as they divide the model.

    Programs in float64 may compute parts in float32, see `Program.inside`, as transformers does:
    a dump that is outside the envelope of those that do not is judged by that of those that do.
    Documents may be packed into sequences: a dump whose activations are first wrong where these
    begin is judged by a step in which each sees itself alone, if that is nearer.  A `reference` is
    that of the same step in the same type, if it is there already.
    """
    wanted = {place for place in in_order(dump.family, dump.model)
              if (place.kind != "mask" or dump.model.dropout) and place.name not in dump.absent}
    lost = {place for place in wanted - dump.tensors.keys() if place.kind == "mask"}
    if lost:    # nobody can compute the step again
        verdict = Verdict(
            [_judge_mask(dump, place) for place in dump.tensors if place.kind == "mask"],
            {PLURALS[kind]: f"{len(lost)} masks of dropout are not there" for kind in IMITATED},
            {}, program_of(dump), dump)
    else:
        verdict, reference = _judge_programs(dump, dump, comm, reference)
        if packed := _packed(dump, verdict):
            token, documents = packed
            other, its = _judge_programs(dump, replace(dump, documents=documents), comm)
            if _right_before(other) > _right_before(verdict):
                verdict, reference = other, its
                verdict.left["attention between documents"] = (
                    f"each sees itself alone, and token {token} is between them: right if that "
                    f"is meant")
    left = verdict.left
    verdict.judged.extend(_judge_ends(dump, comm, reference, verdict.exact, left))
    for kind, name in PLURALS.items():
        some = {place for place in wanted if place.kind == kind}
        missing = some - dump.tensors.keys()
        if missing and name not in left:
            left[name] = ("not dumped" if missing == some else
                          f"{len(missing)} of {len(some)} not dumped")
    return verdict


def _judge_programs(dump: StepDump, start: Start, comm: Any,
                    reference: Reference | None = None) -> tuple[Verdict, Reference]:
    """Judge all up to the norm by the first kind of program that is right, else by the last."""
    program = program_of(dump)
    programs = [program] + [replace(program, inside="float32", loss="float32")] * (
        dump.model.dtype == "float64")
    for number, program in enumerate(programs):
        if number or reference is None:
            reference = measure_reference(start, comm, program)
        left: dict[str, str] = {}
        judged, exact, scale = _judge_step(dump, reference, left)
        verdict = Verdict(judged, left, exact, program, start, scale)
        if verdict.first is None:
            break
    return verdict, reference


def _packed(dump: StepDump, verdict: Verdict) -> tuple[int, np.ndarray] | None:
    """Return the token between packed documents, and where these are, see `packed_documents`."""
    one = verdict.first
    if one is None or one.place.kind != "activation" or one.place.rank:
        return None
    gap = np.abs(np.float64(dump.tensors[one.place]) - verdict.exact[one.place])
    return packed_documents(dump.tokens, (gap > one.envelope.largest).any(2), _counted(dump))


def _right_before(verdict: Verdict) -> int:
    """Return how many tensors are right before the first that is not."""
    return next((number for number, one in enumerate(verdict.judged) if one.outside),
                len(verdict.judged))


def _counted(dump: StepDump) -> np.ndarray:
    """Return which positions have a target that counts, or one after them, (batch, seq)."""
    return np.flip(np.maximum.accumulate(np.flip(
        dump.targets != dump.model.ignored, 1), 1), 1)


def _judge_step(dump: StepDump, reference: Reference,
                left: dict[str, str]) -> tuple[list[Judged], Tensors, float]:
    """Judge masks, and what was imitated; return also the exact tensors, and `Verdict.scale`.

    Where no later target counts, activations are taken for right: programs mask such padding in
    several ways.  A loss may be scaled for the way back, if the gradients are right at the end.
    """
    exact = reference.exact | {place: reference.exact[place.first] for place in dump.tensors
                               if place.rank and place.kind in IMITATED}
    counts = _counted(dump)[..., None]
    if not counts.all() and not (dump.model.experts and dump.model.experts.balance):
        left["padding"] = f"activations at {(~counts).sum()} positions after the last target"
        exact |= {place: np.where(counts, exact[place], np.float64(a)) for place, a in
                  dump.tensors.items() if place.kind == "activation"}

    def judged(scale: float) -> list[Judged]:
        found = []
        for place, a in dump.tensors.items():
            c = scale if place.kind == "activation gradient" else 1.0
            if place.kind == "mask":
                found.append(_judge_mask(dump, place))
            elif place.kind in IMITATED:
                found.append(_judged(place, a, c * exact[place],
                                     reference.spread[place.first].times(c)))
        return found
    every = judged(1.0)
    wrong = {one.place.kind for one in every if one.outside}
    first = next((one.place for one in every if one.place.kind == "activation gradient"), None)
    if wrong != {"activation gradient"} or not any(one.place.kind == "gradient" for one in every):
        return every, exact, 1.0
    size, a = exact[first], np.float64(dump.tensors[first])
    c = float(np.abs((a * size).sum() / (size * size).sum()))
    scaled = judged(c) if 0 < c < np.inf else every
    return (every, exact, 1.0) if any(one.outside for one in scaled) else (scaled, exact, c)


def _judged(place: TensorId, a: np.ndarray, exact: np.ndarray, spread: Distance,
            scale: np.ndarray | None = None) -> Judged:
    """Judge one tensor; `scale` is what its error is compared with, by default the exact one."""
    size = exact if scale is None else scale
    return Judged(place, Distance.between(a, exact), spread.plus(rounding(exact, a.dtype)),
                  float(np.sqrt((size * size).sum())))


def _judge_mask(dump: StepDump, place: TensorId) -> Judged:
    """Judge a mask: replicas have different ones, and the right share stays.

    The error is the number of replicas with the mask of another one, or how many deviations the
    share is off by; up to six are right.
    """
    mask = np.asarray(dump.tensors[place], bool)
    count = dump.ranks.get("data", 2)
    parts = np.array_split(mask, min(count, len(mask)))
    same = sum(a.shape == b.shape and np.array_equal(a, b) for number, b in enumerate(parts)
               for a in parts[:number])
    keep = 1 - dump.model.dropout
    off = abs(mask.mean() - keep) / np.sqrt(keep * (1 - keep) / mask.size)
    return Judged(place, Distance(float(same), off if off > 6 else 0.0), Distance(0.0, 6.0), 1.0)


def _judge_ends(dump: StepDump, comm: Any, reference: Reference | None, exact: Tensors,
                left: dict[str, str]) -> list[Judged]:
    """Judge the norm and the weights after the step, by the dump's own gradients if it can."""
    names = [place.name for place in in_order(dump.family, dump.model)
             if place.kind == "gradient" and place.name not in dump.absent]
    own = {place.name: a for place, a in dump.tensors.items()
           if place.kind == "gradient" and not place.rank}
    after = {place: a for place, a in dump.tensors.items() if place.kind == "weight after"}
    norms = {place: a for place, a in dump.tensors.items() if place.kind == NORM}
    whole, norm = own and own.keys() >= {*names}, TensorId(NORM)
    if norms and whole:
        exact[norm], spread = measure_norm(own)
    elif norms and reference is not None and not dump.absent:
        spread = reference.spread[norm].plus(rounding(exact[norm], norms[norm].dtype).times(
            OF_NORM))
    elif norms:
        left[PLURALS[NORM]] = "not all gradients are there"
        norms = {}
    found = [_judged(place, a, exact[norm], spread) for place, a in norms.items()]
    if after and not whole:
        left[PLURALS["weight after"]] = "not all gradients are there, from which they follow"
    elif after and not all(np.isfinite(np.float64(a)).all() for a in own.values()):
        left[PLURALS["weight after"]] = "not all gradients are finite, from which they follow"
    elif after and dump.optimizer is None:
        left[PLURALS["weight after"]] = "dump.json has no optimizer"
    elif after:
        found += _judge_updates(dump, comm, own, after, exact)
    return found


def _judge_updates(dump: StepDump, comm: Any, own: Mapping[str, np.ndarray], after: Tensors,
                   exact: Tensors) -> list[Judged]:
    """Judge the weights after a step by the gradients `own`; add the exact ones to `exact`.

    Some programs divide by the norm when they clip, and others by 1e-6 more.
    """
    none = {name: np.zeros_like(dump.weights[name]) for name in dump.absent}
    settings = dict(dump.optimizer or {})

    def judged(settings: Mapping[str, Any]) -> tuple[Tensors, list[Judged]]:
        right, spread = measure_update(dump, comm, settings, own | none)
        right |= {TensorId("weight after", name): np.float64(dump.weights[name]) for name in none}
        return right, [_judged(place, a, right[place.first], spread[place.first],
                               right[place.first] - np.float64(dump.weights[place.name]))
                       for place, a in after.items()]
    right, found = judged(settings)
    clip, norm = settings.get("clip"), float(measure_norm(own)[0])
    if clip and norm and any(one.outside for one in found):
        other = judged(settings | {"clip": clip * (1 + 1e-6 / norm)})
        if not any(one.outside for one in other[1]):
            right, found = other
    exact |= right
    return found


def type_of(dump: StepDump, verdict: Verdict) -> str:
    """Return the type of computation, and that of weights or parts where it is another."""
    model, inside = dump.model, verdict.program.inside
    return model.dtype + (f" with weights in {model.master}" if model.master else "") + (
        f" with norms, angles, softmax and loss in {inside}" if inside else "") + (
        f", of the loss times {verdict.scale:.6g}" if verdict.scale != 1 else "")
