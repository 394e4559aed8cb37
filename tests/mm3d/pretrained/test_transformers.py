"""Logits, loss and gradients are those of transformers, from its files and back into them.

Skipped where torch, transformers and safetensors are not installed.  Nothing is downloaded: the
weights are random.
"""
import json
from importlib.util import find_spec

import numpy as np
import pytest

import mm3d
from gpts import tokens_and_targets
from mm3d.checkpoints.together import on_root
from mm3d.hugging_face.config_file import model_fields
from published import BATCH, CONFIGS, LLAMA, MESHES, SEQ, differences, shapes

lacking = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
pytestmark = [pytest.mark.limit(300), pytest.mark.skipif(
    bool(lacking), reason=f"not installed: {', '.join(lacking)}")]
SIZES, DATA = dict(batch=BATCH, seq=SEQ), tokens_and_targets(dict(batch=BATCH, seq=SEQ, vocab=17))
ROTARY = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
# A rotary embedding that is scaled, and a window that is shorter than the sequences.
MODELS = CONFIGS | {
    "llama 3.1": {**LLAMA, "rope_parameters": ROTARY},
    "mistral": LLAMA | dict(model_type="mistral", sliding_window=3, tie_word_embeddings=True)}


@pytest.fixture
def torch(monkeypatch):
    """PyTorch in float64 alone: norms, angles and softmax of transformers are in float32."""
    import torch
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return torch


def made(torch, config, folder) -> tuple[np.ndarray, float]:
    """Write a random model, and its gradients as another one; return its logits and its loss."""
    import transformers
    options = dict(config, attn_implementation="eager", experts_implementation="eager",
                   bos_token_id=0, eos_token_id=0, pad_token_id=None)
    kind = transformers.AutoConfig.for_model(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.float64).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * 0.3 + 0.5 * (p.ndim == 1))
    model.save_pretrained(folder / "model")
    logits = model(torch.tensor(DATA[0])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(DATA[1]).flatten(),
                                             ignore_index=-1)
    loss.backward()
    for p in model.parameters():
        p.data = p.grad
    model.save_pretrained(folder / "gradients")
    return logits.detach().numpy(), loss.item()


@pytest.mark.ranks(1, 4, slow=(8,))
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(comm, name, shared_tmp_path, torch):
    logits, loss = on_root(comm, name, lambda: made(torch, MODELS[name], shared_tmp_path))
    for where, how in MESHES[comm.size]:
        mesh = mm3d.Mesh(comm, **where)
        model, slopes = (mm3d.load_pretrained(shared_tmp_path / folder, mesh, **SIZES, **how,
                                              dtype="float64")
                         for folder in ("model", "gradients"))
        expected = slopes.state()
        assert not differences(model, logits, loss, DATA, expected), (where, how)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written(comm, name, shared_tmp_path, torch):
    import transformers
    logits, _ = on_root(comm, name, lambda: made(torch, MODELS[name], shared_tmp_path))
    where, how = MESHES[comm.size][-1]
    mesh = mm3d.Mesh(comm, **where)
    seq = CONFIGS["gpt2"]["n_positions"] if name == "gpt2" else SEQ
    model = mm3d.load_pretrained(shared_tmp_path / "model", mesh, batch=BATCH, seq=seq, **how,
                                 dtype="float64")
    mm3d.save_pretrained(model, shared_tmp_path / "new", shard_bytes=3000)

    def read():
        again = transformers.AutoModelForCausalLM.from_pretrained(
            shared_tmp_path / "new", dtype=torch.float64, attn_implementation="eager",
            **{"experts_implementation": "eager"} if "num_experts_per_tok" in MODELS[name] else {}
        ).eval()
        return again(torch.tensor(DATA[0])).logits.detach().numpy()
    found = on_root(comm, name, read)
    assert np.abs(found - logits).max() <= 1e-12 * np.abs(logits).max()


@pytest.mark.parametrize("name", MODELS)
def test_the_made_up_files_of_other_tests_are_named_and_shaped_as_these(name, tmp_path, torch):
    from safetensors.numpy import load_file
    made(torch, MODELS[name], tmp_path)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {key: a.shape for key, a in found.items()} == shapes(MODELS[name])


def test_no_key_of_a_configuration_is_unknown():
    """The files that this version writes by default can all be read."""
    import transformers
    for name in CONFIGS | {"mistral": None}:
        written = transformers.AutoConfig.for_model(name).to_json_string()
        assert model_fields(json.loads(written))["layers"] > 0
