"""Read and check the site file that describes a cluster."""

import math
import operator
import re
from importlib import resources
from pathlib import Path
from typing import Any, Iterator

import msgspec

from bench.errors import UsageError
from bench.prediction import memory_fit
from bench.text_files import read_text
from jobs import environment
from jobs.own_options import list_overrides, list_verb_problems
from jobs.site_tables import Site, decode_site
from mm3d.names import plain
from mm3d.schemes import registry

# Text allowed in a line that Slurm reads, with its own rules of quoting.
WORD = re.compile(r"[A-Za-z0-9_.,:/@%+=*&|()\[\]-]+")
OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
# Minutes, or parts of hours, minutes and seconds from the right; after days, from the left.
TIME = re.compile(r"((?P<days>\d+)-)?\d+(:\d\d?){0,2}", re.ASCII)
TYPED_GPUS = re.compile(r"[A-Za-z][\w.-]*:[1-9]\d*", re.ASCII)
NO_LIMIT = ("UNLIMITED", "INFINITE")
LONGEST_WARNING = 65535    # seconds that sbatch --signal takes


def supplied_sites() -> dict[str, Path]:
    """List the site files of this package by name."""
    folder = Path(str(resources.files("jobs").joinpath("sites")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def full_site_name(name: str) -> str:
    """Return the name of the supplied site that `name` stands for; otherwise `name`, a file."""
    return {plain(one): one for one in supplied_sites()}.get(plain(name), name)


def load_site(name: str) -> Site:
    """Read a site by its name, or from a file; UsageError for none, or a wrong file."""
    path = supplied_sites().get(name, Path(name))
    text = read_text(path, f"--site {name}",
                     f"a .toml file, or one of {', '.join(supplied_sites())},")
    try:
        site = decode_site(text)
    except ValueError as error:
        raise UsageError(f"--site {name}: {error}") from error
    for problem in list_problems(site):
        raise UsageError(f"--site {name}: {problem}")
    return site


def list_problems(site: Site) -> Iterator[str]:
    """List the faults of a site file, other than wrong types of values."""
    for place, text in list_strings(msgspec.to_builtins(site), ""):
        if not text.isprintable():
            yield f"{place} = {text!r}: must be one printable line"
        elif place.startswith(("slurm.", "collect.")) and not WORD.fullmatch(text):
            yield (f"{place} = {text!r}: may have letters, digits and _.,:/@%+=*&|()[]- only, as "
                   "it stands in a line that Slurm reads")
    yield from _time_problems(site)
    yield from _option_problems(site)
    for key in ("gpu_memory", "memory"):
        text = getattr(site.node, key)
        try:
            memory_fit.parse_size(text or "1 B")
        except UsageError as error:
            yield f"node.{key} = {error}"
    if site.node.gpu_memory and site.node.memory:
        yield "node.gpu_memory and node.memory: give that of the GPUs, or without any the node's"
    for key, least in (("ranks", 1), ("cores_per_rank", 1), ("gpus", 0)):
        value = getattr(site.node, key)
        if isinstance(value, int) and value < least:
            yield f"node.{key} = {value}: must be at least {least}"
    for scheme in site.inside:
        if scheme not in registry():
            yield f"inside: {scheme!r} is no scheme: {', '.join(registry())} would do"
    yield from environment.list_variable_problems(site.environment)
    if isinstance(site.node.gpus, str) and not TYPED_GPUS.fullmatch(site.node.gpus):
        yield (f"node.gpus = {site.node.gpus!r}: give a number, or type and number such as "
               "'a100:4'")
    else:
        yield from _gpu_problems(site)


def _time_problems(site: Site) -> Iterator[str]:
    """List time limits that Slurm cannot read, or that leave a row no time."""
    warning = site.slurm.warning
    if not 1 <= warning <= LONGEST_WARNING:
        yield (f"slurm.warning = {warning}: must be at least 1 second, and at most "
               f"{LONGEST_WARNING}")
    by_ranks = {f"slurm.time_by_ranks.{ranks}": text
                for ranks, text in site.slurm.time_by_ranks.items()}
    for ranks in site.slurm.time_by_ranks:
        if not re.fullmatch("[1-9][0-9]*", ranks):
            yield f"slurm.time_by_ranks: {ranks!r} is no number of ranks"
    for place, text in {"slurm.time": site.slurm.time, "collect.time": site.collect.time,
                        **by_ranks}.items():
        seconds = time_limit(text)
        if seconds is None:
            yield f"{place} = {text!r}: give it as 2:00:00 or 1-12:00:00"
        elif place != "collect.time" and seconds <= 2 * warning:
            yield (f"{place} = {text!r}: a row is told to end slurm.warning = {warning} seconds "
                   f"before the limit, and needs as long before; give more than {2 * warning} "
                   "seconds, or a smaller slurm.warning")


def time_limit(text: str) -> float | None:
    """Return the seconds of a time limit in Slurm's notation; None if it is none.

    ``90`` and ``90:00`` are minutes, ``1:30:00`` is hours, ``1-12`` a day and 12 hours; 0 and
    ``UNLIMITED`` are no limit.
    """
    if text in NO_LIMIT:
        return math.inf
    found = TIME.fullmatch(text)
    if not found:
        return None
    parts = [int(part) for part in text.rpartition("-")[2].split(":")]
    units = (3600, 60, 1) if found["days"] or len(parts) == 3 else (60, 1)
    return 86400 * int(found["days"] or 0) + sum(map(operator.mul, parts, units)) or math.inf


def _option_problems(site: Site) -> Iterator[str]:
    """List unknown options, and those that override what the job's script sets."""
    for place, program, words in (
            ("slurm.options", "sbatch", site.slurm.options),
            ("collect.options", "sbatch", site.collect.options or []),
            ("launch.options", site.launch.launcher, site.launch.options)):
        for word in words:
            if program == "sbatch" and not OPTION.fullmatch(word):
                yield f"{place}: {word!r} is no option of sbatch: give it as --mem=0"
        for problem in list_overrides(program, words):
            yield f"{place}: {problem}"
    if site.run.options:    # only then is the verb imported
        for problem in list_verb_problems("run", site.run.options):
            yield f"run.options: {problem}"


def _gpu_problems(site: Site) -> Iterator[str]:
    """List settings of GPUs that contradict each other."""
    if site.launch.gpu_binding != "none" and site.node.ranks > site.node.gpu_count:
        yield (f"launch.gpu_binding = {site.launch.gpu_binding!r}: {site.node.ranks} ranks a node "
               f"cannot have one of {site.node.gpu_count} GPUs each; set node.ranks or node.gpus")
    if site.launch.gpu_binding == "task" and site.launch.launcher != "srun":
        yield "launch.gpu_binding = 'task': only srun does that; use 'rank' with mpirun"
    order, count = site.launch.gpu_order, site.node.gpu_count
    if order and sorted(order) != list(range(count)):
        yield (f"launch.gpu_order = {order}: give the number of each of the {count} GPUs of a "
               "node once, from 0 on")
    if order and site.launch.gpu_binding != "rank":
        yield ("launch.gpu_order: only with launch.gpu_binding = 'rank' does a rank see all GPUs "
               "of its node")
    if site.launch.gpu_binding == "task" and site.slurm.gpu_option != "gpus-per-node":
        yield ("launch.gpu_binding = 'task': srun --gpu-bind does that, which a Slurm with "
               f"slurm.gpu_option = {site.slurm.gpu_option!r} does not know; use 'rank'")
    if re.search(r"(^|,)(gres[:/])?gpu\b", site.slurm.gres or ""):
        yield f"slurm.gres = {site.slurm.gres!r}: GPUs are asked for by node.gpus"
    if site.run.backend == "cupy" and site.launch.gpu_binding == "none":
        yield "run.backend = 'cupy': set launch.gpu_binding to 'task' or 'rank'"
    if site.run.device_buffers and site.run.backend != "cupy":
        yield (f"run.device_buffers = true: backend {site.run.backend!r} has no device buffers; "
               "use 'cupy'")


def list_strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """List all strings in a value, keys included, each with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, found in value.items():
            yield f"{place}.{key}".lstrip("."), str(key)
            yield from list_strings(found, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list):
        for found in value:
            yield from list_strings(found, place)
