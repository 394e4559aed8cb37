"""Train a small Llama on the text that comes with Python: on several meshes, and by transformers.

``mpirun -n 8 python -m mm3d.examples.learn --transformers PYTHON`` trains the same steps on each
of `MESHES`, from the same parameters on the same batches, in float64.  It prints the losses, and
by how much they differ: by what the order of summation changes.
"""

import json
import os
import shutil
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

import mm3d
from mm3d.arrays.plain_numbers import check_whole
from mm3d.child_process import run_child
from mm3d.examples import ExampleParser
from mm3d.examples.train import help_texts, take_steps
from mm3d.launcher import wait_patiently
from mpi4py import MPI

# The smallest Llama that has all of it: grouped queries, rotary positions, SwiGLU, RMSNorm.
SIZES = dict(layers=2, hidden=48, heads=6, vocab=256, tied=True, dtype="float64", batch=8, seq=64)
LLAMA = dict(norm="rms", positions="rotary", perceptron="swiglu", biases="none", kv_heads=2,
             inner=128)
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip=1.0)
# By name: ranks, the mesh, and the rest of the division; the first is what all are compared with.
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "serial": (1, dict(scheme="serial"), {}),
    "1d-sp 2": (2, dict(scheme="1d-sp", grid=(2,)), {}),
    "3d 2x2x2": (8, dict(scheme="3d", grid=(2, 2, 2)), {}),
    "2 stages x 2, ZeRO 3": (4, dict(scheme="serial", stages=2, data=2), dict(
        zero=3, microbatches=2)),
    "context 2, ring": (2, dict(scheme="serial", context=2), dict(context_way="ring"))}


def draw_batches(steps: int) -> np.ndarray:
    """Draw the batches of all steps, bytes of the text: (steps, batch, seq + 1)."""
    text = help_texts()
    starts = np.random.default_rng(0).integers(
        0, len(text) - SIZES["seq"], (steps, SIZES["batch"]))
    return text[starts[..., None] + np.arange(SIZES["seq"] + 1)].astype(int)


def train(comm: MPI.Comm, name: str, batches: np.ndarray,
          folder: Path | None = None) -> list[float]:
    """Train on a mesh of all ranks of `comm`; return the losses.

    With a `folder` the first parameters are saved there, as files of Hugging Face.
    """
    _, where, how = MESHES[name]
    mesh = mm3d.Mesh(comm, **where)
    model = mm3d.GPT(mesh, **SIZES, **LLAMA, **how)
    if folder is not None:
        mm3d.save_pretrained(model, folder)
    losses = [loss for _, loss in take_steps(
        model, mm3d.AdamW(model, **ADAMW), lambda n: (batches[n, :, :-1], batches[n, :, 1:]),
        range(len(batches)))]
    model.free()
    mesh.free()
    return losses


def train_on_meshes(comm: MPI.Comm, batches: np.ndarray,
                    folder: Path | None = None) -> dict[str, list[float]]:
    """Train on each mesh that has enough ranks here; return the losses on rank 0."""
    found = {}
    for name, (ranks, _, _) in MESHES.items():
        if ranks > comm.size:
            continue
        part = comm.Split(comm.rank >= ranks, comm.rank)
        if comm.rank < ranks:
            found[name] = train(part, name, batches, folder if ranks == 1 else None)
        part.Free()
        wait_patiently(comm)
    return found if comm.rank == 0 else {}


def train_by_transformers(python: str, folder: Path, batches: np.ndarray) -> list[float]:
    """Train the model in `folder` by the library transformers; return the losses.

    `python` is an interpreter that has it.  Raises RuntimeError when it fails there.
    """
    np.save(folder / "batches.npy", batches)
    (folder / "adamw.json").write_text(json.dumps(ADAMW), encoding="utf-8")
    program = Path(__file__).with_name("learn_by_transformers.py")
    plain = {name: value for name, value in os.environ.items()    # no rank of this job
             if not name.startswith(("PMI", "MPI", "OMPI", "PMIX", "HYDRA"))}
    done = run_child([python, str(program), str(folder)], env=plain)
    if done.status:
        raise RuntimeError(f"--transformers {python}: {done.err.strip().splitlines()[-1:]}")
    return json.loads((folder / "losses.json").read_text("utf-8"))


def format_losses(found: dict[str, list[float]], every: int) -> str:
    """Format the losses of the first column, and the relative differences of the others."""
    (first, losses), *others = found.items()
    lines = [f"{'step':>5}  {'loss: ' + first:>16}"
             + "".join(f"  {name:>{_width(name)}}" for name, _ in others)]
    shown = [*range(0, len(losses), every), len(losses) - 1]
    for step in dict.fromkeys(shown):
        lines.append(f"{step:5}  {losses[step]:16.12f}" + "".join(
            f"  {own[step] / losses[step] - 1:>{_width(name)}.1e}" for name, own in others))
    most = [max(abs(a / b - 1) for a, b in zip(own, losses)) for _, own in others]
    lines.append(f"{'most':>5}  {'':16}" + "".join(
        f"  {one:>{_width(name)}.1e}" for one, (name, _) in zip(most, others)))
    return "\n".join(lines)


def _width(name: str) -> int:
    return max(len(name), 8)


def main(words: list[str] | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> None:
    """Train on the help texts of Python, byte by byte; print losses and their differences."""
    parser = ExampleParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--transformers", metavar="PYTHON",
                        help="an interpreter with torch, transformers and safetensors")
    options = parser.parse_args(words)
    try:
        for name in ("steps", "every"):
            check_whole(f"--{name}", getattr(options, name))
    except ValueError as error:
        parser.error(str(error))
    if options.transformers and shutil.which(options.transformers) is None:
        parser.error(f"--transformers {options.transformers}: there is no such program: the "
                     f"python of an environment would do")
    batches = draw_batches(options.steps)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        found = train_on_meshes(comm, batches, folder / "model" if options.transformers else None)
        if comm.rank == 0 and options.transformers:
            found["transformers"] = train_by_transformers(options.transformers, folder, batches)
        wait_patiently(comm)
    if comm.rank == 0:
        facts = ", ".join(f"{name} {value}" for name, value in (SIZES | LLAMA | ADAMW).items())
        print(textwrap.fill(f"A Llama, by AdamW: {facts}; relative differences to "
                            f"{[*found][0]}", 100), end="\n\n")
        print(format_losses(found, options.every), flush=True)


if __name__ == "__main__":
    main()
