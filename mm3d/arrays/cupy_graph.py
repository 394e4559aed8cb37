"""Record a step as a CUDA graph."""

from typing import Any, Callable


class Graph:
    """Record the device's work of a step as a CUDA graph; each call launches it again.

    Memory that the step allocates is from a pool of the graph, so that its addresses are never
    given to other arrays; the step's inputs are read and written in place.  The step runs once
    before it is recorded, to allocate all memory and compile all kernels; `Backend.recording`
    tells already then.

    Parameters
    ----------
    backend : CupyBackend
        The backend whose stream is recorded.
    step : callable
        The step; the host does nothing else in it, such as MPI.

    Attributes
    ----------
    result : object
        The result of `step`; each call overwrites its arrays.
    """

    def __init__(self, backend: Any, step: Callable[[], Any]) -> None:
        self._backend, self._stream, self._step = backend, backend.stream, step
        before, backend.pool = backend.pool, backend.xp.cuda.MemoryPool()
        self._pool, backend.rehearsing = backend.pool, True
        try:
            step()
            backend.synchronize()
            self._stream.begin_capture()
            try:
                self.result = step()
            finally:
                self._graph = self._stream.end_capture()
        finally:
            backend.pool, backend.rehearsing = before, False

    def __call__(self) -> Any:
        self._backend.join_stream()    # after what the caller computed on another one
        self._graph.launch(self._stream)
        return self.result
