"""Define the interface of the distributed product of a linear layer."""

from abc import ABC, abstractmethod
from typing import Any, Callable

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul_tn
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split


class Product(ABC):
    """Compute the distributed C = A B of a linear layer, and its gradients.

    Attributes
    ----------
    weight : Layout
        Layout of B.
    accumulate_float32 : bool
        Whether dB is computed, summed over the ranks and returned in float32 if the operands
        have 16 bits.
    empty_gradient : callable or None
        Allocates dB from its shape and dtype, if no sum over ranks follows: see
        `mm3d.model.parameters.Parameter.empty_gradient`; None allocates it as any array.
    overlap : bool
        Whether `mm3d.schemes.overlap.Overlap` computes forward and backward instead, while
        communication goes on.  Only a `mm3d.schemes.cube.CubeProduct` can have it.
    gathered_along : Split or None
        How B is divided in the direction along which it is gathered; None if it is not gathered.
    operands : dict of str to str
        For observers: by the name of an attribute, such as the Split `a`, the matrix it moves.
    """

    weight: Layout
    accumulate_float32 = False
    empty_gradient: Callable[..., Array] | None = None
    overlap = False
    gathered_along: Split | None = None
    operands = {"a": "A", "b": "B", "c": "C"}

    def use_weight(self, weight: Any) -> None:
        """Compute dB for a parameter: in the type of its gradient, and in its memory."""
        self.accumulate_float32 = weight.has_master
        self.empty_gradient = weight.empty_gradient

    @abstractmethod
    def forward(self, A: Array, B: Array) -> tuple[Array, Any]:
        """Compute this rank's block of C = A B; return it with the data that backward needs."""

    def backward(self, dC: Array, B: Array, saved: Any) -> tuple[Array, Array]:
        """Compute dA = dC B^T and dB = A^T dC, in the layouts of A and B.

        A product defines this or, if it can compute dB apart, both halves.
        """
        dA, operands = self.backward_input(dC, B, saved)
        return dA, self.backward_weights(operands)

    def backward_input(self, dC: Array, B: Array, saved: Any) -> tuple[Array, Any]:
        """Compute dA = dC B^T; return it with the operands that `backward_weights` needs.

        By default this is the whole `backward`, and what is kept for later is dB.
        """
        return self.backward(dC, B, saved)

    def backward_weights(self, operands: Any) -> Array:
        """Compute dB = A^T dC from the operands that `backward_input` returned."""
        return operands

    def weight_gradient(self, A: Array, dC: Array) -> Array:
        """Compute dB = A^T dC on this rank alone, where no sum over ranks follows."""
        return matmul_tn(A, dC, self.empty_gradient, self.accumulate_float32)

    def recompute_saved(self, A: Array, weight: Any) -> Any:
        """Recompute the data that `backward` needs, without C; `weight` is the parameter of B.

        By default this is a forward whose C is discarded; a product that can avoid the work
        overrides it, and does not read B.
        """
        return self.forward(A, weight.value)[1]

    def forward_transposed(self, C: Array, B: Array) -> Array:
        """Compute A = C B^T, in the layouts of A, B and C: logits with an embedding's table.

        Only products down have it, and its backward.
        """
        raise NotImplementedError(f"{type(self).__name__} has no product with B^T")

    def backward_transposed(self, dA: Array, C: Array, B: Array) -> tuple[Array, Array]:
        """Compute dC = dA B and dB = dA^T C, for A = C B^T."""
        raise NotImplementedError(f"{type(self).__name__} has no product with B^T")
