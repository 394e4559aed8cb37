"""Figures of merit from known numbers, and what they are held against."""
import math

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench import footprint, merit, yardsticks
from bench.cases import Sizes, select
from bench.formats import render
from bench.run import counted_step
from bench.traced import parts_group
from mm3d import backend, cost, store
from mm3d.record import Group, Variable
from mm3d.spans import PARTS
from models import SOME
from records import made_up

ROW = select("weak", "3d")[0]


def run_with_everything():
    """A run of 8 ranks, 4 s forward and 8 s backward, with all groups."""
    run = made_up(ROW, forward=4.0, backward=8.0)
    seconds, counts = np.zeros((8, 2, 2, len(PARTS))), np.zeros((8, 2, len(PARTS), 3))
    seconds[..., PARTS.index("gemm")], seconds[..., PARTS.index("all_gather x")] = 0.5, 2.0
    seconds[..., PARTS.index("waiting")] = 2.5
    counts[:, :, PARTS.index("gemm")] = 3, 1000, 8000
    run.groups["parts"] = parts_group(seconds, counts)
    run.groups["machine"] = Group({}, {
        name: Variable(np.float64(rate), units, ()) for name, rate, units in (
            ("gemm_together", 5e9, "s-1"), ("gemm_alone", 2e10, "s-1"),
            ("memory_together", 1e9, "byte s-1"), ("memory_alone", 8e9, "byte s-1"))})
    run.groups["memory"] = Group({"rank": range(8)}, {
        "saved": Variable(np.arange(1, 9) * 2.0 ** 20, "byte", ("rank",)),
        "expected_saved": Variable(np.float64(7 * 2 ** 20), "byte", ())})
    return run


def test_utilization_of_a_known_rate():
    """8 ranks that do 6e12 useful operations in 3 s, of 1e12 a second that each could."""
    assert merit.utilization(6e12, 3.0, 8, 1e12) == 0.25


def test_figures_of_known_times(tmp_path):
    run = store.read(store.write(run_with_everything(), tmp_path, "a"))
    found = {figure.name: figure for figure in merit.figures(run)}
    chosen = run.configuration
    batch, tokens = chosen["batch"], chosen["batch"] * chosen["seq"]
    layers, hidden = chosen["layers"], chosen["hidden"]
    flops = 3 * layers * (24 * tokens * hidden ** 2 + 4 * tokens * chosen["seq"] * hidden)
    assert merit.useful_flops(run) == flops
    assert found["average step time"].value == pytest.approx(12 / batch)
    assert found["tokens a second"].value == pytest.approx(tokens / 12)
    assert found["useful rate a rank"].value == pytest.approx(flops / 12 / 8 / 1e9)
    shares = [f.value for f in merit.figures(run) if f.name.endswith("(MFU)")]
    assert shares == pytest.approx([100 * flops / 12 / 8 / 5e9, 100 * flops / 12 / 8 / 2e10])
    # Rank r of the made-up run moves r words of 4 bytes along x in each phase.
    words, moved = found["words a rank along x"], found["bytes a rank along x"]
    assert words.value == words.expected == 7 and moved.value == moved.expected == 28
    assert found["  bandwidth in collectives along x"].value == pytest.approx(
        2 * 112 / (8 * 2 * 2.0) / 1e9)
    assert "words a rank along y" not in found
    assert merit.roofline(run) == {name: (8.0, 16000.0) for name in (
        *store.PHASES, "step")}
    assert found["memory: saved activations"][1:] == (8.0, "MiB", 7.0)


def test_figures_that_were_not_measured_are_missing_not_zero():
    run = made_up(ROW)
    found = {figure.name: figure.value for figure in merit.figures(run)}
    assert math.isnan(found["peak of products, all ranks at once"])
    assert merit.roofline(run) is None and not any("memory:" in name for name in found)
    assert "was not traced" in render(merit.one(run))


def test_parts_and_figures_are_printed(tmp_path):
    store.write(run_with_everything(), tmp_path, "a")
    printed = render(merit.document(tmp_path))
    lines = [line.split() for line in printed.splitlines()]
    assert ["forward", "0.5", "2", "0", "0", "0", "2.5", "0", "5", "4", "1.25"] in lines
    assert ["backward,", "%", "10.0", "40.0", "0.0", "0.0", "0.0", "50.0", "0.0"] in lines
    assert ["memory:", "saved", "activations", "8", "7", "MiB"] in lines
    with pytest.raises(store.StoreError, match="no results in"):
        merit.document(tmp_path / "nothing.h5")


@pytest.mark.ranks(1, 4)
def test_peaks_of_the_machine(comm):
    group = yardsticks.peaks(backend.get("numpy"), "float32", comm)
    if comm.rank:
        assert group is None
        return
    rates = {name: float(v.values) for name, v in group.variables.items()}
    assert set(rates) == {"gemm_alone", "gemm_together", "memory_alone", "memory_together"}
    assert all(1e6 < rate < 1e15 for rate in rates.values())
    assert group.variables["gemm_alone"].units == "s-1"


def step_memory(case, keys, comm):
    """The group of one step, and the grid's shape; nothing else stays."""
    with case.on(comm, "numpy") as scheme:
        resident = footprint.Resident()
        model = mm3d.Transformer(scheme, **keys)
        x, dy = model.random("input"), model.random("output gradient")
        scheme.grid.backend.empty((10 ** 6,), "float64")    # an earlier peak does not count
        memory = yardsticks.StepMemory(model, resident)
        counted_step(model, x, dy, memory.between)
        return memory.group(keys, comm), scheme.grid.shape


@pytest.mark.ranks(1, 4, 8)
def test_memory_of_every_rank_and_its_closed_forms(comm):
    """Sums over ranks are the closed forms', and the peak is a dry run's to the byte."""
    sizes = Sizes(layers=2, hidden=24, heads=4, batch=8, seq=8)
    keys = {name: getattr(sizes, name) for name in ("layers", "hidden", "heads", "batch", "seq")}
    for case in (one for one in SOME[comm.size] if not one.options):
        group, shape = step_memory(case, keys, comm)
        if comm.rank:
            assert group is None
            continue
        found = {name: v.values for name, v in group.variables.items()}
        saved = 4 * cost.saved_words(case.name, shape, **keys)
        assert found["saved"].sum() == saved == comm.size * found["expected_saved"]
        if case.name in ("2d", "3d"):
            whole = 4 * cost.parameters(2, 24)
            assert found["parameters"].sum() == found["gradients"].sum() == whole
            assert found["expected_parameters"] == whole / comm.size
        assert found["pool_peak"][0] == found["expected_pool_peak"], str(case)
        assert (found["transient"] > 0).all() and np.isnan(found["device_peak"]).all()
        lasting = sum(found[name] for name in ("parameters", "gradients", "saved"))
        assert (found["pool_peak"] > lasting + found["transient"]).all()


def test_growth_of_the_process_is_seen():
    resident = footprint.Resident()
    resident.mark()
    block = np.ones(2 ** 23)    # 64 MiB
    del block
    if footprint.STATUS.exists():
        assert 60 * 2 ** 20 < resident.growth() < 2 ** 30


def test_a_trimmed_pool_keeps_only_what_is_lent():
    library = backend.Backend()
    kept, freed = library.empty((5000,), np.float64), library.empty((5000,), np.float64)
    del freed
    before = library.memory()
    library.trim()
    assert before["reserved"] == 2 * before["in_use"] and kept.shape == (5000,)
    assert library.memory()["reserved"] == library.memory()["in_use"] == before["in_use"]


def test_all_ranks_of_a_node_share_the_memory_that_is_measured():
    assert yardsticks.peaks(backend.get("numpy"), "float64", MPI.COMM_SELF) is not None
