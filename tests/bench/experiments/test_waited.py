"""Rows whose ranks wait for the modelled seconds of their work, also slowed with the links."""
import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.cluster.spec import Cluster
from bench.command_line import waiting
from bench.experiments.rows.dilation import STEPS, dilation_factor
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import trace_terms
from bench.records.at_rates import join_rates
from bench.records.folder import read_folder
from bench.reports.emulated import of_run
from bench.reports.paper_tables import words_agree
from bench.validation.rules import check_waits
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES, Gemm, MemoryPass
from records import format_tables, only_record
from refused import done, refused

WAIT = ("--work", "wait", "--machine", "longhorn", "--work-scale", "5")
FEW = ("--preset", "tiny", "--repetitions", "2", "--max-repetitions", "2", "--warmup", "1")
ROW = ("--preset", "emulated-tiny", "--repetitions", "2", "--max-repetitions", "2", "--traced",
       "0", "--work-scale", "100", "--batch", "8")


def measured(comm, folder, *words: str):
    """The record of the one row that `run` measures on the ranks of `comm`."""
    done(comm, "run", *FEW, *WAIT, *words, "--out", str(folder))
    return only_record(folder)


@pytest.mark.ranks(1, 2, slow=(8,))
def test_a_row_waits_for_the_seconds_of_the_model(comm, shared_tmp_path):
    run = measured(comm, shared_tmp_path, *(
        {1: ("--rows", "weak:serial", "--traced", "1"), 2: ("--rows", "weak:1d-sp"),
         8: ("--rows", "weak:3d")}[comm.size]))
    chosen = run.configuration
    assert [chosen[name] for name in ("work", "waited_machine", "waited_scale")] == [
        "wait", "longhorn", 5]
    assert words_agree(run)
    waits = {name: found.values for name, found in run.groups["waits"].variables.items()}
    trace = dry_run.trace_step(chosen["scheme"], comm.size, **{
        name: chosen[name] for name in ("layers", "hidden", "heads", "batch", "seq")})
    machine = load_machine("longhorn")
    for place, phase in enumerate(PHASES):
        spent = trace_terms(machine, trace)[phase]
        launches = sum(times for (when, _, event), times in trace.events.items()
                       if when == phase and isinstance(event, Gemm | MemoryPass))
        expected = 5 * (spent["gemm"] / machine.achieved.gemm
                        + spent["memory"] / machine.achieved.memory
                        + launches * machine.launch_seconds)
        assert waits["counted"][place, 0] == pytest.approx(expected, rel=1e-9)
    assert (waits["slept"] + waits["overlapped"] >= waits["counted"] * (1 - 1e-9)).all()
    np.testing.assert_allclose(waits["modelled"], waits["counted"], rtol=1e-9)
    text = format_tables(shared_tmp_path)
    assert "tiny, waited work (NOT COMPUTED" in text and "WAITED WORK" in text
    assert "NOT SCALING" not in text
    waits["slept"][...] = 0.9 * (waits["counted"] - waits["overlapped"])
    assert [*check_waits(run)] == [
        "waits/slept, overlapped: a rank has waited less than its work takes by the model"]
    waits["slept"][...] = waits["counted"]
    assert not [*check_waits(run)]


@pytest.mark.ranks(2)
def test_a_step_unlike_its_dry_run_writes_no_times(comm, shared_tmp_path, wrong_work):
    said = refused(comm, "run", *FEW, *WAIT, "--rows", "weak:1d-sp", "--out", str(shared_tmp_path))
    assert not list(shared_tmp_path.glob("*.h5"))
    assert "s for its work, which takes" in said


@pytest.mark.parametrize("options, message", [
    (["--work", "wait"], "--work wait: ranks wait for the seconds of a machine model"),
    (["--work-scale", "3"], "--work-scale 3: only waits are scaled"),
    ([*WAIT, "--work-scale", "0"], "--work-scale: '0': a number greater than 0"),
    ([*WAIT, "--work-scale", "nan"], "--work-scale: 'nan': a number greater than 0"),
    ([*WAIT, "--machine", "abacus"], "machine 'abacus' is unknown"),
    ([*WAIT, "--dtype", "bfloat16"], "has no"),
    (["--links", "50Mbit"], "--links: rates are those of the links of an emulated cluster"),
    (["--software-share", "0.1"], "give --work wait and --cluster"),
    (["--software-share", "1"], "'1': a fraction less than 1 would do, or none"),
    (["--software-share", "0"], "'0': a number greater than 0")])
@pytest.mark.ranks(1, 8)
def test_waits_that_nothing_can_be_waited_for_are_refused(comm, shared_tmp_path, options,
                                                          message):
    said = refused(comm, "run", "--preset", "tiny", "--rows",
                   "weak:3d" if comm.size > 1 else "weak:serial", *options,
                   "--out", str(shared_tmp_path))
    assert message in said and not list(shared_tmp_path.glob("*.h5"))


def test_reproduce_needs_the_machine_as_well(tmp_path, capsys):
    for options in (["--work", "wait"], ["--machine", "longhorn"]):
        assert main(["reproduce", *options, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.startswith(f"error: {' '.join(options)}: ")


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


@pytest.mark.ranks(8)
def test_a_row_of_sizes_of_its_own_has_no_published_seconds(comm, shared_tmp_path, cluster):
    """48 heads do not divide the published features, so nothing is predicted for these."""
    done(comm, "run", *ROW, "--rows", "weak:1d-sp", "--hidden", "96", "--heads", "48", "--out",
         str(shared_tmp_path))
    assert [*only_record(shared_tmp_path).groups["predicted"].variables] == ["seconds"]
