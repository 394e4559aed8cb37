"""Steps of training a GPT on one GPU: beside PyTorch's, and beside those predicted before."""

from typing import Sequence

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import gpu
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import describe_machine

SCHEMAS = {"gpu-step": {
    "positive": "token_rate samples seconds",
    "variables": {"samples": "mode library repetition", "token_rate": "mode library"},
    "optional": {"peak": "mode", "predicted": "mode kernels", "predicted_peak": "mode"},
    "needs": {"predicted": "peak predicted_peak predicted_by hidden"},
    "labels": {"kernels": [["own", "fused"]], "library": [["mm3d", "PyTorch"]]},
    "derived": {"seconds": "mode library bound"}}}
GIB = 2 ** 30

derive = gpu.derive


def tables(records: Sequence[Measurements]) -> list[Part]:
    """Make the table of all steps, and of those that were predicted before."""
    rows = [at for record in records for at in list_places(record, "mode")]
    found: list[Part] = [make_table("Steps of training on one GPU: seconds", COLUMNS, rows)]
    foretold = [at for at in rows if "predicted" in at.record.variables]
    if foretold:
        found.append(make_table("Predicted before: seconds of a step, and GiB of arrays",
                                PREDICTED, foretold))
    machines = dict.fromkeys(map(describe_machine, records))
    models = dict.fromkeys(str(at.record.configuration.get("predicted_by")) for at in foretold)
    notes = [
        "Forward, backward and AdamW of all layers, embedding, head and loss, on the same tokens "
        "in turns; 16 bits with masters of 32. Medians, and 95 % intervals.",
        *([f"Predicted by the model of {', '.join(models)}: own is for this library's kernels, "
           "fused for one kernel a layer. GiB are the most that mm3d's arrays have at a time, "
           "measured with what cuBLAS and cuDNN work in, and predicted without."]
          * bool(foretold)),
        *(f"{one}." for one in machines)]
    return [*found, Notes("About steps:", notes)]


def _model(at: Place) -> str:
    """Name the sizes of a model; earlier records have the scale's."""
    found = at.record.configuration
    if "hidden" not in found:
        return f"scale {found['scale']}"
    return (f"{found['layers']} x {found['hidden']}, {found['vocab']} tokens, "
            f"{found['batch']} x {found['seq']}")


def _median(at: Place, side: int) -> float:
    return float(np.asarray(at("seconds"))[side, 0])


def _off(at: Place, kernels: int) -> float:
    """Return by how much of what was measured a prediction of the side with its kernels is off."""
    measured = _median(at, kernels)
    return (float(np.asarray(at("predicted"))[kernels]) - measured) / measured


MODEL = [Column("layers x features, vocabulary, batch", of=_model),
         Column("mode", of=lambda at: str(at["mode"]))]
COLUMNS = [
    *MODEL,
    *spread(lambda at: at("seconds")[0], ".4g", "mm3d"),
    *spread(lambda at: at("seconds")[1], ".4g", "PyTorch"),
    Column("PyTorch's", "over mm3d's", of=lambda at: _median(at, 1) / _median(at, 0), form=".2f")]
PREDICTED = [
    *MODEL,
    Column("mm3d", of=lambda at: _median(at, 0)),
    Column("own", of=lambda at: float(at("predicted")[0])),
    Column("is", of=lambda at: _off(at, 0), form="+.0%"),
    Column("PyTorch", of=lambda at: _median(at, 1)),
    Column("fused", of=lambda at: float(at("predicted")[1])),
    Column("is", of=lambda at: _off(at, 1), form="+.0%"),
    Column("GiB", of=lambda at: float(at("peak")) / GIB, form=".2f"),
    Column("predicted", of=lambda at: float(at("predicted_peak")) / GIB, form=".2f"),
    Column("is", of=lambda at: float(at("predicted_peak")) / float(at("peak")) - 1, form="+.1%")]
