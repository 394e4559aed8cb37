"""Check which room imports which, read from the source.

Each package is a stack of floors, the lowest first.  A room may import itself, the rooms on lower
floors, and no other; a new file needs no entry here.
"""

import ast
import functools
import gc
import re
import shutil
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Iterator

import pytest

import mm3d
from support import ROOT, run_python

FLOORS = {
    "mm3d": ["console names", "control_groups", "launcher shared_room",
             "mpi_start guard child_process", "arrays", "transport", "grid", "schemes", "model",
             "config", "tracing training", "checkpoints", "hugging_face", "pretrained",
             "selftest", "__init__", "examples"],
    "bench": ["document errors mpi statistics least_squares", "text_files", "agreement",
              "cases cluster",
              "records", "instruments", "checks", "experiments",
              "prediction validation doctor", "papers reports", "command_line", "verbs",
              "__main__ __init__"],
    "jobs": ["slurm own_options environment site_tables", "site", "fitting", "scripts",
             "standings", "single collect", "__main__ __init__"]}
BELOW = {"mm3d": set(), "bench": {"mm3d"}, "jobs": {"bench", "mm3d"}}
# Rooms that see less than what lies below them.
NARROWER = {
    "mm3d.schemes": {"mm3d.grid", "mm3d.arrays", "mm3d.launcher", "mm3d.names"},
    "mm3d.model": {"mm3d.schemes", "mm3d.grid", "mm3d.arrays", "mm3d.names"},
    "bench.records": {"bench.agreement", "bench.cases", "bench.errors", "bench.document",
                      "mm3d.console",
                      # whose parsers read the texts of a record
                      "bench.cluster", "mm3d.schemes", "mm3d.training",
                      "mm3d.grid", "mm3d.tracing",
                      # from which something is derived
                      "bench.statistics", "bench.least_squares", "mm3d.arrays", "mm3d.transport",
                      "mm3d.model"},
    "jobs": {"mm3d", "bench.cases", "bench.document", "bench.errors", "bench.text_files",
             "bench.instruments", "bench.prediction", "bench.records", "bench.reports",
             "bench.command_line", "bench.verbs", "bench.mpi"}}
PACKAGES = {
    "cupy": "mm3d.arrays bench.doctor", "cupy_backends": "mm3d.arrays",
    "ml_dtypes": "mm3d.arrays bench.checks", "numba": "mm3d.arrays",
    "mpi4py": "mm3d.transport mm3d.grid mm3d.guard mm3d.mpi_start mm3d.selftest "
              "mm3d.schemes mm3d.training.mesh mm3d.training.norms "
              "mm3d.training.gpt mm3d.examples bench",
    "safetensors": "mm3d.pretrained mm3d.examples",
    "h5py": "bench.records bench.validation mm3d.checkpoints",
    "scipy": "bench.prediction bench.statistics bench.least_squares "
             "bench.experiments.dump.computation",
    "pyroute2": "bench.cluster", "matplotlib": "bench.reports", "jinja2": "bench.reports jobs",
    "tabulate": "bench.reports jobs",
    "argparse": "mm3d.examples bench.command_line bench.verbs bench.__main__ jobs.__main__"}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
         for package in FLOORS for path in (ROOT / package).rglob("*.py")}


# The nodes of a syntax tree that any test here asks for.
ASKED = {ast.Import, ast.ImportFrom, ast.Compare, ast.match_case, ast.Subscript, ast.Attribute,
         ast.Dict, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef}


@pytest.fixture(scope="module", autouse=True)
def no_search_for_garbage():
    """Syntax trees are many objects, of which none is garbage."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


def asked(tree: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if type(node) in ASKED]


@functools.cache
def parsed(path: Path) -> list[ast.AST]:
    """What is asked for of a file, searched once."""
    return asked(ast.parse(path.read_text()))


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in it."""
    found = set()
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def room(name: str) -> str:
    """The package and the room of a dotted name, such as "bench.records"."""
    package, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    here = ROOT / package / first
    return f"{package}.{first}" if first and (here.is_dir() or here.with_suffix(
        ".py").exists()) else f"{package}.__init__"


@functools.cache
def floor(name: str) -> int:
    package, _, name = name.partition(".")
    return next(n for n, rooms in enumerate(FLOORS[package]) if name in rooms.split())


def upward(file: str) -> set[str]:
    """The rooms that a file imports and may not see."""
    own = room(file)
    package = own.partition(".")[0]
    found = set()
    for name in imported(FILES[file]):
        if name.partition(".")[0] not in FLOORS or name in FLOORS:
            continue
        other = room(name)
        if other == own or other == "mm3d.__init__" and package != "mm3d":
            continue
        if other.partition(".")[0] == package:
            if floor(other) >= floor(own):
                found.add(other)
        elif other.partition(".")[0] not in BELOW[package]:
            found.add(other)
        narrow = NARROWER.get(own) or NARROWER.get(package)
        if narrow and not {other, other.partition(".")[0]} & narrow and not (
                other.startswith(f"{package}.") and narrow is NARROWER.get(package)):
            found.add(other)
    return found


def test_no_import_runs_upward():
    found = {file: rooms for file in sorted(FILES) if (rooms := upward(file))}
    assert len(FILES) > 100 and not found


def test_reports_know_no_experiment():
    """What follows from samples is told by `bench.records.kinds`: who reads measures nothing."""
    assert not {file for file, path in FILES.items() if room(file) == "bench.reports"
                and "bench.experiments" in {room(name) for name in imported(path)
                                            if name.startswith("bench.")}}


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_every_room_has_a_floor(package):
    rooms = {room(file) for file in FILES if file.partition(".")[0] == package}
    assert {r.partition(".")[2] for r in rooms} <= set(" ".join(FLOORS[package]).split())


def test_files_have_no_circles():
    """The files can be put in an order in which each imports only those before it."""
    TopologicalSorter({file: {prefix for name in imported(path) if (prefix := next(
        (f for f in (name, name.rpartition(".")[0]) if f in FILES), ""))} - {file}
        for file, path in FILES.items()}).prepare()    # which names a circle


def test_libraries_are_known_to_few_rooms():
    """CuPy, MPI, HDF5 and the rest can each be replaced in one place."""
    for file, path in FILES.items():
        for name in imported(path):
            rooms = PACKAGES.get(name.partition(".")[0])
            assert rooms is None or any(
                f"{file}.".startswith(f"{r}.") for r in rooms.split()), (file, name)


# What may know a command line; the subject of `jobs.own_options` is what options programs take.
PROGRAMS = {"bench.command_line", "bench.verbs", "bench.__main__", "jobs.__main__",
            "jobs.own_options", "mm3d.examples"}


def given_words(nodes: list[ast.AST]) -> list[int]:
    """Lines of functions with a parameter for the words of a command line."""
    return [node.lineno for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if any(one.arg == "arguments" or one.annotation and "Namespace" in ast.unparse(
                one.annotation) for one in (*node.args.posonlyargs, *node.args.args,
                                            *node.args.kwonlyargs))]


def test_the_command_line_is_known_to_verbs_alone():
    """What is below them takes plain arguments, and can be used from Python; no verb imports
    another."""
    for file, path in FILES.items():
        rooms = {room(name) for name in imported(path) if name.startswith("bench.")}
        assert room(file) in PROGRAMS or not (
            rooms & PROGRAMS or given_words(parsed(path))), file
        assert room(file) != "bench.verbs" or "bench.verbs" not in rooms, file


@pytest.mark.parametrize("source", [
    "def measure(arguments, comm): pass", "f = lambda arguments: 0",
    "async def plot(*, chosen: Namespace | None): pass"])
def test_a_command_line_in_a_module_is_seen(source):
    assert given_words(asked(ast.parse(source))) == [1]


def test_only_backends_name_an_array_library():
    """Algorithms call functions of the arrays' own library, NumPy's nowhere."""
    for file, path in FILES.items():
        if file in ("mm3d.model.functional", "mm3d.model.vectors", "mm3d.grid.activations") or \
                file.startswith("mm3d.schemes."):
            assert not {n for n in imported(path) if n.partition(".")[0] == "numpy"}, file


def test_folders_stay_small():
    for folder in {path.parent for path in FILES.values()}:
        count = len([p for p in folder.glob("*.py") if p.name != "__init__.py"])
        most = 40 if folder.name == "verbs" else 26    # a verb is a file
        assert count <= most, f"{folder} has {count} modules"


# --- A scheme is known by what it states ------------------------------------------------------

def comparisons(nodes: list[ast.AST], names: set[str]) -> list[int]:
    """Lines on which something is compared with one of `names`, in a comparison or a case of a
    match, or looked up by it in a dictionary that is written there."""
    found = []
    for node in nodes:
        compared = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            compared = [node.pattern]
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.value, ast.Dict):
            compared = [*filter(None, node.value.keys)]    # {"3d": ...}[name] and .get(name)
        if names & {literal.value for part in compared for literal in ast.walk(part)
                    if isinstance(literal, ast.Constant)}:
            found.append(compared[0].lineno)
    return found


@pytest.mark.parametrize("line", [
    'if name == "3d": pass', 'if "3d" != row.scheme: pass', 'x = name in ("1d", "2d")',
    'x = name not in {"1d": 1}', 'x = (name, p) == ("3d", 8)', 'x = {"2d": f}[name](p)',
    'x = {"2d": f}.get(name)',
    'match name:\n    case "1d" | "2d": pass', 'x = [n for n in every if n != "serial"]'])
def test_a_comparison_with_a_scheme_s_name_is_seen(line):
    assert comparisons(asked(ast.parse(line)), set(mm3d.SCHEMES))


def test_no_module_asks_for_the_name_of_a_scheme():
    """What a scheme is or can do it states itself (`mm3d.schemes.scheme.Scheme`), so that a new
    one needs no line elsewhere."""
    files = {name: path for name, path in FILES.items() if room(name) != "mm3d.schemes"}
    found = {f"{name}:{line}" for name, path in files.items()
             for line in comparisons(parsed(path), set(mm3d.SCHEMES))}
    assert len(files) > 100 and not found, sorted(found)


def test_every_public_name_is_there():
    assert all(hasattr(mm3d, name) for name in mm3d.__all__)
    assert {"GPT", "AdamW", "LossScaling", "warmup_cosine", "save", "restore"} <= set(mm3d.__all__)


# --- The reach of a file ----------------------------------------------------------------------
# What one reads to understand a file of the library: the files that it imports, and those that
# these import.  All imports count, also those in functions.  A name counts for the file that
# defines it: of a package that only hands names on nothing is reached but their files.  What a
# registry imports by a text, such as a transport, is one of many that the caller chose, and does
# not count.

# Most files and lines; they may only fall.
REACH = {
    "mm3d.schemes.cube": (22, 3450),
    "mm3d.model.transformer": (52, 7750),    # with the layers of 2019 and of later models
    "mm3d.training.gpt": (82, 12350)}
EVENING = 3500    # lines
REGISTRIES = {"mm3d.__init__", "mm3d.arrays.backend", "mm3d.transport.choice",
              "mm3d.schemes.__init__",
              "mm3d.training.schedules.builders.__init__", "bench.verbs.__init__",
              "bench.reports.figures.every_figure", "bench.validation.files",
              "bench.records.kinds.__init__"}


def handed_on(package: str) -> dict[str, str]:
    """The names that a package hands on, by an import or by a table of names and modules."""
    found = {}
    for node in parsed(FILES[package]):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Dict):
            found |= {key.value: f"{value.value}.{key.value}"
                      for key, value in zip(node.keys, node.values)
                      if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
                      and value.value in FILES}
    return found


def origin(name: str) -> str | None:
    """The file that defines what a dotted name stands for; None outside of the project."""
    place = name
    while place and place not in FILES:
        if (package := f"{place}.__init__") in FILES:
            member = name.removeprefix(place)[1:].partition(".")[0]
            elsewhere = handed_on(package).get(member)
            return origin(elsewhere) if elsewhere else package
        place = place.rpartition(".")[0]
    return place or None


@functools.cache
def needed(file: str) -> set[str]:
    """The files that define what a file imports, or takes from the package `mm3d`."""
    taken = {f"mm3d.{node.attr}" for node in parsed(FILES[file])
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
             and node.value.id == "mm3d"}
    return {origin(name) for name in (imported(FILES[file]) - FLOORS.keys()) | taken} - {None}


def reach(file: str) -> set[str]:
    """The file and all that it needs, directly or not."""
    found, new = set(), {file}
    while new:
        found |= new
        new = {other for one in new for other in needed(one)} - found
    return found


def lines_of(files: set[str]) -> int:
    return sum(len(FILES[file].read_text().splitlines()) for file in files)


@pytest.mark.parametrize("file", REACH)
def test_a_door_leads_to_few_rooms(file):
    found = reach(file)
    files, lines = len(found), lines_of(found)
    assert files <= REACH[file][0] and lines <= REACH[file][1], (files, lines, sorted(found))


def test_only_registries_import_by_a_text():
    assert REGISTRIES == {f for f, path in FILES.items() if "import_module(" in path.read_text()}


def test_an_evening_s_files_are_all_on_the_list():
    """The list of the README has each file after those that it imports, and needs no other."""
    text = (ROOT / "README.rst").read_text().partition("**To read in one evening**")[2]
    listed = [f"{folder.replace('/', '.')}.{name.strip()}" for folder, names in re.findall(
        r"``(mm3d/\w+)``:([\w,\s]+)", text.partition("\n\n")[0]) for name in names.split(",")]
    assert "mm3d.schemes.cube" in listed and lines_of(set(listed)) <= EVENING
    for place, file in enumerate(listed):
        assert needed(file) <= set(listed[:place]), (file, needed(file) - set(listed[:place]))


# Most files and lines that a verb loads while it runs, or, of verbs that run for long, while it
# prints its --help, beyond those of `import mm3d`; they may only fall.  The goal of verbs that
# read is 60 files and 8,000 lines, of those that run 120 and 16,000.
LOADED = {
    "merge all.h5 experts/": (33, 3810),
    "compare experts/ experts/": (42, 5000),
    "compare paper-laptop/ paper-laptop/": (46, 5800),
    "validate experts/": (39, 4250),
    "validate paper-laptop/": (49, 5850),
    "validate large-messages/matmul": (67, 8090),    # it runs products, dry
    "report experts/": (52, 6350),
    "report experts/ --figures": (49, 6100),
    "report paper-laptop/": (54, 6900),
    "report paper-emulated/": (54, 6900),
    "draw cube": (66, 9050),    # it runs products and a layer, dry
    "draw schedule --schedule 1f1b --stages 2 --microbatches 2": (41, 3750),
    "run --help": (122, 16950),
    "reproduce --help": (120, 17300),
    "train --help": (159, 21500)}
SAY_LOADED = """
import contextlib, io, sys
import mm3d
def files():
    return {getattr(module, "__file__", None) for module in sys.modules.values()}
before = files()
from bench.__main__ import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        status = main(sys.argv[1:])
    except SystemExit as ended:    # by --help
        status = ended.code
assert not status
print(*filter(None, files() - before), sep="\\n")
"""


@pytest.mark.parametrize("command", LOADED)
def test_a_verb_loads_few_files(command, tmp_path):
    words = command.split()
    for place, word in enumerate(words):
        if "/" in word:    # the first of these files alone, in a folder
            shutil.copy(min((ROOT / "results").glob(f"{word}*.h5")), tmp_path)
            words[place] = str(tmp_path)
    done = run_python("-c", SAY_LOADED, *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
    found = {Path(line) for line in done.stdout.splitlines()} & {*FILES.values()}
    lines = sum(len(path.read_text().splitlines()) for path in found)
    assert done.returncode == 0 and len(found) > 20, done.stderr
    most_files, most_lines = LOADED[command]
    assert len(found) <= most_files and lines <= most_lines, (
        len(found), lines, sorted(str(path.relative_to(ROOT)) for path in found))


# Kernels take each array by itself, as BLAS does; the rest is known, and should get fewer.
MANY_PARAMETERS = {
    "adamw": 11, "attention_backward": 10, "window_attention_backward": 10,
    "_check_identities": 10, "train_by_torch": 10, "measure_side_by_side": 9,
    "Builder": 8, "Mesh": 8, "SummedParameter": 8}
# A stack is the keywords of a Transformer, and a plan what `Division` states, in single values; a
# machine, and a preset, is a table of a file that users write, with the names that stand there.
MANY_FIELDS = {"Settings": 14, "Stack": 13, "Choice": 13, "Machine": 24, "Preset": 22}
RECORDS = re.compile(r"\b(dataclass|Struct|NamedTuple|SiteTable)\b")    # decorators and bases
LEAST_PARAMETERS, LEAST_FIELDS = 7, 12    # that are enough anywhere


def long_definitions(nodes: list[ast.AST]) -> Iterator[tuple[str, int, bool]]:
    """Each function and record with many parameters or fields, and whether it is a class."""
    owners = {id(one): node for node in nodes if isinstance(node, ast.ClassDef)
              for one in node.body}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args,
                                         *node.args.kwonlyargs)]
            count = len(given) - (given[:1] in (["self"], ["cls"]))
            name = owners[id(node)].name if node.name == "__init__" else node.name
            if count > LEAST_PARAMETERS:
                yield name, count, False
        elif isinstance(node, ast.ClassDef) and any(
                RECORDS.search(ast.unparse(one)) for one in (*node.decorator_list, *node.bases)):
            count = sum(isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(
                one.annotation) for one in node.body)
            if count > LEAST_FIELDS:
                yield node.name, count, True


def test_functions_have_few_parameters_and_records_few_fields():
    """What runs is one value: `mm3d.config` alone states more, and what is listed here."""
    found = [one for file, path in FILES.items() if file != "mm3d.config"
             for one in long_definitions(parsed(path))]
    assert {name: count for name, count, is_class in found if not is_class} == MANY_PARAMETERS
    assert {name: count for name, count, is_class in found if is_class} == MANY_FIELDS
