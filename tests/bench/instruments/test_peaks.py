"""The peak rates of the machine, and the memory of a step."""
import functools
import gc
import math
from types import SimpleNamespace

import numpy as np
import pytest

import mm3d
from bench.experiments.rows.row import run_counted_step
from bench.instruments import peak_memory, peaks
from mm3d import ModelSizes, launcher
from mm3d.arrays import backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.model import cost
from models import SOME


@pytest.mark.ranks(1, 4)
def test_peaks_of_the_machine(comm):
    group = peaks.measure_peaks(backend.get("numpy"), "float32", comm, quick=True)
    if comm.rank:
        assert group is None
        return
    rates = {name: float(v.values) for name, v in group.variables.items()}
    assert set(rates) == {"gemm_alone", "gemm_together", "memory_alone", "memory_together",
                          "memory_arrays", "last_level_caches", "ranks_at_work"}
    assert all(1e6 < rates[f"{what}_{who}"] < 1e15 for what in ("gemm", "memory")
               for who in ("alone", "together"))
    assert rates["ranks_at_work"] == min(comm.size, launcher.cores())
    assert group.variables["gemm_alone"].units == "s-1"


@pytest.mark.ranks(1, 4, slow=(8,))
def test_memory_is_measured_beyond_the_caches_with_any_number_of_ranks(comm):
    """The arrays that are in use at one time are as large with 8 ranks as with one, and a node's
    rates are those of its cores, which the ranks share."""
    class Small(NumpyBackend):
        """Arrays of one element in place of large ones."""

        xp = SimpleNamespace(float32=np.float32, ones=lambda shape, dtype: asked.append(shape[0]))

    def rated(step, amount, synchronize, team):
        teams.append(team.size)
        return 1e9

    asked: list[int] = []
    teams: list[int] = []
    find = functools.partial(peaks.measure_peaks, Small(), "float32", comm, rate=rated,
                             count_caches=lambda: 2.0 ** 26)
    group = find()
    everyone = comm.gather((asked, teams))
    if comm.rank:
        return
    busy = min(comm.size, launcher.cores())
    assert everyone[0] == (3 * [2 ** 25] + 3 * [6 * 2 ** 26 // busy // 12],
                           [1, 1, busy, busy])
    assert sum(bool(sizes) for sizes, _ in everyone) == busy
    found = {name: float(v.values) for name, v in group.variables.items()}
    assert found["memory_arrays"] == 6 * 2 ** 26 and found["memory_alone"] == 1e9
    assert found["memory_together"] == found["gemm_together"] == 1e9 * busy / comm.size
    if comm.size == 1:
        asked.clear()
        assert find(quick=True).variables["last_level_caches"].values == 2.0 ** 26
        assert asked == [peaks.LEAST // 12] * 6


def test_caches_of_a_node_are_added_up_once(tmp_path):
    """Two chips with 32 MiB each for two cores, and what is not described."""
    for cpu in range(4):
        for index, (level, size, shared) in enumerate([
                (2, "512K", str(cpu)), (3, "32768K", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert peaks.cache_bytes(tmp_path) == 2 * 2 ** 25
    (tmp_path / "cpu0" / "cache" / "index1" / "size").unlink()
    assert peaks.cache_bytes(tmp_path) == 2 * 2 ** 25
    assert math.isnan(peaks.cache_bytes(tmp_path / "nothing"))
    assert peaks.summed_bytes(math.nan) == peaks.summed_bytes(2.0 ** 20) == 3 * 2 ** 26


def step_memory(case, sizes, comm):
    """The group of one step, the grid's shape, and the bytes that earlier tests still hold."""
    with case.on(comm, "numpy") as scheme:
        gc.collect()
        held = scheme.grid.backend.memory()["in_use"]
        resident = peak_memory.Resident()
        model = mm3d.Transformer(scheme, **sizes)
        x, dy = model.random("input"), model.random("output gradient")
        scheme.grid.backend.empty((10 ** 6,), "float64")    # an earlier peak does not count
        memory = peaks.StepMemory(model, resident)
        run_counted_step(model, x, dy, memory.note_saved)
        return memory.group(comm), scheme.grid.shape, held


@pytest.mark.ranks(1, 4, slow=(8,))
def test_memory_of_every_rank_and_its_closed_forms(comm):
    """Sums over ranks are the closed forms', and the peak is a dry run's to the byte."""
    sizes = ModelSizes(layers=2, hidden=24, heads=4, batch=8, seq=8)
    for case in (one for one in SOME[comm.size] if not one.options):
        group, shape, held = step_memory(case, sizes, comm)
        if comm.rank:
            assert group is None
            continue
        found = {name: v.values for name, v in group.variables.items()}
        assert found["saved"][0] == found["expected_saved"]
        if case.name in ("2d", "3d"):
            whole = 4 * cost.parameters(ModelSizes(**sizes))
            assert found["parameters"].sum() == found["gradients"].sum() == whole
            assert found["expected_parameters"] == whole / comm.size
        assert found["pool_peak"][0] - held == found["expected_pool_peak"], str(case)
        assert (found["transient"] > 0).all() and np.isnan(found["device_peak"]).all()
        lasting = sum(found[name] for name in ("parameters", "gradients", "saved"))
        assert (found["pool_peak"] > lasting + found["transient"]).all()


def test_growth_of_the_process_is_seen():
    resident = peak_memory.Resident()
    resident.mark()
    block = np.ones(2 ** 23)    # 64 MiB
    del block
    if peak_memory.STATUS.exists():
        assert 60 * 2 ** 20 < resident.growth() < 2 ** 30


def test_a_trimmed_pool_keeps_only_what_is_lent():
    library = NumpyBackend()
    kept, freed = library.empty((5000,), np.float64), library.empty((5000,), np.float64)
    del freed
    before = library.memory()
    library.release_idle_memory()
    assert before["reserved"] == 2 * before["in_use"] and kept.shape == (5000,)
    assert library.memory()["reserved"] == library.memory()["in_use"] == before["in_use"]
