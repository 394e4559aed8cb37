"""Jobs under a real Slurm whose nodes have more cores than the ranks use: who starts where.

The ranks also have the variables of the site file, though the jobs have no environment.
"""
import itertools
import re
import sys

import pytest

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


# What a user's shell, or one in another job, may have set; srun obeys all of it.
HOSTILE = {"SLURM_STDOUTMODE": "none", "SLURM_GPUS_PER_NODE": "1", "SLURM_GRES": "gpu:1",
           "SLURM_CONSTRAINT": "x", "SLURM_EXCLUSIVE": "1", "SLURM_TASK_PROLOG": "/bin/false",
           "SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "NONE", "SLURM_DISTRIBUTION": "cyclic",
           "SLURM_MEM_PER_CPU": "1", "SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS_PER_NODE": "1",
           "SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_ARRAY_JOB_ID": "99",
           "SLURM_ARRAY_TASK_ID": "3", "PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_LABELIO": "1"}


def test_a_script_that_is_submitted_by_hand_from_a_shell_of_another_job(spare, tmp_path):
    user = User(spare, tmp_path, ranks=4, cores=8, gpus=0)
    assert user.jobs("render")[0] == 0
    script, = (user.out / "jobs").glob("strong-*.sh")
    done = spare.command("sbatch", "--parsable", str(script), **HOSTILE)
    job = done.stdout.strip()
    assert spare.quiet(PATIENCE, [job]), user.logs()
    ended, = user.out.rglob("ended-*")
    assert ended.name == f"ended-{job}" and ended.read_text() == "done\n", user.logs()
    assert "2 nodes with 4 ranks" in user.logs()


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
