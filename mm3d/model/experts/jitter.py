"""Draw the random factors of a router's input, which are the same on every mesh.

They are drawn as the masks of dropout are (`mm3d.model.masks`): a factor depends on the seed, the
step of training, the layer, the global token and the feature alone.  Recomputation and backward
draw again what forward has drawn.
"""

import numpy as np

from mm3d.model.masks import BITS, draw_numbers


def draw_factors(seed: int, step: int, name: str, seq: int, place: tuple[slice, slice, slice],
                 jitter: float, dtype: np.dtype = np.dtype(np.float32)) -> np.ndarray:
    """Draw factors between 1 - jitter and 1 + jitter for a part of a router's input.

    Source: Fedus, Zoph and Shazeer, arXiv 2101.03961, section 2.4.

    Parameters
    ----------
    seed, step : int
        Seed of the model, and step of training.
    name : str
        Name of the router in the model.
    seq : int
        Global number of positions in a sequence.
    place : tuple of slice
        Sequences of the global batch, positions and features of the part, with start and stop.
    jitter : float
        Largest distance from 1; there are 65536 different factors, with the mean 1.
    dtype : dtype
        Type of the factors.

    Returns
    -------
    ndarray
        (batch, seq, features) of the part.
    """
    out = np.empty(tuple(s.stop - s.start for s in place), dtype)
    steps = 2 ** BITS
    for drawn, part in draw_numbers(seed, step, f"{name}/jitter", seq, place, out):
        part[...] = 1 + jitter * ((2.0 * drawn + 1 - steps) / steps)
    return out
