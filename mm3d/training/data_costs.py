"""Compute what data parallelism costs in closed form: words along d, r and e, and memory.

Words are counted as in `mm3d.model.cost`: summed over all ranks, here of a stage in all replicas,
so they are exact where shards are uneven, or empty.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Sequence

from mm3d.model.chain_specs import ModelSpec
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.specs import LayerPass
from mm3d.schemes.parallelism import Parallelism
from mm3d.training.data_grid import expert_shards
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


def expert_words(chunks: Sequence[ModelSpec], parallelism: Parallelism) -> tuple[int, int]:
    """Count the words of experts that the ranks of a stage store and read, in one replica.

    They are a part of `stored_words`, `gradient_words` and `read_words`.
    """
    stored = read = 0
    for chunk in chunks:
        for which, passes in ((1, chunk.chain.forward_passes()),
                              (2, chunk.chain.backward_passes()),
                              (1, chunk.chain.passes_repeated_in_backward())):
            read += sum(one.times * one.layer.expert_words(parallelism)[which] for one in passes)
        stored += sum(one.times * one.layer.expert_words(parallelism)[0]
                      for one in chunk.chain.forward_passes())
    return stored, read


def data_words(chunks: Sequence[ModelSpec], parallelism: Parallelism, data: int, zero: int,
               microbatches: int, shards: int | None = None,
               expert_parallel: int = 1) -> dict[Key, int]:
    """Count the words of a step along d and r, with the refresh of values that ends it.

    Those in which tokens come to experts, and the counts of `count_words`, are not included.

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
    expert_parallel : int
        Number of replicas that divide the experts.

    Returns
    -------
    dict
        Words of all ranks of the stage by direction and collective; what moves nothing is left
        out.
    """
    check_zero(zero)
    shards = data if shards is None else shards
    stored, read = expert_words(chunks, parallelism)
    words: Counter[Key] = Counter()
    for (psi, gradients, reads), copies, parts in (
            ((stored_words(chunks, parallelism) - stored,
              gradient_words(chunks, parallelism) - stored,
              read_words(chunks, parallelism) - read), data, shards),
            ((stored, stored, read), data // expert_parallel,
             expert_shards(shards, expert_parallel))):
        gathered = {0: gradients, 3: microbatches * reads}.get(zero, psi)
        words.update(_words_of_copies(gradients, gathered, copies, parts, zero, microbatches))
    return {key: number for key, number in words.items() if number}


def _words_of_copies(gradients: int, gathered: int, data: int, shards: int, zero: int,
                     microbatches: int) -> dict[Key, int]:
    """Count the words of gradients summed over `data` copies, and of what is gathered of them."""
    copies = data // shards
    once = data - copies    # a gather of every rank: each copy has shards - 1 receivers of a word
    # Each rank sums its whole block over r where gradients are whole, and else its shard.
    summed = (data if zero == 0 else copies) - (shards if zero == 0 else 1)
    return {("d", "reduce_scatter"): (microbatches if zero > 1 else 1) * once * gradients,
            ("d", "all_gather"): once * gathered, ("r", "all_reduce"): 2 * summed * gradients}


def count_words(experts: ExpertOptions, parallelism: Parallelism, batch: int, data: int,
                shards: int | None = None, expert_parallel: int = 1) -> dict[Key, int]:
    """Count the words in which replicas gather the counts of one pass of a layer of experts.

    These are k E integers for each run of tokens: of a sequence where its positions are divided,
    and else of the sequences of a rank.

    Parameters
    ----------
    experts : ExpertOptions
        The options of the layer.
    parallelism : Parallelism
        The scheme and grid of the stage in one replica.
    batch : int
        Number of sequences of a micro-batch in all replicas.
    data, shards, expert_parallel
        As in `data_words`.
    """
    shards = data if shards is None else shards
    positions = parallelism.outer.sequence_parts
    runs = batch * positions if positions > 1 else data * parallelism.outer.row_parts
    if expert_parallel > 1:
        shards = expert_shards(shards, expert_parallel)
    sizes = {"e": expert_parallel, "d": shards, "r": data // shards // expert_parallel}
    found, lines = {}, parallelism.ranks    # of ranks that hold the same counts at the end
    for c, size in sizes.items():
        if size > 1:
            found[c, "all_gather"] = (size - 1) * lines * runs * experts.top * experts.count
        lines *= size
    return found


@dataclass(frozen=True)
class StateWords:
    """Hold how many words of a rank's state there are, for each word of its parameters.

    Attributes
    ----------
    value, gradient, master : float
        Words of values, of gradients, and of masters or of each moment of an optimizer; of
        gradients that are whole until they are summed, the whole ones.
    """

    value: float
    gradient: float
    master: float


def state_words(zero: int, shards: int) -> StateWords:
    """Return what a stage of ZeRO divides among `shards` replicas, where all divides evenly."""
    check_zero(zero)
    part = 1 / shards
    return StateWords(part if zero > 2 else 1, part if zero > 1 else 1, part if zero else 1)


def all_state_words(chunks: Sequence[ModelSpec], parallelism: Parallelism, data: int, zero: int,
                    shards: int | None = None, expert_parallel: int = 1) -> StateWords:
    """Count what all ranks of a stage hold of its state in all replicas, exactly.

    Parameters and errors are those of `data_words`.  The bias of a router is not included, which
    every rank has.
    """
    check_zero(zero)
    shards = data if shards is None else shards
    experts, _ = expert_words(chunks, parallelism)
    dense = stored_words(chunks, parallelism) - experts
    copies = data // expert_parallel
    parts = expert_shards(shards, expert_parallel)
    return StateWords(*(dense * (data // shards if divided else data)
                        + experts * (copies // parts if divided else copies)
                        for divided in (zero > 2, zero > 1, zero > 0)))


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
