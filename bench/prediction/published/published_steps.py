"""Predict the steps of training that others have measured, and fit a machine to some of them.

A CSV file has a row for each step, with the columns of vTrain (Bang et al., MICRO 2024,
arXiv 2312.12391; `COLUMNS`), and any of `OPTIONAL`.  Where it says no more, a row is Megatron-LM
with activations recomputed: 1-D tensor parallelism, the schedule 1F1B, a backward that repeats the
whole forward, float16, a vocabulary of 51200 tokens, and no ZeRO.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Iterable, Sequence, get_args

import msgspec
import numpy as np

from bench.cases.variants import VARIANT_DTYPES
from bench.errors import UsageError
from bench.least_squares import solve_bounded
from bench.prediction.logs import rates
from bench.prediction.machine_model import Achieved, Machine, missing_rate
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.training_step import TrainingStep, predict_step
from bench.prediction.seconds import TERMS
from bench.text_files import read_text
from mm3d.config import Config, Division, Model
from mm3d.grid.layout import divided_directions, without_faces
from mm3d.names import check_name, suggestion
from mm3d.schemes import find_scheme, registry

COLUMNS = {"gpus": "# GPUs", "batch": "global batch", "micro": "micro batch",
           "hidden": "hidden size", "heads": "attention heads", "layers": "# layers",
           "seq": "sequence length", "tensor": "tensor parallelism",
           "data": "data parallelism", "stages": "pipeline parallelism",
           "ms": "iteration time (ms)"}
# Columns that may be missing or empty, with what is then assumed.
OPTIONAL = {"vocabulary": "51200", "scheme": "1d", "recompute": "full", "chunks": "1",
            "tied": "yes", "overlap": "no", "dtype": "float16", "zero": "0",
            "attention": "the machine's"}
MOST = 2 ** 20    # of any whole number: steps of more GPUs take minutes to predict
FIT_ROUNDS = 6        # the path of a pipeline changes with the figures
LEAST_ACHIEVED = .02
ATTENTIONS = get_args(Machine.__annotations__["attention"])
BOUNDS = 0.3, 4.0        # of the factor of a term in a round


@dataclass(frozen=True)
class PublishedStep:
    """A measured step: its line in the file, the training, seconds, and how scores are computed.

    `attention` is one of `bench.prediction.machine_model.Machine`, or None for the machine's.
    """

    line: int
    config: Config
    seconds: float
    attention: str | None

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        how = self.config.division
        return how.data * how.stages * math.prod(how.grid)


def read_steps(path: str) -> tuple[list[PublishedStep], list[str]]:
    """Read measured steps; return them, and a line on each row that says no step.

    Before these are lines on columns that are not used, and whose names are like optional ones.

    Raises UsageError when there is no such file, or a column is missing or there twice.
    """
    text = read_text(path, f"--steps {path}", "a .csv file with a step a row")
    try:
        lines = rates.read_rows(text)
    except ValueError as error:
        raise UsageError(f"--steps {path}: {error}") from error
    names = [_plain(name) for name in next(iter(lines), [])]
    heads = {name: place for place, name in enumerate(names)}
    missing = [name for name in COLUMNS.values() if _plain(name) not in heads]
    if missing:
        first = "".join(next(iter(lines), []))
        for sign, what in ((";", "semicolons"), ("\t", "tabs")):
            if first.count(sign) >= len(missing) - 1 > 0:
                raise UsageError(f"--steps {path}: its cells seem to be divided by {what}: commas "
                                 f"between them, and points in numbers, would do")
        raise UsageError(f"--steps {path}: its first line names no column "
                         f"{', '.join(map(repr, missing))}")
    if twice := [name for name in heads if name and names.count(name) > 1]:
        raise UsageError(f"--steps {path}: column {twice[0]!r} is there "
                         f"{names.count(twice[0])} times: one would do")
    left, taken = {*OPTIONAL} - {*names}, {*map(_plain, (*COLUMNS.values(), *OPTIONAL))}
    problems = [f"column {name!r} is not used{near}" for name in names
                if name not in taken and (near := suggestion(name, sorted(left)))]
    found = []
    for number, cells in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        try:
            if any(cell.strip() for cell in cells[len(names):]):
                raise ValueError(f"{len(cells)} cells for {len(names)} columns: decimal commas, "
                                 f"or commas in numbers, may divide some")
            found.append(_read_row(number, cells, heads))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    return found, problems


def _plain(name: str) -> str:
    """Return the name of a column without regard to case and spaces around it."""
    return " ".join(name.lower().split())


def _read_row(line: int, cells: list[str], heads: dict[str, int]) -> PublishedStep:
    """Read a row; ValueError says why it is none."""
    texts = {}
    for column in (*COLUMNS.values(), *OPTIONAL):
        place = heads.get(_plain(column))
        text = cells[place].strip() if place is not None and place < len(cells) else ""
        texts[column] = text or OPTIONAL.get(column, "")
    missing = [column for column in COLUMNS.values() if not texts[column]]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    values = {name: _number(column, texts[column], name != "ms")
              for name, column in COLUMNS.items()}
    _check(values)
    chunks = int(_number("chunks", texts["chunks"]))
    for column, known in (("scheme", registry()), ("recompute", ("none", "selective", "full")),
                          ("tied", ("yes", "no")), ("overlap", ("yes", "no")),
                          ("dtype", VARIANT_DTYPES), ("zero", ("0", "1", "2", "3")),
                          ("attention", (*ATTENTIONS, OPTIONAL["attention"]))):
        check_name(column, texts[column], known)
    model = Model(**{name: int(values[name]) for name in (
        "layers", "hidden", "heads", "batch", "seq")}, dtype=texts["dtype"],
        vocab=int(_number("vocabulary", texts["vocabulary"])), tied=texts["tied"] == "yes")
    data, stages = int(values["data"]), int(values["stages"])
    kind = find_scheme(texts["scheme"])
    grid = kind.grid_shape(kind.default_grid(int(values["tensor"])))
    inner = kind.layouts(grid, model.batch, model.seq)[1]
    of_heads = grid.ranks_along(divided_directions(without_faces(inner[1])))
    if of_heads > model.heads:
        raise ValueError(f"{of_heads} of {grid.ranks} tensor ranks divide {model.heads} heads: at "
                         f"most {model.heads} would do")
    division = Division(
        data=data, zero=int(texts["zero"]), stages=stages, scheme=texts["scheme"], grid=grid.sizes,
        schedule=f"interleaved:{chunks}" if chunks > 1 else "1f1b",
        microbatches=model.batch // data // int(values["micro"]), recompute=texts["recompute"],
        in_flight=int(texts["overlap"] == "yes"))
    named = texts["attention"] if texts["attention"] in ATTENTIONS else None
    return PublishedStep(line, Config(model, division), values["ms"] / 1e3, named)


def _number(column: str, text: str, whole: bool = True) -> float:
    """Read a number above 0, a whole one up to `MOST`; ValueError names the column."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = MOST if whole else sys.float_info.max
    if not 0 < value <= most or whole and value != int(value):
        would = f"whole number from 1 to {MOST}" if whole else "number above 0"
        raise ValueError(f"{column} is {text!r}: a {would} would do")
    return value


def _check(row: dict[str, Any]) -> None:
    """Raise ValueError for the numbers of a row that contradict each other."""
    tensor, data, stages, gpus = (int(row[name]) for name in ("tensor", "data", "stages", "gpus"))
    if tensor * data * stages != gpus:
        raise ValueError(f"tensor {tensor} x data {data} x pipeline {stages} is "
                         f"{tensor * data * stages}, not {gpus} GPUs")
    if row["batch"] % (data * row["micro"]):
        raise ValueError(f"micro-batches of {row['micro']:.0f} on {data} replicas do not divide "
                         f"the batch of {row['batch']:.0f}")
    if row["hidden"] % row["heads"]:
        raise ValueError(f"{row['heads']:.0f} heads do not divide {row['hidden']:.0f} features")


@dataclass(frozen=True)
class PredictedStep:
    """A row with its prediction."""

    row: PublishedStep
    step: TrainingStep

    @property
    def error(self) -> float:
        """Return by which share of the measured seconds the prediction is too long."""
        return self.step.seconds / self.row.seconds - 1


def predict_rows(rows: Iterable[PublishedStep],
                 machine: Machine) -> tuple[list[PredictedStep], list[str]]:
    """Predict rows; return them, and a line on each that has no prediction.

    Backward of rows that recompute all repeats the whole forward, as Megatron-LM does.  Rows with
    sums in flight hide them, as `predict_step` says of `overlap`.
    """
    found, problems = [], []
    for row in rows:
        how = row.config.division
        if lacking := missing_rate(machine, row.config.model.dtype):
            problems.append(f"line {row.line}: {lacking}")
            continue
        at = msgspec.structs.replace(machine, attention=row.attention or machine.attention)
        repeats = how.recompute == "full"
        config = replace(row.config, division=replace(
            how, recompute="none" if repeats else how.recompute))
        try:
            found.append(PredictedStep(row, predict_step(PipelineModel.of(config), at, repeats,
                                                         how.in_flight > 0)))
        except ValueError as error:
            problems.append(f"line {row.line}: {error}")
    return found, problems


def choices(outcomes: Sequence[PredictedStep]) -> list[tuple[PredictedStep, PredictedStep]]:
    """Return, for each problem of several rows, the row predicted fastest and the fastest."""
    groups: dict[tuple, list[PredictedStep]] = {}
    for one in outcomes:
        groups.setdefault((one.row.gpus, one.row.config.model), []).append(one)
    return [(min(group, key=lambda one: one.step.seconds),
             min(group, key=lambda one: one.row.seconds))
            for group in groups.values() if len(group) > 1]


def fit_to_steps(rows: Sequence[PublishedStep], machine: Machine) -> Machine:
    """Fit the achieved fractions of a machine to measured steps, by least relative squares.

    The seconds of a step are a sum of terms, each over its fraction, along the path of the
    pipeline; the path changes with the fractions, so the sum is fitted `FIT_ROUNDS` times.

    Raises UsageError when fewer rows than fractions can be predicted.
    """
    for _ in range(FIT_ROUNDS):
        outcomes, problems = predict_rows(rows, machine)
        if len(outcomes) < len(TERMS):
            raise UsageError("; ".join([f"{len(outcomes)} rows to fit {len(TERMS)} fractions to: "
                                        f"more are needed", *problems[:1]]))
        parts = np.array([_parts(one, machine) for one in outcomes])
        measured = np.array([one.row.seconds for one in outcomes])
        rest = np.array([one.step.seconds for one in outcomes]) - parts.sum(axis=1)
        shares, inverse = parts / measured[:, None], np.ones(len(TERMS))
        taken = np.abs(shares).max(axis=0) > 1e-3    # by some row
        inverse[taken] = solve_bounded(shares[:, taken], 1 - rest / measured - shares[
            :, ~taken].sum(axis=1), *BOUNDS)
        now = np.array([getattr(machine.achieved, term) for term in TERMS])
        machine = msgspec.structs.replace(machine, achieved=Achieved(**{
            term: float(np.clip(value, LEAST_ACHIEVED, 1.0))
            for term, value in zip(TERMS, now / inverse)}))
    return machine


def _parts(one: PredictedStep, machine: Machine) -> list[float]:
    """Return the seconds of a step by term of `TERMS`, where the pipeline's bubble is spread."""
    shares = one.step.shares
    pipeline = one.step.pipeline
    work = sum(shares[name] for name in ("products", "elementwise", "links", "latency"))
    stretch = (work + shares["bubble"]) / work if work else 1.0
    crosses = math.prod(one.row.config.division.grid) > machine.ranks_per_node    # in a stage
    found = dict.fromkeys(TERMS, 0.0)
    for name, term in (("products", "gemm"), ("elementwise", "memory"), ("latency", "latency"),
                       ("links", "network" if crosses else "node")):
        found[term] += stretch * shares[name]
    found["memory"] += shares["optimizer"]
    hop = "network" if not math.isnan(pipeline.between) else "node"
    found[hop] += shares["hops"]
    found["network" if one.row.gpus > machine.ranks_per_node else "node"] += shares["replicas"]
    return [found[term] for term in TERMS]
