"""``validate`` rejects what is damaged or dishonest; ``merge`` joins what may be joined."""
import os
import shutil

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from bench.__main__ import main, parser
from bench.cases.selection import select_rows
from bench.records import kinds, merged, run_file, schema
from bench.records.folder import read_folder, read_runs
from bench.validation.files import check_file, list_warnings
from mutations import edit, sets, spoils, writes
from records import made_up
from support import run_ranks

MEASURE = """
import sys
from bench.__main__ import main
for number, words in enumerate(sys.argv[2:]):
    if status := main([*words.split(), "--out", f"{sys.argv[1]}/{number}"]):
        sys.exit(status)
"""


def measure(folder, *commands: str):
    """Measure on two ranks, one command after the other, each into a folder of its own."""
    done = run_ranks(2, "-c", MEASURE, str(folder), *commands)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in folder.glob("*/*.h5"):
        path.rename(folder / path.name)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with two rows and three microbenchmarks, as they are measured."""
    folder = measure(
        tmp_path_factory.mktemp("measured"), "run --scheme 1d-sp --preset tiny --repetitions 6 "
        "--max-repetitions 8 --traced 1", "measure matmul --shape 32 --scheme 1d --backward "
        "--calls 3 --max-seconds 0.1", "measure collectives --least 100 --most 1700 "
        "--max-seconds 0.01 --grid 1x2x1")
    words = ("measure gemm --sizes 16,32 --threads 1 --dtypes float32 --max-seconds 0.1 "
             "--out").split()
    arguments = parser().parse_args([*words, str(folder)])
    assert arguments.verb_file.run(arguments, MPI.COMM_SELF) == 0
    return folder


def a_copy(folder, name: str, to):
    """A copy of the one file whose name begins so."""
    path, = folder.glob(f"{name}*.h5")
    return shutil.copy(path, to / path.name)


def test_what_was_measured_is_valid(measured, capsys):
    for path in measured.glob("*.h5"):
        assert check_file(path)[0] == [], path
    assert main(["validate", str(measured)]) == 0
    assert capsys.readouterr().out.count(": valid\n") == 5


def test_the_schema_is_printed_as_it_is_checked(capsys):
    """Every variable of every kind, with its group and dimensions, without any file."""
    with pytest.raises(SystemExit) as ended:
        main(["validate", "--schema"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code in (0, None)
    for line in ("Kind model", "  /samples/forward (repetition, rank)",
                 "  /traffic/moved (phase, rank, axis, collective), not in all",
                 "  /measurements/rate (dtype, threads, size), computed when a file is read",
                 "  /verification/error (quantity)", "  keep: none or weight or both"):
        assert line in lines
    common = schema.load_schema()
    known = [common["common"], *common["groups"].values(), *(
        one for kind in kinds.KIND_NAMES for one in kinds.schemas_of(kind).values())]
    assert sum(line.startswith("  /") and "(" in line for line in lines) == sum(
        len(one.get(key, {})) for one in known for key in ("variables", "optional", "derived"))


def test_the_environment_is_complete(measured):
    for path in measured.glob("*.h5"):
        run = run_file.read_run(path)
        for name in ("cpu_model", "cores", "kernel", "operating_system", "mpi",
                     "numpy_version", "mpi4py_version", "h5py_version", "blas",
                     "blas_architecture", "blas_threads", "tuning_variables", "slurm", "command",
                     "git_commit", "git_clean", "python", "ranks", "ranks_on_this_node"):
            assert name in run.environment, name
        where = run.environment if run.environment.get("node_of_rank") else run.configuration
        assert where["node_of_rank"] == " ".join("0" * run.environment["ranks"])
        inside = path.name.startswith("gemm")    # this process's own words, which may be none
        assert run.environment["command"].startswith("python -m bench" + " " * (not inside))


def truncated(path):
    os.truncate(path, os.path.getsize(path) * 2 // 3)


def fewer(file):
    """Keep three repetitions only."""
    samples, names = file["samples"], ("forward", "backward", "forward_late", "backward_late")
    for name in ("repetition", *names):
        kept = samples[name][:3]
        del samples[name]
        samples[name] = kept
    samples["repetition"].make_scale("repetition")
    for name in names:
        samples[name].attrs["units"] = "s"
        for index, dim in enumerate(("repetition", "rank")):
            samples[name].dims[index].attach_scale(samples[dim])


def spread_out(file):
    """Times far apart, which the file says are within the width asked for."""
    count, ranks = file["samples/forward"].shape
    file["samples/forward"][...] = np.geomspace(0.1, 10, count)[:, None] * np.ones(ranks)
    file["configuration"].attrs["ended_by"] = "width"


DAMAGES = {
    "earlier version": (sets("/", schema_version=2), "schema version 2; this mm3d"),
    "no verification": (spoils("verification"), "no verification: no time counts without one"),
    "failed verification": (writes("verification/error", 0.5, 1),
                            "verification of input gradient has failed: error 0.5"),
    "not a number": (writes("verification/error", np.nan, 0),
                     "verification of output has failed: error nan"),
    "lax tolerance": (writes("verification/tolerance", 1.0, 2), "is 1; the rules allow 5e-05"),
    "too few samples": (edit(fewer), "too few samples: 3 repetitions of at least 6"),
    "no time": (writes("samples/forward", 0.0, (0, 0)), "not greater than 0"),
    "interval": (edit(spread_out), "those of the samples are not: forward"),
    "skew": (writes("samples/forward_late", 1.0), "some rank is the first"),
    "crowded": (sets("environment", cores=64, oversubscribed=True), "2 ranks on 64 cores, but"),
    "ranks": (sets("environment", ranks=4),
              "environment/ranks says 4 ranks, the samples are of 2"),
    "words": (writes("traffic/words", 1), "the words counted are"),
    "closed form": (writes("traffic/expected_words", 1), "expected_words are"),
    "bytes": (writes("traffic/bytes", 7), "traffic/bytes are not 4 times the words"),
    "calls": (writes("parts/calls", 9, (0, 0, 4)), "are not traffic/calls"),
    "closed form of memory": (writes("memory/expected_gradients", 1.0),
                              "memory/expected_gradients is not the closed form's"),
    "sizes": (sets("configuration", batch=7), "batch 7: preset tiny runs strong"),
    "published": (writes("published/batch", 3.0), "published/batch is 3, in the table"),
    "equation 6": (writes("published/recomputed_step_time", 3.0),
                   "published/recomputed_step_time is 3, in the table"),
    "smaller model": (sets("configuration", verified_batch=1),
                      "does not say whether the verified sizes are the measured"),
    "user": (sets("environment", command="python /home/someone/run.py"),
             "attribute command names a folder, which is private"),
    "address": (sets("environment", mpi="Open MPI someone@node17"),
                "attribute mpi names an address, which is private"),
    "host": (sets("environment", hostname="node17"), "has an attribute hostname: mask it"),
    "units": (spoils("samples/forward", key="units"), "samples/forward has no units"),
    "scales": (spoils("traffic/words", key="DIMENSION_LIST"),
               "dimension 0 of traffic/words has no scale"),
    "matmul, no words": (spoils("measurements/words"),
                         "not a complete run: measurements/words is missing"),
    "matmul, another form": (sets("configuration", form="ba"),
                             "configuration/form is 'ba', which should be ab or abt or atb"),
    "matmul, failed": (writes("verification/error", 9.0, 0), "has failed: error 9"),
    "matmul, no verification": (spoils("verification"), "there is no verification"),
    "matmul, counted": (writes("measurements/words", 7), "measurements/words is"),
    "collectives, counted": (writes("measurements/bytes_moved", 7),
                             "measurements/bytes_moved is")}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_and_dishonest_files_are_rejected(measured, tmp_path, kind):
    damage, message = DAMAGES[kind]
    path = a_copy(measured, kind.partition(",")[0] if "," in kind else "strong", tmp_path)
    damage(path)
    errors, _ = check_file(path)
    assert any(message in line for line in errors), errors


def test_what_follows_from_samples_is_not_read(measured, tmp_path):
    """Files have raw numbers alone; what an earlier program has derived does not count."""
    path = a_copy(measured, "matmul", tmp_path)
    found = run_file.read_run(path)
    assert set(found.raw) == {"times", "words"} and found.derived.keys() > {"efficiency", "flops"}
    with h5py.File(path, "r+") as file:
        for name in ("efficiency", "flops"):
            made = file["measurements"].create_dataset(name, data=np.full(2, 7.0))
            made.dims[0].attach_scale(file["measurements/phase"])
    again = run_file.read_run(path)
    assert set(again.raw) == set(found.raw) and all(
        np.array_equal(again.variables[name].values, one.values, equal_nan=True)
        for name, one in found.variables.items())


@pytest.mark.parametrize("count, said", [
    (1, ["no 95 % interval of 1 repetition: at least six would do"]),
    (5, ["no 95 % interval of 5 repetitions: at least six would do"]), (6, [])])
def test_fewer_than_six_repetitions_are_a_warning(count, said):
    run = made_up(select_rows("weak", "3d")[0], repetitions=count)
    assert [line for line in list_warnings(run) if "interval" in line] == said


def test_what_a_reader_must_know(measured, tmp_path, capsys):
    path = a_copy(measured, "strong", tmp_path)
    sets("environment", git_commit="1" * 40, git_clean=False)(path)
    sets("configuration", ended_by="stopped")(path)
    writes("samples/forward", 1)(path)
    writes("samples/forward", 2, 0)(path)
    errors, warnings = check_file(path)
    assert not errors and any("not committed" in line for line in warnings)
    assert any("the first forward that counts took 2.0 times" in line for line in warnings)
    assert any("told to stop" in line for line in warnings)
    assert main(["validate", str(path)]) == 0
    sets("environment", ranks=4)(path)
    assert main(["validate", str(tmp_path)]) == 1
    assert f"{path}: NOT VALID\n  error: environment/ranks" in capsys.readouterr().out


def contents(group) -> dict:
    """Every dataset of a group, its attributes and the names of its dimensions."""
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            scales = [] if item.is_scale else [dim[0].name.rpartition("/")[2] for dim in item.dims]
            found[name] = item[...].tolist(), item.attrs.get("units"), scales
        else:
            found[name] = dict(item.attrs)
    group.visititems(visit)
    return found


@pytest.mark.slow
def test_merged_files_hold_all_that_their_parts_do(measured, tmp_path, capsys):
    target = tmp_path / "all.h5"
    assert main(["merge", str(target), str(measured)]) == 0
    with h5py.File(target) as file:
        assert file.attrs["format"] == merged.FORMAT
        assert file.attrs["schema_version"] == run_file.SCHEMA
        for path in measured.glob("*.h5"):
            with h5py.File(path) as one:
                assert str(contents(file[f"runs/{path.stem}"])) == str(contents(one))
    # Tables, validation and merging again read it like the folder.
    assert main(["validate", str(target)]) == 0
    capsys.readouterr()
    assert main(["report", str(target)]) == 0
    text = capsys.readouterr().out
    assert main(["report", str(measured)]) == 0
    assert text == capsys.readouterr().out
    shutil.copy(target, measured / "zzz.h5")
    try:
        assert len(read_runs(measured)[0]) == 5 and read_folder(measured).results[0].earlier == 0
        assert main(["merge", str(tmp_path / "again.h5"), str(measured)]) == 0
    finally:
        os.unlink(measured / "zzz.h5")
    assert len(merged.runs_in_file(tmp_path / "again.h5")[0]) == 5
    assert main(["report", str(target), "--figures"]) == 0 and list(tmp_path.glob("*.png"))


@pytest.fixture
def one(measured, tmp_path):
    """A folder with one row."""
    (tmp_path / "one").mkdir()
    a_copy(measured, "weak", tmp_path / "one")
    return tmp_path / "one"


def test_a_violation_in_a_merged_file_names_its_run(one, tmp_path):
    target = tmp_path / "all.h5"
    assert main(["merge", str(target), str(one)]) == 0
    name = next(one.glob("weak*.h5")).stem
    sets(f"runs/{name}/environment", ranks=4)(target)
    errors, _ = check_file(target)
    assert errors == [f"{name}: environment/ranks says 4 ranks, the samples are of 2"]
    with h5py.File(target, "r+") as file:
        del file["runs"][name]
    assert check_file(target) == (
        [f"{target} is damaged or not a complete merged file: it has no runs"], [])


def test_what_cannot_be_merged_changes_nothing(measured, one, tmp_path, capsys):
    old = a_copy(measured, "strong", tmp_path)
    target = tmp_path / "out" / "all.h5"
    target.parent.mkdir()
    for sources, message in (
            ([tmp_path / "nothing.h5"], "does not exist"),
            ([target.parent], "there is no .h5 file in")):
        assert main(["merge", str(target), *map(str, sources)]) == 2
        assert message in capsys.readouterr().err and not list(target.parent.iterdir())
    assert main(["merge", str(target.with_suffix("")), str(one)]) == 2
    assert "not end in .h5: all.h5 would do" in capsys.readouterr().err
    assert main(["merge", str(old), str(one)]) == 2
    assert "is there already: name a new file" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "no" / "all.h5"), str(one)]) == 2
    assert "could not be written (No such file or directory)" in capsys.readouterr().err
    truncated(old)
    assert main(["merge", str(target), str(old)]) == 2
    assert "is truncated" in capsys.readouterr().err and not list(target.parent.iterdir())


def test_nothing_to_merge_and_what_a_killed_merge_left(one, tmp_path, capsys):
    target, part = tmp_path / "all.h5", tmp_path / "all.h5.part"
    assert main(["merge", str(target), str(one)]) == 0
    assert main(["merge", str(target), str(tmp_path)]) == 2    # which has nothing else
    assert f"there are no runs to merge into {target}" in capsys.readouterr().err
    target.rename(part)
    assert main(["merge", str(target), str(one)]) == 2
    said = capsys.readouterr().err
    assert f"{part} is there, of a merge that goes on or was killed: delete it" in said
    part.unlink()
    assert main(["merge", str(target), str(one)]) == 0
