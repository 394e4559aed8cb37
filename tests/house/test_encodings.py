"""Text is read and written in an encoding that the call names, so that no locale changes it."""
import ast
import re

import pytest

from support import ROOT

FILES = [path for package in ("mm3d", "bench", "jobs") for path in (ROOT / package).rglob("*.py")]
BINARY = {"os.open", "h5py.File.open", "webbrowser.open", "Image.open"}
TEXT = {"open", "read_text", "write_text", "fdopen", "TextIOWrapper", "TemporaryFile",
        "NamedTemporaryFile"}
PROGRAMS = {"run", "Popen", "check_output"}
BYTES = {"TemporaryFile", "NamedTemporaryFile"}    # by default
CALLED = rf"\b({'|'.join(TEXT | PROGRAMS)})\("


def left_to_the_locale(tree: ast.Module) -> set[int]:
    """The lines with calls that read or write text without naming its encoding."""
    found = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name not in TEXT | PROGRAMS:
            continue
        whole = ast.unparse(call.func)
        words = {word.arg: word.value for word in call.keywords}
        literal = {value.value for value in (*call.args, *words.values())
                   if isinstance(value, ast.Constant) and isinstance(value.value, str)}
        modes = {text for text in literal if text and set(text) <= set("rwxabt+")}
        binary = any("b" in mode for mode in modes) or name in BYTES and not modes
        text = (name in TEXT and whole not in BINARY and not binary
                or {"text", "universal_newlines", "errors"} & words.keys()
                and name in PROGRAMS)
        named = "encoding" in words or name == "read_text" and call.args
        if text and not named:
            found.add(call.lineno)
    return found


def test_no_text_is_left_to_the_locale():
    """Of files in which some function of such a name is called: the others are not parsed."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    assert len(texts) > 100
    assert not [f"{path.relative_to(ROOT)}:{line}" for path, text in texts.items()
                if re.search(CALLED, text) for line in left_to_the_locale(ast.parse(text))]


@pytest.mark.parametrize("source", [
    "open(path)", "open(path, 'w')", "path.open()", "path.read_text(errors='replace')",
    "path.write_text(text)", "subprocess.run(words, text=True)", "os.fdopen(3, 'w')",
    "subprocess.Popen(words, errors='replace')", "tempfile.TemporaryFile('w+')",
    "io.TextIOWrapper(raw)", "os.fdopen(3)"])
def test_what_is_left_to_the_locale_is_seen(source):
    assert left_to_the_locale(ast.parse(source))
