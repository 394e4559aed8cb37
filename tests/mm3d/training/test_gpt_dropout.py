"""A GPT with dropout has the same losses and gradients on every mesh.

They guard against masks that differ between ranks, in micro-batches, in another stage, when they
are drawn again in backward, and against masks in validation.
"""
import numpy as np
import pytest

import mm3d
from gpts import SIZES, differences, serial, tokens_and_targets, train

DROPOUT = dict(dropout=0.3)
# By ranks: stages, scheme, grid, schedule, policy of recomputation.
MESHES = {1: [(1, "serial", None, "1f1b", "full")],
          4: [(1, "3d", (2, 1, 2), "1f1b", "selective"), (2, "1d-sp", (2,), "zb-h1", "none"),
              (1, "2d", (2, 2), "1f1b", "full")],
          8: [(2, "3d", (2, 1, 2), "1f1b", "full"), (1, "3d", (1, 2, 4), "1f1b", "none")]}


@pytest.mark.ranks(1, 4, slow=(8,))
def test_losses_and_gradients_are_those_of_one_rank(comm):
    """Guards against masks that are others on another rank, or when drawn again
    (NVIDIA/Megatron-LM#1256)."""
    expected, without = serial(steps=1, **DROPOUT), serial(steps=1)
    assert differences(expected, without) and not np.allclose(
        expected["losses"][0], without["losses"][0], rtol=1e-3)
    for stages, scheme, grid, schedule, policy in MESHES[comm.size]:
        mesh = mm3d.Mesh(comm, stages, scheme, grid)
        found = train(mesh, microbatches=2, schedule=schedule, recompute=policy, steps=1,
                      **DROPOUT)
        assert not differences(found, expected), mesh


def test_steps_have_other_masks_and_validation_has_none(comm):
    mesh, batch = mm3d.Mesh(comm, 1, "serial"), tokens_and_targets()
    model, plain = (mm3d.GPT(mesh, **SIZES, dtype="float64", dropout=p) for p in (0.3, 0.0))
    assert (model.dropout_step, plain.dropout_step) == (0, None)
    first, second = model.step(*batch), model.step(*batch)
    assert first != second and model.dropout_step == 2
    assert model.evaluate(*batch) == plain.evaluate(*batch) == plain.step(*batch)
    assert plain.dropout_step is None    # so no checkpoint has it
    model.dropout_step = 0
    assert model.step(*batch) == first
    model.dropout_step = None
    assert model.step(*batch) == plain.step(*batch) and model.dropout_step is None
