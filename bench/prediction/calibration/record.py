"""The record of all samples that a machine model is fitted to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np

from bench.errors import StoreError
from bench.instruments import sampling
from bench.prediction.work import Work
from bench.records.measurements import Check, Measurements, Setting, Variable
from bench.records.run_file import read_run

KIND = "calibration"
WAYS = ("rows", "columns")    # whose parts lie in one piece, or in many
Shape = tuple[int, int, int]    # m, n and k of a product
CollectivePoint = tuple[str, int, int, bool, int]    # kind, size, stride, pieces, bytes


@dataclass(frozen=True)
class OperationSeconds:
    """Seconds of operations repeated alone."""

    products: dict[str, dict[Shape, float]]    # by dtype
    passes: dict[tuple[str, int], float]    # by operation, and bytes read and written
    collectives: dict[CollectivePoint, float]


def label_product(dtype: str, shape: Shape) -> str:
    """Return the name of a product, such as ``product float32 1024x64x1024``."""
    return f"product {dtype} {'x'.join(map(str, shape))}"


def label_pass(name: str, size: int) -> str:
    """Return the name of an elementwise pass, such as ``pass multiply 768 bytes``."""
    return f"pass {name} {size} bytes"


def label_collective(kind: str, size: int, stride: int, pieces: bool, length: int) -> str:
    """Return the name of a collective, such as ``collective broadcast rows 4 ranks 2 apart 512
    bytes``."""
    return f"collective {kind} {WAYS[pieces]} {size} ranks {stride} apart {length} bytes"


def make_record(operations: Mapping[str, Sequence[float]], works: Sequence[Work],
                steps: np.ndarray, checks: list[Check], configuration: Mapping[str, Setting],
                environment: Mapping[str, Setting]) -> Measurements:
    """Make the record of a calibration.

    Parameters
    ----------
    operations : dict of str to sequence of float
        Seconds of operations repeated alone by their names, which the functions above make.
    works : sequence of Work
        Transformers.
    steps : (repetitions, n) ndarray
        Seconds of whole steps of each.
    checks : list of Check
        The verification of the steps; operations alone are verified exactly before they are timed.
    configuration, environment : dict of str to str, int, float or bool
        The settings of the run, and the machine and software that it ran on.
    """
    rows = [*map(list, operations.values()), *steps.T.tolist()]
    samples = sampling.pad_samples(rows, (len(rows),))
    return Measurements(
        KIND, dict(configuration), dict(environment),
        {"operation": list(operations), "work": [work.label for work in works],
         "repetition": range(samples.shape[1])},
        {"operation_seconds": Variable(samples[:len(operations)], "s",
                                       ("operation", "repetition")),
         "step_seconds": Variable(samples[len(operations):], "s", ("work", "repetition"))},
        checks)


def read_calibration(path: str | Path) -> Measurements:
    """Read the record of a calibration.

    Raises
    ------
    StoreError
        When the file cannot be read, or is no such record.
    """
    record = read_run(path)
    if record.kind != KIND:
        kind = "a row of the tables" if record.kind == "model" else record.kind
        raise StoreError(f"{path} is of {kind}: the samples that calibrate wrote would do")
    return record


def least_seconds(record: Measurements) -> OperationSeconds:
    """Return the least seconds of each operation repeated alone.

    A disturbance by other programs for a while then affects no figure.
    """
    found = OperationSeconds({}, {}, {})
    samples = record.variables["operation_seconds"].values
    for label, least in zip(record.scales["operation"], np.nanmin(samples, axis=1).tolist()):
        kind, name, *words = label.split()
        if kind == "product":
            m, n, k = map(int, words[0].split("x"))
            found.products.setdefault(name, {})[m, n, k] = least
        elif kind == "pass":
            found.passes[name, int(words[0])] = least
        else:
            way, size, _, stride, _, length, _ = words
            found.collectives[name, int(size), int(stride), bool(WAYS.index(way)),
                              int(length)] = least
    return found


def step_samples(record: Measurements) -> tuple[list[Work], np.ndarray]:
    """Return the Transformers, and the seconds of whole steps of each, (repetitions, n)."""
    samples = record.variables["step_seconds"].values
    taken = ~np.isnan(samples).all(axis=0)    # not where operations alone have more samples
    return list(map(Work.parse, record.scales["work"])), samples[:, taken].T
