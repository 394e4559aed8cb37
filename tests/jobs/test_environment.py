"""Setup lines, modules and variables of a site file: what the scripts make of them in a shell."""
import re
import subprocess

import pytest

from jobs import scripts
from jobs.environment import OWN
from sites import ROW, work_at


def make(folder, environment=(), setup=(), modules=(), **tables):
    return work_at(folder, environment=dict(environment), software={
        "python": "true", "setup": [*setup], "modules": [*modules]}, **tables)


def shell(tmp_path, work, names=(), collect=False, **env):
    """Run a script whose row prints variables: exit status, lines, and why it ended."""
    script = tmp_path / "row.sh"
    (tmp_path / "srun").write_text(
        '#!/bin/bash\n[[ "$*" == *"bench run"* ]] || exit 0\n'
        + "".join(f'printf "%s=%s\\n" {name} "${{{name}-unset}}"\n' for name in names))
    (tmp_path / "srun").chmod(0o755)
    script.write_text(scripts.collect_script(work, []) if collect else
                      scripts.row_script(work, ROW))
    done = subprocess.run(["bash", str(script)], text=True, capture_output=True, timeout=60,
                          env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"} | env)
    ended = work.runs(ROW.name) / "ended-7"
    return (done.returncode, dict(line.partition("=")[::2] for line in done.stdout.splitlines()
                                  if "=" in line),
            ended.read_text().strip() if ended.exists() else None, done.stderr)


@pytest.mark.parametrize("value, env, expected", [
    ("$HOME/lib", {"HOME": "/h"}, "/h/lib"), ("${HOME}lib", {"HOME": "/h"}, "/hlib"),
    ("/x:$L", {"L": "/a:/b c"}, "/x:/a:/b c"), ("/x:$L", {}, "/x"), ("/x:$L", {"L": ""}, "/x"),
    ("$L:/x", {"L": "/a"}, "/a:/x"), ("$L:/x", {}, "/x"),
    ("$K:/x:$L:${M}", {"M": "/m"}, "/x:/m"), ("/x:$L:/y", {"L": "/l"}, "/x:/l:/y"),
    ("/x:$V", {"V": "/v"}, "/x:/v"),    # it may name itself
    ("$L", {"L": "*  $HOME `x`"}, "*  $HOME `x`"), ("$L:$M", {"L": "1", "M": "2"}, "1:2"),
    ("5$$", {}, "5$"), ("$$HOME", {"HOME": "/h"}, "$HOME"), ("it's", {}, "it's"), ("", {}, ""),
    ("a~b", {}, "a~b"), ("rc,sm", {}, "rc,sm"), ("/x::/y:", {}, "/x::/y:"),
    ("$H-$H", {"H": "a"}, "a-a"), ("http://$H:80", {"H": "h"}, "http://h:80")])
def test_values_name_other_variables(tmp_path, value, env, expected):
    """A list that begins with its own is the usual one; nothing that is expanded is read again."""
    work = make(tmp_path, {"V": value, "LATER": "$V"})
    status, found, ended, said = shell(tmp_path, work, ["V", "LATER"], **env)
    assert (status, ended) == (0, "done"), said
    assert found["V"] == found["LATER"] == expected


@pytest.mark.parametrize("value", ["$L", "/$L/x", "$L:$M"])
def test_a_value_of_a_variable_that_is_not_set_ends_the_job(tmp_path, value):
    work = make(tmp_path, {"V": value})
    status, _, ended, _ = shell(tmp_path, work)
    assert (status, ended) == (1, "environment.V names L, which is not set")
    assert shell(tmp_path, work, collect=True)[0] == 1


@pytest.mark.parametrize("name", ["PMI_MMAP_SYNC_WAIT_TIME", "PMIX_MCA_gds", "OMPI_MCA_pml",
                                  "SLURM_CPU_BIND", "PALS_TRANSFER", "FI_PROVIDER"])
def test_settings_of_launchers_are_a_sites(tmp_path, name):
    assert f"export {name}=1" in scripts.row_script(make(tmp_path, {name: "1"}), ROW)


def test_setup_lines_come_first_and_may_change_what_follows(tmp_path):
    (tmp_path / "profile").write_text(
        "set -euC\nset -o pipefail\nIFS=e\ntrap 'exit 9' ERR\n"
        "folder=/nowhere; job=x\nfail() { false; }\n"
        "ended() { false; }\ncd /\nexport FROM=profile\n"
        "module() { echo \"module $* IFS\"; export LOADED=$2; }\n")
    work = make(tmp_path, {"V": "$FROM/$LOADED"}, [
        f"source {tmp_path}/profile    # ours", "module use /a && module use '/b c'",
        "export A=1; B=2"], ["cuda"])
    for _ in range(2):    # the second job writes over what the first one has written
        status, found, ended, said = shell(tmp_path, work, ["V", "A"])
        assert (status, ended) == (0, "done"), said
        assert found == {"V": "profile/cuda", "A": "1"}
    assert shell(tmp_path, work, collect=True)[0] == 0


@pytest.mark.parametrize("line, status", [
    ("false", 1), ("(exit 3)", 3), ("source /no/such/file", 1), ("no-such-command x", 127),
    ("conda activate mm3d", 127), ("echo 'unbalanced", 2), ("if true; then", 2)])
def test_a_setup_line_that_fails_ends_the_job(tmp_path, line, status):
    work = make(tmp_path, setup=[line, "touch hit"])
    found, _, ended, _ = shell(tmp_path, work)
    assert found == 1 and re.fullmatch(re.escape(f"the setup line {line} ended with status ")
                                       + rf"({status}|1|127)", ended)
    assert not (tmp_path / "hit").exists()
    found, _, _, said = shell(tmp_path, work, collect=True)
    assert found == 1 and f"error: the setup line {line} ended" in said


@pytest.mark.parametrize("line", ["exit 0", "exit 3"])
def test_a_setup_line_that_ends_the_job_is_told(tmp_path, line):
    _, _, ended, said = shell(tmp_path, make(tmp_path, setup=[line]))
    assert ended is None and said == "error: a line of setup has ended the job\n"


ORDER = dict(node={"gpus": "a100:4"}, launch={"gpu_binding": "rank", "gpu_order": [3, 2, 1, 0]})


def test_variables_of_the_script_itself(tmp_path):
    """Every one that any script assigns, also without exporting it."""
    work = make(tmp_path, {"A": "b"}, ["true"], ["m"], **ORDER)
    texts = [scripts.row_script(work, ROW), scripts.array_script(work, [ROW]),
             scripts.collect_script(work, []), scripts.verb_script(work, "train", "a", 8, [])]
    found = {name for text in texts for name in re.findall(
        r"(?:^|;|export|for|local|\|\|)\s*([A-Za-z_]\w*)(?:\+?=| in )", text, re.M)}
    assert {"folder", "job", "launch", "row", "mm3d_trouble", "SRUN_CPUS_PER_TASK"} < found
    assert found - {"A"} <= OWN.keys()


def test_an_order_of_gpus(tmp_path):
    work = make(tmp_path, **ORDER)
    assert shell(tmp_path, work, ["MM3D_GPU_ORDER"])[1] == {"MM3D_GPU_ORDER": "3,2,1,0"}
    assert "--variable=MM3D_GPU_ORDER=$MM3D_GPU_ORDER" in scripts.row_script(work, ROW)
    # It says nothing of a part of them.
    assert "--gpus-per-node=a100:4" in scripts.verb_script(work, "measure pipeline", "a", 2, [])
    assert "MM3D_GPU_ORDER" not in scripts.row_script(make(tmp_path), ROW)
