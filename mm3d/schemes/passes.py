"""Hold what the layers share during one forward or backward pass: vectors, and their gradients.

Vectors are so short that a call of a collective costs more than its words.  So those of a block
of the model that are stored alike are gathered in one call, when the first of them is used, and
the terms of their gradients are summed in one call, when the last one is there.
"""

from typing import Any, Mapping

from mm3d.arrays.backend import Array


LaterWeights = list[tuple[Any, Any]]    # layers, and the operands of their weights' gradients


class Pass:
    """Hold the vectors of one forward or backward pass, and compute its products.

    It is a context manager for one pass and is passed down to the layers, which hold nothing
    themselves: any number of micro-batches can be between forward and backward.

    `vectors` has, by the identity of a parameter, the `mm3d.model.joined_vectors.JoinedVectors`
    that it is joined with, in the order in which forward uses each of them once.  Others are
    gathered and summed alone.  `gathers` says whether the pass is forward: what backward
    recomputes is a part of a block alone, and gathers each vector when it is used.  A list `later`
    makes the pass the first half of backward, and gets what the second needs.  A layer with a
    weight has a `product` and a `weight`, such as `mm3d.model.layers.Linear`.
    """

    sums_at_once = True    # as soon as all terms are there, not at the end of the pass

    def __init__(self, vectors: Mapping[int, Any] | None = None, gathers: bool = False,
                 later: LaterWeights | None = None) -> None:
        self._vectors, self._gathers, self.later = vectors or {}, gathers, later
        self._gathered: dict[int, Array] = {}    # by the identity of the parameter
        self._terms: dict[Any, dict[Any, Array]] = {}    # by joined vectors, then by parameter

    def __enter__(self) -> "Pass":
        return self

    def __exit__(self, *failure: Any) -> None:
        if failure[0] is None:    # other ranks may not have failed
            self.finish_gradients()

    def vector_of(self, parameter: Any, vector: Any) -> Array:
        """Gather a vector, with those that it is joined with or alone."""
        key = id(parameter)
        if not self._gathers or key not in self._vectors:
            return vector.gather_features(parameter.value)
        if key not in self._gathered:
            self._gather(self._vectors[key])
        return self._gathered.pop(key)

    def _gather(self, joined: Any) -> None:
        """Gather all vectors that are joined."""
        self._gathered |= zip(map(id, joined.parameters), joined.gather())

    def accumulate_terms(self, parameter: Any, vector: Any, terms: Array) -> None:
        """Add the sum of all ranks' terms to a vector's gradient, with the last one joined."""
        joined = self._vectors.get(id(parameter))
        if joined is None:
            parameter.accumulate(vector.reduce_gradient(terms))
            return
        self._terms.setdefault(joined, {})[parameter] = terms
        if self.sums_at_once and parameter is joined.parameters[0]:    # the last in backward
            self._sum(joined)

    def _sum(self, joined: Any) -> None:
        """Sum the gradients of the vectors whose terms are there."""
        terms = self._terms.pop(joined)
        part = joined.part(terms)
        part.accumulate([terms[parameter] for parameter in part.parameters])

    def finish_gradients(self) -> None:
        """Complete the sums of all gradients computed so far."""
        for joined in [*self._terms]:
            self._sum(joined)

    def forward(self, layer: Any, A: Array) -> tuple[Array, Any]:
        """Compute C = A B with the weight B of `layer`; return it with the data for backward."""
        return layer.product.forward(A, layer.weight.value)

    def backward(self, layer: Any, dC: Array, saved: Any) -> Array:
        """Compute dA = dC B^T with the weight B of `layer`; add dB to its gradient, or later."""
        if self.later is not None:
            dA, operands = self.backward_input(layer, dC, saved)
            self.later.append((layer, operands))
            return dA
        dA, dB = layer.product.backward(dC, layer.weight.value, saved)
        layer.weight.accumulate(dB)
        return dA

    def backward_input(self, layer: Any, dC: Array, saved: Any) -> tuple[Array, Any]:
        """Compute dA = dC B^T with the weight B of `layer`; return it with the operands of dB."""
        return layer.product.backward_input(dC, layer.weight.value, saved)

    def backward_weights(self, layer: Any, operands: Any) -> None:
        """Compute dB = A^T dC of the weight B of `layer`; add it to its gradient."""
        layer.weight.accumulate(layer.product.backward_weights(operands))


ALONE = Pass()    # of layers that are called by themselves: it joins nothing, and holds nothing
