"""Collect products of plain matrices by algorithms without layers, one file each.

They are for comparison with the products of schemes: no model is divided by them here.
"""

import importlib
import pkgutil

from mm3d.schemes import registry
from mm3d.schemes.scheme import GridAlgorithm

PRODUCTS_ALONE: dict[str, type["ProductAlone"]] = {}    # by name


class ProductAlone(GridAlgorithm):
    """Multiply plain matrices over a grid by an algorithm without layers: the base class.

    Defining a subclass registers it under its `name`; it has a `matrix_product`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        PRODUCTS_ALONE[cls.name] = cls


def algorithms_with_products() -> dict[str, type[GridAlgorithm]]:
    """Return all algorithms that multiply plain matrices, by name: schemes, then products alone.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return ({name: cls for name, cls in registry().items() if cls.matrix_product}
            | dict(sorted(PRODUCTS_ALONE.items())))
