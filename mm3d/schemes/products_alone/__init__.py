"""Collect products of plain matrices by algorithms without layers.

They are for comparison with the products of schemes: no model is divided by them here.
"""

import importlib
import pkgutil

from mm3d.schemes import registry
from mm3d.schemes.scheme import GridAlgorithm, Scheme


def algorithms_with_products() -> dict[str, type[GridAlgorithm]]:
    """Return all algorithms that multiply plain matrices, by name: schemes, then products alone.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    alone = {cls.name: cls for cls in GridAlgorithm.__subclasses__() if cls is not Scheme}
    return ({name: cls for name, cls in registry().items() if cls.matrix_product}
            | dict(sorted(alone.items())))
