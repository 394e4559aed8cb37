"""A training: its speed, and its losses by step, beside PyTorch's if it trained too."""

import math

import numpy as np

from bench.document import Column, Notes, Part, make_table
from bench.records.kinds import Derived, each
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import CROWDED, counted, equal_rate_notes, first_grid

SCHEMAS = {
    "training": {
        "verified": True,
        "positive": "expected_peak_bytes step_seconds tokens_per_second torch_step_seconds",
        "empty": "step validated",
        "environment": "ranks cores oversubscribed blas blas_architecture",
        "settings": (
            "batch began clip data dropout dtype ended_by grid heads hidden layers lr "
            "microbatches momentum optimizer recompute schedule scheme seq shards skipped_steps "
            "stage_grids stages steps text tied transport validate_every validation_batches "
            "warmup weight_decay zero"),
        "needs": {
            "torch": "torch_loss torch_step_seconds torch_validation_loss",
            "torch_validation_loss": "torch",
            "entropy": ("dropped_share experts_count experts_top experts_gate experts_balance "
                        "experts_convention")},
        "variables": {
            "expected_peak_bytes": "rank", "learning_rate": "step", "loss": "step",
            "peak_bytes": "rank", "step_seconds": "step", "validation_loss": "validated"},
        "optional": {
            "dropped_share": "step", "entropy": "step", "torch_loss": "step",
            "torch_step_seconds": "step", "torch_validation_loss": "validated"},
        "derived": {"tokens_per_second": ""}}}

ROWS = 12    # validations in a table


def derive(record: Measurements) -> Derived:
    """Return the tokens per second of this run."""
    chosen, steps = record.configuration, np.array(record.scales["step"], int)
    # Steps before this run began may be from another machine.
    seconds = record.raw["step_seconds"].values[steps >= int(chosen["began"])]
    speed = tokens_per_second(int(chosen["batch"]) * int(chosen["seq"]), seconds)
    return {"tokens_per_second": (speed, "s-1")}


def tokens_per_second(tokens: int, seconds: np.ndarray) -> float:
    """Compute tokens per second from the median step, without the first of several, or NaN."""
    counted = seconds[1:] if len(seconds) > 1 else seconds
    return tokens / float(np.median(counted)) if len(counted) else np.nan


@each
def tables(record: Measurements) -> list[Part]:
    """Make the table of losses, of at most `ROWS` validations."""
    places = list_places(record, "validated")
    shown = {*np.linspace(0, len(places) - 1, min(ROWS, len(places))).round().astype(int)}
    beside = "torch_validation_loss" in record.variables
    return [make_table("Training", COLUMNS + BESIDE * beside, [places[n] for n in sorted(shown)]),
            Notes("About this training:", _notes(record))]


def _training_loss(at: Place) -> float:
    """Return the mean of the last 10 steps; NaN before the first."""
    steps, step = np.array(at.record.scales["step"]), at["validated"]
    recent = at("loss")[(steps >= step - 10) & (steps < step)]
    return recent.mean() if len(recent) else math.nan


COLUMNS = [
    Column("steps", of=lambda at: at["validated"]),
    Column("training", "loss", of=_training_loss, form=".4f"),
    Column("validation", "loss", of=lambda at: at("validation_loss"), form=".4f"),
    Column("bits a byte", of=lambda at: at("validation_loss") / math.log(2), form=".3f")]
BESIDE = [
    Column("PyTorch's", "validation loss", of=lambda at: at("torch_validation_loss"), form=".4f"),
    Column("difference", of=lambda at: at("validation_loss") - at("torch_validation_loss"),
           form="+.4f")]


def _notes(record: Measurements) -> list[str]:
    chosen, env = record.configuration, record.environment
    tokens = int(chosen["batch"]) * int(chosen["seq"])
    speed, began = record.values("tokens_per_second"), chosen["began"]
    checked = [f"{check.quantity} to {check.error:.1g} (at most {check.tolerance:g})"
               for check in record.checks
               if check.quantity == "loss" or check.quantity.startswith("gradient")]
    notes = [
        f"{counted(chosen['layers'], 'layer')}, hidden {chosen['hidden']}, "
        f"{counted(chosen['heads'], 'head')}; batches of {chosen['batch']} x {chosen['seq']} "
        f"bytes of {chosen['text']}; {chosen['optimizer']}, {chosen['dtype']}, dropout "
        f"{chosen['dropout']:g}.",
        f"{env['ranks']} ranks on {env['cores']} cores: data {chosen['data']}, ZeRO "
        f"{chosen['zero']}, {counted(chosen['stages'], 'stage')} ({chosen['schedule']}, "
        f"{chosen['microbatches']} micro-batch{'es' * (chosen['microbatches'] > 1)}), "
        f"{chosen['scheme']} on {first_grid(chosen)}.",
        "No step was trained in this run." if np.isnan(speed) else
        f"{speed:.0f} tokens a second{f' from step {began}, where this run began' * (began > 0)}: "
        f"tokens of a step over its median seconds, of the slowest rank, forward to optimizer; "
        f"validation, checkpoints and verification are not timed.",
        "Training loss: mean of the last 10 steps, each before its step. Validation loss: mean "
        f"over up to {chosen['validation_batches']} batches of the held-out end of the text.",
        f"Verified before the first step: {', '.join(checked)}, relative to a model in "
        f"NumPy alone, float64."]
    if env["oversubscribed"]:
        notes.append(CROWDED)
    if "peak_bytes" in record.variables and not np.isnan(speed):
        notes.append(_memory(record))
    if chosen.get("skipped_steps"):
        notes.append(f"{chosen['skipped_steps']} steps changed nothing, as gradients overflowed "
                     f"{chosen['dtype']}; the scale of the loss was halved.")
    if "torch" in chosen:
        seconds = record.values("torch_step_seconds")
        notes.append(f"{chosen['torch']}, one process, trained afterwards from the same "
                     f"parameters on the same batches: {tokens_per_second(tokens, seconds):,.0f} "
                     f"tokens a second.")
        if not np.isnan(speed):
            other = tokens / tokens_per_second(tokens, seconds)
            notes += equal_rate_notes(record, {"PyTorch": (other, other * speed / tokens)})
    if "entropy" in record.variables:
        notes.append(_experts(record))
    if chosen["ended_by"] != "steps":
        notes.append(f"STOPPED EARLY ({chosen['ended_by']}): "
                     f"{max(record.scales['step'], default=-1) + 1} of {chosen['steps']} steps.")
    return notes


def _memory(record: Measurements) -> str:
    peaks, expected = (record.values(name) for name in (
        "peak_bytes", "expected_peak_bytes"))
    rank = int(np.argmax(peaks))
    beside = ("" if math.isnan(expected[rank]) else
              f", {peaks[rank] / expected[rank]:.2f} of the expected "
              f"{expected[rank] / 2 ** 20:.1f}")
    return (f"Arrays of the fullest rank, {rank}: {peaks[rank] / 2 ** 20:.1f} MiB at the peak of "
            f"a step{beside}.")


def _experts(record: Measurements) -> str:
    chosen = record.configuration
    entropy, dropped = (record.values(name)[-1] for name in (
        "entropy", "dropped_share"))
    return (f"{chosen['experts_count']} experts, top {chosen['experts_top']}, gate "
            f"{chosen['experts_gate']}, balance {chosen['experts_balance']:g}, convention "
            f"{chosen['experts_convention']}: in the last step "
            f"{100 * dropped:.1f} % of the choices were dropped, and the entropy of the experts' "
            f"shares was at least {entropy:.3f} of that of equal ones in every layer. The "
            f"training loss has the routers' losses in it, the validation loss has not.")
