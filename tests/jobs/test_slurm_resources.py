"""GPUs with a type, times and the last job's own partition, as a real Slurm understands them."""
import math
import re
import sys

import pytest

from jobs import scripts, site
from jobs.scripts import Work
from slurm_cluster import running
from slurm_user import ON_SLURM
from support import ROOT

pytestmark = ON_SLURM
SITE = """
about = "nodes with four A100 each"
[slurm]
partition = "gpu"
exclusive = false
time = "0:10:00"
{slurm}
[collect]
partition = "login"
options = ["--mem=1G"]
[node]
ranks = 4
gpus = "{gpus}"
[launch]
mpi = "none"
gpu_binding = "{binding}"
"""


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Sixteen nodes with four A100 each, in two partitions."""
    with running(tmp_path_factory.mktemp("typed"), 16, 64, 4, "gpu", gpu_type="a100") as cluster:
        cluster.command("scontrol", "create", "PartitionName=login", "Nodes=ALL", "State=UP")
        yield cluster


def ranks_of(cluster, folder, ranks=8, gpus="a100:4", binding="task", slurm=""):
    """What each rank of a job with the options and the launcher of a site prints."""
    path = folder / "mine.toml"
    path.write_text(SITE.format(gpus=gpus, binding=binding, slurm=slurm))
    work = Work(site.load_site(str(path)), str(path), folder / "out")
    (work.folder / "logs").mkdir(parents=True)
    script = folder / "job.sh"
    script.write_text("\n".join([
        "#!/bin/bash", *(f"#SBATCH {option}" for option in scripts.row_options(work, "x", ranks)),
        f"{scripts.quote(scripts.launch_command(work.site, ranks))} bash -c "
        "'echo $SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES'", ""]))
    done = cluster.command("sbatch", "--wait", str(script))
    logs = "".join(path.read_text() for path in (work.folder / "logs").glob("*"))
    assert done.returncode == 0, done.stderr + logs
    found = sorted(line.split() for line in logs.splitlines())
    assert all(len(words) == 4 for words in found), logs
    return found


@pytest.mark.parametrize("binding, slurm", [
    ("task", ""), ("rank", ""), ("rank", 'gpu_option = "gres"')])
def test_ranks_have_gpus_of_the_type(typed, tmp_path, binding, slurm):
    found = ranks_of(typed, tmp_path, binding=binding, slurm=slurm)
    assert [int(rank) for rank, *_ in found] == list(range(8))
    for node in {node for _, node, *_ in found}:
        seen = [gpus.split(",") for _, at, _, gpus in found if at == node]
        assert len(seen) == 4
        if binding == "task":
            assert sorted(seen) == [["0"], ["1"], ["2"], ["3"]]
        else:
            assert seen == [["0", "1", "2", "3"]] * 4


def test_the_site_of_a100_is_taken_and_another_type_refused(typed, tmp_path):
    def test_only(name):
        done = typed.command(sys.executable, "-m", "jobs", "submit", "--test-only", "--site", name,
                             "--out", str(tmp_path / "out"), cwd=ROOT)
        return done.returncode, done.stdout.splitlines()

    status, lines = test_only("a100")
    assert status == 0 and len(lines) == 19, lines
    assert all("in partition gpu" in line for line in lines)
    path = tmp_path / "mine.toml"
    for slurm in ("", 'gpu_option = "gres"'):
        path.write_text(SITE.format(gpus="a100:4", binding="rank", slurm=slurm))
        status, lines = test_only(str(path))
        assert status == 0 and [re.search("in partition (.*)", line)[1] for line in lines] == (
            ["gpu"] * 18 + ["login"])
        path.write_text(SITE.format(gpus="h100:4", binding="rank", slurm=slurm))
        status, lines = test_only(str(path))
        assert status == 1 and sum(": refused: " in line for line in lines) == 18


@pytest.mark.parametrize("text", ["90", "90:00", "5:30", "2:00:00", "1-12", "1-12:30",
                                  "1-00:00:05", "0", "UNLIMITED", "0:00:30", "1:5:0"])
def test_limits_of_time_are_what_slurm_takes_them_for(typed, text):
    """It rounds to whole minutes."""
    done = typed.command("sbatch", "--parsable", "--hold", f"--time={text}", "--wrap=true")
    job = done.stdout.strip()
    shown = typed.command("scontrol", "show", "job", job).stdout
    typed.command("scancel", job)
    limit = re.search(r"TimeLimit=(\S+)", shown)[1]
    expected = site.time_limit(text)
    if limit == "UNLIMITED":
        assert expected == math.inf
    else:
        assert site.time_limit(limit) == math.ceil(expected / 60) * 60
