"""Read a dump: the weights, batch and results of one training step of any program.

`FORMAT` says what its folder has.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np

from bench.errors import UsageError
from bench.experiments.dump.names import Rule, arrange, find_rules, translate
from bench.experiments.dump.places import (FILES, LOSS, NORM, SCALARS, Place, border_names,
                                           in_order)
from bench.experiments.dump.tensor_files import number_type, read_tensors
from mm3d.config import Model
from mm3d.hugging_face.config_file import model_fields, read_config, take_length
from mm3d.hugging_face.names import GPT2_PREFIXES, LLAMA_PREFIXES, canonical, tensor_shapes
from mm3d.pretrained.loading import model_pieces
from mm3d.training.batches import check_batch

FORMAT = """\
A dump is a folder.  All but the first four files may be missing, and hold a part of the tensors:
  config.json                       of Hugging Face: the model
  dump.json                         dtype (of computation), ignored (target that does not count,
                                    -100), ranks (an object such as {"data": 2}), optimizer (name
                                    adamw or sgd, lr, betas, eps, weight_decay, momentum, clip,
                                    decayed: all or matrices), dropout, unseen (a list of texts);
                                    each may be missing
  weights.safetensors               before the step, or model.safetensors
  batch.safetensors                 tokens and targets, whole, (batch, seq)
  masks.safetensors                 by module of dropout: whether an element stays
  activations.safetensors           by module: its output; modules are the embedding with dropout,
                                    each layer, the last norm, and the head
  activation_gradients.safetensors  by module: the gradient of its output
  gradients.safetensors             by weight, before clipping
  scalars.safetensors               loss, and norm of the gradients before clipping
  weights_after.safetensors         after one step of the optimizer, its first one
Tensors are whole: a program gathers its shards, and adds nothing to them."""
OPTIMIZER = {"name", "lr", "betas", "eps", "weight_decay", "momentum", "clip", "decayed"}
ABOUT = {"dtype", "ignored", "ranks", "optimizer", "dropout", "unseen"}
COMPUTED = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Dump:
    """Hold a dump, all of its tensors by the names of Hugging Face.

    Attributes
    ----------
    folder : Path
        The folder.
    family : str
        The family of the model, such as "gpt2".
    model : Model
        The model, in the dump's type of computation.
    weights : dict of str to ndarray
        The weights before the step.
    tokens, targets : ndarray
        The batch, (batch, seq).
    tensors : dict of Place to ndarray
        What is judged, in the order of computation.
    ranks : dict of str to int
        Along what, and among how many ranks, the program divided its work, as it says.
    optimizer : dict or None
        Settings of the optimizer.
    unseen : tuple of str
        What the program says that it could not see.
    erf : bool
        Whether GELU is that of the error function, and not of tanh.
    absent : frozenset of str
        Biases that the program does not have: they are 0, and nothing is judged of them.
    """

    folder: Path
    family: str
    model: Model
    weights: dict[str, np.ndarray]
    tokens: np.ndarray
    targets: np.ndarray
    tensors: dict[Place, np.ndarray]
    ranks: Mapping[str, int]
    optimizer: Mapping[str, Any] | None
    unseen: tuple[str, ...]
    erf: bool = False
    absent: frozenset[str] = frozenset()


def read_dump(folder: str | Path, names: str = "huggingface") -> Dump:
    """Read a dump, see `FORMAT`.

    Parameters
    ----------
    folder : path
        The folder.
    names : str
        A table of `bench.experiments.dump.names`, or a file of rules.

    Raises
    ------
    UsageError
        For a dump that is no such folder, or cannot be read, or whose tensors are missing, too
        many, doubly named, of another shape or an unknown type.
    """
    folder = Path(folder)
    try:
        config, about = read_config(folder), _about(folder)
        batch = _tensors(folder, "batch")
        for name in ("tokens", "targets"):
            if name not in batch:
                raise UsageError(f"{folder}: batch.safetensors has no {name}: whole numbers, "
                                 f"(batch, seq), would do")
        shape = batch["tokens"].shape
        if len(shape) != 2:
            raise UsageError(f"{folder}: tokens of the shape {shape}: (batch, seq) would do")
        own = "weights" if (folder / "weights.safetensors").exists() else "model"
        raw = _tensors(folder, own)
        kinds = {str(a.dtype) for a in raw.values() if a.dtype.kind not in "biu"}
        if len(kinds) != 1 or not kinds <= {*COMPUTED}:
            raise UsageError(f"{folder}: weights in {', '.join(sorted(kinds)) or 'no type'}: one "
                             f"type of {', '.join(COMPUTED)} would do")
        erf = (config.get("model_type"), config.get("activation_function")) == ("gpt2", "gelu")
        model = _model(config | ({"activation_function": "gelu_new"} if erf else {}), folder,
                       shape, about, *kinds)
        tokens, targets, _ = check_batch(batch["tokens"], batch["targets"], shape, model.vocab,
                                         model.ignored)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.strerror else error
        raise UsageError(f"{what}; results/judge/README.rst says what a dump has") from error
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(f"{folder}: {error}") from (
            error)
    shapes = tensor_shapes(model_pieces(config["model_type"], model))
    family = config["model_type"]
    read = _Reading(folder, family, find_rules(names, family), model, shapes)
    weights = read.named(raw, own)
    if model.tied:
        weights.pop("lm_head.weight", None)
    absent = {name for name in shapes if name.endswith("bias")} if family == "gpt2" else set()
    absent = set() if absent & weights.keys() else absent    # some of them are not all
    weights |= {name: np.zeros(shapes[name], number_type(*kinds)) for name in absent}
    for name in shapes:
        if name not in weights:
            raise UsageError(f"{folder}: weight {name!r} is missing: all of the shape "
                             f"{shapes[name]} and the others would do")
    found = {Place(kind, name): a for kind, file in FILES.items() if (
        folder / f"{file}.safetensors").exists()
        for name, a in read.named(_tensors(folder, file), file).items()}
    scalars = _tensors(folder, SCALARS) if (folder / f"{SCALARS}.safetensors").exists() else {}
    found |= {Place(name): a for name, a in scalars.items() if name in (LOSS, NORM)}
    order = [place for place in in_order(read.family, model) if place in found]
    if unknown := sorted(str(place) for place in found.keys() - {*order}):
        raise UsageError(f"{folder}: {unknown[0]!r} is not in this model"
                         f"{f', nor {len(unknown) - 1} more' * (len(unknown) > 1)}: "
                         f"--names would do, with a table of names")
    return Dump(folder, read.family, model, weights, tokens, targets,
                {place: found[place] for place in order}, about.get("ranks") or {},
                about.get("optimizer"), tuple(about.get("unseen") or ()), erf, frozenset(absent))


def check_same_start(one: Dump, other: Dump) -> None:
    """Raise UsageError unless two dumps begin with the same model, weights and batch."""
    both = f"{one.folder} and {other.folder}"
    if replace(one.model, dtype="float32", master=None) != replace(
            other.model, dtype="float32", master=None):
        raise UsageError(f"{both} have different models: {one.model} and {other.model}")
    for what in ("tokens", "targets"):
        if not np.array_equal(getattr(one, what), getattr(other, what)):
            raise UsageError(f"{both} have different {what}: dumps of the same step would do")
    for name, a in one.weights.items():
        if not np.array_equal(np.float64(a), np.float64(other.weights[name])):
            raise UsageError(f"{both} have different weights before the step, the first is "
                             f"{name!r}: dumps of the same step would do")


def _about(folder: Path) -> dict[str, Any]:
    """Return what ``dump.json`` says; nothing where there is none."""
    path = folder / "dump.json"
    try:
        found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    unknown = sorted(found.keys() - ABOUT) if isinstance(found, dict) else ["no object"]
    unknown += sorted((found.get("optimizer") or {}).keys() - OPTIMIZER) if not unknown else []
    if unknown:
        raise UsageError(f"{path}: {unknown[0]} is unknown: {', '.join(sorted(ABOUT))} would do, "
                         f"and for an optimizer {', '.join(sorted(OPTIMIZER))}")
    return found


def _model(config: Mapping[str, Any], folder: Path, shape: tuple[int, ...],
           about: Mapping[str, Any], stored: str) -> Model:
    """Return the model of a dump, in its type of computation; `stored` is that of the weights."""
    dtype = about.get("dtype", stored)
    if dtype not in COMPUTED:
        raise UsageError(f"{folder}: dtype {dtype!r} in dump.json: {', '.join(COMPUTED)} would do")
    number_type(dtype)
    narrow = dtype in ("float16", "bfloat16")
    found = model_fields(config, str(folder))
    return Model(
        seq=take_length(found, shape[1], str(folder)), batch=shape[0], dtype=dtype,
        ignored=about.get("ignored", -100), dropout=float(about.get("dropout", 0.0)),
        master="float32" if narrow and stored == "float32" else None, **found)


def _tensors(folder: Path, file: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file of a dump."""
    path = folder / f"{file}.safetensors"
    if not path.exists():
        raise UsageError(f"{path} is missing: results/judge/README.rst says what would do")
    return read_tensors(path)


@dataclass(frozen=True)
class _Reading:
    """Give tensors the names and shapes of Hugging Face's."""

    folder: Path
    family: str
    rules: list[Rule]
    model: Model
    shapes: Mapping[str, tuple[int, ...]]

    def named(self, tensors: Mapping[str, np.ndarray], file: str) -> dict[str, np.ndarray]:
        """Return tensors by their names there; `file` is where they are."""
        found: dict[str, np.ndarray] = {}
        before: dict[str, str] = {}
        for own, name, how, a in self._parts(tensors, file):
            full = self._full(name, file)
            if full is None:
                continue
            if full in found:
                raise UsageError(f"{self.folder}: {file}: {before[full]!r} and {own!r} are the "
                                 f"same tensor {full!r}: one of them would do")
            if a.dtype.kind not in "fV" and file != "masks":
                raise UsageError(f"{self.folder}: {file}: {own!r} is in {a.dtype}, of which "
                                 f"nothing here has gradients: {', '.join(COMPUTED)} would do")
            found[full], before[full] = self._shaped(own, full, file, a, how), own
        return found

    def _parts(self, tensors: Mapping[str, np.ndarray], file: str) -> Iterator[tuple]:
        """Yield each tensor's name, and those of its parts there, with their arrangement."""
        model = self.model
        sizes = (model.architecture.kv_heads or model.heads,
                 model.architecture.head or model.hidden // model.heads)
        for own, a in tensors.items():
            try:
                yield from ((own, *one) for one in translate(
                    own, a, self.rules, sizes, self.shapes))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{self.folder}: {file}: {own!r} has the shape {a.shape}, which "
                                 f"its parts do not fit") from error

    def _full(self, name: str, file: str) -> str | None:
        """Return the full name of a tensor or module; None for a buffer."""
        if file in ("activations", "activation_gradients", "masks"):
            root = (GPT2_PREFIXES if self.family == "gpt2" else LLAMA_PREFIXES)[0]
            return name if name == "lm_head" else root + name.removeprefix(root)
        return canonical(self.family, name)

    def _shaped(self, own: str, full: str, file: str, a: np.ndarray,
                how: tuple[str, ...]) -> np.ndarray:
        """Return a tensor in the order of elements of Hugging Face's, after checking its shape."""
        model = self.model
        wanted = self.shapes.get(full)
        if full == "lm_head.weight" and wanted is None and file == "weights":
            return a
        if full in border_names(self.family, model.layers) or file == "masks":
            wanted = (model.batch, model.seq, model.vocab if full == "lm_head" else model.hidden)
        if wanted is None:
            return a
        head = model.architecture.head or model.hidden // model.heads
        try:
            a = arrange(a, how, model.heads, head)
        except ValueError as error:
            raise UsageError(f"{self.folder}: {file}: {own!r} has the shape {a.shape}, which "
                             f"{' '.join(how)} does not fit") from error
        if full.endswith("wpe.weight") and a.ndim == 2 and len(a) > wanted[0]:
            a = a[:wanted[0]]    # positions after the sequences have no part in the step
        if a.shape != wanted:
            raise UsageError(f"{self.folder}: {file}: {own!r} has the shape {a.shape}, not "
                             f"{wanted}")
        return a
