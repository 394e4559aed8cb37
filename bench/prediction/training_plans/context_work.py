"""Count what a context holds in a layer: keys and values of others, and scores at once."""

from mm3d.model.sizes import ModelSizes

# Arrays of keys or values that backward holds of a whole context, or of a block that goes round.
OF_OTHERS = {"gather": 6, "ring": 8}


def words_of_others(context: int, way: str, words: float) -> float:
    """Return the words of others' keys and values, and of their gradients, in backward.

    Parameters
    ----------
    context, way
        The ranks that divide positions, and the way of attention.
    words : float
        Of a rank's own keys.
    """
    if context == 1:
        return 0.0
    return OF_OTHERS[way] * words * (context if way == "gather" else 1)


def scores_held(context: int, way: str, sizes: ModelSizes) -> tuple[float, int]:
    """Return the share of a sequence's scores that attention takes at once, and arrays of them.

    A rank of a context takes a chunk of queries at a time, with all keys, or those that a window
    leaves, or with a chunk of them.
    """
    if context == 1:
        return 1.0, 3
    window = sizes.architecture.window or sizes.seq
    seen = min(1.0, window / sizes.seq + 0.5 / context)
    return (0.5 * seen, 3) if way == "gather" else (0.25 / context, 2)
