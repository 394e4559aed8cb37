"""The formats of machines, models and rules: told by the docstrings of their classes, whole."""
import typing

import msgspec
import pytest

from bench.__main__ import main
from bench.errors import UsageError
from bench.prediction.machine_model import Achieved, Curve, Level, Line, Machine
from bench.prediction.meshes.rules_of_thumb import Rule, Rules, load_rules
from bench.prediction.model_file import ModelFile, load_model
from bench.reports.log_tables import HEAD, describe_fields

FORMATS = (Machine, Level, Achieved, Curve, Line, ModelFile, Rules, Rule)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_docstring_tells_all_fields_and_no_other(kind):
    """Also whether each is optional, which fields told together share."""
    heads = [head for line in describe_fields(kind)
             if (head := HEAD.fullmatch(line.removeprefix("  ")))]
    told = {name: head[2].endswith("; optional")
            for head in heads for name in head[1].split(", ")}
    assert told == {field.name: not field.required for field in msgspec.structs.fields(kind)}


def test_all_parts_of_a_format_are_told():
    """No class that a file may contain is left out of `FORMATS`."""
    inner = {one for kind in FORMATS for field in msgspec.structs.fields(kind)
             for one in (field.type, *typing.get_args(field.type))
             if isinstance(one, type) and issubclass(one, msgspec.Struct)}
    assert inner and inner <= set(FORMATS)


@pytest.mark.parametrize("option, said", [
    ("machine", "Fields of node and network:"), ("model", "layers, hidden, heads"),
    ("rules", "Fields of each table of rules:")])
def test_help_prints_a_format_and_a_file_that_has_it(option, said, capsys):
    assert main(["plan", f"--{option}", "help"]) == 0
    text = capsys.readouterr().out
    assert said in text and 'name = "' in text or 'title = "' in text


@pytest.mark.parametrize("text, said", [
    ("layer = 3", "; did you mean layers?"),
    ('name = "m"\nlayers = 2', "missing required fields hidden, heads, vocab, seq"),
    ('name = "m"\nlayers = 2\nhidden = 8\nheads = 2\nvocab = "9"\nseq = 4',
     "vocab: a whole number would do, not a text"),
    ("layers = = 2", "Invalid value")])
def test_a_wrong_model_file_is_told_in_words(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_model(str(path))
    line = str(error.value)
    assert line.startswith(f"model file {path}: ") and said in line and "\n" not in line


def test_a_file_that_is_no_table_of_fields(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('title = "t"\nsource = "s"\nbatches = "b"\nrules = 3')
    with pytest.raises(UsageError, match="rules: a list would do, not a whole number"):
        load_rules(str(path))
