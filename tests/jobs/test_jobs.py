"""Site files, scripts and books, without any Slurm."""
import contextlib
import os
import re
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from bench.cases import combined
from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.errors import StoreError, UsageError
from bench.records import journal, merged, run_file
from bench.verbs import load_verb
from jobs import scripts, single, site, slurm, standings
from jobs.__main__ import main
from jobs.scripts import JobSettings
from records import computed_step, draw_only, made_up, waited_step
from sites import HOSTILE, ROW, command_of, site_file, work_at
from support import ROOT, run_python, status_of

# A stand-in for srun, whose parent is the step's shell, signals the job's shell, as Slurm does.
WARN = "read -r _ _ _ job _ < /proc/$PPID/stat; kill -USR1 $job"
PYTHON = {"python": "python"}    # the one on PATH


@pytest.mark.parametrize("name, every", [
    *((name, False) for name in site.supplied_sites()),
    pytest.param("gpu8", True, marks=pytest.mark.slow)])
def test_supplied_sites_are_sound_and_render_all_rows(tmp_path, name, every):
    """By default one row of each number of ranks."""
    mine = JobSettings(site.load_site(name), name, tmp_path)
    rows = {row if every else row.gpus: row for row in select_rows()}
    for row in rows.values():
        text = scripts.row_script(mine, make_case(row, "paper"))
        options = re.findall(r"^#SBATCH (\S.*)$", text, re.M)
        nodes, tasks = (next(int(option.partition("=")[2]) for option in options
                             if option.startswith(f"--{key}=")) for key in ("nodes", "ntasks"))
        assert tasks == row.gpus <= nodes * mine.site.node.ranks < row.gpus + mine.site.node.ranks
        assert "jinja" not in text and "{{" not in text
        # Consecutive ranks on one node, and there on neighbouring cores; NCCL by default where
        # nodes have eight GPUs, which no CUDA-aware MPI is asked of.
        even = row.gpus <= mine.site.node.ranks or row.gpus % mine.site.node.ranks == 0
        assert re.search(r"--distribution=([\w:,=]+)", text)[1] == (
            "block:block,NoPack" if even else f"plane={mine.site.node.ranks}")
        if name == "gpu8":
            assert "export MM3D_TRANSPORT=nccl\n" in text and "--device-buffers" not in text


STUB = """#!/bin/bash
printf '%s\\n' "$(basename "$0")" "$@" >> {said}
{more}
"""


def stubs(tmp_path, **more):
    """A PATH with programs that write down how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "mpirun", "python", "apptainer", "timeout"):
        path = folder / name
        path.write_text(STUB.format(said=tmp_path / "said", more=more.get(name, "")))
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def bash(script, env, **more):
    """Run a script as the job 7."""
    return subprocess.run(["bash", str(script)], env=env | {"SLURM_JOB_ID": "7"} | more, text=True,
                          capture_output=True, timeout=60)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_becomes_a_command(tmp_path, text):
    """Run the script with programs that only write down their arguments."""
    env = stubs(tmp_path)
    mine = work_at(
        tmp_path, about=text, launch={"mpi": text, "options": [text]},
        software={"container": ["apptainer", text], "python": text, "modules": [text]},
        run={"backend": text, "options": [f"--trace={text}"]}, inside={"3d": text},
        environment={"HOSTILE": text.replace("$", "$$").replace("`", "")})
    (tmp_path / "out").mkdir()
    script = tmp_path / "out" / "row.sh"
    script.write_text("module() { printf '%s\\n' \"$@\" >> " + str(tmp_path / "said") + "; }\n"
                      + scripts.row_script(mine, ROW).replace(f"cd -- {scripts.ROOT}",
                                                              f"cd -- {tmp_path}"))
    done = bash(script, env)
    assert done.returncode == 0, done.stderr
    assert not [path for path in tmp_path.rglob("*") if "hit" in path.name]
    said = (tmp_path / "said").read_text().splitlines()
    assert said.count(text) >= 5
    assert {f"--mpi={text}", f"--inside={text}", f"--trace={text}"} < {*said}
    collect = scripts.collect_script(mine, ["--site", text])
    assert subprocess.run(["bash", "-n"], input=collect, text=True).returncode == 0


def training(number=3, preset="tiny"):
    return replace(combined.list_cases()[number - 1], preset=preset)


def test_a_training_step_on_a_mesh_is_a_row_like_the_others(tmp_path, capsys, commands):
    """Its script measures it, its result is found, and one that waited, or is older, is none."""
    commands.answer("sbatch", "echo 7")
    commands.answer("squeue", "")
    commands.answer("scontrol", "echo JobState=TIMEOUT")
    mine, row = work_at(tmp_path), training()
    given = ["--site", mine.name, "--table", "combined", "--ranks", "8", "--preset", "tiny",
             "--out", str(mine.out)]
    assert main(["submit", *given, "--array"]) == 0
    said = capsys.readouterr().out
    assert "11 rows: 0 done, 0 under way, 11 to submit" in said
    assert "rows of 8 ranks: measured, but not predicted: no machine given (--machine)\n" in said
    array = (mine.folder / "array-p008-tiny.sh").read_text()
    assert "--array=0-10" in array and "--signal" not in array
    mine.runs(row.name).mkdir(parents=True)

    def standing():
        assert main(["status", *given]) == 0
        return capsys.readouterr().out.splitlines()[2]

    assert standing() == f"{row.title}: failed, job 7_2: TIMEOUT"
    waited = replace(computed_step(3), configuration=training(preset="").settings)
    for one in (waited_step(3, 1.0, 1.0), computed_step(3, vocab=7), waited):
        with contextlib.suppress(StoreError):
            run_file.write_run(one, mine.runs(row.name), row.name)
    assert ": failed, " in standing()
    run_file.write_run(computed_step(3), mine.runs(row.name), row.name)
    assert standing() == f"{row.title}: done, job 7_2: 3 repetitions"
    assert main(["collect", *given]) == 1
    assert "1 of 11 rows done" in capsys.readouterr().out
    assert "computed on numpy" in (tmp_path / "out" / "tables.txt").read_text()


def test_the_script_of_a_training_step_starts_it(tmp_path, capsys):
    env, machine = stubs(tmp_path), tmp_path / "its machine.toml"
    shutil.copy(ROOT / "bench" / "prediction" / "machines" / "longhorn.toml", machine)
    given = ["--site", site_file(tmp_path, software=PYTHON), "--table", "combined", "--ranks",
             "16", "--preset", "tiny", "--out", str(tmp_path / "out"), "--machine", str(machine)]
    assert main(["render", *given]) == 0
    assert "rows of 16 ranks: predicted before by longhorn" in capsys.readouterr().out
    script = tmp_path / "out" / "jobs" / "combined-dense-p016-2-tiny.sh"
    done = bash(script, env)
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "said").read_text().splitlines()
    place = said.index("meshes")
    assert said[place - 1:][:6] == [
        "measure", "meshes", "combined:dense-16-2:tiny",
        f"--out={tmp_path}/out/jobs/runs/combined-dense-p016-2-tiny", "--backend=numpy",
        f"--machine={machine}"] and "--stop-file" not in said
    assert f"'--machine={machine}'" in (tmp_path / "out" / "jobs" / "collect.sh").read_text()


COMBINED = ["--table", "combined"]


@pytest.mark.parametrize("tables, words, message", [
    ({}, [*COMBINED, "--scheme", "3d"], "--table combined --scheme: its file bench/cases/"),
    ({}, [*COMBINED, "--inside", "z"], "--table combined --inside: "),
    ({}, [*COMBINED, "--recompute", "full"], "--table combined --recompute: "),
    ({}, [*COMBINED, "--preset", "laptop"],
     "--table combined --preset laptop: paper or tiny would do"),
    ({}, [*COMBINED, "--ranks", "36"], "--ranks 36: these rows are for 8, 16, 64 ranks"),
    ({}, [*COMBINED, "--machine", "nowhere.toml"], "nowhere.toml"),
    ({}, ["--table", "weak", "--machine", "longhorn"],
     "--machine longhorn: only rows of --table combined are predicted; leave it out"),
    (dict(run={"machine": "nowhere"}), COMBINED, "nowhere"),
    (dict(run={"options": ["--traced=1"]}), COMBINED,
     "run.options: --table combined: --traced is no option of bench measure meshes"),
    ({}, ["--inside", "z", "--scheme", "2d"],
     "--inside z: the grid of scheme '2d' has the directions x, y; choose one of them, or auto"),
    ({}, ["--scheme", "4d"], "4d"),
    (dict(run={"backend": "cupy"}, node={"gpus": 4}, launch={"gpu_binding": "rank"}),
     ["--preset", "emulated"], "--preset emulated: its ranks wait for their work, with arrays in "
     "host memory, but --site "),
    (dict(inside={"3d": "q"}), [], "inside.3d = 'q': the grid of scheme '3d' has the directions"),
    ({}, ["--ranks", "8,9"], "--ranks 8,9: these rows are for 8, 16, 36, 64 ranks")])
def test_rows_that_cannot_be(tmp_path, capsys, tables, words, message):
    given = ["--site", site_file(tmp_path, **tables), "--out", str(tmp_path / "out"), *words]
    assert main(["render", *given]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("folder", ["a%j", 'a"b', "a'b", "a\\b", "a\nb"])
def test_a_folder_that_slurm_would_misread(tmp_path, folder):
    with pytest.raises(UsageError, match="Slurm cannot write logs into a folder whose name has"):
        scripts.check_path(tmp_path / folder)


def executed(tmp_path, software=(), launcher="srun", variables=(), limit=scripts.LIMIT,
             **programs):
    """Run a row's script with stubs: its exit status, output, and why it ended."""
    env = stubs(tmp_path, **programs)
    mine = work_at(tmp_path, software=PYTHON | dict(software), launch={"launcher": launcher})
    script, clock = tmp_path / "row.sh", "SECONDS - begun)) -lt "
    text = scripts.row_script(mine, ROW)
    assert f"{clock}{scripts.LIMIT} " in text
    script.write_text(text.replace(f"{clock}{scripts.LIMIT} ", f"{clock}{limit} "))
    done = bash(script, env, **dict(variables))
    return done, (mine.runs(ROW.name) / "ended-7").read_text().strip()


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_what_the_submitting_shell_has_set_for_slurm_reaches_no_rank(tmp_path, launcher):
    """As in a shell of another job, from which the script is submitted by hand."""
    own = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4",
           "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_CONF": "/etc/s.conf", "SLURM_HINT": "nothing",
           "SLURM_GPUS_PER_NODE": "4", "SLURM_SUBMIT_DIR": "/x", "SLURM_NODEID": "0"}
    other = {"SLURM_STDOUTMODE": "stolen", "SLURM_HOSTFILE": "hosts", "SLURM_GRES": "gpu:1",
             "SLURM_GPUS": "2", "SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "NONE",
             "SLURM_MEM_PER_CPU": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
             "SLURM_CONSTRAINT": "x", "SLURM_WHAT_COMES_NEXT": "1", "SRUN_CPUS_PER_TASK": "9",
             "PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_EXACT": "1", "SLURM_CLUSTERS": "east"}
    array = {"SLURM_ARRAY_JOB_ID": "99", "SLURM_ARRAY_TASK_ID": "3"}
    done, ended = executed(
        tmp_path, variables=own | other | array, launcher=launcher,
        **{launcher: "env > " + str(tmp_path / "env")})
    assert done.returncode == 0 and ended == "done"    # of its own number
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    del own["SLURM_HINT"], own["SLURM_GPUS_PER_NODE"]    # of no option of the script
    assert {name: value for name, value in found.items()
            if name.startswith(("SLURM", "SRUN", "PMI"))} == (
        own | array | {"SLURM_JOB_ID": "7", "SRUN_CPUS_PER_TASK": "1"})


@pytest.mark.parametrize("options", [[], ["--hint=nomultithread"]])
def test_what_options_of_the_site_say_to_srun_stays(tmp_path, options):
    text = scripts.row_script(work_at(tmp_path, slurm={"options": options}), ROW)
    assert ("        SLURM_HINT) ;;\n" in text) == bool(options)


# The row ends when it sees the file.
STOP = WARN + '; file="${@: -1}"; while [ ! -e "$file" ]; do sleep 0.05; done'


@pytest.mark.parametrize("given, status, why, rows", [
    (dict(software={"modules": ["nosuch/1.0"]}), 1,
     "there is no module command here, but the site names modules", 0),
    (dict(python='[ "$3" != doctor ]'), 1, "the pre-flight checks failed, see the log", 0),
    (dict(srun="exit 3"), 1, "bench run ended with status 3, see the log", 1),
    (dict(srun=STOP), 0, "stopped near the time limit, status 0", 1)])
def test_why_a_job_ends_before_its_row(tmp_path, given, status, why, rows):
    done, ended = executed(tmp_path, **given)
    assert (done.returncode, ended) == (status, why)
    said = (tmp_path / "said").read_text().splitlines() if rows or "python" in given else []
    assert ("run" in said) == bool(rows) and not list((tmp_path / "out").rglob("stop-*"))


@pytest.mark.parametrize("falters", [1, 2])
def test_ranks_that_do_not_answer_are_asked_once_more(tmp_path, falters):
    asked = tmp_path / "asked"
    done, _ = executed(tmp_path, timeout=f"""if [[ "$*" == *census ]]; then
        echo >> {asked}; exit $(($(wc -l < {asked}) <= {falters} ? 15 : 0)); fi""")
    assert len(asked.read_text().splitlines()) == 2
    said = done.stdout.splitlines()
    assert "the first census of the ranks ended with status 15" in said
    assert ("the second census of the ranks ended with status 15" in said) == (falters == 2)
    status, = (tmp_path / "out").rglob("census.status")
    assert status.read_text() == f"{15 * (falters == 2)}\n"


@pytest.mark.parametrize("limit, status", [
    (0, 124), (0, 137), (120, 124), (120, 137), (120, 139), (0, 3)])
def test_the_time_tells_whether_ranks_that_are_asked_ran_out_of_it(tmp_path, limit, status):
    """Not their status: srun ends with 137 too, when a rank fails at once."""
    executed(tmp_path, limit=limit,
             timeout=f"""if [[ "$*" == *census ]]; then exit {status}; fi""")
    found, = (tmp_path / "out").rglob("census.status")
    assert found.read_text() == ("timeout\n" if limit == 0 else f"{status}\n")


def test_results_of_jobs_lie_beside_what_else_is_measured_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert single.make_work("cpu", None).folder == tmp_path / "results/local/cpu/jobs"
    assert main(["render", "--site", "cpu", "--preset", "tiny", "--ranks", "8"]) == 0
    assert [*(tmp_path / "results/local/cpu/jobs").glob("weak-3d-p008-*.sh")]


def test_a_pipeline_is_a_job_with_the_same_checks(tmp_path, capsys):
    env, out, name = stubs(tmp_path), tmp_path / "out", site_file(tmp_path, software=PYTHON)
    assert main(["pipeline", "--site", name, "--ranks", "8", "--out", str(out), "--", "--stages",
                 "4", "--grid", "2x1x1", "--schedule", "1f1b,zb-h1"]) == 0
    said = capsys.readouterr()
    script = Path(said.out.strip())
    assert said.err == "nothing is submitted: --submit would do that\n"
    assert script.stat().st_mode & stat.S_IXUSR and "#SBATCH --ntasks=8" in script.read_text()
    done = bash(script, env)
    ended = out / "jobs" / "runs" / script.stem / "ended-7"
    assert done.returncode == 0 and ended.read_text() == "done\n", done.stderr
    said = (tmp_path / "said").read_text()
    assert "doctor" in said and "--stop-file" not in said
    text = script.read_text()
    assert "-m bench measure pipeline" in text and "'1f1b,zb-h1'" in text
    assert not {"stop", "USR1"} & set(re.findall(r"[A-Z1]+|[a-z]+", script.read_text()))
    assert main(["pipeline", "--site", name, "--ranks", "8", "--out", str(out)]) == 2
    assert ("pipeline: after --: the following arguments are required: --stages"
            in capsys.readouterr().err)


def test_pipelines_of_other_options_have_scripts_of_their_own(tmp_path, capsys):
    """The same ones have the same script."""
    given = ["pipeline", "--site", site_file(tmp_path), "--ranks", "8", "--out",
             str(tmp_path / "out")]
    for name, said in (("a b", " a b: letters, digits"), ("a/b", " a/b: letters, digits"),
                       ("-x", ": expected one argument")):
        words = [*given, "--name", name, "--", "--scheme", "1d", "--stages", "2"]
        assert status_of(main, words) == 2
        assert f"--name{said}" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    names = []
    for words in (["4"], ["4"], ["2"], ["2", "--schedule", "zb-h1"]):
        assert main([*given, "--", "--scheme", "1d", "--stages", *words]) == 0
        names.append(Path(capsys.readouterr().out.strip()).stem)
    assert names[0] == names[1] and len(set(names)) == 3
    assert all(name.startswith("pipeline-p008-") for name in names)
    assert main([*given, "--name", "whale", "--", "--scheme", "1d", "--stages", "2"]) == 0
    script = Path(capsys.readouterr().out.strip())
    assert script.name == "whale.sh" and "--job-name=mm3d-whale" in script.read_text()
    for words, said in ((["4"], "name a grid of 2, such as --grid 2x1x1"),
                        (["3"], "3 stages do not divide 8 ranks"),
                        (["2", "--grid", "3x1x1"], "a grid of 3 x 1 x 1 has 3 ranks"),
                        (["2", "--grid=4x1x1", "--schedule=interleaved:2", "--layers=3"],
                         "3 layers")):
        assert main([*given, "--", "--stages", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_training_is_a_job_that_the_next_one_continues_until_it_is_complete(tmp_path, capsys):
    """The first is warned, and stops; the second does the last step; the third has none to do."""
    out, name = tmp_path / "out", site_file(tmp_path, software=PYTHON)
    saved, ended = out / "train" / "whale", out / "jobs" / "runs" / "whale"
    env = stubs(tmp_path, srun=f"""[[ "$*" == *"bench train"* ]] || exit 0
mkdir -p {saved}/step-00000010
[ $SLURM_JOB_ID -gt 7 ] || {{ {WARN}; }}
if [ $SLURM_JOB_ID = 6 ]; then true  # it ends as the warning comes
elif [ $SLURM_JOB_ID = 7 ]; then while [ ! -e "${{@: -1}}" ]; do sleep 0.05; done
else echo '{{"complete": true}}' >> {saved}/history.jsonl; fi""")
    again = ["train", "--site", name, "--ranks", "8", "--out", str(out), "--name", "whale"]
    words = ["--", "--steps", "20", "--data", "8"]
    assert main(again + words) == 0
    script, said = capsys.readouterr().out.splitlines()
    assert said == "whale: no checkpoint yet"
    for option in ("dependency=singleton", "job-name=mm3d-whale", "ntasks=8"):
        assert f"#SBATCH --{option}\n" in Path(script).read_text()
    warned = "stopped near the time limit, status 0"
    for job, why in (("6", warned), ("7", warned), ("8", "done"), ("9", "done")):
        (tmp_path / "said").unlink(missing_ok=True)
        done = bash(script, env, SLURM_JOB_ID=job)
        assert done.returncode == 0 and (ended / f"ended-{job}").read_text() == why + "\n", done
        assert (tmp_path / "said").exists() == (job < "9")
        assert ("all steps are done" in done.stdout) == (job == "9")
        assert main(again + words) == 0
        assert capsys.readouterr().out.splitlines()[1] == (
            f"whale: {'complete' if job > '7' else 'step 10 is saved'}; its last job: {why}")
    # Another training is none that is complete.
    assert main([*again, "--", "--steps", "30"]) == 0
    done = bash(script, env)
    assert "all steps are done" not in done.stdout and "--steps 30" in Path(script).read_text()


def test_a_job_finds_the_files_that_were_named_here(tmp_path, monkeypatch, capsys):
    """It runs in another folder; names of supplied models stay as they are."""
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text('name = "own"\nlayers = 8\nhidden = 64\nheads = 4\n'
                                'vocab = 256\nseq = 32\n')
    for word, found in (("own.toml", tmp_path / "own.toml"), ("gpt2", "gpt2")):
        for words in (["--model", word], [f"--model={word}"]):
            assert main(["train", "--site", "cpu", "--ranks", "8", "--out", "out", "--",
                         "--data", "8", *words]) == 0
            script = Path(capsys.readouterr().out.splitlines()[0]).read_text()
            assert re.search(rf"--model(\n *|=){re.escape(str(found))}\n", script)


def test_what_was_seen_by_somebody_else(tmp_path, monkeypatch, capsys):
    """The pre-flight of a job: the doctor reads what the ranks have said."""
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")

    def doctor(**said):
        for name, text in said.items():
            (tmp_path / f"census.{name}").write_text(text)
        status = bench(["doctor", "--ranks", "2", "--seen", str(tmp_path)])
        return status, capsys.readouterr().out

    status, out = doctor()
    assert status == 1 and "launcher    launcher: was not started: " in out
    assert "NOT USABLE: mend " in out and "reproduce" not in out    # which is for other places
    assert "what reproduce does" in load_verb("doctor").list_findings({}, True)[1].items[1]
    status, out = doctor(out="", err="srun: error: no such plugin", status="1")
    assert status == 1 and "ended with status 1: srun: error: no such plugin" in out
    assert "did not end within 60 seconds: srun: error: no such" in doctor(status="timeout")[1]


def test_how_a_row_stands(tmp_path, commands):
    mine, row = work_at(tmp_path), ROW.row
    commands.answer("scontrol", "echo JobState=TIMEOUT")
    (mine.folder / "logs").mkdir(parents=True)
    mine.runs(ROW.name).mkdir(parents=True)

    def standing(**queue):
        found = {"7": slurm.JobState(**queue)} if queue else {}
        one, = standings.list_standings(mine, [ROW], slurm.Queue(found))
        return one.state, one.reason

    assert standing() == ("not submitted", "")
    standings.record_job(mine, "row", ROW.name, ROW.title, "6")
    standings.record_job(mine, "row", ROW.name, ROW.title, "7")
    assert standing(name="PENDING", reason="Priority") == ("waiting", "Priority")
    assert standing(name="RUNNING", reason="None") == ("running", "")
    assert standing() == ("failed", "TIMEOUT")
    (mine.runs(ROW.name) / "ended-7").write_text("the pre-flight checks failed, see the log\n")
    (mine.folder / "logs" / "mm3d-x-7.out").write_text(
        "ok      nodes  2\nfailed  gpus        rank 0 sees no GPU\nbye\n")
    why = "TIMEOUT; the pre-flight checks failed, see the log; jobs/logs/mm3d-x-7.out: "
    assert standing() == ("failed", f"{why}failed gpus rank 0 sees no GPU")
    (mine.folder / "logs" / "mm3d-x-7.out").write_text(    # where Python did not start
        "row.sh: no  python\n\nerror: the pre-flight checks failed, see the log\n")
    assert standing() == ("failed", f"{why}row.sh: no python")
    (mine.folder / "logs" / "mm3d-x-7.out").write_text("error: the pre-flight checks failed, see "
                                                       "the log\n")
    assert standing() == ("failed", why.removesuffix(": "))    # which log, at least
    short = made_up(row, preset="tiny")
    short.configuration["ended_by"] = "stopped"
    run_file.write_run(short, mine.runs(ROW.name), ROW.name)
    assert standing() == ("stopped early", "with 3 repetitions, as its time was over")
    (mine.runs(ROW.name) / f"{ROW.name}-broken.h5").write_text("no HDF5")
    run_file.write_run(made_up(row, preset="tiny", created="2031-01-02T03:04:05+00:00"), mine.out,
                       ROW.name)
    assert standing()[0] == "done"


def test_how_pipelines_and_trainings_stand(tmp_path, commands, capsys):
    """Beside the rows: state, job, log and its last line."""
    count = tmp_path / "count"
    commands.answer("sbatch", f"echo >> {count}; echo $((6 + $(wc -l < {count})))")
    commands.answer("scontrol", "echo JobState=TIMEOUT")
    given = ["--site", site_file(tmp_path), "--out", str(tmp_path / "out")]
    single = [*given, "--ranks", "8", "--submit", "--name"]
    assert main(["pipeline", *single, "flow", "--", "--scheme=1d", "--stages=4"]) == 0
    assert main(["train", *single, "whale", "--jobs", "2", "--", "--steps", "5"]) == 0
    folder = tmp_path / "out" / "jobs"
    capsys.readouterr()

    def status(**states):
        commands.answer("squeue", "".join(f"echo '{job[1:]}|{state}|Priority'\n"
                                          for job, state in states.items()))
        assert main(["status", *given, "--table", "weak", "--scheme", "3d", "--ranks", "8"]) == 0
        row, *others = capsys.readouterr().out.splitlines()
        assert row == "weak 3-D 8 ranks: not submitted"
        return others

    assert status(_7="PENDING", _8="RUNNING", _9="PENDING") == [
        "pipeline flow: waiting, job 7; Priority",
        "training whale: running, job 8; no checkpoint yet"]
    # Who changes the source is told that the next job would go on with other code.
    books, now = folder / "submitted.jsonl", standings.present_source()
    books.write_text(books.read_text().replace(now, "fedcba987654"))
    warning = f"warning: submitted from commit fedcba987654, the next job would run from {now}: "
    assert main(["train", *given, "--ranks", "8", "--name", "whale", "--", "--steps", "5"]) == 0
    assert warning + "training whale\n" in capsys.readouterr().err
    for queue in ("echo '9|PENDING|Priority'",
                  "echo '8|RUNNING|None'; echo '9|PENDING|Dependency'"):
        commands.answer("squeue", queue)
        assert main(["status", *given, "--ranks", "8"]) == 0
        assert capsys.readouterr().err == warning + "training whale\n"
    books.write_text(books.read_text().replace("fedcba987654", now))
    (folder / "logs" / "mm3d-flow-7.out").write_text("ok  nodes 2\n 1f1b  8 \n\n")
    assert status(_7="RUNNING", _9="PENDING") == [
        "pipeline flow: running, job 7; jobs/logs/mm3d-flow-7.out: 1f1b 8",
        "training whale: waiting, job 9; Priority; no checkpoint yet"]
    for name, job, why in (("flow", 7, "bench measure pipeline ended with status 3, see the log"),
                           ("whale", 9, "stopped near the time limit, status 0")):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / f"ended-{job}").write_text(why + "\n")
    assert status() == [
        "pipeline flow: failed, job 7; TIMEOUT; bench measure pipeline ended with status 3, see "
        "the log; jobs/logs/mm3d-flow-7.out: 1f1b 8",
        "training whale: stopped early, job 9; TIMEOUT; stopped near the time limit, status 0; "
        "no checkpoint yet"]
    (folder / "runs" / "flow" / "ended-7").write_text("done\n")
    assert status()[0] == "pipeline flow: done, job 7; jobs/logs/mm3d-flow-7.out: 1f1b 8"


def test_books_that_a_full_disk_has_torn(tmp_path):
    """Half a line is no line, and what follows begins on a new one."""
    mine = work_at(tmp_path)
    journal.check_folder(mine.folder)
    standings.record_job(mine, "row", ROW.name, ROW.title, "6")
    with open(standings.submissions_file(mine), "a") as file:
        file.write('{"row": "weak-3d-p0')
    assert standings.read_submitted(mine) == {ROW.name: ["6"]}
    standings.record_job(mine, "row", ROW.name, ROW.title, "7")
    assert standings.read_submitted(mine) == {ROW.name: ["6", "7"]}


def test_a_row_whose_source_is_not_the_submitted_one_is_named(tmp_path, commands, capsys,
                                                              monkeypatch):
    draw_only(monkeypatch)
    commands.answer("squeue", "")
    commands.answer("sbatch", "echo 77")
    mine = work_at(tmp_path)
    assert main(command_of(tmp_path, "submit")) == 0
    now = standings.present_source()
    assert f"commit {now}; a job runs the source as it is when it" in capsys.readouterr().out
    commands.answer("squeue", "echo '77|PENDING|Priority'")
    begin = "warning: submitted from commit fedcba987654, "
    for then, said in ((now, ""),
                       ("fedcba987654", f"{begin}waits, and would run from {now}: {ROW.title}\n")):
        path = standings.submissions_file(mine)
        path.write_text(path.read_text().replace(now, then))
        assert main(command_of(tmp_path, "status")) == 0
        assert capsys.readouterr().err == said
    journal.check_folder(mine.runs(ROW.name))
    run_file.write_run(made_up(ROW.row), mine.runs(ROW.name), ROW.name)
    said = f"{begin}ran from 0123456789ab: {ROW.title}\n"
    for verb in ("status", "collect"):
        assert main(command_of(tmp_path, verb)) == 0 and said in capsys.readouterr().err


def test_a_row_that_stopped_in_an_earlier_job_has_the_source_of_that_job(
        tmp_path, commands, capsys):
    commands.answer("squeue", "")
    commands.answer("scontrol", "echo JobState=FAILED")
    mine, stopped = work_at(tmp_path), made_up(ROW.row, preset="tiny")
    stopped.configuration["ended_by"] = "stopped"
    journal.check_folder(mine.runs(ROW.name))
    run_file.write_run(stopped, mine.runs(ROW.name), ROW.name)
    standings.submissions_file(mine).write_text("".join(
        f'{{"row": "{ROW.name}", "job": "{job}", "source": "{source}"}}\n'
        for job, source in ((6, "0123456789ab"), (7, "fedcba987654"))))
    assert main(command_of(tmp_path, "status")) == 0
    said = capsys.readouterr()
    assert ": stopped early, job 7" in said.out and not said.err


def test_an_element_of_an_array_runs_the_script_that_was_submitted(tmp_path):
    """Also when a row's script is rendered anew, with other options, before it starts."""
    env = stubs(tmp_path)
    mine = work_at(tmp_path, software=PYTHON)
    rows = [make_case(row, "tiny") for row in select_rows("all", "3d") if row.gpus == 8]
    array = tmp_path / "array.sh"
    array.write_text(scripts.array_script(mine, rows))
    for one in rows:
        journal.check_folder(mine.folder)
        mine.script(one.name).write_text("exit 9")
    element = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    assert bash(array, env, **element).returncode == 0
    assert (mine.runs(rows[1].name) / "ended-5_1").read_text() == "done\n"
    assert not mine.runs(rows[0].name).exists()
    assert "--table=strong" in (tmp_path / "said").read_text()


@pytest.mark.parametrize("array, job", [((), "77"), (("--array",), "77_0")])
def test_a_job_that_cannot_be_noted_is_named(
        commands, tmp_path, monkeypatch, capsys, array, job):
    """Half a line fits on the disk; the queue has the job, so somebody must know."""
    commands.answer("squeue", "")
    commands.answer("sbatch", "echo 77")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:9]))
    assert main(command_of(tmp_path, "submit", *array)) == 2
    books = tmp_path / "out" / "jobs" / "submitted.jsonl"
    assert capsys.readouterr().err == (
        f"error: job {job}, weak 3-D 8 ranks, is in the queue, but {books} could not be written "
        "(No space left on device): scancel 77, make room, and submit again\n")
    assert books.read_text() == '{"row": "'
    assert main(command_of(tmp_path, "status")) == 0
    assert capsys.readouterr().out == "weak 3-D 8 ranks: not submitted\n"


def test_collect_merges_and_names_what_is_missing(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    draw_only(monkeypatch)
    mine = work_at(tmp_path)
    other = make_case(select_rows("strong", "3d")[0], "tiny")
    mine.runs(ROW.name).mkdir(parents=True)
    path = run_file.write_run(made_up(ROW.row, preset="tiny"), mine.runs(ROW.name), ROW.name)
    verb = command_of(tmp_path, "collect", "--table", "all")
    assert main(verb) == 1
    text = capsys.readouterr().out
    assert "1 of 2 rows done, 1 new file in" in text and "1 run merged in " in text
    assert "missing: strong 3-D 8 ranks: not submitted" in text
    assert "missing: weak" not in text
    assert (out / path.name).read_bytes() == path.read_bytes() and (out / "tables.txt").exists()
    run_file.write_run(made_up(other.row, preset="tiny"), out, other.name)
    assert main(verb) == 0
    text = capsys.readouterr().out
    assert "2 of 2 rows done, 0 new files" in text and "2 runs merged in " in text
    runs, _ = merged.runs_in_file(out / "jobs" / "all.h5")
    assert sorted(run.configuration["table"] for run in runs) == ["strong", "weak"]
    assert not list((out / "jobs").glob(".all-*")) and (out / "report.html").exists()
    (out / "cut.h5").write_bytes(b"no more")
    assert main(verb) == 1
    assert capsys.readouterr().err.startswith(f"left out: {out}/cut.h5 is truncated")
    (out / "cut.h5").unlink()
    monkeypatch.setattr(merged, "merge_files", lambda *given, **more: (1, ["x.h5 is damaged"]))
    assert main(verb) == 1
    said = capsys.readouterr()
    assert "1 run merged in " in said.out and said.err == "left out: x.h5 is damaged\n"


def test_without_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["status", "--site", "cpu", "--out", str(tmp_path / "out")]) == 1
    assert "there is no squeue on PATH" in capsys.readouterr().err


@pytest.mark.slow
def test_shellcheck_has_nothing_to_say(tmp_path, capsys):
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    named = work_at(tmp_path, environment={
        "A": "/x:$B", "C": "$HOME/y", "D": "$E:/z", "F": "5$$", "G": ""}, software={
            "python": "true", "setup": ["module use $HOME/it's", "source /a.sh # ours"],
            "modules": ["m"]})
    for name in site.supplied_sites():
        out = tmp_path / name
        assert main(["render", "--site", name, "--out", str(out)]) == 0
        group = [make_case(row, "paper") for row in select_rows("all", "1d") if row.gpus == 8]
        (out / "jobs" / "array.sh").write_text(scripts.array_script(
            JobSettings(site.load_site(name), name, out), group))
        assert main(["train", "--site", name, "--ranks", "8", "--out", str(out)]) == 0
        assert main(["render", "--site", name, "--table", "combined", "--ranks", "64", "--preset",
                     "tiny", "--out", str(out)]) == 0
        steps = sum(one.ranks == 64 for one in combined.list_cases())
        found = sorted((out / "jobs").glob("*.sh"))
        assert len(found) == 21 + steps
        assert all(path.stat().st_mode & stat.S_IXUSR for path in found[1:])
        (out / "row.sh").write_text(scripts.row_script(named, ROW))
        (out / "collect.sh").write_text(scripts.collect_script(named, []))
        done = subprocess.run(["shellcheck", *found, *out.glob("*.sh")], capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("statuses, commands", [
    ([0, 0], ["render --site gpu4 --table weak --scheme 3d --out",    # with a dry run
              "train --site cpu --ranks 8 --out"]),
    pytest.param([1], ["collect --site cpu --table weak --scheme 3d --out"],
                 marks=pytest.mark.slow)])
def test_no_command_starts_mpi_and_the_folder_of_logs_stays(tmp_path, statuses, commands):
    """An MPI that only starts under its launcher would end it on a login node; Slurm lets each job
    fail whose log has no folder."""
    out = tmp_path / "results"
    out.mkdir()
    run_file.write_run(made_up(ROW.row), out, ROW.name)
    done = run_python("-c", "import sys; from jobs.__main__ import main\n"
                            "done = [main([*one.split(), sys.argv[1]]) for one in sys.argv[2:]]\n"
                            "from mpi4py import MPI; print(done, MPI.Is_initialized())",
                      str(out), *commands)
    assert done.stdout.splitlines()[-1] == f"{statuses} False", done.stderr
    assert (out / "jobs" / "logs").is_dir() if 0 in statuses else list(out.glob("*.html"))


def test_a_file_in_the_place_of_the_logs_is_refused(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "logs").write_text("")
    with pytest.raises(StoreError, match="jobs/logs cannot be written"):
        single.make_work("gpu4", str(tmp_path))
