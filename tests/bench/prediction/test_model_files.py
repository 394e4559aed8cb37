"""Files of models: what they say, what is refused, and what dry runs and plans make of them."""
import json
import re

import msgspec
import pytest

import mm3d
from bench.__main__ import main
from bench.errors import UsageError
from bench.prediction.model_file import load_model
from bench.text_files import read_supplied
from published import CONFIGS, LLAMA
from support import ROOT, status_of

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


def test_a_file_carries_its_architecture(mine):
    lines = "[architecture]", "norm = 'rms'", "rotary_scaling = [8.0, 1.0, 4.0, 32]", (
        "positions = 'rotary'")
    assert load_model(mine((), *lines)).model(3) == mm3d.Model(
        2, 64, 4, 3, 8, 32, architecture=mm3d.Architecture(
            norm="rms", positions="rotary", rotary_scaling=(8.0, 1.0, 4.0, 32)))


def test_a_file_carries_its_experts(mine):
    found = load_model(mine((), "[experts]", "count = 4", "top = 1", "capacity = 1.5")).experts
    assert found == mm3d.Experts(4, top=1, capacity=1.5)


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
    """And not of its sizes alone."""
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


def test_a_dry_run_of_published_experts(capsys):
    assert main(["dry", "--ranks", "2", "--scheme", "1d", "--batch", "2", "--seq", "8",
                 "--model", "mixtral-8x7b"]) == 0
    assert "experts" in capsys.readouterr().out


def test_why_there_is_no_dry_run(capsys):
    assert status_of(main, ["dry", "--ranks", "8", "--scheme", "1d"]) == 2
    assert re.search("--hidden is missing: .* --model llama-3-8b", capsys.readouterr().err)
