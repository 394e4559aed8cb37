"""Check a row of the tables against the rules for citing it; a line explains each violation.

What `bench.records.schema` refuses when a file is read is not checked again.
"""

import math
from typing import Callable, Iterator

import numpy as np
from msgspec.structs import replace

from bench.cases.case import make_case
from bench.cases.paper import load_tables, title, unpublished_row
from bench.cases.variants import itemsize, recorded_variant
from bench.checks import tolerances
from bench.errors import UsageError
from bench.records.kinds.model import expected_words
from bench.records import model_run
from bench.records.measurements import Check
from bench.records.model_run import Run
from bench.records.notes import split_checks
from bench.statistics import median_interval
from bench.validation.files import TOLERANCE
from mm3d import ModelSizes
from mm3d.grid.axis import COLLECTIVES
from mm3d.model import cost
from mm3d.model.sizes import SIZES
from mm3d.schemes import registry
from mm3d.tracing.events import PHASES


def check_samples(run: Run) -> Iterator[str]:
    """Check that some rank is the first in each repetition, and their count within the limits."""
    chosen, count = run.configuration, len(run.samples["forward"])
    for phase in PHASES:
        late = run.late[phase]
        if not ((late >= 0).all() and (late.min(axis=1) == 0).all()):
            yield (f"samples/{phase}_late: in each repetition some rank is the first, 0, and no "
                   f"other before it")
    least, most = chosen["repetitions"], chosen.get("max_repetitions", math.inf)
    if count < least and run.ended_by != "stopped":
        yield f"too few samples: {count} repetitions of at least {least} that were asked for"
    if count > most:
        yield f"too many samples: {count} repetitions of at most {most}"


def check_ending(run: Run) -> Iterator[str]:
    """Check that the recorded end of the repetitions agrees with the samples."""
    chosen, count = run.configuration, len(run.samples["forward"])
    intervals = {phase: median_interval(model_run.slowest(run.samples[phase]))
                 for phase in PHASES}
    wide = [f"{phase} {100 * interval.width:.1f} % wide at {100 * interval.confidence:.0f} %"
            for phase, interval in intervals.items() if not interval.within(chosen["width"])]
    if run.ended_by == "width" and wide:
        yield (f"ended_by says that the intervals are within {100 * chosen['width']:g} %, but "
               f"those of the samples are not: {', '.join(wide)}")
    if run.ended_by == "repetitions" and count != chosen.get("max_repetitions", count):
        yield (f"ended_by says that {chosen['max_repetitions']} repetitions were done, but there "
               f"are {count}")


def check_verification(run: Run) -> Iterator[str]:
    """Check that all quantities were compared with the benchmark's tolerances, and passed."""
    layers = run.configuration.get("verified_layers", run.configuration["layers"])
    try:
        forward, gradient = tolerances.beside_serial(
            recorded_variant(run.configuration).rounding, layers)
    except KeyError:
        forward, gradient = math.nan, math.nan
    serial, own = split_checks(run.checks)
    yield from _lax(serial, lambda name: forward if name == "output" else gradient)
    names = {check.quantity for check in serial}
    arrays = cost.parameter_arrays(ModelSizes.from_settings(run.configuration))
    wanted = 2 + layers * arrays
    if not {"output", "input gradient"} <= names or len(names) != wanted:
        yield (f"verification: {len(names)} quantities, but {layers} layers have {wanted}: the "
               f"output, its input's gradient and {arrays} parameters a layer")
    yield from check_residuals(run, own)


def check_residuals(run: Run, own: list[Check]) -> Iterator[str]:
    """Check the residuals of the measured model's step, if the file states that there are any."""
    chosen = run.configuration
    how = "serial model" if chosen["verified_measured_model"] else "residuals"
    if chosen.get("verified_by", how) != how or bool(own) != (chosen.get("verified_by")
                                                              == "residuals"):
        yield (f"verified_by {chosen.get('verified_by')}: with verified_measured_model "
               f"{bool(chosen['verified_measured_model'])} and {len(own)} residuals it should be "
               f"{how}")
    if not own:
        return
    limits = tolerances.layer_by_layer(recorded_variant(chosen).rounding, chosen["layers"])
    if {check.quantity for check in own} != limits.keys():
        yield (f"verification: {len(own)} residuals, but {chosen['layers']} layers have "
               f"{len(limits)}")
    yield from _lax(own, lambda name: limits.get(name, math.nan))


def _lax(checks: list[Check], limit_of: Callable[[str], float]) -> Iterator[str]:
    """List the tolerances that are above their limits."""
    for check in checks:
        limit = limit_of(check.quantity)
        if not check.tolerance <= limit * (1 + TOLERANCE):
            yield (f"verification: the tolerance of {check.quantity} is {check.tolerance:g}; the "
                   f"rules allow {limit:g}")


def check_rank_counts(run: Run) -> Iterator[str]:
    """Check that all numbers of ranks are equal, and oversubscription is stated."""
    count, chosen = run.ranks, run.configuration
    for name, value in (("environment/ranks", run.environment["ranks"]),
                        ("the grid", run.grid.ranks),
                        ("published/gpus", run.published["gpus"])):
        if value != count:
            yield f"{name} says {value:g} ranks, the samples are of {count}"
    known = registry().get(chosen["scheme"])
    if known and chosen["grid_axes"] != " ".join(known.directions):
        yield (f"grid_axes {chosen['grid_axes']}: scheme {chosen['scheme']} has the directions "
               f"{' '.join(known.directions)}")
    if not counted_along_grid(run):
        yield (f"traffic was counted along {' '.join(run.directions)}, but the grid has the "
               f"directions {' '.join(run.grid)}")


def counted_along_grid(run: Run) -> bool:
    """Return whether traffic was counted along every direction of the grid."""
    return set(run.grid) <= set(run.directions)


def check_words(run: Run) -> Iterator[str]:
    """Check the counted and the expected words against the closed form."""
    chosen = run.configuration
    if chosen["scheme"] not in registry() or not counted_along_grid(run):
        return
    expected = expected_words(chosen["scheme"], run.grid, ModelSizes.from_settings(chosen),
                              recorded_variant(chosen), chosen.get("recompute", "none"),
                              run.directions)
    counted = run.traffic["words"].sum(axis=1)
    for name, found in (("expected_words", run.expected_words), ("the words counted", counted)):
        if not np.array_equal(found, expected):
            yield (f"{name} are {int(found.sum())} in all, by the closed form of these sizes "
                   f"{int(expected.sum())}")
    size, moved = itemsize(chosen["dtype"]), run.traffic["bytes"]
    # With 16 bits some sums travel in float32.
    least, most = (times * run.traffic["words"] for times in (size, max(size, 4)))
    if not ((least <= moved) & (moved <= most)).all():
        yield f"traffic/bytes are not {size} times the words, as {chosen['dtype']} has"


def check_groups(run: Run) -> Iterator[str]:
    """Check the parts against the counted collectives, and memory against closed forms."""
    chosen, found = run.configuration, {name: {
        key: variable.values for key, variable in group.variables.items()}
        for name, group in run.groups.items()}
    if "parts" in found:
        names = list(run.groups["parts"].scales["part"])
        calls = run.traffic["calls"]
        for a, axis in enumerate(run.directions):
            for c, collective in enumerate(COLLECTIVES):
                label, counted = f"{collective} {axis}", calls[:, :, a, c]
                if label not in names and not counted.any():    # in older files
                    continue
                part = names.index(label)
                if not np.array_equal(found["parts"]["calls"][..., part], counted):
                    yield f"parts/calls of {collective} along {axis} are not traffic/calls"
    if "memory" not in found or chosen["scheme"] not in registry():
        return
    stored = cost.parameters(ModelSizes.from_settings(chosen))
    size = itemsize(chosen["dtype"])
    for name, count in (("parameters", stored), ("gradients", stored)):
        if not np.isclose(found["memory"][f"expected_{name}"] * run.ranks, count * size,
                          rtol=TOLERANCE):
            yield f"memory/expected_{name} is not the closed form's {count * size / run.ranks:g}"


def check_waits(run: Run) -> Iterator[str]:
    """Check that a run states the seconds that ranks waited, if and only if they waited."""
    work, found = run.configuration.get("work", "compute"), run.groups.get("waits")
    if (work == "wait") != (found is not None):
        yield f"work {work}, but the group waits is {'missing' if found is None else 'there'}"
    if work == "wait":
        for name in ("waited_machine", "waited_scale", "waited_shrink"):
            if name not in run.configuration:
                yield f"work wait: {name} is missing"
    for name in ("software", "predicted"):
        if (name in run.groups) != ("dilation" in run.configuration):
            yield f"links and waits are slowed, or the group {name} is there, but not both"
    if found is None:
        return
    modelled, counted, slept, overlapped = (
        found.variables[name].values for name in ("modelled", "counted", "slept", "overlapped"))
    if not np.allclose(counted, modelled, rtol=TOLERANCE):
        yield "waits/counted are not the seconds of waits/modelled"
    if not (slept + overlapped >= counted * (1 - TOLERANCE)).all():
        yield "waits/slept, overlapped: a rank has waited less than its work takes by the model"


def check_wire(run: Run) -> Iterator[str]:
    """Check that nodes of an emulated cluster received what they have to receive in a step."""
    if "wire" not in run.groups:
        return
    if "emulated_cluster" not in run.environment:
        yield "the group wire is there, but no emulated cluster is named"
    received, least = (run.of_group("wire", name) for name in ("received", "least"))
    for phase, found, wanted in zip(PHASES, received.sum(axis=1), least.sum(axis=1)):
        if found < wanted:
            yield (f"wire/received of {phase} is {found:g} bytes in all, less than the {wanted:g} "
                   f"that have to cross between nodes")


def check_sizes(run: Run) -> Iterator[str]:
    """Check that sizes are those of the row under the preset, or recorded as overridden."""
    chosen = run.configuration
    key = chosen["table"], chosen["scheme"], run.ranks
    row = next((row for row in load_tables().rows if row.key == key), None)
    row = row or unpublished_row(*key)
    for name, value in (("batch", row.batch), ("hidden", row.hidden),
                        ("forward_time", row.forward), ("backward_time", row.backward),
                        ("average_step_time", row.average),
                        ("recomputed_step_time", row.recomputed)):
        if not np.isclose(run.published[name], value, rtol=TOLERANCE, equal_nan=True):
            yield f"published/{name} is {run.published[name]:g}, in the table {value:g}"
    by_hand = set(str(chosen["overridden"]).split())
    row = replace(row, like=chosen.get("equal_tokens", ""))
    try:
        wanted = make_case(row, chosen["preset"],
                           **{name: chosen[name] for name in by_hand & {*SIZES}})
    except UsageError as error:
        yield str(error)
        return
    for name in SIZES:
        if chosen[name] != getattr(wanted.sizes, name):
            yield (f"{name} {chosen[name]}: preset {chosen['preset']} runs {row.table} "
                   f"{title(row.scheme)} {row.gpus} with {getattr(wanted.sizes, name)}, and "
                   f"'overridden' does not say otherwise")
    smaller = any(chosen.get(f"verified_{name}", chosen[name]) != chosen[name] for name in SIZES)
    if smaller == bool(chosen["verified_measured_model"]):
        yield "verified_measured_model does not say whether the verified sizes are the measured"


RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    check_samples, check_ending, check_verification, check_rank_counts, check_words, check_groups,
    check_waits, check_wire, check_sizes)
