"""Predict the steps of training that others have measured, and fit a machine to some of them.

A CSV file has a row for each step, with the columns of vTrain (Bang et al., MICRO 2024,
arXiv 2312.12391; `COLUMNS`).  Where it says no more, a row is Megatron-LM: 1-D tensor parallelism,
the schedule 1F1B, float16, a vocabulary of `VOCABULARY` tokens.
"""

import csv
import io
import math
from dataclasses import dataclass
from typing import Iterable, Sequence

import msgspec
import numpy as np

from bench.errors import UsageError
from bench.prediction.machine_model import Achieved, Machine
from bench.prediction.pipeline_seconds import PipelineModel
from bench.prediction.training_step import TrainingStep, predict_step
from bench.text_files import read_text
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.training.schedules import build

COLUMNS = {"gpus": "# GPUs", "batch": "global batch", "micro": "micro batch",
           "hidden": "hidden size", "heads": "attention heads", "layers": "# layers",
           "seq": "sequence length", "tensor": "tensor parallelism",
           "data": "data parallelism", "stages": "pipeline parallelism",
           "ms": "iteration time (ms)"}
OPTIONAL = {"vocab": "vocabulary"}
VOCABULARY = 51200    # of GPT-2, padded
TERMS = ("gemm", "memory", "node", "network", "latency")
FIT_ROUNDS = 6        # the path of a pipeline changes with the figures
LEAST_ACHIEVED = .02


@dataclass(frozen=True)
class Row:
    """A measured step: its line in the file, the fields of `COLUMNS`, and `vocab`."""

    line: int
    gpus: int
    batch: int
    micro: int
    hidden: int
    heads: int
    layers: int
    seq: int
    tensor: int
    data: int
    stages: int
    vocab: int
    seconds: float

    @property
    def problem(self) -> tuple[int, ...]:
        """Return what is trained, on how many GPUs; rows of one problem are choices."""
        return (self.gpus, self.batch, self.hidden, self.heads, self.layers, self.seq, self.vocab)

    @property
    def mesh(self) -> str:
        """Name the division: tensor x data x pipeline, and the micro-batch."""
        return f"t{self.tensor} d{self.data} p{self.stages} micro-batch {self.micro}"


def read_rows(path: str) -> tuple[list[Row], list[str]]:
    """Read measured steps; return them, and a line on each row that says no step.

    Raises
    ------
    UsageError
        When there is no such file, or a column is missing.
    """
    text = read_text(path, f"--steps {path}", "a .csv file with a step a row")
    lines = csv.reader(io.StringIO(text))
    heads = {_plain(name): place for place, name in enumerate(next(lines, []))}
    missing = [name for name in COLUMNS.values() if _plain(name) not in heads]
    if missing:
        raise UsageError(f"--steps {path}: no column {', '.join(map(repr, missing))}: a first "
                         f"line with {', '.join(COLUMNS.values())} would do")
    found, problems = [], []
    for number, cells in enumerate(lines, 2):
        if not any(cell.strip() for cell in cells):
            continue
        try:
            found.append(_read_row(number, cells, heads))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    return found, problems


def _plain(name: str) -> str:
    """Return the name of a column without regard to case and spaces around it."""
    return " ".join(name.lower().split())


def _read_row(line: int, cells: list[str], heads: dict[str, int]) -> Row:
    """Read a row; ValueError says why it is none."""
    values = {}
    for name, column in (COLUMNS | OPTIONAL).items():
        place = heads.get(_plain(column))
        text = cells[place].strip() if place is not None and place < len(cells) else ""
        if not text and name in OPTIONAL:
            text = str(VOCABULARY)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        whole = name == "ms" or value == int(value) if math.isfinite(value) else False
        if not whole or value <= 0:
            raise ValueError(f"{column} is {text!r}: a {'' if name == 'ms' else 'whole '}number "
                             f"above 0 would do")
        values[name] = value if name == "ms" else int(value)
    seconds = values.pop("ms") / 1e3
    row = Row(line, **values, seconds=seconds)
    _check(row)
    return row


def _check(row: Row) -> None:
    """Raise ValueError for a row that contradicts itself."""
    ranks = row.tensor * row.data * row.stages
    if ranks != row.gpus:
        raise ValueError(f"tensor {row.tensor} x data {row.data} x pipeline {row.stages} is "
                         f"{ranks}, not {row.gpus} GPUs")
    if row.batch % (row.data * row.micro):
        raise ValueError(f"micro-batches of {row.micro} on {row.data} replicas do not divide the "
                         f"batch of {row.batch}")
    if row.hidden % row.heads:
        raise ValueError(f"{row.heads} heads do not divide {row.hidden} features")
    if row.layers < row.stages:
        raise ValueError(f"{row.layers} layers are fewer than {row.stages} stages")


def model_of(row: Row, scheme: str = "1d", dtype: str = "float16") -> PipelineModel:
    """Return the training that a row names."""
    microbatches = row.batch // row.data // row.micro
    kind = find_scheme(scheme)
    stack = Stack(layers=row.layers, hidden=row.hidden, heads=row.heads,
                  batch=row.batch // row.data, seq=row.seq, dtype=dtype, causal=True)
    grid = kind.grid_shape(kind.default_grid(row.tensor))
    return PipelineModel(build("1f1b", row.stages, microbatches), scheme, (grid,) * row.stages,
                         stack, data=row.data, vocab=row.vocab, named="1f1b")


@dataclass(frozen=True)
class Outcome:
    """A row with its prediction."""

    row: Row
    step: TrainingStep

    @property
    def error(self) -> float:
        """Return by which share of the measured seconds the prediction is too long."""
        return self.step.seconds / self.row.seconds - 1


def predict_rows(rows: Iterable[Row], machine: Machine, repeats: bool = True,
                 scheme: str = "1d") -> tuple[list[Outcome], list[str]]:
    """Predict rows; return them, and a line on each that has no prediction."""
    found, problems = [], []
    for row in rows:
        try:
            found.append(Outcome(row, predict_step(model_of(row, scheme), machine, repeats)))
        except ValueError as error:
            problems.append(f"line {row.line}: {error}")
    return found, problems


def choices(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return, for each problem of several rows, the row predicted fastest and the fastest."""
    groups: dict[tuple, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.row.problem, []).append(one)
    return [(min(group, key=lambda one: one.step.seconds),
             min(group, key=lambda one: one.row.seconds))
            for group in groups.values() if len(group) > 1]


def fit_machine(rows: Sequence[Row], machine: Machine, repeats: bool = True,
                scheme: str = "1d") -> Machine:
    """Fit the achieved fractions of a machine to measured steps, by least relative squares.

    The seconds of a step are a sum of terms, each over its fraction, along the path of the
    pipeline; the path changes with the fractions, so the sum is fitted `FIT_ROUNDS` times.

    Raises
    ------
    UsageError
        When there are fewer rows than fractions.
    """
    if len(rows) < len(TERMS):
        raise UsageError(f"{len(rows)} rows to fit {len(TERMS)} fractions to: more are needed")
    for _ in range(FIT_ROUNDS):
        outcomes, _ = predict_rows(rows, machine, repeats, scheme)
        parts = np.array([_parts(one, machine) for one in outcomes])
        measured = np.array([one.row.seconds for one in outcomes])
        rest = np.array([one.step.seconds for one in outcomes]) - parts.sum(axis=1)
        inverse = _least_squares(parts / measured[:, None], 1 - rest / measured)
        now = np.array([getattr(machine.achieved, term) for term in TERMS])
        machine = msgspec.structs.replace(machine, achieved=Achieved(**{
            term: float(np.clip(value, LEAST_ACHIEVED, 1.0))
            for term, value in zip(TERMS, now / inverse)}))
    return machine


def _parts(one: Outcome, machine: Machine) -> list[float]:
    """Return the seconds of a step by term of `TERMS`, where the pipeline's bubble is spread."""
    shares = one.step.shares
    pipeline = one.step.pipeline
    work = sum(shares[name] for name in ("products", "elementwise", "links", "latency"))
    stretch = (work + shares["bubble"]) / work if work else 1.0
    level = "network" if _crosses(one, machine) else "node"
    found = dict.fromkeys(TERMS, 0.0)
    for name, term in (("products", "gemm"), ("elementwise", "memory"), ("latency", "latency"),
                       ("links", level)):
        found[term] += stretch * shares[name]
    found["memory"] += shares["optimizer"]
    hop = "network" if not math.isnan(pipeline.between) else "node"
    found[hop] += shares["hops"]
    found["network" if one.row.gpus > machine.ranks_per_node else "node"] += shares["replicas"]
    return [found[term] for term in TERMS]


def _crosses(one: Outcome, machine: Machine) -> bool:
    """Return whether the ranks of a stage are on several nodes."""
    return one.row.tensor > machine.ranks_per_node


def _least_squares(a: np.ndarray, b: np.ndarray, least: float = 0.3,
                   most: float = 4.0) -> np.ndarray:
    """Return the factors within bounds that minimize the squares of a x - b.

    Factors at a bound are held there, and the others fitted again.
    """
    x, free = np.ones(a.shape[1]), np.ones(a.shape[1], bool)
    free &= np.abs(a).max(axis=0) > 1e-3    # a term that no row has
    for _ in range(a.shape[1]):
        if not free.any():
            break
        x[free] = np.linalg.lstsq(a[:, free], b - a[:, ~free] @ x[~free], rcond=None)[0]
        outside = free & ((x < least) | (x > most))
        if not outside.any():
            break
        x = np.clip(x, least, most)
        free &= ~outside
    return x
