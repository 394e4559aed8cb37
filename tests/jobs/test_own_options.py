"""Options of a site file that would override what the job's script sets itself, and times."""
import math
import re

import pytest

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.errors import UsageError
from jobs import scripts, site
from jobs.__main__ import main
from jobs.own_options import PROGRAMS, list_overrides
from jobs.scripts import Work

GOOD = """
about = "a cluster"
[node]
ranks = 4
cores_per_rank = 2
gpus = 4
[run]
backend = "cupy"
options = [{run}]
[launch]
launcher = "{launcher}"
gpu_binding = "{binding}"
options = [{launch}]
[slurm]
time = "{time}"
warning = {warning}
partition = "gpu"
account = "paid"
qos = "fast"
constraint = "big"
options = [{slurm}]
{more}
"""
ROWS = [make_case(row, "tiny") for row in select_rows("weak", "3d")]


def load(tmp_path, time="1:00:00", warning=180, more="", launcher="srun", binding="rank",
         **options):
    quoted = {key: ", ".join(f'"{word}"' for word in options.get(key, ()))
              for key in ("run", "launch", "slurm")}
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.format(time=time, warning=warning, more=more, launcher=launcher,
                                binding=binding, **quoted))
    return site.load_site(str(path))


def lines(text):
    return [option.strip("'") for option in re.findall(r"^#SBATCH (\S+)$", text, re.M)]


@pytest.mark.parametrize("word, full", [
    ("--array=0-3", ""), ("--output=/x", ""), ("--job-name=x", ""), ("--nodes=9", ""),
    ("--ntasks=9", ""), ("--wait", ""), ("--parsable", ""), ("--begin=now+1hour", ""),
    ("--partition=other", ""), ("--ntasks-per-node=1", ""), ("--cpus-per-task=1", ""),
    ("--gpus-per-node=1", ""), ("--gres=gpu:1", ""), ("--signal=B:TERM@5", ""), ("--time=5", ""),
    ("--dependency=singleton", ""), ("--chdir=/", ""), ("--wrap=true", ""), ("--test-only", ""),
    ("--error=/x", ""), ("--help", ""), ("--exclusive=user", ""),
    # sbatch takes the beginning of an option for all of it.
    ("--job=x", "job-name"), ("--out=/x", "output"), ("--gpus-per-n=1", "gpus-per-node"),
    ("--cpus-per-t=1", "cpus-per-task"), ("--par", "parsable"), ("--test", "test-only")])
def test_options_of_sbatch_that_the_job_sets_itself(tmp_path, word, full):
    name = word.partition("=")[0]
    said = f"slurm.options: {name}{f' (--{full})' * bool(full)}: the job says it"
    with pytest.raises(UsageError, match=re.escape(said)):
        load(tmp_path, slurm=["--mem=0", word])
    more = f'[collect]\noptions = ["{word}"]'
    with pytest.raises(UsageError, match=re.escape(said.replace("slurm", "collect", 1))):
        load(tmp_path, more=more)


@pytest.mark.parametrize("word", ["-N2", "-J", "-o", "x", "--", "-", "--=x", "--Mem=0"])
def test_what_is_no_option_in_full(tmp_path, word):
    with pytest.raises(UsageError, match=f"slurm.options: '{word}' is no option of sbatch"):
        load(tmp_path, slurm=[word])


def test_options_of_sbatch_that_the_site_may_choose(tmp_path):
    mine = ["--mem=0", "--export=NONE", "--clusters=other", "--requeue", "--open-mode=append",
            "--reservation=x", "--comment=n", "--hint=nomultithread", "--mem-per-cpu=1G",
            "--wait-all-nodes=1", "--nodelist=n1", "--licenses=x", "--exclude=n2", "--no-kill"]
    script = scripts.row_script(Work(load(tmp_path, slurm=mine), "x", tmp_path), ROWS[0])
    assert lines(script)[-len(mine):] == mine


@pytest.mark.parametrize("launcher, words, name", [
    ("srun", ["-n", "4"], "-n (--ntasks)"), ("srun", ["-n4"], "-n4 (--ntasks)"),
    ("srun", ["--ntasks=4"], "--ntasks"), ("srun", ["--ntasks", "4"], "--ntasks"),
    ("srun", ["-lN2"], "-lN2 (--nodes)"), ("srun", ["--nod=2"], "--nod (--nodes)"),
    ("srun", ["-m", "cyclic"], "-m (--distribution)"), ("srun", ["--mpi=none"], "--mpi"),
    ("srun", ["--dist=cyclic"], "--dist (--distribution)"),
    ("srun", ["-K0"], "-K0 (--kill-on-bad-exit)"), ("srun", ["-c1"], "-c1 (--cpus-per-task)"),
    ("srun", ["--gpus-per-task=2"], "--gpus-per-task"),
    ("srun", ["--gpu-b=none"], "--gpu-b (--gpu-bind)"), ("srun", ["-o", "x"], "-o (--output)"),
    ("srun", ["--help"], "--help"), ("srun", ["--chdir=/"], "--chdir"),
    # After what may be a value, and so no program.
    ("srun", ["-w", "n1", "-n4"], "-n4 (--ntasks)"),
    ("srun", ["--", "numactl", ":", "-l"], "':'"),
    ("srun", ["--cpu-bind=cores", ":", "-l"], "':'"),
    ("mpirun", ["-n", "4"], "-n"), ("mpirun", ["-np", "4"], "-np"),
    ("mpirun", ["-n4"], "-n4 (--n)"),
    ("mpirun", ["--np", "4"], "--np"), ("mpirun", ["-wdir", "/"], "-wdir"),
    ("mpirun", [":", "true"], "':'")])
def test_options_of_the_launcher_that_the_job_sets_itself(tmp_path, launcher, words, name):
    with pytest.raises(UsageError, match=re.escape(f"launch.options: {name}: ")):
        load(tmp_path, launcher=launcher, launch=words)


@pytest.mark.parametrize("launcher, words", [
    ("srun", ["--cpu-bind=cores", "-l", "--label", "--exact", "--overlap", "-u", "--export=ALL",
              "-W5", "-pall", "-wn1", "--network=x"]),
    ("srun", ["--cpu-bind=cores", "./bind-gpus"]),    # a program that starts the program
    ("srun", ["numactl", "-m", "0"]), ("srun", ["-l", "--", "numactl", "-m", "0"]),
    ("srun", ["--cpu-bind=cores", "nsys", "profile", "-o", "x", "--output=y"]),
    ("srun", ["-w", "n1", "./bind-gpus", "-n"]),
    ("mpirun", ["-ppn", "4", "-f", "hosts", "--map-by", "ppr:4:node", "-x", "A", "-l"])])
def test_options_of_the_launcher_that_the_site_may_choose(tmp_path, launcher, words):
    found = load(tmp_path, launcher=launcher, launch=words)
    assert scripts.launch_command(found, 8)[-len(words):] == words


@pytest.mark.parametrize("words, name", [
    (["--out=x"], "--out"), (["--out", "x"], "--out"), (["--rows=weak:3d"], "--rows"),
    (["--backend=numpy"], "--backend"), (["--preset=tiny"], "--preset"),
    (["--stop=x"], "--stop (--stop-file)"), (["--recompute=full"], "--recompute"),
    (["--inside=z"], "--inside"), (["--hidden=8"], "--hidden"), (["--grid=2x2x2"], "--grid"),
    # What is of emulated clusters would be refused when the job has begun.
    (["--links=50Mbit"], "--links"), (["--software-share=0.2"], "--software-share"),
    (["--dtype=float64"], "--dtype"), (["--cau"], "--cau (--causal)"), (["-h"], "-h (--help)")])
def test_options_of_the_row_that_the_job_sets_itself(tmp_path, words, name):
    with pytest.raises(UsageError, match=re.escape(f"run.options: {name}: the job says it")):
        load(tmp_path, run=["--repetitions=3", *words])


def test_every_option_that_a_script_sets_is_known_as_its_own(tmp_path):
    """With everything that a site file can say."""
    found = load(tmp_path, binding="task", more='mail = "me@there"\ngres = "nvme:1"')
    mine = Work(found, "x", tmp_path)
    texts = [scripts.row_script(mine, ROWS[0]), scripts.array_script(mine, ROWS[:1]),
             scripts.collect_script(mine, []), scripts.training_script(mine, "a", 8, []),
             scripts.pipeline_script(mine, "b", 8, [])]
    set_by_job = {option for text in texts for option in lines(text)}
    assert len(set_by_job) > 15
    assert [option for option in set_by_job if not any(list_overrides("sbatch", [option]))] == []
    srun = [word for word in scripts.launch_command(found, 8)[1:]
            if not word.startswith("--export")]
    assert len(srun) == 5 and all(any(list_overrides("srun", [word])) for word in srun)
    assert any(list_overrides("mpirun", scripts.launch_command(
        load(tmp_path, launcher="mpirun"), 8)[1:]))
    for verb, text in zip(("run", "train", "measure pipeline"), (texts[0], *texts[3:])):
        row = text.partition("\nrow=(\n")[2].partition("\n)")[0].split() + ["--stop-file"]
        row = [word.strip("'") for word in row]
        assert len(row) > 2
        assert {word for word in row if not any(list_overrides(f"bench {verb}", [word]))} <= (
            {"--stop-file"} if verb == "measure pipeline" else set())


def test_each_own_option_says_what_says_it_in_the_site_file(tmp_path):
    keys = {key for program in PROGRAMS.values() for key in program.own.values() if key}
    found = load(tmp_path)
    for key in keys:
        table = found
        for name in key.split("."):
            table = getattr(table, name)


@pytest.mark.parametrize("verb, words, name", [
    ("train", ["--stop-a=5"], "--stop-a (--stop-after)"), ("train", ["--out", "x"], "--out"),
    ("pipeline", ["--stages=2", "--out=x"], "--out"),
    ("pipeline", ["--stages=2", "--back", "numpy"], "--back (--backend)")])
def test_words_after_the_dashes(tmp_path, capsys, verb, words, name):
    assert main([verb, "--site", "cpu", "--ranks", "8", "--out", str(tmp_path / "out"), "--",
                 *words]) == 2
    assert f"{verb}: after --: {name}: the job says it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb, words, said", [
    ("train", ["--steps=5"], ""),
    ("train", ["--step=5"], "--step is no option of bench train; did you mean --steps?"),
    ("train", ["--steps", "0"], "argument --steps: '0': "),
    ("train", ["--steps"], "argument --steps: expected one argument"),
    ("train", ["steps", "5"], "unrecognized arguments: steps 5"),
    ("train", ["--steps", "5", "--", "x"], "unrecognized arguments: -- x"),
    ("train", ["--optimizer=lamb"], "argument --optimizer: 'lamb' is unknown: choose one of"),
    ("pipeline", [], "the following arguments are required: --stages"),
    ("pipeline", ["--stage", "2"], "did you mean --stages?"),
    ("pipeline", ["--stages=2", "--unit=10"], "argument --unit: '10': a time such as 10ms")])
def test_words_that_the_verb_does_not_take(tmp_path, capsys, verb, words, said):
    """Refused before the job waits for its turn, and in one line."""
    status = main([verb, "--site", "cpu", "--ranks", "8", "--out", str(tmp_path / "out"), "--",
                   *words])
    err = capsys.readouterr().err
    if said:
        assert status == 2 and err.startswith(f"error: {verb}: after --: ") and said in err
        assert err.count("\n") == 1 and not (tmp_path / "out").exists()
    else:
        assert status == 0, err


@pytest.mark.parametrize("words, said", [
    (["--repetitions=3"], ""), (["--repetitions", "3"], ""),
    (["--repeat=3"], "--repeat is no option of bench run"),
    (["--repetitions=0"], "argument --repetitions: '0': "), (["3"], "unrecognized arguments: 3")])
def test_options_of_the_row_that_bench_run_does_not_take(tmp_path, words, said):
    if not said:
        assert load(tmp_path, run=words).run.options == words
    else:
        with pytest.raises(UsageError, match=f"run.options: {said}"):
            load(tmp_path, run=words)


MINUTE, HOUR, DAY = 60, 3600, 86400
NOTATIONS = {"90": 90 * MINUTE, "90:00": 90 * MINUTE, "5:30": 5 * MINUTE + 30, "2:00:00": 2 * HOUR,
             "0:10:00": 600, "1-12": DAY + 12 * HOUR, "1-12:30": DAY + 12 * HOUR + 30 * MINUTE,
             "1-00:00:05": DAY + 5, "0": math.inf, "UNLIMITED": math.inf}


@pytest.mark.parametrize("text, seconds", [
    *NOTATIONS.items(), ("", None), ("1-", None), ("-5", None), ("1:2:3:4", None), ("5m", None)])
def test_times_in_slurms_notations(text, seconds):
    assert site.time_limit(text) == seconds


@pytest.mark.parametrize("time, warning", [
    ("0:10:00", 300), ("10", 300), ("10:00", 400), ("0:00:30", 180), ("1-0", 43200)])
def test_a_limit_that_leaves_a_row_no_time(tmp_path, time, warning):
    with pytest.raises(UsageError, match=f"slurm.time = '{time}': .* slurm.warning = {warning} "
                                         f".* give more than {2 * warning} seconds"):
        load(tmp_path, time, warning)


def test_the_limit_of_some_ranks_is_a_limit_as_well(tmp_path):
    with pytest.raises(UsageError, match="slurm.time_by_ranks.64 = '5': a row is told to end"):
        load(tmp_path, more='[slurm.time_by_ranks]\n64 = "5"')
    with pytest.raises(UsageError, match="slurm.time_by_ranks.64 = 'soon': give it as 2:00:00"):
        load(tmp_path, more='[slurm.time_by_ranks]\n64 = "soon"')
    with pytest.raises(UsageError, match="slurm.time_by_ranks: '06' is no number of ranks"):
        load(tmp_path, more='[slurm.time_by_ranks]\n06 = "60"')


@pytest.mark.parametrize("time, warning", [
    ("0:10:01", 300), ("11", 300), ("UNLIMITED", 300), ("0", 300)])
def test_a_limit_that_leaves_a_row_time(tmp_path, time, warning):
    assert load(tmp_path, time, warning).slurm.time == time


def test_a_warning_that_sbatch_does_not_take(tmp_path):
    with pytest.raises(UsageError, match="slurm.warning = 65536: must be at least 1 second, and "
                                         "at most 65535"):
        load(tmp_path, "UNLIMITED", 65536)


ALL = ["--account=paid", "--partition=gpu", "--qos=fast", "--constraint=big", "--mem=0"]


@pytest.mark.parametrize("more, time, expected", [
    ("", "0:20:00", ALL), ('time = "1:00:00"', "1:00:00", ALL),
    ('partition = "login"', "0:20:00", ["--account=paid", "--partition=login"]),
    ('partition = "login"\naccount = "free"\noptions = ["--mem=4G"]', "0:20:00",
     ["--account=free", "--partition=login", "--mem=4G"]),
    ('options = []\nqos = "slow"', "0:20:00",
     ["--account=paid", "--partition=gpu", "--qos=slow", "--constraint=big"])])
def test_the_last_job_has_values_of_its_own(tmp_path, more, time, expected):
    mine = Work(load(tmp_path, slurm=["--mem=0"], more=f"[collect]\n{more}"), "x", tmp_path)
    found = lines(scripts.collect_script(mine, []))
    assert f"--time={time}" in found and {"--nodes=1", "--ntasks=1"} < {*found}
    assert not [option for option in found if "gpu" in option.partition("=")[0]]
    own = [option for option in found if option.partition("=")[0] in (
        "--account", "--partition", "--qos", "--constraint", "--mem")]
    assert sorted(own) == sorted(expected)
