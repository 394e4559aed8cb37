"""Compute attention on a GPU by the flash kernels of cuDNN, which keep scores out of memory.

They are for elements of 16 bits, on GPUs since Ampere, where the packages of the extra ``cudnn``
are installed; ``MM3D_CUDNN=0`` leaves them out.  `mm3d.arrays.cupy_attention` computes the rest.
"""

import math
from typing import Any

from mm3d.arrays.backend import Array

AMPERE = 80             # compute capability
ALIGNMENT = 16          # bytes, of the first element of an array
KINDS = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}


class Saved:
    """Hold what `FlashAttention.forward` saves for backward.

    Attributes
    ----------
    array : Array
        The logarithms of the sums, float32 (batch, heads, queries).
    out : Array
        The output.  It is not counted among what is saved: the product after attention saves it
        as its input.
    """

    def __init__(self, lse: Array, out: Array) -> None:
        self.array, self.out = lse, out


class FlashAttention:
    """Attention of one GPU by cuDNN; a shape is planned once.

    Results do not depend on the order in which blocks of threads run.  Source: Dao, arXiv
    2307.08691.  It computes on the stream of `library`, by the package nvidia-cudnn-frontend.
    """

    def __init__(self, library: Any, cudnn: Any) -> None:
        self.library, self.cudnn = library, cudnn
        self._handle = cudnn.create_handle()
        cudnn.set_stream(self._handle, library.stream.ptr)
        self._plans: dict[tuple, Any] = {}

    @property
    def version(self) -> str:
        """The version of cuDNN, such as "9.19.0"."""
        number = self.cudnn.backend_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def forward(self, q: Array, k: Array, v: Array, first: int, reach: int,
                out: Array) -> Saved | None:
        """Compute attention, see `mm3d.model.functional.attention_forward`.

        `reach` is how many positions a query sees, up to its own; 0 without a mask.  None if cuDNN
        does not take these arrays, and then nothing is computed.
        """
        batch, queries, heads, _ = q.shape
        seen = seen_keys(q, k, first, reach)
        if seen.stop > k.shape[1]:
            return None
        lse = self.library.empty((batch, heads, queries), "float32")
        arrays = [q, k[:, seen, ...], v[:, seen, ...], out, lse]
        return Saved(lse, out) if self._run(reach, arrays) else None

    def backward(self, do: Array, qkv: tuple[Array, Array, Array], saved: Saved, first: int,
                 reach: int, gradients: tuple[Array, Array, Array]) -> bool:
        """Compute the gradients of `forward` from what it saved.

        False if cuDNN does not take these arrays, and then nothing is computed.
        """
        (q, k, v), (dq, dk, dv) = qkv, gradients
        seen = seen_keys(q, k, first, reach)
        arrays = [q, *(a[:, seen, ...] for a in (k, v)), saved.out, saved.array, do, dq,
                  *(a[:, seen, ...] for a in (dk, dv))]
        done = self._run(reach, arrays)
        for rest in (slice(0, seen.start), slice(seen.stop, k.shape[1])):
            if done and rest.start < rest.stop:
                dk[:, rest, ...], dv[:, rest, ...] = 0, 0
        return done

    def _run(self, reach: int, arrays: list[Array]) -> bool:
        """Run the plan for arrays in the order of `forward`, or of `backward`, if there is one."""
        key = reach, arrays[0].dtype, *((a.shape, a.strides) for a in arrays)
        if key not in self._plans:
            self._plans[key] = self._plan(reach, arrays)
        if self._plans[key] is None:
            return False
        graph, size = self._plans[key]
        pointers = {n: self.library.pointer(a) for n, a in enumerate(arrays, 1)}
        if any(at % ALIGNMENT for at in pointers.values()):
            return False
        self.library.join_stream()
        workspace = self.library.empty((max(1, size),), "uint8")
        graph.execute(pointers, self.library.pointer(workspace), handle=self._handle)
        return True

    def _plan(self, reach: int, arrays: list[Array]) -> tuple[Any, int] | None:
        """Plan for arrays like these; return cuDNN's graph and the bytes that it works in.

        None if cuDNN does not take them.
        """
        cudnn, q, k = self.cudnn, *arrays[:2]
        if not all(a.size for a in arrays):
            return None
        options = {"attn_scale": 1 / math.sqrt(q.shape[-1])}
        if reach:    # the last query sees the last key
            corner = "TOP_LEFT" if q.shape[1] == k.shape[1] else "BOTTOM_RIGHT"
            options |= {"diagonal_alignment": getattr(cudnn.diagonal_alignment, corner),
                        "diagonal_band_right_bound": 0}
            if reach < k.shape[1]:
                options["diagonal_band_left_bound"] = reach    # with the query's own position
        graph = cudnn.pygraph(io_data_type=self._kind(q),
                              intermediate_data_type=cudnn.data_type.FLOAT,
                              compute_data_type=cudnn.data_type.FLOAT, handle=self._handle)

        def describe(n: int) -> dict[str, Any]:
            dim, stride = layout(arrays[n])
            return {"dim": dim, "stride": stride, "data_type": self._kind(arrays[n])}
        backward = len(arrays) > 5
        read = [0, 1, 2, 3, 5, 4] if backward else [0, 1, 2]
        written = [6, 7, 8] if backward else [3, 4]
        try:
            given = [graph.tensor(**describe(n), uid=n + 1) for n in read]
            made = (graph.sdpa_backward(*given, use_deterministic_algorithm=True, **options)
                    if backward else graph.sdpa(*given, generate_stats=True, **options))
            for n, tensor in zip(written, made):
                for name, value in (*describe(n).items(), ("uid", n + 1), ("output", True)):
                    getattr(tensor, f"set_{name}")(value)
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError:
            return None
        return graph, graph.get_workspace_size()

    def _kind(self, a: Array) -> Any:
        """Return cuDNN's name for the type of `a`."""
        return getattr(self.cudnn.data_type, KINDS[str(a.dtype)])


def open_flash(library: Any, capability: int) -> FlashAttention | None:
    """Open cuDNN for a GPU of this compute capability; None where it is left out.

    Raises ValueError when its package is installed, and its library is missing, broken, or does
    not start.
    """
    if capability < AMPERE or not library.with_cudnn:
        return None
    try:
        import cudnn
        return FlashAttention(library, cudnn)
    except ImportError:
        return None
    except (RuntimeError, AttributeError, OSError) as error:    # the last of loading the library
        raise ValueError(f"cuDNN does not start ({error}): pip install -U 'mm3d[cudnn]', or set "
                         "MM3D_CUDNN=0") from error


def seen_keys(q: Array, k: Array, first: int, reach: int) -> slice:
    """Return which keys are seen by one query at least; they may end after the last key."""
    if not reach:
        return slice(0, k.shape[1])
    return slice(max(0, first - reach + 1), first + q.shape[1])


def layout(a: Array) -> tuple[list[int], list[int]]:
    """Return sizes and strides, in elements, by sequence, head, position and feature.

    `a` is (batch, positions, heads, d), or (batch, heads, positions) with one feature.
    """
    strides = [step // a.itemsize for step in a.strides]
    if len(a.shape) == 3:
        return [*a.shape, 1], [*strides, 1]
    order = (0, 2, 1, 3)
    return [a.shape[n] for n in order], [strides[n] for n in order]
