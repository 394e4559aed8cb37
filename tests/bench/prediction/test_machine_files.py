"""Files of machines and of models: what they say, and what is refused."""
import json
import math
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import mm3d
from bench.__main__ import main
from bench.errors import StoreError, UsageError
from bench.prediction import machine_model
from bench.prediction.machine_file import check_writable, publish_machine
from bench.prediction.machine_model import Curve, Line, load_machine
from bench.prediction.model_file import load_model
from bench.text_files import read_supplied
from machine_files import format_machine
from published import CONFIGS, LLAMA
from support import ROOT

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
    ('kernels = "best"', "best"),
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


SIZES = {"name": "'mine'", "layers": 2, "hidden": 64, "heads": 4, "vocab": 32, "seq": 8}
NAMES = sorted(path.stem for path in (ROOT / "bench/prediction/models").glob("*.toml"))


@pytest.fixture
def mine(tmp_path):
    """Writes a file of a user's own, with lines after the sizes; returns its path."""
    def write(changes=(), *lines: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text("\n".join([f"{key} = {one}" for key, one in (
            SIZES | dict(changes)).items()] + [*lines]))
        return str(path)
    return write


@pytest.mark.parametrize("line, message", [
    ("heads = 3", "hidden=64 cannot be divided among heads=3"), ("layers = 0", "layers = 0"),
    ("width = 3", "width"), ("vocab = 'all'", "vocab"),
    ("architecture = {norm = 'none'}", "norm='none' is unknown"),
    ("architecture = {norms = 'rms', bias = 1}", "architecture has bias, norms: .* would do"),
    ("experts = {count = 2, top = 3}", "top=3 experts cannot be chosen among count=2"),
    ("experts = {top = 3}", "count"), ("experts = {number = 3}", "experts has number: count, top"),
    ("architecture = {kv_heads = 3}", "kv_heads=3 does not divide heads=4: 1, 2, 4 would do")])
def test_a_file_that_is_no_model(line, message, mine):
    name, _, value = line.partition(" = ")
    with pytest.raises(UsageError, match=message):
        load_model(mine({name: value}))


def test_a_config_with_features_that_nothing_has(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "deepseek_v3",
                                                              "q_lora_rank": 3}))
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UsageError, match="model_type='deepseek_v3', q_lora_rank"):
            load_model(str(name))


def test_a_file_carries_its_architecture_and_experts(mine):
    lines = ["[architecture]", "norm = 'rms'", "rotary_scaling = [8.0, 1.0, 4.0, 32]",
             "positions = 'rotary'", "[experts]", "count = 4", "top = 1", "capacity = 1.5"]
    assert load_model(mine((), *lines)).model(3) == mm3d.Model(
        2, 64, 4, 3, 8, 32, experts=mm3d.Experts(4, top=1, capacity=1.5),
        architecture=mm3d.Architecture(norm="rms", positions="rotary",
                                       rotary_scaling=(8.0, 1.0, 4.0, 32)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_of_hugging_face_is_a_file(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    found = load_model(str(tmp_path / "config.json"))
    assert found.name == tmp_path.name and found == msgspec.structs.replace(
        load_model(str(tmp_path)), source=found.source)
    assert found.model(4, 5) == mm3d.model_from_config(tmp_path, batch=4, seq=5)


@pytest.mark.parametrize("name", NAMES)
def test_supplied_models_can_be_made(name):
    """`reproduce --paper models` compares the number of their parameters with print."""
    found = load_model(name)
    assert found.name == name and name in read_supplied("model", name) and found.parameters > 1e8


def test_a_dry_run_of_a_model_is_that_of_its_architecture(mine, capsys):
    words = ["dry", "--ranks", "4", "--scheme", "1d", "--batch", "2"]
    path = mine((), "[architecture]", "perceptron = 'swiglu'", "kv_heads = 2", "inner = 24")
    assert main([*words, "--model", path]) == 0
    shown = capsys.readouterr().out
    assert "swiglu" in shown and "gelu " not in shown and f"{path}, layers 2, hidden 64" in shown
    # 2 layers of 16 tokens: qkv, proj, two products up and one down, scores and outputs
    flops = 2 * 16 * (2 * 64 * (64 + 2 * 32) + 2 * 64 * 64 + 3 * 2 * 64 * 24 + 4 * 8 * 64)
    assert f"{flops:,}" in shown
    assert main([*words, "--model", path, "--seq", "4"]) == 0
    assert "seq 4" in capsys.readouterr().out
