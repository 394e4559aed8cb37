"""Check what the READMEs name: commands, options, files, functions and variables exist."""
import argparse
import functools
import os
import pydoc
import re
import shlex
import shutil
from pathlib import Path

import pytest

from bench.__main__ import parser as bench
from bench.command_line import pipeline_options
from jobs.__main__ import parser as jobs
from refused import parsers_of
from support import ROOT, run_python

PROGRAMS = {"bench": functools.cache(bench), "jobs": functools.cache(jobs)}
NAMES = ("README.rst", *sorted(str(path.relative_to(ROOT)) for folder in (
    "mm3d", "bench", "jobs", "results") for path in (ROOT / folder).rglob("README.rst")))
# Commands and literals in one line each: they may go on in the next.
TEXTS = {name: re.sub(r"``[^`]+``", lambda found: " ".join(found[0].split()),
                      (ROOT / name).read_text().replace("\\\n", " ")) for name in NAMES}
LITERALS = {word for text in TEXTS.values() for word in re.findall(r"``([^`]+)``", text)}

# Of pytest, srun and mpirun; and a file that a job writes into its folder of results.
OTHERS = {"--several-ranks", "--slow", "--mpi", "--oversubscribe"}
WRITTEN = {"jobs/all.h5"}
TESTED = {"MM3D_CUDA_MPI"}    # variables that README gives to the tests


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb, and of each kind of one."""
    return {words[-1]: one for words, one in parsers_of(parser) if words}


def commands() -> set[tuple[str, str]]:
    """Each ``python -m bench`` and ``python -m jobs``: the program and what follows."""
    github = (path.read_text("utf-8") for path in (ROOT / ".github").rglob("*.md"))
    return {(program, words.strip()) for text in (*TEXTS.values(), *github)
            for program, words in re.findall(r"python -m (bench|jobs) ([^`#\n]+)", text)}


@pytest.mark.parametrize("program, words", sorted(commands()))
def test_commands_are_understood(program, words):
    first, *rest = shlex.split(words)
    assert first in verbs(PROGRAMS[program]()) or first == "--help"
    if rest == ["--schema"]:    # printed at once
        with pytest.raises(SystemExit, match="^(None|0)$"):
            PROGRAMS[program]().parse_args([first, *rest])
    elif rest:    # a verb alone may be mentioned without what it needs
        found = PROGRAMS[program]().parse_args([first, *rest])
        if first in ("dry", "plan"):
            # which refuses ranks that replicas do not divide
            pipeline_options.divide_among_replicas(found)


# Commands that `test_cheap_commands_end_as_told` leaves out, by a pattern of all their words.
LEFT_OUT = {
    "bench (calibrate|doctor --gpu whole|measure|reproduce|run|train)( .*)?": "measures, for long",
    "bench (doctor --gpu|measure gpu)": "needs a GPU",
    "bench doctor --ranks .*": "needs the launcher of a cluster",
    "bench judge .*": "needs the dumps of a program in PyTorch",
    "bench cluster .*": "some kernels refuse it; `tests/bench/cluster` runs it where they do not",
    "bench plan --(map|rules) .*": "predicts for minutes",
    "bench predict --machine mine-8.toml .*": "needs the file that calibrate measures",
    "bench report trace.json .*": "needs the trace of a run",
    "jobs (collect|pipeline|status|submit|train)( .*)?": "needs Slurm"}
# These are short all the same.
AMONG_THEM = {"bench measure matmul --shape 64 --repetitions 1", "bench reproduce --paper list"}
# The status of commands that do not end with 0.
STATUS = {"bench dry --ranks 16 --grid 4x2x2": 1}    # it says that the memory is too small


def executed() -> list[str]:
    """The commands that are cheap, as they stand in the pages."""
    lines = {f"{program} {' '.join(words.split())}" for program, words in commands()}
    assert AMONG_THEM <= lines
    return sorted(line for line in lines if line in AMONG_THEM
                  or not any(re.fullmatch(pattern, line) for pattern in LEFT_OUT))


def test_each_reason_to_leave_out_a_command_has_one():
    lines = {f"{program} {' '.join(words.split())}" for program, words in commands()}
    assert {pattern for pattern in LEFT_OUT
            if not any(re.fullmatch(pattern, line) for line in lines)} == set()
    assert all(any(line.startswith(begin) for line in executed()) for begin in STATUS)


def lay_out_results(folder: Path) -> None:
    """Make a folder with links to all results: of its folders none is that of the clone."""
    shutil.copytree(ROOT / "results", folder, copy_function=os.symlink,
                    ignore=shutil.ignore_patterns("local"))


def test_commands_of_pages_make_no_file_in_the_clone(tmp_path):
    lay_out_results(tmp_path / "results")
    inside = [*(tmp_path / "results").rglob("*")]
    assert (tmp_path / "results/experts/experts.txt").exists()
    assert any(map(Path.is_dir, inside)) and [
        path for path in inside if path.is_dir() and path.is_symlink()] == []


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize("line", executed())
def test_cheap_commands_end_as_told(line, tmp_path):
    """In a folder with all results; what a reader would have measured are three runs of a row."""
    lay_out_results(tmp_path / "results")
    runs = sorted((ROOT / "results/paper-emulated").glob("strong-3d-p064-*.h5"))
    for name in ("a", "b", "before", "after", "local/mine"):
        (tmp_path / "results" / name).mkdir(parents=True)
        for run in runs:
            shutil.copy(run, tmp_path / "results" / name)
    shutil.copy(runs[0], tmp_path / "FILE")
    done = run_python("-m", *shlex.split(line), timeout=380, cwd=tmp_path, PYTHONPATH=str(ROOT))
    wanted = next((status for begin, status in STATUS.items() if line.startswith(begin)), 0)
    assert done.returncode == wanted and done.stdout and "Traceback" not in done.stderr, (
        done.stdout + done.stderr)
    assert not [path for path in tmp_path.iterdir() if path.name not in (
        "results", "FILE", "all.h5")]    # nothing lies in the clone that git does not ignore


def test_options_are_those_of_some_verb():
    named = {found[1] for word in LITERALS if (found := re.match(r"(--[a-z-]+)", word))}
    programs = [program() for program in PROGRAMS.values()]
    known = {option for program in programs for one in (program, *verbs(program).values())
             for option in one._option_string_actions}
    assert len(named) > 10 and named - OTHERS <= known


def test_options_belong_to_the_verb_in_front():
    """In literals such as ``report --parts``, also with the name of the program in front."""
    known = {}
    for program in PROGRAMS.values():
        for name, one in verbs(program()).items():
            known.setdefault(name, set()).update(one._option_string_actions)
    found = (re.match(r"(?:bench |measure )*([a-z-]+) (--[a-z-]+)", word) for word in LITERALS)
    named = {one.groups() for one in found if one and one[1] not in ("pip", "srun", "pytest")}
    assert len(named) > 10 and {(verb, option) for verb, option in named
                                if option not in known.get(verb, ())} == set()


def test_files_are_there():
    places = {word for word in LITERALS if re.match(r"(bench|jobs|mm3d|tests)/[\w./-]+$", word)}
    for name, text in TEXTS.items():
        linked = re.findall(r"<([^<>:\s]+/[^<>:\s]+)>`_|^\.\. image:: (\S+)", text, re.MULTILINE)
        for target in filter(None, sum(linked, ())):
            place = os.path.normpath((ROOT / name).parent / target)
            places.add(str(Path(place).relative_to(ROOT)))
    missing = {place for place in places - WRITTEN if not (ROOT / place).exists()}
    assert len(places) > 20 and not missing


def test_names_of_the_library_are_there():
    named = {found[1] for word in LITERALS if (found := re.match(r"(mm3d(?:\.\w+)+)", word))}
    assert named and [name for name in named if pydoc.locate(name) is None] == []


def test_variables_are_read():
    named = {name for word in LITERALS for name in re.findall(r"MM3D_[A-Z0-9_]+", word)}
    for names, folders in ((named - TESTED, ("mm3d", "bench", "jobs")), (TESTED, ("tests",))):
        source = "".join(path.read_text() for folder in folders
                         for path in (ROOT / folder).rglob("*.py") if "readme" not in path.name)
        assert names <= named and [name for name in names if name not in source] == []


def test_pages_are_short():
    """The front page, that of results, and all together; and lines, but what programs print."""
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in NAMES}
    assert lengths["README.rst"] <= 225 and lengths["results/README.rst"] <= 40
    tour = 159    # of seven steps and their output, which no page had, where programs were listed
    judge = 70    # of what a dump is, which check finds which fault, and right differences
    assert len(NAMES) > 8 and sum(lengths.values()) <= 1618 + tour + judge
    assert [line for name in NAMES if name != "mm3d/examples/README.rst"
            for line in (ROOT / name).read_text("utf-8").splitlines() if len(line) > 100] == []


def test_committed_results_are_small():
    """At most 10 MB, without what is measured here."""
    results = ROOT / "results"
    assert sum(path.stat().st_size for path in results.rglob("*") if path.is_file()
               and "local" not in path.relative_to(results).parts) < 10e6
