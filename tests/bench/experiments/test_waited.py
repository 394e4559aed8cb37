"""Rows whose ranks wait for the modelled seconds of their work instead of computing."""
import numpy as np
import pytest

from bench.__main__ import main
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import trace_terms
from bench.reports.paper_tables import words_agree
from bench.validation.rules import check_waits
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES, Gemm, MemoryPass
from records import format_tables, only_record
from refused import done, refused

WAIT = ("--work", "wait", "--machine", "longhorn", "--work-scale", "5")
FEW = ("--preset", "tiny", "--repetitions", "2", "--max-repetitions", "2", "--warmup", "1")


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
    ([*WAIT, "--dtype", "bfloat16"], "has no")])
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
