"""The verbs that read results: ``table``, ``plot``, ``report`` and ``compare``."""

import argparse

from bench import formats

VERBS = ("table", "plot", "report", "compare")


def add_verbs(verbs) -> None:
    """Give the command line the verbs."""
    table = _verb(verbs, "table", "print the tables from the files of a folder")
    table.add_argument("--parts", action="store_true", help=(
        "where the time of each run goes, and its figures of merit, instead"))
    plot = _verb(verbs, "plot", "draw the figures from the files of a folder")
    plot.add_argument("--format", default="png", metavar="NAMES", help=(
        "png, svg or pdf, or several with commas between (default png)"))
    report = _verb(verbs, "report", "write all results of a folder into one HTML page")
    report.add_argument("--out", metavar="FILE", help="the page (default DIR/report.html)")
    _add_compare(verbs.add_parser("compare", help=(
        "two sides of runs, case by case; what differs is said from three runs a side on")))
    _format_option(table)


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("sides", nargs="*", metavar="A B", help=(
        "folders of .h5 files, or files: all runs of a case in a folder are runs of that side"))
    for name, side in (("before", "A"), ("after", "B")):
        compare.add_argument(f"--{name}", nargs="+", metavar="RUN", help=(
            f"the files or folders of side {side}, instead of A B"))
    compare.add_argument("--fail-on-regression", type=float, metavar="PERCENT", help=(
        "exit with 1 when B is slower in a case by more than this, and the test says so too; "
        "takes three runs a side"))
    _format_option(compare)


def _format_option(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--format", default="text", choices=formats.FORMATS, help=(
        "how (default text); csv is one file of all tables, with numbers in full"))


def _verb(verbs, name: str, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.add_argument("folder", metavar="DIR", help="the folder with the .h5 files")
    return parser


def run(arguments) -> int:
    """Do what the verb says; the exit status.

    Raises
    ------
    UsageError
        When the results cannot be compared.
    StoreError
        When there are no results.
    """
    if arguments.verb == "table" and arguments.parts:
        from bench.merit import document
        print(formats.render(document(arguments.folder), arguments.format))
    elif arguments.verb == "table":
        from bench.tables import tables
        print(tables(arguments.folder, arguments.format))
    elif arguments.verb == "report":
        from bench.report import report
        print(report(arguments.folder, arguments.out))
    elif arguments.verb == "compare":
        from bench.compare import compare
        return compare(arguments)
    else:
        from bench.plots import plots
        drawn, left_out = plots(arguments.folder, tuple(arguments.format.split(",")))
        print(*drawn, *[f"not drawn: {why}" for why in left_out], sep="\n")
    return 0
