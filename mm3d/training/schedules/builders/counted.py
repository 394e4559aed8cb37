"""Write a row by patterns of kinds and chunks; the micro-batches are counted."""

from collections import Counter

from mm3d.training.schedules.schedule import Action


class CountedRow:
    """Collect the actions of a rank.

    Parameters
    ----------
    microbatches : int
        Actions of micro-batches beyond these are left out.
    """

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self._next: Counter[tuple[str, int]] = Counter()
        self._without_weights: list[tuple[int, int]] = []    # chunk and micro-batch, oldest first
        self._row: list[Action] = []

    def repeat(self, times: int, pattern: str) -> None:
        """Append a pattern, such as ``"F0 B1 W1"``, `times` times.

        Each word is a kind and a chunk; the micro-batch is the next one of F, or of B and BW, in
        that chunk.  W with a chunk belongs to the oldest B of the chunk that has no W yet, W alone
        to the oldest of all chunks.  ``&`` in front of a word joins it with the one before.
        """
        for word in pattern.split() * times:
            kind, chunk = word.strip("&").rstrip("0123456789"), word.lstrip("&FBW")
            if kind == "W":
                self._append_weights(chunk)
            else:
                self._append(kind, int(chunk), word.startswith("&"))

    def actions(self) -> tuple[Action, ...]:
        """Return the row."""
        return tuple(self._row)

    def _append(self, kind: str, chunk: int, joined: bool) -> None:
        micro = self._next[kind[0], chunk]
        self._next[kind[0], chunk] += 1
        if micro < self.microbatches:
            self._row.append(Action(kind, chunk, micro, joined))
            if kind == "B":
                self._without_weights.append((chunk, micro))

    def _append_weights(self, chunk: str) -> None:
        for unit in self._without_weights:
            if chunk in ("", str(unit[0])):
                self._without_weights.remove(unit)
                self._row.append(Action("W", *unit))
                return
