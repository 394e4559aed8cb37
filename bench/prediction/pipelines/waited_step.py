"""Predict a training step as this library takes it, in every product and elementwise pass.

The pipeline is predicted as any (`pipeline_seconds`).  The optimizer, here not one fused kernel
but the passes of `mm3d.AdamW`, is run dry.  Every micro-batch is priced as one that adds to
gradients; the first writes them, which takes less: 0.04 % of a step at most.
"""

from functools import partial

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.prediction.machine_model import Machine, check_machine, load_machine, missing_rate
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import predict_pipeline
from bench.prediction.pipelines.training_step import tied_seconds
from bench.prediction.seconds import work_seconds
from mm3d.config import Config
from mm3d.tracing import dry_run
from mm3d.tracing.trace import Trace
from mm3d.training.gpt import GPT
from mm3d.training.optimizers import AdamW

PARTS = ("actions", "sums", "tied", "optimizer")    # of a step
OPTIMIZER = "optimizer"


def predict_waited(config: Config, ranks: int, machine: Machine) -> dict[str, float]:
    """Predict the seconds of a step by `PARTS`; they add up to the step."""
    model = PipelineModel.of(config, ranks)
    found = predict_pipeline(model, machine)
    actions = float(found.timeline.makespan)
    last = model.ranks - model.places    # a rank of the last stage
    changing = max(_optimizer_seconds(config, ranks, rank, machine) for rank in {0, last})
    return {"actions": actions, "sums": float(found.seconds) - actions,
            "tied": tied_seconds(model, machine), "optimizer": changing}


def _optimizer_seconds(config: Config, ranks: int, rank: int, machine: Machine) -> float:
    """Predict the seconds in which a rank changes its parameters."""
    def step(model: GPT, trace: Trace) -> None:
        optimizer = AdamW(model, 1e-3)
        model.refresh = lambda: None    # which the sums of a pipeline have
        trace.begin_phase(OPTIMIZER)
        optimizer.step()
    trace = dry_run.trace(lambda comm, backend: GPT(config.on(backend), comm), ranks, rank,
                          machine.elementwise_block, step)
    return trace.work(partial(work_seconds, machine), OPTIMIZER)


def find_machine(name: str | None, ranks: int) -> tuple[Machine | None, str]:
    """Return the machine that predicts rows of so many ranks; or None and why there is none.

    Raises UsageError when it cannot be read.
    """
    if not name:
        return None, "no machine given"
    machine = load_machine(name)
    try:
        check_machine(machine, name, ranks, "", Cluster.from_environment())
    except UsageError as error:
        return None, str(error).partition(": ")[0]
    reason = missing_rate(machine, "float32")
    return (None, reason) if reason else (machine, "")
