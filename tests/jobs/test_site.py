"""Site files: one message for each mistake."""
import math
import re

import pytest

from bench.errors import UsageError
from jobs import site
from sites import HOSTILE, site_file, work_at

LINES = ["two\nlines", "a\rb", "\x1b[31m", "nul\0"]
MISTAKES = [
    (dict(node={"colour": 3}), "node: field 'colour' is unknown: choose one of "),
    (dict(node={"gpu_memry": "8 GB"}), "; did you mean gpu_memory?"),
    (dict(node={"ranks": "four"}), "node.ranks: a whole number would do, not a text"),
    (dict(node={"ranks": 0}), "node.ranks = 0: must be at least 1"),
    (dict(launch={"launcher": "aprun"}),
     "launch.launcher: 'aprun' is unknown: choose one of srun, mpirun"),
    (dict(inside={"4d": "x"}), "inside: '4d' is no scheme: 1d, "),
    # Quoting in Slurm's own lines is Slurm's affair, so nothing that would need it gets that far.
    *((dict(slurm={"partition": text}), "slurm.partition = ") for text in HOSTILE + LINES),
    (dict(slurm={"mail": "me; touch hit"}), "slurm.mail = 'me; touch hit': may have letters"),
    (dict(slurm={"time": "an hour"}), "slurm.time = 'an hour': may have letters, digits"),
    *((tables, "must be one printable line") for text in LINES for tables in (
        dict(about=text), dict(environment={"A": text}), dict(software={"python": text}),
        dict(software={"setup": [text]}), dict(launch={"mpi": text}), dict(inside={"3d": text}))),
    # Times.
    (dict(slurm={"time": "soon"}), "slurm.time = 'soon': give it as 2:00:00 or 1-12:00:00"),
    *((dict(slurm={"time": "UNLIMITED", "warning": warning}),
       f"slurm.warning = {warning}: must be at least 1 second, and at most 65535")
      for warning in (0, 65536)),
    *((dict(slurm={"time": time, "warning": warning}), f"slurm.time = '{time}': a row is told to "
       f"end slurm.warning = {warning} seconds before the limit, and needs as long before; give "
       f"more than {2 * warning} seconds") for time, warning in (
           ("0:10:00", 300), ("10", 300), ("10:00", 400), ("0:00:30", 180), ("1-0", 43200))),
    *((dict(slurm={"time_by_ranks": {ranks: time}}), f"slurm.time_by_ranks{message}")
      for ranks, time, message in (("64", "5", ".64 = '5': a row is told to end"),
                                   ("64", "soon", ".64 = 'soon': give it as 2:00:00"),
                                   ("06", "60", ": '06' is no number of ranks"))),
    # GPUs.
    *((dict(node={"gpus": gpus}), "give a number, or type and number such")
      for gpus in ("a100", "4", "a100:0", ":4", "a100:four", "a b:4", "a100:4:2", "",
                   "a100:4,v100:4")),
    *((dict(node={"gpus": gpus}, launch={"gpu_binding": "task"}),
       "4 ranks a node cannot have one of 2 GPUs each") for gpus in (2, "a100:2")),
    (dict(node={"gpus": 4}, launch={"launcher": "mpirun", "gpu_binding": "task"}),
     "only srun does that; use 'rank' with mpirun"),
    (dict(run={"backend": "cupy"}), "set launch.gpu_binding to"),
    (dict(run={"device_buffers": True}), "backend 'numpy' has no device buffers"),
    *((dict(node={"gpus": 4}, launch={"gpu_binding": "task"}, slurm={"gpu_option": option}),
       f"slurm.gpu_option = '{option}' does not know; use 'rank'")
      for option in ("gres", "none")),
    *((dict(slurm={"gres": gres}), f"slurm.gres = '{gres}': GPUs are asked for by node.gpus")
      for gres in ("gpu:4", "nvme:1,gpu")),
    (dict(slurm={"gpu_option": "gpus"}),
     "slurm.gpu_option: 'gpus' is unknown: choose one of gpus-per-node, gres, none"),
    *((dict(node={"gpus": 4}, launch={"gpu_binding": "rank", "gpu_order": order}),
       f"launch.gpu_order = {order}: give the number of each of the 4 GPUs")
      for order in ([0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [-1, 0, 1, 2])),
    (dict(node={"gpus": 4}, launch={"gpu_binding": "task", "gpu_order": [3, 2, 1, 0]}),
     "only with launch.gpu_binding = 'rank' does a rank see"),
    # Variables.
    (dict(environment={"A=B; touch hit #": "x"}), "'A=B; touch hit #' is no name of a variable"),
    *((dict(environment={"V": value}), f"environment.V = {value!r}: {start}")
      for start, values in (
          ("neither", ("`touch hit`", "~/x", "/x:~/y")),
          ("only", ("$(touch hit)", "$", "$1", "a$", "${L:-x}", "${L", "$?", "$((1))", "${}",
                    "$-", "$é"))) for value in values),
    # A job would take itself for a rank, whose checks rank 0 does, or for another job.
    *((dict(environment={name: "1"}), f"environment: {name}: the job says it")
      for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
                   "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "folder", "IFS", "UID",
                   "SRUN_CPUS_PER_TASK", "MM3D_GPU_ORDER")),
    # Options: what is wrong with each is shown with `jobs.own_options`.
    *((dict(slurm={"options": ["--mem=0", word]}), f"slurm.options: '{word}' is no option of "
       "sbatch") for word in ("mem=0", "-N2", "-o", "x", "--", "-", "--=x", "--Mem=0")),
    (dict(slurm={"options": ["--mem=0", "--gpus-per-n=1"]}),
     "slurm.options: --gpus-per-n (--gpus-per-node): the job says it, or has no use for it; give "
     "it as node.gpus"),
    (dict(collect={"options": ["--wrap=true"]}), "collect.options: --wrap: the job says it"),
    *((dict(launch={"launcher": launcher, "options": ["-n", "4"]}), f"launch.options: {name}: ")
      for launcher, name in (("srun", "-n (--ntasks)"), ("mpirun", "-n"))),
    *((dict(run={"options": words}), f"run.options: {message}") for words, message in (
        (["--repetitions=3", "--out", "x"], "--out: the job says it"),
        (["--repeat=3"], "--repeat is no option of bench run"),
        (["--repetitions=0"], "argument --repetitions: '0': "),
        (["3"], "unrecognized arguments: 3")))]


@pytest.mark.parametrize("tables, message", MISTAKES)
def test_one_message_for_each_mistake_in_a_site_file(tmp_path, tables, message):
    name = site_file(tmp_path, **tables)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        site.load_site(name)
    assert str(caught.value).startswith(f"--site {name}: ")


@pytest.mark.parametrize("text, message", [
    ("about", "Expected '='"),
    ('about = "x"\n[slurm]\n[node]\nranks = 4\n', "slurm: missing required field time")])
def test_a_file_that_is_no_site(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"--site {path}: .*{message}"):
        site.load_site(str(path))


def test_a_site_that_is_not_there():
    with pytest.raises(UsageError, match="--site nowhere: there is no such file; a .toml file, "
                                         "or one of a100, cpu, gpu4, gpu8, local"):
        site.load_site("nowhere")


MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize("text, seconds", [
    ("90", 90 * MINUTE), ("90:00", 90 * MINUTE), ("5:30", 5 * MINUTE + 30), ("2:00:00", 2 * HOUR),
    ("0:10:00", 600), ("1-12", DAY + 12 * HOUR), ("1-12:30", DAY + 12 * HOUR + 30 * MINUTE),
    ("1-00:00:05", DAY + 5), ("0", math.inf), ("UNLIMITED", math.inf), ("", None), ("1-", None),
    ("-5", None), ("1:2:3:4", None), ("5m", None)])
def test_times_in_slurms_notations(text, seconds):
    assert site.time_limit(text) == seconds


@pytest.mark.parametrize("slurm", [
    *(dict(time=time, warning=300) for time in ("0:10:01", "11", "UNLIMITED", "0")),
    dict(partition="*")])    # a word that no shell ever sees
def test_what_a_site_may_say(tmp_path, slurm):
    found = work_at(tmp_path, slurm=slurm, run={"options": ["--repetitions", "3"]}).site
    assert {**slurm}.items() <= {key: getattr(found.slurm, key) for key in slurm}.items()
    assert found.run.options == ["--repetitions", "3"]
