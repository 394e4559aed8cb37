"""Read a dump: the weights, batch and results of one training step of any program.

``results/judge/README.rst`` says what its folder has.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np

from bench.errors import UsageError
from bench.experiments.dump.computation import Start
from bench.experiments.dump.names import WRAPPERS, NameRule, arrange, find_rules, translate
from bench.experiments.dump.places import (FILES, LOSS, NORM, SCALARS, TensorId, border_names,
                                           in_order)
from bench.experiments.dump.said import COMPUTED, read_about
from bench.experiments.dump.tensor_files import number_type, read_tensors
from mm3d.config import Model
from mm3d.hugging_face.config_file import model_fields, read_config, take_length
from mm3d.hugging_face.names import GPT2_PREFIXES, LLAMA_PREFIXES, canonical, tensor_shapes
from mm3d.pretrained.loading import model_pieces
from mm3d.training.batches import check_batch


@dataclass(frozen=True, kw_only=True)
class StepDump(Start):
    """Hold a dump: what its step begins with, in its type of computation, and what it computed.

    Attributes
    ----------
    tensors : dict of TensorId to ndarray
        What is judged, in the order of computation.
    ranks : dict of str to int
        Along what, and among how many ranks, the program divided its work, as it says.
    unseen : tuple of str
        What the program says that it could not see.
    absent : frozenset of str
        What no optimizer changes: weights that are frozen, or have no gradient; and biases that
        the program does not have, which are 0.
    """

    folder: Path
    tensors: dict[TensorId, np.ndarray]
    ranks: Mapping[str, int]
    optimizer: Mapping[str, Any] | None
    unseen: tuple[str, ...]
    absent: frozenset[str]


def read_dump(folder: str | Path, names: str = "huggingface") -> StepDump:
    """Read a dump by a table of `bench.experiments.dump.names`, or a file of rules.

    Raises UsageError for a dump that is no such folder, or cannot be read, or whose tensors are
    missing, too many, doubly named, of another shape or an unknown type.
    """
    folder = Path(folder)
    try:
        config, about = read_config(folder), read_about(folder)
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
        shapes = tensor_shapes(model_pieces(config["model_type"], model, len(raw)))
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.strerror else error
        raise UsageError(f"{what}; results/judge/README.rst says what a dump has") from error
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, UsageError) else UsageError(f"{folder}: {error}") from (
            error)
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
        if not np.isfinite(np.float64(weights[name])).all():
            raise UsageError(f"{folder}: weight {name!r} has elements that are infinite or not a "
                             f"number before the step: finite ones would do")
    absent |= _said(read, raw, own, about.get("skipped", ()))
    optimizer = about.get("optimizer")
    if optimizer and isinstance(optimizer.get("decayed"), list):
        optimizer = optimizer | {"decayed": _said(read, raw, own, optimizer["decayed"])}
    found = {TensorId.of(kind, name): a for kind, file in FILES.items() if (
        folder / f"{file}.safetensors").exists()
        for name, a in read.named(_tensors(folder, file), file).items()}
    found |= _scalars(folder)
    places = {place: number for number, place in enumerate(in_order(family, model))}
    if unknown := sorted(str(place) for place in found if place.first not in places):
        raise UsageError(f"{folder}: {unknown[0]!r} is not in this model"
                         f"{f', nor {len(unknown) - 1} more' * (len(unknown) > 1)}: "
                         f"--names would do, with a table of names")
    masks = {place.name: a for place, a in found.items() if place.kind == "mask"
             and not place.rank}
    return StepDump(
        family=family, model=model, weights=weights, tokens=tokens, targets=targets, masks=masks,
        erf=erf, folder=folder, ranks=about.get("ranks", {}), optimizer=optimizer,
        tensors={place: found[place] for place in sorted(found, key=lambda one: (
            places[one.first], one.rank))},
        unseen=tuple(about.get("unseen", ())), absent=frozenset(absent))


def _said(read: "_Reading", raw: Mapping[str, np.ndarray], file: str, names: Any) -> set[str]:
    """Return the names in Hugging Face's files of weights that ``dump.json`` names."""
    plain = [WRAPPERS.sub("", name) for name in names]
    for name in plain:
        if name not in raw:
            raise UsageError(f"{read.folder}: dump.json names {name!r}, which is no weight of "
                             f"{file}.safetensors: one of {', '.join(sorted(raw))} would do")
    return {*read.named({name: raw[name] for name in plain}, file)}


def _scalars(folder: Path) -> dict[TensorId, np.ndarray]:
    """Return the loss and the norm of a dump, and copies of them, each of no dimension."""
    found = {}
    tensors = _tensors(folder, SCALARS) if (folder / f"{SCALARS}.safetensors").exists() else {}
    for place, a in ((TensorId.of("", name), a) for name, a in tensors.items()):
        if place.name not in (LOSS, NORM):
            continue
        if a.size != 1 or a.dtype.kind not in "fV":
            raise UsageError(f"{folder}: {place.name} in scalars.safetensors is {a.dtype} of the "
                             f"shape {a.shape}: one number of {', '.join(COMPUTED)} would do")
        found[TensorId(place.name, "", place.rank)] = a.reshape(())
    return found


def check_same_start(one: StepDump, other: StepDump) -> None:
    """Raise UsageError unless two dumps begin with the same model, weights and batch."""
    both = f"{one.folder} and {other.folder}"
    models = [replace(each.model, dtype="float32", master=None) for each in (one, other)]
    if models[0] != models[1]:
        raise UsageError(f"{both} have different models: {one.model} and {other.model}")
    if one.erf != other.erf:
        raise UsageError(f"{both} have different models: GELU by the error function, and by tanh")
    for what in ("tokens", "targets"):
        if not np.array_equal(getattr(one, what), getattr(other, what)):
            raise UsageError(f"{both} have different {what}: dumps of the same step would do")
    for name, a in one.weights.items():
        if not np.array_equal(np.float64(a), np.float64(other.weights[name])):
            raise UsageError(f"{both} have different weights before the step, the first is "
                             f"{name!r}: dumps of the same step would do")


def _model(config: Mapping[str, Any], folder: Path, shape: tuple[int, ...],
           about: Mapping[str, Any], stored: str) -> Model:
    """Return the model of a dump, in its type of computation; `stored` is that of the weights."""
    dtype = about.get("dtype", stored)
    number_type(dtype)
    narrow = dtype in ("float16", "bfloat16")
    try:
        found = model_fields(config, str(folder))
    except (TypeError, AttributeError) as error:
        raise UsageError(f"{folder}: config.json has a value of another kind than Hugging Face's: "
                         f"{error}") from error
    return Model(
        seq=take_length(found, shape[1], str(folder)), batch=shape[0], dtype=dtype,
        ignored=about.get("ignored", -100), dropout=float(about.get("dropout", 0.0)),
        master="float32" if narrow and stored == "float32" else None, **found)


def _tensors(folder: Path, file: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file of a dump."""
    path = folder / f"{file}.safetensors"
    if not path.is_file():
        raise UsageError(f"{path} is {'no file' if path.exists() else 'missing'}: "
                         f"results/judge/README.rst says what would do")
    return read_tensors(path)


@dataclass(frozen=True)
class _Reading:
    """Give tensors the names and shapes of Hugging Face's."""

    folder: Path
    family: str
    rules: list[NameRule]
    model: Model
    shapes: Mapping[str, tuple[int, ...]]

    def named(self, tensors: Mapping[str, np.ndarray], file: str) -> dict[str, np.ndarray]:
        """Return tensors by their names there; `file` is where they are."""
        found: dict[str, np.ndarray] = {}
        before: dict[str, str] = {}
        for own, name, how, a in self._parts(tensors, file):
            _, at, rank = own.partition("@")
            if at and not (rank.isdecimal() and int(rank)):
                raise UsageError(f"{self.folder}: {file}: {own!r}: NAME@RANK would do, for a copy "
                                 f"on another rank that differs")
            root = self._full(name, file)
            if root is None:
                continue
            full = root + at + rank
            if full in found:
                raise UsageError(f"{self.folder}: {file}: {before[full]!r} and {own!r} are the "
                                 f"same tensor {full!r}: one of them would do")
            if a.dtype.kind not in "fV" and file != "masks":
                raise UsageError(f"{self.folder}: {file}: {own!r} is in {a.dtype}, of which "
                                 f"nothing here has gradients: {', '.join(COMPUTED)} would do")
            found[full], before[full] = self._shaped(own, root, file, a, how), own
            if at and file in ("weights", "model"):
                raise UsageError(f"{self.folder}: the weights of rank {rank} before the step are "
                                 f"not those of an earlier rank, in {root!r}: ranks that begin "
                                 f"alike, or whole tensors of ranks that have parts, would do")
        return found

    def _parts(self, tensors: Mapping[str, np.ndarray], file: str) -> Iterator[tuple]:
        """Yield each tensor's name, and those of its parts there, with their arrangement."""
        model = self.model
        sizes = (model.architecture.kv_heads or model.heads,
                 model.architecture.head or model.hidden // model.heads)
        for own, a in tensors.items():
            try:
                yield from ((own, *one) for one in translate(
                    own.partition("@")[0], a, self.rules, sizes, self.shapes))
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
                             f"{wanted}: all of it would do, or --names with a table that says "
                             f"how it is arranged")
        return a
