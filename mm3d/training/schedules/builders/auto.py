"""Search for the best schedule for given times and memory."""

from mm3d.training.schedules.builders.loops import one_f_one_b, zb_h1, zb_h2
from mm3d.training.schedules.clock import peak_in_flight, time_actions
from mm3d.training.schedules.schedule import Schedule, builder
from mm3d.training.schedules.search import Limit, search
from mm3d.training.schedules.times import Exact, Times, exact


SEARCHED = 2 ** 15    # forward steps, as each schedule is made 54 times: half a minute


@builder("auto", SEARCHED)
def auto(ranks: int, microbatches: int, times: Times | None = None,
         memory: Exact | None = None, kept: Exact = 1) -> Schedule:
    """Search for the schedule of the least cost with one stage a rank.

    It is the result of `mm3d.training.schedules.search.search`, or 1F1B, ZB-H1 or ZB-H2 where one
    of these fits the memory and is better.  By default the times of the stages are F = B = W = 1,
    and no time for hops.  A rank may hold at most `memory` activations of one micro-batch, by
    default as many as there are ranks, the memory of 1F1B; W still needs the share `kept` of them
    after B, from 0 to 1.

    Raises ValueError when not even one micro-batch fits, or the times are of another number of
    stages.
    """
    times = times or Times.equal(ranks, 1, 1, 1)
    limit = Limit(exact(ranks if memory is None else memory), exact(kept))
    if limit.memory < 1 or not 0 <= limit.kept <= 1:
        raise ValueError(f"memory {limit.memory}, of which {limit.kept} is kept for W: memory for "
                         f"one micro-batch at least, and a share from 0 to 1 are needed")
    if len(times.forward) != ranks:
        raise ValueError(f"times of {len(times.forward)} stages: auto has one stage on each of "
                         f"the {ranks} ranks")
    known = (build(ranks, microbatches) for build in (one_f_one_b, zb_h1, zb_h2))
    fitting = [schedule for schedule in known
               if max(peak_in_flight(schedule, limit.kept)) <= limit.memory]
    found = search(ranks, microbatches, times, limit)
    return min([*fitting, found], key=lambda schedule: time_actions(schedule, times).cost)
