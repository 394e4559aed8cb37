"""Read the sizes of a GPT from a TOML file: a published model's, or a user's own."""

import msgspec

from bench.errors import UsageError
from bench.text_files import read_described
from mm3d import ModelSizes
from mm3d.model import cost

MOST = 10 ** 9    # of any size
SIZES = ("layers", "hidden", "heads", "vocab", "seq")


class GptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a GPT of this library.

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
    parameters : float
        The published number of parameters; 0 if there is none.
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
    parameters: float = 0.0

    @property
    def own_parameters(self) -> int:
        """Return the number of parameters of the GPT of this library."""
        sizes = ModelSizes(self.layers, self.hidden, self.heads, 1, self.seq)
        tables = (2 - self.tied) * self.vocab + self.seq + 2    # the last norm has two vectors
        return cost.parameters(sizes) + tables * self.hidden

    @property
    def difference(self) -> str:
        """State the number of parameters beside the published one."""
        own = f"{self.own_parameters / 1e9:.4g} billion parameters"
        if not self.parameters:
            return own
        return (f"{own}, {100 * (self.own_parameters / self.parameters - 1):+.1f} % beside the "
                f"published {self.parameters / 1e9:.4g} billion")


def load_model(name: str) -> GptFile:
    """Read a model.

    Parameters
    ----------
    name : str
        Name of a supplied model, or path of a TOML file.

    Raises
    ------
    UsageError
        When there is no such model, or the file does not describe one.
    """
    found = read_described("model", name, GptFile, lambda tree: msgspec.convert(tree, GptFile))
    for size in SIZES:
        if not 1 <= (value := getattr(found, size)) <= MOST:
            raise UsageError(f"model file {name}: {size} = {value}: a whole number from 1 to "
                             f"{MOST} would do")
    if found.hidden % found.heads:
        raise UsageError(f"model file {name}: {found.heads} heads do not divide {found.hidden} "
                         f"features")
    return found
