"""Hold how many tokens each expert got, and compute shares, entropies and biases from it."""

import math
from dataclasses import dataclass

import numpy as np


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


def updated_bias(bias: np.ndarray, totals: np.ndarray, rate: float) -> np.ndarray:
    """Return the bias of the gate "sigmoid-bias" after a step.

    The bias of an expert that got fewer tokens than the mean grows by `rate`; if it got more, the
    bias shrinks by it.  Source: DeepSeek-AI, arXiv 2412.19437, section 2.1.2.

    Parameters
    ----------
    bias : ndarray
        (E,), before the step.
    totals : ndarray of int64
        (k, E), of all tokens of the step.
    rate : float
        ``experts.bias_rate``.
    """
    got = totals.sum(0)
    return bias + rate * np.sign(got.sum() - len(got) * got).astype(bias.dtype)


def utilisation_entropy(totals: np.ndarray) -> float:
    """Return the entropy of the experts' shares, divided by that of equal shares.

    It is 1 when all experts get equally many tokens, and 0 when one expert gets them all.

    Parameters
    ----------
    totals : ndarray of int64
        (k, E), or (E,): tokens of each expert.
    """
    got = totals.reshape(-1, totals.shape[-1]).sum(0)
    if len(got) == 1 or not got.any():
        return 1.0
    share = got[got > 0] / got.sum()
    return float(-(share * np.log(share)).sum() / math.log(len(got))) + 0.0
