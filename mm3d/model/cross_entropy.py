"""Compute the cross entropy of logits whose rows and vocabulary are divided over the grid."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.arrays.plain_numbers import plain_number
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.model.token_functions import (merge_statistics, rows_held, softmax_gradient,
                                        softmax_statistics)


@dataclass(frozen=True)
class Targets:
    """Hold the targets of a loss, and the factor of its gradient."""

    numbers: np.ndarray    # global targets, (batch, seq), integers of the host
    # Factor of the gradient of the sum of all losses, such as 1 / rows for a mean.
    scale: float = 1.0


class CrossEntropy:
    """Compute the loss of each row of logits l with the target t, and its gradient.

    The loss of a row is lse - (1 - s) l_t - s mean(l) + z lse^2, where lse is the logarithm of
    the sum of exponentials, mean is over the whole vocabulary, s is the label smoothing and z the
    factor of the z-loss.  Rows with an ignored target have the loss 0.

    Logits are never gathered.  Each rank computes four numbers a row over its block of the
    vocabulary: the maximum m, the sum of exp(l - m), l_t if it has it, and with smoothing the sum
    of l.  One small all-gather of them replaces reductions of a maximum and then of sums: it needs
    no second latency, and the ranks of a row merge them in the same order.  The logits are in the
    inner space, a row has `vocab` of them globally.
    """

    def __init__(self, space: Space, vocab: int, ignored: int = -1, smoothing: float = 0.0,
                 z_loss: float = 0.0) -> None:
        self.space, self.vocab, self.ignored = space, plain_number(vocab), plain_number(ignored)
        self.smoothing, self.z_loss = plain_number(smoothing), plain_number(z_loss)
        place = space.layout().slices(space.grid, (space.batch, space.seq, vocab))
        self._place, self._first = place[:2], place[2].start
        self.parameters: list = []
        self._count = place[2].stop - place[2].start
        self._gathers = bool(space.gathered_along) and space.grid[space.gathered_along].size > 1
        self._empty = space.allocator(vocab)
        letters = Layout(space.rows).letters
        # Whether this rank, of all that have the same rows, adds their losses to the total.
        self.counts = not any(rank for c, rank in space.grid.coords.items() if c not in letters)

    def forward(self, logits: Array, targets: Targets) -> tuple[Array, Any]:
        """Compute the losses of this rank's rows from its block of (batch, seq, vocab) logits.

        The block is overwritten.  Returns the sum of the losses, of shape (1,) in float64, and
        what `backward` needs.
        """
        xp = namespace(logits)
        own, held = self._own_targets(targets)
        valid = self._counting_rows(own, accumulation_dtype(logits))
        flat = xp.reshape(logits, (len(own), self._count))
        goals = self._target_logits(flat, held, own)
        statistics = softmax_statistics(flat, bool(self.smoothing))
        top = statistics[:, 0:1]
        self._put_target_logits(statistics, held, goals)
        statistics = self._merge(statistics)
        lse = xp.log(statistics[:, 1:2]) + statistics[:, 0:1]
        loss = lse - (1 - self.smoothing) * statistics[:, 2:3]
        if self.smoothing:
            loss -= (self.smoothing / self.vocab) * statistics[:, 3:4]
        if self.z_loss:
            loss += self.z_loss * (lse * lse)
        loss *= valid
        total = xp.sum(xp.astype(loss, xp.float64, copy=False), axis=0)
        return total, (flat, xp.exp(top - lse), lse if self.z_loss else None)

    def _own_targets(self, targets: Targets) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets of this rank's rows, and the rows whose target is in this block."""
        own = targets.numbers[self._place].ravel()
        return own, rows_held(own, self._first, self._count)

    def _counting_rows(self, own: np.ndarray, dtype: Any) -> Array:
        """Return (rows, 1) of `dtype`: 1, and 0 for rows whose target in `own` is ignored."""
        valid = self.space.grid.backend.empty((len(own), 1), dtype)
        valid[...] = 1
        ignored = np.flatnonzero(own == self.ignored)
        if len(ignored):
            library = self.space.grid.backend
            zeros = library.empty((len(ignored), 1), dtype)
            zeros[...] = 0
            library.put_rows(valid, ignored, zeros)
        return valid

    def _target_logits(self, logits: Array, held: np.ndarray, own: np.ndarray) -> Array:
        """Copy the logits of the targets that are in this block, (held, 1)."""
        library, xp = self.space.grid.backend, namespace(logits)
        found = library.empty((len(held), 1), logits.dtype)
        if len(held):
            library.take_rows(xp.reshape(logits, (-1, 1)), self._targets(held, own), found)
        return found

    def _put_target_logits(self, statistics: Array, held: np.ndarray, found: Array) -> None:
        """Put the logits `found` of the rows `held` into the third column."""
        if len(held):
            library, xp = self.space.grid.backend, namespace(found)
            column = library.empty((len(held), 4), statistics.dtype)
            library.take_rows(statistics, held, column)
            column[:, 2:3] = xp.astype(found, column.dtype, copy=False)
            library.put_rows(statistics, held, column)

    def _targets(self, held: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Return the places, in the flat block of logits, of the targets of the rows `held`."""
        return held * self._count + (own[held] - self._first)

    def _merge(self, statistics: Array) -> Array:
        """Merge the statistics of all ranks that have blocks of the same rows."""
        xp = namespace(statistics)
        used = 4 if self.smoothing else 3
        for letter in self.space.features:
            axis = self.space.grid[letter]
            if axis.size > 1:
                part = xp.reshape(statistics[:, :used], (1, statistics.shape[0], used))
                statistics = merge_statistics(axis.all_gather(part, 0, [1] * axis.size))
        return statistics

    def backward(self, targets: Targets, saved: Any, within: None = None) -> Array:
        """Compute the gradient of the logits from the sum of the losses, times ``targets.scale``.

        The memory of the logits is reused, unless a product gathers the result.  The result is
        this rank's block of (batch, seq, vocab).
        """
        exponentials, share, lse = saved
        library, xp, dtype = self.space.grid.backend, namespace(share), share.dtype
        block = *(part.stop - part.start for part in self._place), self._count
        own, held = self._own_targets(targets)
        weight = self._counting_rows(own, dtype)
        weight *= targets.scale
        factor = weight * (1 + 2 * self.z_loss * lse) if self.z_loss else weight
        out = (self._empty(exponentials.dtype) if self._gathers
               else xp.reshape(exponentials, block))
        # Rows of a block that shares memory with others may have gaps between them.
        whole = out if library.is_contiguous(out) else library.empty(out.shape, out.dtype)
        flat = xp.reshape(whole, (len(own), self._count))
        shift = (self.smoothing / self.vocab) * weight if self.smoothing else None
        softmax_gradient(exponentials, factor * share, shift, flat)
        if len(held):
            places, cells = self._targets(held, own), xp.reshape(whole, (-1, 1))
            one = library.take_rows(cells, places, library.empty((len(held), 1), out.dtype))
            less = library.take_rows(weight, held, library.empty((len(held), 1), dtype))
            one = xp.astype(one, dtype, copy=False) - (1 - self.smoothing) * less
            library.put_rows(cells, places, xp.astype(one, out.dtype, copy=False))
        if whole is not out:
            out[...] = whole
        return out
