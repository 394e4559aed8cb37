"""Texts that reports take apart, and what belongs together, are checked when a record is read."""
import shutil
from pathlib import Path

import h5py
import pytest

from bench.errors import StoreError
from bench.records import run_file
from mutations import mutate

RESULTS = Path(__file__).parents[3] / "results"


def set_text(group, name, text):
    return lambda file: file[group].attrs.update({name: text})


def set_labels(scale, label):
    """A change that gives every place of a scale one label."""
    def change(file):
        file[scale][...] = [label] * len(file[scale])
    return change


def without(group, name):
    return lambda file: mutate(file, group, name, "missing")


@pytest.mark.parametrize("kind, change, reason", [
    ("strong", set_text("environment", "emulated_cluster", "2x"), "cluster '2x'"),
    ("strong", set_text("configuration", "placement", "nonsense"), "placement is 'nonsense'"),
    ("collectives", set_text("environment", "emulated_cluster", "2x"), "cluster '2x'"),
    ("collectives", set_text("configuration", "transports", "mpi " * 9), "transports names 9"),
    ("pipeline", set_text("configuration", "schedule_text", "nonsense"), "schedule_text"),
    ("pipeline", set_text("configuration", "schedule_text", "W0 B0 F0"), "schedule_text"),
    ("pipeline", set_text("configuration", "schedule_text", "F0 BW0"), "not those of the"),
    ("pipeline-wait", set_text("configuration", "reference", "other"), "belongs to reference"),
    ("products", set_text("configuration", "grids", "2x2"), "grids names 1"),
    ("products", lambda file: file["configuration"].attrs.update(grids=" ".join(
        ["2x2x2x2"] * len(file["measurements/scheme"]))), "4 sizes"),
    ("products", set_labels("measurements/scheme", b"4d"), "scheme '4d' is none of"),
    ("links", set_labels("measurements/plan", b"3d"), "'3d' is no plan"),
    ("links", set_labels("measurements/plan", b"3d 2x2x2 xyx 4"), "no order of the directions"),
    ("links", set_labels("measurements/plan", b"3d 2x2 xyz 4"), "3 grid directions"),
    ("links", set_labels("measurements/plan", b"3d 2x2x2 xyz 0"), "and batch"),
    ("links", set_labels("measurements/link", 0), "is no rate"),
    ("train-meshes", set_text("configuration", "equal_to", "a"), "equal_to names 1"),
    ("train-meshes", set_labels("verification/quantity", b"a"), "no gradients or loss or weights"),
    ("train-serial", without("configuration", "experts_top"), "belongs to entropy"),
    ("train-serial", lambda file: mutate(file, "measurements/expected_peak_bytes", "",
                                         "all zero"), "not greater than 0"),
    ("step", lambda file: mutate(file, "measurements/part_seconds", "", "all zero"),
     "parts take no time")])
def test_what_reports_take_apart_is_read_once(tmp_path, kind, change, reason):
    folders = {"strong": "paper-emulated", "train-serial": "experts/balance"}
    found = sorted(RESULTS.glob(f"{folders.get(kind, '*')}/**/{kind}-*.h5"))
    path = shutil.copy(found[-1], tmp_path)
    run_file.read_run(path)
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(StoreError, match=reason):
        run_file.read_run(path)
