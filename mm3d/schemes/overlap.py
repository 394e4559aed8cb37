"""Overlap communication with products, within one forward or backward pass.

The schemes contain the plain algorithms: gather, multiply, sum, one after another.  This module
schedules the collectives that run while a rank multiplies:

=======================  ======================================  ==========================
collective in flight     from                                    to
=======================  ======================================  ==========================
gather of a weight,      the end of the product before the       the product with that
forward                  previous one                            weight
gather of a weight,      the start of the previous product       the product with that
backward                 of a dB                                 weight
gather of A, backward    when dC and B have been gathered        the product of dB
sum of dA                the product of dA                       the end of the product dB
sum of dB                the product of dB                       the next sum of a dB begins
=======================  ======================================  ==========================

Vectors are so short that their collectives would mostly wait until those in flight have left the
link: forward gathers all of them before the first weight, and backward sums their gradients after
the last dB.

With MPICH and one BLAS thread a rank results are, to the bit, those without overlap.  It takes
memory for the terms of two sums of dB and for two gathered weights.

With several panels of rows (`mm3d.schemes.row_panels`), during the product of each the next panel
of A is gathered and the previous panel of C summed; in backward, panels of dC and dA.  The ranks
share each panel equally: the words are the same, the calls more, and the last bits may differ, as
BLAS divides the rows otherwise.

The `Overlap` of a pass holds all collectives in flight; layers and parameters hold none, so any
number of micro-batches can be between forward and backward.  MPI makes progress in panels of each
product and between blocks of elementwise work.  Where backward is in two halves, a
weight is gathered during a product of the first, and dB summed during a product of the second.
"""

from typing import Any, Callable, Mapping, Sequence

from mm3d.arrays.backend import Array, Backend, Progress
from mm3d.arrays.blocks import resized_shape
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.axis import Pending
from mm3d.grid.split import Gathered, Operand, Split, gather
from mm3d.schemes.passes import LaterWeights, Pass
from mm3d.schemes.row_panels import RowPanels


def progress_of(*operands: Operand | None) -> Progress:
    """Return the function that progresses the collectives in flight; None if there are none.

    One of the requests is enough: MPI progresses all of them at each test.
    """
    for operand in operands:
        if isinstance(operand, Pending) and operand.request is not None:
            return operand.progress
    return None


class Overlap(Pass):
    """Hold the communication in flight during one forward or backward pass.

    On exit, also after an exception, it completes every collective begun, so that none writes into
    a reused buffer.  It holds at most two gathered weights and two sums of dB.

    `passes` are the layers with weights in the order of their products, each with whether the
    product is a backward one.  Products that backward recomputes are forward ones.  No weight is
    gathered ahead for passes that are left out.  Elementwise work of the backend calls `progress`
    now and then.  Other parameters are as for `Pass`; vectors of a forward pass are gathered
    before its first product.
    """

    sums_at_once = False

    def __init__(self, passes: Sequence[tuple[Any, bool]], backend: Backend,
                 vectors: Mapping[int, Any] | None = None, gathers: bool = False,
                 later: LaterWeights | None = None) -> None:
        super().__init__(vectors, gathers, later)
        self._passes, self._backend = passes, backend
        self._next = self._ahead = 0    # the next product, and the next weight to be gathered
        self._prefetched: dict[int, Pending] = {}    # weights, by the number of their product
        self._summing: tuple[Any, Pending] | None = None    # a weight, and its dB
        self._begun: list[Pending] = []

    def __enter__(self) -> "Overlap":
        for joined in dict.fromkeys(self._vectors.values()) if self._gathers else ():
            self._gather(joined)
        self._backend.between_blocks = self.progress
        self._prefetch_from_here()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._backend.between_blocks = None
        self._finish_weight()
        for pending in self._begun:
            pending.take()
        super().__exit__(*failure)

    def progress(self) -> None:
        """Let MPI make progress on the collectives in flight."""
        if (move := progress_of(*self._begun)) is not None:
            move()

    def forward(self, layer: Any, A: Array) -> tuple[Array, Any]:
        """Compute C = A B with the weight B of `layer`; return it with the data for backward."""
        B, product = self._weight(layer), layer.product
        C, saved = self._ab(product, A, B) if product.overlap else product.forward(A, B)
        del B
        self._prefetch_from_here()
        return C, saved

    def backward(self, layer: Any, dC: Array, saved: Any) -> Array:
        """Compute dA = dC B^T with the weight B of `layer`; add dB to its gradient when summed."""
        if self.later is not None:
            return super().backward(layer, dC, saved)
        B, product = self._weight(layer), layer.product
        dA, dB = (self._ab_backward(product, dC, B, saved) if product.overlap else
                  product.backward(dC, B, saved))
        self._begin_weight(layer.weight, dB)
        return dA

    def backward_input(self, layer: Any, dC: Array, saved: Any) -> tuple[Array, Any]:
        """Compute dA = dC B^T with the weight B of `layer`; return it with the operands of dB.

        Nothing is computed while dA is summed; the sum is nonblocking all the same, so that it
        adds in the order of `backward`.
        """
        B, product = self._weight(layer), layer.product
        if not product.overlap:
            return product.backward_input(dC, B, saved)
        A, B_lj = saved
        dA, dC_ij = self._abt(product, dC, B if B_lj is None else B_lj, self._prefetch)
        return dA.take(), (A, Gathered(dC_ij))

    def backward_weights(self, layer: Any, operands: Any) -> None:
        """Compute dB = A^T dC of the weight B of `layer`; add it to its gradient when summed."""
        product = layer.product
        self._begin_weight(layer.weight, self._atb(product, *operands) if product.overlap else
                           product.backward_weights(operands))

    def finish_gradients(self) -> None:
        """Complete the sums of all gradients computed so far."""
        self._finish_weight()
        super().finish_gradients()

    def _begin_weight(self, weight: Any, dB: Array | Pending) -> None:
        """Add dB to a weight's gradient, or let its sum go on, once the sum before is complete."""
        self._finish_weight()
        if isinstance(dB, Pending) and not dB.done:
            self._summing = weight, dB
        else:
            weight.accumulate(dB.take() if isinstance(dB, Pending) else dB)

    def _finish_weight(self) -> None:
        """Complete the sum of dB in flight."""
        if self._summing is not None:
            weight, dB = self._summing
            self._summing = None
            weight.accumulate(dB.take())

    def _ab(self, product: Any, A: Array, B: Operand) -> tuple[Array, Any]:
        """Compute C = A B (Algorithm 1) while the next weight is gathered, in panels of rows.

        C is returned with the data for backward.
        """
        B_lj, rows = gather(B, product.b), RowPanels(product.a, product.c, product.overlap)
        if rows.count > 1:
            panels, A_il = self._multiply_panels(matmul, A, Gathered(B_lj), product.b, rows,
                                                 self._prefetch, product.keep == "both")
            C = panels.take()
        else:
            A_il = gather(A, product.a)
            C = product.c.reduce_scatter(
                matmul(A_il, B_lj, product.c.term, progress_of(self._prefetch())))
        return C, product.kept(A, A_il, B, B_lj)

    def _ab_backward(self, product: Any, dC: Array, B: Operand,
                     saved: Any) -> tuple[Array, Pending]:
        """Compute dA = dC B^T and dB = A^T dC (Algorithm 2); the sum of dB may be pending."""
        A, B_lj = saved

        def begin_A() -> Operand:
            nonlocal A
            if not isinstance(A, Gathered):
                A = self._begin(product.a.prefetch(A))
            return A

        dA, dC_ij = self._abt(product, dC, B if B_lj is None else B_lj, begin_A)
        moving = progress_of(self._prefetch(), dA)
        terms = matmul_tn(gather(A, product.a), dC_ij, product.b.term,
                          product.accumulate_float32, moving)
        dB = self._begin(product.b.begin_reduce_scatter(terms))
        return dA.take(), dB

    def _abt(self, product: Any, dC: Array, B: Operand,
             begin_next: Callable[[], Operand | None]) -> tuple[Pending, Array]:
        """Compute dA = dC B^T, whose sum may be pending; return it with the gathered dC.

        `begin_next` is called before the product.
        """
        rows = RowPanels(product.c, product.a, product.overlap)
        if rows.count > 1:
            return self._multiply_panels(matmul_nt, dC, B, product.b, rows, begin_next, True)
        dC_ij, B_lj = gather(dC, product.c), gather(B, product.b)
        terms = matmul_nt(dC_ij, B_lj, product.a.term, progress_of(begin_next()))
        del B_lj    # nothing is held longer than it is needed
        return self._begin(product.a.begin_reduce_scatter(terms)), dC_ij

    def _atb(self, product: Any, A: Operand, dC_ij: Operand) -> Pending:
        """Compute dB = A^T dC (Algorithm 5) while the previous sum goes on; dB may be pending."""
        before = self._summing and self._summing[1]
        terms = matmul_tn(gather(A, product.a), gather(dC_ij, product.c), product.b.term,
                          product.accumulate_float32, progress_of(before))
        return self._begin(product.b.begin_reduce_scatter(terms))

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
                    shape = resized_shape(A_n.shape, panels.a.dim,
                                          panels.a.extent * panels.count)
                    A_il = panels.a.axis.backend.empty(shape, A_n.dtype)
                panels.put_rows(A_il, n, A_n)
        return panels.join(sums), A_il

    def _weight(self, layer: Any) -> Array | Pending:
        """Return the weight of `layer`, or the pending gather of it."""
        number, self._next = self._next, self._next + 1
        self._ahead = max(self._ahead, self._next)
        prefetched = self._prefetched.pop(number, None)
        if prefetched is not None and self._passes[number][0] is layer:
            return prefetched
        return layer.weight.value

    def _prefetch_from_here(self) -> None:
        """Start gathering the weights of the next two products, or of one product of backward."""
        self._prefetch()
        if self._next < len(self._passes) and not self._passes[self._next][1]:
            self._prefetch(self._next + 2)

    def _prefetch(self, stop: int = 0) -> Pending | None:
        """Start gathering the weights of the products before `stop`, by default of the next one.

        Returns the gather that was begun last, or None if none is in flight.
        """
        for n in range(self._ahead, min(max(stop, self._next + 1), len(self._passes))):
            layer, backward = self._passes[n]
            product = layer.product
            if product.overlap and not (backward and product.keep != "none"):
                pending = product.b.prefetch(layer.weight.value)
                if isinstance(pending, Pending):    # it can be gathered while this rank computes
                    self._prefetched[n] = self._begin(pending)
            self._ahead = n + 1
        return self._prefetched[max(self._prefetched)] if self._prefetched else None

    def _begin(self, operand: Operand) -> Operand:
        """Return `operand`, and hold it until its collective is complete."""
        if isinstance(operand, Pending) and not operand.done:
            self._begun = [one for one in self._begun if not one.done]
            self._begun.append(operand)
        return operand
