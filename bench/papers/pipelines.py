"""Compute bubbles of pipelines: by the schedules' clock, and as papers state them.

Times are F, B (the gradient of the input) and W of a chunk, and perhaps that of a message.
"""

from fractions import Fraction
from typing import Any, Callable, Sequence

from mm3d.training.schedules import Times, build, clock
from mm3d.training.schedules.search import lower_bound

Number = int | Fraction
MEASURES = ("bubble", "bubble_rate", "bubble_over_work", "idle_share")    # of a `Timeline`


def bubble(schedule: str, measure: str, stages: int, microbatches: int,
           times: Sequence[Number] = (1, 1, 1)) -> Fraction:
    """Time a schedule action by action, and return one of `MEASURES`."""
    if measure not in MEASURES:
        raise ValueError(f"measure {measure!r}: one of {', '.join(MEASURES)} would do")
    found = build(schedule, stages, microbatches)
    return getattr(clock(found, Times.equal(found.stage_count, *times)), measure)


def interleaved_rate(stages: int, microbatches: int, layers: int, times: Sequence[Number]
                     ) -> Fraction:
    """Return the rate of interleaved 1F1B as the zero-bubble paper counts it.

    Its bubble is (p - 1) (F + B + W) / v plus (2 v - 1) p - 2 hops.  Each of the v chunks of a
    rank is one layer; two more than the model has stand for the embeddings.  (With a hop for each
    message there would be 2 (p v - 1).)
    """
    *steps, hop = times
    chunks = (layers + 2) // stages
    found = Fraction((stages - 1) * sum(steps), chunks) + ((2 * chunks - 1) * stages - 2) * hop
    return found / (microbatches * sum(steps) + found)


def searched_rate(memory: int, stages: int, microbatches: int, hidden: int, heads: int,
                  sequence: int, times: Sequence[Number]) -> Fraction:
    """Return the rate of the best schedule that `auto` finds.

    A rank may hold the activations of `memory` micro-batches for each of the `stages`.  W still
    needs 32 h of their 34 h + 5 a s, in bytes over s b (the paper's Table 1).
    """
    kept = Fraction(32 * hidden, 34 * hidden + 5 * heads * sequence)
    found = Times.equal(stages, *times)
    return clock(build("auto", stages, microbatches, times=found, memory=memory * stages,
                       kept=kept), found).bubble_rate


def least_rate(memory: int, stages: int, microbatches: int, times: Sequence[Number]) -> Fraction:
    """Return a rate that no schedule with one stage a rank falls below in this memory."""
    least = lower_bound(stages, microbatches, Times.equal(stages, *times),
                        Fraction(memory * stages))
    return 1 - microbatches * sum(times[:3]) / Fraction(least)


def claimed_bubble(schedule: str, stages: int, times: Sequence[Number]) -> Fraction:
    """Return the bubble as DeepSeek-V3 states it, F&B being F + B: of 1f1b, zb-h1 or dualpipe-v.

    DualPipeV has two chunks a rank, so that half of its pipeline stages are its ranks.
    """
    forward, backward, weights = times
    whole = backward + weights    # B in print
    found = {"1f1b": forward + whole, "zb-h1": forward + whole - 2 * weights,
             "dualpipe-v": forward + whole + whole - 3 * weights}
    if schedule not in found:
        raise ValueError(f"schedule {schedule!r}: one of {', '.join(found)} would do")
    return Fraction((stages - 1) * found[schedule])


FORMULAS: tuple[Callable[..., Any], ...] = (bubble, interleaved_rate, searched_rate, least_rate,
                                            claimed_bubble)
