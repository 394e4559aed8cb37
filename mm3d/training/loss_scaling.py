"""Scale the loss, so that small gradients do not vanish in float16."""

import math
from typing import Any

from mm3d.arrays.plain_numbers import PlainNumbers, is_number


class LossScaling(PlainNumbers):
    """Hold the factor of the loss: halved where gradients overflow, doubled after many that fit.

    Gradients are computed from the loss times `scale`, and an optimizer divides them by it.  It
    skips the step, on all ranks alike, where any gradient on any rank is infinite or NaN.

    Parameters
    ----------
    initial : float
        The factor at the beginning.
    growth, backoff : float
        What the factor is multiplied by when it grows, and when gradients overflow; powers of
        two change no other bit of the gradients.
    interval : int
        Steps without an overflow after which the factor grows.
    hysteresis : int
        Overflows, since the factor last changed, at which it shrinks.
    smallest : float
        The factor never goes below: gradients that overflow even then end the training, unless
        `backoff` is 1.

    Attributes
    ----------
    scale : float
        The factor.
    good_steps, overflows : int
        Steps since the last overflow, and overflows, both since the factor last changed.
    skipped : int
        Steps skipped in all.
    """

    numbers = ("scale", "good_steps", "overflows", "skipped")

    def __init__(self, initial: float = 65536.0, growth: float = 2.0, backoff: float = 0.5,
                 interval: int = 2000, hysteresis: int = 1, smallest: float = 1.0) -> None:
        every = initial, growth, backoff, interval, hysteresis, smallest
        if not (all(map(is_number, every)) and 0 < smallest <= initial < math.inf
                and growth >= 1 >= backoff > 0 and interval >= 1 and hysteresis >= 1):
            raise ValueError("loss scaling needs 0 < smallest <= initial, growth >= 1, 0 < "
                             "backoff <= 1, and interval and hysteresis of at least 1")
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.hysteresis, self.smallest, self.scale = hysteresis, smallest, float(initial)
        self.good_steps = self.overflows = self.skipped = 0

    def __repr__(self) -> str:
        return f"LossScaling(scale={self.scale}, skipped={self.skipped}; {self.rule()})"

    def rule(self) -> str:
        """Return how the factor changes, as a text."""
        return (f"growth {self.growth!r} after {self.interval}, backoff {self.backoff!r} after "
                f"{self.hysteresis}, at least {self.smallest!r}")

    def update(self, overflow: bool) -> None:
        """Change the factor after a step, which overflowed or not.

        Raises
        ------
        FloatingPointError
            When it would shrink, and is the smallest already.
        """
        if overflow:
            self.skipped, self.overflows, self.good_steps = (
                self.skipped + 1, self.overflows + 1, 0)
            if self.overflows >= self.hysteresis:
                if self.scale == self.smallest and self.backoff < 1:
                    raise FloatingPointError(
                        f"the gradients are not finite with the smallest factor of the loss, "
                        f"{self.scale:g}, either: a smaller learning rate would do")
                self._change(self.backoff)
        else:
            self.good_steps += 1
            if self.good_steps >= self.interval:
                self._change(self.growth)

    def _change(self, factor: float) -> None:
        """Multiply the factor, and count anew."""
        scale = self.scale * factor
        self.scale = max(self.smallest, scale) if scale < math.inf else self.scale
        self.good_steps = self.overflows = 0


def check_masters(model: Any, what: str, vanishing: str) -> None:
    """Raise ValueError where a model is trained in a type of 16 bits, in which numbers vanish."""
    narrow = [str(t.master.dtype) for t in model.trained if t.master.dtype.itemsize < 4]
    if narrow:
        raise ValueError(f"{what} cannot train in {narrow[0]}: {vanishing} vanish; create the "
                         f"model with master='float32'")
