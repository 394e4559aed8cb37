"""Read tables of the rates of products, in CSV: dtype, m, n, k, and seconds or operations."""

import csv
import io
import math

from bench.prediction.calibration.fit import ProductSizes
from bench.prediction.logs.reading import LEAST
from mm3d.names import find_name

# Columns that state a product's time: seconds of a unit, or operations a second of one.
SECONDS = {"seconds": 1.0, "ms": 1e-3, "us": 1e-6}
RATES = {"flops": 1.0, "gflops": 1e9, "tflops": 1e12}
DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32",
          "single": "float32", "fp64": "float64", "double": "float64"} | {
              name: name for name in ("float16", "bfloat16", "float32", "float64")}
MOST = 2 ** 40    # of an edge, whose products have floats
NEEDED = ("dtype", "m", "n", "k")


def read_heading(text: str) -> list[str]:
    """Return the names of a table's columns, in small letters; [] if it is none of products."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        names = [name.strip().lower() for row in read_rows(first) for name in row]
    except ValueError:
        return []
    return names if {"m", "n", "k"} <= {*names} else []


def read_rates(name: str, text: str) -> tuple[dict[str, dict[ProductSizes, float]], list[str]]:
    """Read the rows of a table, whose C is m x k, a sum of n terms.

    Returns seconds by dtype and (m, n, k), of a shape given twice the least; and a line for each
    row that is not used, with the name of the file.
    """
    columns = read_heading(text)
    told = [one for one in (*SECONDS, *RATES) if one in columns]
    missing = [one for one in NEEDED if one not in columns]
    if missing or len(told) != 1:
        wanted = f"columns {', '.join(NEEDED)} and one of {', '.join((*SECONDS, *RATES))}"
        return {}, [f"{name}:1: {wanted} would do, not {', '.join(columns)}"]
    found: dict[str, dict[ProductSizes, float]] = {}
    problems = []
    try:
        rows = [*enumerate(read_rows(text), 1)]
    except ValueError as error:
        return {}, [f"{name}: {error}"]
    heads = [number for number, row in rows if any(cell.strip() for cell in row)]
    for number, row in rows[heads[0]:]:
        if not any(cell.strip() for cell in row) or row[0].startswith("#"):
            continue
        try:
            if len(row) != len(columns):
                raise ValueError(f"{len(row)} columns, where the heading has {len(columns)}")
            dtype, shape, seconds = _product(dict(zip(columns, row)), told[0])
        except ValueError as error:
            problems.append(f"{name}:{number}: {error}")
            continue
        known = found.setdefault(dtype, {})
        known[shape] = min(seconds, known.get(shape, math.inf))
    return found, problems


def read_rows(text: str) -> list[list[str]]:
    """Return the rows of a text in CSV, its lines ending as on any system; ValueError if none."""
    try:
        return list(csv.reader(io.StringIO(text, newline=None)))    # cells may have lines
    except csv.Error as error:
        raise ValueError(f"no CSV: {error}") from error


def _product(row: dict[str, str], told: str) -> tuple[str, ProductSizes, float]:
    """Return dtype, shape and seconds of a row; ValueError says what is wrong."""
    dtype = DTYPES[find_name(row["dtype"], DTYPES, "dtype")]
    try:
        shape, value = tuple(int(row[name]) for name in "mnk"), float(row[told])
    except ValueError:
        raise ValueError(f"no numbers in {','.join(row.values())!r}") from None
    if not 1 <= min(shape) <= max(shape) <= MOST or not (
            LEAST < value < 1 / LEAST):
        raise ValueError(f"{' x '.join(map(str, shape))}, {value:g} {told}: no product and time")
    flops = 2.0 * math.prod(shape)
    return dtype, shape, value * SECONDS[told] if told in SECONDS else flops / (
        value * RATES[told])
