"""Options of scripts: what a site makes of them, and what would override them or is not taken."""
import re
from operator import attrgetter

import pytest

from jobs import scripts
from jobs.__main__ import main
from jobs.own_options import PROGRAMS, list_overrides
from sites import ROW, ROWS, options_of, work_at

SITE = dict(slurm={"partition": "gpu", "account": "paid", "qos": "fast", "constraint": "big"},
            node={"cores_per_rank": 2, "gpus": 4}, launch={"gpu_binding": "rank"},
            run={"backend": "cupy"})


@pytest.mark.parametrize("program, text, name", [
    *(("sbatch", text, "") for text in (
        "--array=0-3 --output=/x --job-name=x --nodes=9 --ntasks=9 --wait --parsable "
        "--begin=now+1hour --partition=other --ntasks-per-node=1 --cpus-per-task=1 "
        "--gpus-per-node=1 --gres=gpu:1 --signal=B:TERM@5 --time=5 --dependency=singleton "
        "--chdir=/ --wrap=true --test-only --error=/x --help --exclusive=user").split()),
    *(("srun", text, "") for text in (
        "--ntasks=4", "--ntasks 4", "--mpi=none", "--gpus-per-task=2", "--help", "--chdir=/")),
    *(("mpirun", text, "") for text in ("-n 4", "-np 4", "--np 4", "-wdir /")),
    ("bench run", "--repetitions=3 --out=x", "--out"),
    *(("bench run", text, "") for text in (
        "--out x", "--rows=weak:3d", "--backend=numpy", "--preset=tiny", "--recompute=full",
        "--inside=z", "--hidden=8", "--grid=2x2x2",
        # What is of emulated clusters would be refused when the job has begun.
        "--links=50Mbit", "--software-share=0.2", "--dtype=float64")),
    # sbatch takes the beginning of an option for all of it.
    ("sbatch", "--job=x", "--job (--job-name)"), ("sbatch", "--out=/x", "--out (--output)"),
    ("sbatch", "--gpus-per-n=1", "--gpus-per-n (--gpus-per-node)"),
    ("sbatch", "--par", "--par (--parsable)"), ("srun", "-n 4", "-n (--ntasks)"),
    ("srun", "-n4", "-n4 (--ntasks)"), ("srun", "-lN2", "-lN2 (--nodes)"),
    ("srun", "--nod=2", "--nod (--nodes)"), ("srun", "-m cyclic", "-m (--distribution)"),
    ("srun", "-K0", "-K0 (--kill-on-bad-exit)"), ("srun", "-c1", "-c1 (--cpus-per-task)"),
    # After what may be a value, and so no program.
    ("srun", "-w n1 -n4", "-n4 (--ntasks)"), ("mpirun", "-n4", "-n4 (--n)"),
    ("bench run", "--stop=x", "--stop (--stop-file)"),
    ("bench run", "--cau", "--cau (--causal)"), ("bench run", "-h", "-h (--help)")])
def test_options_that_the_job_sets_itself(program, text, name):
    """By their own or another name, which is their first word if it is not given."""
    name = name or text.split()[0].partition("=")[0]
    assert [*list_overrides(program, text.split())][0].startswith(f"{name}: the job says it")


@pytest.mark.parametrize("program, text", [
    ("srun", "-- numactl : -l"), ("srun", "--cpu-bind=cores : -l"), ("mpirun", ": true")])
def test_no_other_program_begins(program, text):
    assert [*list_overrides(program, text.split())][0].startswith("':': ")


@pytest.mark.parametrize("table, text", [
    ("slurm", "--mem=0 --export=NONE --clusters=other --requeue --open-mode=append "
     "--reservation=x --comment=n --hint=nomultithread --mem-per-cpu=1G --wait-all-nodes=1 "
     "--nodelist=n1 --licenses=x --exclude=n2 --no-kill"),
    *(("srun", text) for text in (
        "--cpu-bind=cores -l --label --exact --overlap -u --export=ALL -W5 -pall -wn1 --network=x",
        "--cpu-bind=cores ./bind-gpus",    # a program that starts the program
        "numactl -m 0", "-l -- numactl -m 0",
        "--cpu-bind=cores nsys profile -o x --output=y", "-w n1 ./bind-gpus -n")),
    ("mpirun", "-ppn 4 -f hosts --map-by ppr:4:node -x A -l")])
def test_options_that_the_site_may_choose(tmp_path, table, text):
    words = text.split()
    mine = work_at(tmp_path, **({"slurm": {"options": words}} if table == "slurm" else {
        "launch": {"launcher": table, "options": words}}))
    found = (options_of(scripts.row_script(mine, ROW)) if table == "slurm" else
             scripts.launch_command(mine.site, 8))
    assert found[-len(words):] == words


def test_every_option_that_a_script_sets_is_known_as_its_own(tmp_path):
    """With everything that a site file can say."""
    mine = work_at(tmp_path, **SITE | dict(
        launch={"gpu_binding": "task"},
        slurm=SITE["slurm"] | {"mail": "me@there", "gres": "nvme:1"}))
    texts = [scripts.row_script(mine, ROW), scripts.array_script(mine, [ROW]),
             scripts.collect_script(mine, []), scripts.verb_script(mine, "train", "a", 8, []),
             scripts.verb_script(mine, "measure pipeline", "b", 8, [])]
    set_by_job = {option for text in texts for option in options_of(text)}
    assert len(set_by_job) > 15
    assert [option for option in set_by_job if not any(list_overrides("sbatch", [option]))] == []
    srun = [word for word in scripts.launch_command(mine.site, 8)[1:]
            if not word.startswith("--export")]
    assert len(srun) == 5 and all(any(list_overrides("srun", [word])) for word in srun)
    assert any(list_overrides("mpirun", scripts.launch_command(
        work_at(tmp_path, launch={"launcher": "mpirun"}).site, 8)[1:]))
    for verb, text in zip(("run", "train", "measure pipeline"), (texts[0], *texts[3:])):
        row = text.partition("\nrow=(\n")[2].partition("\n)")[0].split() + ["--stop-file"]
        row = [word.strip("'") for word in row]
        assert len(row) > 2
        assert {word for word in row if not any(list_overrides(f"bench {verb}", [word]))} <= (
            {"--stop-file"} if verb == "measure pipeline" else set())
    for key in {key for program in PROGRAMS.values() for key in program.own.values() if key}:
        attrgetter(key)(mine.site)    # that is said to say it


@pytest.mark.parametrize("verb, words, said", [
    ("train", ["--stop-a=5"], "--stop-a (--stop-after): the job says it"),
    ("train", ["--out", "x"], "--out: the job says it"),
    ("pipeline", ["--stages=2", "--back", "numpy"], "--back (--backend): the job says it"),
    ("train", ["--steps=5"], ""),
    ("train", ["--step=5"], "--step is no option of bench train; did you mean --steps?"),
    ("train", ["--steps", "0"], "argument --steps: '0': "),
    ("train", ["--steps"], "argument --steps: expected one argument"),
    ("train", ["steps", "5"], "unrecognized arguments: steps 5"),
    ("train", ["--steps", "5", "--", "x"], "unrecognized arguments: -- x"),
    ("train", ["--checkpoints", "x"], "--checkpoints: "), ("train", ["--compare"], "--compare: "),
    ("train", ["--data", "3"], "--data 3 does not"), ("train", ["--model", "nosuch"], "nosuch"),
    ("train", ["--data", "8", "--batch", "4", "--scheme", "serial"],
     "a batch of 4 sequences cannot"),
    ("pipeline", [], "the following arguments are required: --stages"),
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


ALL = ["--account=paid", "--constraint=big", "--mem=0", "--partition=gpu", "--qos=fast"]


@pytest.mark.parametrize("collect, time, expected", [
    ({}, "0:20:00", ALL), ({"time": "1:00:00"}, "1:00:00", ALL),
    ({"partition": "login"}, "0:20:00", ["--account=paid", "--partition=login"]),
    ({"partition": "login", "account": "free", "options": ["--mem=4G"]}, "0:20:00",
     ["--account=free", "--mem=4G", "--partition=login"]),
    ({"options": [], "qos": "slow"}, "0:20:00",
     ["--account=paid", "--constraint=big", "--partition=gpu", "--qos=slow"])])
def test_the_last_job_has_values_of_its_own(tmp_path, collect, time, expected):
    mine = work_at(tmp_path, **SITE | dict(
        collect=collect, slurm=SITE["slurm"] | {"options": ["--mem=0"], "gres": "nvme:1"}))
    found = options_of(scripts.collect_script(mine, []))
    assert f"--time={time}" in found and {"--nodes=1", "--ntasks=1"} < {*found}
    assert not [option for option in found if option.startswith(("--g", "--nodelist"))]
    assert sorted(option for option in found if option.startswith((
        "--account", "--partition", "--qos", "--constraint", "--mem"))) == expected


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
