"""Bad arguments: one message that names what was given and what would do, the same on every
rank, and before any communication but the comparison of the arguments, so that no rank is left
waiting."""
import sys

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.arrays import backend
from mm3d.grid.shape import GridShape
from mm3d.tracing import dry_run

SIZES = dict(layers=1, hidden=8, heads=2, batch=8, seq=4)


class Silent:
    """A communicator of so many ranks that compare their arguments, and communicate nothing else.
    """

    rank = 0

    def __init__(self, size):
        self.size = size

    def Allreduce(self, place, found, op):
        """All ranks have the same arguments, so the largest are their own."""
        assert (place, op) == (MPI.IN_PLACE, MPI.MAX)

    def __getattr__(self, name):
        raise AssertionError(f"comm.{name}: communication before the arguments were checked")


@pytest.fixture
def refused(comm):
    """Asserts that a call raises the same ValueError on all ranks and communicates nothing.

    It names all the `words`.
    """
    def check(call, *words, grid=None):
        before = grid and grid.traffic()
        with pytest.raises(ValueError) as caught:
            call()
        assert before == (grid and grid.traffic())
        message = str(caught.value)
        assert [word for word in words if word not in message] == [], message
        assert comm.allgather(message) == [message] * comm.size
    return check


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ranks, name, arguments, words", [
    (8, "4d", {}, ["'4d'", "1d, 1d-sp, 2.5d, 2d, 2d-pipelined, 3d, faces, serial"]),
    (7, "3d", {}, ["7 ranks", "start 1 or 8"]),
    (10, "3d", {}, ["10 ranks", "8", "27", "grid=(10, 1, 1)"]),
    (63, "3d", {}, ["63 ranks", "64"]),
    (8, "2d", {}, ["8 ranks", "4", "9"]),
    (8, "2d", {"grid": (2, 4)}, ["2 x 4", "square"]),
    (8, "3d", {"grid": (2, 2)}, ["(2, 2)", "x, y, z", "3 sizes"]),
    (8, "3d", {"grid": (2, 2, 2, 1)}, ["(2, 2, 2, 1)", "3 sizes"]),
    (8, "1d", {"grid": (2, 4)}, ["(2, 4)", "1 sizes"]),
    (8, "3d", {"grid": (2, 3, 2)}, ["2 x 3 x 2", "12", "8"]),
    (8, "1d", {"grid": 8}, ["grid=8", "tuple of sizes"]),
    (8, "3d", {"grid": GridShape("dxy", (2, 2, 2))}, ["GridShape('dxy'", "x, y, z"]),
    (8, "1d", {"grid": GridShape("xy", (2, 4))}, ["(2, 4)", "1 sizes"]),
    (8, "3d", {"grid": (8, 0, 1)}, ["y=0", "at least 1"]),
    (8, "3d", {"grid": (-2, -4, 1)}, ["x=-2", "at least 1"]),
    (8, "3d", {"grid": (2.0, 2, 2)}, ["x=2.0"]),
    (8, "3d", {"keep": "all"}, ["keep='all'", "none, weight, both"]),
    (8, "3d", {"rows": "columns"}, ["rows='columns'", "auto, sequences, positions"]),
    (8, "3d", {"kept": "both"}, ["'kept'", "keep, overlap, rows"]),
    (8, "1d", {"keep": "both"}, ["'1d'", "'keep'", "none"]),
    (8, "3d", {"backend": "torch"}, ["'torch'", "numpy, cupy"])])
def test_schemes(refused, ranks, name, arguments, words):
    refused(lambda: mm3d.scheme(name, Silent(ranks), **arguments), *words)


@pytest.mark.ranks(1)
def test_backend_of_the_environment(refused, monkeypatch):
    monkeypatch.setenv("MM3D_BACKEND", "nonsense")
    refused(lambda: mm3d.scheme("3d", Silent(8)), "'nonsense'", "numpy or cupy")
    refused(lambda: mm3d.Grid(Silent(8), x=8), "'nonsense'", "numpy or cupy")


@pytest.mark.ranks(1)
def test_the_arrays_of_dry_runs_are_no_choice(refused, monkeypatch):
    """Nor are they named among those that are, also after a dry run."""
    dry_run.trace_step("3d", 8, layers=1, hidden=16, heads=4, batch=8, seq=4)
    known = "'dry' is unknown: choose (one of numpy, cupy|numpy or cupy)$"
    with pytest.raises(ValueError, match=known):
        backend.get("dry")
    monkeypatch.setenv("MM3D_BACKEND", "dry")
    with pytest.raises(ValueError, match=known):
        mm3d.Grid(Silent(8), x=8)


@pytest.mark.ranks(1)
def test_cupy_that_is_not_there(refused, monkeypatch, no_backends):
    monkeypatch.setitem(sys.modules, "cupy", None)    # makes the import fail
    refused(lambda: mm3d.scheme("1d", Silent(8), backend="cupy"), "'cupy'", "pip install",
            "'numpy'")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name, grid, more, words", [
    ("4d", {"x": 8}, {}, ["'4d'", "1d, 1d-sp"]),
    ("3d", {"x": 8}, {}, ["directions x, y, z", "3 sizes"]),
    ("1d", {"x": 2, "y": 4}, {}, ["directions x", "1 sizes"]),
    ("2d", {"x": 2, "y": 4}, {}, ["square grid, not 2 x 4"]),
    ("1d", {"x": 2}, {"keeep": "both"}, ["no option 'keeep'"]),
    ("2.5d", {"x": 2, "y": 2, "z": 2}, {"keep": "none"}, ["'2.5d' has no option 'keep'"]),
    ("3d", {"x": 2, "y": 2, "z": 2}, {"keep": "all"}, ["keep='all'", "none, weight, both"]),
    ("1d", {"x": 2}, {"heads": 3}, ["hidden=8", "heads=3"])])
def test_closed_forms(refused, name, grid, more, words):
    """Refuse what no model on ranks could be; the order of a grid's sizes is the scheme's."""
    sizes = mm3d.ModelSizes(**SIZES | {key: more[key] for key in more if key in SIZES})
    options = {key: value for key, value in more.items() if key not in SIZES}
    refused(lambda: mm3d.cost.words(name, grid, sizes, **options), *words)
    right = {direction: 2 for direction in mm3d.SCHEMES["3d"].directions}
    assert mm3d.cost.words("2.5d", right, mm3d.ModelSizes(**SIZES)) == (
        mm3d.cost.words("2.5d", dict(reversed(right.items())), mm3d.ModelSizes(**SIZES)))


@pytest.mark.ranks(1, 8)
def test_direction_that_divides_nothing(refused, comm):
    """Be it one of the grid or none."""
    grid = mm3d.Grid(comm, x=comm.size, y=1, z=1, u=1)
    for letter, *words in (("w", "'xy,z'", "'w'", "x, y, z"), ("u", "'xy,z'", "'u'", "x, y, z"),
                           ("xy", "'xy'"), ("", "''")):
        refused(lambda: mm3d.Layout("xy,z").split(grid, (4, 4), letter), *words, grid=grid)


@pytest.fixture
def scheme(comm):
    scheme = mm3d.scheme("3d", comm)
    scheme.grid.comm = Silent(comm.size)    # nobody unshards anything here
    yield scheme
    scheme.grid.free()


SIZES_THAT_CANNOT_BE = [
    *(({size: bad}, [f"{size}={bad!r}", "at least 1"])
      for size, bad in zip(SIZES, (0, -8, 0, -1, 0))),
    ({"hidden": 8.0}, ["hidden=8.0", "whole number"]),
    ({"batch": "8"}, ["batch='8'", "whole number"]),
    ({"heads": 3}, ["hidden=8", "heads=3", "hidden=6", "hidden=9"]),
    ({"heads": 16}, ["hidden=8", "heads=16", "hidden=16"]),
    ({"dtype": "int32"}, ["'int32'", "float64, float32, float16"]),
    ({"dtype": "bfloat16"}, ["'bfloat16'", "float64, float32, float16", "install ml_dtypes"]),
    ({"causal": "no"}, ["causal='no': True or False"]), ({"seed": None}, ["seed=None", "whole"]),
    ({"dtype": None}, ["None", "float64, float32, float16"]),
    *(({"dtype": dtype, "master": master}, ["float32 masters are for types of 16 bits"])
      for dtype, master in (("float32", "float32"), ("float16", "float64")))]


@pytest.mark.ranks(1, 8)
def test_models(refused, scheme, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for arguments, words in SIZES_THAT_CANNOT_BE:
        refused(lambda: mm3d.Transformer(scheme, **SIZES | arguments), *words,
                grid=scheme.grid)


@pytest.mark.ranks(1)
def test_objects_of_another_kind(comm, model):
    for call, said in ((lambda: mm3d.scheme("3d", 3), "3 is no communicator"),
                       (lambda: mm3d.scheme("3d", MPI.COMM_NULL), "is no communicator"),
                       (lambda: mm3d.Transformer("3d", **SIZES), "Transformer: '3d' is no scheme"),
                       (lambda: mm3d.GPT(comm, **SIZES), "GPT: .*comm is no mesh"),
                       (lambda: mm3d.Pipeline(comm, "1f1b", 1, **SIZES), "Pipeline: .*no mesh"),
                       (lambda: mm3d.load_pretrained(".", comm, batch=1, seq=2),
                        "load_pretrained: .*comm is no mesh: mm3d.Mesh.comm, ..."),
                       (lambda: mm3d.AdamW(None, lr=1), "AdamW: NoneType is no model"),
                       (lambda: mm3d.save("a", None), "save: NoneType is no model"),
                       (lambda: mm3d.restore("a", None), "restore: NoneType is no model"),
                       (lambda: model.forward([1.0]), "x: list is no array")):
        with pytest.raises(TypeError, match=said):
            call()


@pytest.mark.ranks(1)
def test_models_of_tokens(comm):
    mesh = mm3d.Mesh(comm, scheme="3d")
    for name, value in (("tied", "no"), ("synchronous", "no"), ("ignored", 1.5),
                        ("dropout", "x"), ("z_loss", "x"), ("label_smoothing", "x"),
                        ("vocab", 0), ("label_smoothing", 1), ("z_loss", -0.1)):
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            mm3d.GPT(mesh, **SIZES, **{name: value})
    with pytest.raises(TypeError, match="schedule=5: a name or a Schedule"):
        mm3d.GPT(mesh, **SIZES, schedule=5)
    with pytest.raises(ValueError, match="every=2 layers are in none of layers=1"):
        mm3d.GPT(mesh, **SIZES, experts=mm3d.Experts(4))


@pytest.fixture
def model(scheme):
    return mm3d.Transformer(scheme, **SIZES, dtype="float64")


@pytest.mark.ranks(1, 8)
def test_activations_and_blocks(refused, comm, model):
    """Of the wrong shape, as when model.shard was forgotten, or type."""
    for shape in (8, 4), (8, 8, 4), (4, 4, 8), (8, 4, 8, 1), ():
        refused(lambda: model.shard(np.zeros(shape)), str(shape), "(8, 4, 8)", grid=model.grid)
    x, whole = model.random("x"), np.zeros((8, 4, 8 + (comm.size == 1)))
    refused(lambda: model.forward(whole), "x, ", str(whole.shape), "model.shard",
            grid=model.grid)
    refused(lambda: model.backward(x[:, :2], None), "dy, ", "model.shard", grid=model.grid)
    refused(lambda: model.forward(x.astype(np.float32)), "x, ", "float32", "float64",
            grid=model.grid)


@pytest.mark.ranks(8)
def test_a_whole_activation_instead_of_a_block_is_refused_alike_where_blocks_differ(refused, comm):
    scheme = mm3d.scheme("3d", comm)
    model = mm3d.Transformer(scheme, layers=1, hidden=9, heads=3, batch=3, seq=5)
    refused(lambda: model.forward(np.zeros((3, 5, 9), np.float32)), "(3, 5, 9)", "model.shard",
            grid=scheme.grid)


@pytest.mark.ranks(1, 8)
def test_states(refused, model):
    """Refused as a whole: nothing has been loaded."""
    state = {p.name: np.full(p.public_shape, 3.0) for p in model.parameters}
    before = [p.value.copy() for p in model.parameters]
    name = "layers.0.mlp.down.weight"
    for wrong, words in (
            ({n: a for n, a in state.items() if n != name}, ["missing"]),
            (state | {name: state[name].T}, ["(32, 8)", "(8, 32)"]),
            (state | {name: state[name].ravel()}, ["(32, 8)", "(256,)"])):
        refused(lambda: model.load(wrong), f"'{name}'", *words, grid=model.grid)
    refused(lambda: model.load(state | {"head": 1}), "'head'", "not in the model",
            grid=model.grid)
    assert all(map(np.array_equal, before, [p.value for p in model.parameters]))
