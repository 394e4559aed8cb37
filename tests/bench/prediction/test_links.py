"""Links fitted to measured collectives; and of which ranks a machine is a model."""
import msgspec
import pytest

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.prediction import machine_model
from bench.prediction.calibration import fit
from bench.prediction.machine_model import Curve, Level, Line

CPU = machine_model.load_machine("cpu")
# On 4 x 1 x 2 ranks: along x 3 ms and 1 GB/s, along z a tenth of both.
LINES = {(4, 2): (3e-3, 1e-9), (2, 1): (3e-4, 1e-10)}


def lines(gather: float = 1.0) -> list[Line]:
    """Both collectives of each line; a gather takes `gather` times as long to start."""
    return [Line(kind, size, stride, alpha * (gather if kind == "all_gather" else 1), beta,
                 Curve([1.0, 2.0], [alpha, alpha + beta]))
            for (size, stride), (alpha, beta) in LINES.items()
            for kind in ("all_gather", "reduce_scatter")]


def test_the_link_is_of_the_longest_line():
    """Two turns of a ring of 4, of which three quarters move through each rank."""
    assert fit.fit_links(lines(), 8, "shared") == {"node": Level(1.5e-3, 0.75e9)}
    assert fit.fit_links(lines(gather=3), 8, "mpi")["node"] == Level(3e-3, 0.75e9)


def test_the_link_is_of_collectives_that_copy():
    """In shared memory a gather takes as long whatever its size; through MPI both count."""
    idle = [msgspec.structs.replace(one, beta=0.0) if one.kind == "all_gather" else one
            for one in lines()]
    for transport, rate in (("shared", 0.75e9), ("mpi", 1.5e9)):
        found = fit.fit_links(idle, 8, transport)["node"]
        assert found.bytes_per_second == pytest.approx(rate)


def test_a_line_between_nodes_is_the_network_s():
    """On nodes of 2 ranks z lies within, and x has both ranks of a node on its link."""
    assert fit.fit_links(lines(), 2, "shared") == {"node": Level(3e-4, 5e9),
                                                   "network": Level(1.5e-3, 1.5e9)}


CURVE = Curve([1.0, 2.0], [1e-6, 2e-6])
CLUSTER = Cluster.parse("2x4:200Mbit")
INSIDE = CPU.about + machine_model.cluster_suffix(CLUSTER)
WHERE = "emulated cluster, 2 nodes x 4 ranks, 200 Mbit/s"


@pytest.mark.parametrize("figures, ranks, transport, cluster, said", [
    ({"transport": "shared"}, 2, "mpi", None, "with transport shared, not mpi: set "
     "MM3D_TRANSPORT=shared, or calibrate again"),
    ({"transport": "shared"}, 1, "none", None, "with transport shared, not none: start more "
     "ranks, or calibrate again"),
    ({"transport": "nccl"}, 2, "mpi", None, "with transport nccl, not mpi: calibrate again"),
    # Whatever the transport, which one rank has none of.
    ({"transport": "none", "passes": {"other": CURVE}, "ranks_per_node": 1}, 2, "mpi", None,
     "with 1 rank, not 2: start that many, or calibrate with 2"),
    ({"passes": {"other": CURVE}, "ranks_per_node": 4, "ranks": 8}, 2, "mpi", None,
     "with 8 ranks, not 2: start that many, or calibrate with 2"),
    ({"collectives": lines()}, 8, "mpi", CLUSTER, f"in no emulated cluster, and this is {WHERE}: "
     "start it there, or measure a new file here"),
    ({"collectives": lines(), "about": INSIDE}, 8, "mpi", None,
     f"in {WHERE}, and this is no emulated cluster: start it there, or measure a new file here")])
def test_a_machine_of_others_is_refused(figures, ranks, transport, cluster, said):
    machine = msgspec.structs.replace(CPU, **figures)
    with pytest.raises(UsageError) as refused:
        machine_model.check_machine(machine, "mine.toml", ranks, transport, cluster)
    assert str(refused.value) == f"--machine mine.toml was measured {said}"


def test_a_machine_is_of_its_own_ranks_or_of_all():
    mine = msgspec.structs.replace(CPU, passes={"other": CURVE}, ranks_per_node=4, ranks=8,
                                   about=INSIDE, transport="mpi shared")
    machine_model.check_machine(mine, "mine.toml", 8, "mpi", CLUSTER)
    for cluster in (None, CLUSTER):
        machine_model.check_machine(CPU, "cpu", 3, "shared", cluster)
