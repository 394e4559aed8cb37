"""The examples print what their page shows."""

import shlex

import pytest

from mm3d.examples import product, train, transformer
from support import ROOT

PROGRAMS = {"product": product, "transformer": transformer, "train": train}


def shown() -> list[tuple[int, list[str], list[str]]]:
    """Return the ranks, words and output of each command of the page."""
    found, lines = [], (ROOT / "mm3d/examples/README.rst").read_text("utf-8").splitlines()
    for line in lines:
        if line.startswith("    $ "):
            words = shlex.split(line)[1:]
            ranks = int(words[2]) if words[0] == "mpirun" else 1
            found.append((ranks, [word.removeprefix("mm3d.examples.")
                                  for word in words[words.index("-m") + 1:]], []))
        elif line.startswith("    ") and found:
            found[-1][2].append(line.strip())
    # A command with nothing below it prints what the one before it prints.
    return [(ranks, words, output or found[at - 1][2])
            for at, (ranks, words, output) in enumerate(found)]


def test_the_page_shows_every_program():
    assert {words[0] for _, words, _ in shown()} == set(PROGRAMS)


@pytest.mark.ranks(1, 8)
def test_programs_print_what_the_page_shows(comm, capfd):
    for ranks, (name, *words), output in shown():
        if ranks != comm.size:
            continue
        if name == "train" and comm.size > 1:    # whose losses are those of one rank's steps
            words, output = [*words, "--steps", "6"], output[:2]
        capfd.readouterr()
        PROGRAMS[name].main(*([words] if words or name != "product" else []), comm=comm)
        printed = capfd.readouterr().out.splitlines()
        assert printed == (output if comm.rank == 0 else []), name
