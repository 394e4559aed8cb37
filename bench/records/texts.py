"""Check the texts of a record that its readers take apart: schedules, grids, plans, clusters.

Readers of a record parse these again and find what they look for.
"""

from typing import Any, Callable, Sequence

from bench.cluster.spec import Cluster
from bench.records import kinds
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme, registry
from mm3d.schemes.products_alone import algorithms_with_products


def check_texts(kind: str, run: Any) -> None:
    """Check what a record, a Run or Measurements of this kind, says in texts with parts.

    Raises
    ------
    ValueError
        When one cannot be read, or does not fit what was measured; the message names it.
    """
    if run.environment.get("emulated_cluster"):
        named("environment/emulated_cluster", Cluster.parse,
              str(run.environment["emulated_cluster"]))
    own = OF_KIND.get(kind) or getattr(kinds.module_of(kind), "check_texts", None)
    if own:
        own(run)


def named(name: str, parse: Callable[..., Any], *given: Any) -> Any:
    """Parse a text; ValueError with its name where it cannot be."""
    try:
        return parse(*given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _require_as_many(name: str, found: Sequence, labels: Sequence, dim: str) -> None:
    if len(found) != len(labels):
        raise ValueError(f"{name} names {len(found)}, which should be {len(labels)}: one for each "
                         f"{dim}")


def _check_model(run: Any) -> None:
    """Traffic is that of the run's ranks, and the placement an order of the grid's directions."""
    axes, collectives, ranks = (list(run.groups["traffic"].scales[name])
                                for name in ("axis", "collective", "rank"))
    if len(set(axes)) != len(axes):
        raise ValueError(f"traffic/axis has a direction twice: {' '.join(map(str, axes))}")
    if not set(collectives) <= set(COLLECTIVES):
        raise ValueError(f"traffic/collective has others than {', '.join(COLLECTIVES)}")
    _require_as_many("traffic/rank", ranks, run.scales["rank"], "rank of the samples")
    order, directions = str(run.configuration.get("placement", "")), "".join(run.grid)
    if order and sorted(order) != sorted(directions):
        raise ValueError(f"configuration/placement is {order!r:.60}, which should be an order of "
                         f"the directions {directions}")


def _check_products(run: Any) -> None:
    """Each product has a grid with a size for each of its directions."""
    grids = str(run.configuration["grids"]).split()
    _require_as_many("configuration/grids", grids, run.scales["scheme"], "scheme")
    products = algorithms_with_products()
    for name, grid in zip(run.scales["scheme"], grids):
        if name not in products:
            raise ValueError(f"measurements/scheme {name!r:.60} is none of {', '.join(products)}")
        named("configuration/grids", GridShape.parse, grid, products[name].directions)


def _check_sweep(run: Any) -> None:
    """Each plan names its scheme, grid, order of directions and batch, and links are rates."""
    for label in run.scales["plan"]:
        words = str(label).split()
        if not 4 <= len(words) <= 5 or words[0] not in registry():
            raise ValueError(f"measurements/plan: {label!r:.60} is no plan such as "
                             f"'3d 4x4x4 xyz 384'")
        scheme, grid, order, batch, *overlap = words
        known = find_scheme(scheme)
        named("measurements/plan", known.grid_shape,
              named("measurements/plan", GridShape.parse, grid, known.directions))
        counts = [batch, *(text.removeprefix("overlap=") for text in overlap)]
        if sorted(order) != sorted(known.directions) or not all(
                text.isdecimal() and int(text) for text in counts):
            raise ValueError(f"measurements/plan: {label!r:.60} has no order of the directions "
                             f"{known.directions} and batch")
    for link in run.scales["link"]:
        if not (named("measurements/link", float, link) > 0):
            raise ValueError(f"measurements/link: {link!r:.60} is no rate")


def _check_meshes(run: Any) -> None:
    """Each mesh has another, or itself, that it equals, and differences have their bounds."""
    _require_as_many("configuration/equal_to", str(run.configuration["equal_to"]).split("; "),
                     run.scales["mesh"], "mesh")
    bounded = {check.quantity.partition(" of ")[0] for check in run.checks}
    if missing := {"loss", "gradients", "weights"} - bounded:
        raise ValueError(f"verification/quantity has no {' or '.join(sorted(missing))} of a mesh")


def _check_collectives(run: Any) -> None:
    """Each direction has its transport, where they are listed."""
    if run.configuration.get("transports"):
        _require_as_many("configuration/transports", str(run.configuration["transports"]).split(),
                         run.scales["axis"], "axis")


OF_KIND = {"model": _check_model, "products": _check_products, "sweep": _check_sweep,
           "training-meshes": _check_meshes, "collectives": _check_collectives}
