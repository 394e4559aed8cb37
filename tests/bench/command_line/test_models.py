"""Names and files of models mean the same under every verb, and are counted as they train."""
import json
import re

import pytest

import mm3d
from bench.__main__ import main, parser
from bench.command_line import config_options
from bench.experiments.training import trainer
from bench.experiments.training.text import read_training_text
from bench.experiments.training.trainer import Course, TrainingRun
from bench.validation.files import check_file
from bench.verbs import dry, train
from jobs.own_options import list_verb_problems
from mm3d.config import Division
from published import LLAMA, MIXTRAL
from refused import run_verb
from support import status_of

VERBS = {"dry": "dry --ranks 4 --scheme 1d", "plan": "plan --gpus 8 --batch 8", "train": "train"}
BYTES = {"vocab_size": 256}    # the vocabulary of a text
FILES = {"llama": LLAMA | BYTES, "mixtral": MIXTRAL | BYTES}
# How 4 ranks divide each: 2 stages, or 2 replicas, of 2 ranks.
MESHES = {"llama": "--stages 2 --microbatches 2 --scheme 1d --grid 2",
          "mixtral": "--data 2 --zero 1 --stages 1 --microbatches 2 --scheme 1d-sp --grid 2"}
SIZES = "--layers 4 --batch 8 --seq 12"
TEXT = read_training_text()


@pytest.fixture
def file(comm, shared_tmp_path):
    """Writes a configuration on rank 0; returns its path."""
    def write(name: str, **changes) -> str:
        path = shared_tmp_path / f"{name}.json"
        if comm.rank == 0:
            path.write_text(json.dumps(FILES[name] | changes))
        comm.Barrier()
        return str(path)
    return write


def training_of(words: list[str]) -> tuple:
    """The plan and the division of a command."""
    arguments = parser(["train"]).parse_args(["train", *words])
    return train.make_plan(arguments), config_options.read(Division, arguments)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("words, said", [
    ("llama-3-71b", "'llama-3-71b' is unknown.*did you mean llama-3-70b"),
    ("llama-3-8b --hidden 64", "--hidden 64: --model llama-3-8b says it: leave one of them out"),
    ("llama-3-8b --heads 4", "--heads 4: --model llama-3-8b says it"),
    ("mixtral-8x7b --experts 4", "--experts 4: --model mixtral-8x7b says it"),
    ("llama-3-8b --balance 0.1", "--balance 0.1 would do nothing here: --experts 8"),
    ("mixtral-8x7b --capacity none", "--capacity none: --model mixtral-8x7b says it"),
    ("gpt2 --seq 1025", "model file gpt2: --seq 1025: the table of positions .* ends at 1024"),
    ("none.json", "model file none.json: .*is not there"),
    ("FILE", "features that nothing here computes: .*'deepseek_v3', q_lora_rank")])
def test_a_wrong_model_is_told_in_one_line_under_every_verb(words, said, verb, file, capsys):
    path = file("llama", model_type="deepseek_v3", q_lora_rank=3)
    assert status_of(main, [*VERBS[verb].split(), "--model",
                            *words.replace("FILE", path).split()]) == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and len(err.strip().splitlines()) == 1, err


def test_what_a_model_says_is_refused_where_a_verb_has_the_option(capsys):
    for verb in ("dry", "train"):
        assert status_of(main, [*VERBS[verb].split(), "--model", "gpt2", "--untied"]) == 2
        assert "--untied: --model gpt2 says it" in capsys.readouterr().err


def test_a_file_says_nothing_twice(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("name = 'mine'\nlayers = 2\n[config]\nmodel_type = 'llama'\n")
    assert status_of(main, ["plan", "--gpus", "8", "--batch", "8", "--model", str(path)]) == 2
    assert "layers: config says it: leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", FILES)
def test_train_takes_the_architecture_and_other_numbers_of_layers_and_tokens(kind, file):
    """Its vocabulary is that of the text; jobs hand the options on."""
    words = ["--model", file(kind), "--layers", "3", "--seq", "9", "--batch", "4"]
    plan, _ = training_of(words)
    expected = mm3d.model_from_config(words[1], batch=4, seq=9)
    assert (plan.layers, plan.seq, plan.vocab, plan.tied) == (3, 9, 256, False)
    assert (plan.hidden, plan.heads, plan.architecture, plan.experts) == (
        expected.hidden, expected.heads, expected.architecture, expected.experts)
    assert plan.architecture.kv_heads == 3 and bool(plan.experts) == (kind == "mixtral")
    assert not [*list_verb_problems("train", words)]


def test_a_model_without_experts_may_get_some(file):
    plan, _ = training_of(["--model", file("llama"), "--experts", "4", "--expert-every", "1"])
    assert (plan.experts.count, plan.experts.every) == (4, 1)
    assert plan.architecture.perceptron == "swiglu"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", FILES)
def test_a_mesh_moves_the_words_that_dry_prints(comm, kind, file, capsys):
    """Of every rank, by direction and collective, for the same options of both verbs."""
    words = ["--model", file(kind), *SIZES.split(), *MESHES[kind].split()]
    training = TrainingRun(comm, *training_of(words), TEXT)
    model = training.model
    model.reset_traffic()
    model.step(*training.batch(0))
    model.refresh()
    moved = {key: one.words for key, one in model.traffic().items() if one.words}
    training.free()
    dry.run(parser(["dry"]).parse_args([
        "dry", "--ranks", "4", "--rank", str(comm.rank), *words]))
    found = re.findall(r"^([a-z])\s+([a-z_]+)\s+([\d,]+)$", capsys.readouterr().out.partition(
        "Words of this rank in such a step")[2], re.MULTILINE)
    assert {(one, way): int(count.replace(",", "")) for one, way, count in found} == moved != {}


@pytest.mark.ranks(1, 4, first=(4,))
@pytest.mark.parametrize("kind", FILES)
def test_a_model_is_verified_before_it_trains(comm, kind, file):
    """By a model in NumPy alone, to rounding; its settings go into the record."""
    words = ["--model", file(kind), *SIZES.split(), "--dtype", "float64", "--steps", "2"]
    words += MESHES[kind].split() if comm.size > 1 else []
    training = TrainingRun(comm, *training_of(words), TEXT)
    outcome = trainer.run_training(training, Course())
    loss, *gradient = outcome.checks
    assert loss.error < 1e-13 and all(check.error < 1e-6 for check in gradient)
    assert outcome.history.losses.keys() == ({0, 1} if comm.rank == 0 else set())
    assert training.settings()["architecture_perceptron"] == "swiglu"
    training.free()


@pytest.mark.ranks(4)
def test_the_command_trains_a_file(comm, file, shared_tmp_path):
    path = file("llama", rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8})
    status, said = run_verb(comm, "train", "--model", path, *SIZES.split(),
                            *MESHES["llama"].split(), "--steps", "3", "--checkpoints", "none",
                            "--sample", "5", "--out", str(shared_tmp_path))
    assert status == 0 and said.count("what the model writes, 5 bytes") == 1, said
    [path] = shared_tmp_path.glob("*.h5")
    assert check_file(path)[0] == []
