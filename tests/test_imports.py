"""Who may import whom, read from the source."""
import ast
import sys
from pathlib import Path
from typing import Iterator

import pytest

import mm3d

PACKAGE = Path(mm3d.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
           for path in PACKAGE.rglob("*.py")}

# idle <- pool, regions; calls <- meeting <- memory <- shared; sums <- transport, shared; pool,
# elementwise <- backend <- transport <- shared, wire <- device <- choice, axis <- grid <- layout
# <- space <- contract <- schemes, and functional <- space, layers <- transformer: no module sees
# one above it, layers see no scheme.
ARRAYS = {"axis", "backend", "grid", "layout", "space"}
MAY_IMPORT = {
    "idle": set(),
    "pool": {"idle"},
    "elementwise": set(),
    "backend": {"elementwise", "pool"},
    "sums": set(),
    "transport": {"backend", "sums"},
    "calls": set(),
    "regions": {"idle"},
    "meeting": {"calls"},
    "memory": {"calls", "idle", "meeting", "regions"},
    "nodes": {"memory"},
    "shared": {"backend", "calls", "environment", "meeting", "memory", "pool", "sums",
               "transport"},
    "kernels": set(),
    "cublas": set(),
    "gpu": {"backend", "cublas", "environment", "kernels"},
    "wire": {"backend", "transport"},
    "device": {"backend", "wire"},
    "proof": {"environment"},
    "choice": {"backend", "device", "nodes", "proof", "shared", "transport"},
    "axis": {"backend", "transport"},
    "shape": set(),
    "grid": {"axis", "backend", "choice", "environment", "nodes", "shape", "transport"},
    "selftest": {"axis", "environment", "grid", "guard"},
    "layout": {"axis", "backend", "grid", "shape"},
    "space": {"axis", "backend", "functional", "grid", "layout", "shape"},
    "closed_form": set(),
    "matrix_product": ARRAYS - {"space"},
    # Of the schemes the registry alone, which looks into the folder.
    "contract": ARRAYS | {"closed_form", "matrix_product", "schemes", "shape"},
    "schemes.__init__": set(),
    "functional": {"backend", "elementwise"},
    "parameter": {"axis", "backend", "grid", "layout", "transport"},
    "overlap": {"axis", "backend"},
    "layers": {"backend", "contract", "functional", "overlap", "parameter", "space"},
    "draws": set(),
    "recompute": set(),
    "segments": {"backend", "layers", "overlap"},
    "sizes": set(),
    "parallelism": {"closed_form", "contract", "shape"},
    "specs": {"closed_form", "contract", "layers", "parallelism", "space"},
    "chain_specs": {"layers", "parallelism", "segments", "specs"},
    "layer_specs": {"closed_form", "layers", "parallelism", "specs"},
    "transformer": {"backend", "chain_specs", "contract", "draws", "layer_specs", "layers",
                    "overlap", "recompute", "segments", "sizes", "specs", "transport"},
    "cost": {"chain_specs", "closed_form", "parallelism", "specs"},
    "environment": set(),
    "guard": set(),
    "statistics": set(),
    "timing": {"events", "statistics"},
    "record": {"shape"},
    "atomic": set(),
    "store": {"atomic", "axis", "events", "record", "shape"},
    "merged": {"atomic", "record", "store"},
    "events": set(),
    "trace": {"events"},
    "observed_calls": {"axis", "events", "transport"},
    "observe": {"events", "observed_calls"},
    "spans": {"axis", "events"},
    "hearsay": set(),
    "watchdog": {"events", "hearsay", "nodes", "observe"},
    "hollow": {"backend", "elementwise", "events", "pool", "trace"},
    "dry": {"backend", "contract", "events", "hollow", "observe", "recompute", "trace",
            "transformer", "transport"},
    "__init__": {"axis", "environment", "gpu", "cost", "grid", "guard", "layout", "contract",
                 "sizes", "space", "transformer", "watchdog"}}
SCHEME = ARRAYS | {"closed_form", "contract", "matrix_product", "overlap"}

# Packages that one file alone, or two, may know.
ONLY_IN = {"cupy": {"gpu"}, "cupy_backends": {"gpu"}, "ml_dtypes": {"gpu"},
           "mpi4py": {"grid", "contract", "guard", "nodes", "proof", "selftest"},
           "h5py": {"record", "store", "merged"},
           "threadpoolctl": {"environment"}}
TYPE_HINTS_ONLY = {("axis", "mpi4py"), ("choice", "mpi4py"), ("meeting", "mpi4py"),
                   ("memory", "mpi4py"), ("shared", "mpi4py")}
EVERYWHERE = {"numpy", *sys.stdlib_module_names}


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: Path) -> set[str]:
    """The modules of mm3d among them."""
    names = {name.removeprefix("mm3d.") for name in imports(path) if name.startswith("mm3d.")}
    return {max((m for m in [*MODULES, "schemes"] if f"{name}.".startswith(f"{m}.")), key=len,
                default=name) for name in names}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_see_only_what_is_below(module):
    """A module that is new states in MAY_IMPORT what it needs; a scheme needs no entry."""
    scheme = module.startswith("schemes.") and module != "schemes.__init__"
    allowed = SCHEME if scheme else MAY_IMPORT[module]
    assert own(MODULES[module]) <= allowed


@pytest.mark.parametrize("module", sorted(MODULES))
def test_libraries_are_known_to_one_file(module):
    """CuPy, MPI and HDF5 can each be replaced in one place; nothing sees the benchmarks."""
    packages = {name.partition(".")[0] for name in imports(MODULES[module])}
    foreign = packages - EVERYWHERE - {"mm3d"}
    allowed = {package for package, files in ONLY_IN.items() if module in files}
    allowed |= {package for file, package in TYPE_HINTS_ONLY if file == module}
    assert foreign <= allowed


def test_only_backend_names_an_array_library():
    """Algorithms call functions of the arrays' own library, NumPy's nowhere."""
    for module in ["functional", "space", *(m for m in MODULES if m.startswith("schemes."))]:
        assert not {name for name in imports(MODULES[module]) if name.startswith("numpy")}, module


def test_the_order_has_no_circles():
    """Modules can be ordered so that each imports only those before it."""
    left = {m: own(path) - {"schemes"} for m, path in MODULES.items() if m != "__init__"}
    while left:
        ready = [m for m, needs in left.items() if not needs & left.keys()]
        assert ready, f"a circle among {sorted(left)}"
        for m in ready:
            del left[m]


# --- A scheme is known by what it states ------------------------------------------------------

def comparisons(source: str, names: set[str]) -> list[int]:
    """Lines on which something is compared with one of `names`, in a comparison or a case of a
    match, or looked up by it in a dictionary that is written there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        compared = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            compared = [node.pattern]
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.value, ast.Dict):
            compared = [node.value]    # {"3d": ...}[name] and {"3d": ...}.get(name)
        if names & {literal for part in compared for literal in literals(part)}:
            found.append(compared[0].lineno)
    return found


def literals(node: ast.AST | None) -> Iterator[object]:
    """The constants in an expression or pattern, in its tuples, lists, sets and keys."""
    if isinstance(node, ast.Constant):
        yield node.value
    members = {ast.Dict: "keys", ast.MatchOr: "patterns", ast.MatchSequence: "patterns"}
    for member in getattr(node, members.get(type(node), "elts"), ()):
        yield from literals(member)
    if isinstance(node, ast.MatchValue):
        yield from literals(node.value)


@pytest.mark.parametrize("line", [
    'if name == "3d": pass', 'if "3d" != row.scheme: pass', 'x = name in ("1d", "2d")',
    'x = name not in {"1d": 1}', 'x = (name, p) == ("3d", 8)', 'x = {"2d": f}[name](p)',
    'x = {"2d": f}.get(name)',
    'match name:\n    case "1d" | "2d": pass', 'x = [n for n in every if n != "serial"]'])
def test_a_comparison_with_a_scheme_s_name_is_seen(line):
    assert comparisons(line, set(mm3d.SCHEMES))


@pytest.mark.parametrize("line", [
    'x = mm3d.scheme("serial")', 'PAPER = ("1d", "2d", "3d")', 'x = grids["3d"] == (2, 2)',
    'x = size in ("2dx", 3)', 'f(name, like="3d")', 'x = scheme("3d").grid == grid'])
def test_a_name_as_data_is_not_a_comparison(line):
    assert not comparisons(line, set(mm3d.SCHEMES))


def test_no_module_asks_for_the_name_of_a_scheme():
    """What a scheme is or can do it states itself (`mm3d.contract.Scheme`), so that a new one
    needs no line elsewhere."""
    files = [path for folder in ("mm3d", "bench", "jobs") for path in
             (PACKAGE.parent / folder).rglob("*.py")
             if path.parent != PACKAGE / "schemes"]
    found = {f"{path.relative_to(PACKAGE.parent)}:{line}" for path in files
             for line in comparisons(path.read_text(), set(mm3d.SCHEMES))}
    assert len(files) > 100 and not found, sorted(found)
