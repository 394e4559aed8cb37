"""Read a text as bytes, and draw batches of it in an order that no mesh changes."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.agreement import broadcast_from_rank_0
from bench.errors import UsageError
from mm3d.examples.train import Batch, windows

VOCAB = 256             # a token is a byte
HELD_OUT = 0.1          # the share of the text, at its end, that validates
DEFAULT = "pydoc_data.topics"    # English text that comes with every Python


@dataclass(frozen=True)
class Text:
    """Hold a text for training and its held-out end for validation.

    Attributes
    ----------
    train, held_out : ndarray of uint8
        The bytes to learn from, and those to validate with.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray

    @property
    def digest(self) -> str:
        """Return a checksum of all bytes."""
        return hashlib.blake2b(self.train.tobytes() + self.held_out.tobytes(),
                               digest_size=8).hexdigest()

    def batch(self, seed: int, step: int, batch: int, seq: int) -> Batch:
        """Draw the tokens and targets of a step, each (batch, seq) of int64.

        Sequences begin anywhere in the training part.  Each step has its own Philox stream, from
        the seed and the step alone: no mesh changes it, and a resumed training needs no saved
        state.
        """
        key = hashlib.blake2b(f"{seed}/{step}/text".encode(), digest_size=16).digest()
        draw = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))
        return windows(self.train, draw.integers(0, len(self.train) - seq, batch), seq)

    def validation(self, number: int, batch: int, seq: int) -> Batch:
        """Return batch `number`, from 0, of those that cover the held-out part."""
        starts = seq * np.arange(number * batch, (number + 1) * batch)
        return windows(self.held_out, starts, seq)

    def validation_batches(self, batch: int, seq: int) -> int:
        """Count the batches of the held-out part."""
        return (len(self.held_out) - 1) // seq // batch

    def check(self, batch: int, seq: int) -> None:
        """Raise UsageError when the text is too short for batches of this size."""
        if self.validation_batches(batch, seq) < 1 or len(self.train) <= seq:
            least = math.ceil((batch * seq + 1) / HELD_OUT)
            found = len(self.train) + len(self.held_out)
            raise UsageError(f"the text {self.name} has {found} bytes, too few to hold out "
                             f"{batch} sequences of {seq} for validation: at least {least}, or "
                             f"smaller --batch and --seq, would do")


def read_training_text(path: str | None = None) -> Text:
    """Read the bytes of a file, or without one the text that comes with every Python.

    Raises UsageError when the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics
        data, name = "\n\n".join(topics[key] for key in sorted(topics)).encode(), DEFAULT
    else:
        name = Path(path).name
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"--text {path} cannot be read ({error.strerror}): name a file of "
                             f"text, or leave --text out") from error
    tokens = np.frombuffer(data, np.uint8)
    cut = len(tokens) - round(HELD_OUT * len(tokens))
    return Text(name, tokens[:cut], tokens[cut:])


def share_text(path: str | None, batch: int, seq: int, comm) -> Text:
    """Read a text on rank 0 and return it on every rank; errors as those of `read_training_text`.

    Raises UsageError on every rank alike, also when it is too short for batches of this size.
    """
    def checked() -> Text:
        text = read_training_text(path)
        text.check(batch, seq)
        return text
    return broadcast_from_rank_0(checked, comm)
