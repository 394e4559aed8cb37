"""Choose the preset of ``reproduce`` where none is named: the best that this machine can run."""

import argparse
import os
from pathlib import Path
from typing import Callable

from bench.cases.paper import load_tables
from bench.cluster.run import mpi_refusal
from bench.cluster.spec import Cluster
from bench.errors import StoreError
from bench.records import journal

BEST, OTHER = "emulated", "laptop"
PROBED = 2    # nodes of the cluster that is tried, with one rank each
# Options that say what ranks do, or where: with one of them the preset is `OTHER`.
TELLING = ("work", "machine", "work_scale", "cluster")


def choose_preset(arguments: argparse.Namespace,
                  refusal: Callable[[Cluster], str] = mpi_refusal) -> tuple[str, str]:
    """Choose `BEST` where MPI works in an emulated cluster of this machine, else `OTHER`; say why.

    A reproduction begun in the folder of results with one of them goes on with it.  `refusal`
    returns why MPI does not work in a cluster; "" if it does.  StoreError when the journal cannot
    be read.
    """
    told = [f"--{name.replace('_', '-')}" for name in TELLING if getattr(arguments, name)]
    library = arguments.backend or os.environ.get("MM3D_BACKEND") or "numpy"
    if library != "numpy":
        told.append(f"--backend {library}")
    if told:
        return OTHER, f"because of {' and '.join(told)}"
    if cluster := Cluster.from_environment():
        return OTHER, f"as this is inside an {cluster.describe()}"
    if not arguments.fresh and (begun := begun_preset(Path(arguments.out))) in (BEST, OTHER):
        return begun, f"with which {arguments.out} was begun (--fresh chooses anew)"
    wanted = Cluster.parse(load_tables().presets[BEST].cluster)
    if arguments.ranks and max(arguments.ranks) > wanted.size:
        return OTHER, f"as {max(arguments.ranks)} ranks do not fit into an {wanted.describe()}"
    if why := refusal(Cluster(PROBED, 1, wanted.link)):
        return OTHER, f"as this machine cannot emulate a cluster: {why}"
    return BEST, "as MPI works in clusters that this machine emulates"


def begun_preset(folder: Path) -> str:
    """Return the preset of the reproduction that was begun and not ended in a folder; "" if none.

    Raises StoreError when its journal cannot be read.
    """
    path = folder / journal.JOURNAL
    try:
        begun = journal.unfinished_reproduction(journal.read_journal(path))
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}): name another folder with "
                         f"--out") from error
    return str(begun.settings.get("preset", "")) if begun else ""
