"""Define the interface of the distributed product of a linear layer."""

from abc import ABC, abstractmethod
from typing import Any, Callable

from mm3d.arrays.backend import Array
from mm3d.grid.layout import Layout
from mm3d.grid.split import Gathered, Operand, Split, gather


class Product(ABC):
    """Compute the distributed C = A B of a linear layer, and its gradients.

    A parallelism defines three forms: C = A B, dA = dC B^T and dB = A^T dC.  Operands and results
    are this rank's blocks, in the layouts of A, B and C.  With a Split `c` the operand dC of `abt`
    and `atb` may come `Gathered`; with `a`, A, too: `mm3d.grid.split.gather` takes both.

    Attributes
    ----------
    weight : Layout
        Layout of B.
    a, c : Split or None
        How A and C are divided in the directions along which they are gathered, if they are.
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
    a: Split | None = None
    c: Split | None = None
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
    def ab(self, A: Operand, B: Operand) -> Array:
        """Compute C = A B."""

    @abstractmethod
    def abt(self, dC: Operand, B: Operand) -> Array:
        """Compute dA = dC B^T."""

    @abstractmethod
    def atb(self, A: Operand, dC: Operand) -> Array:
        """Compute dB = A^T dC."""

    def gather_once(self, operand: Operand, split: Split | None) -> Operand:
        """Gather an operand of two products once for both, in a scheme that gathers."""
        return operand if split is None else Gathered(gather(operand, split))

    def forward(self, A: Array, B: Array) -> tuple[Array, Any]:
        """Compute C = A B; return it with the data that backward needs."""
        return self.ab(A, B), A

    def backward(self, dC: Array, B: Array, saved: Any) -> tuple[Array, Array]:
        """Compute dA = dC B^T and dB = A^T dC."""
        dA, operands = self.backward_input(dC, B, saved)
        return dA, self.backward_weights(operands)

    def backward_input(self, dC: Array, B: Operand, saved: Any) -> tuple[Array, Any]:
        """Compute dA = dC B^T; return it with the operands that `backward_weights` needs."""
        dC = self.gather_once(dC, self.c)
        return self.abt(dC, B), (saved, dC)

    def backward_weights(self, operands: Any) -> Array:
        """Compute dB = A^T dC from the operands that `backward_input` returned."""
        return self.atb(*operands)

    def recompute_saved(self, A: Array) -> Any:
        """Return the data that `backward` needs, without C.

        A product whose `forward` saves other data than A overrides it.
        """
        return A

    def forward_transposed(self, C: Array, B: Array) -> Array:
        """Compute A = C B^T of a product down: logits with an embedding's table."""
        return self.abt(C, B)

    def backward_transposed(self, dA: Array, C: Array, B: Array) -> tuple[Array, Array]:
        """Compute dC = dA B and dB = dA^T C, for A = C B^T."""
        dA = self.gather_once(dA, self.a)
        return self.ab(dA, B), self.atb(dA, C)
