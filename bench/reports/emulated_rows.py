"""Make the tables of an emulated cluster: published, predicted before the run, and emulated."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Sequence

from msgspec.structs import replace

from bench.cases.case import Case
from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row, load_tables, title
from bench.cases.selection import select_rows
from bench.cases.variants import Variant, recorded_variant
from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.instruments import placement, timing
from bench.instruments.statistics import median_interval
from bench.prediction.machine_model import Machine, load_machine
from bench.prediction.seconds import place_trace
from bench.prediction.similarity import emulating_machine, split_seconds
from bench.records.folder import Results, policy_of
from bench.records.model_run import Run
from bench.reports.document import Cell, Column, Notes, Number, Part, Rows, Table, number_cell
from mm3d import ModelSizes, launcher
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run


@dataclass(frozen=True)
class Emulated:
    """A row on an emulated cluster, before it is measured or afterwards.

    Attributes
    ----------
    row : Row
        The row.
    sizes : ModelSizes
        Its sizes.
    variant : Variant
        Its variant.
    grid : GridShape
        Its grid.
    machine : Machine
        The machine whose work ranks wait for.
    shrink, scale : float
        The factors by which it is shrunk, and its seconds are multiplied.
    cluster : Cluster or None
        The emulated cluster.
    run : Run or None
        The measurement.
    recompute : str
        Its policy of recomputation.
    order : str
        The directions of the grid from the one that varies slowest over the nodes to the fastest.
    """

    row: Row
    sizes: ModelSizes
    variant: Variant
    grid: GridShape
    machine: Machine
    shrink: float
    scale: float
    cluster: Cluster | None
    run: Run | None = None
    recompute: str = "none"
    order: str = ""

    @property
    def to_paper(self) -> float:
        """Seconds of the emulated machine with the paper's layers, over seconds here."""
        layers = load_tables().settings.layers / self.sizes.layers
        return self.shrink ** 2 / self.scale * layers

    def _split(self, machine: Machine, sizes: ModelSizes) -> tuple[float, float]:
        """Predict the seconds of work and of communication of a step."""
        trace = dry_run.extrapolate_step(
            self.row.scheme, self.grid.ranks, self.grid.sizes, dtype=self.variant.dtype,
            options=self.variant.options(self.row.scheme), causal=self.variant.causal,
            recompute=self.recompute, **sizes)
        placed = place_trace(trace, self.grid, self.order or self.grid.directions)
        found = split_seconds(machine, placed).values()
        return sum(work for work, _ in found), sum(moving for _, moving in found)

    @cached_property
    def predicted(self) -> tuple[float, float]:
        """Predicted seconds of work and of communication of a step here."""
        cores = int(self.run.environment["cores"]) if self.run else launcher.cores()
        return self._split(emulating_machine(self.machine, self.shrink, self.scale, self.cluster,
                                             self.grid.ranks / cores), self.sizes)

    @cached_property
    def original(self) -> tuple[float, float]:
        """Predicted seconds of a layer's step on the machine that is emulated, at its sizes."""
        tables = load_tables()
        sizes = replace_sizes(self.sizes, hidden=self.row.hidden, seq=tables.settings.seq,
                              layers=1)
        return self._split(self.machine, sizes)

    @property
    def predicted_average(self) -> float:
        """Predicted seconds a sequence, at the scale of the machine that is emulated."""
        return sum(self.predicted) / self.sizes.batch * self.to_paper

    @property
    def average(self) -> float:
        """Measured seconds a sequence, at that scale; NaN without a measurement."""
        if self.run is None:
            return math.nan
        return timing.average_step_time(self.run.samples, self.sizes.batch) * self.to_paper

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the 95 % interval of `average`, of whole steps; NaN without a measurement."""
        if self.run is None:
            return math.nan, math.nan
        found = median_interval(timing.step_times(self.run.samples, self.sizes.batch))
        return found[1] * self.to_paper, found[2] * self.to_paper


def replace_sizes(sizes: ModelSizes, **changes: int) -> ModelSizes:
    """Return sizes of which some are others."""
    return ModelSizes(**{**sizes, **changes})


def of_case(one: Case, machine: Machine, scale: float, cluster: Cluster | None,
            recompute: str = "none") -> Emulated:
    """Return the row of a case that is not measured yet, on its scheme's own grid."""
    kind = find_scheme(one.row.scheme)
    shrink = load_tables().presets[one.preset].of_table(one.row.table).shrink
    grid = kind.grid_shape(kind.default_grid(one.row.gpus))
    return Emulated(one.row, one.sizes, one.variant, grid, machine, shrink, scale, cluster,
                    recompute=recompute,
                    order=placement.direction_order("auto", kind.name, grid, one.sizes))


def of_run(row: Row, run: Run) -> Emulated:
    """Return the row of a measurement whose ranks waited for their work.

    Raises
    ------
    UsageError
        When its machine is none of the supplied ones.
    """
    chosen, where = run.configuration, run.environment.get("emulated_cluster")
    return Emulated(row, ModelSizes.from_settings(chosen), recorded_variant(chosen), run.grid,
                    load_machine(str(chosen["waited_machine"])), float(chosen["waited_shrink"]),
                    float(chosen["waited_scale"]), Cluster.parse(str(where)) if where else None,
                    run, policy_of(run), str(chosen.get("placement", "")))


def row_parts(results: Results) -> list[Part]:
    """Make the tables of the rows of a preset that were measured on an emulated cluster.

    There are none where ranks computed, or had no links between them.
    """
    try:
        groups = group_rows([of_run(row, run) for row, run in waited_rows(results)])
    except UsageError as error:
        return [Notes("Not predicted:", [str(error)])]
    parts: list[Part] = []
    for found in groups:
        parts += tables_of(found, measured=True)
        parts.append(Notes("About the emulated cluster:", similarity_notes(found)))
    return parts


def group_rows(rows: Iterable[Emulated]) -> list[list[Emulated]]:
    """Group rows that can be compared: of one cluster, one machine and one scale."""
    groups: dict[tuple, list[Emulated]] = {}
    for one in rows:
        groups.setdefault((one.cluster, one.machine.name, one.scale), []).append(one)
    return list(groups.values())


def waited_rows(results: Results) -> list[tuple[Row, Run]]:
    """List the rows that were measured on an emulated cluster, with waited work."""
    rows = [row for name in HEADINGS for row in select_rows(name)]
    likes = [replace(row, like=like) for row in rows for like in (PROPOSED, *BASELINES)]
    pairs = [(row, results.get(row)) for row in [*rows, *likes]]
    return [(row, run) for row, run in pairs if run and recorded_variant(run.configuration).waits
            and "emulated_cluster" in run.environment]


def tables_of(found: Sequence[Emulated], measured: bool) -> list[Part]:
    """Make the tables of rows, and of speed-ups, of both of the paper's tables."""
    parts: list[Part] = []
    for name, heading in HEADINGS.items():
        rows = [one for one in found if one.row.table == name]
        if rows:
            where = f"{heading}: {rows[0].cluster and rows[0].cluster.describe()}"
            parts += [rows_table(where, rows, measured), speed_ups_table(where, rows, measured)]
    if any(one.variant.overlap for one in found):
        parts.append(Notes("About overlap:", [
            "Predictions hide nothing: seconds of work and of communication add up, also where a "
            "scheme sends while its ranks wait for their work."]))
    return parts


def rows_table(heading: str, found: Iterable[Emulated], measured: bool) -> Table:
    """Make the table of seconds a sequence at the scale of the emulated machine."""
    lines: Rows = []
    for one in found:
        like = f", batch of {title(one.row.like)}" * bool(one.row.like)
        published = math.nan if one.row.like else one.row.recomputed
        work, moving = one.predicted
        far_work, far_moving = one.original
        cells: list[Cell] = [f"{title(one.row.scheme)}{like}", one.row.gpus, one.sizes.batch,
                             one.sizes.hidden, number_cell(published, ".3f"),
                             number_cell(one.predicted_average, ".3f")]
        if measured:
            low, high = one.interval
            cells += [number_cell(one.average, ".3f"), number_cell(low, ".3f"),
                      number_cell(high, ".3f"),
                      number_cell(one.predicted_average / one.average - 1, "+.0%")]
        lines.append([*cells, number_cell(far_work / (far_work + far_moving), ".0%"),
                      number_cell(work / (work + moving), ".0%"), number_cell(work + moving)])
    group = "seconds a sequence"
    columns = [Column("scheme"), Column("ranks"), Column("batch"), Column("hidden"),
               Column("published", "", group), Column("predicted", "", group)]
    if measured:
        columns += [Column("emulated", "", group), Column("low", "", group),
                    Column("high", "", group), Column("error of", "prediction")]
    share = "share of work, predicted"
    return Table(f"{heading}: rows", [*columns, Column("machine", "", share),
                                      Column("emulated", "", share),
                                      Column("step here", "(s), pred.")], lines)


def speed_ups_table(heading: str, found: Sequence[Emulated], measured: bool) -> Table:
    """Make the table of speed-ups of 3-D over the other schemes."""
    known = {(one.row.key, one.row.like): one for one in found}
    lines: Rows = []
    for cube in (one for one in found if one.row.scheme == PROPOSED and not one.row.like):
        for other in BASELINES:
            key = cube.row.table, other, cube.row.gpus
            for like, cube_like, words in (("", "", ""), (PROPOSED, "", ", batch of 3-D"),
                                           ("", other, f", batch of {title(other)}")):
                slow, fast = known.get((key, like)), known.get((cube.row.key, cube_like))
                if slow and fast:
                    lines.append(speed_up_cells(f"over {title(other)}{words}", slow, fast,
                                                measured))
    columns = [Column("speed-up of 3-D"), Column("ranks"), Column("published"),
               Column("predicted")]
    if measured:
        columns += [Column("emulated"), Column("low"), Column("high"),
                    Column("error of", "prediction")]
    return Table(f"{heading}: speed-ups", columns, lines)


def speed_up_cells(name: str, slow: Emulated, fast: Emulated, measured: bool) -> list[Cell]:
    """Make the line of a pair of rows."""
    alike = bool(slow.row.like or fast.row.like)
    published = math.nan if alike else slow.row.recomputed / fast.row.recomputed
    predicted = slow.predicted_average / fast.predicted_average
    cells: list[Cell] = [name, slow.row.gpus, _ratio(published), _ratio(predicted)]
    if not measured:
        return cells
    ratio = slow.average / fast.average
    (low, high), (least, most) = slow.interval, fast.interval
    return [*cells, _ratio(ratio), _ratio(low / most), _ratio(high / least),
            number_cell(predicted / ratio - 1, "+.0%")]


def _ratio(value: float) -> Number:
    return number_cell(value, "#.3g")


def similarity_notes(found: Sequence[Emulated]) -> list[str]:
    """State how the emulated cluster keeps the machine's ratios, and what it shows."""
    one, layers = found[0], load_tables().settings.layers
    scales = "; ".join(sorted({
        f"{each.row.table}: hidden and sequence / {each.shrink:g}, so words and passes / "
        f"{each.shrink ** 2:g} and operations / {each.shrink ** 3:g}, and {each.to_paper:.3g} "
        f"seconds of the machine for each here" for each in found}))
    errors = sorted(abs(each.predicted_average / each.average - 1) for each in found
                    if each.run is not None)
    name = one.machine.name
    notes = [
        f"Scale: links are {one.scale:g} times slower than those of {name} are in use, and ranks "
        f"wait {one.scale:g} times the seconds of {name}, whose rate of products is divided as "
        f"lengths are. So computing keeps its ratio to communicating, but for hidden sizes that "
        f"are rounded to whole heads. Of the paper's {layers} layers, which are assumed, "
        f"{one.sizes.layers} is run. {scales}. Seconds a sequence are at the machine's scale.",
        f"The ratio is that of data sheets and usual fractions of them, in the file of machine "
        f"{name}. The paper's times fit a slower network and slower GPUs (bench predict), so "
        f"compare speed-ups, not seconds.",
        "Predicted: by the same machine model with the emulated links, which the ranks of a node "
        "share, from a dry run of ranks as they are placed; and with the processor time of "
        "messages, since ranks share cores: two figures, fitted to one run of commit 1d615d8 on "
        "two cores" + (", this one, so that its errors are of a fit." if any(
            str(each.run.environment.get("git_commit", "")).startswith("1d615d8")
            for each in found if each.run is not None) else "."),
        "It shows: traffic, the placement of ranks on nodes, contention for links, what MPI's "
        "algorithms send beyond the least, and this software. It does not show: GPUs and their "
        "kernels, NVLink (ranks of a node share memory, which is faster beside these links than "
        "NVLink is beside InfiniBand), real switches, or sending while a GPU computes."]
    if errors:
        notes.append("Low and high: the bounds of the 95 % interval of the median of a run's "
                     "steps, less of fewer than six; those of a speed-up are quotients of both "
                     "rows' bounds. All of them are within one run each: what changes from run to "
                     "run is in none.")
        notes.append(f"Errors of predictions: {errors[len(errors) // 2]:.0%} in the median, "
                     f"{errors[-1]:.0%} at most, of {len(errors)} rows.")
    return notes
