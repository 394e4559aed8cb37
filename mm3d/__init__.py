"""mm3d: 3-D tensor parallelism on arrays and MPI, and the parallelisms it is compared with.

>>> import mm3d
>>> scheme = mm3d.scheme("3d", comm, grid=(2, 2, 2))
>>> model = mm3d.Transformer(scheme, layers=2, hidden=48, heads=4, batch=8, seq=16)
>>> y, saved = model.forward(model.shard(X))
>>> dx = model.backward(dy, saved)
"""

from importlib import import_module
from typing import Any

from mm3d import blas_kernels, console, launcher, mpi_start

console.open_closed_streams()    # before anything else takes their numbers
mpi_start.leave_job()         # before the launcher's variables are read
blas_kernels.set_default()    # before NumPy and MPI start, which read the environment once
launcher.set_defaults()

from mm3d.arrays import cupy_backend  # noqa: E402

# Before MPI starts: an MPI that finds no device context treats device memory as host memory.
cupy_backend.create_device_context()

mpi_start.import_mpi()

from mm3d import guard  # noqa: E402
from mm3d.grid.activations import Space  # noqa: E402
from mm3d.grid.axis import Axis, Traffic  # noqa: E402
from mm3d.grid.grid import Grid  # noqa: E402
from mm3d.grid.layout import Layout  # noqa: E402
from mm3d.grid.split import Split  # noqa: E402
from mm3d.model import cost  # noqa: E402
from mm3d.model.experts.spec import Experts  # noqa: E402
from mm3d.model.sizes import ModelSizes  # noqa: E402
from mm3d.model.transformer import Transformer  # noqa: E402
from mm3d.model.transformer_spec import model_spec  # noqa: E402
from mm3d.model.vectors import Vector  # noqa: E402
from mm3d.schemes import registry, scheme  # noqa: E402
from mm3d.schemes.scheme import Scheme  # noqa: E402
from mm3d.tracing.watchdog import Watchdog  # noqa: E402

guard.install()    # the other ranks would wait for ever for one that has failed

__version__ = "0.1.0"

SCHEMES = registry()
_TRAINING = {"GPT": "mm3d.training.gpt", "Mesh": "mm3d.training.mesh",
             "Pipeline": "mm3d.training.pipeline",
             "SGD": "mm3d.training.optimizers", "AdamW": "mm3d.training.optimizers",
             "LossScaling": "mm3d.training.loss_scaling",
             "warmup_cosine": "mm3d.training.learning_rates",
             "save": "mm3d.checkpoints.saving", "restore": "mm3d.checkpoints.restoring"}

__all__ = ["Axis", "Experts", "Grid", "Layout", "ModelSizes", "SCHEMES", "Scheme", "Space",
           "Split", "Traffic", "Transformer", "Vector", "Watchdog", "cost", "model_spec",
           "registry", "scheme", *_TRAINING]


def __getattr__(name: str) -> Any:
    """Import what trains a model when it is asked for: most programs need none of it."""
    if name not in _TRAINING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_TRAINING[name]), name)
