"""Recompute layers with experts in backward, with the routing of their forward."""

from typing import Any

from mm3d.arrays.backend import Array
from mm3d.model.experts.shared import Routings
from mm3d.model.layers import Layer
from mm3d.model.recomputed_layers import Recomputed
from mm3d.schemes.overlap import Overlap


class RecomputedExperts(Recomputed):
    """Apply layers, and save their input and the routings of those with experts.

    Routers are not computed again: a choice that came out otherwise would send other rows than
    those that the gradients belong to, and other ranks would wait for them.

    Parameters
    ----------
    routings : Routings
        Records and replays the routings of the model.
    *layers : Layer
        The layers.
    """

    def __init__(self, routings: Routings, *layers: Layer) -> None:
        super().__init__(*layers)
        self._routings = routings

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with x and the routings."""
        with self._routings.recording() as recorded:
            y, x = super().forward(x, overlap)
        return y, (x, recorded)

    def recompute(self, saved: Any, overlap: Overlap | None = None) -> Any:
        """Recompute the data that the layers save, from x and the routings."""
        x, recorded = saved
        with self._routings.replaying(recorded):
            return super().recompute(x, overlap)
