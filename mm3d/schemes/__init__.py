"""Collect the schemes, one file each, and find them by name."""

import pkgutil
from functools import cache
from importlib import import_module

from mm3d.names import find_name
from mm3d.schemes.scheme import REGISTERED, Scheme


@cache
def _import_schemes() -> None:
    """Import all modules of this folder, which registers their schemes."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def registry() -> dict[str, type[Scheme]]:
    """Return all schemes by name: those of ``mm3d/schemes/`` and other named subclasses."""
    _import_schemes()
    return REGISTERED


def find_scheme(name: str) -> type[Scheme]:
    """Return the class of the scheme called `name`, as ``3d`` or ``3D``.

    Raises ValueError when there is none.
    """
    known = registry()
    return known[find_name(name, known, "scheme")]
