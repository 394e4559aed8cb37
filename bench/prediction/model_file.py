"""Read a GPT from a file: a published model's, a user's own in TOML, or a config.json."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.errors import UsageError
from bench.text_files import read_described
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
    name : str
        The model.
    about, source : str
        Whose it is, and where its sizes are from.
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
    def own_parameters(self) -> int:
        """Return the parameters of a GPT of its sizes alone, of which plans of trainings are.

        It has the same experts, of its own perceptrons.
        """
        return parameter_count(replace(self, architecture=PLAIN).model())

    @property
    def difference(self) -> str:
        """State the parameters of a GPT of its sizes alone, beside its own where it is another."""
        plain = self.own_parameters
        said = f"{plain / 1e9:.4g} billion parameters"
        if self.architecture == PLAIN:
            return said
        own = self.parameters
        return f"{said}, {100 * (plain / own - 1):+.1f} % beside its own {own / 1e9:.4g} billion"


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a GPT, and perhaps its architecture; or the configuration of a published model.

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
    architecture : dict
        Fields of `mm3d.Architecture`.
    config : dict
        The keys of a config.json of Hugging Face, instead of sizes.
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
    architecture: dict[str, Any] = {}
    config: dict[str, Any] = {}


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
    path = Path(name)
    if path.suffix != ".json" and not (path / CONFIG).is_file():
        return read_described("model", name, ModelFile,
                              lambda tree: _model(msgspec.convert(tree, ModelFile)))
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    try:
        return _model(ModelFile(folder.name, config=read_config(path), source=name))
    except (OSError, ValueError) as error:
        raise UsageError(f"model file {name}: {error}") from error


def _model(given: ModelFile) -> GptFile:
    """Return the model that a file describes; ValueError where it is none."""
    if given.config:
        found = model_fields(given.config)
        found["seq"] = found["positions"] if given.seq == -1 else given.seq
        found.pop("positions", None)
    else:
        if missing := [size for size in SIZES if getattr(given, size) == -1]:
            raise ValueError(f"missing required field{'s' * (len(missing) > 1)} "
                             f"{', '.join(missing)}")
        known = field_names(Architecture)
        if unknown := sorted(given.architecture.keys() - {*known}):
            raise ValueError(f"architecture has {', '.join(unknown)}: {', '.join(known)} would do")
        found = {size: getattr(given, size) for size in SIZES}
        found |= {"tied": given.tied, "architecture": Architecture(**given.architecture)}
    model = GptFile(given.name, about=given.about, source=given.source, **found)
    for size in SIZES:
        if not 1 <= (value := getattr(model, size)) <= MOST:
            raise ValueError(f"{size} = {value}: a whole number from 1 to {MOST} would do")
    model.architecture.check()
    model.architecture.check_heads(model.hidden, model.heads)
    return model
