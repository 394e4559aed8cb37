"""A Slurm for the tests of jobs."""
import pytest

import slurm_cluster
from slurm_cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    lacking = slurm_cluster.missing()
    if lacking:
        pytest.skip(lacking)
    running = Cluster(tmp_path_factory.mktemp("slurm")).start()
    yield running
    running.stop()
    assert all(daemon.poll() is not None for daemon in running.daemons)
