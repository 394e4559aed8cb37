"""A small Llama learns the same on all meshes, and in the library transformers."""
import os
import subprocess
import sys

import pytest

from mm3d.examples import learn

NEEDED = "import torch, transformers, safetensors"


@pytest.mark.ranks(4, slow=(8,))
def test_losses_are_the_same_on_all_meshes(comm):
    """Sums in another order change the last digits, and AdamW makes a little more of them."""
    found = learn.train_on_meshes(comm, learn.draw_batches(6))
    if comm.rank == 0:
        meshes = [name for name, (ranks, _, _) in learn.MESHES.items() if ranks <= comm.size]
        assert [*found] == meshes and len(meshes) == 3 + comm.size // 4
        first, *others = found.values()
        assert first[-1] < first[0] - 0.5    # it learns
        for own in others:
            assert max(abs(a / b - 1) for a, b in zip(own, first)) <= 1e-12
        lines = learn.format_losses(found, 5).splitlines()
        assert [line.split()[0] for line in lines] == ["step", "0", "5", "most"]


@pytest.mark.parametrize("words, said", [
    (["--steps", "0"], "--steps=0 should be a whole number of at least 1"),
    (["--every", "0"], "--every=0 should be a whole number of at least 1"),
    (["--transformers", "/none"], "--transformers /none: there is no such program")])
def test_options_that_cannot_be_are_refused_before_the_training(capsys, words, said):
    with pytest.raises(SystemExit):
        learn.main(words, None)
    assert said in capsys.readouterr().err


@pytest.mark.limit(300)
def test_transformers_learns_the_same(tmp_path):
    """By the interpreter that MM3D_TORCH names, if this one has no transformers."""
    from mpi4py import MPI
    python = os.environ.get("MM3D_TORCH", sys.executable)
    if subprocess.run([python, "-c", NEEDED], capture_output=True).returncode:
        pytest.skip("no transformers with torch: name an interpreter in MM3D_TORCH")
    batches = learn.draw_batches(6)
    own = learn.train(MPI.COMM_SELF, "serial", batches, tmp_path / "model")
    theirs = learn.train_by_transformers(python, tmp_path, batches)
    assert max(abs(a / b - 1) for a, b in zip(theirs, own, strict=True)) <= 1e-12
