"""What Slurm's commands are asked, and how their answers are read, with programs that play them.

Wrappers print banners, users set variables that change what is printed, and a job may be on
another cluster, or somebody else's.
"""
import os
import re
import shlex

import pytest

from bench.records import run_file
from jobs import slurm, standings
from jobs.__main__ import main
from records import made_up
from sites import ROW, command_of, site_file, work_at

# What the commands must not see; of all that begin with these, Slurm's manual pages name some.
HOSTILE = {
    "SQUEUE_STATES": "RUNNING", "SQUEUE_FORMAT": "%u", "SQUEUE_USERS": "nobody",
    "SQUEUE_SORT": "-i", "SACCT_FORMAT": "User", "SACCT_LOCAL": "1", "SCONTROL_FEDERATION": "1",
    "SLURM_TIME_FORMAT": "%s", "SLURM_CLUSTERS": "elsewhere", "SLURM_BITSTR_LEN": "1",
    "SBATCH_EXPORT": "NONE", "SBATCH_CLUSTERS": "elsewhere", "SRUN_EXPORT_ENV": "NONE",
    "SALLOC_PARTITION": "other", "SLURM_EXPORT_ENV": "NIL", "SLURM_DISTRIBUTION": "cyclic"}


def test_no_variable_of_the_user_reaches_a_command(commands, monkeypatch):
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token", "SLURM_CONF_SERVER": "head"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    commands.answer("squeue", "echo '7|PENDING|Priority'")
    assert slurm.read_queue().jobs == {"7": slurm.JobState("PENDING", "Priority")}
    slurm.look_up("7")
    env = [line.partition("=") for line in
           (commands.said.parent / "said.env").read_text().splitlines()]
    found = {name: value for name, _, value in env
             if re.match("SBATCH|SLURM|SQUEUE|SACCT|SCONTROL|SALLOC|SRUN", name)}
    assert found == kept and len(commands.said.read_text().splitlines()) == 3


@pytest.mark.parametrize("printed, job", [
    ("7", "7"), ("7;here", "7;here"), ("Welcome!\n12 nodes are down\n7", "7"),
    ("7;here\nYour project has 100 hours left", "7;here"), ("1\n  7  \n", "7")])
def test_the_number_of_a_job_among_what_wrappers_print(commands, tmp_path, printed, job):
    commands.answer("sbatch", f"cat <<'END'\n{printed}\nEND\necho 99 >&2")
    assert slurm.submit_script(tmp_path / "x.sh") == job


@pytest.mark.parametrize("printed", ["Welcome!", "", "job 7 submitted", "7 jobs", "7;"])
def test_no_number_of_a_job_is_an_error_that_says_what_was_printed(
        commands, tmp_path, printed, capsys):
    commands.answer("sbatch", f"echo '{printed}'")
    commands.answer("squeue", "")
    assert main(command_of(tmp_path, "submit")) == 1
    said = capsys.readouterr()
    assert f"sbatch printed no number of a job, but {printed!r}; look with squeue" in said.err
    assert not (tmp_path / "out" / "jobs" / "submitted.jsonl").exists()


def test_banners_around_the_queue_and_around_an_error(commands, tmp_path):
    answer = ["Maintenance | on | Monday", "CLUSTER: here", "7_3|RUNNING|None", "8|PENDING|(a|b)",
              "9|REVOKED|None"]
    commands.answer("squeue", f"printf '%s\\n' {shlex.join(answer)} '' bye")
    assert slurm.read_queue().jobs == {"7_3": slurm.JobState("RUNNING", "None"),
                                       "8": slurm.JobState("PENDING", "(a|b)")}
    commands.answer("sbatch", "printf '%s\\n' hello 'sbatch: error: Invalid account' bye >&2; "
                              "exit 1")
    with pytest.raises(slurm.SlurmError, match="^sbatch: error: Invalid account$"):
        slurm.submit_script(tmp_path / "x.sh")
    commands.answer("sbatch", "echo hello; echo 'sbatch: Job 7 to start at noon' >&2; "
                              "echo bye >&2")
    assert slurm.test_script(tmp_path / "x.sh") == "Job 7 to start at noon"
    commands.answer("squeue", "printf '\\xff\\n7|RUNNING|None\\n'")    # no UTF-8
    assert set(slurm.read_queue().jobs) == {"7"}


# What scontrol and sacct do of a job that Slurm has forgotten, and that they cannot tell.
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
LOST = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.parametrize("scontrol, sacct, name", [
    ("echo JobId=7 JobState=TIMEOUT Reason=None", "echo RUNNING", "TIMEOUT"),
    (GONE, "echo CANCELLED by 0", "CANCELLED"), (LOST, "printf 'Hello\nCOMPLETED\n'", "COMPLETED"),
    (GONE, LOST, ""), (GONE, "", ""), ("echo Job 7_3 not found; exit 1", "", ""),
    (LOST, LOST, slurm.UNKNOWN_STATE), (LOST, "", slurm.UNKNOWN_STATE),
    ("", "", slurm.UNKNOWN_STATE), ("exit 1", "exit 1", slurm.UNKNOWN_STATE),
    ("exec sleep 9", "exec sleep 9", slurm.UNKNOWN_STATE),
    # Another cluster of the federation has taken it.
    ("echo JobState=REVOKED", "echo RUNNING", "RUNNING"),
    ("echo JobState=REVOKED", "echo TIMEOUT", "TIMEOUT"),
    ("echo JobState=REVOKED", LOST, "REVOKED"), (GONE, "echo OUT_OF_MEMORY", "OUT_OF_MEMORY")])
def test_the_state_of_a_job_that_squeue_does_not_show(commands, scontrol, sacct, name):
    commands.answer("scontrol", scontrol)
    commands.answer("sacct", sacct)
    assert slurm.look_up("7", 0.5 if "sleep" in scontrol else 20).name == name


@pytest.mark.parametrize("kind, state, standing", [
    *(("row", *one) for one in (
        ("PENDING", "waiting"), ("CONFIGURING", "waiting"), ("REQUEUED", "waiting"),
        ("REQUEUE_HOLD", "waiting"), ("RUNNING", "running"), ("SUSPENDED", "running"),
        ("COMPLETING", "running"), ("STAGE_OUT", "running"), ("RESIZING", "running"),
        ("REVOKED", "running"), ("STOPPED", "running"), ("NEW_STATE", "running"),
        ("PREEMPTED", "failed"), ("TIMEOUT", "failed"), ("CANCELLED", "failed"),
        ("NODE_FAIL", "failed"), ("BOOT_FAIL", "failed"), ("DEADLINE", "failed"),
        ("", "failed"), ("?", "cannot tell"))),
    ("training", "PENDING", "waiting"), ("training", "RUNNING", "running"),
    ("training", "TIMEOUT", "failed"), ("training", "?", "cannot tell")])
def test_a_job_that_squeue_does_not_show_is_under_way_by_its_final_state(
        commands, tmp_path, capsys, kind, state, standing):
    """It may be somebody else's, who submitted it into the same folder."""
    commands.answer("squeue", "")
    commands.answer("scontrol", {"": GONE, "?": LOST}.get(
        state, f"echo 'JobId=7 JobState={state} Reason=None'"))
    commands.answer("sbatch", "echo 9")
    given, mine = command_of(tmp_path, "status"), work_at(tmp_path)
    mine.folder.mkdir(parents=True)
    standings.record_job(mine, kind, ROW.name if kind == "row" else "whale", "it", "7")
    assert main(given) == 0
    line = capsys.readouterr().out.splitlines()[kind == "training"]
    assert f": {standing}, job 7" in line, line
    if kind == "row":
        assert main(command_of(tmp_path, "submit")) == int(state == "?")
        assert len(commands.asked("sbatch")) == 2 * (standing == "failed")    # and the last job


def test_a_row_that_was_stopped_is_not_submitted_while_its_next_job_is_under_way(
        commands, tmp_path, capsys):
    commands.answer("squeue", "")
    commands.answer("scontrol", "echo JobState=RUNNING")
    given, mine = command_of(tmp_path, "status"), work_at(tmp_path)
    mine.folder.mkdir(parents=True)
    standings.record_job(mine, "row", ROW.name, ROW.title, "7")
    mine.runs(ROW.name).mkdir(parents=True)
    stopped = made_up(ROW.row, preset="tiny")
    stopped.configuration["ended_by"] = "stopped"
    run_file.write_run(stopped, mine.runs(ROW.name), ROW.name)
    assert main(given) == 0
    assert capsys.readouterr().out == "weak 3-D 8 ranks: running, job 7\n"


# A squeue of three clusters, each of which has a job 7.
CLUSTERS = """case "$*" in
    *--clusters=east*) echo '7|PENDING|Priority'; echo '7_0|PENDING|Priority';;
    *--clusters=west*) echo '8|RUNNING|None';; *--clusters=*) exit 1;;
    *) echo '7|RUNNING|None';;
esac"""


@pytest.mark.parametrize("more, job, number", [((), "7;east", "7"),
                                               (("--array",), "7_0;east", "7")])
def test_a_job_of_another_cluster_is_looked_for_there(commands, tmp_path, capsys, more, job,
                                                      number):
    commands.answer("squeue", CLUSTERS)
    commands.answer("sbatch", "echo '7;east'")
    both = {"options": ["--clusters=east,west"]}
    assert main(command_of(tmp_path, "submit", *more, slurm=both)) == 0
    assert f"job {job}: weak 3-D 8 ranks\n" in capsys.readouterr().out
    # The last job waits there too.
    assert f"--clusters=east --dependency=afterany:{number} " in commands.asked("sbatch")[-1]
    assert len(commands.asked("sbatch")) == 2
    assert main(command_of(tmp_path, "submit", *more, slurm=both)) == 0
    assert "0 done, 1 under way, 0 to submit" in capsys.readouterr().out
    # Also when the site no longer names it.
    assert main(command_of(tmp_path, "status")) == 0
    assert capsys.readouterr().out == f"weak 3-D 8 ranks: waiting, job {job}: Priority\n"
    # Ended there: its own final state and files, by its number.
    commands.answer("squeue", "")
    commands.answer("scontrol", '[[ "$*" == --clusters=east*' + f' ]] && echo "JobId={number} '
                    'JobState=TIMEOUT"')
    folder = tmp_path / "out" / "jobs" / "runs" / ROW.name
    folder.mkdir(parents=True)
    (folder / f"ended-{job.partition(';')[0]}").write_text("cancelled\n")
    assert main(command_of(tmp_path, "status", slurm=both)) == 0
    assert capsys.readouterr().out == (
        f"weak 3-D 8 ranks: failed, job {job}: TIMEOUT; cancelled\n")


@pytest.mark.parametrize("option", ["--clusters=east", "--cluster=east"])
def test_a_job_whose_cluster_is_not_said_is_looked_for_where_the_site_says(commands, tmp_path,
                                                                           capsys, option):
    """sbatch knows its option by two names."""
    commands.answer("squeue", "[[ \"$*\" != *--clusters=east* ]] || echo '7|PENDING|Priority'")
    commands.answer("sbatch", "echo 7")
    for expected in ("0 under way, 1 to submit", "1 under way, 0 to submit"):
        assert main(command_of(tmp_path, "submit", slurm={"options": [option]})) == 0
        assert expected in capsys.readouterr().out


def test_a_number_that_two_clusters_have(commands):
    """A job whose cluster is not recorded is one of the site's clusters."""
    commands.answer("squeue", CLUSTERS)
    pending, running = slurm.JobState("PENDING", "Priority"), slurm.JobState("RUNNING", "None")
    east = {"7;east": pending, "7_0;east": pending}
    assert slurm.read_queue(["", "east"]).jobs == {"7": running, **east}
    assert slurm.read_queue(["east"], ["east"]).jobs == {"7": pending, "7_0": pending, **east}


def test_a_cluster_that_is_gone_keeps_nobody_from_the_others(commands, tmp_path, capsys):
    """It does not tell whether its jobs have ended, and they are not submitted again."""
    commands.answer("squeue", CLUSTERS.replace("exit 1", "echo no cluster gone >&2; exit 1"))
    commands.answer("scontrol", GONE)
    commands.answer("sbatch", "echo '8;west'")
    west = {"options": ["--cluster=west"]}
    mine, given = (work_at(tmp_path, slurm=west),
                   command_of(tmp_path, "submit", "--table", "all", slurm=west))
    mine.folder.mkdir(parents=True)
    standings.record_job(mine, "row", ROW.name, ROW.title, "7;gone")
    assert main(given) == 1
    said = capsys.readouterr()
    assert "2 rows: 0 done, 0 under way, 1 to submit\n" in said.out
    assert "job 8;west: strong 3-D 8 ranks\n" in said.out
    line = "weak 3-D 8 ranks: cannot tell, job 7;gone: whether it has ended: no cluster gone"
    assert said.err == f"not submitted: {line}\n"
    assert main(["status", *given[1:]]) == 1
    said = capsys.readouterr()
    assert said.out == f"{line}\nstrong 3-D 8 ranks: running, job 8;west\n"
    assert said.err == "error: no cluster gone\n"
    # How the job says that it ended is said too.
    mine.runs(ROW.name).mkdir(parents=True)
    (mine.runs(ROW.name) / "ended-7").write_text("cancelled, or killed by Slurm\n")
    assert main(["collect", *given[1:]]) == 1
    assert f"missing: {line}; cancelled, or killed by Slurm\n" in capsys.readouterr().out


@pytest.mark.parametrize("body, doubt", [
    ("echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' "
     ">&2; exit 1", True), ("exec sleep 9", True),
    ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", False)])
def test_a_lost_answer_of_sbatch_leaves_in_doubt_whether_it_took_the_job(
        commands, tmp_path, body, doubt):
    commands.answer("sbatch", body)
    with pytest.raises(slurm.SlurmError) as caught:
        slurm.submit_script(tmp_path / "x.sh", limit=0.5 if "sleep" in body else 60)
    assert str(caught.value).endswith("; look with squeue whether it has taken x.sh, and cancel "
                                      "it") == doubt


def test_jobs_of_a_training_are_on_one_cluster(commands, tmp_path):
    """Where Slurm runs them one at a time, as they have one name."""
    commands.answer("sbatch", "echo '7;west'")
    name = site_file(tmp_path, slurm={"options": ["--clusters=east,west"]})
    assert main(["train", "--site", name, "--out", str(tmp_path / "out"), "--ranks", "8", "--jobs",
                 "3", "--submit", "--", "--steps", "5"]) == 0
    assert ["--clusters=west" in line for line in commands.asked("sbatch")] == [False, True, True]


def test_no_last_job_waits_for_those_of_two_clusters(commands, tmp_path, capsys):
    commands.answer("squeue", "")
    count = tmp_path / "count"
    commands.answer("sbatch", f"echo >> {count}; [ $(wc -l < {count}) = 1 ] && echo '7;east' || "
                              "echo '8;west'")
    assert main(command_of(tmp_path, "submit", "--table", "all", slurm={
        "options": ["--clusters=east,west"]})) == 0
    said = capsys.readouterr().out
    assert "the jobs are on 2 clusters, and none waits for those of another: collect" in said
    assert len(commands.asked("sbatch")) == 2 and os.path.exists(count)
