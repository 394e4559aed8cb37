"""Train the same steps on many meshes, and compare losses, gradients and weights with one rank.

In float64 the bounds are fixed.  In float32 what rounding does is measured: one rank trains the
same steps in float64 too, from the same parameters.  A mesh rounds otherwise, but not worse, so it
is about as far from one rank as one rank is from float64; `FACTOR` times as far is allowed.  This
holds whatever the sizes, the steps and the learning rate, which say how errors grow: with the
defaults of a comparison those of losses grow tenfold from 50 steps to 200, and a hundredfold at
a learning rate of 0.5.

By chance one rank may be nearer than usual.  Gradients and weights have many elements, which
average out, but the loss is a single number.  So it may always differ by `FACTOR` times what is
usual in one step: a sum of n products, in any order, has a relative error of about sqrt(n) u,
where u is the unit roundoff, since errors of single additions are independent (Higham and Mary,
SIAM J. Sci. Comput. 41, 2019).  The loss of a token is computed by products one after another, of
inner lengths n_1 to n_k, with an error of e = u sqrt(n_1 + ... + n_k), and the mean over t tokens
has e / sqrt(t).
"""

import math
from dataclasses import dataclass, replace, field
from typing import Any, Callable, ContextManager, Mapping

import numpy as np

from bench.agreement import agree
from bench.errors import UsageError
from bench.experiments.training.meshes import (list_mesh_cases, one_rank_of, ranks_of_mesh,
                                               reference_of)
from bench.experiments.training.plan import Plan, make_optimizer
from bench.experiments.training.text import VOCAB, Text
from bench.instruments.sampling import measured_environment
from bench.instruments.timing import unwatched
from bench.records.model_run import make_record
from bench.records.kinds.training_meshes import ROUTED
from bench.records.measurements import Check, Measurements
from mm3d.arrays import backend as backends
from mm3d.config import Config, Division
from mm3d.examples.train import take_steps
from mm3d.launcher import wait_patiently
from mm3d.training.gpt import GPT

KIND = "training-meshes"
COMPARED = ("loss", "gradients", "weights")    # loss of all steps; the others after the last
FACTOR = 4.0
# The aim in float64, whatever the sizes.
FLOAT64 = {"loss": 1e-12, "gradients": 1e-11, "weights": 1e-11}
LARGEST_BOUND = 1e-3    # rounding of one rank that hides no wrong sum


@dataclass(frozen=True)
class MeshTraining:
    """The results of training on a mesh.

    Attributes
    ----------
    losses : ndarray
        The loss of each step.
    gradients, weights : dict of str to ndarray
        Global arrays by name: gradients of the last step, weights after it.
    chosen, dropped : ndarray of int64
        Of a model with experts: how many tokens of a step have each expert of each layer as their
        first, second ... choice, (steps, layers, k, E); and how many of these pairs were dropped,
        (steps, layers, E).
    """

    losses: np.ndarray
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    chosen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def differences(self, other: "MeshTraining") -> dict[str, float]:
        """Return the largest relative differences to `other`, by the names of `COMPARED`."""
        return {"loss": float(np.max(np.abs(self.losses - other.losses) / other.losses)),
                "gradients": largest_difference(self.gradients, other.gradients),
                "weights": largest_difference(self.weights, other.weights)}

    def routing_differences(self, other: "MeshTraining") -> dict[str, int]:
        """Count the differences from `other` in tokens per expert, chosen and dropped."""
        return {name: int(np.abs(getattr(self, name) - getattr(other, name)).sum())
                for name in ROUTED}

    def equals(self, other: "MeshTraining") -> bool:
        """Return whether everything is equal to the bit."""
        return np.array_equal(self.losses, other.losses) and all(
            np.array_equal(mine[name], theirs[name])
            for mine, theirs in ((self.gradients, other.gradients), (self.weights, other.weights))
            for name in theirs)


def largest_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest relative Frobenius difference of arrays; infinite if one is missing.

    It is not a number where that of any array is none, which Python's `max` would leave out.
    """
    if found.keys() != expected.keys():
        return np.inf
    # Arrays of zeros, such as the gradient of a router's bias, must be zero on every mesh.
    return float(np.max([np.linalg.norm(found[name] - a) / (
        np.linalg.norm(a) or np.finfo(np.float64).tiny) for name, a in expected.items()]))


def compare_meshes(comm: Any, plan: Plan, text: Text,
                   report: Callable[[str], None] = lambda name: None,
                   watched: Callable[..., ContextManager] = unwatched,
                   cases: list[Division] | None = None) -> Measurements | None:
    """Train the steps of a plan on every mesh that has enough ranks here.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks; each calls this; a mesh of fewer takes the first of them.
    plan : Plan
        The plan: few steps of SGD in float64 or float32.
    report : callable
        Called on rank 0 with the name of each mesh before it is trained.
    cases : list of Division, optional
        Meshes that divide the model, one rank first; by default all, which are checked first.

    Returns
    -------
    Measurements or None
        On rank 0 a record of kind "training-meshes", whose checks may have failed; None on the
        others.

    Raises UsageError on every rank alike, when the model cannot be divided so.
    """
    if plan.optimizer != "sgd" or plan.dtype not in ("float64", "float32"):
        raise UsageError(f"--compare with {plan.optimizer} in {plan.dtype}: AdamW would hide "
                         f"wrong factors of gradients, and 16 bits all differences; sgd in "
                         f"float64 or float32 would do")
    if plan.experts is not None and plan.dtype != "float64":
        raise UsageError(f"--compare with --experts in {plan.dtype}: rounding decides between "
                         f"experts whose logits are nearly equal; float64 would do")
    if plan.experts is not None and comm.size == 1:
        raise UsageError("--compare with --experts on 1 rank: other micro-batches route other "
                         "tokens together, so no two of its trainings are the same; 2 ranks or "
                         "more would do")
    if cases is None:
        cases = list_mesh_cases(comm.size, plan.experts)
        for case in cases:
            _on_mesh(comm, case, lambda part: _start(part, case, plan)[0].free())
    found = {}
    for case in cases:
        if comm.rank == 0:
            report(str(case))
        found[case] = _on_mesh(comm, case, lambda part: _train_steps(
            part, case, plan, text, watched))
    exact = None
    if plan.dtype != "float64":
        exact = _on_mesh(comm, cases[0], lambda part: _train_steps(
            part, cases[0], replace(plan, dtype="float64"), text, watched, plan.dtype))
    environs = measured_environment(backends.get(None).name, comm)
    if comm.rank:
        return None
    return comparison_record(plan, text, cases, found, environs, exact)


def _on_mesh(comm: Any, case: Division, work: Callable[[Any], Any]) -> Any:
    """Call `work` on the first ranks, as many as a mesh has; return its result on rank 0 alone.

    Its ValueError is raised as UsageError on all ranks.
    """
    part = comm.Split(comm.rank >= ranks_of_mesh(case), comm.rank)
    result = problem = None
    if comm.rank < ranks_of_mesh(case):
        try:
            result = work(part)
        except ValueError as error:
            problem = f"{case}: {error}"
    wait_patiently(comm)
    part.Free()
    agree(problem, comm)
    return result if comm.rank == 0 else None


def _start(comm: Any, case: Division, plan: Plan) -> tuple[GPT, Any]:
    """Create the model on all ranks of `comm`, and its optimizer."""
    model = GPT(Config(plan, case), comm)
    return model, make_optimizer(plan, model)


def _train_steps(comm: Any, case: Division, plan: Plan, text: Text,
                 watched: Callable[..., ContextManager],
                 begin: str | None = None) -> MeshTraining:
    """Train the steps of a plan on all ranks of `comm`.

    With `begin` the first parameters are rounded to this type.
    """
    model, optimizer = _start(comm, case, plan)
    if begin is not None:
        model.load({name: a.astype(begin) for name, a in model.state().items()})
    gradients, chosen, dropped = {}, [], []

    def see(step: int, loss: float) -> None:
        routed = model.routings.values()
        chosen.append([one.chosen for one in routed])
        dropped.append([one.dropped for one in routed])
        if step == plan.steps - 1:
            gradients.update(model.gradients())
    with watched(model.mesh.scheme.grid):
        losses = [loss for _, loss in take_steps(
            model, optimizer, lambda step: text.batch(plan.seed, step, plan.batch, plan.seq),
            range(plan.steps), seen=see)]
    result = MeshTraining(np.array(losses), gradients, model.state(), np.array(chosen, np.int64),
                          np.array(dropped, np.int64))
    model.free()
    return result


def comparison_record(plan: Plan, text: Text, cases: list[Division],
                      found: dict[Division, MeshTraining], environs: dict,
                      exact: MeshTraining | None = None) -> Measurements:
    """Make the record: differences to one rank, and equality to the bit within each family.

    `exact` is the first case in float64, where the others are not.
    """
    one_rank, reference = one_rank_of(cases, plan.experts), reference_of(cases)
    differences = {case: found[case].differences(found[one_rank(case)]) for case in cases}
    compared = [case for case in cases if one_rank(case) is not case]
    rounding = found[cases[0]].differences(exact) if exact else None
    checks = [Check(f"{name} of {case}", differences[case][name], bound)
              for case in compared for name, bound in rounding_bounds(plan, rounding).items()]
    checks += [Check(f"rounding: {name}", error, LARGEST_BOUND)
               for name, error in (rounding or {}).items()]
    bitwise = np.full(len(cases), np.nan)
    for number, case in enumerate(cases):
        if reference(case) is not case:
            bitwise[number] = found[case].equals(found[reference(case)])
            checks.append(Check(f"bits of {case} as of {reference(case)}",
                                1 - bitwise[number], 0.0))
    numbers = {"loss": [found[case].losses for case in cases],
               "ranks": [ranks_of_mesh(case) for case in cases], "bitwise": bitwise,
               **{f"{name}_difference": [differences[case][name] for case in cases]
                  for name in COMPARED[1:]}}
    settings = {**plan.settings(), "text": text.name, "text_digest": text.digest,
                "equal_to": "; ".join(str(reference(case)) for case in cases),
                "one_rank": "; ".join(str(one_rank(case)) for case in cases)}
    if plan.experts is not None:
        routed = {case: found[case].routing_differences(found[one_rank(case)]) for case in cases}
        checks += [Check(f"experts {name} by {case}", float(routed[case][name]), 0.0)
                   for case in compared for name in ROUTED]
        numbers |= {f"{name}_difference": [routed[case][name] for case in cases]
                    for name in ROUTED}
        numbers["dropped_share"] = [found[case].dropped.sum() / found[case].chosen.sum()
                                    for case in cases]
    return make_record(KIND, settings, environs, {"1": numbers}, checks,
                       mesh=[str(case) for case in cases])


def _forward_terms(plan: Plan) -> int:
    """Count the terms of the successive sums in the loss of a token.

    In a layer they belong to the products for queries, keys and values, for scores, for the
    context, back, up and down, and to two norms with two sums each.
    """
    h, head = plan.hidden, plan.hidden // plan.heads
    layer = h + head + plan.seq + h + h + 4 * h + 4 * h
    return plan.layers * layer + 2 * h + h + VOCAB


def rounding_bounds(plan: Plan, rounding: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the relative differences of losses, gradients and weights that rounding may cause.

    Losses are those of any step, gradients and weights those at the end.

    Parameters
    ----------
    rounding : mapping, optional
        In float32, the same differences between one rank and float64.
    """
    if rounding is None:
        return FLOAT64
    unit = float(np.finfo(plan.dtype).eps) / 2
    usual = {"loss": unit * math.sqrt(_forward_terms(plan) / (plan.batch * plan.seq))}
    return {name: FACTOR * max(found, usual.get(name, unit)) for name, found in rounding.items()}
