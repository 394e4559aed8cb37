"""Plant faults of composed parallelisms in right steps, and judge these.

A fault is what one does to the tensors of a step: which part of a sum is missing, which shard is
stale.  Each is simulated on one rank, from the exact parts of the sums that ranks would hold.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np

from bench.experiments.dump.causes import explain
from bench.experiments.dump.computation import Start, Tensors
from bench.experiments.dump.dumps import StepDump, read_dump
from bench.experiments.dump.envelopes import Reference, measure_reference
from bench.experiments.dump.places import FILES, LOSS, NORM, SCALARS, mask_names
from bench.experiments.dump.tensor_files import number_type
from bench.experiments.dump.verdicts import Verdict, judge, program_of
from mm3d.config import Model
from mm3d.hugging_face.config_file import config_of
from mm3d.hugging_face.names import tensor_shapes
from mm3d.model.architecture import Architecture
from mm3d.model.experts.layer import Experts
from mm3d.pretrained.files import safetensors
from mm3d.pretrained.loading import model_pieces
from planted_faults import Fault, Workshop

OPTIMIZER = {"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8,
             "weight_decay": 0.1, "clip": 1.0, "decayed": "all"}
OPTIMIZERS = {"sgd": {"name": "sgd", "lr": 1e-1, "momentum": 0.9, "weight_decay": 0.0,
                      "clip": 0.1},
              "matrices": OPTIMIZER | {"decayed": "matrices"}}
LLAMA = Architecture(norm="rms", positions="rotary", kv_heads=2, perceptron="swiglu", inner=32,
                     biases="none", epsilon=1e-6)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": LLAMA, "tied": False},
    **{kind: {"architecture": LLAMA, "tied": False, "experts": Experts(
        4, 2, every=1, capacity=None, gate="mixtral", balance=balance, z=0.0,
        convention="huggingface")} for kind, balance in (("mixtral", 0.0), ("balanced", 0.5))}}


@dataclass(frozen=True)
class Found:
    """Hold a fault, its verdict, and the cause that was named, "" where nothing was found."""

    fault: Fault
    verdict: Verdict
    cause: str

    @property
    def right_in(self) -> str:
        """Return what the judge was right in: the tensor and the cause, the tensor, or neither."""
        first = self.verdict.first
        if first is None or first.place != self.fault.place:
            return "neither"
        first = self.cause.partition("; or ")[0]
        return "tensor, cause" if self.fault.cause and self.fault.cause in first else "tensor"


def make_shop(kind: str, dtype: str, comm: Any) -> Workshop:
    """Return a small workshop of the kind that a `Fault` names as its start."""
    family = {"balanced": "mixtral"}.get(kind, kind if kind in MODELS else "gpt2")
    model = Model(layers=2, hidden=24, heads=4, batch=8, seq=16, vocab=50, ignored=-100,
                  dtype=dtype, master="float32" if "16" in dtype else None,
                  dropout=0.1 if kind == "dropout" else 0.0,
                  **MODELS.get(kind, {}))
    random = np.random.default_rng(5)
    shapes = tensor_shapes(model_pieces(family, model))
    stored = number_type(dtype)
    weights = {name: (random.normal(0, 0.2, shape) + (    # those of norms are near 1
        name.endswith("weight") and ("ln_" in name or "norm" in name))).astype(stored).astype(
            float) for name, shape in sorted(shapes.items())}
    text = random.integers(0, model.vocab, (model.batch, model.seq + 1))
    targets = text[:, 1:].copy()
    targets[0, :9], targets[1, 3:12], targets[6, :2] = (model.ignored,) * 3
    masks = {name: random.random((model.batch, model.seq, model.hidden)) < 0.9
             for name in mask_names(model.layers).values()} if model.dropout else {}
    start = Start(family, model, weights, text[:, :-1].copy(), targets, masks)
    return Workshop(start, OPTIMIZERS.get(kind, OPTIMIZER), comm)


def dump_of(shop: Workshop, tensors: Tensors, folder: Path) -> StepDump:
    """Write what was computed as a dump, and read it.

    It is of the type of the model, gradients and weights of that of masters.
    """
    folder.mkdir(parents=True)
    start, model = shop.start, shop.start.model
    about = {"dtype": model.dtype, "ignored": model.ignored, "optimizer": shop.optimizer} | (
        {"dropout": model.dropout} if model.dropout else {})
    config = config_of(model) | ({"activation_function": "gelu"} if start.erf else {})
    for name, content in (("config", config), ("dump", about)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    computed, kept = number_type(model.dtype), number_type(model.master or model.dtype)
    files: dict[str, dict[str, np.ndarray]] = {
        "weights": {name: a.astype(kept) for name, a in start.weights.items()},
        "batch": {"tokens": start.tokens, "targets": start.targets},
        FILES["mask"]: {name: np.asarray(a, bool) for name, a in start.masks.items()}, SCALARS: {}}
    types = {"mask": bool, "activation": computed, "activation gradient": computed}
    for place, a in tensors.items():
        file, name = ((SCALARS, place.kind) if place.kind in (LOSS, NORM) else
                      (FILES[place.kind], place.name))
        files.setdefault(file, {})[name] = np.asarray(a, types.get(place.kind, kept))
    for name, some in files.items():
        if some:
            write_tensors(folder / f"{name}.safetensors", some)
    return read_dump(folder)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors, as `bench.experiments.dump.tensor_files.read_tensors` reads them."""
    safetensors().numpy.save_file(
        {name: np.array(a, order="C") for name, a in tensors.items()}, path)


def judge_faults(some: list[Fault], dtype: str, comm: Any) -> Iterator[Found]:
    """Plant faults in right steps, write and read these as dumps, and judge them."""
    with tempfile.TemporaryDirectory() as folder:
        shops: dict[str, Workshop] = {}
        references: dict[str, Reference] = {}
        for number, fault in enumerate(some):
            shop = shops.setdefault(fault.start, make_shop(fault.start, dtype, comm))
            dump = dump_of(shop, fault.plant(shop), Path(folder) / str(number))
            masked = any(place.kind == "mask" for place in dump.tensors)
            if fault.start not in references or masked:
                references[fault.start] = measure_reference(dump, comm, program_of(dump))
            verdict = judge(dump, comm, references[fault.start])
            yield Found(fault, verdict, explain(dump, verdict) if verdict.first else "")
