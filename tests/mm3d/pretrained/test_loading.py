"""Models in the format of Hugging Face on meshes: what they compute, the way back, and files that
are refused.  `test_transformers.py` compares with transformers itself."""
import math
import json
from contextlib import contextmanager

import numpy as np
import pytest

import mm3d
from gpts import tokens_and_targets
from mm3d.hugging_face.names import tensor_shapes
from mm3d.pretrained.loading import model_pieces
from mm3d.pretrained.shapes import parameter_count, parameter_shapes
from published import (BATCH, CONFIGS, GPT2, LLAMA, MESHES, QWEN2, SEQ, differences, plain_logits,
                       plain_loss, shapes, tensors, write)
from reference import all_refuse

SIZES = dict(batch=BATCH, seq=SEQ)
DATA = tokens_and_targets(dict(SIZES, vocab=17))
kinds = pytest.mark.parametrize("kind", CONFIGS)


@contextmanager
def loaded(comm, folder, place=0, **fields):
    """A model on one of the meshes of this number of ranks, in float64."""
    where, how = MESHES[comm.size][place]
    mesh = mm3d.Mesh(comm, **where)
    model = mm3d.load_pretrained(folder, mesh, **(SIZES | dict(dtype="float64") | how | fields))
    yield model
    model.free()
    mesh.free()


@pytest.fixture
def folder(comm, shared_tmp_path):
    """Writes a folder on rank 0; all ranks get it."""
    pytest.importorskip("safetensors")

    def make(*given, name="model", **files):
        if comm.rank == 0:
            write(shared_tmp_path / name, *given, **files)
        comm.Barrier()
        return shared_tmp_path / name
    return make


# --- Names ------------------------------------------------------------------------------------

def config_model(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return mm3d.model_from_config(tmp_path, **SIZES | ({"seq": 9} if kind == "gpt2" else {}))


@kinds
def test_pieces_are_all_parameters_and_all_tensors_once(kind, tmp_path):
    """Of a whole model, and of blocks that cut through heads, groups and products."""
    model = config_model(kind, tmp_path)
    pieces, expected = model_pieces(kind, model), shapes(CONFIGS[kind])
    assert tensor_shapes(pieces) == expected
    there = {name: np.zeros(shape, int) for name, shape in expected.items()}
    for name, shape in parameter_shapes(model).items():
        cuts = [(0, n // 3, n) for n in shape]
        for place in np.ndindex(*[2] * len(shape)):
            block = tuple(slice(cut[i], cut[i + 1]) for cut, i in zip(cuts, place))
            here = np.zeros([one.stop - one.start for one in block], int)
            for piece in pieces[name]:
                if part := piece.within(block):
                    here[part[0]] += 1
                    there[piece.tensor][part[1]] += 1
            assert (here == 1).all(), name
    assert all((a == 1).all() for a in there.values())
    assert parameter_count(model) == sum(a.size for a in there.values())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_parameters_are_counted_from_two_periods_of_layers(every):
    for layers in range(every, 8):
        model = mm3d.Model(layers, 12, 2, 1, 4, experts=mm3d.Experts(2, every=every))
        assert parameter_count(model) == sum(map(math.prod, parameter_shapes(model).values()))


def test_a_parameter_that_the_family_does_not_have(tmp_path):
    model = mm3d.Model(1, 12, 2, 1, 4, architecture=mm3d.Architecture(norm="rms"),
                       experts=mm3d.Experts(2, every=1))
    with pytest.raises(ValueError, match="gpt2 of Hugging Face has no tensor for 'layers.0.exper"):
        model_pieces("gpt2", model)


# --- What they compute ------------------------------------------------------------------------

@pytest.mark.ranks(1, 4, slow=(8,), first=(4,))
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2"])
def test_numpy_computes_the_same(comm, folder, kind, monkeypatch):
    """From the tensors as the files have them, so that no order of heads can be wrong twice."""
    monkeypatch.setattr(np.random, "Generator", None)    # files have all: none is drawn
    arrays = tensors(CONFIGS[kind])
    logits = plain_logits(CONFIGS[kind], arrays, DATA[0])
    path = folder(CONFIGS[kind], arrays)
    for place in range(len(MESHES[comm.size])):
        with loaded(comm, path, place) as model:
            assert not differences(model, logits, plain_loss(logits, DATA[1]), DATA), place


@pytest.mark.ranks(1, 8, slow=(4,), first=(8,))
@kinds
def test_the_way_back_has_the_same_bits(comm, folder, shared_tmp_path, kind):
    """In one file or in many, from every mesh; another mesh then computes the same."""
    arrays = tensors(CONFIGS[kind])
    path = folder(CONFIGS[kind], arrays)
    for place in range(len(MESHES[comm.size])):
        new = shared_tmp_path / f"new-{place}"
        seq = 9 if kind == "gpt2" else SEQ    # all positions
        with loaded(comm, path, place, seq=seq) as model:
            mm3d.save_pretrained(model, new, shard_bytes=3000 if place % 2 else 10 ** 9)
        if comm.rank == 0:
            from safetensors.numpy import load_file
            found, files = {}, sorted(new.glob("*.safetensors"))
            for file in files:
                found |= load_file(file)
            assert (len(files) > 1) == place % 2 == (new / "model.safetensors.index.json").exists()
            assert found.keys() == arrays.keys() and all(
                np.array_equal(found[name], a) for name, a in arrays.items())
            written = json.loads((new / "config.json").read_text())
            assert written["model_type"] == kind and written["dtype"] == "float64"
            assert all(written[key] == value for key, value in CONFIGS[kind].items()
                       if key in written and key != "max_position_embeddings")
            assert not [*shared_tmp_path.glob(".*")]
        comm.Barrier()
        with loaded(comm, new, len(MESHES[comm.size]) - 1 - place, seq=seq) as again:
            if comm.rank == 0:
                assert again.config.model.experts == model.config.model.experts
            assert mm3d.model_from_config(new, **SIZES) == mm3d.model_from_config(path, **SIZES)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype, master", [("float32", None), ("float16", "float32"),
                                           ("bfloat16", "float32")])
def test_types_of_files_and_of_models_may_differ(comm, folder, dtype, master):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    real = getattr(ml_dtypes, dtype, dtype)
    arrays = tensors(LLAMA, real)
    path = folder(LLAMA, arrays)
    with loaded(comm, path, dtype=dtype, master=master) as model:
        table = model.state()["embedding.weight"]
    assert table.dtype == np.float32
    assert np.array_equal(table, arrays["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.ranks(2)
def test_older_files_have_no_prefix_and_buffers_and_a_tied_head(comm, folder):
    gpt2, qwen2 = tensors(GPT2), tensors(QWEN2)
    with loaded(comm, folder(GPT2, gpt2)) as model:
        expected = model.state()
    old = {name.removeprefix("transformer."): a for name, a in gpt2.items()}
    old |= {"h.0.attn.bias": np.ones((1, 1, 9, 9)), "h.1.attn.masked_bias": np.ones(())}
    with loaded(comm, folder(GPT2, old, name="old")) as model:
        found = model.state()
        assert all(np.array_equal(found[name], a) for name, a in expected.items())
    qwen2 |= {"lm_head.weight": qwen2["model.embed_tokens.weight"],
              "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}
    with loaded(comm, folder(QWEN2, qwen2, name="tied")) as model:
        assert np.array_equal(model.state()["embedding.weight"], qwen2["lm_head.weight"])


# --- What is refused --------------------------------------------------------------------------

def spoil(what):
    """Tensors and files of a Llama in which something is wrong."""
    arrays, files = tensors(LLAMA), {}
    if what == "missing":
        del arrays["model.layers.1.mlp.up_proj.weight"], arrays["model.norm.weight"]
    elif what == "more":
        arrays["model.layers.0.self_attn.q_norm.weight"] = np.ones(4)
    elif what == "odd":
        arrays["model.layers.odd"] = np.ones(4)
    elif what == "shape":
        arrays["model.layers.0.self_attn.k_proj.weight"] = np.ones((24, 18))
    elif what == "type":
        arrays["model.norm.weight"] = np.ones(18, np.int8)
    elif what == "scalar":
        arrays["model.norm.weight"] = np.ones(())
    elif what == "renamed":
        arrays["norm.weight"] = arrays["model.norm.weight"]
    names = [*arrays]
    if what in ("doubled", "lost file", "lost tensor", "elsewhere"):
        files = {"a": names[:9], "b": names[8 if what == "doubled" else 9:]}
    return arrays, files


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what, kind, said", [
    ("missing", ValueError, r"'model.layers.1.mlp.up_proj.weight' and 1 more: missing$"),
    ("more", ValueError, r"'model.layers.0.self_attn.q_norm.weight': not of this model$"),
    ("odd", ValueError, r"'model.layers.odd': not of this model$"),
    ("shape", ValueError, r"k_proj.weight' has the shape \(24, 18\), not \(12, 18\)$"),
    ("type", ValueError, r"'model.norm.weight' is in I8, .*: F64, F32, F16, BF16 would do$"),
    ("scalar", ValueError, r"'model.norm.weight' has the shape \(\), not \(18,\)$"),
    ("doubled", ValueError, r"there twice: as '(.*)' in a.safetensors and as '\1' in b.safe"),
    ("renamed", ValueError, r"twice: as 'model.norm.weight' in .* and as 'norm.weight' in model"),
    ("lost file", FileNotFoundError, r"1 of 2 files .* are not there: b.safetensors$"),
    ("lost tensor", ValueError, r"mlp.up_proj.weight' is in the index, and not in b.safetensors$"),
    ("elsewhere", ValueError, r"is in a.safetensors, and not in b.safetensors as the index"),
    ("damaged", OSError, r"model.safetensors cannot be read"),
    ("index", ValueError, r"is no index of safetensors files$"),
    ("nothing", FileNotFoundError, r"has no model.safetensors and no model.safetensors.index"),
    ("layers", ValueError, "layers=1000000000000, but only 21 tensors are there"),
    ("config", FileNotFoundError, r"config.json")])
def test_files_are_refused_in_one_line_before_communication(comm, folder, what, kind, said):
    arrays, files = spoil(what)
    path = folder(LLAMA, arrays, **files)
    index = path / "model.safetensors.index.json"
    if comm.rank == 0:
        if what == "lost file":
            (path / "b.safetensors").unlink()
        elif what in ("lost tensor", "elsewhere", "index"):
            every = {"weight_map": {}} if what == "index" else json.loads(index.read_text())
            if what == "lost tensor":
                write(path, LLAMA, arrays, a=files["a"], b=files["b"][:-1])
            elif what == "elsewhere":
                every["weight_map"][files["a"][0]] = "b.safetensors"
            index.write_text("[]" if what == "index" else json.dumps(every))
        elif what == "damaged":
            (path / "model.safetensors").write_bytes(b"\x10" + bytes(20))
        elif what == "layers":
            about = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(about | {"num_hidden_layers": 10 ** 12}))
        elif what in ("nothing", "config"):
            (path / ("config.json" if what == "config" else "model.safetensors")).unlink()
    comm.Barrier()
    mesh = mm3d.Mesh(comm, scheme="1d")
    mesh.scheme.grid.reset_traffic()
    with all_refuse(comm, said, kind):
        mm3d.load_pretrained(path, mesh, **SIZES)
    assert not any(one.words for one in mesh.scheme.grid.traffic().values())


@pytest.mark.ranks(2)
def test_arguments_are_refused_alike(comm, folder, shared_tmp_path):
    path = folder(GPT2, tensors(GPT2))
    mesh = mm3d.Mesh(comm, scheme="1d")
    with pytest.raises(ValueError, match=r"the table of positions .* ends at 9"):
        mm3d.load_pretrained(path, mesh, batch=4, seq=10)
    with pytest.raises(TypeError, match="belongs to the mesh"):
        mm3d.load_pretrained(path, mesh, **SIZES, scheme="2d")
    with pytest.raises(ValueError, match="the ranks differ in seq"):
        mm3d.load_pretrained(path, mesh, batch=4, seq=4 + comm.rank)
    model = mm3d.load_pretrained(path, mesh, **SIZES)
    with pytest.raises(OSError, match="is there already: another name would do"):
        mm3d.save_pretrained(model, path)
    with pytest.raises(TypeError, match="save_pretrained: Pipeline is no mm3d.GPT"):
        mm3d.save_pretrained(model.pipeline, shared_tmp_path / "new")
    with pytest.raises(ValueError, match="shard_bytes='5GB' should be a whole number of at lea"):
        mm3d.save_pretrained(model, shared_tmp_path / "new", "5GB")
    assert [*shared_tmp_path.glob("*")] == [path] == [*shared_tmp_path.iterdir()]
    other = mm3d.GPT(mesh, layers=1, hidden=8, heads=2, vocab=9, **SIZES, norm="rms")
    with pytest.raises(ValueError, match="no family of Hugging Face"):
        mm3d.save_pretrained(other, shared_tmp_path / "new")
