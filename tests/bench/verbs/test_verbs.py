"""A verb of ``python -m bench`` is one file, and nothing else is started with it."""
import ast
import functools
import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

from bench import verbs
from bench.__main__ import parser
from support import ROOT, run_python

FILES = sorted((ROOT / "bench" / "verbs").glob("*.py"))
NAMES = [path.stem for path in FILES if path.stem != "__init__"]
SHARED = sorted((ROOT / "bench" / "command_line").glob("*.py"))
PROGRAMS = [*(ROOT / name / "__main__.py" for name in ("bench", "jobs")),
            *(ROOT / "mm3d" / "examples").glob("*.py"),
            ROOT / "jobs" / "own_options.py"]    # whose subject is what options programs take
NEW = '''"""Count to a number."""

GROUP = "Look at numbers"
ON_ALL_RANKS = False


def add_options(parser):
    parser.add_argument("number", type=int)


def run(arguments):
    print(*range(1, arguments.number + 1))
    return arguments.number
'''


def test_help_names_every_verb_once_in_the_order_in_which_a_person_needs_them():
    text = parser().format_help()
    listed = re.findall(r"^  (\w+) +[A-Z].+$", text, re.MULTILINE)
    assert sorted(listed) == NAMES and len(listed) >= 22
    assert listed[:3] == ["reproduce", "run", "table"] and listed[-1] in ("doctor", "start")
    headings = re.findall(r"^(\w.+):$", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) == 6
    assert verbs.ORDER == tuple(verbs.names())


@pytest.mark.parametrize("name", NAMES)
def test_a_verb_is_a_help_a_heading_options_and_a_function(name):
    module = verbs.load(name)
    about = verbs.first_line(module.__doc__)
    assert re.match(r"[A-Z].*\.$", about) and len(about) < 95
    assert verbs.entry(name) == verbs.Entry(name, module.GROUP, about)
    wanted = ["arguments", "comm"] if module.ON_ALL_RANKS else ["arguments"]
    assert list(inspect.signature(module.run).parameters) == wanted


def test_no_verb_imports_another():
    for path in FILES:
        assert not {name for name in imports(path) if name.startswith("bench.verbs.")}, path.name


def test_the_command_line_is_known_to_verbs_alone():
    """What is below them takes plain arguments, and can be used from Python."""
    wrong = [f"{path.relative_to(ROOT)}: {problem}" for folder in ("mm3d", "bench", "jobs")
             for path in sorted((ROOT / folder).rglob("*.py"))
             if path not in [*FILES, *SHARED, *PROGRAMS] for problem in problems(path)]
    assert wrong == []


def problems(path: Path) -> list[str]:
    """What a module knows of a command line."""
    if not re.search(r"argparse|command_line|verbs|arguments|Namespace", path.read_text()):
        return []    # to parse a file takes far longer
    found = [f"imports {name}" for name in imports(path)
             if name.startswith(("argparse", "bench.command_line", "bench.verbs"))]
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                text = ast.unparse(one.annotation) if one.annotation else ""
                if one.arg == "arguments" or "Namespace" in text:
                    found.append(f"line {node.lineno}: a parameter {ast.unparse(one)}")
    return found


@functools.lru_cache(1)
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_a_command_line_in_a_module_is_seen(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("from argparse import Namespace\nfrom bench.verbs import run\n\n"
                    "def measure(arguments, comm):\n    pass\n\n"
                    "def plot(chosen: Namespace | None, *arguments):\n    pass\n")
    assert sorted(problems(path)) == [
        "imports argparse.Namespace", "imports bench.verbs.run",
        "line 4: a parameter arguments", "line 7: a parameter chosen: Namespace | None"]


def test_a_new_verb_needs_nothing_but_its_file(tmp_path):
    for name in ("bench", "mm3d"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bench" / "verbs" / "count.py").write_text(NEW)
    done = run_python("-m", "bench", "count", "3", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "1 2 3\n"), done.stderr
    listed = run_python("-m", "bench", "--help", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "\nLook at numbers:\n  count        Count to a number.\n" in listed.stdout


def test_run_is_started_without_what_it_does_not_need():
    """64 ranks on two cores wait for every import."""
    done = run_python("-c", "import bench, sys; from bench.__main__ import main\n"
                            "try: main(['run', '--help'])\n"
                            "except SystemExit: print(*sys.modules)")
    found = set(done.stdout.splitlines()[-1].split())
    assert {"bench.verbs.run", "mpi4py.MPI"} <= found, done.stderr
    assert not found & {"matplotlib", "tabulate", "jinja2", "scipy"}
    assert {name for name in found if name.startswith("bench.verbs.")} == {"bench.verbs.run"}


@pytest.mark.parametrize("words, started", [
    (["predict", "--machine", "longhorn"], False),
    (["layer", "--hidden", "7", "--scheme", "3d"], True)])
def test_mpi_starts_only_for_verbs_of_ranks(words, started):
    """The files of MPI in shared memory stay when their process is killed."""
    done = run_python("-c", "import sys; from bench.__main__ import main\n"
                            "try: main(sys.argv[1:])\n"
                            "finally: from mpi4py import MPI; print(MPI.Is_initialized())", *words)
    assert done.stdout.splitlines()[-1] == str(started), done.stderr


def test_a_wrong_verb_is_refused_in_one_line():
    done = run_python("-m", "bench", "measure")
    assert done.returncode == 2 and done.stdout == ""
    assert "invalid choice: 'measure' (choose from" in done.stderr and "reproduce" in done.stderr


@pytest.mark.parametrize("program, words", [
    ("bench", ["x" * 100_000]),
    ("bench", ["run", "--dtype", "a b " * 20_000]), ("bench", ["plan", "--" + "z" * 100_000]),
    ("bench", ["cube", *["word"] * 20_000]), ("jobs", ["x" * 100_000]),
    ("bench", ["train", "--scheme", "y" * 100_000, "--checkpoints", "none"]),
    ("bench", ["dry", "--ranks", "8", "--hidden", "8", "--scheme", "y" * 100_000]),
    ("jobs", ["render", "--site", "cpu", "--table", "y" * 100_000])])
def test_long_texts_are_said_in_short(program, words, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(importlib.import_module(f"{program}.__main__").main(words))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "error: " in printed.err
    assert len(printed.err[printed.err.index("error: "):]) < 1100, len(printed.err)
