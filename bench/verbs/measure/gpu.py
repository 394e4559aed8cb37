"""Measure one GPU: products, kernels, a layer, a training step, and a rank's part of each row."""

import argparse
from functools import partial

from bench.command_line import measuring, model_options, options
from bench.command_line.config_options import add_fields, told
from bench.command_line.publish import publisher
from bench.errors import UsageError
from bench.experiments.gpu.gpu_cases import SCALES
from bench.experiments.gpu.parts import GPU_PARTS, GpuBenchmark, TrainedGPT, measure_part
from bench.prediction.machine_model import load_machine
from bench.prediction.model_file import load_model
from bench.prediction.pipelines.training_step import predict_gpu_step
from mm3d.config import Model

ON_ALL_RANKS = True
OF_MODEL = "layers", "seq", "batch"    # options of --model
OF_STEP = "model", "machine"
BATCH = 8    # sequences of a step of a model, by default


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure gpu``."""
    measuring.add_measurement(parser, 10, 5.0)
    parser.add_argument("--part", type=options.some_of(*GPU_PARTS), default=list(GPU_PARTS),
                        metavar="NAMES",
                        help=f"measure these parts, separated by commas: {', '.join(GPU_PARTS)} "
                             f"(default: all)")
    parser.add_argument("--mode", type=lambda text: text.split(","), default=[], metavar="NAMES",
                        help="measure in these modes alone, of float32, tf32, float16 and "
                             "bfloat16; a step in float32 and bfloat16 (default: all)")
    parser.add_argument("--graph", action="store_true", help=(
        "measure the layer also as a CUDA graph, whose kernels are launched at once"))
    model_options.add_named(parser)
    said = dict.fromkeys(OF_MODEL, ": that of --model") | {"batch": f": {BATCH} with --model"}
    add_fields(parser, Model, OF_MODEL, told(Model, OF_MODEL, **said))
    parser.add_argument("--machine", metavar="NAME", help=(
        "predict the step before it is taken, on a GPU of this machine, such as dgx-h100: seconds "
        "by this library's kernels and by fused ones, and memory (default: predict nothing)"))
    parser.add_argument("--scale", default="paper", choices=("paper", "tiny"),
                        help="sizes: those of the paper, or tiny for a rehearsal (default paper)")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write the chosen parts on one rank; return the exit status."""
    for part, names in {"layer": ["graph"], "step": OF_STEP}.items():
        if part not in arguments.part:
            options.refuse(arguments, names, f"it is of --part {part}, and would do nothing for "
                                             f"{','.join(arguments.part)}")
    backend = measuring.one_rank_backend("measure gpu", arguments.backend or "cupy", comm)
    limits = measuring.limits_of(arguments)
    benchmark = GpuBenchmark(backend, arguments.scale, arguments.graph, limits, arguments.seed,
                             arguments.mode, _trained(arguments))
    publish = publisher(arguments, comm)
    return max([publish(f"gpu-{part}", partial(measure_part, benchmark, part))
                for part in arguments.part])


def _trained(arguments: argparse.Namespace) -> TrainedGPT:
    """Return the GPT of the part ``step``, and how its step is predicted."""
    gpt, machine = SCALES[arguments.scale].gpt, arguments.machine
    if arguments.model is None:
        options.refuse(arguments, OF_MODEL, "give --model too, such as --model gpt2")
    else:
        found = load_model(arguments.model, layers=arguments.layers, seq=arguments.seq)
        if found.experts is not None:
            raise UsageError(f"--model {arguments.model} has experts, which are not trained here: "
                             f"gpt2-xl or llama-3-8b would do")
        gpt = {name: getattr(found, name) for name in (
            "layers", "hidden", "heads", "seq", "vocab", "tied", "architecture")}
        gpt["batch"] = arguments.batch or BATCH
    if machine is None:
        return TrainedGPT(gpt)
    return TrainedGPT(gpt, lambda model, dtype: predict_gpu_step(model, dtype, machine),
                      load_machine(machine).name)
