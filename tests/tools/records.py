"""Made-up runs for the tests of files, tables and figures."""
import numpy as np

from bench.cases.case import Case, case
from bench.cases.paper import Row, load
from bench.experiments.rows.record import published
from bench.records import run_file
from bench.records.measurements import Check
from bench.records.run_file import Run
from mm3d import SCHEMES
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import PHASES


def made_up(row: Row, forward: float = 0.25, backward: float = 0.5, preset: str = "laptop",
            oversubscribed: bool = False, created: str = "2030-01-02T03:04:05+00:00",
            repetitions: int = 3) -> Run:
    """A run of `row` whose slowest rank takes `forward` and `backward` seconds, in the median."""
    one = case(row, preset)
    ranks = row.gpus
    spread = np.linspace(0.9, 1.1, repetitions)[:, None] * np.linspace(0.5, 1.0, ranks)
    moved = np.zeros((2, ranks, len(run_file.AXES), len(COLLECTIVES)), np.int64)
    moved[:, :, 0, 0] = np.arange(ranks)
    return Run(configuration(one), environment(ranks, oversubscribed),
               {"forward": forward * spread, "backward": backward * spread},
               {name: moved * (4 if name == "bytes" else 1) for name in run_file.COUNTS},
               moved.sum(axis=1), [Check("output", 2e-7, 1e-5), Check("dx", 3e-7, 5e-5)],
               published(row), created,
               {phase: np.zeros((repetitions, ranks)) for phase in PHASES},
               "repetitions", {"resolution": 1e-9, "offset_error": 0.0})


def configuration(one: Case) -> dict:
    """What a run of `one` would record."""
    sizes = one.sizes
    axes = " ".join(SCHEMES[one.row.scheme].directions)
    return {"table": one.row.table, "scheme": one.row.scheme, "preset": one.preset,
            "grid": " x ".join("2" for _ in axes.split()), "grid_axes": axes,
            "mlp_factor": 4, "dtype": "float32", "warmup": 2,
            "repetitions": 3, "width": 0.05, "order": 7,
            "layers": sizes.layers, "hidden": sizes.hidden,
            "heads": sizes.heads, "batch": sizes.batch, "seq": sizes.seq, "overridden": "",
            "verified_measured_model": True}


def environment(ranks: int, oversubscribed: bool) -> dict:
    """Some machine."""
    cores = ranks // 2 if oversubscribed else 2 * ranks
    return {"ranks": ranks,
            "cpu_model": "Some CPU", "cores": cores, "ranks_per_core": ranks / cores,
            "oversubscribed": oversubscribed, "mpi": "Some MPI 1.0", "blas": "someblas 1.0",
            "blas_architecture": "Some", "blas_threads": 1, "backend": "numpy",
            "numpy_version": "2.0", "python": "3.11", "git_commit": "0123456789abcdef",
            "git_clean": True}


def write_all(folder, **options):
    """Write a made-up run of each row, number n of an average of n + 1 thousandths of a second."""
    for number, row in enumerate(load().rows):
        average = (number + 1) / 1000 * case(row, "laptop").sizes.batch
        run_file.write(made_up(row, average / 3, average * 2 / 3, **options), folder,
                       case(row, "laptop").name)
