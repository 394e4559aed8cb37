"""What a site file says of GPUs, times and mail, in the lines that Slurm reads."""
import re

import pytest

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.errors import UsageError
from jobs import fitting, scripts, site
from jobs.__main__ import main
from jobs.scripts import Work

SITE = """
about = "a cluster"
[node]
ranks = 4
gpus = {gpus}
[launch]
gpu_binding = "{binding}"
[slurm]
time = "1:00:00"
{slurm}
"""
ROWS = {row.gpus: make_case(row, "tiny") for row in select_rows("weak", "3d")}


def load(tmp_path, slurm="", gpus='"a100:4"', binding="rank"):
    path = tmp_path / "mine.toml"
    path.write_text(SITE.format(slurm=slurm, gpus=gpus, binding=binding))
    return site.load_site(str(path))


def lines(text):
    return [option.strip("'") for option in re.findall(r"^#SBATCH (\S+)$", text, re.M)]


@pytest.mark.parametrize("gpus, slurm, ranks, expected", [
    ("4", "", 8, ["--gpus-per-node=4"]), ("4", "", 2, ["--gpus-per-node=2"]),
    ('"a100:4"', "", 8, ["--gpus-per-node=a100:4"]),
    ('"a100:4"', "", 2, ["--gpus-per-node=a100:2"]),
    ('"a100_3g.20gb:8"', "", 8, ["--gpus-per-node=a100_3g.20gb:8"]),
    ("4", 'gpu_option = "gres"', 8, ["--gres=gpu:4"]),
    ('"a100:4"', 'gpu_option = "gres"\ngres = "nvme:1,lscratch:5"', 8,
     ["--gres=gpu:a100:4,nvme:1,lscratch:5"]),
    ("4", 'gpu_option = "none"', 8, []), ("4", 'gpu_option = "none"\ngres = "nvme:1"', 8,
                                          ["--gres=nvme:1"]),
    ("4", 'gres = "nvme:1"', 8, ["--gpus-per-node=4", "--gres=nvme:1"])])
def test_gpus_by_type_and_by_the_option_that_a_site_knows(tmp_path, gpus, slurm, ranks, expected):
    mine = Work(load(tmp_path, slurm, gpus), "x", tmp_path)
    found = lines(scripts.pipeline_script(mine, "a", ranks, []))
    assert [option for option in found if re.match("--g(pu|res)", option)] == expected
    assert not [option for option in lines(scripts.collect_script(mine, []))
                if re.match("--g(pu|res)", option)]


def test_gpus_of_a_type_are_counted(tmp_path):
    found = load(tmp_path, gpus='"a100:2"', binding="none").node
    assert (found.gpu_count, found.gpu_type) == (2, "a100")
    with pytest.raises(UsageError, match="4 ranks a node cannot have one of 2 GPUs each"):
        load(tmp_path, gpus='"a100:2"')
    path = tmp_path / "mine.toml"
    path.write_text(path.read_text().replace(
        'gpus = "a100:2"', 'gpus = "a100:2"\ngpu_memory = "8 GiB"').replace('"rank"', '"none"'))
    assert fitting.rank_memory(site.load_site(str(path)), 64) == 4 * 2 ** 30


@pytest.mark.parametrize("gpus", ['"a100"', '"4"', '"a100:0"', '":4"', '"a100:four"', '"a b:4"',
                                  '"a100:4:2"', '""', '"a100:4,v100:4"'])
def test_gpus_that_are_neither_a_number_nor_a_type_with_one(tmp_path, gpus):
    with pytest.raises(UsageError, match="node.gpus = .*: give a number, or type and number such"):
        load(tmp_path, gpus=gpus)


@pytest.mark.parametrize("slurm, binding, said", [
    ('gpu_option = "gres"', "task", "slurm.gpu_option = 'gres' does not know; use 'rank'"),
    ('gpu_option = "none"', "task", "slurm.gpu_option = 'none' does not know; use 'rank'"),
    ('gres = "gpu:4"', "rank", "slurm.gres = 'gpu:4': GPUs are asked for by node.gpus"),
    ('gres = "nvme:1,gpu"', "rank", "GPUs are asked for by node.gpus"),
    ('gpu_option = "gpus"', "rank",
     "slurm.gpu_option: 'gpus' is unknown: choose one of gpus-per-node, gres, none")])
def test_requests_that_contradict_each_other(tmp_path, slurm, binding, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        load(tmp_path, slurm, binding=binding)


def test_limits_of_time_by_ranks(tmp_path, capsys):
    mine = Work(load(tmp_path, '[slurm.time_by_ranks]\n64 = "1-0"\n36 = "90"'), "x", tmp_path)
    times = {ranks: next(option for option in lines(scripts.row_script(mine, one))
                         if option.startswith("--time=")) for ranks, one in ROWS.items()}
    assert times == {8: "--time=1:00:00", 64: "--time=1-0"}
    assert "--time=90" in lines(scripts.training_script(mine, "a", 36, []))
    assert "--time=1-0" in lines(scripts.array_script(mine, [ROWS[64]]))
    assert "--time=0:20:00" in lines(scripts.collect_script(mine, []))
    assert main(["render", "--site", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out"),
                 "--table", "weak", "--scheme", "3d"]) == 0
    assert re.findall(r"(\d+) +\d+ +4 +(\S+)", capsys.readouterr().out) == [
        ("8", "1:00:00"), ("64", "1-0")]


def test_mail_of_failures_and_of_the_end(tmp_path):
    mine = Work(load(tmp_path, 'mail = "me@example.org"'), "x", tmp_path)
    for text, kinds in ((scripts.row_script(mine, ROWS[8]), "FAIL"),
                        (scripts.collect_script(mine, []), "END,FAIL")):
        assert {"--mail-user=me@example.org", f"--mail-type={kinds}"} < {*lines(text)}
    without = Work(load(tmp_path), "x", tmp_path)
    assert not [one for one in lines(scripts.row_script(without, ROWS[8])) if "--mail" in one]
    with pytest.raises(UsageError, match="slurm.mail = 'me; touch hit': may have letters"):
        load(tmp_path, 'mail = "me; touch hit"')
