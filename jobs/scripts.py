"""Write sbatch scripts from a site file and rows.

Every expression of a template is quoted for the shell, so that no value can become a command; a
list becomes several words.
"""

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from bench.cases.combined import AnyCase, TrainingCase
from bench.errors import UsageError
from jobs.environment import Quoted, quote, quote_value
from jobs.fitting import RowFit, dry_options, fit_row, rank_memory
from jobs.site_tables import Collect, Site, Slurm
from mm3d import launcher
from mm3d.arrays.device_choice import ORDER_VARIABLE

ROOT = Path(__file__).resolve().parents[1]    # where python -m bench finds its source
STOPPING = ("run", "train")                   # verbs with a --stop-file
UNDECODED = frozenset(map(chr, range(0xdc80, 0xdd00)))    # bytes of a name that are no UTF-8
MODE = 0o777                                  # permissions of a script, less the umask
LIMIT = 120                                   # seconds for each step of the pre-flight checks
# Options of sbatch that reach srun by a variable, such as SLURM_HINT.
HANDED_ON = ("gpus-per-node", "gpu-bind", "gpu-freq", "hint", "mem-bind", "mem-per-cpu",
             "mem-per-gpu", "network", "ntasks-per-core", "ntasks-per-socket", "overcommit",
             "profile", "threads-per-core")
EVEN = "block:block,NoPack"                   # srun's distribution of equally many ranks a node


@dataclass(frozen=True)
class JobSettings:
    """The site, which the user chose by `name`, the settings of all rows, and their folders.

    In `out` lie results, and scripts, logs and bookkeeping in ``jobs`` within it.  `inside` is the
    grid direction that stays inside a node, instead of the site's, `recompute` a policy, None for
    the least with which each row fits, and `machine` predicts trainings, None for none.
    """

    site: Site
    name: str
    out: Path
    inside: str | None = None
    recompute: str | None = None
    machine: str | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of scripts, logs and bookkeeping."""
        return self.out / "jobs"

    def fit(self, case: AnyCase) -> RowFit:
        """Decide how a row fits the memory of the site's ranks."""
        return fit_row(self.site, case, self.recompute)

    def runs(self, name: str) -> Path:
        """Return the folder into which the jobs of a row, a pipeline or a training write."""
        return self.folder / "runs" / name

    def script(self, name: str) -> Path:
        """Return the path of their script."""
        return self.folder / f"{name}.sh"

    def inside_of(self, case: AnyCase) -> str:
        """Return the direction of the grid that stays inside a node; "-" for a training's mesh."""
        if isinstance(case, TrainingCase):
            return "-"
        return self.inside or self.site.inside.get(case.row.scheme, "auto")


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("jobs"), undefined=jinja2.StrictUndefined, finalize=quote,
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


def word(name: str | Path) -> str:
    """Return a path, or a word of the command line, as it stands in a script.

    Scripts are UTF-8 and keep the bytes of a name, whatever letters they are in this locale.
    """
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def check_path(path: Path) -> Path:
    """Return `path`, absolute; UsageError when Slurm cannot write a log into a folder so named."""
    path = path.absolute()
    if any(sign in "%\\\"'" or not sign.isprintable() and sign not in UNDECODED
           for sign in word(path)):
        raise UsageError(f"--out {path}: Slurm cannot write logs into a folder whose name has "
                         "one of % \\ \" ' or an unprintable character; choose another")
    return path


def count_nodes(site: Site, ranks: int) -> int:
    """Count the nodes for a number of ranks."""
    return math.ceil(ranks / site.node.ranks)


def time_of(site: Site, ranks: int) -> str:
    """Return the time limit of a job on a number of ranks."""
    return site.slurm.time_by_ranks.get(str(ranks), site.slurm.time)


def slurm_options(work: JobSettings, name: str, ranks: int, of: Slurm | Collect) -> list[str]:
    """List the options of sbatch for a job on a number of ranks, from a table of the site."""
    number, last = "%A_%a" if name.endswith("-array") else "%j", isinstance(of, Collect)
    chosen = [f"--job-name={name}", f"--time={of.time if last else time_of(work.site, ranks)}",
              f"--output={word(work.folder)}/logs/%x-{number}.out"]
    for key in ("partition", "account", "qos", "constraint"):
        value = getattr(of, key)
        if value is not None:
            chosen.append(f"--{key}={value}")
    mail = work.site.slurm.mail
    return [*chosen, *[f"--mail-user={mail}", f"--mail-type={'END,' * last}FAIL"] * bool(mail),
            f"--nodes={count_nodes(work.site, ranks)}", f"--ntasks={ranks}"]


def row_options(work: JobSettings, name: str, ranks: int, stops: bool = True) -> list[str]:
    """List the options of sbatch for a row; with `stops` a signal announces its time limit."""
    site = work.site
    return [*slurm_options(work, name, ranks, site.slurm),
            f"--ntasks-per-node={min(ranks, site.node.ranks)}",
            f"--cpus-per-task={site.node.cores_per_rank}",
            *[f"--signal=B:USR1@{site.slurm.warning}"] * stops,
            *resource_options(site, ranks),
            *["--exclusive"] * site.slurm.exclusive, *site.slurm.options]


def resource_options(site: Site, ranks: int) -> list[str]:
    """List the options of sbatch for the GPUs and the other generic resources of each node."""
    count, others = gpus_per_node(site, ranks), [site.slurm.gres] * bool(site.slurm.gres)
    gpus = [":".join(filter(None, [site.node.gpu_type, str(count)]))] * bool(count)
    if site.slurm.gpu_option == "gres":
        others = [*(f"gpu:{text}" for text in gpus), *others]
    if site.slurm.gpu_option != "gpus-per-node":
        gpus = []
    return [*(f"--gpus-per-node={text}" for text in gpus),
            *[f"--gres={','.join(others)}"] * bool(others)]


def collect_options(work: JobSettings) -> list[str]:
    """List the options of sbatch for the last job, with those of ``[slurm]`` that apply to it."""
    mine, rows = work.site.collect, work.site.slurm
    inherited = ["account"] if mine.partition else [
        "account", "partition", "qos", "constraint", "options"]
    of = msgspec.structs.replace(mine, **{key: getattr(rows, key) for key in inherited
                                          if getattr(mine, key) is None})
    return [*slurm_options(work, "mm3d-collect", 1, of), *(of.options or [])]


def gpus_per_node(site: Site, ranks: int) -> int:
    """Count the GPUs requested of each node."""
    return site.node.gpu_count if site.launch.gpu_order else min(ranks, site.node.gpu_count)


def variables_of(site: Site) -> dict[str, str]:
    """Return the environment variables that the jobs of a site set, and their values."""
    order = ",".join(map(str, site.launch.gpu_order))
    return site.environment | ({ORDER_VARIABLE: order} if order else {})


def describe_environment(site: Site) -> list[tuple[str, Quoted, list[str]]]:
    """List each variable with its quoted value and the variables that must be set for it."""
    return [(name, *quote_value(value)) for name, value in variables_of(site).items()]


def launch_command(site: Site, ranks: int) -> list[str]:
    """Return the command that starts the ranks, without the program."""
    if site.launch.launcher == "mpirun":
        return ["mpirun", "-n", str(ranks), *site.launch.options]
    # Consecutive ranks fill one node after the other: placement relies on it.  Blocks with Pack
    # would fill all cores of a node, without it they are of equal sizes; planes are of the size
    # given, and blocks within a node.
    uneven = ranks > site.node.ranks and ranks % site.node.ranks
    return ["srun", f"--mpi={site.launch.mpi}", f"--ntasks={ranks}",
            f"--distribution={f'plane={site.node.ranks}' if uneven else EVEN}",
            "--export=ALL", "--kill-on-bad-exit=1",
            # Not --gpus-per-task: beside GPUs that have a type it is refused, or binds none.
            *["--gpu-bind=single:1"] * (site.launch.gpu_binding == "task"),
            *site.launch.options]


def row_script(work: JobSettings, case: AnyCase) -> str:
    """Write the script that measures one row."""
    site, memory = work.site, []
    if isinstance(case, TrainingCase):
        verb, named = " ".join(case.verb), [case.selector]
        own = [f"--machine={word(work.machine)}"] if work.machine else []
    else:
        verb, named = "run", (
            [f"--rows={case.row.table}:{case.row.scheme}:{case.row.like}"] if case.row.like else
            [f"--table={case.row.table}", f"--scheme={case.row.scheme}"])
        named = [*named, f"--preset={case.preset}"]
        recompute, most = work.fit(case).recompute, rank_memory(site, case.ranks)
        own = [f"--inside={work.inside_of(case)}", f"--recompute={recompute}",
               *case.variant.arguments()]
        memory = dry_options(case, recompute, most) if most else []
    run = [*named, f"--out={word(work.runs(case.name))}", f"--backend={site.run.backend}", *own,
           *site.run.options]
    return _script(work, verb, f"{case.title}, preset {case.preset}", case.name, case.ranks, run,
                   memory=memory)


def verb_script(work: JobSettings, verb: str, name: str, ranks: int, words: list[str]) -> str:
    """Write the script that runs ``bench measure pipeline`` or ``bench train`` with `words`.

    A training goes on where a job stopped.  Its jobs are submitted under one name, and Slurm runs
    one of them at a time.
    """
    trains, kind = verb == "train", verb.split()[-1]
    saved = word(work.out / kind / name)
    run = [f"--out={word(work.out / kind)}", *[f"--checkpoints={saved}"] * trains,
           f"--backend={work.site.run.backend}", *map(word, words)]
    title = f"{f'Training {name}' if trains else 'Pipelines'} on {ranks} ranks"
    return _script(work, verb, title, name, ranks, run, checkpoints=saved)


def _script(work: JobSettings, verb: str, title: str, name: str, ranks: int, run: list[str],
            **values: Any) -> str:
    """Write the script that checks a job and then runs a verb of bench with the words `run`.

    `values` are for the verb's part of the template.
    """
    site, stops, folder = work.site, verb in STOPPING, word(work.runs(name))
    doctor = [f"--ranks={ranks}",
              f"--launcher={shlex.join(launch_command(site, ranks))}",
              f"--seen={folder}", f"--out={folder}", f"--limit={LIMIT}",
              f"--ranks-per-node={site.node.ranks}", f"--backend={site.run.backend}",
              *[f"--module={module}" for module in site.software.modules]]
    if site.launch.gpu_binding != "none":
        doctor.append(f"--gpus-per-node={gpus_per_node(site, ranks)}")
    if site.run.device_buffers:
        doctor.append("--device-buffers")
    options = [*row_options(work, f"mm3d-{name}", ranks, stops),
               *["--dependency=singleton"] * (verb == "train")]
    names = {option.removeprefix("--").partition("=")[0] for option in options}
    return TEMPLATES.get_template("row.sh.j2").render(
        verb=verb, words=verb.split(), stops=stops, title=title, site=site,
        root=word(ROOT), folder=folder, options=options,
        handed_on=[one.upper().replace("-", "_") for one in HANDED_ON if one in names],
        launch=launch_command(site, ranks), environment=describe_environment(site),
        variables=[one for one in variables_of(site) if not launcher.is_launchers(one)],
        limit=LIMIT, doctor=doctor, run=run, **{"memory": (), **values})


def array_script(work: JobSettings, cases: list[AnyCase]) -> str:
    """Write the script of a job array that measures rows on equally many ranks."""
    ranks = cases[0].ranks
    options = row_options(work, f"mm3d-p{ranks:03d}-{cases[0].preset}-array", ranks,
                          cases[0].verb[0] in STOPPING)
    head = TEMPLATES.get_template("array.sh.j2").render(
        ranks=ranks, options=[*options, f"--array=0-{len(cases) - 1}"])
    return head + "".join(
        f'\nif [ "$SLURM_ARRAY_TASK_ID" = {index} ]; then\n{row_script(work, case)}fi\n'
        for index, case in enumerate(cases))


def collect_script(work: JobSettings, words: list[str]) -> str:
    """Write the script of the last job, which runs ``python -m jobs collect`` with `words`."""
    return TEMPLATES.get_template("collect.sh.j2").render(
        site=work.site, root=word(ROOT), options=collect_options(work),
        arguments=[*map(word, words)], environment=describe_environment(work.site))
