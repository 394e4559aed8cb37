"""Compute what data parallelism costs in closed form: words along d and r, and memory of a rank.

Words are counted as in `mm3d.model.cost`: summed over all ranks, here of a stage in all replicas,
so they are exact where shards are uneven, or empty.
"""

from dataclasses import dataclass
from typing import Iterable, Sequence

from mm3d.model.chain_specs import ModelSpec
from mm3d.model.specs import LayerPass
from mm3d.schemes.parallelism import Parallelism
from mm3d.training.data_parallel import check_zero

Key = tuple[str, str]    # direction and kind of collective


def stored_words(chunks: Sequence[ModelSpec], parallelism: Parallelism) -> int:
    """Count the words of all parameters that the ranks of a stage store, in one replica."""
    return sum(one.times * sum(one.layer.parameter_words(parallelism).values())
               for chunk in chunks for one in chunk.chain.forward_passes())


def gradient_words(chunks: Sequence[ModelSpec], parallelism: Parallelism) -> int:
    """Count the words of the gradients that the ranks of a stage sum, in one replica.

    They are those of all parameters, and of a tied head once more.
    """
    return sum(one.times * one.layer.gradient_words(parallelism)
               for chunk in chunks for one in chunk.chain.forward_passes())


def read_words(chunks: Sequence[ModelSpec], parallelism: Parallelism) -> int:
    """Count the stored words of the parameters that a micro-batch reads, in one replica.

    Forward reads all of them once, and backward the weights of products once more; recomputed
    layers read theirs again.
    """
    def read(passes: Iterable[LayerPass], which: int) -> int:
        return sum(one.times * one.layer.read_words(parallelism)[which] for one in passes)
    return sum(read(chunk.chain.forward_passes(), 0) + read(chunk.chain.backward_passes(), 1)
               + read(chunk.chain.passes_repeated_in_backward(), 0) for chunk in chunks)


def data_words(chunks: Sequence[ModelSpec], parallelism: Parallelism, data: int, zero: int,
               microbatches: int, shards: int | None = None) -> dict[Key, int]:
    """Count the words of a step along d and r, with the refresh of values that ends it.

    Parameters
    ----------
    chunks : sequence of ModelSpec
        The layers of each chunk of a stage.
    parallelism : Parallelism
        The scheme and grid of the stage in one replica.
    data : int
        Number of replicas.
    zero : {0, 1, 2, 3}
        The stage of ZeRO.
    microbatches : int
        Number of micro-batches of a replica.
    shards : int, optional
        Number of replicas that divide a copy of the model, by default all.

    Returns
    -------
    dict
        Words of all ranks of the stage by direction and collective; what moves nothing is left
        out.
    """
    check_zero(zero)
    shards = data if shards is None else shards
    copies, psi = data // shards, stored_words(chunks, parallelism)
    gradients = gradient_words(chunks, parallelism)
    once = data - copies    # a gather of every rank: each copy has shards - 1 receivers of a word
    gathered = {0: gradients, 3: microbatches * read_words(chunks, parallelism)}.get(zero, psi)
    # Each rank sums its whole block over r where gradients are whole, and else its shard.
    summed = (data if zero == 0 else copies) - (shards if zero == 0 else 1)
    words = {("d", "reduce_scatter"): (microbatches if zero > 1 else 1) * once * gradients,
             ("d", "all_gather"): once * gathered, ("r", "all_reduce"): 2 * summed * gradients}
    return {key: number for key, number in words.items() if number}


@dataclass(frozen=True)
class StateWords:
    """Hold how many words of a rank's state there are, for each word of its parameters.

    Attributes
    ----------
    value, gradient, master : float
        Words of values, of gradients, and of masters or of each moment of an optimizer.
    """

    value: float
    gradient: float
    master: float


def state_words(zero: int, shards: int) -> StateWords:
    """Return what a stage of ZeRO divides among `shards` replicas, where all divides evenly."""
    check_zero(zero)
    part = 1 / shards
    return StateWords(part if zero > 2 else 1, part if zero > 1 else 1, part if zero else 1)


def state_bytes(zero: int, shards: int, value: int = 2, gradient: int = 2,
                master: int = 4, moments: int = 8) -> float:
    """Return the bytes of a rank for each of its parameters, before any activation.

    By default numbers are those of figure 1 of ZeRO (Rajbhandari et al., 2020): values and
    gradients of 16 bits, masters and both moments of Adam in float32.  Without separate masters,
    `master` is 0.
    """
    words = state_words(zero, shards)
    return (value * words.value + gradient * words.gradient + (master + moments) * words.master)


def parameter_peak_words(zero: int, shards: int, stored: float, largest: float) -> float:
    """Count the words of a rank in parameters and gradients at the peak of a step.

    One type is used, so values are their own masters.

    Parameters
    ----------
    zero, shards : int
        As in `state_words`.
    stored : float
        Words of the rank's parameters, undivided.
    largest : float
        Words of the rank's largest weight: while its gradient is summed, or its value gathered,
        all of it is there once more.
    """
    words = state_words(zero, shards)
    extra = (1 + 1 / shards) * largest if zero > 1 else 0
    return (words.value + words.gradient) * stored + extra
