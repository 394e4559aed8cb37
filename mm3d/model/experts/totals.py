"""Record how the tokens of a model's passes are routed, and compute shares and biases from it."""

import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterator

import numpy as np

from mm3d.arrays.plain_numbers import PlainNumbers


@dataclass(frozen=True)
class RoutingTotals:
    """Hold how the tokens of all ranks were routed in one layer and pass."""

    name: str    # name of the layer in the model
    # Int64 (k, E): how many tokens have each expert as their first, second ... choice.
    chosen: np.ndarray
    dropped: np.ndarray    # int64 (E,): how many of these pairs were dropped
    # The balance loss and the z-loss: of this rank's tokens, or of all of them.
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


def updated_bias(bias: np.ndarray, totals: np.ndarray, rate: float) -> np.ndarray:
    """Return the bias of the gate "sigmoid-bias" after a step.

    The bias of an expert that got fewer tokens than the mean grows by `rate`; if it got more, the
    bias shrinks by it.  Source: DeepSeek-AI, arXiv 2412.19437, section 2.1.2.  The bias is
    (E,), the `totals` of all tokens of the step (k, E).
    """
    got = totals.sum(0)
    return bias + rate * np.sign(got.sum() - len(got) * got).astype(bias.dtype)


def utilisation_entropy(totals: np.ndarray) -> float:
    """Return the entropy of the experts' shares, divided by that of equal shares.

    It is 1 when all experts get equally many tokens, and 0 when one expert gets them all.
    `totals` are the tokens of each expert, (k, E) or (E,).
    """
    got = totals.reshape(-1, totals.shape[-1]).sum(0)
    if len(got) == 1 or not got.any():
        return 1.0
    share = got[got > 0] / got.sum()
    return float(-(share * np.log(share)).sum() / math.log(len(got))) + 0.0


class Routings(PlainNumbers):
    """Record how the tokens of a model's passes are routed, for recomputation and reports.

    A routing is a `mm3d.model.experts.layer.Routing`.  `scale` is the factor of the gradients of
    the balance loss and the z-loss.  `totals` has a `RoutingTotals` for each layer and forward,
    with the losses of this rank's tokens, until it is emptied; `biases` what the gate
    "sigmoid-bias" adds in each layer, by its name.
    """

    def __init__(self) -> None:
        self.scale, self.totals = 1.0, []
        self.biases: dict[str, Any] = {}
        self._recorded: list[Any] | None = None
        self._replayed: deque[Any] = deque()

    @contextmanager
    def recording(self) -> Iterator[list[Any]]:
        """Return a list to which the layers in this context add their routings."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, routings: list[Any]) -> Iterator[None]:
        """Give these routings to the layers in this context, so that they choose nothing."""
        self._replayed = deque(routings)
        try:
            yield
            assert not self._replayed, "fewer layers with experts were recomputed than computed"
        finally:
            self._replayed.clear()    # after a failure, too: the next pass chooses for itself

    def next_replayed(self) -> Any:
        """Return the routing of the next layer that is recomputed; None in other passes."""
        return self._replayed.popleft() if self._replayed else None

    def add(self, routing: Any, totals: Any) -> None:
        """Record the routing of one layer and pass, and its totals."""
        self.totals.append(totals)
        if self._recorded is not None:
            self._recorded.append(routing)
