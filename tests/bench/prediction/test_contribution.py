"""What `bench gemm` and `bench collectives` put into a machine file."""
import os

import numpy as np
import pytest
from mpi4py import MPI

from bench.__main__ import main, parser
from bench.cluster.spec import VARIABLE, Cluster
from bench.errors import UsageError
from bench.prediction import machine_file, machine_model, machine_update
from bench.prediction.seconds import collective_terms
from bench.records.measurements import Measurements, Variable
from bench.verbs import gemm
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import Collective
from records import invented
from refused import refused
from support import run_python, run_ranks

CPU = machine_model.load_machine("cpu")
SIZES = [64, 256, 1024]
ENVIRONMENT = {"cpu_model": "a processor", "ranks_on_this_node": 8, "mpi": "MPI 5",
               "tuning_variables": ""}
QUICK = ("--repetitions", "2", "--max-repetitions", "2")


def invented_products() -> Measurements:
    """Of two numbers of threads, the fewest with 1e11 and 5e10 operations a second, 2 us each
    and half the rate at an edge of 48."""
    edges = np.array(SIZES, float)
    one = np.array([2e-6 + 2 * edges ** 3 / rate * (1 + 48 / edges) for rate in (1e11, 5e10)])
    seconds = np.stack([one / 3, one], axis=1)[..., None]    # of 2 threads, and of 1
    return invented("gemm", {}, ENVIRONMENT,
                    {"dtype": ["float32", "float64"], "threads": [2, 1], "size": SIZES},
                    {"seconds": Variable(seconds, "s", ("dtype", "threads", "size", "bound"))}, [])


def invented_collectives(transport="shared") -> Measurements:
    """On 4 x 1 x 2 ranks: along x 3 ms and 1 GB/s, along z a tenth of both."""
    sizes = np.array([1024.0, 4.0 ** 11])
    alpha, beta = (np.outer([1, 0.1], np.full(6, one)) for one in (3e-3, 1e-9))
    seconds = (alpha[..., None] + beta[..., None] * sizes)[..., None]
    dims = ("axis", "collective")
    return invented(
        "collectives", {"grid": "4 x 1 x 2", "grid_axes": "x y z", "transport": transport},
        {**ENVIRONMENT},
        {"axis": ["x", "z"], "collective": COLLECTIVES, "size": sizes.tolist()},
        {"alpha": Variable(alpha, "s", dims), "beta": Variable(beta, "s byte-1", dims),
         "seconds": Variable(seconds, "s", (*dims, "size", "bound"))}, [])


def both(folder, per_node=8) -> machine_model.Machine:
    """The file to which both have contributed."""
    path, record = folder / "mine.toml", invented_collectives()
    record.environment["ranks_on_this_node"] = per_node
    made = machine_update.update_products(machine_update.adopt_machine(CPU), invented_products())
    assert machine_file.write_machine(made, path, MPI.COMM_SELF) == ""
    made = machine_update.update_collectives(machine_model.load_machine(str(path)), record)
    assert machine_file.write_machine(made, path, MPI.COMM_SELF) == ""
    return machine_model.load_machine(str(path))


def test_the_file_has_what_was_measured_to_six_digits(tmp_path):
    machine = both(tmp_path)
    assert machine.gemm_rate == {"float16": 50e9, "float32": 1e11, "float64": 5e10}
    assert machine.gemm_half_size == (48, 48, 48) and machine.gemm_seconds == 2e-6
    assert machine.ranks_per_node == 8 and machine.transport == "shared"
    assert {(line.kind, line.size, line.stride, line.alpha, line.beta)
            for line in machine.collectives} == {
        (kind, *line) for kind in COLLECTIVES
        for line in ((4, 2, 3e-3, 1e-9), (2, 1, 3e-4, 1e-10))}
    line = next(line for line in machine.collectives if line.size == 2)
    assert line.curve == machine_model.Curve([1024, 4 ** 11], [3.00102e-4, 7.1943e-4])
    # Two turns of a ring of 4, of which three quarters move through each rank.
    assert machine.node == machine_model.Level(1.5e-3, 0.75e9)


def test_the_link_is_of_collectives_that_copy(tmp_path):
    """In shared memory a gather takes as long whatever its size; through MPI both count."""
    for transport, bandwidth in (("shared", 0.75e9), ("mpi", 1.5e9)):
        record = invented_collectives(transport)
        alpha, beta = (record.variables[name].values for name in ("alpha", "beta"))
        beta[:, COLLECTIVES.index("all_gather")] = 0
        alpha[:, COLLECTIVES.index("all_gather")] *= 3
        machine = machine_update.update_collectives(CPU, record)
        assert machine.node.bytes_per_second == pytest.approx(bandwidth)
        assert machine.node.seconds_per_message == pytest.approx(3e-3)
        gather, scatter = (collective_terms(machine, Collective(kind, "x", 8, 1, 8e9))
                           for kind in ("all_gather", "reduce_scatter"))
        assert scatter["node"] == pytest.approx(7e9 / bandwidth)
        assert gather["node"] == (0 if transport == "shared" else scatter["node"])


def test_what_was_not_measured_is_the_base_s_and_said_so(tmp_path):
    machine = both(tmp_path)
    assert machine.memory_bandwidth == CPU.memory_bandwidth and machine.network == CPU.network
    assert machine.achieved == machine_model.Achieved(gemm=1, memory=0.8, node=1, network=0.8)
    comment = (tmp_path / "mine.toml").read_text().splitlines()[2]
    assert comment == "# Not measured here: " + ", ".join([
        "memory_bytes", "memory_bandwidth", "launch_seconds", "network"]) + "."
    assert machine.sources["network"] == f"as of cpu: {CPU.sources['network']}"
    assert machine.sources["achieved"].endswith("of the rest as of cpu: assumed")
    assert "float16 as of cpu: " in machine.sources["gemm_rate"]
    assert "by bench gemm on a processor" in machine.sources["gemm_rate"]


def test_a_line_between_nodes_is_the_network_s(tmp_path):
    """On nodes of 2 ranks z lies within, and x has both ranks of a node on its link."""
    machine = both(tmp_path, per_node=2)
    assert machine.node == machine_model.Level(3e-4, 5e9)
    assert machine.network == machine_model.Level(1.5e-3, 1.5e9)
    event = Collective("all_gather", "x", 4, 2, 2**20)
    fresh = machine_model.msgspec.structs.replace(machine, collectives=[])
    spent = collective_terms(fresh, event)
    assert spent["latency"] + spent["network"] == pytest.approx(3e-3 + 2**20 * 1e-9)


def test_lines_of_another_transport_go(tmp_path):
    machine = both(tmp_path)
    again = machine_update.update_collectives(machine, invented_collectives())
    assert machine_file.format_machine(again) == machine_file.format_machine(machine)
    other = machine_update.update_collectives(machine, invented_collectives("mpi"))
    assert other.transport == "mpi" and len(other.collectives) == 12
    few = invented_collectives()
    few.configuration["grid"], few.scales["axis"] = "1 x 1 x 8", ["z"]
    more = machine_update.update_collectives(machine, few)
    assert {line.size for line in more.collectives} == {2, 4, 8}
    few.configuration["transport"] = "mpi"
    again = machine_update.update_collectives(machine, few)
    assert {line.size for line in again.collectives} == {8}


@pytest.mark.slow
def test_both_verbs_write_one_file_that_predict_and_plan_take(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    where = ("--machine", str(path), *QUICK, "--out", str(tmp_path / "out"))
    done = run_ranks(2, "-m", "bench", "collectives", "--grid", "2x1x1", "--least", "64", "--most",
                     "1100", "--base", "dgx-h100", *where)
    assert done.returncode == 0 and f"machine file: {path}" in done.stdout, done.stderr
    done = run_python("-m", "bench", "gemm", "--sizes", "8,32", "--threads", "1", *where)
    assert done.returncode == 0, done.stderr
    machine = machine_model.load_machine(str(path))
    assert {line.kind for line in machine.collectives} == set(COLLECTIVES)
    assert machine.ranks_per_node == 2 and machine.gemm_rate["float32"] < 1e13
    assert machine.sources["memory_bytes"].startswith("as of dgx-h100: ")
    assert main(["plan", "--ranks", "2", "--hidden", "64", "--heads", "4", "--layers", "1",
                 "--batch", "4", "--seq", "8", "--machine", str(path)]) == 0
    assert main(["predict", "--table", "weak", "--machine", str(path)]) == 0
    assert machine.name in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[tool]\nname = 'something else'\n", "no TOML at all", ""])
def test_a_foreign_file_is_refused_and_untouched(tmp_path, text):
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    said = refused(MPI.COMM_SELF, "gemm", "--sizes", "8", *QUICK, "--machine", str(path),
                   "--out", str(tmp_path / "out"))
    assert f"machine file {path}" in said
    assert path.read_text() == text and not list(tmp_path.glob("out/*"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("file, more, message", [
    ("mine.txt", (), "a .toml file in a folder that exists"),
    ("no/folder/mine.toml", (), "a .toml file in a folder that exists"),
    ("mine.toml", ("--base", "abacus"), "machine 'abacus' is unknown")])
def test_wrong_files_are_refused_before_anything_is_measured(comm, shared_tmp_path, file, more,
                                                             message):
    said = refused(comm, "collectives", "--grid", "2x1x1", *QUICK, "--machine",
                   str(shared_tmp_path / file), *more, "--out", str(shared_tmp_path / "out"))
    assert said.count(message) == 1 and not list(shared_tmp_path.glob("out/*"))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("there, message", [
    (False, "--base longhorn: a new machine file"), (True, "--base longhorn: the file is there")])
def test_a_base_of_no_new_file_is_refused(comm, shared_tmp_path, there, message):
    verb = {1: ("gemm", "--sizes", "8"),
            2: ("collectives", "--grid", "2x1x1", "--most", "1024")}[comm.size]
    path, where = shared_tmp_path / "mine.toml", []
    if there:
        if comm.rank == 0:
            path.write_text(machine_file.format_machine(CPU))
        comm.Barrier()
        where = ["--machine", str(path)]
    said = refused(comm, *verb, *where, "--base", "longhorn", *QUICK, "--out",
                   str(shared_tmp_path / "out"))
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert not list(shared_tmp_path.glob("out/*"))


@pytest.mark.slow
def test_a_machine_calibrated_with_other_ranks_is_refused(tmp_path):
    path, curve = tmp_path / "mine.toml", machine_model.Curve([1.0, 2.0], [1e-6, 2e-6])
    machine = machine_model.msgspec.structs.replace(CPU, passes={"other": curve}, ranks_per_node=7)
    path.write_text(machine_file.format_machine(machine))
    before = path.read_text()
    done = run_ranks(2, "-m", "bench", "collectives", "--grid", "2x1x1", *QUICK, "--machine",
                     str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "was calibrated with 7 ranks a node, not 2" in done.stderr
    assert path.read_text() == before


def test_a_full_disk_leaves_the_file_and_the_record(tmp_path, monkeypatch, capsys):
    """The record is written first; whether the file was is in the exit status."""
    path, out = tmp_path / "mine.toml", tmp_path / "out"
    path.write_text(machine_file.format_machine(CPU))
    before, replace = path.read_text(), os.replace

    def full(part, final):
        if path == final:
            raise OSError(28, "No space left on device")
        replace(part, final)

    monkeypatch.setattr(os, "replace", full)
    arguments = parser().parse_args(["gemm", "--sizes", "8,16", "--threads", "1", *QUICK,
                                     "--machine", str(path), "--out", str(out)])
    assert gemm.run(arguments, MPI.COMM_SELF) == 1
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said[0].startswith("written: ") and len(list(out.glob("*.h5"))) == 1
    assert said[1] == (f"failed: machine file {path} could not be written (No space left on "
                       "device); what was there is untouched")
    assert path.read_text() == before
    assert {one.name for one in tmp_path.iterdir()} == {"mine.toml", "out"}


@pytest.mark.ranks(1, 4)
def test_all_ranks_learn_whether_the_file_was_written(comm, shared_tmp_path):
    machine = CPU if comm.rank == 0 else None
    path = shared_tmp_path / "mine.toml"
    assert machine_file.write_machine(machine, path, comm) == ""
    assert machine_model.load_machine(str(path)) == CPU
    problem = machine_file.write_machine(machine, shared_tmp_path / "no" / "mine.toml", comm)
    assert problem == "No such file or directory"


def test_a_machine_of_another_cluster_is_refused(monkeypatch):
    """One of which nothing was measured is not."""
    curve = machine_model.Curve([1.0, 2.0], [1e-6, 2e-6])
    bare = machine_model.msgspec.structs.replace(CPU, passes={}, collectives=[])
    measured = machine_model.msgspec.structs.replace(CPU, passes={"other": curve})
    machine_model.check_cluster(measured, "mine.toml")
    monkeypatch.setenv(VARIABLE, Cluster.parse("2x4:200Mbit").to_environment(0))
    inside = machine_update.adopt_machine(measured)
    where = "emulated cluster, 2 nodes x 4 ranks, 200 Mbit/s"
    assert inside.about.endswith(f"; {where}")
    machine_model.check_cluster(bare, "mine.toml")
    machine_model.check_cluster(inside, "mine.toml")
    with pytest.raises(UsageError, match=f"measured in no emulated cluster, and this is {where}"):
        machine_model.check_cluster(measured, "mine.toml")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UsageError, match=f"measured in {where}, and this is no emulated cluster"):
        machine_model.check_cluster(inside, "mine.toml")
