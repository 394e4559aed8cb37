"""Run the command line of ``python -m jobs``: render, submit, status, collect."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Sequence

from bench.cases import combined, variants
from bench.cases.case import make_case
from bench.cases.selection import equal_token_rows, select_rows
from bench.errors import UsageError, status_of
from bench.records import atomic
from bench.records.notes import counted
from bench.document import Column, Table
from bench.reports.formats import format_text
from bench.command_line import options, row_options
from bench.command_line.config_options import add_fields, told
from bench.command_line.parser import Parser
from bench.prediction.pipelines.waited_step import find_machine
from jobs import fitting, scripts, single, site as sites, slurm, standings
from jobs.collect import collect, format_standing
from jobs.own_options import list_verb_problems
from jobs.scripts import JobSettings
from jobs.standings import DONE, UNCLEAR, UNDER_WAY
from mm3d.config import Division
from mm3d.console import complain, protect, say
from mm3d.schemes import find_scheme

COMMAND = "mm3d-jobs"    # the name of this program where it is installed
PROGRAM = COMMAND if Path(sys.argv[0]).name == COMMAND else "python -m jobs"


def parser() -> Parser:
    """Return the command line."""
    top = Parser(prog=PROGRAM, description=(
        "Measure the rows of tables, pipelines and trainings as batch jobs under Slurm."))
    top.add_program_options(COMMAND)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    found = {}
    for name, (about, add) in VERBS.items():
        found[name] = verbs.add_parser(name, help=about, description=about.capitalize() + ".")
        found[name].add_argument(
            "--site", type=sites.full_site_name, required=True, metavar="SITE", help=(
                f"what the cluster is like: {', '.join(sites.supplied_sites())}, or a .toml file"))
        found[name].add_argument("--out", metavar="DIR", help=(
            "write results, scripts and logs into this folder (default results/local/SITE)"))
        add(found[name], name)
    found["submit"].add_argument("--array", action="store_true",
                                 help="one job array for each rank count instead of one job a row")
    found["submit"].add_argument("--test-only", action="store_true",
                                 help="only ask Slurm whether it would take the scripts")
    found["train"].add_argument("--jobs", type=options.whole(1), default=1, metavar="N", help=(
        "submit so many jobs: each goes on where the one before has stopped (default 1)"))
    return top


def add_job_rows(parser: Parser, verb: str) -> None:
    """Add the options of a verb about rows."""
    row_options.add_selection(parser, "paper")
    parser.add_argument("--ranks", type=options.numbers, metavar="N,...",
                        help="only the rows of these numbers of ranks (default: all)")
    parser.add_argument("--inside", metavar="AXIS", help=(
        "the direction of the grid that stays inside a node (default: the site file's, or the "
        "one that moves the most words)"))
    add_fields(parser, Division, ["recompute"], told(Division, ["recompute"], recompute=(
        ": the first of none, selective, full and so on with which the row fits the memory that "
        "the site file gives")))
    parser.add_argument("--machine", metavar="NAME", help=(
        "predict each row of --table combined before it is measured, by this machine's model: a "
        "supplied one or a .toml file (default: the site file's, or none)"))
    row_options.add_variant(parser)


def add_single(parser: Parser, verb: str) -> None:
    """Add the options of a verb about a job that is no row."""
    parser.add_argument("--ranks", type=options.whole(1), required=True, metavar="N",
                        help="ranks of the job, of all replicas")
    parser.add_argument("--submit", action="store_true", help="also submit the script")
    parser.add_argument("--name", metavar="NAME", help=(
        "the job and its script, and the checkpoints of a training, have this name (default: "
        "pipeline-pRANKS and digits that stand for the options, or train-pRANKS)"))
    parser.add_argument("words", nargs="*", metavar="-- OPTION ...",
                        help=f"options of bench {single.VERBS[verb]}")


VERBS = {
    "render": ("write the scripts, and say what they ask for", add_job_rows),
    "submit": ("submit what has no result and is not under way, and a last job that collects",
               add_job_rows),
    "status": ("say how each row stands, and why; and each pipeline and training that was "
               "submitted", add_job_rows),
    "collect": ("merge what is there, name what is missing, print the tables and draw the "
                "figures", add_job_rows),
    "pipeline": ("write a script that runs bench measure pipeline with the words after --, and "
                 "submit it", add_single),
    "train": ("write a script that runs bench train with the words after --, and submit it, or "
              "as many jobs as go on one after the other", add_single)}


def work_and_cases(arguments) -> tuple[JobSettings, list[combined.AnyCase]]:
    """Read the work and the cases from the options; UsageError for those that contradict."""
    site = sites.load_site(arguments.site)
    trains = arguments.table == combined.TABLE
    cases = (training_cases if trains else table_cases)(arguments, site)
    counts = sorted({one.ranks for one in cases})
    wanted = arguments.ranks or counts
    if not set(wanted) <= set(counts):
        raise UsageError(f"--ranks {options.as_given(wanted)}: these rows are for "
                         f"{', '.join(map(str, counts))} ranks; choose some of them")
    cases = [one for one in cases if one.ranks in wanted]
    out = Path(arguments.out or atomic.LOCAL / Path(arguments.site).stem)
    return JobSettings(site, arguments.site, scripts.check_path(out), arguments.inside,
                       arguments.recompute, machine_of(arguments, site) if trains else None), cases


def table_cases(arguments, site: sites.Site) -> list[combined.AnyCase]:
    """List the cases of the paper's tables that the options choose."""
    if arguments.machine:
        raise UsageError(f"--machine {arguments.machine}: only rows of --table {combined.TABLE} "
                         f"are predicted; leave it out")
    chosen = select_rows(arguments.table, arguments.scheme)
    variant = row_options.variant(arguments)
    chosen += equal_token_rows(chosen) if arguments.equal_tokens else []
    if variant.waits and site.run.backend != "numpy":
        raise UsageError(f"--preset {arguments.preset}: its ranks wait for their work, with "
                         f"arrays in host memory, but --site {arguments.site} says run.backend = "
                         f"{site.run.backend!r}; choose --preset paper, or another site")
    variants.check_variant(variant, (row.scheme for row in chosen), recompute=arguments.recompute)
    for scheme in dict.fromkeys(row.scheme for row in chosen):
        directions = find_scheme(scheme).directions
        inside = arguments.inside or site.inside.get(scheme, "auto")
        if inside not in ("auto", *directions):
            given = (f"--inside {inside}" if arguments.inside else
                     f"--site {arguments.site}: inside.{scheme} = {inside!r}")
            raise UsageError(f"{given}: the grid of scheme {scheme!r} has the "
                             f"directions {', '.join(directions)}; choose one of them, or auto")
    return [make_case(row, arguments.preset, variant) for row in chosen]


def training_cases(arguments, site: sites.Site) -> list[combined.AnyCase]:
    """List all rows of ``--table combined``, whose ranks compute."""
    combined.refuse_options(vars(arguments), ("preset", "machine"))
    if arguments.preset not in combined.PRESETS:
        raise UsageError(f"--table {combined.TABLE} --preset {arguments.preset}: "
                         f"{' or '.join(combined.PRESETS)} would do")
    found = [replace(one, preset=arguments.preset) for one in combined.list_cases()]
    for problem in list_verb_problems(" ".join(found[0].verb),
                                      [found[0].selector, *site.run.options]):
        raise UsageError(f"--site {arguments.site}: run.options: --table {combined.TABLE}: "
                         f"{problem}")
    return found


def machine_of(arguments, site: sites.Site) -> str | None:
    """Return the machine that predicts trainings, a file with its folder; None for none."""
    name = arguments.machine or site.run.machine
    if name is None:
        return None
    find_machine(name, 1)    # which says what is wrong with it
    return str(Path(name).absolute()) if Path(name).suffix == ".toml" else name


def foretold(work: JobSettings, cases: list[combined.AnyCase]) -> list[str]:
    """Say which machine predicts the trainings on so many ranks, or why none does."""
    ranks: dict[str, list[int]] = {}
    for count in sorted({one.ranks for one in cases if isinstance(one, combined.TrainingCase)}):
        machine, reason = find_machine(work.machine, count)
        ranks.setdefault(f"predicted before by {machine.name}" if machine else
                         f"measured, but not predicted: {reason}"
                         f"{' (--machine)' * (not work.machine)}", []).append(count)
    return [f"rows of {options.as_given(counts)} ranks: {what}" for what, counts in ranks.items()]


def render_scripts(work: JobSettings, cases: list[combined.AnyCase], arguments) -> None:
    """Write the script of every row, and of the last job."""
    single.make_folders(work)
    for one in cases:
        # As a whole: a job may be reading the old script.
        atomic.replace(work.script(one.name), scripts.row_script(work, one), scripts.MODE)
    # The job may run in another folder.
    site = work.name if work.name in sites.supplied_sites() else Path(work.name).absolute()
    again = [f"--site={site}", f"--table={arguments.table}",
             f"--scheme={arguments.scheme}", f"--preset={arguments.preset}", f"--out={work.out}",
             *[f"--ranks={options.as_given(arguments.ranks)}"] * bool(arguments.ranks),
             *["--equal-tokens"] * arguments.equal_tokens,
             *[f"--machine={work.machine}"] * bool(work.machine),
             *row_options.variant(arguments).arguments()]
    atomic.replace(work.folder / "collect.sh", scripts.collect_script(work, again), scripts.MODE)


def overview(work: JobSettings, cases: list[combined.AnyCase]) -> str:
    """Make the table of the resources of each row."""
    site = work.site
    lines = [[one.title, one.ranks, scripts.count_nodes(site, one.ranks),
              scripts.gpus_per_node(site, one.ranks) or "-",
              scripts.time_of(site, one.ranks), work.inside_of(one), fits.recompute,
              "-" if fits.peak is None else f"{fits.peak / 2 ** 30:.1f}",
              "-" if fits.peak is None else "yes" if fits.fits else "NO", f"{one.name}.sh"]
             for one, fits in ((one, work.fit(one)) for one in cases)]
    columns = [Column(name) for name in ("row", "ranks", "nodes", "GPUs a node")]
    columns += [Column(name, align="<") for name in ("time", "inside", "recompute")]
    columns += [Column("GiB a rank", align="."), Column("fits", align="<"),
                Column("script", align="<")]
    return format_text([Table("Jobs", columns, lines)])


def submit(work: JobSettings, cases: list[combined.AnyCase], arguments) -> int:
    """Submit the missing rows, then the last job; 1 if a row was refused, or cannot be judged."""
    with standings.locked(work):
        render_scripts(work, cases, arguments)
        found = standings.list_standings(work, cases, standings.read_queues(work))
        unclear = [one for one in found if one.state == UNCLEAR]
        for one in unclear:
            complain(f"not submitted: {format_standing(one)}")
        due = [one.case for one in found if one.state not in (DONE, UNCLEAR, *UNDER_WAY)]
        refused = [one for one in due if not work.fit(one).fits]
        for one in refused:
            most = fitting.rank_memory(work.site, one.ranks)
            complain(f"refused: {one.title}: {work.fit(one).refusal(most)}")
        due = [one for one in due if one not in refused]
        under_way = [one.job for one in found if one.state in UNDER_WAY]
        say(f"{counted(len(cases), 'row')}: {sum(one.state == DONE for one in found)} done, "
            f"{len(under_way)} under way, {len(due)} to submit", *foretold(work, due),
            *[f"commit {standings.present_source()}; a job runs the source as it is when it "
              "starts"] * bool(due))
        new: list[str] = []
        groups: dict[int | str, list[combined.AnyCase]] = {}
        for one in due:
            groups.setdefault(one.ranks if arguments.array else one.name, []).append(one)
        try:
            for group in groups.values():
                new += submit_group(work, group, arguments.array)
            if new:
                say(submit_collect(work, under_way + new))
        except slurm.SlurmError as error:
            complain(f"error: the queue took {len(new)} of {len(due)} rows: {error}\nSubmit again "
                     "for the others; python -m jobs collect collects")
            return 1
    return int(bool(refused or unclear))


def submit_group(work: JobSettings, group: list[combined.AnyCase], array: bool) -> list[str]:
    """Submit rows as a job array, or one as a job; return their jobs."""
    if not array:
        jobs = [slurm.submit_script(work.script(group[0].name))]
    else:
        script = work.folder / f"array-p{group[0].ranks:03d}-{group[0].preset}.sh"
        atomic.replace(script, scripts.array_script(work, group), scripts.MODE)
        number, sign, cluster = slurm.submit_script(script).partition(";")
        jobs = [f"{number}_{index}{sign}{cluster}" for index in range(len(group))]
    for one, job in zip(group, jobs):
        standings.record_job(work, "row", one.name, one.title, job)
        say(f"job {job}: {one.title}")
    return jobs


def submit_collect(work: JobSettings, jobs: list[str]) -> str:
    """Submit the job that collects results after `jobs` have ended; return a line for the user."""
    clusters = sorted(set(map(slurm.cluster_of_job, jobs)))
    if len(clusters) > 1:
        return (f"the jobs are on {len(clusters)} clusters, and none waits for those of another: "
                "collect with python -m jobs collect when they have ended")
    before = dict.fromkeys(slurm.number_of_job(job).partition("_")[0] for job in jobs)
    last = slurm.submit_script(work.folder / "collect.sh", *slurm.on_cluster(clusters[0]),
                               f"--dependency=afterany:{':'.join(before)}")
    return f"job {last} collects when they have ended"


def test_only(work: JobSettings, cases: list[combined.AnyCase], arguments) -> int:
    """Ask Slurm whether it would take each script; 1 if it would refuse one."""
    render_scripts(work, cases, arguments)
    refused = 0
    for path in [*(work.script(one.name) for one in cases), work.folder / "collect.sh"]:
        try:
            say(f"{path.name}: {slurm.test_script(path)}")
        except slurm.SlurmError as error:
            refused += 1
            say(f"{path.name}: refused: {error}")
    return int(bool(refused))


def show_status(work: JobSettings, cases: list[combined.AnyCase]) -> int:
    """Print the state of all jobs; return 1 where a queue is silent, else 0."""
    queue = standings.read_queues(work)
    found = standings.list_standings(work, cases, queue)
    say(*map(format_standing, found), *single.describe_submitted(work, queue))
    for line in standings.list_other_sources(work, found):
        complain(f"warning: {line}")
    for why in dict.fromkeys(queue.silent.values()):
        complain(f"error: {why}")
    return int(bool(queue.silent))


def run_verb(arguments) -> int:
    """Run the verb; return the exit status."""
    if arguments.verb in single.VERBS:
        times = getattr(arguments, "jobs", 1) * arguments.submit
        single.write_and_submit(arguments.verb, arguments.site, arguments.out, arguments.ranks,
                                arguments.words, arguments.name, times)
        return 0
    work, cases = work_and_cases(arguments)
    if arguments.verb == "submit":
        return (test_only if arguments.test_only else submit)(work, cases, arguments)
    if arguments.verb == "collect":
        return collect(work, cases)
    if arguments.verb == "status":
        return show_status(work, cases)
    render_scripts(work, cases, arguments)
    say(f"{overview(work, cases)}\n", *foretold(work, cases),
        f"in {work.folder}; nothing is submitted")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parser().parse_args(argv)
    return status_of(lambda: run_verb(arguments), slurm.SlurmError)


def command() -> NoReturn:
    """Run the program."""
    protect()
    sys.exit(main())


if __name__ == "__main__":
    command()
