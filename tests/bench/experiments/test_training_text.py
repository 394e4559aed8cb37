"""The text to train on: the same order on every mesh, and a part that is never trained on."""
import numpy as np
import pytest
from mpi4py import MPI

from bench.errors import StoreError, UsageError
from bench.experiments.training import plain_gpt
from bench.experiments.training.history import HistoryFile
from bench.experiments.training.plan import Plan
from bench.experiments.training.text import Text, read_training_text, share_text

ALPHABET = Text("alphabet", np.arange(200, dtype=np.uint8), np.arange(200, 256, dtype=np.uint8))


def test_the_default_text_is_english():
    text = read_training_text()
    assert len(text.train) > 100_000 and len(text.held_out) > 10_000
    assert b" the " in text.train.tobytes() and text.digest == read_training_text().digest


def test_a_batch_follows_from_seed_and_step_alone():
    tokens, targets = ALPHABET.batch(1, 7, 5, 20)
    assert tokens.shape == targets.shape == (5, 20) and tokens.dtype == np.int64
    assert np.array_equal(targets, tokens + 1)    # the next byte
    again = ALPHABET.batch(1, 7, 5, 20)
    assert np.array_equal(tokens, again[0])
    for seed, step in ((2, 7), (1, 8)):
        assert not np.array_equal(tokens, ALPHABET.batch(seed, step, 5, 20)[0])
    starts = {int(ALPHABET.batch(0, step, 1, 198)[0][0, 0]) for step in range(40)}
    assert starts == {0, 1}    # the last window ends with the last byte


def test_validation_covers_what_is_held_out_once():
    count = ALPHABET.validation_batches(2, 9)
    assert count == 3
    tokens = [ALPHABET.validation(number, 2, 9)[0].ravel() for number in range(count)]
    assert np.array_equal(np.concatenate(tokens), np.arange(200, 200 + 54))


def test_a_text_that_is_too_short_is_refused_and_says_how_long(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 300)
    with pytest.raises(UsageError, match="has 300 bytes.*at least 310") as error:
        share_text(str(path), 2, 10, MPI.COMM_SELF) and share_text(str(path), 2, 15, MPI.COMM_SELF)
    assert "\n" not in str(error.value)
    path.write_bytes(b"x" * 310)
    assert share_text(str(path), 2, 15, MPI.COMM_SELF).name == "short.txt"
    with pytest.raises(UsageError, match="cannot be read"):
        read_training_text(str(tmp_path / "none.txt"))


def test_attention_and_gelu_of_the_plain_model_are_their_definitions():
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((1, 4, 3 * 6))
    q, k, v = (qkv[0, :, 6 * n:6 * n + 6] for n in range(3))
    found = plain_gpt.attention(qkv, 2, 3)[0]
    for head in range(2):
        part = slice(3 * head, 3 * head + 3)
        for row in range(4):
            weights = np.exp(k[:row + 1, part] @ q[row, part] / np.sqrt(3))
            expected = weights / weights.sum() @ v[:row + 1, part]
            assert np.allclose(found[row, part], expected, rtol=1e-13)
    assert np.allclose(plain_gpt.gelu(np.array([-1.0, 0, 2])), [-0.158808, 0, 1.954598], atol=1e-6)


def test_a_history_goes_on_and_later_lines_count(tmp_path):
    settings = {"layers": 2, "lr": 0.1}
    file = HistoryFile(tmp_path / "new", settings)
    for step, loss in ((0, 5.0), (1, 4.0), (2, 3.0), (1, 4.5)):
        file.write({"step": step, "loss": loss, "seconds": 0.1})
    file.write({"step": 2, "validation": 3.5})
    file.close()
    with open(tmp_path / "new" / "history.jsonl", "a") as cut:
        cut.write('{"settings": 3}\n{"loss": 1.0}\n{"step": [0], "loss": 1.0}\n'
                  '{"step": 0, "loss": null}\n{"step": 3, "lo')    # another program's, and a kill
    file = HistoryFile(tmp_path / "new", settings)
    assert file.history.losses == {0: 5.0, 1: 4.5, 2: 3.0}
    before = file.history.before(2)
    assert before.losses == {0: 5.0, 1: 4.5} and before.validation == {2: 3.5}
    assert file.history.before(1).validation == {}
    with pytest.raises(StoreError, match="in use: another training writes its checkpoints there"):
        HistoryFile(tmp_path / "new", settings)
    file.close()
    with pytest.raises(UsageError, match="lr 0.1, not 0.2"):
        HistoryFile(tmp_path / "new", settings | {"lr": 0.2})
    (tmp_path / "a file").write_text("")
    with pytest.raises(StoreError, match="--checkpoints"):
        HistoryFile(tmp_path / "a file", settings)


def test_settings_state_a_plan():
    """What every training has alike is not recorded, so that older trainings still go on."""
    plan = Plan(2, 16, 2, 4, 8, steps=10, dropout=0.5, tied=False, lr=1.0)
    assert Plan(**plan.settings()) == plan
    assert not {"vocab", "master", "label_smoothing", "z_loss", "ignored"} & {*plan.settings()}
    assert plan.rate(9) < plan.rate(0) and Plan(**plan.settings() | {"optimizer": "sgd"}).rate(
        9) == 1.0
