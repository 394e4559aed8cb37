"""All that needs a GPU, in one go: what fails, hangs or is missing costs the rest nothing."""
import sys

import pytest

from bench.__main__ import main
from bench.doctor import gpu_suite
from bench.doctor.gpu_suite import SuiteStep
from mm3d import launcher


def python(name: str, program: str, limit: float = 30, **settings: str) -> SuiteStep:
    return SuiteStep(name, [sys.executable, "-c", program], limit, settings)


def test_each_step_survives_the_others(tmp_path, capsys):
    """One that ends with a status, by a signal, never, or is not there."""
    every = [python("status", "print('hello'); raise SystemExit('error: no such thing')"),
             python("signal", "import os; os.abort()"),
             SuiteStep("hang", ["sh", "-c", "echo here; exec sleep 60"], 2),
             SuiteStep("missing", [str(tmp_path / "nothing")], 1),
             python("well", "import os; print(os.environ['GIVEN'])", GIVEN="this")]
    found = list(gpu_suite.run_steps(every, tmp_path))
    assert [bool(one.problem) for one in found] == [True] * 4 + [False]
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert list(map(str, found)) == lines and not any(capsys.readouterr())
    assert [line.split()[:2] for line in lines] == [
        ["failed", "status"], ["failed", "signal"], ["failed", "hang"], ["failed", "missing"],
        ["ok", "well"]]
    for line, text in zip(lines, ("ended with status 1: error: no such thing", "signal 6",
                                  "did not end within 2 seconds", "No such file")):
        assert text in line
    assert (tmp_path / "well.log").read_text() == "this\n"
    assert (tmp_path / "hang.log").read_text() == "here\n"


@pytest.mark.parametrize("said, state", [
    ("3 passed, 71 skipped in 1.2s", "ok"), ("74 skipped, 9 deselected in 1.2s", "skipped")])
def test_tests_of_which_none_ran_are_not_well(tmp_path, said, state):
    """Of tests alone: whatever else ends well has said what it did."""
    one, other = (SuiteStep(name, [sys.executable, "-c", f"print({said!r})", *words], 30)
                  for name, words in (("tests-1", ["pytest"]), ("doctor", [])))
    tests, doctor = gpu_suite.run_steps([one, other], tmp_path)
    assert (str(tests).split()[0], str(doctor).split()[0]) == (state, "ok")
    assert tests.skipped == (state == "skipped") and not tests.problem


@pytest.mark.parametrize("more, status", [([], 1), (["--rehearse"], 0)])
def test_a_suite_whose_tests_are_all_skipped_has_failed(tmp_path, monkeypatch, more, status):
    """But not in a rehearsal, which has no GPU."""
    step = SuiteStep("tests-1", [sys.executable, "-c", "print('74 skipped in 1 s')", "pytest"], 30)
    monkeypatch.setattr(gpu_suite, "list_steps", lambda *arguments: [step])
    assert main(["doctor", "--gpu", "whole", "--out", str(tmp_path / "out"), *more]) == status


def test_everything_is_asked(tmp_path):
    """Each transport, the tests on one rank and on several, each part in a folder of its own."""
    names = [step.name for step in gpu_suite.list_steps(tmp_path, 8, 600, False)]
    assert names == ["doctor", "selftest-staged", "selftest-device", "selftest-nccl", "tests-1",
                     "tests-8", "gpu-gemm", "gpu-elementwise", "gpu-layer", "gpu-step",
                     "gpu-rows", "gpu-layer-graph"]
    for step in gpu_suite.list_steps(tmp_path, 8, 600, False):
        assert ("--graph" in step.command) == (step.name == "gpu-layer-graph")
        assert step.command[0] == (sys.executable if step.name in ("doctor", "tests-1")
                                   or "gpu-" in step.name else
                                   launcher.mpirun_command(8)[0])


@pytest.mark.slow
def test_a_rehearsal_needs_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--gpu", "whole", "--out", "out", "--rehearse", "--ranks", "2",
                 "--only",
                 "selftest-mpi,gpu-elementwise"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()] == [
        ["ok", "selftest-mpi"], ["ok", "gpu-elementwise"]]
    assert (tmp_path / "out" / "summary.txt").read_text() == said
    assert list((tmp_path / "out" / "gpu-elementwise").glob("*.h5"))
    assert "right on 2 ranks" in (tmp_path / "out" / "selftest-mpi.log").read_text()


def test_steps_that_are_unknown_are_refused(tmp_path, capsys):
    assert main(["doctor", "--gpu", "whole", "--out", str(tmp_path / "out"), "--rehearse",
                 "--only", "doctor,all"]) == 2
    assert not (tmp_path / "out").exists()
    assert "--only doctor,all: choose of doctor, selftest-mpi" in capsys.readouterr().err
