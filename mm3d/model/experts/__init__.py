"""Route the tokens of mixture-of-experts layers, in the same way on every mesh."""

from mm3d.model.experts.options import Experts

__all__ = ["Experts"]
