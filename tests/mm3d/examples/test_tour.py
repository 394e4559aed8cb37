"""The tour's commands print, and its programs compute, what its page shows."""

import re
import shlex
import sys

import pytest

from bench.__main__ import main as bench
from mm3d.child_process import run_child
from mm3d.examples import product, train, transformer
from mpi4py import MPI
from support import ROOT

PROGRAMS = {"product": product, "transformer": transformer, "train": train}
PAGE = (ROOT / "mm3d/examples/README.rst").read_text("utf-8")
LONG = "reproduce"    # takes a minute


def commands() -> list[tuple[int, list[str], list[str]]]:
    """The ranks, words and output of each command of the page, in order."""
    found = []
    for line in PAGE.splitlines():
        if line.startswith("    $ "):
            words = shlex.split(line)[1:]
            ranks, words = (int(words[2]), words[3:]) if words[0] == "mpirun" else (1, words)
            found.append((ranks, words[1:], []))
        elif line.startswith("    ") and found:
            found[-1][2].append(line.strip())
        elif line.strip():
            found += [(0, [], [])]    # what follows belongs to no command
    return [one for one in found if one[1]]


def programs() -> dict[str, str]:
    """The programs of the page by name."""
    blocks = re.findall(r"\.\. code-block:: python\n   :name: (\S+)\n\n((?:   .*\n|\n)+)", PAGE)
    return {name: re.sub("^   ", "", text, flags=re.MULTILINE) for name, text in blocks}


def differences(printed: str, shown: list[str]) -> list[str]:
    """What is printed, unless it is what is shown, where ``...`` stands for anything.

    Rounding of one processor is a few times that of another.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    text = "\n".join(re.escape(line) for line in shown if line)
    pattern = re.sub(r"\d(e\\-1[56])", r"\\d\1", text.replace(re.escape("..."), ".*"))
    return [] if re.fullmatch(pattern, "\n".join(lines), re.DOTALL) else lines or ["nothing"]


def run(words: list[str], comm) -> None:
    """Run a command of the page on these ranks."""
    first, *rest = words
    if first.endswith(".py"):
        code = programs()[first].replace("MPI.COMM_WORLD", "comm")
        exec(compile(code, first, "exec"), {"comm": comm})
    elif first == "-c":
        exec(rest[0])
    elif rest[0] == "bench":
        assert bench(rest[1:]) == 0
    else:
        name = rest[0].removeprefix("mm3d.examples.")
        options = rest[1:]
        PROGRAMS[name].main(*([options] if name != "product" else []), comm=comm)


CASES = [(number, ranks, words, shown) for number, (ranks, words, shown) in enumerate(commands())]


def test_the_page_has_seven_steps_with_questions_and_answers():
    assert re.findall(r"^\*\*(\d)\. ", PAGE, re.MULTILINE) == list("1234567")
    assert re.findall(r"^\*Question (\d): ", PAGE, re.MULTILINE) == list("1234567")
    answers = PAGE.partition("Answers\n")[2].partition("Terms\n")
    assert re.findall(r"^(\d)\. ", answers[0], re.MULTILINE) == list("1234567")
    assert len(re.findall(r"\*\*[^*]+\*\*", answers[2])) >= 20
    used = {words[0] if words[0].endswith(".py") else words[1] for _, _, words, _ in CASES}
    assert {f"mm3d.examples.{name}" for name in PROGRAMS} | set(programs()) <= used


@pytest.mark.ranks(1, 8)
def test_commands_print_what_the_page_shows(comm, capfd):
    ran = 0
    for _, ranks, words, shown in CASES:
        if ranks != comm.size or LONG in words:
            continue
        if "mm3d.examples.train" in words and comm.size > 1:    # its losses: those of one rank
            words, shown = [*words, "--steps", "6"], shown[:2]
        capfd.readouterr()
        run(words, comm)
        printed = capfd.readouterr().out
        assert differences(printed, shown if comm.rank == 0 else []) == [], words
        ran += 1
    assert ran == 4


@pytest.mark.parametrize("program, words", [
    (transformer, ["--grid", "3", "1", "1"]), (train, ["--data", "3"]), (train, ["--zero", "7"])])
def test_a_grid_that_the_ranks_do_not_have_is_a_line(program, words):
    with pytest.raises(SystemExit, match="^error: .*"):
        program.main(words, MPI.COMM_SELF)


@pytest.mark.slow
@pytest.mark.limit(900)
def test_the_tables_are_measured_as_the_page_shows(tmp_path):
    (_, _, words, shown), = (one for one in CASES if LONG in one[2])
    found = run_child([sys.executable, *words[:-1], str(tmp_path)], cwd=ROOT)
    assert found.status == 0 and differences(found.out, shown) == [], found.err


@pytest.mark.parametrize("printed, shown, same", [
    ("a 1 s\nb", ["a ... s", "b"], True), ("a 1 s\nc", ["a ... s", "b"], False),
    ("x\na\nb\ny", ["...", "a", "b", "..."], True), ("", ["a"], False), ("a", [], False),
    ("by 2e-15", ["by 1e-15"], True), ("by 1e-14", ["by 1e-15"], False),
    ("by 2e-3", ["by 1e-3"], False)])
def test_differences_are_found(printed, shown, same):
    assert (differences(printed, shown) == []) == same
