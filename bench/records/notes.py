"""Write notes that tables of several kinds of records share."""

from typing import Iterable, Mapping

import numpy as np

from bench.cluster.spec import Cluster
from bench.records.measurements import Check, Measurements, Setting
from bench.records.schema import UNKNOWN

MODELLED = "real messages, modelled arithmetic"    # of ranks that wait, with links between them
RESIDUAL = "residual of "    # begins the names of checks by `bench.checks.layer_residuals`
CROWDED = "RANKS OUTNUMBER CORES: they take turns, and times say nothing about speed."
# What each transport moves, by its name, where that differs from the words that
# `mm3d.grid.axis.Traffic` counts.
ON_DEVICES = (
    "terms are exchanged and summed on the device: a rank receives the words counted, but of an "
    "all-reduce of few words all terms, and of a reduce a share of all terms")
MOVES = {
    "mpi": (
        "MPI moves by algorithms of its own: gathers and broadcasts bring a rank the words "
        "counted, and may relay more; what sums move is not known"),
    "shared": (
        "ranks read each other's blocks where they lie: gathers of blocks that were placed move "
        "nothing, the products read them; sums read the other ranks' terms, and what was not "
        "placed is copied"),
    "hierarchical": (
        "ranks of a node share one copy of what comes from other nodes, and add their terms "
        "before they leave the node; words are those that a rank receives for its node, copies "
        "into shared memory or out of it, and reads to sum them; small arrays go by MPI, and "
        "what it moves to sum them is not known"),
    "chain": (
        "a broadcast or reduction is passed from rank to rank, all else goes by MPI: gathers "
        "and broadcasts bring a rank the words counted; what other sums move is not known"),
    "ordered": (
        "terms are exchanged and summed in the order of the ranks: a rank receives the words "
        "counted, but of a reduce all terms"),
    "silent": "nothing travels between ranks that do not exist",
    "nccl": (
        "NCCL moves by algorithms of its own: gathers and broadcasts bring a rank the words "
        "counted, and may relay more; what sums move is not known, but those of 16 bits"),
    "device": ON_DEVICES, "staged": ON_DEVICES}


def describe_cluster(environment: Mapping[str, Setting]) -> str:
    """Return "emulated cluster, " with the nodes, ranks and link rate of a run; "" for none."""
    text = environment.get("emulated_cluster")
    return Cluster.parse(str(text)).describe() if text else ""


def describe_source(commit: Setting, clean: Setting) -> str:
    """Return the beginning of a commit, and whether the source had changes; or `UNKNOWN`."""
    return f"{str(commit)[:12]}{' with changes' * (not clean and commit != UNKNOWN)}"


def describe_libraries(environment: Mapping[str, Setting], kernels: str = "{}") -> str:
    """Describe the BLAS, its `kernels`, and the compiler of elementwise work if there is one."""
    env = environment
    return ", ".join([f"{env['blas']} {kernels.format(env['blas_architecture'])}",
                      *filter(None, [env.get("elementwise_version")])])


def describe_machine(record: Measurements) -> str:
    """Describe the machine of a record: GPU, processor, cores, BLAS and MPI."""
    env = record.environment
    known = [f"{env[name]}{unit}" for name, unit in (
        ("gpu", ""), ("flash_attention", ""), ("cpu_model", ""), ("cores", " cores"), ("blas", ""),
        ("blas_architecture", " kernels"), ("elementwise_version", ""), ("mpi", ""))
        if name in env]
    return "; ".join(filter(None, [", ".join(known), describe_cluster(env)]))


def split_checks(checks: list[Check]) -> tuple[list[Check], list[Check]]:
    """Return the comparisons with the serial scheme, and the residuals of layers."""
    residuals = [check for check in checks if check.quantity.startswith(RESIDUAL)]
    return [check for check in checks if check not in residuals], residuals


def largest_error(checks: Iterable[Check]) -> str:
    """Say how near the verification came to failing."""
    worst = max((one.share for one in checks), default=0.0)
    return f"errors at most {100 * worst:.2g} % of the tolerance"


def counted(count: int, what: str) -> str:
    """Return a number of things for a reader, such as "1 thread" and "2 threads"."""
    return f"{count} {what}{'s' * (count != 1)}"


def words_note(names: Iterable[str]) -> str:
    """Explain how words are counted, and which words these transports move."""
    known = sorted({name for several in names for name in several.split() if name in MOVES})
    about = "; ".join(f"{name}: {MOVES[name]}" for name in known)
    return ("Words, and bytes of them, are counted from shapes by the bucket algorithm, the same "
            "for every transport" + (f". What it moves, {about}." if about else "."))


def first_grid(chosen: Mapping[str, Setting]) -> str:
    """Return the grid of a first stage, and whether its ranks send while they multiply."""
    return str(chosen["stage_grids"]).partition(";")[0] + ", overlap" * bool(chosen.get("overlap"))


def equal_rate_notes(record: Measurements, sides: Mapping[str, tuple[float, float]],
                     busy: float = 1.0, library: str = "PyTorch") -> list[str]:
    """Compare both sides at equal product rates, in a note; none for files without the rates.

    `sides` has seconds of a step of each side of the library, and the ratio of its to mm3d's, as
    the table has it, NaN where not measured; `busy` is the share of the time in which the
    library's processes compute.
    """
    found = {name: variable.values for name, variable in record.raw.items()}
    if "product_samples" not in found:
        return []
    own, other = found["product_flops"] / np.median(found["product_samples"], axis=1)
    work = float(found["torch_flops"]) / int(found["torch_cores"]) / busy
    remaining = []
    for name, (seconds, ratio) in sides.items():
        if np.isfinite(seconds):
            share = min(1.0, work / other / seconds)
            remaining.append(f"{ratio * (1 - share + share * other / own):.2f} instead of "
                             f"{ratio:.2f} ({name})")
    return [f"Kernels: one thread multiplies at {own / 1e9:.1f} GFLOP/s with mm3d's library and "
            f"at {other / 1e9:.1f} GFLOP/s with {library}'s: local products of a step, in turns. "
            f"At equal rates {library} / mm3d would be {', '.join(remaining)}, with {library}'s "
            f"{found['torch_flops'] / 1e9:.3g} GFLOP of products a step on all "
            f"{int(found['torch_cores'])} cores."]
