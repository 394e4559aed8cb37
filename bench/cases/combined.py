"""Training steps on meshes of all dimensions: the rows of ``reproduce --table combined``."""

from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import msgspec

import mm3d
from bench.errors import UsageError
from mm3d.config import Config, Division, Model

TABLE = "combined"


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and its batch, on so many ranks; and the fields of each `Division` of them."""

    name: str
    ranks: int
    model: dict[str, Any]
    meshes: list[dict[str, Any]]


class Combined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file ``combined.toml``, whose comments say what its keys are."""

    cluster: str
    machine: str
    shrink: float
    software_share: float
    repetitions: int
    max_repetitions: int
    max_seconds: float
    groups: list[Group]


@dataclass(frozen=True)
class TrainingCase:
    """A row: a training on a mesh of so many ranks.

    Attributes
    ----------
    group : str
        The name of the rows that share its model, batch and ranks.
    ranks, number : int
        Number of ranks; and of the row in its group, from 1.
    config : Config
        What is trained, and how ranks divide it.
    """

    group: str
    ranks: int
    number: int
    config: Config
    verb = ("measure", "meshes")    # of bench, which takes selectors

    @property
    def selector(self) -> str:
        """Its name in the command line of a job."""
        return f"{TABLE}:{self.group}-{self.ranks}-{self.number}"

    @property
    def name(self) -> str:
        """The beginning of a result's file name, such as ``combined-dense-p008-3``."""
        return f"{TABLE}-{self.group}-p{self.ranks:03d}-{self.number}"

    @property
    def title(self) -> str:
        """The title in messages."""
        return f"{TABLE} {self.group} {self.ranks} ranks, {self.config.division}"

    @property
    def settings(self) -> dict[str, Any]:
        """What a record states of it."""
        how = {name: value for name, value in asdict(self.config.division).items()
               if value is not None and name != "grid"}
        return {"group": self.group, "row": self.number,
                "mesh": str(self.config.division)} | self.config.model.settings() | how


@cache
def load() -> Combined:
    """Read ``combined.toml``."""
    text = resources.files("bench.cases").joinpath("combined.toml").read_bytes()
    return msgspec.toml.decode(text, type=Combined)


@cache
def list_cases() -> tuple[TrainingCase, ...]:
    """List all rows, group by group."""
    return tuple(_case(group, number, fields) for group in load().groups
                 for number, fields in enumerate(group.meshes, start=1))


def _case(group: Group, number: int, fields: dict[str, Any]) -> TrainingCase:
    model = dict(group.model)
    if "experts" in model:
        model["experts"] = mm3d.Experts(**model["experts"])
    grid = {"grid": tuple(fields["grid"])} if "grid" in fields else {}
    return TrainingCase(group.name, group.ranks, number,
                        Config(Model(**model), Division(**fields | grid)))


def cases_by_name(names: str) -> list[TrainingCase]:
    """Return the rows that are named, such as ``combined:dense-8-3``, each once.

    Raises
    ------
    UsageError
        When one is unknown.
    """
    known = {one.selector: one for one in list_cases()}
    for name in names.split(","):
        if name not in known:
            raise UsageError(f"row {name!r} is unknown: {', '.join(known)} would do")
    return [known[name] for name in dict.fromkeys(names.split(","))]
