"""What an environment can do, and the message for each that cannot."""
import re
import shlex
import sys

import numpy as np
import pytest
from mpi4py import MPI

from bench.doctor import census, checks
from bench.doctor.checks import CHECKS
from bench.doctor.child_jobs import Facts, describe_failure
from mm3d import launcher
from support import ROOT, run_python

STANDIN = str(ROOT / "tests" / "tools" / "standin")
MPIRUN = shlex.quote(launcher.mpirun_command(1)[0])
NAMES = [check.__name__ for check in CHECKS]


def doctor(*options, **env):
    """Run it: its exit status, and by check the state and the text."""
    done = run_python("-m", "bench", "doctor", *options, **env)
    lines = re.findall(r"^(ok|warning|failed|skipped) +(\w+) +(?=(.*))", done.stdout, re.M)
    return (done, {name: state for state, name, _ in lines},
            {name: text for _, name, text in lines})


def test_a_sound_environment(tmp_path):
    done, states, text = doctor("--ranks", "2", "--ranks-per-node", "2", "--out",
                                str(tmp_path / "new"), CUDA_VISIBLE_DEVICES="",
                                OMP_NUM_THREADS="1")    # whatever the cores
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(states) == NAMES and "Usable: no check failed." in done.stdout
    assert {states[name] for name in ("software", "launcher", "nodes", "hdf5", "clock")} == {"ok"}
    assert "one world of 2 ranks, " in text["launcher"]
    assert text["nodes"] == "1 node with 2 ranks"
    assert re.search(r"kernels for \w+, 1 thread a rank, 2 ranks on \d+ cores", text["blas"])
    assert re.search(r"resolution .*e-\d+ s, error between nodes 0 s", text["clock"])
    assert not list(tmp_path.rglob("*"))    # nothing stays behind


def worlds_of_one(ranks):
    """A launcher that starts programs which know nothing of each other."""
    return f"bash -c 'for i in $(seq {ranks}); do \"$@\" & done; wait' launcher"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("check, options, env, message", [
    ("launcher", ["--ranks", "2", "--launcher", worlds_of_one(2)], {},
     "started 2 worlds of 1 rank instead of one of 2: launcher and mpi4py belong to different"),
    ("launcher", ["--ranks", "2", "--launcher", "bash -c 'sleep 60' launcher", "--limit", "1"], {},
     "did not end within 1 seconds"),
    ("launcher", ["--ranks", "2", "--launcher", "/no/such/launcher"], {},
     "/no/such/launcher: cannot be started: No such file or directory"),
    ("launcher", ["--ranks", "2", "--launcher",
                  "bash -c 'echo srun: error: no such plugin >&2; exit 3' launcher"], {},
     "ended with status 3: srun: error: no such plugin"),
    ("nodes", ["--ranks", "4", "--ranks-per-node", "2"], {},
     "1 node with 4 ranks, where at most 2 are wanted"),
    ("modules", ["--module", "cuda", "--module", "hdf5"], {"LOADEDMODULES": "gcc/12:cuda/13"},
     "hdf5 not loaded: load them, or take them out of the site file; loaded: gcc/12, cuda/13"),
    ("modules", [f"--module={name}" for name in (
        "gcc/1", "gc", "mpi/open", "mpi", "mpi/openmpi", "mpi/openmpi/4", "mpi/openmpi/4.1.5")],
     {"LOADEDMODULES": "gcc/13.2:mpi/openmpi/4.1.5"}, "gcc/1, gc, mpi/open not loaded: "),
    ("gpus", ["--ranks", "4", "--gpus-per-node", "4"], {"CUDA_VISIBLE_DEVICES": ""},
     "rank 0 sees no GPU, where 4 a node are wanted"),
    ("gpus", ["--ranks", "4", "--gpus-per-node", "4"], {"CUDA_VISIBLE_DEVICES": "0,1"},
     "the 4 ranks on the node of rank 0 see 2 GPUs, where 4 are wanted"),
    ("gpus", ["--ranks", "4", "--gpus-per-node", "4"], {"CUDA_VISIBLE_DEVICES": "2"},
     "ranks 0, 1, 2, 3 all see one and the same GPU: give each its own"),
    ("gpus", ["--ranks", "3", "--gpus-per-node", "2"], {"CUDA_VISIBLE_DEVICES": "0,1"},
     "ranks 0, 2 share a GPU: start at most 2 on a node"),
    ("variables", ["--ranks", "2", "--variable", "MEANT=so", "--launcher",
                   f"env -u MEANT {MPIRUN} -n 2"], {"MEANT": "so"},
     "MEANT is not set on 2 of 2 ranks, where 'so' is wanted: the launcher or the container"),
    ("gpus", ["--ranks", "2", "--gpus-per-node", "2"],
     {"CUDA_VISIBLE_DEVICES": "0,1", "MM3D_GPU_ORDER": "1,1"},
     "MM3D_GPU_ORDER='1,1': give the numbers of the 2 GPUs that a rank sees, 0,1 in the order"),
    ("blas", ["--ranks", "2"], {"OMP_NUM_THREADS": "999", "OPENBLAS_NUM_THREADS": "64"},
     "threads fight for them; set OMP_NUM_THREADS="),
    ("hdf5", ["--out", "/dev/null/results"], {},
     "--out's folder /dev/null/results cannot be written (Not a directory)")])
def test_broken_environments(check, options, env, message):
    done, states, text = doctor(*options, **env)
    assert done.returncode == 1 and states[check] == "failed", done.stdout + done.stderr
    assert message in text[check]
    # What depends on the launcher is not known where it fails; nothing else fails.
    assert [name for name, state in states.items() if state == "failed"] == [check]
    assert check != "launcher" or text["gpus"] == "not known, as the launcher failed"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options, state", [(["--device-buffers"], "failed"), ([], "warning")])
def test_an_mpi_that_cannot_carry_device_buffers(options, state):
    done, states, text = doctor("--ranks", "2", "--gpus-per-node", "2", *options,
                                PYTHONPATH=STANDIN)
    assert done.returncode == (state == "failed"), done.stdout + done.stderr
    assert states["cuda_aware"] == state and "an exchange of device buffers ended with" in \
        text["cuda_aware"]
    assert states["gpus"] == "ok" and text["gpus"] == "2 GPUs for 2 ranks, as CUDA says"


@pytest.mark.slow
@pytest.mark.parametrize("unset", ["", " env -u MPI_LOCALRANKID"])
def test_each_rank_tries_its_own_gpu_whatever_the_launcher_says(tmp_path, unset):
    """In one context, and none on GPU 0 before it, where those of all ranks would take memory;
    where no rank hears its number from the launcher, MPI tells it later."""
    done, states, text = doctor("--ranks", "3", "--device-buffers", "--launcher",
                                f"{MPIRUN} -n 3{unset}", PYTHONPATH=STANDIN, STANDIN_OPEN="1",
                                STANDIN_CONTEXTS=str(tmp_path / "contexts"))
    assert done.returncode == 0 and states["gpus"] == "ok", done.stdout + done.stderr
    assert text["cuda_aware"] == "3 ranks exchanged device buffers"
    made = {line for line in (tmp_path / "contexts").read_text().splitlines()}
    assert {line.split()[1] for line in made} == {"0", "1", "2"} and (unset or len(made) == 3)


@pytest.mark.parametrize("call, what", [
    ("Allgatherv", "an all-gather"), ("Alltoallv", "an all-to-all"), ("Bcast", "a broadcast"),
    ("Isend", "a message")])
def test_every_call_that_carries_device_buffers_is_tried(monkeypatch, call, what):
    """And is missed where MPI loses what it should carry."""
    monkeypatch.syspath_prepend(STANDIN)
    monkeypatch.setenv("STANDIN_OPEN", "1")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(MPI, "COMM_WORLD", Losing(MPI.COMM_SELF, call))
    assert census.exchange_buffers() == f"{what} arrived wrong on 1 ranks"
    sys.modules.pop("cupy", None)


class Losing:
    """A communicator one of whose calls does nothing, or sends something else."""

    def __init__(self, comm, call: str) -> None:
        self.comm, self.call = comm, call

    def __getattr__(self, name: str):
        if name != self.call:
            return getattr(self.comm, name)
        if name == "Isend":
            return lambda a, peer: self.comm.Isend(0 * np.asarray(a.view), peer)

        def lose(*buffers) -> None:
            if name == "Bcast":
                buffers[0].view[...] = -1
        return lose


@pytest.mark.slow_but_first
@pytest.mark.parametrize("options, failed", [
    (["--device-buffers"], ["backend", "cuda_aware"]), (["--backend", "cupy"], ["backend"])])
def test_without_the_package_nothing_is_said_of_mpi(tmp_path, options, failed):
    (tmp_path / "cupy.py").write_text("import no_such_library")
    done, states, text = doctor(*options, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert [name for name, state in states.items() if state == "failed"] == failed
    assert text["backend"].startswith("CuPy cannot be used on 2 of 2 ranks: ModuleNotFoundError: "
                                      "No module named 'no_such_library': pip install")
    assert failed == ["backend"] or text["cuda_aware"] == "not known, as CuPy cannot be used"


def rank(**more):
    """What a rank says of itself."""
    return {"variables": {}, "cupy": "", "gpus": []} | more


def facts_of(worlds, problem="", ranks=1, **more):
    """Facts whose census is known."""
    facts = Facts(ranks, ["run", str(ranks)], **more)
    vars(facts)["census"] = worlds, problem    # as the property keeps it
    return facts


@pytest.mark.parametrize("worlds, problem, said", [
    ([[rank()] * 2], "", "run 4 started 2 ranks instead of 4"),
    ([[rank()]], "", "run 4 started 1 rank instead of 4"),
    ([], "", "run 4: no rank said anything"),
    ([], "ended with status 1: no plugin", "run 4: ended with status 1: no plugin"),
    ([], "no PMI", f"run 4: no PMI; perhaps {checks.STRANGERS}")])
def test_launchers_that_start_no_world_of_the_ranks(worlds, problem, said):
    found = checks.launcher(facts_of(worlds, problem, 4))
    assert found == checks.Finding(checks.FAILED, said)


@pytest.mark.parametrize("found, problem", [
    (["a:b", "a:b"], ""), (["/tool:a:b", "a:b:/tool"], ""), (["a:b", None], "not set on 1 of 2"),
    (["a:b", "a"], "'a' on 1 of 2"), (["", ""], "'' on 2 of 2"), (["b:a", "a:b"], "'b:a' on 1")])
def test_variables_reach_every_rank_and_paths_may_grow(found, problem):
    said = checks.variables(facts_of([[rank(variables={"PATHS": value}) for value in found]],
                                     ranks=2, variables={"PATHS": "a:b"}))
    assert said.state == ("failed" if problem else "ok") and problem in said.text


SRUN = """srun: error: n2: task 7: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=4.8
slurmstepd-n1: error: *** STEP 4.8 ON n1 CANCELLED AT 2026-11-25T18:06:14 ***
srun: error: n1: tasks 0-6: Terminated
"""
BARS = "-" * 74 + "\n"
PRTERUN = f"{BARS}prterun saw that processes exited with\nnon-zero status\n{BARS}"
OPEN_MPI = f"""{BARS}It was direct launched by srun, but OMPI was not built
with SLURM's PMI support.
{BARS}*** An error occurred in MPI_Init_thread
[n1:7] Local abort before MPI_INIT completed successfully: no error messages
{PRTERUN}"""
MPICH = """Abort(807027984): Fatal error in internal_Init_thread: Internal MPI error!, error stack:
MPIR_pmi_init(225)..............:
check_VERSION(167):  Runtime environment uses unsupported PMI version PMIx. Aborting.
"""
MISSING = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'cupy'\n"


@pytest.mark.parametrize("status, output, said", [
    (0, "ImportError: never mind", ""),
    (137, MISSING + SRUN, "ended with status 137 (SIGKILL): ModuleNotFoundError: No module named "
                          "'cupy'"),
    (143, SRUN.replace("Exited with exit code 1", "Segmentation fault"),
     "ended with status 143 (SIGTERM): srun: error: n2: task 7: Segmentation fault"),
    (139, "", "ended with status 139 (SIGSEGV): it said nothing"),
    (1, "3: mpi4py.MPI.Exception: MPI_ERR_OTHER\nsrun: error: gone", "ended with status 1: 3: "
     "mpi4py.MPI.Exception: MPI_ERR_OTHER"),
    (127, "python: error while loading shared libraries: libmpi.so\n" + SRUN,
     "ended with status 127: python: error while loading shared libraries: libmpi.so"),
    (1, OPEN_MPI + SRUN, "ended with status 1: It was direct launched by srun, but OMPI was not "
     "built with SLURM's PMI support."),
    (16, MPICH + PRTERUN, "ended with status 16: check_VERSION(167):  Runtime environment "
     "uses unsupported PMI version PMIx. Aborting."),
    (1, BARS + MISSING + PRTERUN, "ended with status 1: ModuleNotFoundError: No module named "
     "'cupy'"),
    (255, "", "ended with status 255: it said nothing"), (-9, "a\nb\n", "ended with signal 9: b"),
    (1, SRUN, "ended with status 1: srun: error: n1: tasks 0-6: Terminated"),
    (None, "", "did not end within 5 seconds"),
    (None, MISSING + SRUN, "did not end within 5 seconds: ModuleNotFoundError: No module named "
                           "'cupy'")])
def test_a_failure_is_told_by_its_cause_and_not_by_what_follows(status, output, said):
    assert describe_failure(status, output, 5) == said


def test_reports_that_were_cut_short_are_left_out(tmp_path):
    """By the end of a child job, or by a full disk."""
    for end, text in (("out", f"{census.CENSUS_MARK}[]\n{census.CENSUS_MARK}[1,"), ("err", ""),
                      ("status", "")):
        (tmp_path / f"census.{end}").write_text(text)
    assert Facts(1, ["none"], seen=tmp_path).census == ([[]], "left no status, as on a full disk")


def test_kernels_that_are_forced(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    for best, state, said in (("avx512f", "warning", "OPENBLAS_CORETYPE=Haswell forces them"),
                              ("avx2", "ok", "1 rank on 2 cores")):
        found = checks.blas(facts_of([[rank(
            blas="openblas", blas_architecture="Haswell", blas_threads=1, cores=2,
            ranks_on_node=1, best_kernels=best)]]))
        assert found.state == state and said in found.text
