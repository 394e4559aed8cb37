"""Rotate queries and keys by angles that grow with their positions."""

import math

import numpy as np

from mm3d.arrays.backend import Array, backend_of, namespace
from mm3d.arrays.elementwise import row_blocks
from mm3d.grid.activations import Space
from mm3d.model.architecture import Architecture
from mm3d.model.functional import prefer_backend_kernel, upcast
from mm3d.model.parameters import Parameter
from mm3d.schemes.passes import Pass


def frequencies(architecture: Architecture, head: int) -> np.ndarray:
    """Return the angle by which each pair of features turns from a position to the next.

    The angles are base^(-2 i / head) for i = 0 ... head / 2 - 1 (Su et al., arXiv 2104.09864,
    section 3.2.2).  Llama 3.1 scales them (Meta, github.com/meta-llama/llama-models): where an
    angle turns less than `low` times in `original` positions it is divided by the factor; where
    it turns more than `high` times it is kept; between them a share (turns - low) / (high - low)
    of the kept one and the rest of the divided one are added.  `head` is the features of a head;
    the result is of float64, (head / 2,).
    """
    angles = architecture.rotary_base ** (np.arange(0, head, 2) / -head)
    if architecture.rotary_scaling is None:
        return angles
    factor, low, high, original = architecture.rotary_scaling
    turns = original * angles / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * angles + (1 - kept) * angles / factor


class Turns:
    """Hold cosines and sines for the positions of this rank; layers share them.

    They are `cos` and `sin`, (positions of this rank, head / 2), in float32 at least: `dtype` is
    that of the activations in `space` that are rotated, those of 16 bits in float32.  `head` and
    `architecture` are as of `frequencies`.
    """

    def __init__(self, space: Space, head: int, dtype: str, architecture: Architecture) -> None:
        runs = space.runs()
        shape = (sum(map(len, runs)), head // 2)

        def angles() -> np.ndarray:
            return np.outer([n for run in runs for n in run], frequencies(architecture, head))
        kind = "float64" if dtype == "float64" else "float32"
        self.head = head
        self.cos, self.sin = (space.grid.backend.from_host(
            shape, kind, lambda of=of: of(angles())) for of in (np.cos, np.sin))


@prefer_backend_kernel
def rotate(x: Array, cos: Array, sin: Array, rotated: int, out: Array) -> Array:
    """Rotate the first and second half of each head's features: u cos - v sin, v cos + u sin.

    These are the pairs of Hugging Face's weights; those of the paper are neighbouring features.  x
    and `out`, which receives the result, are (batch, positions, n, features), of whole heads;
    `cos` and `sin` (positions, features of half a head).  The first `rotated` of the n are
    rotated, others are copied.
    """
    library, xp, half = backend_of(x), namespace(x), cos.shape[1]
    count, rows, features = x.shape[0], x.shape[1], rotated * x.shape[3]
    out[:, :, rotated:, :] = x[:, :, rotated:, :]
    for b in library.alike(count):
        flat = (xp.reshape(a[b, :, :rotated, :], (rows, features)) for a in (x, out))
        for a, y, c, s in row_blocks(library, *flat, cos, sin):
            shape = (a.shape[0], features // (2 * half), 2, half)
            a, y = (xp.reshape(one, shape) for one in (a, y))
            u, v, c, s = upcast(a[:, :, 0, :]), upcast(a[:, :, 1, :]), c[:, None, :], s[:, None, :]
            first, second = u * c - v * s, v * c + u * s
            y[:, :, 0, :] = xp.astype(first, y.dtype, copy=False)
            y[:, :, 1, :] = xp.astype(second, y.dtype, copy=False)
    return out


class Rotary:
    """Rotate Q and K of (batch, seq, n + 1, features), and copy V, the last of them.

    Every rank rotates its own positions, before keys are gathered: nothing is sent for it.
    Nothing is saved.  The transpose of a rotation turns back, so backward is forward with the sine
    of the other sign.  The n that are `rotated` are the queries of a group, and the key;
    `features` are those of all keys together, globally.
    """

    parameters: list[Parameter] = []

    def __init__(self, space: Space, rotated: int, features: int, turns: Turns) -> None:
        self.rotated, self.turns = rotated, turns
        self.empty = space.allocator(rotated + 1, features, unit=turns.head)

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, None]:
        """Rotate by the angles of the positions."""
        return self._rotated(x, self.turns.sin), None

    def backward(self, dy: Array, saved: None, within: Pass | None = None) -> Array:
        """Rotate back."""
        return self._rotated(dy, -self.turns.sin)

    def _rotated(self, x: Array, sin: Array) -> Array:
        """Return x rotated, with the V's as they are."""
        return rotate(x, self.turns.cos, sin, self.rotated, out=self.empty(x.dtype))
