"""One bad file leaves itself out with its reason, however it is spoiled; the others are shown."""
import os
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.errors import StoreError, UsageError
from bench.records import kinds, merged, run_file
from bench.records.folder import read_runs
from bench.records.measurements import Check
from bench.reports.comparison import compare_sides
from bench.validation.files import check_file
from mutations import edit, mutations, places, sets, spoils
from records import format_tables, limited, matmul_record

RESULTS = Path(__file__).parents[3] / "results"
ROW = select_rows("weak", "3d")[0]
SPOILED = 14    # of all mutations of a file, evenly


@pytest.fixture(scope="module", params=["matmul", "model"])
def whole(request, tmp_path_factory):
    """A file that nothing is wrong with, and one of all kinds that are shown."""
    run = limited(ROW) if request.param == "model" else matmul_record()
    return run_file.write_run(run, tmp_path_factory.mktemp("whole"), make_case(ROW, "tiny").name)


@pytest.mark.slow_but_first
def test_a_spoiled_file_leaves_itself_alone_out(whole, tmp_path):
    with h5py.File(whole) as file:
        found = [(name, key, how) for name, key in places(file)
                 for how in mutations(file, name, key)]
    good, bad, target = tmp_path / "good.h5", tmp_path / "spoiled.h5", tmp_path / "all" / "all.h5"
    target.parent.mkdir()
    shutil.copy(whole, good)
    sets("/", created="2020-01-01T00:00:00+00:00")(good)
    for name, key, how in found[::max(1, len(found) // SPOILED)]:
        shutil.copy(whole, bad)
        spoils(name, how, key)(bad)
        runs, problems = read_runs(tmp_path)
        assert len(runs) + len(problems) == 2, (name, key, how)
        assert all("spoiled.h5" in line for line in problems)
        format_tables(tmp_path)
        check_file(bad)
        assert merged.merge_files([bad, good], target, anew=True) == (len(runs), problems)
        try:
            compare_sides([str(good)], [str(bad)], None)
        except (StoreError, UsageError):    # of one bad file alone nothing is left
            pass


def flip(path) -> None:
    """Flip a bit of a chunk of samples."""
    with h5py.File(path) as file:
        place = file["samples/forward"].id.get_chunk_info(0).byte_offset
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("change, reason", [
    *((change, "is truncated, damaged, or no HDF5 file") for change in (
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0), flip)),
    (os.unlink, "does not exist"),
    (spoils("/", key="format"), "is an HDF5 file, but not an mm3d run"),
    (sets("/", schema_version=run_file.SCHEMA + 1),
     "has schema version 4; this mm3d reads version 3: update mm3d"),
    (sets("/", schema_version=np.inf), "schema_version is inf"),
    (sets("/", schema_version=[3, 3]), "schema_version"),
    (spoils("traffic/words", "one number"), "traffic/words has the dim"),
    (spoils("traffic/words", key="DIMENSION_LIST"), "words has a dimension without a scale"),
    (spoils("samples/backward"), "is damaged or not a complete run: .*backward"),
    (spoils("clock/offset_error"), "offset_error"),
    (spoils("samples/forward", "all negative"), "numbers below 0"),
    (spoils("samples/forward", "all nan"), "has no number for some"),
    (sets("configuration", hidden=np.arange(3)), "hidden is no text"),
    (sets("environment", cores=0), "cores is 0, which should be"),
    (sets("configuration", keep="nonsense"), "keep is 'nonsense'"),
    (sets("configuration", overlap=np.nan), "overlap is nan"),
    (sets("configuration", recompute="uniform:0"), "recompute is"),
    (spoils("machine/gemm_together", "all zero"),
     "machine/gemm_together has numbers that are not greater than 0"),
    (spoils("machine/gemm_alone", "all inf"), "has infinite numbers"),
    (spoils("parts/seconds", "all zero"), "parts take no time"),
    (sets("configuration", layers=2 ** 40), "layers is")])
def test_what_is_checked_once_is_named(tmp_path, change, reason):
    path = run_file.write_run(limited(ROW), tmp_path, "a")
    change(path)
    with pytest.raises(StoreError, match=reason) as caught:
        run_file.read_run(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    errors, _ = check_file(path)
    assert any(re.search(reason, line) for line in errors), errors


def test_an_array_larger_than_any_memory_is_not_read(tmp_path):
    path = run_file.write_run(limited(ROW), tmp_path, "a")
    with h5py.File(path, "r+") as file:
        del file["samples/forward"]
        file["samples"].create_dataset("forward", (2 ** 40, 8), "f8", chunks=(1, 8))
    with pytest.raises(StoreError, match="more than any run"):
        run_file.read_run(path)


@pytest.mark.parametrize("name, place", [
    ("layer-*", "measurements/memory"), ("layer-*", "measurements/hidden"),
    ("pipeline-*", "measurements/memory"), ("*-p008-laptop-*", "parts/seconds"),
    ("*-p008-emulated-*", "memory/resident_growth")])
def test_a_difference_of_two_measurements_may_be_below_0(tmp_path, name, place):
    """A rest that rounding took below 0, memory that was freed meanwhile, a share of time."""
    path = shutil.copy(min(RESULTS.rglob(f"{name}.h5")), tmp_path)
    with h5py.File(path, "r+") as file:
        values = np.asarray(file[place][...])
        np.atleast_1d(values)[..., -1:] = -1e-18
        file[place][...] = values
    assert run_file.read_run(path).created
    assert not any("below 0" in line for line in check_file(path)[0])


def test_what_may_be_below_0_is_measured():
    """A name in a list that no variable has would allow nothing."""
    found = {name: known for module in map(kinds.module_of, kinds.KIND_NAMES)
             for name, known in module.SCHEMAS.items() if "signed" in known}
    assert len(found) > 3
    for name, known in found.items():
        names = {*known.get("variables", {}), *known.get("optional", {})}
        assert {*known["signed"].split()} <= names, name


def test_a_tolerance_of_zero_is_kept_or_not():
    assert [Check("", error, 0.0).share for error in (0.0, 1.0)] == [0.0, np.inf]
    assert Check("", 1.0, 4.0).share == 0.25


def test_an_error_of_the_program_is_no_verdict_on_a_file(tmp_path, monkeypatch):
    """Whatever shows a run may fail; the file is not said to be bad."""
    def fail(*_):
        raise ZeroDivisionError("of the program")
    run_file.write_run(limited(ROW), tmp_path, "a")
    monkeypatch.setattr("bench.reports.merit.merit_table", fail)
    with pytest.raises(ZeroDivisionError, match="of the program"):
        format_tables(tmp_path)


def labels(scale, label):
    """A change that gives every place of a scale one label."""
    return edit(lambda file: file[scale].__setitem__(..., [label] * len(file[scale])))


@pytest.mark.parametrize("kind, change, reason", [
    ("strong", sets("environment", emulated_cluster="2x"), "cluster '2x'"),
    ("strong", sets("configuration", placement="nonsense"), "placement is 'nonsense'"),
    ("collectives", sets("environment", emulated_cluster="2x"), "cluster '2x'"),
    ("collectives", sets("configuration", transports="mpi " * 9), "transports names 9"),
    ("pipeline", sets("configuration", schedule_text="nonsense"), "schedule_text"),
    ("pipeline", sets("configuration", schedule_text="W0 B0 F0"), "schedule_text"),
    ("pipeline", sets("configuration", schedule_text="F0 BW0"), "not those of the"),
    ("pipeline-wait", sets("configuration", reference="other"), "belongs to reference"),
    ("products", sets("configuration", grids="2x2"), "grids names 1"),
    ("products", edit(lambda file: file["configuration"].attrs.update(grids=" ".join(
        ["2x2x2x2"] * len(file["measurements/scheme"])))), "4 sizes"),
    ("products", labels("measurements/scheme", b"4d"), "scheme '4d' is none of"),
    ("links", labels("measurements/plan", b"3d"), "'3d' is no plan"),
    ("links", labels("measurements/plan", b"3d 2x2x2 xyx 4"), "no order of the directions"),
    ("links", labels("measurements/plan", b"3d 2x2 xyz 4"), "3 grid directions"),
    ("links", labels("measurements/plan", b"3d 2x2x2 xyz 0"), "and batch"),
    ("links", labels("measurements/link", 0), "is no rate"),
    ("train-meshes", sets("configuration", equal_to="a"), "equal_to names 1"),
    ("train-meshes", labels("verification/quantity", b"a"), "no gradients or loss or weights"),
    ("train-serial", spoils("configuration", key="experts_top"), "belongs to entropy"),
    ("train-serial", spoils("measurements/expected_peak_bytes", "all zero"), "not greater than 0"),
    ("step", spoils("measurements/part_seconds", "all zero"), "parts take no time"),
    ("matmul", spoils("measurements/times", "all zero"), "not greater than 0"),
    ("matmul", spoils("verification"), "verification is empty")])
def test_what_reports_take_apart_is_read_once(tmp_path, kind, change, reason):
    """Texts are parsed, and what belongs together is checked, when a record is read."""
    folders = {"strong": "paper-emulated", "train-serial": "experts/balance"}
    found = sorted(RESULTS.glob(f"{folders.get(kind, '*')}/**/{kind}-*.h5"))
    path = shutil.copy(found[-1], tmp_path)
    run_file.read_run(path)
    change(path)
    with pytest.raises(StoreError, match=reason):
        run_file.read_run(path)
