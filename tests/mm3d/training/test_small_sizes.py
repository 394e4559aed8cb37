"""Models smaller than their grid: ranks without features, heads, tokens or experts."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d

# By ranks: meshes on which one feature, one sequence or one token leaves ranks without any.
MESHES = {
    2: [dict(scheme="3d", grid=(1, 1, 2)), dict(scheme="3d", grid=(1, 2, 1)),
        dict(scheme="3d", grid=(2, 1, 1)), dict(scheme="1d-sp")],
    4: [dict(scheme="2d-pipelined"), dict(scheme="3d", grid=(1, 2, 2)),
        dict(scheme="faces", grid=(2, 1, 2)), dict(scheme="1d"),
        dict(scheme="3d", grid=(1, 1, 2), stages=2)],
    8: [dict(scheme="3d", grid=(2, 2, 2)), dict(scheme="3d", grid=(1, 1, 8)),
        dict(scheme="2.5d"), dict(scheme="2d", data=2), dict(scheme="1d-sp")]}
EXPERTS = [mm3d.Experts(1, top=1, every=1), mm3d.Experts(3, every=1, capacity=.5, gate="mixtral"),
           None]


def train(mesh: mm3d.Mesh, sizes: dict) -> dict[str, np.ndarray]:
    """Losses, gradients and parameters of two steps, and a loss after them."""
    model = mm3d.GPT(mesh, **sizes)
    optimizer = mm3d.AdamW(model, lr=1e-2, clip=1.0)
    tokens = np.arange(sizes["batch"] * sizes["seq"]).reshape(-1, sizes["seq"]) % sizes["vocab"]
    losses = []
    for _ in range(2):
        losses.append(model.step(tokens, tokens))
        gradients = model.gradients()
        optimizer.step()
    losses.append(model.evaluate(tokens, tokens))
    found = {f"new {name}": a for name, a in model.state().items()}
    model.load(model.state())
    return found | gradients | {"losses": np.array(losses)}


@pytest.mark.ranks(4, slow=(2, 8))
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_ranks_without_a_part_of_the_model_change_nothing(comm, turn):
    """On each mesh with one kind of layers in turn; 8 ranks have each mesh once."""
    for number, mesh in enumerate(MESHES[comm.size]):
        case = (number + turn) % len(EXPERTS)
        if comm.size == 8 and number % len(EXPERTS) != turn:
            continue
        sizes = dict(layers=mesh.get("stages", 1), hidden=1 + case % 2, heads=1, vocab=1 + number,
                     batch=2 * mesh.get("data", 1), seq=1 + case, dtype="float64",
                     experts=EXPERTS[case], tied=bool(case % 2), microbatches=1 + case % 2,
                     recompute=("none", "full", "selective")[(number + case) % 3])
        expected = comm.bcast(train(mm3d.Mesh(MPI.COMM_SELF, scheme="serial", backend="numpy"),
                                    sizes) if comm.rank == 0 else None)
        found = train(mm3d.Mesh(comm, **mesh), sizes)
        assert found.keys() == expected.keys()
        for name, a in found.items():
            np.testing.assert_allclose(a, expected[name], rtol=1e-6, atol=1e-9,
                                       err_msg=f"{name}, {sizes}")


@pytest.mark.ranks(2, 4)
def test_a_model_of_experts_whose_ranks_have_no_feature(comm):
    scheme = mm3d.scheme("3d", comm, grid=(1, 1, comm.size))
    for way in ("backward", "halves"):
        model = mm3d.Transformer(scheme, layers=1, hidden=1, heads=1, batch=1, seq=2,
                                 experts=EXPERTS[0])
        y, saved = model.forward(model.random("x"))
        if way == "backward":
            dx = model.backward(y, saved)
        else:
            dx, operands = model.backward_input(y, saved)
            model.backward_weights(operands)
        assert dx.shape == y.shape == (1, 2, int(comm.rank == 0))
