"""Rows of the tables."""

from bench.records.kinds import require_as_many
from bench.records.measurements import Measurements
from mm3d.grid.axis import COLLECTIVES


def check_texts(run: Measurements) -> None:
    """Check that traffic is that of the ranks, and the placement an order of directions."""
    axes, collectives, ranks = (list(run.groups["traffic"].scales[name])
                                for name in ("axis", "collective", "rank"))
    if len(set(axes)) != len(axes):
        raise ValueError(f"traffic/axis has a direction twice: {' '.join(map(str, axes))}")
    if not set(collectives) <= set(COLLECTIVES):
        raise ValueError(f"traffic/collective has others than {', '.join(COLLECTIVES)}")
    require_as_many("traffic/rank", ranks, run.scales["rank"], "rank of the samples")
    order, directions = str(run.configuration.get("placement", "")), "".join(run.grid)
    if order and sorted(order) != sorted(directions):
        raise ValueError(f"configuration/placement is {order!r:.60}, which should be an order of "
                         f"the directions {directions}")
