"""mm3d: 3-D tensor parallelism on arrays and MPI, and the parallelisms it is compared with.

>>> import mm3d
>>> scheme = mm3d.scheme("3d", comm, grid=(2, 2, 2))
>>> model = mm3d.Transformer(scheme, layers=2, hidden=48, heads=4, batch=8, seq=16)
>>> y, saved = model.forward(model.shard(X))
>>> dx = model.backward(dy, saved)
>>> model.parameters[2].name, model.parameters[2].layout
('layers.0.attention.qkv.weight', Layout('zx,,y', units={0: 1, 2: 12}))
"""

from importlib import import_module
from typing import Any

from mm3d import console, launcher, mpi_start

console.open_closed_streams()    # before anything else takes their numbers
mpi_start.leave_job()         # before the launcher's variables are read
launcher.set_kernels()        # before NumPy and MPI start, which read the environment once
launcher.set_defaults()

mpi_start.check_packages()

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
from mm3d.schemes import registry  # noqa: E402
from mm3d.schemes.creation import scheme  # noqa: E402
from mm3d.schemes.scheme import Scheme  # noqa: E402

guard.install()    # the other ranks would wait for ever for one that has failed

__version__ = "0.1.0"

SCHEMES = registry()
# Files of the public names that are imported when they are asked for: no program needs all.
_FILES = {"GPT": "mm3d.training.gpt", "Mesh": "mm3d.training.mesh",
          "Pipeline": "mm3d.training.pipeline",
          "Config": "mm3d.config", "Model": "mm3d.config", "Division": "mm3d.config",
          "SGD": "mm3d.training.optimizers", "AdamW": "mm3d.training.optimizers",
          "LossScaling": "mm3d.training.loss_scaling",
          "warmup_cosine": "mm3d.training.learning_rates",
          "save": "mm3d.checkpoints.saving", "restore": "mm3d.checkpoints.restoring",
          "model_from_config": "mm3d.hugging_face.config_file",
          "load_pretrained": "mm3d.pretrained.loading",
          "save_pretrained": "mm3d.pretrained.saving",
          "Transformer": "mm3d.model.transformer", "ModelSizes": "mm3d.model.sizes",
          "Architecture": "mm3d.model.architecture",
          "ExpertDesign": "mm3d.model.experts.options",
          "Vector": "mm3d.model.vectors", "Experts": "mm3d.model.experts.layer",
          "cost": "mm3d.model.cost",
          "Watchdog": "mm3d.tracing.watchdog"}

__all__ = ["Axis", "Grid", "Layout", "SCHEMES", "Scheme", "Space", "Split", "Traffic",
           "registry", "scheme", *_FILES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = import_module(_FILES[name])
    return getattr(file, name, file)    # `cost` is a whole file
