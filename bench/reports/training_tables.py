"""Make the tables of a training, of trainings on several meshes, and of a training step."""

import math

import numpy as np

from bench.records.kinds.training import tokens_per_second
from bench.records.kinds.training_meshes import ROUTED
from bench.records.measurements import Measurements
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell
from bench.reports.layer_table import equal_rate_notes

ROWS = 12    # validations in a table
ROUNDED = (" That is 4 times the difference of one rank to float64 from the same parameters; of "
           "the loss at least 4 times what is usual in one step.")


def training_parts(record: Measurements) -> list[Part]:
    """Make the table of a training: losses by step, beside PyTorch's if it trained too."""
    found = {name: variable.values for name, variable in record.variables.items()}
    validated, steps = list(record.scales["validated"]), np.array(record.scales["step"])
    beside = "torch_validation_loss" in found
    columns = [Column("steps"), Column("training", "loss"), Column("validation", "loss"),
               Column("bits a byte", "")]
    columns += [Column("PyTorch's", "validation loss"), Column("difference")] * beside
    shown = {*np.linspace(0, len(validated) - 1, min(ROWS, len(validated))).round().astype(int)}
    rows: Rows = []
    for n in sorted(shown):
        step, loss = validated[n], found["validation_loss"][n]
        recent = found["loss"][(steps >= step - 10) & (steps < step)]
        row = [step, number_cell(recent.mean() if len(recent) else math.nan, ".4f"),
               number_cell(loss, ".4f"), number_cell(loss / math.log(2), ".3f")]
        if beside:
            other = found["torch_validation_loss"][n]
            row += [number_cell(other, ".4f"), number_cell(loss - other, "+.4f")]
        rows.append(row)
    return [Table("Training", columns, rows), Notes("About this training:", _notes(record))]


def _notes(record: Measurements) -> list[str]:
    chosen, env = record.configuration, record.environment
    tokens = int(chosen["batch"]) * int(chosen["seq"])
    speed, began = record.variables["tokens_per_second"].values, chosen["began"]
    notes = [
        f"{chosen['layers']} layers, hidden {chosen['hidden']}, {chosen['heads']} heads; batches "
        f"of {chosen['batch']} x {chosen['seq']} bytes of {chosen['text']}; "
        f"{chosen['optimizer']}, {chosen['dtype']}, dropout {chosen['dropout']:g}.",
        f"{env['ranks']} ranks on {env['cores']} cores: data {chosen['data']}, ZeRO "
        f"{chosen['zero']}, {chosen['stages']} stages ({chosen['schedule']}, "
        f"{chosen['microbatches']} micro-batches), {chosen['scheme']} on "
        f"{str(chosen['stage_grids']).partition(';')[0]}.",
        "No step was trained in this run." if np.isnan(speed) else
        f"{speed:.0f} tokens a second{f' from step {began}, where this run began' * (began > 0)}: "
        f"tokens of a step over its median seconds, of the slowest rank, forward to optimizer; "
        f"validation, checkpoints and verification are not timed.",
        "Training loss: mean of the last 10 steps, each before its step. Validation loss: mean "
        f"over up to {chosen['validation_batches']} batches of the held-out end of the text.",
        f"Verified before the first step: {', '.join(_checked(record))}, relative to a model in "
        f"NumPy alone, float64."]
    if env["oversubscribed"]:
        notes.append("RANKS OUTNUMBER CORES: they take turns, and times say nothing about speed.")
    if "peak_bytes" in record.variables and not np.isnan(speed):
        notes.append(_memory(record))
    if chosen.get("skipped_steps"):
        notes.append(f"{chosen['skipped_steps']} steps changed nothing, as gradients overflowed "
                     f"{chosen['dtype']}; the scale of the loss was halved.")
    if "torch" in chosen:
        seconds = record.variables["torch_step_seconds"].values
        notes.append(f"{chosen['torch']}, one process, trained afterwards from the same "
                     f"parameters on the same batches: {tokens_per_second(tokens, seconds):,.0f} "
                     f"tokens a second.")
        own, other = (tokens / tokens_per_second(tokens, each) for each in (
            record.variables["step_seconds"].values, seconds))
        notes += equal_rate_notes(record, {"PyTorch": (other, own)})
    if "entropy" in record.variables:
        notes.append(_experts(record))
    if chosen["ended_by"] != "steps":
        notes.append(f"STOPPED EARLY ({chosen['ended_by']}): "
                     f"{max(record.scales['step'], default=-1) + 1} of {chosen['steps']} steps.")
    return notes


def _memory(record: Measurements) -> str:
    """Say what the ranks held at the peak of a step, beside what was expected."""
    peaks, expected = (record.variables[name].values for name in (
        "peak_bytes", "expected_peak_bytes"))
    rank = int(np.argmax(peaks))
    beside = ("" if math.isnan(expected[rank]) else
              f", {peaks[rank] / expected[rank]:.2f} of the expected "
              f"{expected[rank] / 2 ** 20:.1f}")
    return (f"Arrays of the fullest rank, {rank}: {peaks[rank] / 2 ** 20:.1f} MiB at the peak of "
            f"a step{beside}.")


def _experts(record: Measurements) -> str:
    """Say how the experts were used in the last step."""
    chosen = record.configuration
    entropy, dropped = (record.variables[name].values[-1] for name in (
        "entropy", "dropped_share"))
    return (f"{chosen['experts_count']} experts, top {chosen['experts_top']}, gate "
            f"{chosen['experts_gate']}, balance {chosen['experts_balance']:g}, convention "
            f"{chosen['experts_convention']}: in the last step "
            f"{100 * dropped:.1f} % of the choices were dropped, and the entropy of the experts' "
            f"shares was at least {entropy:.3f} of that of equal ones in every layer. The "
            f"training loss has the routers' losses in it, the validation loss has not.")


def _checked(record: Measurements) -> list[str]:
    return [f"{check.quantity} to {check.error:.1g} (at most {check.tolerance:g})"
            for check in record.checks
            if check.quantity == "loss" or check.quantity.startswith("gradient")]


def meshes_parts(record: Measurements) -> list[Part]:
    """Make the table of meshes: the largest differences to one rank, and equality of bits."""
    found = {name: variable.values for name, variable in record.variables.items()}
    group = "largest relative difference to one rank"
    routed = [name for name in ROUTED if f"{name}_difference" in found]
    columns = [Column("mesh"), Column("ranks"),
               *(Column(name, "", group) for name in ("loss", "gradients", "weights")),
               *(Column(name, "", "pairs of other experts") for name in routed),
               Column("bits"), Column("equal to", align="<")]
    references = str(record.configuration["equal_to"]).split("; ")
    rows: Rows = []
    for n, mesh in enumerate(record.scales["mesh"]):
        bits, own = found["bitwise"][n], references[n] == mesh
        rows.append([mesh, int(found["ranks"][n]),
                     *(number_cell(found[f"{name}_difference"][n], ".1e")
                       for name in ("loss", "gradients", "weights")),
                     *(int(found[f"{name}_difference"][n]) for name in routed),
                     "" if own else "equal" if bits == 1 else "DIFFERENT",
                     "" if own else references[n]])
    chosen, bounds = record.configuration, allowed_differences(record)
    return [Table("The same training on several meshes", columns, rows), Notes("About these:", [
        f"{chosen['steps']} steps of {chosen['optimizer']} (lr {chosen['lr']:g}), "
        f"{chosen['dtype']}: {chosen['layers']} layers, hidden {chosen['hidden']}, "
        f"{chosen['heads']} heads, batches of {chosen['batch']} x {chosen['seq']} bytes of "
        f"{chosen['text']}, dropout {chosen['dropout']:g}.",
        "Loss: of any step. Gradients: of the last step, weights: after it; of the array that "
        "differs most, relative in the Frobenius norm. At most "
        f"{bounds['loss']:.2g}, {bounds['gradients']:.2g} and {bounds['weights']:.2g} pass."
        + ROUNDED * any(check.quantity.startswith("rounding: ") for check in record.checks),
        "Bits: losses, gradients and weights must be equal to the bit where only stages, "
        "schedule, ZeRO or recomputation are different, since these change the order of no "
        "sum; but with several micro-batches ZeRO 2 and 3 sum in another order than 0 and 1, and "
        "are equal to each other.", *_routed_alike(record)])]


def _routed_alike(record: Measurements) -> list[str]:
    """Say what meshes with experts are compared with; nothing for a model without."""
    chosen = record.configuration
    if "dropped_share" not in record.variables:
        return []
    dropped = 100 * record.variables["dropped_share"].values
    return [f"{chosen['experts_count']} experts, top {chosen['experts_top']}, gate "
            f"{chosen['experts_gate']}, convention {chosen['experts_convention']}: "
            f"{dropped.min():.1f} to {dropped.max():.1f} % of the pairs of a token and a choice "
            f"were dropped. Tokens are routed together that belong to one micro-batch, so a mesh "
            f"is compared with one rank that has as many micro-batches. Chosen and dropped: how "
            f"many pairs of all steps and layers other experts got, or dropped, than there; none "
            f"pass."]


def allowed_differences(record: Measurements) -> dict[str, float]:
    """Return the largest differences that pass, of loss, gradients and weights, by their names."""
    return {check.quantity.partition(" ")[0]: check.tolerance for check in record.checks
            if " of " in check.quantity and not check.quantity.startswith("bits ")}


def step_parts(record: Measurements) -> list[Part]:
    """Make the tables: the speed of each side, and where the own time goes."""
    found = {name: variable.values for name, variable in record.variables.items()}
    columns = [Column("side", align="<"), Column("step", "(s)"),
               *(Column(name, "", "tokens a second") for name in ("median", "low", "high")),
               *(Column(name, "", "mm3d is so many times as fast")
                 for name in ("median", "low", "high"))]
    rows: Rows = []
    for n, side in enumerate(record.scales["side"]):
        ratio = found["ratio"][n, :3] if n else [np.nan] * 3
        rows.append([side, number_cell(found["seconds"][n, 0], ".3f"),
                     *(number_cell(value, ".0f") for value in found["tokens_per_second"][n, :3]),
                     *(number_cell(value, ".2f") for value in ratio)])
    return [Table("A training step", columns, rows),
            _where_time_goes(record, found["part_seconds"]),
            Notes("About this step:", _step_notes(record))]


def _where_time_goes(record: Measurements, seconds: np.ndarray) -> Table:
    """Make the table of the own parts, from seconds (rank, traced, part)."""
    medians = np.median(seconds, axis=1)
    whole = np.median(seconds.sum(axis=2), axis=1)
    columns = [Column("part of mm3d's step", align="<"), Column("mean (s)", "", "of the ranks"),
               Column("most (s)", "", "of the ranks"), Column("share")]
    rows: Rows = [[name, number_cell(medians[:, n].mean(), ".3f"),
                   number_cell(medians[:, n].max(), ".3f"),
                   number_cell(medians[:, n].mean() / whole.mean(), ".2f")]
                  for n, name in enumerate(record.scales["part"])]
    return Table("Where the time goes", columns, rows)


def _step_notes(record: Measurements) -> list[str]:
    chosen, env = record.configuration, record.environment
    worst = max(check.share for check in record.checks)
    notes = [
        f"{chosen['layers']} layers, hidden {chosen['hidden']}, {chosen['heads']} heads, "
        f"vocabulary {chosen['vocab']}, tied; a batch of {chosen['batch']} x {chosen['seq']} "
        f"random tokens; AdamW, {chosen['dtype']}. {len(record.scales['repetition'])} "
        f"repetitions, ended by {chosen['ended_by']}.",
        f"mm3d: {chosen['mesh'] or chosen['scheme']}, grid "
        f"{str(chosen['stage_grids']).partition(';')[0]}, transport {chosen['transport']}; "
        f"{env['ranks']} ranks on {env['cores']} cores, {env['blas']} "
        f"{env['blas_architecture']}.",
        "A step is forward, backward and optimizer, from the first rank's begin to the last "
        "one's end; the sides take turns in random order, asleep while another works.",
        f"Verified before: mm3d's loss and gradient by a model in NumPy, float64; the losses of "
        f"the first steps and the norm of the first gradient on all sides, and the losses after "
        f"the last repetition; errors at most {100 * worst:.2g} % of the tolerance.",
        "Parts are of other steps, in which each product and each collective within a stage's "
        "grid is timed. Rest: elementwise work, Python, and what moves between stages and "
        "replicas."]
    if chosen["torch"] != "none":
        notes.append(f"Beside: {chosen['torch']}.")
        seconds = record.variables["seconds"].values[:, 0]
        notes += equal_rate_notes(record, {str(side): (seconds[n], seconds[0]) for n, side
                                           in enumerate(record.scales["side"]) if n})
    if env["oversubscribed"]:
        notes.append("RANKS OUTNUMBER CORES: they take turns, and times say nothing about speed.")
    return notes
