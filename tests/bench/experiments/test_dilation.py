"""Rows whose links and waits are slowed until software is a small share of a step."""
import numpy as np
import pytest

from bench.cases.selection import select_rows
from bench.cluster.spec import Cluster
from bench.command_line import waiting
from bench.experiments.rows.dilation import STEPS, dilation_factor
from bench.records.folder import read_folder
from bench.records.at_rates import join_rates
from bench.reports.emulated import of_run
from bench.validation.rules import check_waits
from records import only_record
from refused import done, refused

ROW = ("--preset", "emulated-tiny", "--repetitions", "2", "--max-repetitions", "2", "--traced",
       "0", "--work-scale", "100", "--batch", "8")


@pytest.mark.parametrize("software, predicted, share, factor", [
    (9.0, 1.0, 0.0, 1.0), (0.1, 1.0, 0.25, 1.0), (0.25, 1.0, 0.25, 1.0), (1.0, 1.0, 0.25, 4.0),
    (1.0, 1.0, 0.1, 10.0), (1.01, 1.0, 0.1, 11.0), (0.2512, 1.0, 0.25, 1.1),
    (3.0, 2e-3, 0.1, 5000.0)])
def test_software_takes_its_share_or_less(software, predicted, share, factor):
    """The factor has two digits, is never below 1, and leaves links a rate."""
    found = dilation_factor(software, predicted, share, link=5e7)
    assert found == pytest.approx(factor)
    assert found in (1, 5000) or software / (found * predicted) <= share * (1 + 1e-9)


@pytest.fixture
def cluster(monkeypatch):
    """Pretend that ranks are in an emulated cluster; the rates that its links are set to."""
    rates = []
    monkeypatch.setenv("MM3D_CLUSTER", Cluster.parse("2x4:50Mbit").to_environment())
    monkeypatch.setattr(waiting, "change_links", rates.append)
    return rates


@pytest.mark.ranks(8)
def test_a_row_is_slowed_and_told_so(comm, shared_tmp_path, cluster):
    done(comm, "run", *ROW, "--rows", "weak:3d", "--software-share", "0.1", "--out",
         str(shared_tmp_path))
    run = only_record(shared_tmp_path)
    predicted = run.groups["predicted"].variables["seconds"].values
    software = run.groups["software"].variables["samples"].values
    assert predicted.shape == (2, 2) and (predicted > 0).all() and software.shape == (2, STEPS)
    wanted = np.median(software.sum(axis=0)) / (0.1 * predicted.sum())
    assert run.dilation == dilation_factor(wanted, 1.0, 1.0, 5e7) > 1
    if comm.rank == 0:    # without a limit but where steps are timed; then as they were
        assert cluster == [None, None, 5e7 / run.dilation, None, 5e7]
    waits = run.groups["waits"].variables["counted"].values
    # The model waits so many times its seconds, and readers divide by it.
    assert waits.sum(axis=0).max() == pytest.approx(run.dilation * predicted[:, 0].sum(), rel=0.3)
    for phase, values in run.samples.items():
        np.testing.assert_array_equal(run.times[phase], values / run.dilation)
    del run.groups["software"]
    assert "the group software is there, but not both" in "".join(check_waits(run))


@pytest.mark.ranks(2)
def test_a_row_at_several_rates(comm, shared_tmp_path, cluster, monkeypatch):
    """Each record names its rate, waits are the same, and all are joined.

    A row that is not slowed tells its software too, and is not to be quoted, whatever its share.
    """
    monkeypatch.setenv("MM3D_CLUSTER", Cluster.parse("2x1:50Mbit").to_environment())
    said = done(comm, "run", *ROW, "--rows", "weak:1d-sp", "--software-share", "none", "--links",
                "unlimited,20Mbit", "--out", str(shared_tmp_path))
    rows = read_folder(shared_tmp_path).rows
    assert {run.environment["emulated_cluster"] for run in rows} == {
        "2x1:20Mbit", "2x1:unlimited"}
    row, = select_rows("weak", "1d-sp", 2)
    for run in rows:
        assert run.dilation == 1 and {"software", "predicted"} <= run.groups.keys()
        assert not of_run(row, run).quotable
    [record] = join_rates(rows)
    assert record.scales["link"] == (2e7, np.inf) and record.values("samples").shape[-1] == 2
    work, links = record.values("predicted")[0].sum(axis=1).T
    assert work[0] == work[1] and links[0] > links[1]
    if comm.rank == 0:
        timed = [rate for rate in cluster if rate != 5e7]    # which is set after each row
        assert sorted(timed, key=str) == [2e7, *[None] * 7] and cluster[-1] == 5e7
        assert "links of 20Mbit:" in said
        assert [*shared_tmp_path.glob("where-each-is-fastest-weak-p002-*.png")]


@pytest.mark.ranks(1, 8)
@pytest.mark.parametrize("words, message", [
    (["--links", "50Mbit"], "--links: rates are those of the links of an emulated cluster"),
    (["--software-share", "0.1"], "give --work wait and --cluster"),
    (["--software-share", "1"], "'1': a fraction less than 1 would do, or none"),
    (["--software-share", "0"], "'0': a number greater than 0")])
def test_shares_of_nothing_are_refused(comm, shared_tmp_path, words, message):
    said = refused(comm, "run", "--preset", "tiny", "--rows",
                   "weak:3d" if comm.size > 1 else "weak:serial", *words,
                   "--out", str(shared_tmp_path))
    assert message in said and not list(shared_tmp_path.glob("*.h5"))


@pytest.mark.ranks(8)
def test_a_row_of_sizes_of_its_own_has_no_published_seconds(comm, shared_tmp_path, cluster):
    """48 heads do not divide the published features, so nothing is predicted for these."""
    done(comm, "run", *ROW, "--rows", "weak:1d-sp", "--hidden", "96", "--heads", "48", "--out",
         str(shared_tmp_path))
    assert [*only_record(shared_tmp_path).groups["predicted"].variables] == ["seconds"]
