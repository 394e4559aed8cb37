"""Measure one Transformer layer, forward and backward, beside another library's.

In every repetition the distributed layer, its linear layers' local matrix products alone, and
the other side are measured one after another, in random order, while the others sleep; ratios are
medians over the repetitions.  The other side is PyTorch in one process, with all cores, or
ColossalAI, with as many processes as there are ranks.  With overlap the layer is measured a second
time in each, with communication that goes on while ranks multiply.
"""

from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.variants import schemes_with_option
from bench.checks import against_serial
from bench.checks.passed import require_passed
from bench.errors import UsageError, WrongResult
from bench.experiments.products.operands import observe_products
from bench.experiments.products.problem import LocalProducts
from bench.experiments.torch.child import TorchProcesses, compare_kernels, gpt_step_flops
from bench.instruments import hidden_time
from bench.instruments.clock import Clock
from bench.instruments.peak_memory import Footprint
from bench.instruments.sampling import Sample, compare_in_turns, measured_environment, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import add_numbers, make_record, transport_names
from bench.records.measurements import Check, Measurements, grid_settings
from mm3d import ModelSizes
from mm3d.tracing import dry_run

PYTORCH, COLOSSAL = "PyTorch", "ColossalAI"
KINDS = ("layer", "local products", PYTORCH, "layer with overlap")    # or COLOSSAL


def check_overlap(scheme: str) -> None:
    """Raise UsageError for a scheme whose products cannot overlap."""
    able = schemes_with_option("overlap")
    if scheme not in able:
        raise UsageError(f"--overlap --scheme {scheme}: only products of {', '.join(able)} can "
                         f"overlap")


def _check_colossal(scheme: mm3d.Scheme, sizes: ModelSizes) -> None:
    """Raise UsageError for what ColossalAI's 3-D layers cannot do: they pad nothing."""
    grid, q = scheme.grid.shape.sizes, scheme.grid.shape.sizes[0]
    if (scheme.name not in schemes_with_option("keep") or len(grid) < 3 or set(grid) != {q}
            or q == 1):
        raise UsageError(f"--colossal --scheme {scheme.name} --grid {scheme.grid.shape.compact}: "
                         f"ColossalAI has the 3-D layers on a cube of 8, 27, 64 ... ranks")
    for name, divisor in (("batch", q * q), ("heads", q), ("hidden", q * q)):
        if sizes[name] % divisor:
            raise UsageError(f"--colossal, {name} {sizes[name]} on {q}x{q}x{q} ranks: ColossalAI "
                             f"needs a multiple of {divisor}")


class MeasuredLayer:
    """A layer to measure, with its input and its output's gradient."""

    def __init__(self, scheme: mm3d.Scheme, sizes: ModelSizes, seed: int = 0,
                 dtype: str = "float32") -> None:
        self.footprint = Footprint(scheme.grid)
        self.scheme, self.sizes, self.seed, self.dtype = scheme, sizes, seed, dtype
        self.model = mm3d.Transformer(scheme, **sizes, seed=seed, dtype=dtype)
        self.x, self.dy = self.model.random("input"), self.model.random("output gradient")
        self.model.zero_gradients()

    def step(self) -> tuple[Any, Any]:
        """Run forward and backward; return the output and the input's gradient."""
        y, saved = self.model.forward(self.x)
        return y, self.model.backward(self.dy, saved)

    def count(self) -> list[float]:
        """Return this rank's collective calls and words of a step, and the bytes that it saves."""
        self.scheme.grid.reset_traffic()
        _, saved = self.model.forward(self.x)
        held = self.model.saved_bytes(saved)
        self.model.backward(self.dy, saved)
        self.model.zero_gradients()
        found = self.scheme.grid.traffic().values()
        return [sum(one.calls for one in found), sum(one.words for one in found), held]

    def check_step(self, results: tuple[Any, Any],
                   reference: TorchProcesses | None) -> list[Check]:
        """Compare a step's results and parameters' gradients with the other side, or serial."""
        answer = reference.take_turn("check") if reference else None
        expected = reference and (lambda: answer)
        return against_serial.compare_with_serial(self.model, *results, self.dtype, expected)


def measure_layer(subject: MeasuredLayer, beside: tuple[str, str] | None, overlap: int,
                  limits: Limits) -> Measurements | None:
    """Measure one layer beside another library's, or alone; every rank of its grid calls this.

    The results are verified before the first repetition, and those of the last one again.

    Parameters
    ----------
    beside : tuple of str or None
        The library that the layer is verified with and measured beside, `PYTORCH` or `COLOSSAL`,
        and an interpreter that has it.  Without them the layer is verified with the serial scheme
        and measured alone.
    overlap : int
        Measure the layer also with communication that overlaps with products, in this many panels
        of rows; 0 for no overlap.

    Returns
    -------
    Measurements or None
        A record of kind "layer", by repetition, kind and rank; on rank 0, None on the others.

    Raises
    ------
    UsageError
        On all ranks, when the other side cannot compute the layer, or its products not overlap.
    WrongResult
        On all ranks, when a result or a gradient is wrong.
    """
    comm, scheme, sizes = subject.scheme.grid.comm, subject.scheme, subject.sizes
    name, python = beside or ("", "")
    differs = f"differs from {name or 'the serial scheme'}: "
    if overlap:
        check_overlap(scheme.name)
    if name == COLOSSAL:
        _check_colossal(scheme, sizes)
    results = subject.step()
    memory = comm.gather(subject.footprint.peaks())
    kernels = {}
    with closing(_start_beside(subject, name, python)) if beside else nullcontext() as reference:
        checks = require_passed(subject.check_step(results, reference), differs)
        del results
        counted = count_sides(subject, name, reference)
        if reference:
            kernels = compare_kernels(observe_products(subject.step, scheme.grid), subject.dtype,
                                      scheme.grid.backend, reference, subject.seed,
                                      gpt_step_flops(sizes.batch * sizes.seq, sizes.layers,
                                                     sizes.hidden, sizes.seq))
        times, hidden, ended_by, again = _time_layer(subject, overlap, limits, reference)
        checks += require_passed(again, f"after the last repetition, {differs}")
    environs = measured_environment(scheme.grid.backend.name, comm)
    if memory is None:
        return None
    options = {"keep": scheme.keep} if hasattr(scheme, "keep") else {}
    settings = {"scheme": scheme.name, "dtype": subject.dtype,
                **sizes, "seed": subject.seed, **options,
                "reference": reference.about if reference else "none", "ended_by": ended_by,
                **({"overlap": overlap} if overlap else {}), **grid_settings(scheme.grid.shape),
                "transport": transport_names(scheme.grid), **asdict(limits)}
    expected = dry_run.trace_step(
        scheme.name, scheme.grid.size, scheme.grid.shape.sizes, block=scheme.grid.backend.block,
        options=options, dtype=subject.dtype, **sizes).pool_peak
    record = make_record("layer", settings, environs, {
        "s": {"times": times},
        "byte": {"memory": np.array(memory).T, "expected_memory": float(expected),
                 "saved": counted[2]},
        "1": {"hidden": hidden, **dict(zip(("calls", "words"), counted))}}, checks,
        kind=tuple(name or kind if kind == PYTORCH else kind for kind in KINDS),
        side=("mm3d", COLOSSAL)[:len(counted[0])])
    return add_numbers(record, kernels)


def _start_beside(subject: MeasuredLayer, beside: str, python: str) -> TorchProcesses:
    """Start the other side beside the ranks, with the global arrays of the layer."""
    case, comm = {"heads": subject.sizes.heads, "dtype": subject.dtype}, subject.scheme.grid.comm
    arrays = None
    if comm.rank == 0:
        model = mm3d.Transformer(mm3d.scheme("serial", MPI.COMM_SELF, backend="numpy"),
                                 **subject.sizes, seed=subject.seed, dtype=subject.dtype)
        arrays = {**{p.name: p.value.reshape(p.public_shape) for p in model.parameters},
                  **{name: model.random(name) for name in ("input", "output gradient")}}
    name, ranks = (("colossal:ColossalLayer", comm.size) if beside == COLOSSAL else
                   ("models:TorchLayer", 1))
    return TorchProcesses(python, name, case, arrays, comm, "do the layer", ranks)


def count_sides(subject: MeasuredLayer, beside: str,
                reference: TorchProcesses | None) -> np.ndarray | None:
    """Count calls, words and saved bytes of each side's step, (counts, sides, ranks), on rank 0.

    Without ColossalAI, which alone has ranks that send, there is no second side.

    Raises WrongResult on all ranks, when a side moves other words than the closed form: ColossalAI
    keeps gathered operands, and moves as many as mm3d if it keeps them, too.
    """
    rows = [subject.count()]
    if beside == COLOSSAL:
        found = reference.take_turn("count")
        rows.append([found["calls"], found["words"], found["saved"]])
    comm, stated = subject.scheme.grid.comm, sum(mm3d.cost.step_words(subject.model).values())
    everyone, problem = comm.gather(rows), None
    if everyone is not None:
        everyone = np.array(everyone, float).transpose(2, 1, 0)
        equal = getattr(subject.scheme, "keep", "") == "both"
        for side, mean in zip(("mm3d", COLOSSAL)[:1 + equal], everyone[1].mean(axis=1)):
            if abs(mean - stated) > 0.5:
                problem = (f"a rank of {side} moves {mean:.1f} words in the mean: they should be "
                           f"the {stated:.1f} of the closed form")
    if problem := comm.bcast(problem):
        raise WrongResult(problem)
    return everyone


def _time_layer(subject: MeasuredLayer, overlap: int, limits: Limits,
                reference: TorchProcesses | None) -> tuple[np.ndarray, float, str, list[Check]]:
    """Measure `KINDS` until the limits are reached, and check the last results.

    Returns seconds, (repetitions, kinds, ranks, begin and end), NaN for kinds that were not
    measured; the share of communication that overlap hides, NaN without overlap; the limit that
    was reached; and the checks.
    """
    grid, last = subject.scheme.grid, []
    clock, replay = Clock(grid.comm), LocalProducts(subject.step, grid, subject.dtype)
    replay.result = None

    def products() -> Sample:
        return time_side(replay, grid.comm, grid.backend.synchronize, clock)

    def layer(panels: int) -> Sample:
        last.clear()
        subject.model.zero_gradients()
        hidden_time.set_overlap(subject.model, panels)
        found = time_side(subject.step, grid.comm, grid.backend.synchronize, clock)
        last.append(found.result)
        return Sample(found.times)

    sides = {0: partial(layer, 0), 1: products, **({2: reference.sample} if reference else {}),
             **({3: partial(layer, overlap)} if overlap else {})}
    found, ended_by = compare_in_turns(sides, limits, subject.seed, grid.comm)
    checks = subject.check_step(last.pop(), reference)
    hidden = np.nan
    if overlap:
        hidden_time.set_overlap(subject.model, overlap)
        hidden = hidden_time.hidden_share(grid, subject.step, 3)
    times = np.full((len(found[0]), len(KINDS), grid.comm.size, 2), np.nan)
    for kind, samples in found.items():
        times[:, kind] = [one.times for one in samples]
    return times, hidden, ended_by, checks
