"""Machine files are written whole, and checked once, as they are read: the file and the key are
named."""
import math
import re
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.__main__ import main
from bench.errors import StoreError, UsageError
from bench.prediction import machine_model
from bench.prediction.machine_file import check_writable, publish_machine
from bench.prediction.machine_model import Curve, Line, load_machine
from machine_files import format_machine

SUPPLIED = (Path(machine_model.__file__).parent / "machines/dgx-h100.toml").read_text()
CURVES = """
[passes.other]
bytes = {bytes}
seconds = {seconds}
"""


def written(folder: Path, change: str) -> str:
    """A file of the supplied machine whose first line of this name, up to "=", is `change`."""
    start = change.partition("=")[0]
    text, count = re.subn(rf"(?m)^{re.escape(start)}=.*$", lambda _: change, SUPPLIED, count=1)
    assert count == 1
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("change, said", [
    *((f"memory_bytes = {value}", f"memory_bytes = {shown}: a number from ") for value, shown in (
        ("nan", "nan"), ("inf", "inf"), ("-1", "-1"), ("-1e9", "-1000000000.0"), ('"5"', "'5'"),
        ("true", "True"), ("1e300", "1e+300"))),
    *((f"{name} = -1", f"{name} = -1: a number from ") for name in (
        "memory_bandwidth", "ranks_per_node", "launch_seconds")),
    ("ranks_per_node = 0", "ranks_per_node = 0: a number from 1 to "),
    ("ranks_per_node = 2.5", "ranks_per_node: a whole number would do, not a number"),
    ("memory_bandwidth = 0", "memory_bandwidth = 0: "),
    ("memory_bytes = 1e-320", "memory_bytes = 1e-320: "),
    (f"memory_bytes = 1{'0' * 5000}", "limit"),
    ("float32 = -1e9", "gemm_rate.float32 = -1000000000.0: "),
    ("float32 = 0", "gemm_rate.float32 = 0: "),
    ("gemm_half_size = [256, nan, 256]", "gemm_half_size[1] = nan: "),
    ("gemm_half_size = [256, 256]", "gemm_half_size"),
    ("bytes_per_second = 0", "node.bytes_per_second = 0: "),
    ("seconds_per_message = -1", "node.seconds_per_message = -1: "),
    ("gemm = 0", "achieved.gemm = 0: "),
    *((f"{name} = 1.01", f"{key} = 1.01: a number from 1e-30 to 1 would do") for name, key in (
        ("gemm", "achieved.gemm"), ("memory", "achieved.memory"))),
    ("float32 = 1e12\nint8 = 1e12", "gemm_rate.int8 = 1000000000000.0: rates of float32, "),
    ("gemm = 1979-05-27", "achieved.gemm = datetime.date(1979, 5, 27): "),
    ("name = 5", "name: a text would do, not a whole number"),
    ("about = 5", "about: a text would do, not a whole number")])
def test_numbers_that_predict_nothing(tmp_path, capsys, change, said):
    path = written(tmp_path, change)
    assert main(["plan", "--ranks", "8", "--hidden", "512", "--machine", path]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"error: machine file {path}: ") and said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("sizes, seconds", [("[]", "[]"), ("[8, 16]", "[1.0]"),
                                            ("[16, 8]", "[1.0, 1.0]"), ("[8, 8]", "[1.0, 1.0]")])
def test_curves_have_as_many_seconds_as_sizes_that_ascend(tmp_path, sizes, seconds):
    path = tmp_path / "mine.toml"
    path.write_text(SUPPLIED + CURVES.format(bytes="[8, 16]", seconds="[1.0, 2.0]"))
    assert load_machine(str(path)).passes["other"].at(8) == 1
    path.write_text(SUPPLIED + CURVES.format(bytes=sizes, seconds=seconds))
    with pytest.raises(UsageError, match=r"passes\.other: as many seconds as bytes"):
        load_machine(str(path))


@pytest.mark.parametrize("more, said", [
    ("[gemm_deviations]\n256 = 1.0", r"gemm_deviations: '256' is no shape"),
    ("[gemm_deviations]\n64x0x64 = 1.0", "gemm_deviations: '64x0x64' is no shape"),
    ("[gemm_deviations]\n1x2x3 = -1.0", r"gemm_deviations\.1x2x3 = -1\.0"),
    ("[passes.add]\nbytes = [8]\nseconds = [1.0]", "passes: a curve named other, "),
    ("[passes.about]\nbytes = [nan]\nseconds = [1.0]", r"passes\.about\.bytes\[0\] = nan"),
    ("[[collectives]]\nkind = 'gather'\nsize = 2\nstride = 1\nalpha = 0\nbeta = 0\n"
     "curve = {bytes = [8], seconds = [1.0]}", r"collectives\[0\]\.kind = 'gather': all_gather, "),
    ("[waiting]\n8 = nan", r"waiting\.8 = nan"),
    ("[waiting]\nname = 1.0", "waiting"),
    ("[waiting]\nabout = nan", "waiting"),
    ("[links]\nspeed = 1", "field 'links' is unknown: "),
    ("[network2]\nspeed = 1", "field 'network2' .*; did you mean network"),
    ("[passes.add]\nbyte = [8]\nseconds = [1.0]",
     r"passes\.add: field 'byte' .*; did you mean bytes"),
    ("[[collectives]]\nkind = 'broadcast'",
     r"collectives\[0\]: missing required fields size, stride, alpha, beta, curve")])
def test_names_that_users_choose_hide_no_number(tmp_path, more, said):
    path = tmp_path / "mine.toml"
    path.write_text(f"{SUPPLIED}\n{more}\n")
    with pytest.raises(UsageError, match=said):
        load_machine(str(path))


@pytest.mark.parametrize("table", ["gemm_rate", "node", "network", "achieved", "sources"])
def test_tables_that_are_missing(tmp_path, table):
    head, _, rest = SUPPLIED.partition(f"[{table}]")
    path = tmp_path / "mine.toml"
    path.write_text(head + rest[rest.find("\n["):] if "\n[" in rest else head)
    with pytest.raises(UsageError, match=f"missing required field {table}"):
        load_machine(str(path))


NASTY = ['with "quotes" and \\', "an emoji \N{GRINNING FACE}", "two\nlines\r\n and \ta tab",
         "# no comment", "'" * 3, '"' * 3, "\x00\x07\x1f\x7f\x85", "[table]\nname = 3", "",
         "\ue000\U0010ffff", "a = b"]


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_a_written_machine_is_read_again(text, tmp_path):
    """All that a calibration measures, and any text, also as the name of a source or of an
    operation."""
    curve, source = Curve([100.0, 1000.0], [1e-6, 1e-5]), f"as of {text}"
    machine = replace(
        load_machine("cpu"), name=text, about=text, sources={text: source, "network": source},
        gemm_seconds=1e-6, block=5, collectives=[Line("all_gather", 2, 4, 1e-6, 1e-9, curve)],
        passes={"other": curve, text: curve}, transport="mpi", waiting={2: 1e-4})
    written = format_machine(machine)
    path = tmp_path / "mine.toml"
    path.write_text(written, encoding="utf-8", newline="")
    assert load_machine(str(path)) == machine
    assert tomllib.loads(written)["about"] == text


def test_numbers_are_written_to_six_digits_and_whole_ones_in_full():
    numbers = [1 / 3, 123456789.5, 2.0 ** 53, 1e300, -0.0, 5e-324, math.inf, -math.inf, math.nan]
    curve = Curve(numbers, [*map(float, range(9))])
    machine = replace(load_machine("cpu"), passes={"other": curve})
    found = tomllib.loads(format_machine(machine))["passes"]["other"]
    assert found["bytes"][:8] == [0.333333, 123457000, 2.0 ** 53, 1e300, 0, 5e-324, math.inf,
                                  -math.inf] and math.isnan(found["bytes"][8])
    assert found["seconds"] == curve.seconds


@pytest.mark.ranks(1, 4)
def test_all_ranks_learn_whether_the_file_was_written(comm, shared_tmp_path, capsys):
    machine = load_machine("cpu") if comm.rank == 0 else None
    path, nowhere = shared_tmp_path / "mine.toml", shared_tmp_path / "no" / "mine.toml"
    assert publish_machine(machine, path, comm) == 0
    assert load_machine(str(path)) == load_machine("cpu")
    assert publish_machine(machine, nowhere, comm) == 1
    said, failed = capsys.readouterr()
    assert said == (f"machine file: {path}\n" if comm.rank == 0 else "")
    assert failed.startswith(f"failed: machine file {nowhere} could not be written (No such "
                             if comm.rank == 0 else "")


@pytest.mark.ranks(1, 2)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(comm,
                                                                              shared_tmp_path):
    check_writable(shared_tmp_path / "mine.toml", comm)
    with pytest.raises(UsageError, match="mine.txt: a .toml file would do"):
        check_writable(shared_tmp_path / "mine.txt", comm)
    if comm.rank == 0:
        (shared_tmp_path / "file").touch()
    with pytest.raises(StoreError, match="--out's folder .* cannot be written"):
        check_writable(shared_tmp_path / "file" / "mine.toml", comm)
