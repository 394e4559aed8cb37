"""GPUs with a type, times and the last job's own partition, as a real Slurm understands them."""
import re
import sys

import pytest

from jobs import scripts
from sites import work_at
from slurm_cluster import running
from slurm_user import ON_SLURM
from support import ROOT

pytestmark = ON_SLURM


def made(folder, gpus="a100:4", binding="task", **slurm):
    """The work of a site of nodes with four A100 each."""
    return work_at(
        folder, slurm={"partition": "gpu", "exclusive": False, "time": "0:10:00"} | slurm,
        collect={"partition": "login", "options": ["--mem=1G"]}, node={"gpus": gpus},
        launch={"mpi": "none", "gpu_binding": binding})


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Sixteen nodes with four A100 each, in two partitions."""
    with running(tmp_path_factory.mktemp("typed"), 16, 64, 4, "gpu", gpu_type="a100") as cluster:
        cluster.command("scontrol", "create", "PartitionName=login", "Nodes=ALL", "State=UP")
        yield cluster


def ranks_of(cluster, folder, ranks=8, **more):
    """What each rank of a job with the options and the launcher of a site prints."""
    work = made(folder, **more)
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
    ("task", {}), ("rank", {}), ("rank", {"gpu_option": "gres"})])
def test_ranks_have_gpus_of_the_type(typed, tmp_path, binding, slurm):
    found = ranks_of(typed, tmp_path, binding=binding, **slurm)
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
    for slurm in ({}, {"gpu_option": "gres"}):
        status, lines = test_only(made(tmp_path, binding="rank", **slurm).name)
        assert status == 0 and [re.search("in partition (.*)", line)[1] for line in lines] == (
            ["gpu"] * 18 + ["login"])
        status, lines = test_only(made(tmp_path, "h100:4", "rank", **slurm).name)
        assert status == 1 and sum(": refused: " in line for line in lines) == 18
