"""Train a GPT on any mesh: replicas, stages of a pipeline, and a tensor parallelism in each.

``mpirun -n 8 python -m mm3d.examples.train --data 2 --stages 2 --grid 2 1 1``: the losses are the
same on every mesh.  ``bench train`` takes these steps, too, between checkpoints and validations.
"""

import sys
from pydoc_data.topics import topics
from typing import Any, Callable, Iterator

import numpy as np

import mm3d
from mm3d.examples import ExampleParser
from mpi4py import MPI

BATCH, SEQ = 16, 32
Batch = tuple[np.ndarray, np.ndarray]    # tokens and targets, (batch, seq)


def take_steps(model: Any, optimizer: Any, batch: Callable[[int], Batch], numbers: range,
               rate: Callable[[int], float] | None = None,
               seen: Callable[[int, float], None] = lambda number, loss: None
               ) -> Iterator[tuple[int, float]]:
    """Take a step for each number; after each, yield its number and the loss before it.

    `batch` returns the whole batch of a step, the same on every rank, and `rate` its learning
    rate.  `seen` is called with the number and the loss while the gradients are there.
    """
    for number in numbers:
        model.dropout_step = number
        loss = model.step(*batch(number))    # forward and backward
        seen(number, loss)
        if rate is not None:
            optimizer.lr = rate(number)
        optimizer.step()
        yield number, loss


def help_texts() -> np.ndarray:
    """Return the bytes of the help texts of Python."""
    return np.frombuffer("".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, seq: int) -> Batch:
    """Return the sequences that begin at `starts`, and the tokens that follow each of theirs."""
    found = text[starts[..., None] + np.arange(seq + 1)].astype(np.int64)
    return found[..., :-1], found[..., 1:]


def main(words: list[str] | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> None:
    """Train on the help texts of Python, byte by byte; print losses."""
    parser = ExampleParser(description=main.__doc__)
    parser.add_argument("--data", type=int, default=1, help="replicas of the model")
    parser.add_argument("--stages", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--scheme", default="3d", help="tensor parallelism in a stage")
    parser.add_argument("--grid", type=int, nargs="+", help="sizes of its grid")
    parser.add_argument("--zero", type=int, default=0, help="stage of ZeRO among replicas")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args(words)
    try:
        mesh = mm3d.Mesh(comm, data=options.data, stages=options.stages, scheme=options.scheme,
                         grid=options.grid and tuple(options.grid))
        model = mm3d.GPT(mesh, layers=4, hidden=64, heads=4, vocab=256, batch=BATCH, seq=SEQ,
                         microbatches=2 * options.stages, zero=options.zero, dtype="float64")
    except ValueError as error:    # the same on every rank
        sys.exit(f"error: {error}")
    text, draw = help_texts(), np.random.default_rng(0)
    for number, loss in take_steps(
            model, mm3d.AdamW(model, lr=3e-3),
            lambda _: windows(text, draw.integers(0, len(text) - SEQ, BATCH), SEQ),
            range(options.steps)):
        if comm.rank == 0 and number % 5 == 0:
            print(f"step {number}: loss {loss:.9f}", flush=True)
    model.free()
    mesh.free()


if __name__ == "__main__":
    main()
