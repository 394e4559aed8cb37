"""Check the options of programs that a job starts: none unknown, none that its script sets."""

import re
from dataclasses import dataclass
from typing import Iterator, Sequence

from bench import verbs
from bench.errors import UsageError


@dataclass(frozen=True)
class ProgramOptions:
    """The options of a program that a script sets, or that would leave the job without a result.

    `own` has by long name, without dashes, the key of the site file for it, "" if there is none;
    `short` the long names by their letter; `flags` are letters that take no value, so that others
    may follow in the same word.  With `one_dash` long names may have one, and cannot be
    abbreviated.
    """

    own: dict[str, str]
    short: dict[str, str]
    flags: str = ""
    one_dash: bool = False


def _keys(**names: str) -> dict[str, str]:
    """Return the key of each option, from the options by key ("none" for no key)."""
    return {name: "" if key == "none" else key.replace("__", ".")
            for key, text in names.items() for name in text.split()}


_RANKS = dict(node__ranks="nodes ntasks ntasks-per-node",
              node__cores_per_rank="cpus-per-task cpus-per-gpu",
              slurm__time="time time-min")
PROGRAMS = {
    "sbatch": ProgramOptions(_keys(
        **_RANKS, node__gpus="gpus gpus-per-node gpus-per-task gpus-per-socket tres-per-task",
        slurm__gres="gres", slurm__warning="signal", slurm__partition="partition",
        slurm__account="account", slurm__qos="qos", slurm__constraint="constraint",
        slurm__exclusive="exclusive oversubscribe share", slurm__mail="mail-user mail-type",
        none="job-name output error array dependency begin wait parsable test-only wrap chdir "
             "distribution help usage version"), {}),
    "srun": ProgramOptions(_keys(
        **_RANKS, node__gpus="gpus gpus-per-node gpus-per-socket gres tres-per-task",
        launch__gpu_binding="gpus-per-task gpu-bind", launch__mpi="mpi",
        none="distribution kill-on-bad-exit output error chdir multi-prog pty jobid het-group "
             "pack-group no-allocate test-only help usage version"),
        {"n": "ntasks", "N": "nodes", "c": "cpus-per-task", "t": "time", "G": "gpus",
         "m": "distribution", "K": "kill-on-bad-exit", "o": "output", "e": "error",
         "D": "chdir", "Z": "no-allocate", "h": "help", "V": "version"}, "EHkKlOQsuvVXZh"),
    "mpirun": ProgramOptions(_keys(
        none="n np c wdir wd outfile-pattern errfile-pattern app configfile help h version V"),
        {}, one_dash=True),
    "bench run": ProgramOptions(_keys(
        run__backend="backend", inside="inside",
        none="table scheme rows preset equal-tokens out stop-file grid layers hidden heads batch "
             "seq dtype keep overlap causal work work-scale machine software-share links "
             "recompute cluster help"), {"h": "help"}),
    "bench train": ProgramOptions(_keys(
        run__backend="backend", none="out checkpoints stop-file stop-after compare help"),
        {"h": "help"}),
    "bench measure meshes": ProgramOptions(_keys(
        run__backend="backend", run__machine="machine", none="out software-share cluster help"),
        {"h": "help"}),
    "bench measure pipeline": ProgramOptions(
        _keys(run__backend="backend", none="out help"), {"h": "help"}),
}


def list_verb_problems(verb: str, words: Sequence[str], ranks: int = 0) -> Iterator[str]:
    """List what is wrong with `words`, options of a verb of bench, before a job waits for it.

    With `ranks` also what so many cannot do.
    """
    yield from list_overrides(f"bench {verb}", words)
    try:
        verbs.check_command(verb, words, ranks)
    except UsageError as error:
        yield str(error)


def list_overrides(program: str, words: Sequence[str]) -> Iterator[str]:
    """List what is wrong with `words`, options of `program`, as ``OPTION: REASON``.

    An abbreviation stands for every option that begins with it.  Words after ``--`` or after the
    name of the program that srun starts are options of that program.
    """
    inner = False
    for before, word in zip(["", *words], words):
        if word == ":":
            yield "':': it begins another program; leave it out"
        a_value = before.startswith("-") and "=" not in before    # may be one
        inner |= program == "srun" and (word == "--" or not (word.startswith("-") or a_value))
        for name in [_own_name(PROGRAMS[program], word)] * (word.startswith("-") and not inner):
            if name is None:
                continue
            key = PROGRAMS[program].own[name]
            given = word.partition("=")[0]
            full = f" (--{name})" if given.lstrip("-") != name else ""
            yield (f"{given}{full}: the job says it, or has no use for it; "
                   f"{'give it as ' + key if key else 'leave it out'}")


def _own_name(program: ProgramOptions, word: str) -> str | None:
    """Return the name in `own` that `word`, which begins with a dash, stands for; None if none."""
    if program.one_dash:
        name = word.lstrip("-").partition("=")[0]
        name = re.sub(r"^(n|np|c)\d+$", r"\1", name)
        return name if name in program.own else None
    if word.startswith("--"):
        name = word.removeprefix("--").partition("=")[0]
        return next((own for own in sorted(program.own) if name and own.startswith(name)), None)
    for letter in word.removeprefix("-"):
        if letter in program.short:
            return program.short[letter]
        if letter not in program.flags:
            break    # what follows is its value
    return None
