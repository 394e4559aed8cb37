"""Collect products of plain matrices by algorithms without layers, one file each.

They are for comparison with the products of schemes: nobody divides a model by them here.
"""

import importlib
import pkgutil

from mm3d.schemes import registry
from mm3d.schemes.grid_algorithm import PRODUCTS_ALONE, GridAlgorithm


def algorithms_with_products() -> dict[str, type[GridAlgorithm]]:
    """Return all algorithms that multiply plain matrices, by name: schemes, then products alone.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return ({name: cls for name, cls in registry().items() if cls.matrix_product}
            | dict(sorted(PRODUCTS_ALONE.items())))
