"""Collect the schemes, one file each, and find them by name."""

import pkgutil
from functools import cache
from importlib import import_module

from mm3d.names import find_name
from mm3d.schemes.scheme import REGISTERED, GridAlgorithm, Scheme


@cache
def registry() -> dict[str, type[Scheme]]:
    """Return all schemes by name: those of ``mm3d/schemes/`` and other named subclasses."""
    for module in pkgutil.iter_modules(__path__):    # which registers them
        import_module(f"{__name__}.{module.name}")
    return REGISTERED


def algorithms_with_products() -> dict[str, type[GridAlgorithm]]:
    """Return all algorithms that multiply plain matrices, by name; last those without layers."""
    schemes = {name: cls for name, cls in registry().items() if cls.matrix_product}
    alone = {cls.name: cls for cls in GridAlgorithm.__subclasses__() if cls is not Scheme}
    return schemes | dict(sorted(alone.items()))


def find_scheme(name: str) -> type[Scheme]:
    """Return the class of the scheme called `name`, as ``3d`` or ``3D``.

    Raises ValueError when there is none.
    """
    known = registry()
    return known[find_name(name, known, "scheme")]
