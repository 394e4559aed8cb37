"""Machine files are checked once, as they are read: the file and the key are named."""
import re
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.errors import UsageError
from bench.prediction import machine_model
from bench.prediction.machine_model import load_machine

SUPPLIED = (Path(machine_model.__file__).parent / "machines/dgx-h100.toml").read_text()
CURVES = """
[passes.add]
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
    *((f"{name} = {value}", f"{name} = {shown}: a number from ")
      for name in ("memory_bytes", "memory_bandwidth", "ranks_per_node", "launch_seconds")
      for value, shown in (("nan", "nan"), ("inf", "inf"), ("-1", "-1"), ("-1e9", "-1000000000.0"),
                           ('"5"', "'5'"), ("true", "True"), ("1e300", "1e+300"))),
    ("ranks_per_node = 0", "ranks_per_node = 0: "),
    ("ranks_per_node = 2.5", "Expected `int`, got `float` - at `$.ranks_per_node`"),
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
    ("gemm = 1979-05-27", "achieved.gemm = datetime.date(1979, 5, 27): "),
    ("name = 5", "$.name"),
    ("about = 5", "$.about")])
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
    assert load_machine(str(path)).passes["add"].at(8) == 1
    path.write_text(SUPPLIED + CURVES.format(bytes=sizes, seconds=seconds))
    with pytest.raises(UsageError, match=r"passes\.add: as many seconds as bytes"):
        load_machine(str(path))


@pytest.mark.parametrize("more, said", [
    ("[gemm_deviations]\n256 = 1.0", r"gemm_deviations: '256' is no shape"),
    ("[gemm_deviations]\n1x2x3 = -1.0", r"gemm_deviations\.1x2x3 = -1\.0"),
    ("[waiting]\n8 = nan", r"waiting\.8 = nan"),
    ("[waiting]\nname = 1.0", "waiting"),
    ("[waiting]\nabout = nan", "waiting"),
    ("[links]\nspeed = 1", "unknown field `links`")])
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
    with pytest.raises(UsageError, match=f"missing required field `{table}`"):
        load_machine(str(path))
