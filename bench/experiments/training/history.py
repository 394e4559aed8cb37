"""Keep the losses and times of all steps of a training beside its checkpoints.

``history.jsonl`` begins with a line of the settings that determine the curve; then there is a line
a step and a line a validation, each appended by a single write.  After a kill, steps that are
repeated write their lines again, and the later lines count.  A last line says that the training is
complete.
"""

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import StoreError, UsageError
from bench.records import atomic
from bench.records.journal import UNSUPPORTED, append_entry, read_entries
from bench.records.kinds.training import tokens_per_second
from bench.records.measurements import Setting

NAME = "history.jsonl"
RECENT = 20    # steps that give the speed in progress lines
NUMBERS = ("loss", "seconds", "validation", "entropy", "dropped")    # of a step, in a line
COLLAPSED = 0.75    # progress warns below this entropy of utilisation: half of 8 experts have 0.67


@dataclass(frozen=True)
class History:
    """Measured values, by the number of the step.

    Attributes
    ----------
    losses, seconds : dict of int to float
        Loss, and seconds of the slowest rank, of each step.
    validation : dict of int to float
        Loss of the held-out text after each of some numbers of steps.
    entropy, dropped : dict of int to float
        With experts: the least entropy of utilisation of any layer in each step, 1 for equal
        shares; and the share of (token, choice) pairs that were dropped.
    began : int
        The step that this run begins with.  Seconds of steps before it may be another machine's,
        and where checkpoints were copied without the file, nothing is known of these steps.
    """

    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    entropy: dict[int, float] = field(default_factory=dict)
    dropped: dict[int, float] = field(default_factory=dict)
    began: int = 0

    def add(self, entry: dict[str, Any]) -> None:
        """Add a line of the file."""
        for name in entry.keys() & {*NUMBERS}:
            getattr(self, "losses" if name == "loss" else name)[entry["step"]] = entry[name]

    def before(self, step: int) -> "History":
        """Return the history of the first `step` steps, after which a run begins."""
        return History(*({n: value for n, value in found.items() if n < most} for found, most in (
            (self.losses, step), (self.seconds, step), (self.validation, step + 1),
            (self.entropy, step), (self.dropped, step))), step)


class HistoryFile:
    """The file of a history, opened for appending and locked, and made if it does not exist.

    The lock is released when the process ends, however it ends.  The folder, that of checkpoints,
    is made if it is missing; `settings` determine the curve.  Raises StoreError when the file
    cannot be opened, or another training has it open; UsageError when the folder is of another
    training, with what differs.
    """

    def __init__(self, folder: str | os.PathLike, settings: dict[str, Setting]) -> None:
        self.path = Path(folder) / NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND,
                                       atomic.SHARED)
            self._lock()
            entries = read_entries(self.path, settings=dict, step=int,
                                   **dict.fromkeys(NUMBERS, int | float))
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened ({error.strerror}): name another "
                             f"folder with --checkpoints") from error
        self.history = History()
        for entry in entries:
            if "step" in entry:
                self.history.add(entry)
        known = next((entry["settings"] for entry in entries if "settings" in entry), None)
        if known is None:
            self.write({"settings": settings})
        elif known != settings:
            self.close()
            differ = [f"{name} {known.get(name)}, not {settings.get(name)}"
                      for name in {**known, **settings} if known.get(name) != settings.get(name)]
            raise UsageError(f"{self.path.parent} has the checkpoints of another training: "
                             f"{', '.join(differ)}. The same settings, or another folder with "
                             f"--checkpoints, would do")

    def _lock(self) -> None:
        """Lock the file, where the file system can."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise StoreError(f"{self.path.parent} is in use: another training writes its "
                             f"checkpoints there. Wait for it, or name another folder with "
                             f"--checkpoints") from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line, and add it to the history; StoreError when it cannot be written."""
        try:
            append_entry(self._descriptor, entry)
        except OSError as error:
            raise StoreError(f"{self.path} could not be written ({error.strerror}); the "
                             f"checkpoints that are there are untouched") from error
        self.history.add(entry)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def progress_line(done: int, history: History, steps: int, tokens: int) -> str:
    """Format the progress after `done` steps, of `tokens` tokens each, as a line.

    The speed is that of the last steps of this run.
    """
    parts = [f"step {done} of {steps}"]
    if done - 1 in history.losses:
        parts.append(f"loss {history.losses[done - 1]:.4f}")
    recent = [history.seconds[n] for n in range(max(history.began, done - RECENT), done)]
    if recent:
        speed = tokens_per_second(tokens, np.array(recent))
        parts.append(f"{speed:,.0f} tokens/s".replace(",", " "))
    if done in history.validation:
        parts.append(f"validation loss {history.validation[done]:.4f}")
    if done - 1 in history.entropy:
        entropy = history.entropy[done - 1]
        parts.append(f"experts' entropy {entropy:.3f}")
        if history.dropped[done - 1]:
            parts.append(f"{100 * history.dropped[done - 1]:.1f} % dropped")
        if entropy < COLLAPSED:
            parts.append("FEW EXPERTS GET MOST TOKENS")
    return ", ".join(parts)
