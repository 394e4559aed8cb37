"""Read the text files that users write."""

from importlib import resources
from pathlib import Path
from typing import Any

from bench.errors import UsageError, require_known


def read_text(path: Any, what: str, remedy: str) -> str:
    """Return the text of a file, read as UTF-8 in every locale, without a byte order mark.

    Parameters
    ----------
    path : path or Traversable
        The file.
    what : str
        The option and its value, for the message.
    remedy : str
        The kind of file that would do, for the message.

    Raises
    ------
    UsageError
        When there is no such file, it cannot be read, or has another encoding.
    """
    try:
        return (Path(path) if isinstance(path, str) else path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = "there is no such file" if isinstance(error, FileNotFoundError) else (
            f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        problem = f"is no text in UTF-8, as its byte {error.start} shows"
    raise UsageError(f"{what}: {problem}; {remedy} would do")


def read_supplied(what: str, name: str) -> str:
    """Return the text of a file of `bench.prediction`, such as that of a machine.

    Parameters
    ----------
    what : str
        What the file describes, such as "machine"; the folder has its plural as name.
    name : str
        Name of a supplied file, or path of a TOML file.

    Raises
    ------
    UsageError
        When there is no such file.
    """
    folder = resources.files("bench.prediction").joinpath(f"{what}s")
    supplied = {Path(file.name).stem: file for file in sorted(folder.iterdir(), key=str)
                if file.name.endswith(".toml")}
    file: Any = (Path(name) if name.endswith(".toml") else
                 require_known(supplied, name, what, "name a .toml file"))
    return read_text(file, f"{what} file {name}",
                     f"a .toml file, or one of {', '.join(supplied)},")
