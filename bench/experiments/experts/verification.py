"""Verify a layer of experts, and the words that it moves, by a plain computation in NumPy."""

from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench.checks import against_serial, tolerances
from bench.experiments.experts.plain import PlainExperts
from bench.experiments.experts.problem import LAYER_NAME, ExpertsSubject
from bench.records.measurements import Check
from mm3d import launcher
from mm3d.arrays.blocks import block_lengths
from mm3d.launcher import wait_patiently

# Relative to the largest logit.
CHOICE_TOLERANCES = {"float32": 1e-5, "float64": 1e-13}
# The variables of a record that are of its routing.  How many tokens have each expert as their
# first, second ... choice, and how many of these pairs were dropped; the balance loss, by a plain
# computation; words of a step between replicas, counted and by the closed form, and counted inside
# replicas; and whether tokens are gathered, and not exchanged.
ROUTED = ("tokens", "dropped", "balance_loss", "words", "expected_words", "inside_words",
          "gathered")


def verify_experts(subject: ExpertsSubject, routing: str,
                   torch: dict[str, dict[str, np.ndarray]]
                   ) -> tuple[list[Check], dict[str, np.ndarray]]:
    """Run a step from cleared gradients, and compare it with the plain computation.

    `torch` has PyTorch's results by way and quantity, which are compared too; used on rank 0.

    Returns the comparisons, the same on every rank, and on rank 0 what a record has of the
    routing, by the names of `ROUTED`; {} on the others.
    """
    comm = subject.mesh.comm
    subject.zero_gradients()
    subject.reset_traffic()
    if subject.data:
        for p in subject.data.parameters:
            p.begin_step(1)
    with subject.layer.routings.recording() as routings:
        y, dx = subject.step()
    words = comm.gather(subject.words())
    if subject.data:
        for p in subject.data.parameters:
            p.finish_step()
        subject.data.complete(0)
    host = subject.grid.backend.to_host
    blocks = comm.gather((subject.place, host(y), host(dx), routings[0].choice.chosen))
    gradients = {p.name.removeprefix(f"{LAYER_NAME}."): p.gather(p.grad)
                 for p in subject.layer.parameters}
    dropped = subject.layer.routings.totals[-1].dropped
    checks, found = None, {}
    if comm.rank == 0:
        with threadpool_limits(launcher.cores(), user_api="blas"):
            checks, found = _compare(subject, routing, blocks, gradients, dropped,
                                     np.array(words), torch)
    wait_patiently(comm)
    return comm.bcast(checks), found


def _compare(subject: ExpertsSubject, routing: str, blocks: list, gradients: dict[str, np.ndarray],
             dropped: np.ndarray, words: np.ndarray,
             torch: dict[str, dict[str, np.ndarray]]
             ) -> tuple[list[Check], dict[str, np.ndarray]]:
    """Compare what all ranks have computed with the plain computation, on rank 0."""
    case = subject.case
    chosen = np.full((case.batch, case.seq, case.experts.top), -1)
    for place, y, _, part in blocks:
        chosen[place[:2]] = part.reshape(*y.shape[:2], case.experts.top)
    plain, expected = _plain_results(subject, routing, chosen)
    name = f"{routing}: "
    forward, gradient = tolerances.beside_serial(case.dtype, 1)
    tokens, kept = plain.counts, np.zeros(case.experts.count, np.int64)
    np.add.at(kept, plain.chosen[plain.kept], 1)
    checks = [Check(f"{name}choice of experts", plain.choice_error(),
                    CHOICE_TOLERANCES[case.dtype]),
              Check(f"{name}dropped tokens", float(abs(
                  dropped - (tokens.sum(0) - kept)).sum()), 0.0)]
    for number, quantity in ((1, "output"), (2, "input gradient")):
        parts = [(block[0], block[number]) for block in blocks]
        checks.append(Check(name + quantity, against_serial.worst_error(
            parts, expected[quantity]), forward if number == 1 else gradient))
    for p, found in gradients.items():
        if f"gradient of {p}" in expected:    # the bias of "sigmoid-bias" has none
            checks.append(Check(f"{name}gradient of {p}", _error(
                found, expected[f"gradient of {p}"]), gradient))
    checks += [Check(f"{routing}, PyTorch {way}: {quantity}", _error(a, expected[quantity]),
                     gradient)
               for way, results in torch.items() for quantity, a in results.items()]
    ways = _closed_forms(subject, plain, blocks)
    gathered = subject.expert_parallel > 1 and ways["gather"].sum() < ways["exchange"].sum()
    closed = ways["gather" if gathered else "exchange"] + _counts_words(subject, blocks)
    checks.append(Check(f"{name}words between replicas", float(abs(words[:, 0] - closed).sum()),
                        0.0))
    return checks, dict(zip(ROUTED, map(np.array, (
        tokens, tokens.sum(0) - kept, plain.balance_loss(), words[:, 0], closed, words[:, 1],
        np.int8(gathered)))))


def _plain_results(subject: ExpertsSubject, routing: str,
                   chosen: np.ndarray) -> tuple[PlainExperts, dict[str, np.ndarray]]:
    """Compute the layer for the experts `chosen`; return it, and a step's results by quantity."""
    case = subject.case
    arrays, shape = case.activations(), (case.batch, case.seq, case.hidden)
    x, dy = (arrays[name].reshape(case.tokens, -1) for name in ("input", "output gradient"))
    weights = {**case.parameters(), "router.weight": case.router_weight(routing)}
    plain = PlainExperts(case.experts, weights, x, chosen.reshape(case.tokens, -1))
    slopes = plain.gradients(dy.astype(np.float64))
    expected = {"output": plain.output().reshape(shape),
                "input gradient": slopes.pop("input").reshape(shape)}
    return plain, expected | {f"gradient of {name}": a for name, a in slopes.items()}


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Compute the relative Frobenius error."""
    expected = expected.reshape(found.shape)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _closed_forms(subject: ExpertsSubject, plain: PlainExperts,
                  blocks: list[Any]) -> dict[str, np.ndarray]:
    """Count the words that each rank sends to other replicas in a step, by way.

    In an exchange a rank sends the row of each of its tokens to the replica of its group with the
    expert that takes it, which sends its result back; in backward the gradients of both go the
    same ways.  In a gather a rank gets each token of the other replicas of its group, the experts
    it chose and their gates, and sends back terms of its sum; in backward the gradients of sum,
    token and gates travel likewise.
    """
    case, parts = subject.case, subject.expert_parallel
    shape = (case.batch, case.seq, case.experts.top)
    owner = np.repeat(np.arange(parts), block_lengths(case.experts.count, parts))
    goes_to = np.where(plain.kept, owner[plain.chosen], -1).reshape(shape)
    group = len(blocks) // subject.mesh.shape["d"]    # ranks of a replica
    to, gather = np.zeros((len(blocks), parts), np.int64), np.zeros(len(blocks), np.int64)
    for rank, (place, y, *_) in enumerate(blocks):
        to[rank] = [(goes_to[place[:2]] == n).sum() * y.shape[2] for n in range(parts)]
        others = sum(other[1].shape[0] * other[1].shape[1] for n, other in enumerate(blocks)
                     if n % group == rank % group and n != rank
                     and n // (group * parts) == rank // (group * parts))
        gather[rank] = others * (4 * y.shape[2] + 3 * case.experts.top)
    by_place = to.reshape(-1, parts, group, parts)    # (groups of replicas, from, place, to)
    away = by_place * (np.arange(parts)[:, None, None] != np.arange(parts))
    sent = away.sum(3)                          # (groups, replicas, places): rows there
    returned = away.sum(1).transpose(0, 2, 1)   # the same: rows of others' tokens back
    return {"exchange": 2 * (sent + returned).reshape(-1), "gather": gather}


def _counts_words(subject: ExpertsSubject, blocks: list[Any]) -> np.ndarray:
    """Count the integers that each rank gets from other replicas: k E for each run of tokens.

    A run is a part of the batch whose tokens are consecutive on one rank.
    """
    case, group = subject.case, len(blocks) // subject.mesh.shape["d"]
    runs = np.zeros(len(blocks), np.int64)
    for rank in range(len(blocks)):
        elsewhere = {str(place[:2]): 1 if y.shape[1] == case.seq else y.shape[0]
                     for n, (place, y, *_) in enumerate(blocks) if n // group != rank // group}
        runs[rank] = sum(elsewhere.values())
    return runs * case.experts.top * case.experts.count
