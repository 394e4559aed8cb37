"""Fit links and products to what logs say, and make a machine of them."""

from dataclasses import dataclass, field
from typing import Any, Sequence

import msgspec
import numpy as np

from bench.errors import UsageError
from bench.least_squares import solve_nonnegative
from bench.prediction.calibration.fit import ProductFit, ProductSizes, fit_products
from bench.prediction.logs.rates import read_heading, read_rates
from bench.prediction.logs.reading import MESSAGE, STREAM, LogFile, LogReader, Series
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import message_steps, ring_bytes
from bench.text_files import read_text
from mm3d.tracing.events import Collective

PAIRS = (MESSAGE, STREAM)
LINKS = ("node", "network")
HALF = 0.5    # of the largest rate, below which a stream is bound by its number of messages


@dataclass(frozen=True)
class Logs:
    """Hold all that was read: times of links, and seconds of products by dtype and shape.

    `tables` are names of those of products, `per_node` is the most ranks of a host, 0 if no log
    lists them, and `problems` are what was not used, a line each.
    """

    series: list[Series]
    products: dict[str, dict[ProductSizes, float]]
    tables: list[str]
    per_node: int
    problems: list[str]


@dataclass(frozen=True)
class LinkFit:
    """Fitted seconds of a message, and bytes a second, of a link; None for what no log says.

    It was `fitted` to collectives of the most ranks, or to what passes between two; `errors` are
    relative, of all series of the link, by their place in `Logs.series`.
    """

    link: str
    latency: float | None
    rate: float | None
    fitted: list[Series]
    errors: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def fitted_errors(self) -> np.ndarray:
        """Return the errors at the points that were fitted."""
        return np.concatenate([_errors(self.latency or 0.0, self.rate, one)
                               for one in self.fitted])


def read_logs(files: Sequence[LogFile]) -> Logs:
    """Read all files.

    Raises UsageError when one cannot be read, or no line of them can be used; the message has
    their problems.
    """
    series: list[Series] = []
    products: dict[str, dict[ProductSizes, float]] = {}
    tables, problems, most = [], [], 0
    for one in files:
        text = read_text(one.path, f"--from {one.path}", "a text file")
        if read_heading(text):
            rates, said = read_rates(one.name, text)
            for dtype, times in rates.items():
                products.setdefault(dtype, {}).update(times)
            tables += [one.name] * bool(rates)
        else:
            reader = LogReader(one)
            reader.read(text)
            series += reader.series
            most = max([most, *reader.hosts.values()])
            said = reader.problems or [
                f"{one.name}: no table of nccl-tests, OSU or IMB, and no CSV with columns dtype, "
                f"m, n, k"] * (not reader.series)
        problems += said
    if not series and not products:
        raise UsageError("\n".join(["--from: no line of these files can be used", *(
            f"  {line}" for line in problems)]))
    return Logs(series, products, tables, most, problems)


def fit_logged_links(series: Sequence[Series]) -> list[LinkFit]:
    """Fit each link that was measured, by relative least squares.

    A collective takes as many messages as in predictions, and moves as many bytes through a rank
    (`bench.prediction.seconds`).  A stream has no latency: its messages overlap.
    """
    found = []
    for link in LINKS:
        own = [one for one in series if one.link == link]
        if not own:
            continue
        most = max((one.ranks for one in own if one.kind not in PAIRS), default=0)
        fitted = [one for one in own if one.kind not in PAIRS and one.ranks == most] or own
        points = np.concatenate([_terms(one) for one in fitted])
        terms = points[:, :2] / points[:, 2:]
        latency, inverse = solve_nonnegative(terms, np.ones(len(terms))).tolist()
        rate = 1 / inverse if inverse else None
        known = any(one.kind != STREAM for one in fitted)
        found.append(LinkFit(link, latency if known else None, rate, fitted, {
            place: _errors(latency, rate, one) for place, one in enumerate(series)
            if one.link == link}))
    return found


def _terms(one: Series) -> np.ndarray:
    """Return messages, bytes through a rank, and seconds of each point that counts."""
    best = max(size / seconds for size, seconds in one.points)
    rows = []
    for size, seconds in one.points:
        if one.kind == STREAM and size / seconds < HALF * best:
            continue
        event = Collective(one.kind, "", one.ranks, 1, size)
        rows.append([0 if one.kind == STREAM else message_steps(event), ring_bytes(event),
                     seconds])
    return np.array(rows, float)


def _errors(latency: float, rate: float | None, one: Series) -> np.ndarray:
    messages, moved, seconds = _terms(one).T
    return (messages * latency + (moved / rate if rate else 0)) / seconds - 1


def fit_rates(products: dict[str, dict[ProductSizes, float]]) -> dict[str, ProductFit]:
    """Fit the rate of each dtype, those with the most shapes first."""
    return {dtype: fit_products(times) for dtype, times in sorted(
        products.items(), key=lambda item: -len(item[1]))}


def make_tree(name: str, logs: Logs, links: Sequence[LinkFit], rates: dict[str, ProductFit],
              base: Machine | None) -> dict[str, Any]:
    """Make the fields of a machine file, as far as logs say them; `missing_fields` names others.

    The figures of `base` stand for what logs do not say.
    """
    tree = msgspec.to_builtins(base, str_keys=True) if base else {}
    sources = {key: f"of {base.name}: {text}" for key, text in tree.get("sources", {}).items()}
    others = f"; others of {base.name}" if base else ""
    programs = [*dict.fromkeys(one.program for one in logs.series),
                *["a table of products"] * bool(rates)]
    tree |= {"name": name, "about": f"fitted to {', '.join(programs)}{others}"}
    if logs.per_node:
        tree["ranks_per_node"], sources["ranks_per_node"] = logs.per_node, "most ranks of a host"
    achieved = dict(tree.get("achieved", {}))
    for one in links:
        known = {"seconds_per_message": one.latency, "bytes_per_second": one.rate}
        tree[one.link] = tree.get(one.link, {}) | {
            key: value for key, value in known.items() if value is not None}
        achieved[one.link], sources[one.link] = 1.0, _link_source(one)
    if rates:
        first, text = next(iter(rates)), f"{', '.join(logs.tables)}: {', '.join(rates)}"
        own = {"gemm_half_size": list(rates[first].half), "gemm_seconds": rates[first].start,
               "gemm_deviations": rates[first].deviations}
        sources |= dict.fromkeys(own, f"{text}; {first}") | {"gemm_rate": text + others}
        tree |= own | {"gemm_rate": tree.get("gemm_rate", {}) | {
            dtype: fit.rate for dtype, fit in rates.items()}}
        achieved["gemm"] = 1.0
    sources["achieved"] = f"1: what the logs' programs reach alone{others}"
    return tree | {"achieved": achieved, "sources": sources}


def _link_source(one: LinkFit) -> str:
    """Say what the figures of a link were fitted to, and how well."""
    off = np.abs(one.fitted_errors)
    what = "; ".join(f"{series.file}: {series.program} {series.kind} of {series.ranks} ranks"
                     for series in one.fitted)
    return (f"{what}; {len(off)} sizes, the fit is {np.median(off):.0%} off in the median, "
            f"{off.max():.0%} at most")


def missing_fields(tree: dict[str, Any]) -> list[str]:
    """Name the required fields of a machine file that `tree` lacks, also inside of its tables."""
    found = []
    for one in msgspec.structs.fields(Machine):
        inner = one.type if isinstance(one.type, type) and issubclass(
            one.type, msgspec.Struct) else None
        if one.required and one.name not in tree:
            found.append(one.name)
        elif inner:
            found += [f"{one.name}.{part.name}" for part in msgspec.structs.fields(inner)
                      if part.required and part.name not in tree[one.name]]
    return found
