"""Read the variables of a site file, whose values may name others, for the script of a job."""

import re
from dataclasses import dataclass
from typing import Iterator

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


@dataclass(frozen=True)
class ValuePart:
    """A part of a value: a text, or a variable's value.

    Attributes
    ----------
    kind : {"text", "value", "before", "after"}
        "before" and "after" are items of a colon-separated list that may be unset or empty, which
        then leave no colon: it would stand for the current folder.
    text : str
        The text, or the variable's name.
    """

    kind: str
    text: str


def split_value(value: str) -> list[ValuePart]:
    """Divide a value into texts and variables, ``$NAME`` or ``${NAME}``; ``$$`` is a dollar.

    Raises
    ------
    ValueError
        When the shell would expand something else in it.
    """
    items = [_parts(item) for item in value.split(":")]
    alone = [len(parts) == 1 and parts[0].kind == "value" for parts in items]
    first = alone.index(False) if False in alone else None    # an item that is always there
    found: list[ValuePart] = []
    for place, (parts, only) in enumerate(zip(items, alone)):
        if only and first is not None:
            found.append(ValuePart("before" if place < first else "after", parts[0].text))
        else:
            colon = place > 0 if first is None else place > first
            found += [*[ValuePart("text", ":")] * colon, *parts]
    return found


def _parts(item: str) -> list[ValuePart]:
    if "`" in item or item.startswith("~"):
        raise ValueError("neither ~ nor `commands` are expanded: write $HOME, or a line of "
                         "software.setup")
    found = [*PART.finditer(item)]
    if "".join(part[0] for part in found) != item:
        raise ValueError("only $NAME and ${NAME} are expanded, and $$ is a dollar; commands "
                         "are lines of software.setup")
    return [ValuePart("text", "$" if part["text"] == "$$" else part["text"]) if part["text"] else
            ValuePart("value", part["braced"] or part["plain"]) for part in found]


def list_variable_problems(environment: dict[str, str]) -> Iterator[str]:
    """List invalid names, names that the script sets itself, and values that cannot be read."""
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            yield f"environment: {name!r} is no name of a variable"
        if name in OWN:
            yield (f"environment: {name}: the job says it, or has no use for it; "
                   f"{'give it as ' + OWN[name] if OWN[name] else 'choose another name'}")
        try:
            split_value(value)
        except ValueError as error:
            yield f"environment.{name} = {value!r}: {error}"
