"""Texts that reports take apart, and what belongs together, are checked when a record is read."""
import shutil
from pathlib import Path

import pytest

from bench.errors import StoreError
from bench.records import run_file
from mutations import edit, sets, spoils

RESULTS = Path(__file__).parents[3] / "results"


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
    folders = {"strong": "paper-emulated", "train-serial": "experts/balance"}
    found = sorted(RESULTS.glob(f"{folders.get(kind, '*')}/**/{kind}-*.h5"))
    path = shutil.copy(found[-1], tmp_path)
    run_file.read_run(path)
    change(path)
    with pytest.raises(StoreError, match=reason):
        run_file.read_run(path)
