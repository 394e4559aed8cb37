"""Digest what random GPTs compute and what it costs, to compare two versions of the program.

``mpirun -n 8 python tests/tools/frozen.py FILE`` writes one line for each configuration.  A
second version run on the same kind of processor must write the same lines; of another kind only
the counts must agree, as products of matrices have other bits there.
"""

import gc
import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mm3d    # before MPI, so that ranks which share cores yield
from mpi4py import MPI

COUNT = 40
GRIDS = {8: {"3d": [(2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 2, 4)], "1d": [(8,)], "1d-sp": [(8,)],
             "2.5d": [(2, 2, 2)]},
         4: {"3d": [(2, 2, 1), (1, 2, 2), (4, 1, 1)], "1d": [(4,)], "1d-sp": [(4,)],
             "2d": [(2, 2)]},
         2: {"3d": [(2, 1, 1), (1, 2, 1), (1, 1, 2)], "1d": [(2,)], "1d-sp": [(2,)]},
         1: {"serial": [(1,)]}}
SCHEDULES = {1: ["1f1b", "gpipe"], 2: ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"],
             4: ["1f1b", "gpipe", "zb-h1"]}


def configurations() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return arguments of `mm3d.Mesh` and of `mm3d.GPT`, drawn at random from a fixed seed."""
    draw, found = random.Random(20261126), []
    for _ in range(COUNT):
        data, stages = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (8, 1)])
        scheme = draw.choice(sorted(GRIDS[8 // data // stages]))
        grid = draw.choice(GRIDS[8 // data // stages][scheme])
        mesh = {"data": data, "stages": stages, "scheme": scheme,
                "grid": None if scheme == "serial" else grid}
        if scheme == "3d" and draw.random() < .3:
            mesh["keep"] = draw.choice(["weight", "both"])
        microbatches = draw.choice([1, 2]) if stages == 1 else draw.choice([4, 8])
        model = {"layers": 8, "hidden": draw.choice([24, 40]), "heads": draw.choice([4, 8]),
                 "vocab": draw.choice([64, 37]), "batch": 8 * data * max(1, stages // 2),
                 "seq": draw.choice([8, 5]), "dtype": draw.choice(["float64", "float32"]),
                 "schedule": draw.choice(SCHEDULES[stages]), "microbatches": microbatches,
                 "tied": draw.random() < .5 or scheme == "2d",
                 "zero": draw.choice([0, 1, 2, 3]) if data > 1 else 0,
                 "recompute": draw.choice(["none", "none", "selective", "full", "uniform:2"]),
                 "dropout": draw.choice([0.0, 0.1])}
        if draw.random() < .25:
            model["experts"] = mm3d.Experts(4, top=2, every=2)
            model["dropout"] = 0.0
        found.append((mesh, model))
    return found


def digest(arrays: dict[str, Any]) -> str:
    """Return a digest of arrays and their names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()[:16]


def run(mesh_of: dict[str, Any], model_of: dict[str, Any]) -> dict[str, Any]:
    """Make two steps; return digests of what they computed, and what rank by rank they cost."""
    comm = MPI.COMM_WORLD
    gc.collect()
    try:
        mesh = mm3d.Mesh(comm, **mesh_of)
        gpt = mm3d.GPT(mesh, **model_of)
    except ValueError as error:
        return {"refused": str(error)}
    optimizer = mm3d.AdamW(gpt, lr=1e-2)
    batch, seq = model_of["batch"], model_of["seq"]
    text = np.random.default_rng(5).integers(0, model_of["vocab"], (batch, seq + 1))
    pool = mesh.scheme.grid.backend.pool
    pool.reset_peak()
    start, losses, gradients = pool.in_use, [], {}
    gpt.reset_traffic()
    for _ in range(2):
        losses.append(gpt.step(text[:, :-1], text[:, 1:]))
        gradients = gradients or gpt.gradients()    # of the first step
        optimizer.step()
    moved = {" ".join(key): {name: getattr(one, name) for name in ("calls", "words")}
             for key, one in sorted(gpt.traffic().items())}
    cost = comm.gather([moved, pool.peak - start])
    state = gpt.state()
    gpt.free()
    mesh.free()
    if comm.rank:
        return {}
    return {"losses": [float(x).hex() for x in losses], "gradients": digest(gradients),
            "state": digest(state),
            "traffic": hashlib.sha256(json.dumps([m for m, _ in cost]).encode()).hexdigest()[:16],
            "peaks": [peak for _, peak in cost]}


def main(path: str) -> None:
    """Write one line for each configuration."""
    os.environ["MM3D_TRANSPORT"] = "mpi"    # which moves exactly the words of a ring
    lines = []
    for mesh_of, model_of in configurations():
        lines.append(f"{mesh_of} {model_of} {json.dumps(run(mesh_of, model_of))}")
        if MPI.COMM_WORLD.rank == 0:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
