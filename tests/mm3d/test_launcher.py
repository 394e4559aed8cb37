"""The defaults that a launch deserves, from made-up environments and in real ranks."""
import ast
import os
import sys
import warnings

import pytest

from mm3d import launcher as environment
from support import run_python, run_ranks


@pytest.fixture
def node(monkeypatch, have_cores):
    """Make this process look like a rank on a node; nothing is imported yet."""
    for name in ("numpy", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return have_cores


@pytest.mark.parametrize("variables, ranks", [
    ({}, 1),
    ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "8"}, 4),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
    ({"MV2_COMM_WORLD_LOCAL_SIZE": "5"}, 5),
    ({"PMI_SIZE": "8"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "6"}, 6),
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2", "PMI_SIZE": "11"}, 3),
    ({"SLURM_TASKS_PER_NODE": "16", "SLURM_NTASKS": "16"}, 1),    # a batch script is no rank
    ({"SLURM_STEP_TASKS_PER_NODE": "1", "MPI_LOCALNRANKS": "8"}, 8),    # mpirun inside a job
    ({"MPI_LOCALNRANKS": "0", "PMI_SIZE": "0"}, 1), ({"SLURM_STEP_TASKS_PER_NODE": "0"}, 1),
    ({"MPI_LOCALNRANKS": "", "PMI_SIZE": "what"}, 1), ({"PMI_SIZE": "\u00b2"}, 1),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}, 4),
    ({"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}, 4),
    ({"JSM_NAMESPACE_LOCAL_SIZE": "6", "JSM_NAMESPACE_SIZE": "12"}, 6),
    ({"MVP_COMM_WORLD_LOCAL_SIZE": "2", "MVP_COMM_WORLD_SIZE": "4"}, 2),
    ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}, 4),
    ({"FLUX_TASK_LOCAL_ID": "1", "PMI_SIZE": "5", "FLUX_JOB_NNODES": "2"}, 3),
    ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8"}, 8),    # no more than all
    # Flux that srun has started, and hydra under PALS.
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "FLUX_TASK_LOCAL_ID": "3", "FLUX_JOB_SIZE": "8",
      "FLUX_JOB_NNODES": "2"}, 4),
    ({"PALS_LOCAL_SIZE": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, 2),
])
def test_ranks_on_this_node(variables, ranks):
    assert environment.local_ranks(variables) == ranks


@pytest.mark.parametrize("variables, rank", [
    ({}, None), ({"PMI_RANK": "5"}, None), ({"SLURM_LOCALID": "2"}, 2),
    ({"MPI_LOCALRANKID": "3", "PMI_LOCAL_RANK": "1"}, 3), ({"PMI_LOCAL_RANK": "1"}, 1),
    ({"PALS_LOCAL_RANKID": "2", "PMI_RANK": "6"}, 2), ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
    ({"MV2_COMM_WORLD_LOCAL_RANK": "1"}, 1), ({"MVP_COMM_WORLD_LOCAL_RANK": "1"}, 1),
    ({"JSM_NAMESPACE_LOCAL_RANK": "4"}, 4), ({"MPI_LOCALRANKID": "", "SLURM_LOCALID": "x"}, None),
    ({"FLUX_TASK_LOCAL_ID": "3", "SLURM_LOCALID": "0"}, 3)])
def test_this_rank_among_those_of_its_node(variables, rank):
    assert environment.local_rank(variables) == rank


@pytest.mark.parametrize("name", ["PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK",
                                  "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"])
def test_a_rank_of_any_launcher_is_one_and_its_children_are_none(name):
    assert environment.has_launched({name: "0"}) and environment.launcher_rank({name: "7"}) == 7
    family = name.rpartition("RANK")[0]
    told = {name: "1", f"{family}LOCAL_SIZE": "2", "FLUX_JOB_SIZE": "2", "MV2_USE_CUDA": "1"}
    left = environment.environment_without_launcher(told)
    assert left == {"MV2_USE_CUDA": "1"} and not environment.has_launched(left)


@pytest.mark.parametrize("variables, rank", [
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, 3),
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "PMI_RANK": "1"}, 1),    # mpirun within a task
    ({"SLURM_PROCID": "3"}, 0), ({"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "3"}, 0)])
def test_a_task_that_srun_tells_no_rank_is_not_rank_0(variables, rank):
    """With --mpi=none each is alone in its world, and one of them speaks."""
    assert environment.launcher_rank(variables) == rank


def test_cores_are_those_this_process_may_use(node):
    node(own=3, launcher=64)
    assert environment.cores({}) == 3
    assert [environment.cores({"SLURM_CPUS_ON_NODE": n}) for n in ("2", "9", "0", "\u00b2", "")
            ] == [2, 3, 3, 3, 3]
    assert not environment.oversubscribed({})


def test_one_rank_keeps_all_its_threads(node):
    node(own=4)
    variables = {"MPI_LOCALNRANKS": "1"}
    assert environment.set_defaults(variables) == {}
    assert variables == {"MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize("own, launcher, quota, ranks, allocated, cores, threads", [
    (1, 2, None, 2, None, 2, 1),      # a core each
    (8, 64, None, 4, None, 64, 8),    # eight each, of more than they share
    (8, 64, None, 4, 32, 32, 8),      # Slurm: eight of the job's cores each
    (8, 64, None, 4, 8, 8, 2),        # Slurm: all share what the job has
    (32, 64, None, 4, None, 64, 16),  # bound by socket, two on each
    (2, 64, None, 4, 2, 2, 1),
    (8, 8, 0.5, 1, None, 1, 1), (8, 8, 2.5, 1, None, 2, 2), (8, 8, 2.5, 2, None, 2, 1),
    (8, 8, 2.5, 3, None, 2, 1), (8, 8, 64.0, 2, None, 8, 4)])
def test_bound_ranks_and_a_quota(node, own, launcher, quota, ranks, allocated, cores, threads):
    node(own, launcher, quota)
    variables = {"MPI_LOCALNRANKS": str(ranks)}
    if allocated:
        variables["SLURM_CPUS_ON_NODE"] = str(allocated)
    assert environment.cores(variables) == cores
    assert environment.blas_threads(variables) == threads
    assert environment.oversubscribed(variables) == (ranks > cores)
    if quota:
        assert environment.allowed_cores(variables) == 8
        assert environment.process_cores() == cores
        assert environment.set_defaults(variables)["OMP_NUM_THREADS"] == str(threads)


def test_what_the_user_has_set_stays(node):
    node(own=2)
    user = {"MPI_LOCALNRANKS": "8", "OPENBLAS_NUM_THREADS": "7",
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "9"}
    variables = dict(user)
    chosen = environment.set_defaults(variables)
    assert not chosen.keys() & user.keys()
    assert variables == user | chosen
    assert chosen["MKL_NUM_THREADS"] == "1"


def test_omp_num_threads_speaks_for_every_blas(node):
    node(own=2)
    variables = {"MPI_LOCALNRANKS": "8", "OMP_NUM_THREADS": "2"}
    assert environment.set_defaults(variables) == environment.YIELD_SETTINGS


def test_mpi_imported_too_early_is_said_by_rank_0_alone(node, monkeypatch):
    node(own=2)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())
    with pytest.warns(RuntimeWarning, match="8 ranks share 2 cores.*import mm3d first"):
        environment.set_defaults({"MPI_LOCALNRANKS": "8", "PMI_RANK": "0"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.set_defaults({"MPI_LOCALNRANKS": "8", "PMI_RANK": "1"})
        environment.set_defaults({"MPI_LOCALNRANKS": "8", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"})
        environment.set_defaults({"MPI_LOCALNRANKS": "2"})


def test_the_launcher_is_permitted_unless_the_user_has_decided():
    assert environment.mpirun_settings({}) == environment.PERMISSIONS
    mine = {"OMPI_MCA_rmaps_base_oversubscribe": "0"}
    assert environment.mpirun_settings(mine).keys() == environment.PERMISSIONS.keys() - mine.keys()


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "PATH": "/bin",
        "SRUN_CPUS_PER_TASK": "2"}


def test_an_mpirun_within_a_step_of_slurm_knows_nothing_of_it():
    """It would start its ranks by srun, which waits for the cores of the step itself."""
    def left(command, **variables):
        return {name for name in environment.environment_to_start(command, STEP | variables)
                if name.startswith(("SLURM", "SRUN"))}

    everything = {name for name in STEP if name.startswith(("SLURM", "SRUN"))}
    assert left(["/usr/bin/mpirun", "-n", "2"]) == left(["mpiexec.hydra"]) == set()
    assert left(["srun", "-n", "2"]) == everything
    # The script of a job, and a prompt that salloc gives, are no steps that keep its cores.
    for step in ("4294967291", "4294967290", ""):
        assert left(["mpirun"], SLURM_STEP_ID=step) == everything
    started = environment.environment_to_start(["mpirun"], STEP)
    assert started == {"PATH": "/bin"} | environment.PERMISSIONS
    # From a rank, always: its job is another.
    rank = STEP | {"PMI_RANK": "1", "OMPI_MCA_pml": "ob1"}
    assert environment.environment_without_launcher(rank) == {
        "PATH": "/bin", "OMPI_MCA_pml": "ob1"}


def test_the_mpirun_beside_the_interpreter_goes_first(tmp_path, monkeypatch):
    beside, on_path = tmp_path / "env", tmp_path / "usr"
    for folder in (beside, on_path):
        folder.mkdir()
        (folder / "mpirun").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(on_path))
    assert environment.mpirun_command(8, "a", "b") == [str(beside / "mpirun"), "-n", "8", "a", "b"]
    (beside / "mpirun").unlink()
    assert environment.mpirun_command(8, "a")[0] == str(on_path / "mpirun")
    (on_path / "mpirun").unlink()
    with pytest.raises(FileNotFoundError, match="there is no mpirun in .*env nor on PATH.*mpich"):
        environment.mpirun_command(8, "a")


def test_importing_it_imports_neither_numpy_nor_mpi():
    """Nor does what it imports; the package itself does, afterwards."""
    source = (f"import sys, types\npackage = sys.modules['mm3d'] = types.ModuleType('mm3d')\n"
              f"package.__path__ = [{os.path.dirname(environment.__file__)!r}]\n"
              "import mm3d.launcher, mm3d.mpi_start\n"
              "assert not {'numpy', 'mpi4py'} & sys.modules.keys()\n")
    done = run_python("-c", source)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", ["mm3d", "numpy"])
def test_real_ranks_have_capped_blas_and_a_patient_mpi(first):
    source = f"""
import {first}, mm3d, os, threadpoolctl
from mpi4py import MPI
threads = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()
           if pool["user_api"] == "blas"]
found = MPI.COMM_WORLD.gather((threads, os.environ["MPIR_CVAR_POLLS_BEFORE_YIELD"]))
if MPI.COMM_WORLD.rank == 0: print(found)
"""
    done = run_ranks(4, "-c", source, SLURM_CPUS_ON_NODE="2")
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == 4 * [([1], "1")]


ZEN4 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
flags\t\t: fpu avx2 avx512f avx512dq

processor\t: 1
"""


@pytest.mark.parametrize("was, now, kernels", [
    ("", "", "Haswell"),
    (" avx512f avx512dq\n\n", "\n\nflags\t\t: avx512f\n", None),    # Zen 3
    ("family\t: 25", "family\t: 26", None),                          # Zen 5
    ("AuthenticAMD", "GenuineIntel", None)])
def test_kernels_of_256_bits_are_the_fastest_on_zen_4_alone(tmp_path, was, now, kernels):
    """The first processor speaks for all."""
    file = tmp_path / "cpuinfo"
    file.write_text(ZEN4.replace(was, now))
    assert environment.fastest_kernels(file) == kernels
    assert environment.fastest_kernels(tmp_path / "none") is None


def test_they_are_chosen_before_numpy_starts_unless_the_user_has(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(ZEN4)
    late, chosen, user = {}, {}, {"OPENBLAS_CORETYPE": "SkylakeX"}
    monkeypatch.setitem(sys.modules, "numpy", object())    # which has started OpenBLAS
    environment.set_kernels(late, file)
    monkeypatch.delitem(sys.modules, "numpy")
    environment.set_kernels(chosen, file)
    environment.set_kernels(user, file)
    assert late == {} and chosen == {"OPENBLAS_CORETYPE": "Haswell"}
    assert user == {"OPENBLAS_CORETYPE": "SkylakeX"}
