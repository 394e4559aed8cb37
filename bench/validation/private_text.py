"""Find text in a file that names a user, a host, an address or a private folder."""

import os
import pwd
import re
import socket
from typing import Any, Iterator

import h5py

PATHS = re.compile(r"(?<![\w.])/(home|Users|root|tmp|mnt|scratch|work|gpfs|lustre)(/|\b)")
ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)*")
NAMED = ("host", "hostname", "user", "username")    # attributes that no file may have
# Attributes whose text comes from outside, from options and variables. The program writes all
# others itself: they name nobody, even where they have a word that is this host's or user's name.
OUTSIDE = ("command", "tuning_variables", "slurm", "waited_machine", "text")
SYSTEM = ("cpu_model", "gpu")    # as the system calls them, as in "i7@2.2GHz"
OWN_WORDS = "python -m bench mm3d results .h5 .toml .json localhost root"


def find_private_text(group: h5py.Group) -> Iterator[str]:
    """List the attributes that name a user, a host, an address or a private folder."""
    found = list(_list_attributes(group))
    names = _own_names(" ".join([OWN_WORDS, *_words_written(found)]))
    for place, key, value in found:
        if key in NAMED:
            yield f"{place} has an attribute {key}: mask it"
        for kind, pattern, searched in (("a folder", PATHS, True),
                                        ("an address", ADDRESS, key not in SYSTEM),
                                        ("this user or host", names, key in OUTSIDE)):
            if searched and isinstance(value, str) and pattern.search(value):
                yield (f"{place} attribute {key} names {kind}, which is private: mask it")


def _list_attributes(group: h5py.Group) -> Iterator[tuple[str, str, Any]]:
    """List the place, name and value of each attribute of a group and of all in it."""
    places = [("/", group)]
    group.visititems(lambda place, item: places.append((place, item)))
    for place, item in places:
        for key, value in item.attrs.items():
            yield place, key, value


def _words_written(found: list[tuple[str, str, Any]]) -> Iterator[str]:
    """List the text that the program itself has written in a file."""
    for place, key, value in found:
        yield from (place, key)
        if isinstance(value, str):
            # Of a command only the verb is the program's text: "python -m bench VERB".
            yield value if key not in OUTSIDE else " ".join(value.split()[:4] * (key == "command"))


def _own_names(written: str) -> re.Pattern[str]:
    """Return the pattern of names of this user and host, which text from outside may not have.

    Names that are also the program's own words are left out.
    """
    host = socket.gethostname()
    names = {os.environ.get(name, "") for name in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    names |= {host, host.partition(".")[0]}
    try:
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:    # a user without an entry has no name that a file could have
        pass
    private = [re.escape(name) for name in sorted(names) if len(name) > 2
               and not re.search(_whole_word(re.escape(name)), written, re.IGNORECASE)]
    return re.compile(_whole_word("|".join(private)) if private else r"(?!)")


def _whole_word(pattern: str) -> str:
    return rf"(?<![\w-])(?:{pattern})(?!\w)"
