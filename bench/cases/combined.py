"""Training steps on meshes of all dimensions: the rows of ``reproduce --table combined``."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Container, Mapping

import msgspec

import mm3d
from bench.cases.case import Case
from bench.errors import UsageError
from mm3d.config import Config, Division, Model
from mm3d.names import unknown_name
from mm3d.schemes import find_scheme

TABLE = "combined"
LENGTHS = ("hidden", "seq")    # of a model, which `Combined.shrink` has divided
PRESETS = ("paper", "tiny")    # of rows whose ranks compute: with whole lengths; with those here
# Options of the paper's rows that these lack, and their defaults.
REFUSED = {"scheme": "paper", "preset": None, "equal_tokens": False, "work": None,
           "machine": None, "work_scale": None, "dtype": "float32", "keep": "none", "overlap": 0,
           "causal": False, "recompute": "none", "backend": None, "seed": 0, "warmup": None,
           "traced": None, "node_memory": None, "precise": False, "inside": None}


class CaseGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    groups: list[CaseGroup]


@dataclass(frozen=True)
class TrainingCase:
    """A row, the one of this `number` in its group, from 1: a training on a mesh of so many ranks.

    Rows of a group share its model, batch and ranks.  `preset` is one of `PRESETS`; "" for ranks
    that wait for modelled work.
    """

    group: str
    ranks: int
    number: int
    config: Config
    preset: str = ""
    verb = ("measure", "meshes")    # of bench, which takes selectors

    @property
    def measured(self) -> Config:
        """What is timed: with the preset "paper" the lengths are not divided by `shrink`."""
        factor, model = int(load_rows().shrink) if self.preset == "paper" else 1, self.config.model
        lengths = {name: factor * getattr(model, name) for name in LENGTHS}
        return replace(self.config, model=replace(model, **lengths))

    @property
    def selector(self) -> str:
        """Its name in the command line of a job."""
        sizes = f":{self.preset}" * bool(self.preset)
        return f"{TABLE}:{self.group}-{self.ranks}-{self.number}{sizes}"

    @property
    def name(self) -> str:
        """The beginning of a result's file name, such as ``combined-dense-p008-3``."""
        sizes = f"-{self.preset}" * bool(self.preset)
        return f"{TABLE}-{self.group}-p{self.ranks:03d}-{self.number}{sizes}"

    @property
    def title(self) -> str:
        """The title in messages."""
        return f"{TABLE} {self.group} {self.ranks} ranks, {self.config.division}"

    @property
    def settings(self) -> dict[str, Any]:
        """What a record states of it."""
        how = {name: value for name, value in asdict(self.config.division).items()
               if value is not None and name != "grid"}
        computes = {"preset": self.preset, "work": "compute"} if self.preset else {}
        return {"group": self.group, "row": self.number, "mesh": str(self.config.division)} | (
            computes) | self.measured.model.settings() | how


AnyCase = Case | TrainingCase    # a row of the paper's tables, or of this one


@cache
def load_rows() -> Combined:
    """Read ``combined.toml``."""
    text = resources.files("bench.cases").joinpath("combined.toml").read_bytes()
    return msgspec.toml.decode(text, type=Combined)


@cache
def list_cases() -> tuple[TrainingCase, ...]:
    """List all rows, group by group."""
    return tuple(_case(group, number, fields) for group in load_rows().groups
                 for number, fields in enumerate(group.meshes, start=1))


def _case(group: CaseGroup, number: int, fields: dict[str, Any]) -> TrainingCase:
    model = dict(group.model)
    if "experts" in model:
        model["experts"] = mm3d.Experts(**model["experts"])
    grid = {"grid": tuple(fields["grid"])} if "grid" in fields else {}
    if "overlap" in find_scheme(fields.get("scheme", Division.scheme)).options:
        grid["overlap"] = False    # predictions hide nothing
    return TrainingCase(group.name, group.ranks, number,
                        Config(Model(**model), Division(**fields | grid)))


def cases_by_name(names: str) -> list[TrainingCase]:
    """Return the rows that are named, such as ``combined:dense-8-3``, each once.

    ``combined:dense-8-3:tiny`` is a row of preset "tiny".  UsageError when one is unknown, or some
    have another preset than others.
    """
    rows = {one.selector: one for one in list_cases()}
    known = {one.selector: one for row in rows.values()
             for one in (replace(row, preset=preset) for preset in ("", *PRESETS))}
    for name in names.split(","):
        if name not in known:
            raise UsageError(unknown_name(f"row {name!r}", name, rows))
    found = [known[name] for name in dict.fromkeys(names.split(","))]
    if len({one.preset for one in found}) > 1:
        raise UsageError(f"rows {names}: give all of them one preset, or none")
    return found


def refuse_options(given: Mapping[str, Any], but: Container[str] = ()) -> None:
    """Raise UsageError for a value of an option that these rows do not have, unless in `but`."""
    for name, default in REFUSED.items():
        if name not in but and given.get(name) not in (default, None):
            raise UsageError(f"--table {TABLE} --{name.replace('_', '-')}: its file "
                             f"bench/cases/combined.toml says how its rows are measured; leave "
                             f"one of them out")
