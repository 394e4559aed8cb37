"""Site files for the tests of jobs, and what scripts that are made of them say to Slurm."""
import re

import tomli_w

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from jobs import site
from jobs.scripts import JobSettings

ROWS = {row.gpus: make_case(row, "tiny") for row in select_rows("weak", "3d")}
ROW = ROWS[8]
# Texts that a shell, or Slurm, would not take for a word.
HOSTILE = ["$(touch hit)", "`touch hit`", "; touch hit;", "' ; touch hit; '", '" ; touch hit; "',
           "a\\", "&& touch hit", "| tee hit", "${IFS}touch", "#", "-w 1", "!!", "a b"]


def site_file(folder, **tables) -> str:
    """Write a site file: of four ranks a node and an hour, but for what these tables say."""
    tables = {"about": "a cluster"} | tables
    for name, least in (("slurm", {"time": "1:00:00"}), ("node", {"ranks": 4})):
        tables[name] = least | tables.get(name, {})
    path = folder / "mine.toml"
    path.write_text(tomli_w.dumps(tables))
    return str(path)


def work_at(folder, **tables) -> JobSettings:
    """The work of a site with these tables."""
    name = site_file(folder, **tables)
    return JobSettings(site.load_site(name), name, folder / "out")


def command_of(folder, verb: str, *more: str, **tables) -> list[str]:
    """The words of a command about `ROW` alone, unless `more` of them say another."""
    return [verb, "--site", site_file(folder, **tables), "--table", "weak", "--scheme", "3d",
            "--ranks", "8", "--preset", "tiny", "--out", str(folder / "out"), *more]


def options_of(script: str) -> list[str]:
    """The options of sbatch in a script."""
    return [option.strip("'") for option in re.findall(r"^#SBATCH (\S+)$", script, re.M)]
