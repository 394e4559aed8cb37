"""Hold what the layers with experts of one model share: ranks, and the routings of its passes."""

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.plain_numbers import PlainNumbers
from mm3d.grid.axis import Axis
from mm3d.model.experts.balance import utilisation_entropy
from mm3d.model.experts.dispatch import Plan
from mm3d.model.experts.gates import Choice
from mm3d.model.parameters import Parameter


@dataclass(frozen=True)
class ExpertRanks:
    """Hold the ranks outside a tensor group that tokens and experts are divided among.

    Attributes
    ----------
    replicas : sequence of Axis
        Directions along which ranks have other sequences of the same batch, the slowest first.
    axis : Axis or None
        The one of them that divides the experts; None if each replica has all of them.
    create_parameter : callable or None
        Makes the parameters of divided experts, from the arguments of
        `mm3d.model.parameters.Parameter`, with layouts on the tensor group and with the global
        shape, whose first dimension is divided along `axis`.
    way : {"fewest", "exchange", "gather"}
        How rows come to divided experts, see `mm3d.model.experts.dispatch`.
    batch : int or None
        Number of sequences of all replicas, divided among them as evenly as can be; by default
        each has as many as this one.
    """

    replicas: Sequence[Axis] = ()
    axis: Axis | None = None
    create_parameter: Callable[..., Parameter] | None = None
    way: str = "fewest"
    batch: int | None = None


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


class Routings(PlainNumbers):
    """Hold the routings of a model's passes, for those who ask for them.

    Attributes
    ----------
    scale : float
        What the gradients of the balance loss and the z-loss are multiplied by.
    totals : list of RoutingTotals
        One for each layer and forward, with the losses of this rank's tokens, until it is emptied.
    biases : dict of str to Parameter
        What the gate "sigmoid-bias" adds in each layer, by the layer's name.
    """

    def __init__(self) -> None:
        self.scale, self.totals = 1.0, []
        self.biases: dict[str, Parameter] = {}
        self._recorded: list[Routing] | None = None
        self._replayed: deque[Routing] = deque()

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Return a list to which the layers in this context add their routings."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, routings: list[Routing]) -> Iterator[None]:
        """Give these routings to the layers in this context, which choose nothing then."""
        self._replayed = deque(routings)
        yield
        assert not self._replayed, "fewer layers with experts were recomputed than computed"

    def next_replayed(self) -> Routing | None:
        """Return the routing of the next layer that is recomputed; None in other passes."""
        return self._replayed.popleft() if self._replayed else None

    def add(self, routing: Routing, totals: RoutingTotals) -> None:
        """Take over the routing of one layer and pass."""
        self.totals.append(totals)
        if self._recorded is not None:
            self._recorded.append(routing)
