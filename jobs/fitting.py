"""Decide which rows fit the memory of a site's ranks, and with which recomputation."""

from dataclasses import dataclass, replace

from bench.cases.case import Case, row_stack
from bench.cases.combined import AnyCase, TrainingCase
from bench.cases.variants import DTYPES_16_BIT, PLAIN_DTYPE, Variant
from bench.prediction import memory_fit
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import peak_bytes
from jobs.site_tables import Site
from mm3d.schemes import find_scheme


@dataclass(frozen=True)
class RowFit:
    """The recomputation of a row, and whether it fits the memory of a rank.

    `peak` are the bytes of a rank at its peak, by a dry run; None if the rank's memory is unknown:
    the row `fits` then.  `chosen` is whether no other policy was tried than `recompute`.
    """

    recompute: str
    peak: int | None = None
    fits: bool = True
    chosen: bool = False

    def refusal(self, limit: int) -> str:
        """Explain why the row is not run on ranks of `limit` bytes."""
        return (f"needs at least {memory_fit.format_gib(self.peak)} a rank by a dry run, of "
                f"{memory_fit.format_gib(limit)}, with "
                + (f"recompute {self.recompute}" if self.chosen else
                   "any policy of recomputation that is tried"))


def rank_memory(site: Site, ranks: int) -> int | None:
    """Return the bytes of each of `ranks` ranks; None if the site file does not state them."""
    if site.node.gpu_memory:
        sharing = -(-min(ranks, site.node.ranks) // max(1, site.node.gpu_count))
        return memory_fit.parse_size(site.node.gpu_memory) // sharing
    if site.node.memory:
        return memory_fit.parse_size(site.node.memory) // min(ranks, site.node.ranks)
    return None


def fit_row(site: Site, case: AnyCase, recompute: str | None = None) -> RowFit:
    """Decide whether a row fits the site, with `recompute` or the least recomputation that fits.

    A training has the recomputation of its own.
    """
    most, trains = rank_memory(site, case.ranks), isinstance(case, TrainingCase)
    if trains:
        recompute = case.config.division.recompute
    if most is None:
        return RowFit(recompute or "none")
    if trains:    # with its optimizer
        model = PipelineModel.of(case.measured, case.ranks)
        found = max(peak_bytes(model, stage, optimizer=True)[0]
                    for stage in {0, case.config.division.stages - 1})
        return RowFit(recompute, found, found <= most, chosen=True)
    how, scheme = case.variant, case.row.scheme
    grid = find_scheme(scheme).default_grid(case.row.gpus)
    stack = replace(row_stack(how, case.sizes, recompute or "none"), dtype=numpy_dtype(how))
    if recompute:
        found = memory_fit.predict_peak(scheme, grid, stack, how)
        return RowFit(recompute, found, found <= most, chosen=True)
    name, found = memory_fit.choose_policy(scheme, grid, stack, most, how)
    return RowFit(name or "none", found, name is not None)


def numpy_dtype(how: Variant) -> str:
    """Return the NumPy dtype for a dry run: float16 stands in for bfloat16."""
    return "float16" if how.dtype in DTYPES_16_BIT else how.dtype


def dry_options(case: Case, recompute: str, most: int) -> list[str]:
    """Return the options of ``bench dry`` that compare the row with `most` bytes of a rank."""
    how = case.variant
    return [f"--scheme={case.row.scheme}", f"--ranks={case.row.gpus}",
            *(f"--{name}={size}" for name, size in case.sizes.items()),
            f"--dtype={numpy_dtype(how)}", f"--recompute={recompute}",
            *replace(how, dtype=PLAIN_DTYPE, work="compute").arguments(),
            f"--memory={most} B"]
