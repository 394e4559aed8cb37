"""Pipelines for tests, and the model on one stage that they must be equal to."""
import time
from contextlib import contextmanager

import numpy as np

import mm3d
from mm3d.training.schedules import parse_schedule
from models import passes

SIZES = dict(layers=4, hidden=12, heads=2, batch=8, seq=3)
M = 4    # micro-batches

# B and W at once, two chunks a rank in the shape of a V: the turn and both ends stay on a rank.
VEE = {1: parse_schedule("0 1: F0.0 F1.0 F0.1 BW1.0 BW0.0 F1.1 BW1.1 BW0.1 F0.2 F1.2 BW1.2 BW0.2 "
                         "F0.3 F1.3 BW1.3 BW0.3\n"),
       2: parse_schedule(
           "0 3: F0.0 F0.1 F1.0 BW1.0 F1.1 BW0.0 BW1.1 BW0.1 F0.2 F1.2 BW1.2 F0.3 F1.3 BW0.2 "
           "BW1.3 BW0.3\n"
           "1 2: F0.0 F1.0 F0.1 F1.1 BW1.0 BW0.0 BW1.1 BW0.1 F0.2 F1.2 BW1.2 BW0.2 F0.3 F1.3 "
           "BW1.3 BW0.3\n")}


def delayed(seed: int, longest: float = 1e-3):
    """A context that begins each action late, by a time that is another on each rank."""
    random = np.random.default_rng(seed)

    @contextmanager
    def around(action):
        time.sleep(longest * random.random())
        yield
    return around


def run_pipeline(pipeline: mm3d.Pipeline) -> dict[str, np.ndarray]:
    """This rank's blocks of outputs, input gradients and gradients after one step."""
    found, model = {}, pipeline.chunks[0]

    def output_gradient(micro, y):
        found[f"y{micro}"] = np.array(model.grid.backend.to_host(y))
        return model.random(f"d{micro}")

    def input_gradient(micro, dx):
        found[f"dx{micro}"] = np.array(model.grid.backend.to_host(dx))
    pipeline.zero_gradients()
    pipeline.step(lambda micro: model.random(f"{micro}"), output_gradient, input_gradient)
    return found | {p.name: np.array(model.grid.backend.to_host(p.grad))
                    for p in pipeline.parameters}


def run_one_stage(scheme: mm3d.Scheme, sizes=SIZES, microbatches=M,
                  **options) -> dict[str, np.ndarray]:
    """The same of the whole model on the ranks of `scheme`, micro-batch by micro-batch."""
    sizes = sizes | {"batch": sizes["batch"] // microbatches}
    return passes(mm3d.Transformer(scheme, **sizes, **options), " ".join(
        f"F{micro} D{micro}" for micro in range(microbatches)))


def differing(found, expected) -> list[str]:
    """Names of the arrays that are not equal to the bit."""
    return [name for name, a in found.items() if not np.array_equal(a, expected[name])]
