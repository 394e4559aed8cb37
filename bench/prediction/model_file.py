"""Read a GPT from a file: a published model's, a user's own in TOML, or a config.json."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.errors import UsageError
from bench.text_files import read_supplied
from mm3d.config import Model
from mm3d.hugging_face.config_file import CONFIG, model_fields, read_config
from mm3d.model.architecture import PLAIN, Architecture
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.stack import field_names
from mm3d.pretrained.shapes import parameter_count

MOST = 10 ** 9    # of any size
SIZES = ("layers", "hidden", "heads", "vocab", "seq")


@dataclass(frozen=True)
class GptFile:
    """A model, and the length of its sequences.

    Attributes
    ----------
    name, about, source : str
        The model, whose it is, and where its sizes are from.
    layers, hidden, heads, vocab, seq : int
        As of `mm3d.GPT`.
    tied : bool
        Whether logits are computed with the embedding's table.
    architecture, experts : Architecture, ExpertOptions or None
        As of `mm3d.Model`.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    tied: bool = True
    about: str = ""
    source: str = ""
    architecture: Architecture = PLAIN
    experts: ExpertOptions | None = None

    def model(self, batch: int = 1, seq: int | None = None, **fields: Any) -> Model:
        """Return the model, for a batch; `fields` are further ones of `mm3d.Model`."""
        return Model(self.layers, self.hidden, self.heads, batch, seq or self.seq, self.vocab,
                     tied=self.tied, experts=self.experts, architecture=self.architecture,
                     **fields)

    @property
    def parameters(self) -> int:
        """Return the number of its parameters."""
        return parameter_count(self.model())

    @property
    def difference(self) -> str:
        """State the parameters of a GPT of its sizes alone, beside its own where it is another."""
        plain = parameter_count(replace(self, architecture=PLAIN, experts=None).model())
        said = f"{plain / 1e9:.4g} billion parameters"
        if (self.architecture, self.experts) == (PLAIN, None):
            return said
        own = self.parameters
        return f"{said}, {100 * (plain / own - 1):+.1f} % beside its own {own / 1e9:.4g} billion"


class _Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file with sizes of its own."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    tied: bool = True
    about: str = ""
    source: str = ""
    architecture: dict[str, Any] = {}


class _Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file with the keys of a config.json; without `seq`, its longest sequences."""

    name: str
    config: dict[str, Any]
    seq: int | None = None
    about: str = ""
    source: str = ""


def load_model(name: str) -> GptFile:
    """Read a model.

    Parameters
    ----------
    name : str
        Name of a supplied model; path of a TOML file with sizes and perhaps an `architecture`, or
        with the `config` of Hugging Face; or path of a config.json, or of its folder.

    Raises
    ------
    UsageError
        When there is no such model, the file does not describe one, or nothing here computes it.
    """
    try:
        found = _read(name)
        for size in SIZES:
            if not 1 <= (value := getattr(found, size)) <= MOST:
                raise ValueError(f"{size} = {value}: a whole number from 1 to {MOST} would do")
        found.architecture.check()
        found.architecture.check_heads(found.hidden, found.heads)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"model file {name}: {error}") from error
    return found


def _read(name: str) -> GptFile:
    """Read a file of any kind; ValueError where it is no model."""
    path = Path(name)
    if path.name == CONFIG or (path / CONFIG).is_file():
        folder = path.resolve() if path.is_dir() else path.resolve().parent
        return _published(_Published(folder.name, read_config(path), source=name))
    content = tomllib.loads(read_supplied("model", name))
    if "config" in content:
        return _published(msgspec.convert(content, _Published))
    sizes = msgspec.structs.asdict(msgspec.convert(content, _Sizes))
    known = field_names(Architecture)
    if unknown := sorted(sizes["architecture"].keys() - {*known}):
        raise ValueError(f"architecture has {', '.join(unknown)}: {', '.join(known)} would do")
    return GptFile(**sizes | {"architecture": Architecture(**sizes["architecture"])})


def _published(given: _Published) -> GptFile:
    """Return the model of a config.json."""
    found = model_fields(given.config)
    positions = found.pop("positions")
    return GptFile(given.name, seq=given.seq or positions, about=given.about,
                   source=given.source, **found)
