"""Say what the tables of a dry run with experts assume."""

from bench.document import Notes
from mm3d.model.experts.capacity import capacity_of
from mm3d.model.experts.options import ExpertOptions
from mm3d.tracing.trace import Trace


def expert_notes(experts: ExpertOptions, trace: Trace, data: int, tokens: int) -> Notes:
    """State the assumed routing, and which words are counted between replicas.

    Parameters
    ----------
    trace : Trace
        The dry run.
    """
    every, capacity = data * tokens, capacity_of(experts, data * tokens)
    share = every * experts.top / experts.count
    lines = [f"The routing is assumed, not computed: of {every:,} tokens that are routed "
             f"together, each to {experts.top} of {experts.count} experts, every expert gets "
             f"{share:,.6g}. For that routing all counts are exact; a router that is trained "
             f"chooses otherwise.",
             "Nothing is dropped." if capacity is None else
             f"An expert takes {capacity:,} pairs of token and choice at most (capacity "
             f"{experts.capacity:g}); rows beyond are dropped, and not counted."]
    kinds = {kind for moved in trace.traffic.values() for direction, kind in moved
             if direction == "e"}
    if trace.divided:
        way = ("exchanged: an all-to-all of rows of tokens brings them to their experts, and "
               "another one brings the results back, and the same for gradients"
               if "all_to_all" in kinds else "gathered: all tokens come to all replicas, and "
               "sums of the results are scattered")
        lines.append(f"Direction e has the replicas that divide the experts. Rows are {way}. Its "
                     f"other all-gathers move counts of choices.")
    if data > 1:
        lines.append("The sums of gradients over replicas are not in these tables.")
    return Notes("About the experts (a model, not a run):", lines)


def plan_notes(experts: ExpertOptions) -> Notes:
    """Say what the plans of a model with experts assume."""
    capacity = experts.capacity
    dropped = ("nothing is dropped" if capacity is None else
               f"capacity {capacity:g} drops hardly any then" if capacity >= 1 else
               f"the rows that capacity {capacity:g} drops are left out of seconds")
    return Notes("About the experts (a model, not a run):", [
        f"{experts.count} experts in one of {experts.every} layers, top {experts.top}. Every "
        f"expert is assumed to get equally many tokens, and {dropped}. They are all in each "
        f"replica, divided by the scheme as any weight: no replicas divide them.",
        "Plans are screened by closed forms, in which the products of all experts are as fast as "
        "one and elementwise work is that of a model without experts; seconds and memory of the "
        "best are from dry runs, in which neither is so. Words are exact where nothing is "
        "dropped, else a bound; in 2.5d they lack sums over the layers. No lower bound is given "
        "for products in which rows have weights of their own."])
