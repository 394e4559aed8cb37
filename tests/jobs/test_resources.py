"""What a site file says of GPUs, times and mail, in the lines that Slurm reads."""
import re

import pytest

from jobs import fitting, scripts
from jobs.__main__ import main
from sites import ROW, ROWS, options_of, work_at


@pytest.mark.parametrize("gpus, slurm, ranks, expected", [
    (4, {}, 8, ["--gpus-per-node=4"]), (4, {}, 2, ["--gpus-per-node=2"]),
    ("a100:4", {}, 8, ["--gpus-per-node=a100:4"]), ("a100:4", {}, 2, ["--gpus-per-node=a100:2"]),
    ("a100_3g.20gb:8", {}, 8, ["--gpus-per-node=a100_3g.20gb:8"]),
    (4, {"gpu_option": "gres"}, 8, ["--gres=gpu:4"]),
    ("a100:4", {"gpu_option": "gres", "gres": "nvme:1,lscratch:5"}, 8,
     ["--gres=gpu:a100:4,nvme:1,lscratch:5"]),
    (4, {"gpu_option": "none"}, 8, []),
    (4, {"gpu_option": "none", "gres": "nvme:1"}, 8, ["--gres=nvme:1"]),
    (4, {"gres": "nvme:1"}, 8, ["--gpus-per-node=4", "--gres=nvme:1"])])
def test_gpus_by_type_and_by_the_option_that_a_site_knows(tmp_path, gpus, slurm, ranks, expected):
    mine = work_at(tmp_path, node={"gpus": gpus, "ranks": 8 if "3g" in str(gpus) else 4},
                   slurm=slurm)
    found = options_of(scripts.verb_script(mine, "measure pipeline", "a", ranks, []))
    assert [option for option in found if re.match("--g(pu|res)", option)] == expected


def test_gpus_of_a_type_are_counted(tmp_path):
    found = work_at(tmp_path, node={"gpus": "a100:2", "gpu_memory": "8 GiB"}).site
    assert (found.node.gpu_count, found.node.gpu_type) == (2, "a100")
    assert fitting.rank_memory(found, 64) == 4 * 2 ** 30


def test_limits_of_time_by_ranks(tmp_path, capsys):
    mine = work_at(tmp_path, slurm={"time_by_ranks": {"64": "1-0", "36": "90"}})
    times = {ranks: next(option for option in options_of(scripts.row_script(mine, one))
                         if option.startswith("--time=")) for ranks, one in ROWS.items()}
    assert times == {8: "--time=1:00:00", 64: "--time=1-0"}
    assert "--time=90" in options_of(scripts.verb_script(mine, "train", "a", 36, []))
    assert "--time=1-0" in options_of(scripts.array_script(mine, [ROWS[64]]))
    assert main(["render", "--site", mine.name, "--out", str(mine.out), "--table", "weak",
                 "--scheme", "3d"]) == 0
    assert re.findall(r"(\d+) +\d+ +- +(\S+)", capsys.readouterr().out) == [
        ("8", "1:00:00"), ("64", "1-0")]


def test_mail_of_failures_and_of_the_end(tmp_path):
    mine = work_at(tmp_path, slurm={"mail": "me@example.org"})
    for text, kinds in ((scripts.row_script(mine, ROW), "FAIL"),
                        (scripts.collect_script(mine, []), "END,FAIL")):
        assert {"--mail-user=me@example.org", f"--mail-type={kinds}"} < {*options_of(text)}
    assert "--mail" not in scripts.row_script(work_at(tmp_path), ROW)
