"""Jobs under a real Slurm: who starts where on nodes with spare cores, and with which GPUs.

The ranks also have the variables of the site file, though the jobs have no environment.
"""
import itertools
import re
import sys

import pytest

from jobs import scripts
from sites import work_at
from slurm_cluster import running
from slurm_user import ON_SLURM, PATIENCE, User, check_run
from support import ROOT

pytestmark = ON_SLURM
# A Python that only says where it was started, and as which rank.
WITNESS = """#!/bin/bash
echo "$SLURM_PROCID $SLURMD_NODENAME-$MEANT" >> "{said}-$2-$3"
"""


@pytest.fixture(scope="module", params=[64, 40])
def spare(request, tmp_path_factory):
    """Three nodes, of which four ranks of eight cores leave half, or a fifth, unused."""
    with running(tmp_path_factory.mktemp("spare"), nodes=3, cpus=request.param) as started:
        yield started


def places(said):
    """By rank its node and variable, as the witnesses of a step have said it."""
    found = sorted((int(rank), place) for rank, place in map(str.split, said.open()))
    return [place for _, place in found]


def test_no_node_has_more_ranks_than_the_site_says(spare, tmp_path):
    """Whatever else a node has room for: ranks fill one node after the other."""
    users, jobs = [], []
    for ranks, exclusive in itertools.product((3, 6, 8), (True, False)):
        folder = tmp_path / f"{ranks}-{exclusive}"
        folder.mkdir()
        witness = folder / "python"
        witness.write_text(WITNESS.format(said=folder / "said"))
        witness.chmod(0o755)
        user = User(spare, folder, ranks=4, cores=8, gpus=4, exclusive=exclusive, python=witness,
                    slurm={"options": ["--export=NONE"]}, environment={"MEANT": "so"})
        done = spare.command(sys.executable, "-m", "jobs", "pipeline", "--site", str(user.site),
                             "--out", str(user.out), "--ranks", str(ranks), "--submit", "--",
                             "--stages", "1", "--scheme", "1d", cwd=ROOT)
        users.append((user, folder, {3: [3], 6: [4, 2], 8: [4, 4]}[ranks]))
        jobs += re.findall(r"^job (\d+)$", done.stdout, re.M)
        assert len(jobs) == len(users), done.stdout + done.stderr
    assert spare.quiet(PATIENCE, jobs), [user.logs() for user, *_ in users]
    for user, folder, counts in users:
        for step in ("bench.doctor.census-census", "bench-measure"):
            found = places(folder / f"said-{step}")
            assert found == sorted(found), user.logs()
            assert [found.count(place) for place in sorted(set(found))] == counts, user.logs()
            assert all(re.fullmatch(r"n\d-so", place) for place in found), user.logs()


def test_a_row_on_nodes_with_spare_cores(spare, tmp_path):
    """From submission to the result, with the pre-flight checks."""
    user = User(spare, tmp_path, ranks=4, cores=8, gpus=4, exclusive=True)
    job, = user.submit()
    assert spare.quiet(PATIENCE, [job]), user.logs()
    assert "2 nodes with 4 ranks" in user.logs()
    user.cancel()
    assert user.jobs("collect")[0] == 0, user.logs()
    run, = user.runs()
    check_run(run)
    assert run.configuration["nodes"] == 2


# --- GPUs with a type, and the last job's own partition ------------------------------------

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
