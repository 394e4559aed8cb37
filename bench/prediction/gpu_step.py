"""Predict a training step on one GPU: by this library's kernels, and by fused ones."""

from dataclasses import replace

from msgspec.structs import replace as changed

from bench.prediction.machine_model import load_machine
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.training_step import predict_step
from mm3d.config import Config, Division, Model

KERNELS = ("own", "fused")    # of `Machine.kernels`


def predict_gpu_step(model: Model, dtype: str, name: str) -> tuple[dict[str, float], int]:
    """Predict a step of training a model in a dtype, by AdamW, on one GPU of a machine.

    Returns
    -------
    dict of str to float
        Seconds of a step, by `KERNELS`.
    int
        The most bytes of arrays at a time, AdamW's among them, in a dry run of this library.

    Raises
    ------
    UsageError
        When there is no such machine, or it has no rate for the dtype.
    """
    machine = load_machine(name, dtype)
    whole = PipelineModel.of(Config(replace(model, dtype=dtype), Division(scheme="serial")), 1)
    seconds = {kernels: predict_step(whole, changed(machine, kernels=kernels)).seconds
               for kernels in KERNELS}
    return seconds, int(whole.whole_step(0, 0, optimizer=True).peak)
