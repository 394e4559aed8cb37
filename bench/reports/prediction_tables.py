"""Make tables of the paper's rows as a fitted machine model predicts them."""

import numpy as np

from bench.cases.paper import HEADINGS, TITLES
from bench.document import Column, Notes, Table, number_cell
from bench.prediction.published.paper_fit import (FITTED_FIGURES, Outcome, prediction_error,
                                                  predict_row)

UNEXPLAINED = 0.35    # error beyond which a row counts as not explained by the model
RATE_UNITS = {"gemm": "Tflop/s", "node": "GB/s a rank", "network": "GB/s a node"}


def prediction_table(outcome: Outcome, name: str) -> Table:
    """Make the table `name` of the paper, published and predicted, with the error of each row."""
    rows = []
    for k, row in enumerate(outcome.rows):
        published = row.case.row
        if published.table != name:
            continue
        forward, backward = predict_row(row, outcome.fit, outcome.machine)
        times = (published.forward, forward, published.backward, backward, published.recomputed,
                 (forward + backward) / published.batch)
        off, alone = prediction_error(row, outcome.fit, outcome.machine), outcome.left_out[k]
        rows.append([TITLES[published.scheme], published.gpus,
                     *(number_cell(seconds, ".3f") for seconds in times),
                     number_cell(row.peak / 2**30, ".1f"), number_cell(off, "+.0%"),
                     "fitted" if k in outcome.chosen else "not fitted",
                     number_cell(alone, "+.0%")])
    times = [Column(kind, group=f"{phase} s") for phase in ("forward", "backward", "average")
             for kind in ("published", "predicted")]
    return Table(f"{HEADINGS[name]}, on the model of {outcome.machine.name}", [
        Column("scheme"), Column("GPUs"), *times, Column("GiB"), Column("error"),
        Column("row is", align="<"), Column("error when", "left out")], rows)


def prediction_remarks(outcome: Outcome) -> list[Notes]:
    """State the fit, the errors of predictions, and the rows that the model does not explain."""
    fit, machine = outcome.fit, outcome.machine
    again = ", ".join(TITLES[s] for s, on in fit.recompute.items() if on) or "no scheme"
    full = {"gemm": machine.gemm_rate["float32"] / 1e12,
            "node": machine.node.bytes_per_second / 1e9,
            "network": machine.network.bytes_per_second / 1e9}
    fitted = [f"layers {fit.layers}; backward repeats the forward in {again}",
              "with other numbers of layers: "
              + ", ".join(f"{n} {r:.3f}" for n, r in outcome.by_layers.items())
              + "; rates make up for layers, so the times hardly tell"]
    for name in FITTED_FIGURES:
        part = getattr(fit.achieved, name)
        fitted.append(f"{name}: {part:.1%} of {full[name]:g} {RATE_UNITS[name]}, "
                      f"{part * full[name]:.3g}")
    return [Notes(f"Fitted on {len(outcome.chosen)} of {len(outcome.rows)} rows, forward and "
                  f"backward (mean absolute logarithm of predicted over published "
                  f"{fit.residual:.3f}):", fitted), Notes("Remarks", _errors(outcome))]


def _errors(outcome: Outcome) -> list[str]:
    """State memory, and the errors of rows that were and were not fitted."""
    machine = outcome.machine
    full = sum(row.peak > machine.memory_bytes for row in outcome.rows)
    wrong = [f"{row.case.title} ({off:+.0%})" for row, off in zip(outcome.rows, outcome.left_out)
             if abs(off) > UNEXPLAINED]
    return [f"Machine: {machine.described}.",
            f"GiB is rank 0's peak with 24 layers and nothing repeated: {full} rows need more "
            f"than a rank's {machine.memory_bytes / 2**30:.0f}.",
            f"Mean absolute error of the average step time: {outcome.mean(True):.0%} on the "
            f"fitted rows, {outcome.mean(False):.0%} on the others, "
            f"{np.mean(np.abs(outcome.left_out)):.0%} when each row is left out of the fit "
            f"(the form of the model was chosen with all rows in view).",
            f"Rows that the model does not explain (more than {UNEXPLAINED:.0%} off when left "
            f"out): " + (", ".join(wrong) or "none")]
