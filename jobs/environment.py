"""Read the variables of a site file, whose values may name others, for the script of a job."""

import re
import shlex
from typing import Any, Iterator

from mm3d import launcher

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PART = re.compile(r"(?P<text>[^$]+|\$\$)|\$\{(?P<braced>[A-Za-z_]\w*)\}"
                  r"|\$(?P<plain>[A-Za-z_]\w*)", re.ASCII)
# Variables that scripts, Bash or launchers set themselves, with the key of the site file for each.
OWN = {"SRUN_CPUS_PER_TASK": "node.cores_per_rank", "MM3D_GPU_ORDER": "launch.gpu_order",
       **dict.fromkeys((*launcher.RANK_VARIABLES, *launcher.SIZE_VARIABLES,
                        *launcher.LOCAL_RANK_VARIABLES, *launcher.LOCAL_SIZE_VARIABLES), ""),
       **dict.fromkeys("SLURM_JOB_ID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_STEP_ID "
                       "SLURM_PROCID".split(), ""),
       **dict.fromkeys("BASHOPTS BASH_SOURCE BASH_VERSINFO EUID IFS PPID SECONDS SHELLOPTS UID "
                       "begun checkpoints folder init job launch memory mm3d_element mm3d_options "
                       "mm3d_trouble name needs program row status step try wanted".split(), "")}


class Quoted(str):
    """Words of the shell, which need no more quoting."""


def quote(value: Any) -> str:
    """Quote `value` as one word of the shell, a list as several."""
    if isinstance(value, Quoted):
        return value
    if isinstance(value, (list, tuple)):
        return " ".join(map(quote, value))
    text = str(value)
    # A comma is harmless, but reads as if it divided the elements of an array.
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


def quote_value(value: str) -> tuple[Quoted, list[str]]:
    """Quote the value of a variable, and name the variables that must be set for it.

    ``$NAME`` and ``${NAME}`` are expanded; ``$$`` is a dollar.  In a list with colons an item that
    is one variable may be unset or empty, if another item has text, and then leaves no colon,
    which would stand for the current folder.  ValueError when the shell would expand more.
    """
    items = [_parts(item) for item in value.split(":")]
    optional = [len(parts) == 1 and parts[0].startswith('"$') for parts in items]
    first = optional.index(False) if False in optional else None    # an item that is always there
    found: list[str] = []
    for place, (parts, only) in enumerate(zip(items, optional)):
        if only and first is not None:
            name = parts[0].strip('"$')
            found.append(f'"${{{name}:+${name}:}}"' if place < first else
                         f'"${{{name}:+:${name}}}"')
        else:
            found += [*[":"] * (place > (first or 0)), *parts]
    return Quoted("".join(found)), [*dict.fromkeys(
        part.strip('"$') for part in found if re.fullmatch(r'"\$\w+"', part))]


def _parts(item: str) -> list[str]:
    """Divide an item into quoted texts and variables such as ``"$NAME"``."""
    if "`" in item or item.startswith("~"):
        raise ValueError("neither ~ nor `commands` are expanded: write $HOME, or a line of "
                         "software.setup")
    found = [*PART.finditer(item)]
    if "".join(part[0] for part in found) != item:
        raise ValueError("only $NAME and ${NAME} are expanded, and $$ is a dollar; commands "
                         "are lines of software.setup")
    return [quote("$" if part["text"] == "$$" else part["text"]) if part["text"] else
            f'"${part["braced"] or part["plain"]}"' for part in found]


def list_variable_problems(environment: dict[str, str]) -> Iterator[str]:
    """List invalid names, names that the script sets itself, and values that cannot be read."""
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            yield f"environment: {name!r} is no name of a variable"
        if name in OWN:
            yield (f"environment: {name}: the job says it, or has no use for it; "
                   f"{'give it as ' + OWN[name] if OWN[name] else 'choose another name'}")
        try:
            quote_value(value)
        except ValueError as error:
            yield f"environment.{name} = {value!r}: {error}"
