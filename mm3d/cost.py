"""Closed forms: floating-point operations, words moved and words kept.

Words are counted as `mm3d.axis.Traffic` counts them and summed over all ranks, which makes them
whole numbers on every grid, also where nothing divides; a rank's share is that sum over P, exactly
where everything does.  What a product moves is the scheme's own to state; everything else follows
from the layouts of its two spaces.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterator

from mm3d.closed_form import Move, ProductShape
from mm3d.contract import lookup
from mm3d.recompute import policy


def flops(layers: int, hidden: int, heads: int, batch: int, seq: int,
          causal: bool = False) -> dict[str, int]:
    """Floating-point operations of all matrix products of the model, over all ranks.

    A multiplication and an addition count as two.  Forward, a layer's four linear layers take
    24 tokens hidden^2 and attention 4 tokens seq hidden; backward twice that.  The scores that
    backward computes again are not counted, nor is anything saved by a causal mask (the scores
    behind it are computed and thrown away).
    """
    tokens = batch * seq
    forward = layers * (24 * tokens * hidden ** 2 + 4 * tokens * seq * hidden)
    return {"forward": forward, "backward": 2 * forward}


def flops_again(layers: int, hidden: int, heads: int, batch: int, seq: int,
                recompute: str = "none") -> int:
    """Floating-point operations of what backward computes again, over all ranks.

    They are none of `flops`: with ``selective`` attention, with groups of layers all of forward
    but the last product of each group (`mm3d.recompute`).
    """
    chosen, tokens = policy(recompute), batch * seq
    forward = flops(layers, hidden, heads, batch, seq)["forward"]
    groups = len(chosen.groups(layers))
    again = forward - groups * 8 * tokens * hidden ** 2 if groups else 0
    return again + chosen.selective * layers * 4 * tokens * seq * hidden


@dataclass(frozen=True)
class _Space:
    """The letters of a `mm3d.space.Space`, without any ranks behind them."""

    sizes: dict[str, int]
    rows: str
    features: str
    vector: str
    travels: str

    def ranks(self, letters: str) -> int:
        return math.prod(self.sizes[c] for c in letters if c != ",")

    @property
    def copies(self) -> int:
        """How many ranks hold the same block of an activation."""
        return self.ranks("".join(self.sizes)) // self.ranks(self.rows + self.features)

    def fetch(self, n: int) -> Iterator[Move]:
        """Fetching a vector of n words: a broadcast off the diagonal, then gathers."""
        spec, _, diagonal = self.vector.partition("@")
        P = self.ranks("".join(self.sizes))
        if diagonal:
            d = self.sizes[diagonal]
            yield Move(diagonal, "broadcast", (d - 1) * n * P // (self.ranks(spec) * d))
        yield from self._extra("all_gather", n)

    def collect(self, n: int) -> Iterator[Move]:
        """Summing the gradient of a vector of n words over the rows, onto where it is stored."""
        spec, _, diagonal = self.vector.partition("@")
        P = self.ranks("".join(self.sizes))
        for c in self.rows.replace(",", ""):
            if c not in self.vector:
                words = 2 * (self.sizes[c] - 1) * n * P // (self.ranks(self.features)
                                                            * self.sizes[c])
                yield Move(c, "all_reduce", words)
        yield from self._extra("reduce_scatter", n)
        if diagonal:
            d = self.sizes[diagonal]
            yield Move(diagonal, "reduce", (d - 1) * n * P // (self.ranks(spec) * d))

    def _extra(self, collective: str, n: int) -> Iterator[Move]:
        spec, P = self.vector.partition("@")[0], self.ranks("".join(self.sizes))
        for k in range(len(self.features), len(spec)):
            words = (self.sizes[spec[k]] - 1) * n * P // self.ranks(spec[:k + 1])
            yield Move(spec[k], collective, words)

    def statistics(self, rows: int, n: int) -> Iterator[Move]:
        """Summing n numbers a row over the ranks that share the row."""
        for c in self.features:
            lines = self.ranks("".join(self.sizes)) // (self.ranks(self.rows) * self.sizes[c])
            yield Move(c, "all_reduce", 2 * (self.sizes[c] - 1) * rows * n * lines)

    def sequence(self, collective: str, words: int) -> Iterator[Move]:
        """Moving an activation of so many words along the sequence, if it is divided."""
        for c in self.rows.partition(",")[2]:
            yield Move(c, collective, (self.sizes[c] - 1) * words * self.copies)


def _spaces(name: str, sizes: dict[str, int], batch: int, seq: int,
            **options: Any) -> tuple[_Space, _Space]:
    outer, inner = lookup(name).layouts(sizes, batch, seq, **options)
    return _Space(sizes, *outer), _Space(sizes, *inner)


Moves = dict[str, tuple[list[Move], list[Move]]]


def _layer_moves(name: str, sizes: dict[str, int], hidden: int, batch: int, seq: int,
                 keep: str, rows: str) -> Moves:
    """Collectives of one Transformer layer forward and backward, by what enters them."""
    h, M = hidden, batch * seq
    outer, inner = _spaces(name, sizes, batch, seq, rows=rows)
    norm = ([*outer.statistics(M, 1), *outer.statistics(M, 1), *outer.fetch(h), *outer.fetch(h)],
            [*outer.collect(h), *outer.collect(h), *outer.statistics(M, 2)])
    keys_and_values = [*inner.sequence("all_gather", 2 * M * h)]
    found = {"ln1": norm, "ln2": norm, "gelu": ([], []), "attention": (
        keys_and_values, [*keys_and_values, *inner.sequence("reduce_scatter", 2 * M * h)])}
    for part, product in zip(("qkv", "proj", "up", "down"), layer_products(M, h)):
        there, back = lookup(name).product_moves(sizes, product, keep=keep)
        target = inner if product.way == "into" else outer
        found[part] = there, back
        adds = "gelu" if part == "up" else part    # GELU adds the bias of the product before it
        found[adds] = ([*found[adds][0], *target.fetch(product.K)],
                       [*found[adds][1], *target.collect(product.K)])
    return found


def _phases(name: str, sizes: dict[str, int], layers: int, hidden: int, batch: int, seq: int,
            keep: str, rows: str, recompute: str) -> dict[str, list[tuple[int, list[Move]]]]:
    """How often a rank enters which collectives in each phase."""
    parts = _layer_moves(name, sizes, hidden, batch, seq, keep, rows)
    chosen = policy(recompute)
    groups = len(chosen.groups(layers))
    forward = [(layers, there) for there, _ in parts.values()]
    backward = [(layers, back) for _, back in parts.values()]
    if groups:    # all is done again but the last product of each group, with the GELU before it
        last = ("gelu", "down") if chosen.selective else ("down",)    # if that is done later
        backward += forward + [(-groups, parts[part][0]) for part in last]
        # Nothing of that product is kept for its backward.
        bare = _layer_moves(name, sizes, hidden, batch, seq, "none", rows)
        backward += [(groups, bare["down"][1]), (-groups, parts["down"][1])]
    if chosen.selective:
        backward += [(layers, parts[part][0]) for part in ("ln1", "attention", "ln2", "gelu")]
    return {"forward": forward, "backward": backward}


def transformer_moves(name: str, sizes: dict[str, int], layers: int, hidden: int, batch: int,
                      seq: int, keep: str = "none", rows: str = "auto",
                      recompute: str = "none") -> dict[str, dict[tuple[str, str], Move]]:
    """Collectives of the model by phase, direction and kind.

    Parameters
    ----------
    name : str
        The scheme.
    sizes : dict of str to int
        Its grid.
    layers, hidden, batch, seq : int
        The model; the number of heads does not matter.
    keep, rows : str
        Options of `mm3d.schemes.cube.Cube`.
    recompute : str
        See `mm3d.recompute`; what is computed again is sent again, in backward.

    Returns
    -------
    dict
        "forward" and "backward": {(direction, collective): Move}, words summed over all ranks and
        calls of each rank.  Directions of one rank move nothing and are left out.
    """
    phases = _phases(name, sizes, layers, hidden, batch, seq, keep, rows, recompute)
    result = {}
    for phase, entered in phases.items():
        words, calls = Counter(), Counter()
        for times, moves in entered:
            for move in moves:
                if sizes[move.axis] > 1:
                    words[move.axis, move.collective] += times * move.words
                    calls[move.axis, move.collective] += times * move.calls
        result[phase] = {key: Move(*key, words[key], calls[key]) for key in words if calls[key]}
    return result


def transformer_words(name: str, sizes: dict[str, int], layers: int, hidden: int, heads: int,
                      batch: int, seq: int, keep: str = "none", rows: str = "auto",
                      recompute: str = "none") -> dict[str, dict[tuple[str, str], int]]:
    """The words of `transformer_moves` alone."""
    moves = transformer_moves(name, sizes, layers, hidden, batch, seq, keep, rows, recompute)
    return {phase: {key: move.words for key, move in found.items()}
            for phase, found in moves.items()}


def parameters(layers: int, hidden: int) -> int:
    """Trained numbers of the model: a layer has 12 hidden^2 + 13 hidden."""
    return layers * (12 * hidden ** 2 + 13 * hidden)


def saved_words(name: str, sizes: dict[str, int], layers: int, hidden: int, heads: int, batch: int,
                seq: int, keep: str = "none", rows: str = "auto", recompute: str = "none") -> int:
    """Words kept between forward and backward, over all ranks.

    A layer keeps, of each token: twice the normalized row, the row after the affine part and a
    number (LN), Q, K and V, the attention's output and one number a head, and the wide activation
    before and after GELU; each rank the gathered weights of the norms and bias of the GELU, and
    what the products keep.  With recomputation of each group of layers the input of the first
    (`mm3d.recompute`); with "selective" of each layer the inputs of the norms, Q, K and V, and
    the wide activation before GELU.
    """
    outer, inner = _spaces(name, sizes, batch, seq, rows=rows)
    M, h, P = batch * seq, hidden, math.prod(sizes.values())
    chosen = policy(recompute)
    if chosen.every:
        return len(chosen.groups(layers)) * outer.copies * M * h
    if chosen.selective:
        return layers * M * (outer.copies * 2 * h + inner.copies * (3 * h + 4 * h))
    outside = outer.copies * M * 4 * h + 2 * M * P // outer.ranks(outer.rows)
    inside = inner.copies * M * (3 * h + h + heads + 8 * h)
    vectors = 2 * h * P // outer.ranks(outer.features) + 4 * h * P // inner.ranks(inner.features)
    kept = sum(lookup(name).kept_words(sizes, product, keep=keep)
               for product in layer_products(M, h))
    return layers * (outside + inside + vectors + kept)


def peak_words(name: str, sizes: dict[str, int], layers: int, hidden: int, heads: int, batch: int,
               seq: int, keep: str = "none", rows: str = "auto",
               recompute: str = "none") -> float:
    """Words of a rank at the worst moment of a step, where everything divides.

    Parameters and gradients, input and output with their gradients, all that is kept between
    forward and backward, and what passes: the gradients of one linear layer or activation, that
    of the residual stream, and what products gather; with recomputation also what is computed
    again at one time.  Blocks of elementwise work are left out.
    """
    outer, inner = _spaces(name, sizes, batch, seq, rows=rows)
    M, h, P = batch * seq, hidden, math.prod(sizes.values())
    outside = outer.copies * M / P
    chosen = policy(recompute)
    lasting = (2 * parameters(layers, h) + saved_words(
        name, sizes, layers, h, heads, batch, seq, keep, rows, recompute)) / P + 3 * h * outside
    passing = [*_passing(name, sizes, h, batch, seq, keep, rows, chosen.selective)]
    groups = chosen.groups(layers)
    if groups:
        within = "selective" if chosen.selective else "none"
        last = layer_products(M, h)[-1]
        down = lookup(name).kept_words(sizes, last, keep=keep)    # not at its end
        passing[-1] = [*_passing(name, sizes, h, batch, seq, "none", rows, chosen.selective)][-1]
        lasting += (saved_words(name, sizes, groups[0], h, heads, batch, seq, keep, rows, within)
                    - down) / P + h * outside * (len(groups) > 1)    # the gradient at its end
    # The input of the model, and of a group, is itself kept, and counted already.
    return lasting + h * outside * (1 - bool(groups) - chosen.selective) + max(passing)


def _passing(name: str, sizes: dict[str, int], h: int, batch: int, seq: int, keep: str, rows: str,
             selective: bool) -> Iterator[float]:
    """Words of a rank that come and go in backward around each linear layer; with `selective` also
    of what is computed again for it: its input, and what the layer before it keeps."""
    outer, inner = _spaces(name, sizes, batch, seq, rows=rows)
    M, P = batch * seq, math.prod(sizes.values())
    outside, inside = outer.copies * M / P, inner.copies * M / P
    split = math.prod(sizes[c] for c in inner.rows.partition(",")[2])
    dealt = "positions" if outer.rows.partition(",")[2] else "sequences"
    # Keys and values along a divided sequence, their gradients, and the buffer they are sent from.
    along = 2 * h * inside * split * (3 if split > 1 else 0)
    # Before each linear layer: a norm, attention, a norm, GELU.
    before = (2 * h * outside, 4 * h * inside + along, 2 * h * outside, 8 * h * inside)
    again = (2 * h * outside, h * inside, 2 * h * outside, 4 * h * inside)
    for product, layer, kept in zip(layer_products(M, h), before, again):
        source, target = (outside, inside) if product.way == "into" else (inside, outside)
        N, K = product.N, product.K
        around = N * source + K * target + N * K / P + lookup(name).transient_words(
            sizes, product, keep=keep, rows=dealt)
        yield max(around, layer) + kept * selective


def layer_products(tokens: int, hidden: int, heads: int = 1) -> list[ProductShape]:
    """Shapes of the four products of one Transformer layer.

    The number of heads matters where their features are divided, to local products alone.
    """
    h, head = hidden, hidden // heads
    return [ProductShape("into", tokens, h, 3 * h, (1, 3 * head)),
            ProductShape("back", tokens, h, h, (head, 1)),
            ProductShape("into", tokens, h, 4 * h), ProductShape("back", tokens, 4 * h, h)]


def lower_bound(M: int, N: int, K: int, ranks: int) -> float:
    """Words that some rank must at least move to multiply M x N by N x K on so many ranks.

    The tight memory-independent bound of Al Daas, Ballard, Grigori, Kumar and Rouse (2022) in
    its three regimes, in which the best grid has one, two or three directions.
    """
    k, n, m = sorted((M, N, K))
    if ranks * n <= m:
        data = n * k + (m * n + m * k) / ranks
    elif ranks * k * k <= m * n:
        data = 2 * k * math.sqrt(m * n / ranks) + m * n / ranks
    else:
        data = 3 * (m * n * k / ranks) ** (2 / 3)
    return data - (m * n + n * k + m * k) / ranks
