"""The verbs, run as a user runs them."""
import re
import shlex
import socket
import sys
from getpass import getuser
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import bench
import fakelibs
import mm3d
from bench.__main__ import main, parser
from bench.cases.case import make_case, shuffle_cases
from bench.cases.selection import select_rows
from bench.cases.variants import Variant
from bench.command_line.progress import RowProgress
from bench.doctor import census
from bench.experiments.rows import reproduction, row
from bench.instruments import host
from bench.instruments.host import command_line
from bench.records import atomic, run_file, schema
from bench.records.measurements import Check
from bench.reports.paper_tables import words_agree
from bench.verbs import reproduce as reproduce_verb
from jobs import scripts, site
from jobs.scripts import JobSettings
from mm3d import launcher
from refused import refused
from support import ROOT, run_python, run_ranks

TINY = ("--preset", "tiny", "--repetitions", "2",
        "--max-repetitions", "2")


def runs(folder):
    return [run_file.read_run(path) for path in sorted(folder.glob("*.h5"))]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """The rows of a reproduction on some numbers of ranks: what was said, and the folder."""
    def reproduce(scheme: str, *ranks: int):
        if (scheme, ranks) not in made:
            out = tmp_path_factory.mktemp("results") / "here"
            made[scheme, ranks] = run_python(
                "-m", "bench", "reproduce", "--table", "strong", "--scheme", scheme, *TINY,
                "--ranks", ",".join(map(str, ranks)), "--out", str(out), timeout=360), out
        return made[scheme, ranks]
    made = {}
    return reproduce


@pytest.mark.limit(400)
def test_a_row_is_measured_verified_and_written(reproduced):
    done, out = reproduced("1d-sp", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "] done: strong 1-D, sequence 2 ranks: forward" in done.stdout
    (first,) = runs(out)
    assert first.samples["forward"].shape == (2, 2) and (first.samples["backward"] > 0).all()
    names = [check.quantity for check in first.checks]
    assert names[:2] == ["output", "input gradient"]
    assert "gradient of layers.0.attention.qkv.bias" in names and len(names) == 2 + 12
    assert all(0 < check.error <= check.tolerance for check in first.checks[:2])
    assert words_agree(first) and first.traffic["words"].sum() > 0
    assert (first.traffic["bytes"] == 4 * first.traffic["words"]).all()
    chosen = make_case(select_rows("strong", "1d-sp", 2)[0], "tiny").sizes
    for name in ("layers", "hidden", "heads", "batch", "seq"):
        assert first.configuration[name] == getattr(chosen, name)
    assert first.ended_by == "repetitions" and 0 < first.clock["resolution"] < 1e-3
    assert first.late["backward"].shape == (2, 2) and first.configuration["order"] >= 0
    assert first.configuration["grid"] == "2"
    assert first.environment["command"].count(f" --out={out.name} ") == 1
    check_private(first)


def check_private(run):
    """No value names the user, the host or the home folder."""
    text = " ".join(map(str, [*run.configuration.values(), *run.environment.values()]))
    for word in (getuser(), socket.gethostname(), "/home", "/root"):
        assert not re.search(rf"(?<![\w-]){re.escape(word)}\b", text), word


@pytest.mark.slow
def test_one_job_measures_all_rows_of_its_rank_count(tmp_path):
    done = run_ranks(8, "-m", "bench", "run", *TINY, "--dtype", "float64", "--layers", "2",
                     "--batch", "5", "--order", "5", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    titles = [line.split(":")[1].strip() for line in done.stdout.splitlines()]
    assert sorted(titles) == sorted(
        f"{table} {scheme} 8 ranks, float64" for table in ("weak", "strong")
        for scheme in ("1-D", "3-D"))
    ordered = shuffle_cases([make_case(row, "tiny", variant=Variant(dtype="float64"))
                             for row in select_rows() if row.gpus == 8], 5)
    assert titles == [one.title for one in ordered]
    for run in runs(tmp_path):
        assert run.configuration["batch"] == 5 and run.configuration["layers"] == 2
        assert run.configuration["overridden"] == "batch layers"
        assert max(check.error for check in run.checks) < 1e-12 and words_agree(run)


def perturbed(comm, folder, monkeypatch, what, *options: str) -> str:
    """What ``bench run`` says of rows whose backward pass does `what` more, and refuses."""
    right = mm3d.Transformer.backward

    def wrong(model, dy, saved):
        dx = right(model, dy, saved)
        if model.grid.size > 1:    # not in the serial model
            what(model, dx)
        return dx
    monkeypatch.setattr(mm3d.Transformer, "backward", wrong)
    said = refused(comm, "run", *TINY, "--out", str(folder / "out"), *options)
    assert not list((folder / "out").glob("*.h5*"))
    return said


def scale_gradient(model, dx):
    if model.grid.rank == 1:
        model.parameters[2].grad *= 1.01


def spoil_all(model, dx):
    dx[...] = np.nan


def spoil_copy(model, dx):
    if model.grid.rank == 3:
        dx[0] *= 1.5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what, said", [
    (scale_gradient, r"gradient of layers.0.attention.qkv.weight is off by 0.00\d+, "
                     r"tolerance 5e-05 \(1 of 14 checks fail\)"),
    (spoil_all, "input gradient is off by nan")])
def test_a_wrong_result_writes_no_times(comm, shared_tmp_path, monkeypatch, what, said):
    """Each row is named, and the second is tried although the first has failed."""
    lines = perturbed(comm, shared_tmp_path, monkeypatch, what, "--scheme",
                      "1d-sp").splitlines()
    assert [line.split(":")[:2] for line in sorted(lines)] == [
        ["failed", f" {table} 1-D, sequence 2 ranks"] for table in ("strong", "weak")]
    assert all(re.search(said, line) for line in lines), lines


@pytest.mark.ranks(8)
def test_one_wrong_copy_is_a_wrong_result(comm, shared_tmp_path, monkeypatch):
    """In 1-D every rank holds the whole of dx: seven are right, that of rank 0 as well."""
    said = perturbed(comm, shared_tmp_path, monkeypatch, spoil_copy, "--scheme", "1d", "--table",
                     "weak")
    assert re.search(r"input gradient is off by 0\.\d+.*1 of 14 checks fail", said), said


@pytest.mark.ranks(1, slow=(4,))
def test_what_fails_on_all_ranks_gives_back_what_it_had(comm, shared_tmp_path, monkeypatch):
    """The communicator of every row, and its grid: MPI has few of them."""
    made, grids = [], []
    placed, free = row.placement.reorder_ranks, mm3d.Grid.free
    monkeypatch.setattr(row.placement, "reorder_ranks",
                        lambda *arguments: made.append(placed(*arguments)) or made[-1])
    monkeypatch.setattr(mm3d.Grid, "free", lambda grid: grids.append(grid.comm) or free(grid))
    monkeypatch.setattr(row.against_serial, "compare_with_serial",
                        lambda *given: [Check("it", 1.0, 0.0)])
    refused(comm, "run", *TINY, "--scheme", "1d-sp", "--out", str(shared_tmp_path))
    assert made == [MPI.COMM_NULL] * 2
    assert all(any(comm is one for comm in grids) for one in made)
    assert not list(shared_tmp_path.glob("*.h5"))


@pytest.mark.ranks(8)
def test_a_folder_that_cannot_be_written(comm, shared_tmp_path):
    (shared_tmp_path / "file").touch()
    said = refused(comm, "run", *TINY, "--out", str(shared_tmp_path / "file" / "out"))
    assert said.startswith("error: ") and said.count("\n") == 1
    assert "cannot be written (Not a directory)" in said


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options, message", [
    (("--preset", "huge"), "'huge' is unknown: choose one of paper"),
    (("--hidden", "100"), "--hidden 100: must be a multiple of the 32 heads"),
    (("--repetitions", "0"), "--repetitions: '0': a whole number of at least 1"),
    (("--max-repetitions", "1"), "at most 1 repetition: must be at least the 2"),
    (("--width", "0"), "--width: '0': a number greater than 0"),
    (("--backend", "abacus"), "abacus"),
    (("--scheme", "1d,3d", "--grid", "5x5"), "scheme '1d' has"),
    (("--scheme", "1d,3d", "--grid", "5x5"), "scheme '3d' has")])
def test_wrong_arguments_get_one_message(comm, shared_tmp_path, options, message):
    said = refused(comm, "run", "--table", "weak", "--scheme", "1d", *TINY, *options, "--out",
                   str(shared_tmp_path / "out"))
    assert said.count(message) == 1 and said.splitlines()[-1].count("error: ") == 1, said


@pytest.mark.limit(400)
@pytest.mark.parametrize("scheme, title, ranks", [
    ("1d-sp", "1-D, sequence", [2]),
    pytest.param("3d", "3-D", [8, 64], marks=pytest.mark.slow)])
def test_reproduce_runs_every_rank_count_and_shows_the_results(reproduced, scheme, title, ranks,
                                                               capsys):
    done, out = reproduced(scheme, *ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    for n in ranks:
        assert re.search(rf"\[ \d/{len(ranks)} \d\d:\d\d\] done: strong {title} {n} ranks",
                         done.stdout)
    assert "Table 2, strong scaling" in done.stdout
    assert {path.suffix for path in out.iterdir()} == {
        ".h5", ".png", ".txt", ".jsonl", ".html"}
    assert done.stdout.splitlines()[-1].startswith(
        f"all tables: {out}/tables.txt; page: {out}/report.html; figures: ")
    assert [run.ranks for run in runs(out)] == ranks
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out == (out / "tables.txt").read_text()
    if len(ranks) > 1:
        assert main(["report", str(out), "--figures"]) == 0 and capsys.readouterr().out


def test_reproduce_goes_on_after_a_row_that_kills_its_job(capsys):
    cases = [make_case(row, "tiny") for row in select_rows("all", "1d,3d") if row.gpus == 8]
    started = []

    def command(job, options):
        # The first job dies at its second row; the jobs of one row that follow succeed.
        started.append([one.title for one in job])
        lines = [f"done: {job[0].title}: fine"]
        code = f"import sys; print({lines[0]!r}); sys.exit({9 if len(job) > 1 else 0})"
        return [sys.executable, "-c", code]

    progress = RowProgress(len(cases))
    reproduction.measure_in_jobs(cases, [], progress, command)
    progress.close()
    titles = [one.title for one in cases]
    assert progress.failures == [f"failed: {titles[1]}: mpirun ended with status 9"]
    assert started == [titles, [titles[2]], [titles[3]]]
    assert progress.done == 4 and "[ 4/4 " in capsys.readouterr().out


@pytest.mark.slow
def test_the_array_library_is_known_before_mpi_starts(tmp_path):
    """Whoever names it: a user, in both ways; `reproduce` to `run`; the script of a row."""
    arguments = parser(["reproduce"]).parse_args(["reproduce", "--backend", "cupy"])
    work = JobSettings(site.load_site("gpu4"), "gpu4", tmp_path)
    script = scripts.row_script(work, make_case(select_rows("weak", "3d")[0], "tiny"))
    row = re.search(r"^row=\((.*?)\)$", script, re.M | re.S).group(1)
    for words in (reproduce_verb.run_options(arguments, tmp_path, 1), shlex.split(row),
                  ["run", "--backend", "cupy"], ["--backend=numpy", "--backend", "cupy"]):
        assert bench.backend_option(words) == "cupy", words
    assert bench.backend_option(["run", "--backend"]) == bench.backend_option([]) == ""
    done = run_python("-c", "import bench, os, sys; assert 'mpi4py.MPI' not in sys.modules; "
                            "print(os.environ['MM3D_BACKEND'])", "--backend=numpy")
    assert done.stdout == "numpy\n", done.stderr


def test_experiments_write_no_files_and_print_nothing():
    """What else belongs to verbs lies above them.  Startup is another process, too."""
    folder = ROOT / "bench" / "experiments"
    for path in folder.rglob("*.py"):
        module, text = str(path.relative_to(folder)), path.read_text()
        assert "mm3d.console" not in text or module in ("startup.py", "rows/reproduction.py")
        assert (not re.search(r"^import argparse|\bprint\(", text, re.MULTILINE)
                or module in ("startup.py", "torch/serve.py")), module
        assert "records.journal" not in text or module.startswith(
            ("rows/", "training/history")), module    # go on where they were stopped


def test_the_recorded_command_has_no_folders():
    assert command_line(["run", "--out", "/home/someone/results/x", "--seed", "1"]) == (
        "python -m bench run --out x --seed 1")
    assert command_line(["run", "--out=/home/someone/x"]) == "python -m bench run --out=x"
    assert command_line(["layer", "--torch", "/home/one/bin/python", "--trace=/tmp/t.json"]) == (
        "python -m bench layer --torch python --trace=t.json")
    assert command_line(["run", "--machine", "/home/someone/x.toml"]) == (
        "python -m bench run --machine x.toml")


def test_what_may_name_somebody_is_masked(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc,sm")
    monkeypatch.setenv("OMPI_MCA_coll_tuned_dynamic_rules_filename", "/home/someone/rules")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    for name in ("SLURM_JOB_USER", "SLURM_JOB_NODELIST", "SLURM_JOB_ACCOUNT"):
        monkeypatch.setenv(name, "someone")
    found = host.describe_host("numpy", 1, "MPICH Version: 5", "python -m bench")
    assert "OMPI_MCA_coll_tuned_dynamic_rules_filename=(masked)" in found["tuning_variables"]
    assert "UCX_TLS=rc,sm" in found["tuning_variables"]
    assert host.mask_variables({"LD_PRELOAD": "/home/one/a.so:/opt/b.so", "MKL_X": "/one"}) == (
        "LD_PRELOAD=a.so:b.so MKL_X=(masked)")
    assert found["slurm"] == "JOB_ID=77 CPU_BIND=cores" and "someone" not in str(found)


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_what_is_said_of_a_host_can_be_read_again(monkeypatch, no_backends, library):
    fakelibs.replace_cupy(monkeypatch)
    found = host.describe_host(library, 1, "MPICH Version: 5", "python -m bench")
    schema.check_settings("environment", found, ["git_clean"])
    assert ("gpu" in found) == (library == "cupy")


def test_all_that_computes_is_of_the_source(tmp_path):
    """To the byte, whatever its language; how figures and pages look, and READMEs, are not."""
    kinds = {path.suffix for folder in ("mm3d", "bench") for path in (ROOT / folder).rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}
    assert kinds >= {".py", ".cu", ".toml"}
    for folder in ("bench", "mm3d"):
        (tmp_path / folder).mkdir()
        for kind in sorted(kinds):
            before = host.source_digest(tmp_path)
            (tmp_path / folder / f"a{kind}").write_bytes(b"1")
            new = host.source_digest(tmp_path)
            (tmp_path / folder / f"a{kind}").write_bytes(b"2")
            seen = len({before, new, host.source_digest(tmp_path)})
            assert seen == (1 if kind in (".mplstyle", ".html", ".rst") else 3), kind


def test_the_machine_has_a_neutral_name():
    assert host.slug_of("AMD EPYC(TM) 7763 CPU @ 2.45GHz", 8) == "amd-epyc-7763-8-cores"
    assert host.default_out() == Path("results/local") / host.slug_of(host.cpu_model(),
                                                                      launcher.cores())


def test_what_is_measured_here_is_not_committed():
    assert f"{atomic.LOCAL}/" in (ROOT / ".gitignore").read_text().splitlines()
    assert parser(["measure", "gemm"]).parse_args(["measure", "gemm"]).out == host.default_out()


@pytest.mark.parametrize("lines, name", [
    ("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n", "AMD EPYC family 25 model 1"),
    ("cpu family\t: 6\nmodel\t: 85\nmodel name\t: Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz\n",
     "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz"),
    ("cpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
    ("model name\t: some processor\n", "some processor")])
def test_processors_that_hide_their_number_are_told_apart(tmp_path, lines, name):
    """By family and model, as in virtual machines."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n" + lines * 2)
    assert host.cpu_model(tmp_path / "cpuinfo") == name


def test_instruction_sets_are_those_of_the_system(tmp_path):
    """Also where another line only begins alike; none where the system does not tell."""
    path = tmp_path / "cpuinfo"
    assert census.best_kernels(path) == "" and host.processor_flags(path) == frozenset()
    path.write_text("vmx flags\t: ept\nflags\t\t: sse2 avx2 fma\n" * 2)
    assert census.best_kernels(path) == "avx2"
    assert host.processor_flags(path) == {"sse2", "avx2", "fma"}
    zen4 = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t\t: avx2 avx512f\n"
    for text, kernels in ((zen4, "avx2"), (zen4.replace("25", "26"), "avx512f")):
        path.write_text(text)
        assert census.best_kernels(path) == kernels


def test_the_mpi_library_is_named_without_its_builder():
    assert host.mpi_name("MPICH Version:      5.0.2\nMPICH Release: today") == "MPICH 5.0.2"
    assert host.mpi_name("Open MPI v5.0.11, package: Open MPI someone@somewhere Distribution"
                         ", ident: 5.0.11\x00") == "Open MPI v5.0.11"
