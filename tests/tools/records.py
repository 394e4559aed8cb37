"""Made-up runs for the tests of files, tables and figures, and their tables as text."""
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterable

import numpy as np

from bench.cases.case import Case, make_case
from bench.cases.combined import list_cases
from bench.cases.paper import Row, load_tables
from bench.experiments.rows.dilation import dilation_groups
from bench.experiments.rows.row import published_row
from bench.instruments import spans
from bench.prediction.pipelines.waited_step import PARTS as STEP_PARTS
from bench.records import model_run, run_file
from bench.records.model_run import Run, make_group, make_record, traffic_group
from bench.records.measurements import Check, Group, Measurements, Variable
from bench.records.folder import read_folder
from bench.reports.figures import every_figure, roofline_and_memory
from bench.reports.formats import render
from bench.reports.micro_tables import make_parts
from bench.reports.paper_tables import make_document
from bench.validation.files import check_file
from mm3d import SCHEMES
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import PHASES

PARTS = spans.part_names("xyz")


def draw_only(monkeypatch, *names: str, drawn_by: str = "") -> None:
    """Let reports of rows have no other figures than these, or draw them by another function."""
    found = {name: every_figure.FIGURES[name] for name in names}    # the others keep their order
    monkeypatch.setattr(every_figure, "FIGURES", {
        name: (drawn_by or function, about) for name, (function, about) in found.items()})


def drawn(panel) -> dict[str, list[list[float]]]:
    """The points of a panel's lines by their labels."""
    return {line.get_label(): line.get_xydata().tolist() for line in panel.lines
            if not line.get_label().startswith("_")}


def format_record(record: Measurements) -> str:
    """The tables and notes of a record as text."""
    return render(make_parts([record]))


def read_valid(path: Path) -> Measurements:
    """The record in a file that keeps all rules."""
    assert check_file(path)[0] == []
    return run_file.read_run(path)


def written(record: Measurements, folder: Path, name: str = "written") -> Measurements:
    """A record after it was written to a file and read from there."""
    return read_valid(run_file.write_run(record, folder, name))


def only_record(folder: Path) -> Measurements:
    """The one record in a folder."""
    path, = folder.glob("*.h5")
    return read_valid(path)


def format_tables(folder: Path, form: str = "text") -> str:
    """What ``report`` prints of a folder."""
    return render(make_document(read_folder(folder)), form)


def wait_for_work(run: Run, machine: str, scale: float, shrink: float) -> None:
    """Make of a made-up run one whose ranks wait a third of the time for their work."""
    ranks = len(run.samples["forward"].T)
    seconds = Variable(np.full((2, ranks), run.samples["forward"].max()), "s", ("phase", "rank"))
    run.configuration.update(work="wait", waited_machine=machine, waited_scale=scale,
                             waited_shrink=shrink)
    none = Variable(np.zeros((2, ranks)), "s", ("phase", "rank"))
    run.groups["waits"] = Group({"phase": PHASES, "rank": range(ranks)}, dict.fromkeys(
        ("modelled", "counted", "slept"), seconds) | {"overlapped": none})


def emulated_run(row: Row, seconds: float, slowed: float = 1.0, software: float = 0.1) -> Run:
    """A run of `row` that waited for its work, whose steps take `seconds`, 1 predicted."""
    preset = load_tables().presets["emulated"]
    run = made_up(row, seconds / 3, 2 * seconds / 3, preset="emulated", oversubscribed=True)
    wait_for_work(run, "longhorn", 1600.0, preset.of_table(row.table).shrink)
    grid = SCHEMES[row.scheme].default_grid(row.gpus)
    run.configuration.update({"grid": " x ".join(map(str, grid)), "dilation": slowed,
                              "software_share": 0.25})
    run.environment["emulated_cluster"] = preset.cluster
    run.groups.update(dilation_groups(np.full((2, 3), software / 2), ({
        "forward": (0.1, 0.2), "backward": (0.3, 0.4)},)))
    return run


def made_up(row: Row, forward: float = 0.25, backward: float = 0.5, preset: str = "laptop",
            oversubscribed: bool = False, created: str = "2030-01-02T03:04:05+00:00",
            repetitions: int = 3) -> Run:
    """A run of `row` whose slowest rank takes `forward` and `backward` seconds, in the median."""
    one = make_case(row, preset)
    ranks = row.gpus
    spread = np.linspace(0.9, 1.1, repetitions)[:, None] * np.linspace(0.5, 1.0, ranks)
    moved = np.zeros((2, ranks, len(model_run.AXES), len(COLLECTIVES)), np.int64)
    moved[:, :, 0, 0] = np.arange(ranks)
    run = make_record(
        "model", configuration(one), environment(ranks, oversubscribed), {"s": {
            "forward": forward * spread, "backward": backward * spread,
            **{f"{phase}_late": np.zeros((repetitions, ranks)) for phase in PHASES}}},
        [Check("output", 2e-7, 1e-5), Check("dx", 3e-7, 5e-5)])
    run.groups.update({
        "traffic": traffic_of(moved), "published": published_row(row),
        "clock": make_group("model.clock", {"s": {"resolution": 1e-9, "offset_error": 0.0}})})
    return replace(run, created=created)


def traffic_of(words: np.ndarray, directions: tuple[str, ...] = model_run.AXES) -> Group:
    """The group of traffic in float32 with as many calls and messages as words."""
    return traffic_group(
        {name: words * (4 if name == "bytes" else 1) for name in model_run.TRAFFIC_COUNTS},
        words.sum(axis=1), directions)


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
            "verified_measured_model": True, "ended_by": "repetitions"}


def environment(ranks: int, oversubscribed: bool) -> dict:
    """Some machine."""
    cores = ranks // 2 if oversubscribed else 2 * ranks
    return {"ranks": ranks,
            "cpu_model": "Some CPU", "cores": cores, "ranks_per_core": ranks / cores,
            "oversubscribed": oversubscribed, "mpi": "Some MPI 1.0", "blas": "someblas 1.0",
            "blas_architecture": "Some", "blas_threads": 1, "backend": "numpy",
            "numpy_version": "2.0", "python": "3.11", "git_commit": "0123456789abcdef",
            "git_clean": True}


def write_rows(folder: Path, rows: Iterable[Row], make: Callable[[Row], Run]) -> None:
    """Write a run of each of these rows, made by `make`, into a folder."""
    for row in rows:
        run_file.write_run(make(row), folder, make_case(row, "laptop").name)


def write_all(folder, **options):
    """Write a made-up run of each row, number n of an average of n + 1 thousandths of a second."""
    for number, row in enumerate(load_tables().rows):
        average = (number + 1) / 1000 * make_case(row, "laptop").sizes.batch
        run_file.write_run(made_up(row, average / 3, average * 2 / 3, **options), folder,
                           make_case(row, "laptop").name)


def traced(row):
    """A made-up run of `row` that says where its time went: rank k takes 1 + k/8 of the parts."""
    run = made_up(row)
    seconds = np.zeros((3, 2, row.gpus, len(PARTS)))
    seconds += np.linspace(1, 2, row.gpus, endpoint=False)[:, None] / 100
    run.groups["parts"] = Group(
        {"repetition": range(3), "phase": PHASES, "rank": range(row.gpus), "part": PARTS},
        {"seconds": Variable(seconds, "s", ("repetition", "phase", "rank", "part"))})
    return run


def limited(row, peak=100e9, memory=10e9):
    """A made-up run of `row` with everything that the machine and memory say."""
    run = traced(row)
    of_gemm = np.zeros((2, row.gpus, len(PARTS)))
    of_gemm[..., 0] = 1
    for name, amount, units in (("flops", 6e8, "1"), ("bytes", 2e7, "byte")):
        run.groups["parts"].variables[name] = Variable(amount * of_gemm, units,
                                                       ("phase", "rank", "part"))
    run.groups["machine"] = Group({}, {
        f"{name}_{who}": Variable(np.float64(rate * better), f"{unit}s-1", ())
        for name, rate, unit in (("gemm", peak, ""), ("memory", memory, "byte "))
        for who, better in (("together", 1), ("alone", 2))} | {
        name: Variable(np.float64(size), "byte", ()) for name, size in (
            ("memory_arrays", 2 ** 28), ("last_level_caches", 2 ** 25))})
    names = (*roofline_and_memory.KEPT, *roofline_and_memory.PEAK)
    run.groups["memory"] = Group({"rank": range(row.gpus)}, {
        name: Variable(2.0 ** 20 * np.linspace(0, 1 + k, row.gpus), "byte", ("rank",))
        for k, name in enumerate(names)} | {
        f"expected_{name}": Variable(np.float64(2 ** 20), "byte", ()) for name in names})
    return run


def invented(*fields) -> Measurements:
    """A made-up microbenchmark, from which nothing is derived but what it says."""
    record = Measurements(*fields)
    vars(record)["derived"] = {}
    return record


def matmul_record(slower: float = 1.0) -> Measurements:
    """A made-up run of ``matmul``: 2 ms forward, 4 backward, 20 % around; the others take 1 ms."""
    settings = {"form": "abt", "scheme": "3d", "dtype": "float32", "M": 64, "N": 32, "K": 16,
                "seed": 0, "grid": "2 x 2 x 1", "grid_axes": "x y z", "transport": "mpi",
                "ended_by": "width", "calls": 7, "one_process_threads": 1,
                "one_process_cores": 1}
    times = np.zeros((2, 6, 3, 4, 2))
    times[..., 1] = 0.001
    speeds = np.array([0.8, 0.9, 1.0, 1.0, 1.1, 1.2])
    times[:, :, 0, :, 1] = slower * np.array([0.002, 0.004])[:, None, None] / speeds[:, None]
    variables = {"times": Variable(times, "s", ("phase", "repetition", "kind", "rank", "edge")),
                 "words": Variable(np.array([[200, 400, 600, 800]] * 2), "1", ("phase", "rank"))}
    return Measurements("matmul", settings, {"cores": 2, "cpu_model": "Some CPU"}, {
        "phase": ["forward", "backward"], "repetition": range(6), "rank": range(4),
        "kind": ["product", "local products", "one process"], "edge": ["begin", "end"]},
        variables, [Check("C", 1.0, 8.0)])


def waited_step(number: int, predicted: float, measured: float, ranks: int = 8) -> Measurements:
    """A training step of ``--table combined`` that was measured, slowed twice."""
    one = list_cases()[number - 1]
    chosen = one.settings | {
        "dilation": 2.0, "software_share": 0.1, "order": 0, "ended_by": "width",
        "waited_machine": "longhorn", "waited_scale": 1.0, "waited_shrink": 1.0}
    every = Variable(np.ones(ranks), "s", ("rank",))
    return Measurements(
        "combined", chosen, {"ranks": ranks, "cores": 2, "emulated_cluster": "2x4:50Mbit"},
        {"repetition": range(3), "alone": range(3), "part": STEP_PARTS, "rank": range(ranks)},
        {"samples": Variable(2 * measured * np.array([1, 1.1, 0.9]), "s", ("repetition",)),
         "software": Variable(np.full(3, 0.1), "s", ("alone",)),
         "predicted": Variable(np.array([predicted, 0, 0, 0]), "s", ("part",)),
         **dict.fromkeys(("modelled", "slept", "overlapped", "words"), every)},
        [Check("loss", 0.0, 1.0)])


def computed_step(number: int, **more) -> Measurements:
    """A training step of ranks that compute, without a prediction unless `predicted_by` one."""
    waited = waited_step(number, 2.0, 2.0)
    one = replace(list_cases()[number - 1], preset="tiny")
    chosen = one.settings | {"order": 0, "ended_by": "width", "predicted_by": "",
                             "unpredicted": "no machine given"} | more
    kept = ("samples", "words", *["predicted"] * bool(chosen["predicted_by"]))
    return replace(waited, configuration=chosen, raw={name: waited.raw[name] for name in kept},
                   environment={"ranks": 8, "cores": 8, "node_of_rank": "0 0 0 0 1 1 1 1",
                                "backend": "numpy", "cpu_model": "a processor",
                                "git_commit": "0123456789abcdef", "git_clean": True})
