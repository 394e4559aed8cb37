"""Define parameters: trained arrays, divided over the grid, with their gradients."""

import math
import re
from contextlib import contextmanager
from copy import copy
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping

import numpy as np

from mm3d.arrays.backend import Array, host_dtype, namespace
from mm3d.arrays.host_arrays import check_real
from mm3d.grid.agreement import refuse_freed
from mm3d.grid.axis import Shown
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.model.functional import prefer_backend_kernel


class Parameter(Shown):
    """Hold this rank's block of a trained array and of its gradient.

    Parameters
    ----------
    name, layout, shape
        See the attributes.
    grid : Grid
        The ranks that the array is divided over.
    dtype : dtype
        Type of `value`.
    gathered_along : Split, optional
        How the array is divided in the direction along which products gather it; the memory of
        `value` then suits the gather.
    master : dtype, optional
        Type of `master` and `grad`; by default `dtype`, without a separate master.

    Attributes
    ----------
    name : str
        Name in the model, such as "layers.0.mlp.up.weight".
    value : Array
        This rank's block, in the type of computation.
    master : Array
        The same block in the type of training; `value` itself if there is no separate master.
    grad : Array
        This rank's block of the gradient, in the type of the master.
    layout : Layout
        Layout of `value`, `master` and `grad`.
    shape : tuple of int
        Global shape as stored; (in, 3, out) for the weight of queries, keys and values.
    public_shape : tuple of int
        Global shape in `Transformer.state` and `Transformer.load`, (in, 3 out); `shape` itself
        for parameters of experts.
    first_copy : bool
        False where other ranks, outside `grid`, hold this block already: in all replicas of a
        model but the first, and in the second copy of tied weights.
    dtype : dtype
        Type of `value`.
    """

    # Whether each read of `value` is a collective of all ranks that divide it.
    gathered_when_read = False
    # Attributes that hold memory of their own, beside a separate master.
    allocated: tuple[str, ...] = ("value", "grad")

    def __init__(self, name: str, grid: Grid, layout: Layout, shape: tuple[int, ...],
                 dtype: Any, gathered_along: Split | None = None, master: Any = None) -> None:
        self.name, self.grid, self.layout, self.shape = name, grid, layout, tuple(shape)
        inputs = self.shape[:1] if name.endswith("weight") and len(shape) > 1 else ()
        self.public_shape = (*inputs, math.prod(self.shape[len(inputs):]))
        if ".experts." in name:
            self.public_shape = self.shape
        self.dtype, self.has_master, self.first_copy = dtype, master is not None, True
        self._allocate(gathered_along, master)
        self._allocate_gradient()
        self.zero_gradient()

    def __repr__(self) -> str:
        return (f"Parameter({self.name!r}, {self.shape} in layout {self.layout.spec!r}; here "
                f"{self.layout.local_shape(self.grid, self.shape)} of "
                f"{getattr(self.dtype, '__name__', self.dtype)})")

    def _allocate(self, gathered_along: Split | None, master: Any) -> None:
        """Allocate value and master; parameters as in the class."""
        local, backend = self.layout.local_shape(self.grid, self.shape), self.grid.backend
        self.value = (gathered_along or backend).empty(local, self.dtype)
        self.master = backend.empty(local, master) if self.has_master else self.value

    def _allocate_gradient(self) -> None:
        """Allocate the gradient, like the master."""
        self.grad = self.grid.backend.empty(self.master.shape, self.master.dtype)

    @property
    def _sum(self) -> Array:
        """Return the array that terms of the gradient are added to."""
        return self.grad

    def twin(self) -> "Parameter":
        """Return a second use of the parameter: the same value, with a gradient of its own."""
        other = copy(self)
        other._allocate_gradient()
        other.zero_gradient()
        return other

    @property
    def counted(self) -> bool:
        """Return whether sums over all ranks count this block here.

        True on exactly one of the ranks that hold the same block, so that a norm has each element
        once, and a checkpoint is written once.
        """
        layout, coords = self.layout, self.grid.coords
        return self.first_copy and layout.owns_block(self.grid) and not any(
            coords[letter] for letter in coords if letter not in layout.named)

    @property
    def nbytes(self) -> int:
        """Return the bytes on this rank of value, gradient, and separate master."""
        names = (*self.allocated, "master") if self.has_master else self.allocated
        return sum(getattr(self, name).nbytes for name in names)

    @property
    def rounded(self) -> Array | None:
        """Return the array into which `refresh` rounds each element of the master; or None."""
        return self.value if self.has_master else None

    def refresh(self) -> None:
        """Round the master to the type of `value`, into `value`; call it after changing it."""
        if (out := self.rounded) is not None:
            round_into(self.master, out)

    def zero_gradient(self) -> None:
        """Set the gradient to zero."""
        self.grad[...] = 0
        self._has_terms, self._is_lent = True, False

    def begin_gradient(self) -> None:
        """Forget the gradient, as `Trained.new_gradients` says; the next term is written."""
        self._has_terms = self._is_lent = False

    def finish_gradient(self) -> None:
        """Set the gradient to zero if nothing was accumulated since `begin_gradient`."""
        if not self._has_terms:
            self.zero_gradient()

    def empty_gradient(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate a term of the gradient; it, or its sum over ranks, is the next to accumulate.

        The first one after `begin_gradient` has the memory of the gradient itself, where shape and
        type allow: once written, it is in its place.
        """
        wanted = tuple(self._sum.shape), self._sum.dtype
        if self._has_terms or self._is_lent or (tuple(shape), dtype) != wanted:
            return self.grid.backend.empty(shape, dtype)
        self._is_lent = True
        return self._sum

    def accumulate(self, gradient: Array | None) -> None:
        """Add `gradient`, this rank's block or None if it stores none, to `grad`.

        ValueError when it is the memory that `empty_gradient` gave, and another term came before.
        """
        if gradient is None:
            return
        if self._has_terms and gradient is self._sum:
            raise ValueError(f"{self.name}: another term came before that of empty_gradient")
        if self._has_terms:
            self.grid.backend.add_to(self._sum, gradient)
        elif gradient is not self._sum:
            self._sum[...] = gradient
        self._has_terms = True

    def load(self, value: np.ndarray) -> None:
        """Set the master and `value` to this rank's block of the global array `value`."""
        place = self.layout.slices(self.grid, self.shape)
        block = np.ascontiguousarray(np.reshape(value, self.shape)[place])
        self.master[...] = self.grid.backend.asarray(block.astype(host_dtype(self.master)))
        self.refresh()

    def gather(self, block: Array) -> np.ndarray:
        """Gather the global array from the ranks' blocks, in its public shape.

        Every rank must call it; for checks.
        """
        return self.layout.unshard(block, self.grid, self.shape).reshape(self.public_shape)


class Trained(Shown):
    """Change, gather and load all parameters in a model's list `trained` together."""

    trained: list[Parameter]
    twins: tuple[Parameter, ...] = ()    # second uses of some, with gradients of their own
    grids: list[Any]

    def state(self) -> dict[str, np.ndarray]:
        """Gather every parameter as a global array on every rank, by name.

        With masters these are the masters.  Every rank must call it; for checks.
        """
        return self._gather("state", lambda p: p.gather(p.master))

    def gradients(self) -> dict[str, np.ndarray]:
        """Gather every gradient as a global array on every rank, by name.

        Every rank must call it; for checks.
        """
        return self._gather("gradients", lambda p: p.gather(p.grad))

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load all parameters from global arrays by name, as returned by `state`.

        Every rank must call it, with the same arrays.

        Raises
        ------
        ValueError
            When a parameter is missing, unknown, of another shape, or not of real numbers alone;
            with several stages on every rank alike, also when one rank has another array than the
            rest.  Nothing is loaded then.
        """
        check_state(state, self._gather("load", lambda p: p.public_shape, state))
        self.grids[0].comm.allgather(None)    # others may read these blocks yet, in forward
        for p in self.trained:
            p.load(np.asarray(state[p.name]))

    def _gather(self, call: str, of: Callable[[Parameter], Any],
                loaded: Mapping[str, np.ndarray] = MappingProxyType({})) -> dict[str, Any]:
        """Return `of(parameter)` of all parameters by name, in the order of the model."""
        return {p.name: of(p) for p in self.trained}

    def __str__(self) -> str:
        """List the parameters: global shape, layout, and this rank's block; equal layers once."""
        found: dict[tuple, list[str]] = {}
        for p in self.trained:
            what = (str(p.shape), f'"{p.layout.spec}"',
                    str(p.layout.local_shape(p.grid, p.shape)))
            found.setdefault((re.sub(r"\d+", "*", p.name), *what), []).append(p.name)
        rows = [("parameter", "shape", "layout", "here")]
        rows += [(names[0] if len(names) == 1 else f"{name}, {len(names)} times", *what)
                 for (name, *what), names in found.items()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        count, own = (sum(math.prod(shape) for shape in shapes) for shapes in zip(*(
            (p.shape, p.layout.local_shape(p.grid, p.shape)) for p in self.trained)))
        title = (f"{type(self).__name__} on {getattr(self, 'mesh', self.grids[0])!r}: {count} "
                 f"elements, {own} here")
        return "\n".join([title, *("  ".join(map(str.ljust, row, widths)).rstrip()
                                   for row in rows)])

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for p in (*self.trained, *self.twins):
            p.zero_gradient()

    @contextmanager
    def new_gradients(self) -> Iterator[None]:
        """Compute gradients in this context as after `zero_gradients`, with fewer passes.

        The first term of each gradient is written, not added to zeros.  Nothing may read gradients
        before the context is left; those without any term are zero then.
        """
        for p in (*self.trained, *self.twins):
            p.begin_gradient()
        try:
            yield
        finally:
            for p in (*self.trained, *self.twins):
                p.finish_gradient()

    def refresh(self, *rounded: Parameter) -> None:
        """Round masters to the model's dtype, into the values; call it after changing them.

        Those of the parameters `rounded` are rounded already.
        """
        done = set(rounded)
        for p in self.trained:
            if p not in done:
                p.refresh()


def check_state(state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check global arrays, by name, against the public shapes of all parameters of a model.

    Raises ValueError when one is missing, unknown, of another shape, or not of real numbers alone.
    """
    for name in [*shapes, *state]:
        if name not in shapes or name not in state:
            raise ValueError(f"parameter {name!r} is "
                             f"{'missing' if name in shapes else 'not in the model'}")
        shape = check_real(f"parameter {name!r}", state[name])
        if shape != shapes[name]:
            raise ValueError(f"parameter {name!r} has the shape {shapes[name]}, not {shape}")


@prefer_backend_kernel
def round_into(a: Array, out: Array) -> Array:
    """Copy `a` into `out`, of its shape, rounded to the type of `out`; return `out`."""
    out[...] = namespace(a).astype(a, out.dtype, copy=False)
    return out


def comm_of(model: Any, call: str) -> Any:
    """Return the communicator of a model.

    Raises TypeError, naming the call, for what is no model; RuntimeError for one that was freed.
    """
    try:
        comm = model.comm
    except AttributeError:
        raise TypeError(f"{call}: {type(model).__name__} is no model, as mm3d.GPT(...) is"
                        ) from None
    refuse_freed(comm)
    return comm
