"""mm3d: 3-D tensor parallelism on arrays and MPI, and the parallelisms it is compared with.

>>> import mm3d
>>> scheme = mm3d.scheme("3d", comm, grid=(2, 2, 2))
>>> model = mm3d.Transformer(scheme, layers=2, hidden=48, heads=4, batch=8, seq=16)
>>> y, saved = model.forward(model.shard(X))
>>> dx = model.backward(dy, saved)
"""

from mm3d import environment

environment.set_defaults()  # before NumPy and MPI start, which read the environment once

from mm3d import gpu  # noqa: E402

gpu.start()  # a device's context before MPI, which otherwise takes its memory for the host's

from mm3d import cost, guard  # noqa: E402
from mm3d.axis import Axis, Split, Traffic  # noqa: E402
from mm3d.grid import Grid  # noqa: E402
from mm3d.layout import Layout  # noqa: E402
from mm3d.contract import Scheme, registry, scheme  # noqa: E402
from mm3d.space import Space, Vector  # noqa: E402
from mm3d.sizes import ModelSizes  # noqa: E402
from mm3d.transformer import Transformer, describe  # noqa: E402
from mm3d.watchdog import Watchdog  # noqa: E402

guard.install()  # a rank that fails ends the job, which would wait for it for ever

__version__ = "0.1.0"

SCHEMES = registry()

__all__ = ["Axis", "Grid", "Layout", "ModelSizes", "SCHEMES", "Scheme", "Space", "Split",
           "Traffic", "Transformer", "Vector", "Watchdog", "cost", "describe", "registry",
           "scheme"]
