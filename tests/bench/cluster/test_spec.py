"""What an emulated cluster is told, and what it refuses before it is built."""
import pytest

from bench.__main__ import main
from bench.cluster import mpirun
from bench.cluster.mpirun import MPICH, OPEN_MPI, find_launcher
from bench.cluster.links import bucket_bytes, burst_frames, queue_bytes
from bench.cluster.spec import CLUSTER_ENV, Cluster
from bench.errors import UsageError
from mm3d import launcher
from support import status_of


@pytest.mark.parametrize("text, cluster, about", [
    ("16x4:200Mbit", Cluster(16, 4, 2e8), "16 nodes x 4 ranks, 200 Mbit/s"),
    ("4x2:1.5Gbit,1ms", Cluster(4, 2, 1.5e9, 1e-3), "4 nodes x 2 ranks, 1.5 Gbit/s, latency 1 ms"),
    ("2x1:64kbit,50us", Cluster(2, 1, 64e3, 5e-5), "2 nodes x 1 rank, 64 kbit/s, latency 50 us"),
    ("1x8:unlimited", Cluster(1, 8), "1 node x 8 ranks, unlimited links"),
])
def test_text_and_cluster(text, cluster, about):
    assert Cluster.parse(text) == cluster
    assert str(cluster) == text
    assert cluster.describe() == f"emulated cluster, {about}"
    assert Cluster.from_environment({CLUSTER_ENV: cluster.to_environment(0)}) == cluster


def test_no_cluster():
    assert Cluster.from_environment({}) is None
    assert CLUSTER_ENV == launcher.CLUSTER_VARIABLE


@pytest.mark.parametrize("text, message", [
    ("16:200Mbit", "NODESxRANKS"),
    ("16x4:fast", "link 'fast': a rate in bit, kbit, Mbit or Gbit"),
    ("16x4:200MB", "link '200MB': a rate"),
    ("16x4:", "link '': a rate"),
    ("16x4:-5Mbit", "link '-5Mbit': a rate"),
    ("16x4:1bit", "a link of 1 bit/s: 1kbit to 1000Gbit would do"),
    ("16x4:200Mbit,soon", "latency 'soon': a time in us, ms or s"),
    ("16x4:200Mbit,1000s", "a latency of 1000 s: 0 to 10 s"),
    ("251x1:200Mbit", "251 nodes: 1 to 250 would do, as many as the emulated network has"),
    ("0x1:200Mbit", "0 nodes: 1 to 250"),
    ("2x0:200Mbit", "0 ranks a node: at least 1"),
])
def test_a_wrong_cluster_is_refused(text, message, capsys):
    with pytest.raises(UsageError, match=message):
        Cluster.parse(text)
    for words in (["measure", "matmul", "--shape=8", f"--cluster={text}"],
                  ["cluster", text, "--", "true"]):
        assert status_of(main, words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_cluster_needs_a_command(capfd):
    assert main(["cluster", "2x2"]) == 2
    assert "no command to run" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["cluster", "2x2", "--", "true"],
                                   ["measure", "matmul", "--shape=8", "--cluster=2x2:1Gbit"],
                                   ["reproduce", "--cluster=2x2:1Gbit"]])
def test_mpirun_goes_inside(words, monkeypatch, capfd):
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(words) == 2
    assert "starts mpirun itself, in the emulated cluster: leave out" in capfd.readouterr().err


@pytest.fixture
def inside(monkeypatch):
    """In a cluster of 4 nodes of 2, and no rank of mpirun."""
    for name in (*launcher.RANK_VARIABLES, *launcher.LOCAL_SIZE_VARIABLES, "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CLUSTER_ENV, Cluster(4, 2).to_environment())


def test_another_cluster_inside_is_refused(inside, capfd):
    assert main(["measure", "matmul", "--shape=8", "--cluster=2x2:1Gbit"]) == 2
    assert "inside an emulated cluster already" in capfd.readouterr().err


def test_rows_that_do_not_fit_are_refused(inside, capfd, tmp_path):
    assert main(["reproduce", "--preset=tiny", f"--out={tmp_path}"]) == 2
    assert "rows of 64 ranks do not fit into the emulated cluster 4x2:unlimited of 8" in \
        capfd.readouterr().err


@pytest.mark.parametrize("launcher, words, ranks", [
    *((MPICH, *one) for one in (
        ("-n 4 python -n 99", 4), ("-np 4 prog", 4), ("prog -n 3", None), ("", None),
        ("-genv OMP_NUM_THREADS 1 -n 3 prog", 3), ("-l -n 2 prog", 2))),
    *((OPEN_MPI, *one) for one in (
        ("-np 4 prog", 4), ("--np 3 prog -n 1", 3), ("prog", None), ("-x A=1 -n 2 prog", 2),
        ("--mca coll_tuned_priority 0 --tag-output -n 2 prog", 2),
        ("--mca pml ob1 -n 1 prog", 1)))])
def test_ranks_of_a_command_line(launcher, words, ranks):
    assert mpirun.count_ranks(words.split(), Cluster(2, 2), launcher) == ranks


@pytest.mark.parametrize("launcher, words, message", [
    (MPICH, "-n 5 prog", "5 ranks on 2 nodes of 2: at most 4"),
    (MPICH, "-n ² prog", "-n ²: a number"), (MPICH, "-n", "a number of ranks"),
    (MPICH, "-hosts a,b -n 2 prog", "-hosts: the emulated cluster itself"),
    (OPEN_MPI, "--host a:2 -n 2 prog", "-host: the emulated cluster itself"),
    (OPEN_MPI, "--map-by node prog", "-map-by: the emulated cluster itself"),
    (OPEN_MPI, "--mca pml ucx prog", "OMPI_MCA_pml=ucx: .* needs OMPI_MCA_pml=ob1"),
    (OPEN_MPI, "--prtemca plm_ssh_agent ssh prog", "PRTE_MCA_plm_ssh_agent=ssh: an emulated")])
def test_command_lines_that_do_not_fit(launcher, words, message):
    with pytest.raises(ValueError, match=message):
        mpirun.count_ranks(words.split(), Cluster(2, 2), launcher)


@pytest.mark.parametrize("launcher, name, value", [
    (MPICH, "MPIR_CVAR_CH4_NETMOD", "ucx"), (OPEN_MPI, "OMPI_MCA_btl", "self,tcp,uct")])
def test_networks_that_go_around_the_links_are_refused(launcher, name, value):
    kept = mpirun.environment({"A": "1", CLUSTER_ENV: "{}", mpirun.REAL: "/bin/mpirun"}, launcher)
    assert kept == {"A": "1"} | launcher.defaults | launcher.settings
    with pytest.raises(ValueError, match=f"{name}={value}: .* unset it"):
        mpirun.environment({name: value}, launcher)


def test_defaults_of_a_launcher_give_way_to_the_user():
    given = dict.fromkeys(MPICH.defaults, "mine.xml")
    assert given and mpirun.environment(given, MPICH) == given | MPICH.settings


@pytest.mark.parametrize("about, launcher", [
    ("HYDRA build details:\n    Version: 5.0.2", MPICH), ("mpirun (Open MPI) 4.1.4", OPEN_MPI),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.5", None)])
def test_whose_mpirun_it_is(about, launcher):
    assert find_launcher(about) is launcher


def test_nodes_and_slots():
    assert MPICH.placement(Cluster(2, 3))[-1] == "10.77.0.2:3,10.77.0.3:3"
    assert OPEN_MPI.placement(Cluster(2, 3))[:2] == ["--host", "10.77.0.2:3,10.77.0.3:3"]


def test_sizes_of_buckets_and_queues():
    assert [burst_frames(rate) for rate in (1e6, 2e8, 1e10)] == [2, 16, 45]
    assert [bucket_bytes(rate) for rate in (1e6, 2e8, 1e10)] == [3228, 24474, 70830]
    assert [queue_bytes(rate) for rate in (1e6, 2e8, 1e12)] == [2 ** 22, 25000000, 2 ** 30]


@pytest.mark.parametrize("variables, ranks", [
    ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "64"}, 4),
    ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "64", CLUSTER_ENV: "{}"}, 64),
    ({CLUSTER_ENV: "{}"}, 1)])
def test_ranks_of_all_nodes_share_the_cores(variables, ranks):
    assert launcher.ranks_on_these_cores(variables) == ranks
