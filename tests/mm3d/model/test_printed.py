"""Models, parameters and traffic say what they are, on ranks that do not exist."""
from collections import Counter
from html import unescape

import pytest

import mm3d
from mm3d.arrays import backend as backends
from mm3d.grid.axis import Traffic, TrafficCounts
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.transport.communicators import DryCommunicator

SIZES = {"layers": 2, "hidden": 48, "heads": 4, "batch": 8, "seq": 16}


def model_of(scheme, grid, rank=0, recompute="none", **options):
    ranks = mm3d.SCHEMES[scheme].grid_shape(grid).ranks
    backend = backends.get(DryBackend())
    made = mm3d.scheme(scheme, DryCommunicator(ranks, rank), grid, backend, **options)
    return mm3d.Transformer(made, recompute=recompute, **SIZES)


def test_a_model_lists_its_parameters_equal_layers_once():
    model = model_of("3d", (2, 2, 2))
    title, heads, *rows = str(model).splitlines()
    assert title == ("Transformer on Grid(x=2, y=2, z=2; rank 0 at (0, 0, 0)): 56544 elements, "
                     "7224 here")
    assert heads.split() == ["parameter", "shape", "layout", "here"] and len(rows) == 10
    assert rows[6].split("  ")[0] == "layers.*.mlp.up.weight, 2 times"
    assert rows[6].split()[-5:] == ["(48,", "192)", '"zx,y"', "(12,", "96)"]
    assert repr(model.parameters[0]) == ("Parameter('layers.0.ln1.weight', (48,) in layout "
                                         "'zx@y'; here (12,) of float32)")


def test_a_product_says_what_is_stored_where_and_what_travels():
    scheme = model_of("3d", (2, 2, 2), rank=1).scheme
    assert repr(scheme.matrix_product(scheme.grid, "ab", (24, 16, 32))).splitlines() == [
        "CubeMatrixProduct ab on Grid(x=2, y=2, z=2; rank 1 at (0, 0, 1)); words of all ranks "
        "forward: 1664",
        "  A (24, 16) as 'xy,z', here (6, 8), travels along y",
        "  B (16, 32) as 'z,yx', here (8, 8), travels along x",
        "  C (24, 32) as 'xz,y', here (6, 16), travels along z"]


def test_an_optimizer_says_its_numbers_and_what_it_changes():
    model = model_of("3d", (2, 2, 2))
    model.comm = DryCommunicator(1)    # whose numbers it compares
    said = repr(mm3d.AdamW(model, lr=1e-3, loss_scaling=mm3d.LossScaling(8.0)))
    assert said.startswith("AdamW(lr=0.001, ") and "beta1=0.9" in said
    assert said.endswith("steps=0) of 24 parameters, 7224 elements here")
    assert repr(mm3d.LossScaling(8.0)).startswith("LossScaling(scale=8.0, skipped=0; growth 2.0 ")


def test_words_are_a_table_by_phase():
    sizes = mm3d.ModelSizes(**SIZES)
    found = mm3d.cost.words("3d", dict(x=2, y=1, z=1), sizes)
    heads, *rows, last = map(str.split, str(found).splitlines())
    assert heads[:3] == ["phase", "collective", "along"] and rows[0][0] == "forward"
    assert last == ["all", str(sum(int(row[-1]) for row in rows))]


@pytest.mark.parametrize("scheme, grid, more", [
    ("3d", (2, 2, 2), {}), ("3d", (2, 1, 2), {"keep": "weight"}), ("1d", (4,), {}),
    ("2.5d", (2, 2, 2), {"recompute": "full"})])
def test_traffic_stands_beside_the_closed_form_of_a_step(scheme, grid, more):
    """Over all ranks the words are the closed form's; the table has both."""
    counted, ranks = Counter(), mm3d.SCHEMES[scheme].grid_shape(grid).ranks
    for rank in range(ranks):
        model = model_of(scheme, grid, rank, **more)
        y, saved = model.forward(model.random("input"))
        model.backward(model.random("output gradient"), saved)
        counted.update({key: one.words for key, one in model.traffic().items()})
    found = mm3d.cost.step_words(model)
    assert {key: words * ranks for key, words in found.items()} == counted
    heads, *rows, last = model.traffic().beside(found).splitlines()
    assert heads.split() == ["collective", "along", "calls", "words", "closed", "form,", "mean"]
    assert len(rows) == len(found) and last.split()[-1] == f"{sum(found.values()):g}"


def test_traffic_prints_what_only_the_closed_form_has():
    counts = TrafficCounts({("x", "all_gather"): Traffic(1, 1, 6)})
    assert counts.beside({("y", "reduce"): 1.5}).splitlines()[1:] == [
        "all_gather     x          1          6                  0",
        "reduce         y          0          0                1.5",
        "all                       1          6                1.5"]
    assert "closed" not in str(counts)


def test_a_notebook_shows_what_is_printed():
    """All of it, in letters of one width, and nothing of it is read as HTML."""
    model = model_of("3d", (2, 2, 2))
    mesh = mm3d.Mesh(DryCommunicator(8), stages=2, grid=(2, 2, 1),
                     backend=backends.get(DryBackend()))
    gpt = mm3d.GPT(mesh, vocab=64, microbatches=2, **SIZES)
    assert str(gpt).startswith(f"GPT on {mesh!r}: ") and "Mesh(2 stages; rank 0 is" in repr(mesh)
    for one in (model, model.parameters[0], model.traffic(), mesh, gpt):
        shown = one._repr_html_()
        assert shown.startswith("<pre>") and "<" not in shown[5:-6], shown
        assert unescape(shown.removeprefix("<pre>").removesuffix("</pre>")) == str(one)
    assert TrafficCounts({("<x>", "a & b"): Traffic()})._repr_html_().count("&lt;x&gt;") == 1


def test_ipython_takes_it_for_html():
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is missing")
    found, _ = formatters.DisplayFormatter().format(TrafficCounts(), include=["text/html"])
    assert found["text/html"].startswith("<pre>collective")
