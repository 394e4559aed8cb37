"""Write a dump from what this library computed, as another program would."""

import json
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from bench.experiments.dump.computation import Start, Tensors
from bench.experiments.dump.places import FILES, LOSS, NORM, SCALARS
from bench.experiments.dump.tensor_files import number_type, write_tensors
from mm3d.hugging_face.config_file import config_of


def write_dump(folder: Path, start: Start, tensors: Tensors, about: Mapping[str, Any]) -> Path:
    """Write a dump; return its folder.

    Parameters
    ----------
    folder : Path
        The folder, which is made.
    start : Start
        The model, its weights, and the batch.
    tensors : dict of Place to ndarray
        What was computed: of the type of the model, gradients and weights of that of masters.
    about : mapping
        The contents of ``dump.json``, beside what the model says.
    """
    folder.mkdir(parents=True)
    model = start.model
    more = {"dtype": model.dtype, "ignored": model.ignored} | (
        {"dropout": model.dropout} if model.dropout else {})
    config = config_of(model) | ({"activation_function": "gelu"} if start.erf else {})
    for name, content in (("config", config), ("dump", more | about)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    computed, kept = number_type(model.dtype), number_type(model.master or model.dtype)
    files: dict[str, dict[str, np.ndarray]] = {
        "weights": {name: a.astype(kept) for name, a in start.weights.items()},
        "batch": {"tokens": start.tokens, "targets": start.targets},
        "masks": {name: np.asarray(a, bool) for name, a in start.masks.items()}, SCALARS: {}}
    for place, a in tensors.items():
        if place.kind in (LOSS, NORM):
            files[SCALARS][place.kind] = np.asarray(a, kept)
        else:
            narrow = place.kind in ("activation", "activation gradient")
            files.setdefault(FILES[place.kind], {})[place.name] = np.asarray(
                a, computed if narrow else kept)
    for name, some in files.items():
        if some:
            write_tensors(folder / f"{name}.safetensors", some)
    return folder
