"""Which rows fit the memory of a site's ranks, and what they compute again to do so."""

from dataclasses import dataclass

import msgspec

import mm3d
from bench import fit
from bench.cases import Case, load
from jobs.site import Site
from mm3d.recompute import POLICIES


@dataclass(frozen=True)
class Fitting:
    """How a row fits.

    Attributes
    ----------
    recompute : str
        The policy that the row is run with.
    peak : int or None
        Bytes of a rank that it needs, at most; None where the site's memory is not known.
    fits : bool
        Whether a rank has so many; True where it is not known.
    """

    recompute: str
    peak: int | None = None
    fits: bool = True

    def refusal(self, limit: int) -> str:
        """Why the row is not run, on ranks of `limit` bytes."""
        return (f"needs at least {fit.gib(self.peak)} a rank by a dry run, of {fit.gib(limit)}, "
                "with any policy of recomputation that is tried")


def limit(site: Site, ranks: int) -> int | None:
    """Bytes of each of `ranks` ranks; None where the site file does not say."""
    if site.node.gpu_memory:
        sharing = -(-min(ranks, site.node.ranks) // max(1, site.node.gpus))
        return fit.size(site.node.gpu_memory) // sharing
    if site.node.memory:
        return fit.size(site.node.memory) // min(ranks, site.node.ranks)
    return None


def fitting(site: Site, case: Case, recompute: str | None = None) -> Fitting:
    """How `case` fits the site with the policy `recompute`, or the one that repeats least.

    Closed forms, which are at once, are no less than a dry run: what fits by them fits.  Before
    a row is refused a dry run is made; the job itself makes one in any case.
    """
    most, dtype = limit(site, case.row.gpus), load().settings.dtype
    if most is None:
        return Fitting(recompute or "none")
    grid = mm3d.SCHEMES[case.row.scheme].default_grid(case.row.gpus)
    sizes = msgspec.structs.asdict(case.sizes)
    for name in [recompute] if recompute else POLICIES:
        found = fit.estimate(case.row.scheme, grid, dtype, name, sizes)
        if found <= most:
            return Fitting(name, int(found))
    if recompute:
        found = fit.peak(case.row.scheme, grid, dtype, recompute, sizes)
        return Fitting(recompute, found, found <= most)
    name, found = fit.policy(case.row.scheme, grid, dtype, sizes, most)
    return Fitting(name or "none", found, name is not None)


def check(case: Case, recompute: str, most: int) -> list[str]:
    """The options of ``bench dry`` that hold the row against `most` bytes of a rank."""
    return [f"--scheme={case.row.scheme}", f"--ranks={case.row.gpus}",
            *(f"--{name}={size}" for name, size in msgspec.structs.asdict(case.sizes).items()),
            f"--dtype={load().settings.dtype}", f"--recompute={recompute}", f"--memory={most} B"]
