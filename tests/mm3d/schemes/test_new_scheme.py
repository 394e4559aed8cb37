"""A new parallelism is one new file: nothing else has to know of it."""
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.prediction import machine_model, planner, work_list
from bench.prediction.closed_form_plan import screen_grid, screen_grids
from bench.records import run_file
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.layout import Layout
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import REGISTERED
from mm3d.schemes.serial import Serial
from mm3d.tracing import dry_run
from mm3d.tracing.events import Gemm
from support import ROOT, run_python, run_ranks

LONGHORN = machine_model.load_machine("longhorn")
WEAK = dict(layers=24, hidden=8192, heads=128, batch=384, seq=512)    # the paper's, at 64 ranks

SMALL = dict(layers=2, hidden=240, heads=5, batch=16, seq=8)

# The paper's algorithms on a grid of columns: a scheme that is right, and that nobody knows.
COLUMNS = '''
"""A throw-away scheme."""

from mm3d.schemes.cube import Cube


class Columns(Cube):
    """2 x P/2 x 1."""

    name = "columns"
    title = "Columns"

    @classmethod
    def default_grid(cls, ranks):
        if ranks % 2:
            raise ValueError(f"{ranks} ranks are odd: start {ranks + 1}")
        return (2, ranks // 2, 1)
'''
# And one that is not: its weights' gradients are those of half the rows.
WRONG = COLUMNS + '''
    def product(self, *arguments):
        product = super().product(*arguments)
        backward = product.backward
        product.backward = lambda dC, B, saved: (backward(dC, B, saved)[0],
                                                 backward(dC, B, saved)[1] / 2)
        return product
'''


def copy_with(source: str, folder: Path) -> Path:
    """A copy of this project with one file more."""
    for name in ("mm3d", "bench", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", folder)
    (folder / "mm3d" / "schemes" / "columns.py").write_text(source)
    return folder


def model_tests(folder: Path):
    """Those of the copy's tests that compare the schemes with the serial model, on 8 ranks."""
    return run_ranks(8, "-m", "pytest", "-q", "-x", "tests/mm3d/model/test_transformer.py", "-k",
                     "(test_equals_serial or stored_once) and 8ranks and mpi", cwd=folder,
                     timeout=90)


def bench(folder: Path, ranks: int, *options: str):
    """``bench run`` of the new scheme in the copy."""
    return run_ranks(ranks, "-m", "bench", "run", "--scheme", "columns", "--table", "strong",
                     "--preset", "tiny", "--repetitions", "2", "--max-repetitions", "2",
                     "--out", "results/here", *options, cwd=folder)


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_new_scheme_is_tested_measured_and_shown(tmp_path):
    folder = copy_with(COLUMNS, tmp_path / "copy")
    done = model_tests(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    done = bench(folder, 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("done: strong Columns 4 ranks: forward")
    path, = (folder / "results" / "here").glob("*.h5")
    assert run_file.read_run(path).configuration["grid"] == "2 x 2 x 1"
    done = run_python("-m", "bench", "report", "results/here", cwd=folder)
    assert any(line.split()[:2] == ["Columns", "4"] for line in done.stdout.splitlines())
    done = run_python("-m", "bench", "report", "results/here", "--figures", cwd=folder)
    assert done.returncode == 0 and "average-step-time-tiny.png" in done.stdout, done.stderr
    done = run_python("-m", "bench", "plan", "--ranks", "4", "--hidden", "64", "--heads", "4",
                      "--layers", "1", "--batch", "8", "--seq", "16", "--top", "40", cwd=folder)
    plans = [line.split(maxsplit=1) for line in done.stdout.splitlines() if " x " in line]
    known, new = ({rest for name, rest in plans if name == scheme} for scheme in ("3d", "columns"))
    assert len(new) > 3 and known == new, done.stdout
    done = bench(folder, 3)
    assert done.returncode == 2 and "3 ranks are odd: start 4" in done.stderr


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_new_scheme_that_is_wrong_is_found(tmp_path):
    folder = copy_with(WRONG, tmp_path / "copy")
    done = model_tests(folder)
    assert done.returncode != 0
    assert re.search(r"columns *, float64: \[.*'layers.0.attention.proj.weight: \d",
                     done.stdout), done.stdout
    done = bench(folder, 4)
    assert done.returncode == 1 and "differs from the serial scheme" in done.stdout
    assert not list((folder / "results" / "here").glob("*.h5"))


def has_grids(name: str, ranks: int) -> bool:
    """Whether the scheme can use so many ranks."""
    try:
        return bool(find_scheme(name).grids(ranks))
    except ValueError:
        return False


@pytest.fixture
def renamed(request):
    """The name of a known scheme, and another under which the same algorithms are registered."""
    class Renamed(find_scheme(request.param)):
        name = "renamed"
    yield request.param, "renamed"
    del REGISTERED["renamed"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("renamed, ranks", [
    (name, ranks) for name, cls in REGISTERED.items() if cls.divides_work
    for ranks in (8, 64, 256) if has_grids(name, ranks)], indirect=["renamed"])
def test_under_another_name_a_scheme_has_the_same_grids_and_plans(renamed, ranks):
    """To the last digit, by closed forms for the paper's sizes and with dry runs of the best."""
    grids = find_scheme(renamed[0]).grids(ranks)
    assert find_scheme(renamed[1]).grids(ranks) == grids
    for grid in grids:
        known, new = (screen_grid(name, grid, LONGHORN, Stack(**WEAK, recompute="full"))
                      for name in renamed)
        assert replace(known, scheme="renamed") == new
    known, new = (planner.rank_plans(ranks, LONGHORN, Stack(**SMALL), top=2, scheme=name)
                  for name in renamed)
    assert [replace(p, scheme="renamed") for p in known] == new
    assert {p.grid for p in new} == set(grids) and new[0].traced
    assert all(p.traced for p in new) == (len(new) <= planner.TRACED)


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("renamed", ["3d"], indirect=True)
def test_grids_with_equal_layouts_are_counted_together_if_the_scheme_can(renamed, compares):
    """Plans are those of each grid alone, to the last digit, also of closed forms that compare.

    Grids of other numbers of ranks are among them.
    """
    asked = []

    class Counted(find_scheme("3d")):
        name = "renamed"

        @classmethod
        def product_moves(cls, sizes, product, **options):
            asked.append(compares and max(sizes["x"], sizes["y"]))
            return super().product_moves(sizes, product, **options)
    every = [("renamed", grid) for ranks in (720, 36) for grid in Counted.grids(ranks)]
    together, calls = screen_grids(every, LONGHORN, Stack(**WEAK)), len(asked)
    assert together == [screen_grid(*one, LONGHORN, Stack(**WEAK)) for one in every]
    assert len(every) == 270 + 36 and (calls > len(every)) == compares


@pytest.mark.parametrize("renamed", ["3d"], indirect=True)
def test_another_name_is_among_all_candidates_and_trials(renamed):
    candidates = list(planner.list_candidates(256))
    known, new = ([grid for scheme, grid in candidates if scheme == name] for name in renamed)
    assert known == new == find_scheme("3d").grids(256)
    works = work_list.list_works(8, [(64, 48, 32)], [(96, 8, 8, 32, 2)])
    known, new = ([replace(one, scheme="") for one in works if one.scheme == name]
                  for name in renamed)
    assert known == new and {one.kind for one in new} == {"matmul", "layer"}


@pytest.mark.parametrize("name, ranks", [(name, ranks) for name, cls in REGISTERED.items()
                                         for ranks in (4, 8) if has_grids(name, ranks)])
def test_local_products_are_those_of_a_dry_run(name, ranks):
    """As many as rank 0 does forward for each linear layer, of the size of its largest."""
    products = {"attention.qkv": ProductShape("up", 128, 45, 135, (1, 27)),
                "attention.proj": ProductShape("down", 128, 45, 45, (9, 1)),
                "mlp.up": ProductShape("up", 128, 45, 180),
                "mlp.down": ProductShape("down", 128, 180, 45)}
    for grid in find_scheme(name).grids(ranks):
        run = dry_run.trace_step(name, ranks, grid, layers=1, hidden=45, heads=5, batch=16, seq=8)
        for part, product in products.items():
            done = {event: times for (phase, where, event), times in run.events.items()
                    if (phase, where, type(event)) == ("forward", part, Gemm)}
            local, = find_scheme(name).local_products(grid, product)
            assert local.count == sum(done.values()), (grid, part)
            assert local[:3] == tuple(max(getattr(event, side) for event in done)
                                      for side in "mnk"), (grid, part)


class Plain(Product):
    """C = A B on each rank, from the three forms alone."""

    def __init__(self, weight):
        self.weight = weight

    def ab(self, A, B):
        return matmul(A, B)

    def abt(self, dC, B):
        return matmul_nt(dC, B)

    def atb(self, A, dC):
        return matmul_tn(A, dC)


class FromScratch(Serial):
    """The serial scheme with `Plain` products."""

    @classmethod
    def product(cls, *arguments):
        return Plain(Layout("," * (len(arguments[2]) - 1)))


@pytest.mark.parametrize("recompute", ["none", "full+selective"])
def test_a_product_needs_three_forms(recompute):
    """Forward, backward and a tied head follow from them."""
    found = []
    for kind in (Serial, FromScratch):
        mesh = mm3d.Mesh(MPI.COMM_SELF, 1, "serial")
        mesh.scheme.__class__ = kind
        model = mm3d.GPT(mesh, layers=1, hidden=8, heads=2, vocab=11, batch=2, seq=4,
                         recompute=recompute, dtype="float64")
        loss = model.step(*(np.arange(8).reshape(2, 4) + n for n in range(2)))
        found.append([loss, *(p.grad.copy() for p in model.trained)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert len(found[0]) > 10
