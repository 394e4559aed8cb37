"""Read a model from a file: a published model's, a user's own in TOML, or a config.json."""

from pathlib import Path
from typing import Any, Mapping

import msgspec

from bench.errors import UsageError
from bench.text_files import read_described
from mm3d.config import Model
from mm3d.hugging_face.config_file import CONFIG, model_fields, read_config, take_length
from mm3d.model.architecture import PLAIN, Architecture
from mm3d.model.experts.layer import Experts
from mm3d.model.sizes import ModelSizes
from mm3d.model.stack import field_names
from mm3d.pretrained.shapes import parameter_count

MOST = 10 ** 9    # of any size
SIZES = ("layers", "hidden", "heads", "vocab", "seq")
TABLES = {"architecture": Architecture, "experts": Experts}
BESIDE_CONFIG = ("name", "about", "source", "seq", "config")    # it states all else


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, and the length of its sequences; or the configuration of a published model.

    Attributes
    ----------
    name : str
        The model.
    about, source : str
        Whose it is, and where its sizes are from.
    layers, hidden, heads, vocab, seq : int
        As of `mm3d.GPT`; with `config` seq alone, by default its longest sequences.
    tied : bool
        Whether logits are computed with the embedding's table.
    architecture : Architecture
        Fields of `mm3d.Architecture`.
    experts : Experts
        Fields of `mm3d.Experts`; by default there are none.
    config : dict
        The keys of a config.json of Hugging Face, instead of sizes; {} once it is read.
    """

    name: str
    layers: int = -1    # not given
    hidden: int = -1    # not given
    heads: int = -1    # not given
    vocab: int = -1    # not given
    seq: int = -1    # not given
    tied: bool = True
    about: str = ""
    source: str = ""
    architecture: Architecture = PLAIN
    experts: Experts | None = None
    config: dict[str, Any] = {}

    def model(self, batch: int = 1, seq: int | None = None, **fields: Any) -> Model:
        """Return the model, for a batch; `fields` are further ones of `mm3d.Model`."""
        return Model(self.layers, self.hidden, self.heads, batch, seq or self.seq, self.vocab,
                     tied=self.tied, experts=self.experts, architecture=self.architecture,
                     **fields)

    def sizes(self, batch: int = 1, seq: int | None = None) -> ModelSizes:
        """Return the sizes of its layers, for a batch."""
        return ModelSizes(self.layers, self.hidden, self.heads, batch, seq or self.seq,
                          self.architecture)

    @property
    def parameters(self) -> int:
        """Return the number of its parameters."""
        return parameter_count(self.model())


def load_model(name: str, **changed: int | None) -> ModelFile:
    """Read a supplied model by its name, or a file: a `ModelFile` in TOML, or a config.json.

    A config.json may be named by its folder.  `changed` are other sizes than those of the file,
    None for the file's.  Raises UsageError when there is no such model, the file does not describe
    one, or nothing here computes it.
    """
    path = Path(name)
    if path.suffix != ".json" and not (path / CONFIG).is_file():
        return read_described("model", name, ModelFile, lambda tree: _complete(
            msgspec.convert(tree, ModelFile), changed), _wrong_names)
    whole = path.resolve()
    called = whole.parent.name if path.name == CONFIG else whole.name.removesuffix(".json")
    try:
        return _complete(ModelFile(called, source=name, config=read_config(path)), changed)
    except (OSError, ValueError) as error:
        raise UsageError(f"model file {name}: {error}") from error


def _wrong_names(tree: Mapping[str, Any]) -> str:
    """Say what a file states that no field has, or that its configuration states; "" if nothing.
    """
    if "config" in tree:
        twice = [name for name in tree if name not in BESIDE_CONFIG]
        return f"{twice[0]}: config says it: leave one of them out" if twice else ""
    for name, kind in TABLES.items():
        known, given = field_names(kind), tree.get(name)
        if isinstance(given, dict) and (unknown := sorted(given.keys() - {*known})):
            return f"{name} has {', '.join(unknown)}: {', '.join(known)} would do"
    return ""


def _complete(given: ModelFile, changed: Mapping[str, int | None]) -> ModelFile:
    """Return a model with what its configuration states, and the changed sizes.

    ValueError where that is no model.
    """
    found: dict[str, Any] = {}
    changed = {name: value for name, value in changed.items() if value is not None}
    if given.config:
        found = model_fields(given.config)
        asked = changed.get("seq", given.seq)
        found["seq"] = take_length(found, None if asked == -1 else asked, given.name)
    elif missing := [size for size in SIZES if getattr(given, size) == -1]:
        raise ValueError(f"missing required field{'s' * (len(missing) > 1)} {', '.join(missing)}")
    model = msgspec.structs.replace(given, config={}, **found | changed)
    for size in SIZES:
        if not 1 <= (value := getattr(model, size)) <= MOST:
            raise ValueError(f"{size} = {value}: a whole number from 1 to {MOST} would do")
    model.architecture.check()
    model.architecture.check_heads(model.hidden, model.heads)
    if model.experts is not None:
        model.experts.check()
    return model
