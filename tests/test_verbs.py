"""A verb of ``python -m bench`` is one file, and nothing else is started with it."""
import ast
import inspect
import re
import shutil

import pytest

from bench import verbs
from bench.__main__ import parser
from support import ROOT, run_python

FILES = sorted((ROOT / "bench" / "verbs").glob("*.py"))
NAMES = [path.stem for path in FILES if path.stem not in ("__init__", *verbs.SHARED)]
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
    assert len(headings) == len(set(headings)) == 5
    assert verbs.ORDER == tuple(verbs.names())


@pytest.mark.parametrize("name", NAMES)
def test_a_verb_is_a_help_a_heading_options_and_a_function(name):
    module = verbs.load(name)
    about = verbs.first_line(module.__doc__)
    assert re.match(r"[A-Z].*\.$", about) and len(about) < 95
    assert verbs.entry(name) == (name, module.GROUP, about)
    wanted = ["arguments", "comm"] if module.ON_ALL_RANKS else ["arguments"]
    assert list(inspect.signature(module.run).parameters) == wanted
    imported = {f"{node.module}.{alias.name}" for node in ast.walk(ast.parse(
        (ROOT / "bench" / "verbs" / f"{name}.py").read_text()))
        if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {word.split(".")[2] for word in imported if word.startswith("bench.verbs.")} <= {
        *verbs.SHARED}


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
    assert {name for name in found if name.startswith("bench.verbs.")} <= {
        "bench.verbs.run", *(f"bench.verbs.{shared}" for shared in verbs.SHARED)}


def test_a_wrong_verb_is_refused_in_one_line():
    done = run_python("-m", "bench", "measure")
    assert done.returncode == 2 and done.stdout == ""
    assert "invalid choice: 'measure' (choose from" in done.stderr and "reproduce" in done.stderr
