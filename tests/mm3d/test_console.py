"""What cannot be printed ends nothing, and what can be printed stands there as it was."""
import ast
import io
import os
import pty
import re
import subprocess
import sys

import pytest

from mm3d import console, guard
from support import ROOT

# Programs that other interpreters run, and those that import neither NumPy nor MPI.
ASIDE = ("serve.py", "mpirun.py", "head.py", "console.py")
PRINTS = """
import sys, warnings
from mm3d.console import complain, protect, say
protect()
say("first", "r\\xe9sultats", b"caf\\xe9".decode("utf-8", "surrogateescape"))
print("by a library " * 1000)
complain("to standard error")
warnings.warn("a warning")
say("last")
open(sys.argv[1], "w").close()
"""


def run(tmp_path, source, redirection="", **variables):
    """Run a program under a shell that redirects its output; return what came of it."""
    program, done = tmp_path / "program.py", tmp_path / "done"
    program.write_text(source)
    command = f'"$0" "$1" "$2" {redirection}'
    found = subprocess.run(["bash", "-c", command, sys.executable, program, done], env={
        **os.environ, "PYTHONPATH": str(ROOT)} | variables, capture_output=True)
    return found, done.exists()


class Pieces(io.StringIO):
    """A stream that keeps each text that is written to it."""

    def __init__(self):
        super().__init__()
        self.written = []

    def write(self, text):
        self.written += [text] if text else []
        return super().write(text)


@pytest.mark.parametrize("name, tell", [("stdout", console.say), ("stderr", console.complain)])
def test_lines_are_written_at_once(monkeypatch, name, tell):
    """In pieces they would stand between the pieces of another rank's lines."""
    stream = Pieces()
    monkeypatch.setattr(sys, name, stream)
    tell("one", 2)
    tell()
    assert stream.written == ["one\n2\n", "\n"]


def test_an_error_of_a_rank_is_written_at_once(monkeypatch):
    stream, told = Pieces(), guard.Guard()
    monkeypatch.setattr(sys, "stderr", stream)
    told.is_told = lambda text: False
    told._hook = sys.__excepthook__
    told.print_once(ValueError("a\nb"))
    text, = stream.written
    assert text.endswith("nothing:\nValueError: a\nb\n")


FULL = b"warning: standard output cannot be written (No space left on device): going on without"


@pytest.mark.parametrize("redirection, out, err", [
    ("| head -1", b"first\n", b"to standard error"), ("> /dev/full", b"", FULL),
    (">&-", b"", b"to standard error"), ("2>&-", b"last", b""), ("2> /dev/full", b"last", b""),
    (">&- 2>&- <&-", b"", b""), ("> /dev/full 2>&1", b"", b"")])
def test_what_cannot_be_printed_ends_nothing(tmp_path, redirection, out, err):
    found, done = run(tmp_path, PRINTS, redirection + '; exit "${PIPESTATUS[0]}"')
    assert found.returncode == 0 and done
    assert out in found.stdout and err in found.stderr
    assert b"Traceback" not in found.stderr and b"BrokenPipe" not in found.stderr
    assert found.stderr.count(b"cannot be written") == (err == FULL)


@pytest.mark.parametrize("variables", [
    {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_letters_that_a_stream_lacks_are_escapes(tmp_path, variables):
    found, done = run(tmp_path, PRINTS, **variables)
    assert found.returncode == 0 and done
    assert found.stdout.startswith(b"first\nr\\xe9sultats\ncaf\\udce9\n")


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path):
    """Nor does what a library writes to standard error get into them."""
    source = """
import os, sys
import mm3d
with open(sys.argv[1], "w") as file:
    os.write(2, b"by a library")
    os.system("echo by a child; echo by a child >&2")
    file.write("result")
"""
    found, _ = run(tmp_path, source, ">&- 2>&- <&-")
    assert found.returncode == 0 and (tmp_path / "done").read_text() == "result"


def test_a_stream_that_does_not_block_is_waited_for(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    source = "from mm3d.console import protect, say\nprotect()\nsay('0123456789' * 100_000)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=writer, cwd=ROOT) as child:
        os.close(writer)
        with open(reader) as file:
            assert len(file.read()) == 1_000_001
    assert child.returncode == 0


def test_a_terminal_stays_one(tmp_path):
    source = """
import sys
from mm3d.console import protect, say
protect()
say(sys.stdout.isatty(), sys.stdout.fileno())
"""
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", source], stdout=theirs, cwd=ROOT, check=True)
    os.close(theirs)
    assert os.read(ours, 100).split() == [b"True", b"1"]
    os.close(ours)


def other_ways(tree):
    """Lines that print in another way than by `mm3d.console`."""
    wrong = ("print", "tqdm.write", "sys.stdout", "sys.stderr", "traceback.print_exc",
             "traceback.print_exception")
    ends = {name.rpartition(".")[2] for name in wrong}
    redirected = {id(one) for node in ast.walk(tree) if isinstance(node, ast.Call)
                  and ast.unparse(node.func) == "redirect_stdout" for one in node.args}
    return [node.lineno for node in ast.walk(tree)
            if getattr(node, "attr", getattr(node, "id", "")) in ends
            and ast.unparse(node) in wrong and id(node) not in redirected]


def test_there_is_one_way_to_print():
    """Examples, which are read before the library, print as any program does."""
    found, programs, of_others = [], [], re.compile(r"print|std(out|err)|tqdm")
    for package in ("mm3d", "bench", "jobs"):
        for path in (ROOT / package).rglob("*.py"):
            if not path.name.startswith(ASIDE) and path.parent.name != "examples":
                text = path.read_text(encoding="utf-8")
                found += [f"{path}:{line}" for line in (
                    other_ways(ast.parse(text)) if of_others.search(text) else ())]
                if '__name__ == "__main__"' in text and "say(" in text:
                    programs.append(path.name)
                    assert "    protect()\n" in text, path
    assert not found and len(programs) >= 4


@pytest.mark.parametrize("line", ["print(1)", "sys.stderr.write('')", "f(file=sys.stdout)"])
def test_other_ways_to_print_are_seen(line):
    assert other_ways(ast.parse(line)) == [1]
