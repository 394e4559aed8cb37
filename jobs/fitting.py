"""Decide which rows fit the memory of a site's ranks, and with which recomputation."""

from dataclasses import dataclass

import mm3d
from bench.cases.case import Case
from bench.cases.variants import SIXTEEN, Variant
from bench.prediction import memory_fit
from jobs.site import Site


@dataclass(frozen=True)
class Fitting:
    """Whether a row fits, and with which recomputation.

    Attributes
    ----------
    recompute : str
        The policy that the row is run with.
    peak : int or None
        Bytes of a rank that it needs: by a dry run or, far below the site's memory, by closed
        forms; None where that memory is not known.
    fits : bool
        Whether a rank has so many; True where it is not known.
    """

    recompute: str
    peak: int | None = None
    fits: bool = True

    def refusal(self, limit: int) -> str:
        """Say why the row is not run, on ranks of `limit` bytes."""
        return (f"needs at least {memory_fit.format_gib(self.peak)} a rank by a dry run, of "
                f"{memory_fit.format_gib(limit)}, with any policy of recomputation that is tried")


def limit(site: Site, ranks: int) -> int | None:
    """Return the bytes of each of `ranks` ranks; None where the site file does not say."""
    if site.node.gpu_memory:
        sharing = -(-min(ranks, site.node.ranks) // max(1, site.node.gpus))
        return memory_fit.parse_size(site.node.gpu_memory) // sharing
    if site.node.memory:
        return memory_fit.parse_size(site.node.memory) // min(ranks, site.node.ranks)
    return None


def fitting(site: Site, case: Case, recompute: str | None = None) -> Fitting:
    """Decide whether `case` fits the site with `recompute`, or with the policy that repeats least.

    Closed forms, which are at once but may be less than what is needed, decide only where they
    leave `memory_fit.SAFETY_FACTOR` times their bytes; nearer to the limit a dry run does.  The job itself
    makes one in any case.
    """
    most, how, scheme = limit(site, case.row.gpus), case.variant, case.row.scheme
    if most is None:
        return Fitting(recompute or "none")
    grid, dtype = mm3d.SCHEMES[scheme].default_grid(case.row.gpus), numpy_dtype(how)
    sizes = case.sizes
    names = [recompute] if recompute else memory_fit.list_policies(how.keep)
    closed = memory_fit.estimate_peak(scheme, grid, dtype, names[0], sizes, how.keep)
    # In 16 bits some intermediate arrays are float32's.
    if closed * (2 if dtype == "float16" else 1) < most / memory_fit.SAFETY_FACTOR:
        return Fitting(names[0], int(closed))
    if recompute:
        found = memory_fit.predict_peak(scheme, grid, dtype, recompute, sizes, how)
        return Fitting(recompute, found, found <= most)
    name, found = memory_fit.choose_policy(scheme, grid, dtype, sizes, most, how)
    return Fitting(name or "none", found, name is not None)


def numpy_dtype(how: Variant) -> str:
    """The dtype of a dry run, which NumPy has: float16 for bfloat16, of as many bytes."""
    return "float16" if how.dtype in SIXTEEN else how.dtype


def check(case: Case, recompute: str, most: int) -> list[str]:
    """Return the options of ``bench dry`` that hold the row against `most` bytes of a rank."""
    how = case.variant
    return [f"--scheme={case.row.scheme}", f"--ranks={case.row.gpus}",
            *(f"--{name}={size}" for name, size in case.sizes.items()),
            f"--dtype={numpy_dtype(how)}", f"--recompute={recompute}",
            *[f"--keep={how.keep}"] * (how.keep != "none"), *["--overlap"] * how.overlap,
            *["--causal"] * how.causal,
            f"--memory={most} B"]
