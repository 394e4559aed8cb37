"""Check files against the schema and the rules of a run.

A file with a violation must not be cited; each violation is explained in a line.  Warnings are
for the reader.  All that follows from samples or sizes is computed anew.
"""

import math
import os
import pwd
import re
import socket
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import h5py
import numpy as np

from bench.cases.variants import recorded_variant
from bench.errors import StoreError, Unreadable
from bench.records import merged, model_run, schema
from bench.records.measurements import Measurements, failed_checks
from bench.records.model_run import Run
from bench.records.notes import counted, split_checks
from bench.records.run_file import DAMAGE, FORMAT, UNLIKE, open_file, parse_run
from bench.records.schema import UNKNOWN
from mm3d.schemes import registry
from mm3d.tracing.events import PHASES

TOLERANCE = 1e-9    # relative, of recomputed numbers
# What waited work means, by the kind of run.
WAITED = {"model": "ranks waited for the modelled seconds of their work: only collectives were "
                   "real",
          "pipeline": "ranks waited for seconds that were chosen, in place of layers: only "
                      "messages and their order were real"}


def check_file(path: Path) -> tuple[list[str], list[str]]:
    """Return the violations of the rules in a file of one run or a merged one, and its warnings.

    Unreadable when it cannot be read, so that nobody knows whether it is valid.
    """
    errors: list[str] = []
    warnings: list[str] = []
    try:
        with open_file(path) as file:
            together = merged.is_merged(file)
            for place, group in merged.run_groups(file, path):
                if group is None:
                    errors.append(f"{place} is damaged: it is no group")
                    continue
                where = f"{group.name.rpartition('/')[2]}: " if together else ""
                found_errors, found_warnings = check_run(group, place)
                errors += [where + line for line in found_errors]
                warnings += [where + line for line in found_warnings]
    except Unreadable:
        raise
    except StoreError as error:
        errors.append(str(error))
    return errors, warnings


def check_run(group: h5py.Group, place: str) -> tuple[list[str], list[str]]:
    """Check one run; return its violations and warnings."""
    if not np.array_equal(group.attrs.get("format"), FORMAT):
        return [f"{place} is an HDF5 file, but not an mm3d run"], []
    errors: list[str] = []
    for look in (find_private_text, check_dimensions):
        errors += checked(look, group)
    kind = schema.of_kind(str(group.attrs.get("kind", "model")))
    if kind.get("verified") and "verification" not in group:
        return [*errors, "there is no verification: no time counts without one"], []
    try:
        run = parse_run(group, place)
    except StoreError as error:
        return [*errors, str(error)], []
    # What the rules of rows need is imported for rows alone.
    own = import_module(f"bench.validation.{'rules' if run.kind == 'model' else 'counts'}").RULES
    for rule in (lambda run: failed_checks(run.checks), check_oversubscription, *own):
        errors += checked(rule, run)
    return errors, checked(list_warnings, run)


def check_oversubscription(run: Measurements) -> Iterator[str]:
    """Check the recorded ratio of ranks to cores."""
    environment, count = run.environment, run.environment["ranks"]
    # The nodes of an emulated cluster share the cores.
    local = count if "emulated_cluster" in environment else environment.get(
        "ranks_on_this_node", count)
    cores = environment["cores"]
    if (local > cores) != bool(environment["oversubscribed"]):
        yield (f"{local} ranks on {cores} cores, but oversubscribed says "
               f"{bool(environment['oversubscribed'])}")
    if not math.isclose(environment["ranks_per_core"], local / cores, rel_tol=TOLERANCE):
        yield f"ranks_per_core {environment['ranks_per_core']:g}: {local} / {cores} would do"


def checked(rule: Callable[[Any], Iterable[str]], what: Any) -> list[str]:
    """Return the violations of a rule; if values cannot be judged, one violation that says so."""
    try:
        return list(rule(what))
    except (*DAMAGE, *UNLIKE) as error:
        about = (rule.__doc__ or rule.__name__).partition("\n")[0].rstrip(".")
        return [f"cannot be judged ({about[:1].lower()}{about[1:]}): {error!r}"]


def check_dimensions(group: h5py.Group) -> list[str]:
    """Check that every dataset has units, and every dimension a scale of its length."""
    lines: list[str] = []

    def visit(name: str, item: h5py.HLObject) -> None:
        if not isinstance(item, h5py.Dataset) or item.is_scale:
            return
        if "units" not in item.attrs:
            lines.append(f"{name} has no units")
        for index, dim in enumerate(item.dims):
            if len(dim) != 1 or len(dim[0]) != item.shape[index]:
                lines.append(f"dimension {index} of {name} has no scale of its length")
    group.visititems(visit)
    return lines


def list_warnings(run: Measurements) -> Iterator[str]:
    """List the warnings: facts that break no rule, but must be known to the reader."""
    if run.environment["git_commit"] == UNKNOWN:
        yield "the commit of the source is unknown: nobody can tell what was measured"
    elif not run.environment["git_clean"]:
        yield "the source had changes that were not committed: nobody else can build it"
    waits = recorded_variant(run.configuration).waits
    if waits:
        yield WAITED.get(run.kind, WAITED["model"])
    if run.environment["oversubscribed"]:
        yield ("ranks outnumber cores, which they share for all that is not waited for" if waits
               else "ranks outnumber cores: its times are no scaling results")
    # Of cases with different numbers the largest counts; some have no such dimension.
    count = len(run.scales["repetition"]) if "repetition" in run.scales else math.inf
    if count < 6:
        yield f"no 95 % interval of {counted(count, 'repetition')}: at least six would do"
    if not isinstance(run, Run):
        return
    for phase in PHASES if count > 5 else ():
        found = model_run.slowest(run.samples[phase])
        if found[0] == found.max() and found[0] > 1.5 * np.median(found):
            yield (f"the first {phase} that counts took {found[0] / np.median(found):.1f} times "
                   f"the median: more than {run.configuration['warmup']} steps to warm up would "
                   f"do")
    measured = split_checks(run.checks)[1]
    if not run.configuration["verified_measured_model"] and not measured:
        yield "a smaller model was verified, the measured one was not: measure it again"
    if run.ended_by == "stopped":
        yield "it was told to stop before its repetitions were done"
    if run.configuration["scheme"] not in registry():
        yield f"scheme {run.configuration['scheme']} is unknown: its words were not checked"


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
    """Return the pattern of this user's and host's names, but for the program's own words."""
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
