"""A dry run is the program itself: on every rank it moves and holds what a real run does.

Random GPTs on random meshes of 8 ranks, each built by the same function on real ranks and dry.
"""
import gc
import random

import numpy as np
import pytest

import mm3d
from experts import expert_layers
from mm3d.arrays import backend as backends
from mm3d.model.experts.options import ExpertDesign
from mm3d.tracing import dry_run
from mm3d.training.optimizers import SGD, AdamW
from mm3d.training.schedules import all_builders
from mm3d.transport.communicators import DryCommunicator

CONFIGURATIONS, AT_ONCE = 48, 4
FAST = 4, 11    # seeds of all policies, all schemes but one, and most options together
RANKS = 8


class Program:
    """A random GPT on a random mesh, with an optimizer; the same for the same random numbers."""

    def __init__(self, draw: random.Random) -> None:
        pick = draw.choice
        data, stages = pick([(1, 1), (1, 2), (1, 4), (2, 1), (2, 1), (2, 2), (2, 2), (4, 1),
                             (4, 2), (8, 1)])
        share = RANKS // data // stages
        scheme = pick([*mm3d.SCHEMES, "3d", "3d"] if share > 1 else ["serial"])
        grids = [grid.sizes for grid in mm3d.SCHEMES[scheme].grids(share)]
        several = stages > 1 and draw.random() < 0.3
        self.mesh = {"data": data, "stages": stages, "scheme": scheme,
                     "grid": [pick(grids) for _ in range(stages)] if several else pick(grids)}
        if scheme == "3d":
            self.mesh |= {"keep": pick(["none", "weight", "both"]),
                          "rows": pick(["sequences", "positions"])}
        if data > 2 and draw.random() < 0.5:
            self.mesh["shards"] = data // 2
        names = [name for name in all_builders()
                 if stages > 1 or name in ("gpipe", "1f1b", "zb-h1")]
        micro = pick([stages, 2 * stages])
        dtype, master = pick([*[("float32", None)] * 3, ("float64", None), ("float16", None),
                              ("float16", "float32")])
        self.model = {
            "layers": pick([2, 3]) * stages if stages < 4 else stages, "hidden": 12,
            "heads": pick([2, 3]), "vocab": 17, "seq": pick([5, 8]), "schedule": pick(names),
            "microbatches": micro,
            "batch": data * micro * pick([1, 2]), "dtype": dtype, "master": master,
            "recompute": pick(["none", "none", "full", "selective", "uniform:2",
                               "uniform:2+selective"]),
            "tied": pick([True, False]), "zero": pick([0, 1, 2, 3]), "in_flight": pick([0, 2]),
            "dropout": pick([0.0, 0.0, 0.1]), "label_smoothing": pick([0.0, 0.1])}
        if draw.random() < 0.3:
            count = pick([4, 5])
            self.model["experts"] = mm3d.Experts(
                count, top=pick([1, 2]), every=pick([1, 2]), capacity=pick([None, 0.8]),
                gate=pick(["switch", "mixtral", "gshard", "sigmoid-bias"]),
                design=ExpertDesign(pick([None, 5]), *pick([(), (7,), (7, True)])))
            self.model["expert_parallel"] = pick([one for one in (1, 2, 4) if not data % one])
        self.kind = SGD if dtype == "float16" and master is None else pick([AdamW, SGD])
        if draw.random() < 0.4:
            self.model["architecture"] = mm3d.Architecture(
                norm=pick(["layer", "rms"]), positions=pick(["learned", "rotary"]),
                kv_heads=pick([None, 1]), head=pick([4, 10]), inner=pick([None, 7]),
                perceptron=pick(["gelu", "swiglu", "swiglu"]),
                biases=pick(["all", "qkv", "none"]), window=pick([None, None, 3]))

        if data > 1 and "experts" not in self.model and draw.random() < 0.5:
            context = pick([one for one in (2, 4, 8) if not data % one])
            self.mesh |= {"data": data // context, "context": context}
            self.model["context_way"] = pick(["gather", "ring"])

    def __repr__(self) -> str:
        return f"{self.mesh} {self.model} {self.kind.__name__}"

    def build(self, comm, backend) -> mm3d.GPT:
        """The model on its mesh."""
        return mm3d.GPT(mm3d.Mesh(comm, backend=backend, **self.mesh), **self.model)

    def step(self, model: mm3d.GPT, trace=None) -> None:
        """Two steps of training."""
        optimizer = self.kind(model, 1e-3)
        for _ in range(2):
            model.rehearse()
            optimizer.step()

    def dry(self, rank: int):
        """The trace of a rank."""
        return dry_run.trace(self.build, RANKS, rank, backends.Backend.block, self.step)

    def real(self, comm) -> tuple[dict, int]:
        """What this rank moves, and its bytes at the peak."""
        pool = backends.get("numpy").pool
        gc.collect()
        before = pool.in_use
        pool.reset_peak()
        model = self.build(comm, "numpy")
        if model.experts:
            choose_in_turn(model)
        model.reset_traffic()
        self.step(model)
        moved, peak = model.traffic(), pool.peak - before
        return moved, peak


def choose_in_turn(model: mm3d.GPT) -> None:
    """Replace the logits of all routers: token t prefers the experts k t, k t + 1, and so on."""
    first = model.pipeline.rows[0].start
    for chunk in model.chunks:
        batch, seq, _ = chunk.shape
        for layer in expert_layers(chunk.layers):
            place = layer.space.layout().slices(chunk.grid, chunk.shape)
            rows, positions = (np.arange(one.start, one.stop) for one in place[:2])
            tokens = ((first + rows)[:, None] * seq + positions).reshape(-1, 1)
            E, k = layer.experts.count, layer.experts.top

            def forward(x, own=layer.router.forward, logits=-((np.arange(E) - k * tokens) % E)):
                found, saved = own(x)
                found[...] = logits
                return found, saved
            layer.router.forward = forward


def programs(seed: int, count: int) -> list[Program]:
    """Programs that are not refused."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        try:
            one = Program(draw)
            one.build(DryCommunicator(RANKS), dry_run.DryBackend())
        except ValueError:
            continue
        found.append(one)
    return found


@pytest.mark.ranks(8)
@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed not in FAST))
    for seed in range(CONFIGURATIONS // AT_ONCE)])
def test_a_dry_run_moves_and_holds_what_a_real_one_does(comm, monkeypatch, seed):
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")    # shared memory is not Python's to count
    differing = []
    drawn = comm.bcast(programs(seed, AT_ONCE) if comm.rank == 0 else None)
    for program in drawn:
        moved, peak = program.real(comm)
        trace = program.dry(comm.rank)
        found = trace.total_traffic()
        if found != {key: one for key, one in moved.items() if one.calls}:
            differing.append((found, moved, program))
        if trace.pool_peak != peak:
            differing.append((trace.pool_peak, peak, program))
    assert not differing
