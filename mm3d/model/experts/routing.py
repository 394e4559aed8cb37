"""Hold how the tokens of one layer with experts were routed in one pass."""

from dataclasses import dataclass

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.model.experts.balance import utilisation_entropy
from mm3d.model.experts.dispatch import Plan
from mm3d.model.experts.gates import Choice


@dataclass(frozen=True)
class Routing:
    """Hold what a router has decided in one pass, and the gradient of its losses.

    Attributes
    ----------
    choice : Choice
        Experts and gates of this rank's tokens.
    plan : Plan
        The ways of their rows.
    dlogits : Array or None
        Gradient of the balance loss and the z-loss by the logits; None without them.
    """

    choice: Choice
    plan: Plan
    dlogits: Array | None

    @property
    def arrays(self) -> list[Array]:
        """Return the arrays that are stored."""
        choice = self.choice
        held = (choice.gates, choice.probabilities, choice.slope, self.dlogits)
        return [a for a in held if a is not None]


@dataclass(frozen=True)
class RoutingTotals:
    """Hold how the tokens of all ranks were routed in one layer and pass.

    Attributes
    ----------
    name : str
        Name of the layer in the model.
    chosen : ndarray of int64
        (k, E): how many tokens have each expert as their first, second ... choice.
    dropped : ndarray of int64
        (E,): how many of these pairs were dropped.
    balance, z : float
        The balance loss and the z-loss: of this rank's tokens, or of all of them.
    """

    name: str
    chosen: np.ndarray
    dropped: np.ndarray
    balance: float
    z: float

    @property
    def dropped_share(self) -> float:
        """Return the share of all pairs that was dropped."""
        return float(self.dropped.sum() / max(1, self.chosen.sum()))

    @property
    def entropy(self) -> float:
        """Return the entropy of the experts' shares: 1 for equal ones, 0 for a single expert."""
        return utilisation_entropy(self.chosen)
