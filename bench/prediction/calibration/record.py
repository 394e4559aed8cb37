"""The record of all samples that a machine model is fitted to."""

from pathlib import Path
from typing import Mapping, Sequence

import numpy as np

from bench.errors import StoreError
from bench.instruments import sampling
from bench.prediction.work import Work
from bench.records import model_run
from bench.records.measurements import Check, Measurements, Setting
from bench.records.run_file import read_run

KIND = "calibration"
WAYS = ("rows", "columns")    # whose parts lie in one piece, or in many
# An operation: "product", dtype, m, n and k; "pass", name, and bytes read and written; or
# "collective", kind, size and stride of a line, pieces, and bytes of the whole array.
Point = tuple


def _label_operation(point: Point) -> str:
    """Return the name of an operation, such as ``product float32 1024x64x1024``,
    ``pass multiply 768 bytes`` or ``collective broadcast rows 4 ranks 2 apart 512 bytes``."""
    kind, name, *sizes = point
    if kind == "product":
        return f"product {name} {'x'.join(map(str, sizes))}"
    if kind == "pass":
        return f"pass {name} {sizes[0]} bytes"
    size, stride, pieces, length = sizes
    return f"collective {name} {WAYS[pieces]} {size} ranks {stride} apart {length} bytes"


def _parse_operation(label: str) -> Point:
    """Return the operation that a label names."""
    kind, name, *words = label.split()
    if kind == "product":
        return (kind, name, *map(int, words[0].split("x")))
    if kind == "pass":
        return kind, name, int(words[0])
    way, size, _, stride, _, length, _ = words
    return kind, name, int(size), int(stride), bool(WAYS.index(way)), int(length)


def make_calibration_record(operations: Mapping[Point, Sequence[float]], works: Sequence[Work],
                            steps: np.ndarray, checks: list[Check],
                            configuration: Mapping[str, Setting],
                            environment: Mapping[str, Setting]) -> Measurements:
    """Make the record of a calibration, of seconds of operations alone and of whole steps.

    `steps` are (repetitions, n), of each of n Transformers, whose checks there are; operations
    alone are verified exactly before they are timed.
    """
    rows = [*map(list, operations.values()), *steps.T.tolist()]
    samples = sampling.pad_samples(rows, (len(rows),))
    return model_run.make_record(
        KIND, dict(configuration), dict(environment),
        {"s": {"operation_seconds": samples[:len(operations)],
               "step_seconds": samples[len(operations):]}}, checks,
        operation=list(map(_label_operation, operations)), work=[work.label for work in works])


def read_calibration(path: str | Path) -> Measurements:
    """Read the record of a calibration; StoreError when the file is none, or cannot be read."""
    record = read_run(path)
    if record.kind != KIND:
        kind = "a row of the tables" if record.kind == "model" else record.kind
        raise StoreError(f"{path} is of {kind}: the samples that calibrate wrote would do")
    return record


def least_seconds(record: Measurements) -> dict[Point, float]:
    """Return the least seconds of each operation repeated alone.

    A disturbance by other programs for a while then affects no figure.
    """
    least = np.nanmin(record.variables["operation_seconds"].values, axis=1)
    return dict(zip(map(_parse_operation, record.scales["operation"]), least.tolist()))


def step_samples(record: Measurements) -> tuple[list[Work], np.ndarray]:
    """Return the Transformers, and the seconds of whole steps of each, (repetitions, n)."""
    samples = record.variables["step_seconds"].values
    taken = ~np.isnan(samples).all(axis=0)    # not where operations alone have more samples
    return list(map(Work.parse, record.scales["work"])), samples[:, taken].T
