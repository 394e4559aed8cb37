"""Overlap communication with products, within one forward or backward pass.

The schemes contain the plain algorithms: gather, multiply, sum, one after another.  This module
schedules the collectives that run while a rank multiplies:

=======================  ======================================  ==========================
collective in flight     from                                    to
=======================  ======================================  ==========================
gather of a weight       when the operands of the product        the product with that
                         before it have been gathered            weight
gather of A, backward    when dC and B have been gathered        the product of dB
sum of dA                the product of dA                       the end of the product dB
sum of dB                the product of dB                       the next sum of a dB begins
=======================  ======================================  ==========================

With several panels of rows (`mm3d.schemes.row_panels`) the next panel of A is gathered, and the
one before of C summed, during the product of each; in backward those of dC and of dA.

The `Overlap` of a pass holds all collectives in flight; layers and parameters hold none, so any
number of micro-batches can be between forward and backward.  Where backward is in two halves, a
weight is gathered during a product of the first, and dB summed during a product of the second.
"""

from typing import Any, Callable, Protocol, Sequence

from mm3d.arrays.backend import Array, Progress
from mm3d.arrays.blocks import resized_shape
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.axis import Pending
from mm3d.grid.split import Split
from mm3d.schemes.row_panels import RowPanels


class Gathered:
    """Hold an operand that is already gathered."""

    def __init__(self, array: Array) -> None:
        self.array = array


Operand = Array | Gathered | Pending


def gather(operand: Operand, split: Split) -> Array:
    """Return the gathered operand: gather it along `split`, unless that is done or in flight."""
    if isinstance(operand, Pending):
        return operand.take()
    return operand.array if isinstance(operand, Gathered) else split.all_gather(operand)


def progress_of(*operands: Operand | None) -> Progress:
    """Return the function that progresses the collectives in flight; None if there are none.

    One of the requests is enough: MPI progresses all of them at each test.
    """
    for operand in operands:
        if isinstance(operand, Pending) and operand.request is not None:
            return operand.progress
    return None


class WeightedLayer(Protocol):
    """Describe the interface of a layer with a weight, such as `mm3d.model.layers.Linear`."""

    product: Any
    weight: Any


WeightedPass = tuple[WeightedLayer, bool]    # a layer, and whether its backward is computed


class Overlap:
    """Hold the communication in flight during one forward or backward pass.

    It is a context manager for one pass and is passed down to the layers.  On exit, also after an
    exception, it completes every collective begun, so that none writes into a reused buffer.  It
    holds at most one prefetched weight and two sums of dB.

    Parameters
    ----------
    passes : sequence of (WeightedLayer, bool)
        The layers with weights in the order of their products, each with whether the product is
        a backward one.  Products that backward recomputes are forward ones.  No weight is
        gathered ahead for passes that are left out.
    """

    def __init__(self, passes: Sequence[WeightedPass]) -> None:
        self._passes, self._next = passes, 0    # index of the next product
        self._prefetched: tuple[WeightedLayer, Pending] | None = None
        self._summing: tuple[Any, Pending] | None = None    # a weight, and its dB
        self._begun: list[Pending] = []

    def __enter__(self) -> "Overlap":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.finish_gradients()
        for pending in self._begun:
            pending.take()

    def forward(self, layer: WeightedLayer, A: Array) -> tuple[Array, Any]:
        """Compute C = A B with the weight B of `layer`; return it with the data for backward."""
        B = self._weight(layer)
        if layer.product.overlap:
            return layer.product.forward(A, B, self)
        return layer.product.forward(A, B)

    def backward(self, layer: WeightedLayer, dC: Array, saved: Any) -> Array:
        """Compute dA = dC B^T with the weight B of `layer`; add dB to its gradient when summed."""
        B = self._weight(layer)
        if layer.product.overlap:
            dA, dB = layer.product.backward(dC, B, saved, self)
        else:
            dA, dB = layer.product.backward(dC, B, saved)
        self.finish_gradients()
        if isinstance(dB, Pending) and not dB.done:
            self._summing = layer.weight, dB
        else:
            layer.weight.accumulate(dB.take() if isinstance(dB, Pending) else dB)
        return dA

    def backward_input(self, layer: WeightedLayer, dC: Array, saved: Any) -> tuple[Array, Any]:
        """Compute dA = dC B^T with the weight B of `layer`; return it with the operands of dB."""
        B = self._weight(layer)
        if layer.product.overlap:
            return layer.product.backward_input(dC, B, saved, self)
        return layer.product.backward_input(dC, B, saved)

    def backward_weights(self, layer: WeightedLayer, operands: Any) -> None:
        """Compute dB = A^T dC of the weight B of `layer`; add it to its gradient when summed."""
        if layer.product.overlap:
            dB = layer.product.backward_weights(operands, self)
        else:
            dB = layer.product.backward_weights(operands)
        self.finish_gradients()
        self._summing = layer.weight, dB if isinstance(dB, Pending) else Pending(dB)

    def finish_gradients(self) -> None:
        """Complete the sum of dB in flight, so that all gradients computed so far are complete."""
        if self._summing is not None:
            weight, dB = self._summing
            self._summing = None
            weight.accumulate(dB.take())

    def ab(self, A: Operand, B: Operand, a: Split, b: Split, c: Split, panels: int = 1,
           keep: bool = False) -> tuple[Array, Array | None]:
        """Compute C = A B (Algorithm 1) while the next weight is gathered.

        In several `panels` of rows, each is multiplied while the next of A is gathered and the
        one before of C is summed.  C is returned with A_il, or None if that is not kept.
        """
        rows = RowPanels(a, c, panels)
        if rows.count > 1:
            C, A_il = self._multiply_panels(matmul, A, B, b, rows, self._prefetch, keep)
            return C.take(), A_il
        A_il, B_lj = gather(A, a), gather(B, b)
        C = c.reduce_scatter(matmul(A_il, B_lj, c.term, progress_of(self._prefetch())))
        return C, A_il if keep else None

    def ab_backward(self, dC: Operand, A: Operand, B: Operand, a: Split, b: Split, c: Split,
                    accumulate_float32: bool = False,
                    panels: int = 1) -> tuple[Array, Pending]:
        """Compute dA = dC B^T and dB = A^T dC (Algorithm 2); the sum of dB may still be pending.

        A is gathered during the product of dA; dA is summed, and the next
        weight gathered, during the product of dB.
        """
        gathering: list[Operand] = []

        def begin_A() -> Operand:
            gathering.append(A if isinstance(A, Gathered) else self._begin(a.prefetch(A)))
            return gathering[0]

        dA, dC_ij = self._abt(dC, B, c, b, a, panels, begin_A, keep=True)
        moving = progress_of(self._prefetch(), dA)
        terms = matmul_tn(gather(gathering[0], a), dC_ij, b.term, accumulate_float32, moving)
        dB = self._begin(b.begin_reduce_scatter(terms))
        return dA.take(), dB

    def abt(self, A: Operand, B: Operand, a: Split, b: Split, c: Split, panels: int = 1,
            keep: bool = False) -> tuple[Array, Array | None]:
        """Compute C = A B^T (Algorithm 3) while the next weight is gathered; otherwise as `ab`.

        Nothing is left to do while C is summed; the sum is begun all the same, since it then adds
        in the order of `ab_backward`.
        """
        C, A_il = self._abt(A, B, a, b, c, panels, self._prefetch, keep)
        return C.take(), A_il

    def _abt(self, A: Operand, B: Operand, a: Split, b: Split, c: Split, panels: int,
             begin_next: Callable[[], Operand | None], keep: bool) -> tuple[Pending, Array | None]:
        """Compute C = A B^T, whose sum may be pending; `begin_next` is called before the product.
        """
        rows = RowPanels(a, c, panels)
        if rows.count > 1:
            return self._multiply_panels(matmul_nt, A, B, b, rows, begin_next, keep)
        A_il, B_jl = gather(A, a), gather(B, b)
        terms = matmul_nt(A_il, B_jl, c.term, progress_of(begin_next()))
        del B_jl    # nothing is held longer than it is needed
        return self._begin(c.begin_reduce_scatter(terms)), A_il if keep else None

    def _multiply_panels(self, multiply: Callable[..., Array], A: Array, B: Operand, b: Split,
                         panels: RowPanels, begin_next: Callable[[], Operand | None],
                         keep: bool) -> tuple[Pending, Array | None]:
        """Multiply A in panels of rows by the gathered B; C is complete when it is waited for.

        `begin_next` is called before the product of the first panel, once the second is on its
        way.  All rows of A are returned if they are to be kept.
        """
        parts, sums, A_il, after = panels.parts(A), [], None, None
        ahead: Operand | None = self._begin(panels.a.prefetch(parts[0]))
        for n in range(panels.count):
            A_n = gather(ahead, panels.a)
            ahead = (self._begin(panels.a.prefetch(parts[n + 1]))
                     if n + 1 < panels.count else None)
            if n == 0:
                B = gather(B, b)
                after = begin_next()
            terms = multiply(A_n, B, panels.c.term, progress_of(ahead, after, *sums[-1:]))
            sums.append(self._begin(panels.c.begin_reduce_scatter(terms)))
            if keep:
                if A_il is None:
                    shape = resized_shape(A_n.shape, panels.a.dim, sum(panels.a.counts)
                                          * panels.count)
                    A_il = panels.a.axis.backend.empty(shape, A_n.dtype)
                panels.put_rows(A_il, n, A_n)
        return panels.join(sums), A_il

    def atb(self, A: Operand, B: Operand, a: Split, b: Split, c: Split,
            accumulate_float32: bool = False) -> Pending:
        """Compute C = A^T B (Algorithm 5) while the sum before goes on; its own may be pending.

        A is gathered while B is.
        """
        if not isinstance(A, Gathered):
            A = self._begin(a.prefetch(A))
        B_il = gather(B, b)
        before = self._summing and self._summing[1]
        terms = matmul_tn(gather(A, a), B_il, c.term, accumulate_float32, progress_of(before))
        return self._begin(c.begin_reduce_scatter(terms))

    def _weight(self, layer: WeightedLayer) -> Array | Pending:
        """Return the weight of `layer`, or the pending gather of it."""
        self._next += 1
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] is layer:
            return prefetched[1]
        return layer.weight.value

    def _prefetch(self) -> Pending | None:
        """Start gathering the weight of the next product."""
        if self._next >= len(self._passes):
            return None
        layer, backward = self._passes[self._next]
        pending = layer.product.prefetch(layer.weight.value, backward)
        if pending is not None:
            self._prefetched = layer, self._begin(pending)
        return pending

    def _begin(self, operand: Operand) -> Operand:
        """Return `operand`, and hold it until its collective is complete."""
        if isinstance(operand, Pending) and not operand.done:
            self._begun = [one for one in self._begun if not one.done]
            self._begun.append(operand)
        return operand
