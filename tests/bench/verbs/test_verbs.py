"""A verb of ``python -m bench`` is one file, and nothing else is started with it."""
import importlib
import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

import mm3d
from bench import mpi, verbs
from bench.__main__ import main, parser, refuse_different_words
from bench.cases.selection import select_rows
from bench.prediction.machine_model import load_machine
from mm3d import selftest
from mm3d.training.schedules import build
from refused import refused
from support import ROOT, run_python, run_ranks

FOLDERS = ("measure", "draw")
KINDS = [f"{verb} {name}" for verb in FOLDERS for name in verbs.names(verb)]
NAMES = [name for name in verbs.names() if name not in FOLDERS] + KINDS
NEW = '''"""Count to a number."""

GROUP = "Look at numbers"


def add_options(parser):
    parser.add_argument("number", type=int)


def run(arguments):
    print(*range(1, arguments.number + 1))
    return arguments.number
'''


def test_help_names_every_verb_once_in_the_order_in_which_a_person_needs_them():
    text = parser().format_help()
    listed = re.findall(r"^  (\w+) +[A-Z].+$", text, re.MULTILINE)
    assert listed == verbs.names() and len(listed) == 16
    assert listed[:3] == ["reproduce", "run", "report"] and listed[-1] == "doctor"
    headings = re.findall(r"^(\w.+):$", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) == 7
    assert verbs.ORDER == (*verbs.names(), *verbs.kinds())


@pytest.mark.parametrize("verb", FOLDERS)
def test_help_of_a_verb_names_every_kind(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^  (\w+) +[A-Z].+$", text, re.MULTILINE) == verbs.names(verb)
    assert text.endswith(f"{verb} KIND --help says more.\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_verb_is_a_help_a_heading_options_and_a_function(name):
    module = verbs.load_verb(name)
    about = verbs.first_line(module.__doc__)
    assert re.match(r"[A-Z].*\.$", about) and len(about) < 95
    *verb, kind = name.split()
    assert verbs.groups(*verb)[getattr(module, "GROUP", "Kinds")][kind] == about
    wanted = ["arguments", "comm"] if getattr(module, "ON_ALL_RANKS", False) else ["arguments"]
    assert list(inspect.signature(module.run).parameters) == wanted


def test_a_new_verb_needs_nothing_but_its_file(tmp_path):
    (tmp_path / "mm3d").symlink_to(ROOT / "mm3d")
    shutil.copytree(ROOT / "bench", tmp_path / "bench", copy_function=os.symlink)
    (tmp_path / "bench" / "verbs" / "count.py").write_text(NEW)
    done = run_python("-c", "from bench.__main__ import main; print(main(['count', '3']))\n"
                            "main(['--help'])", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.startswith("1 2 3\n3\n") and not done.returncode, done.stderr
    assert "\nLook at numbers:\n  count        Count to a number.\n" in done.stdout


def test_run_is_started_without_what_it_does_not_need():
    """64 ranks on two cores wait for every import."""
    done = run_python("-c", "import bench, sys; from bench.__main__ import main\n"
                            "try: main(['run', '--help'])\n"
                            "except SystemExit: print(*sys.modules)")
    found = set(done.stdout.splitlines()[-1].split())
    assert {"bench.verbs.run", "mpi4py.MPI"} <= found, done.stderr
    assert not found & {"matplotlib", "tabulate", "jinja2", "scipy"}
    assert {name for name in found if name.startswith("bench.verbs.")} == {"bench.verbs.run"}


@pytest.mark.parametrize("words, started", [
    (["predict", "--results", "nowhere"], False),
    (["measure", "layer", "--hidden", "7", "--scheme", "3d"], True)])
def test_mpi_starts_only_for_verbs_of_ranks(words, started):
    """The files of MPI in shared memory stay when their process is killed."""
    done = run_python("-c", "import sys; from bench.__main__ import main\n"
                            "try: main(sys.argv[1:])\n"
                            "finally: from mpi4py import MPI; print(MPI.Is_initialized())", *words)
    assert done.stdout.splitlines()[-1] == str(started), done.stderr


WRONG = [("mesure", "did you mean measure?"), ("measure gem", "did you mean gemm?"),
         ("paln", "mean plan?"), ("rum", "mean run?"), ("cub", "mean cube?"),
         ("measure layer --schem 3d", "--schem is no option of"),
         ("measure layer --schem 3d", "did you mean --scheme?"),
         ("dry --scheme 3dd", "did you mean 3d?"), ("dry --order position", "--expert-order?"),
         ("schedule --schedule zbh", "did you mean zb-h"), ("run --preset lap", "mean laptop?"),
         ("train --gate mixtrl", "did you mean mixtral?"), ("run --table wek", "mean weak?"),
         ("plan --ranks 8 --hidden 64 --machine long", "did you mean longhorn?"),
         ("plan --rules none", "overview"),
         ("dry --ranks 8 --hidden 64 --stages 2 --grid 2x2x1,", "or auto would do for each stage"),
         ("dry --ranks 8 --grid=", "--grid: its value is empty"),
         ("dry --ranks 8 --hidden 64 --heads 5", "a multiple of --heads 5, such as 65"),
         ("dry --ranks 8 --hidden 64 --layers 1 --experts 4", "in none of --layers 1: --expert"),
         ("dry --ranks 8 --hidden 64 --experts 4 --shared-gate",
          "--shared-gate without a shared expert: --shared-expert 1024 would do"),
         ("train --checkpoints none --save-every 3", "--save-every 3 would do nothing here"),
         ("calibrate --out a.toml --from netwrok:16=b", "where LINK is node or network"),
         ("calibrate --out a.toml --from b --stall 5", "--stall 5: nothing is measured"),
         *((f"measure {kind} --backend abacus", "'abacus' is unknown: choose one of numpy")
           for kind in ("gemm", "collectives", "layer", "matmul --shape 8")),
         ("measure step --vocab 1", "--vocab 1: at least 2 would do"),
         ("measure layer --hidden 64 --torch /bin/echo", "an interpreter with torch and numpy"),
         ("reproduce --preset tiny --software-share .5", "--software-share 0.5: waits and"),
         ("reproduce --table combined --repetitions 5 --max-repetitions 2",
          "at most 2 repetitions: must be at least the 5 that are asked for"),
         *((f"plan {mode} --hide-sums", "--hide-sums: ") for mode in (
             "--rules", "--map 8 --model gpt2 --batch 8", "--contexts 2 --model gpt2")),
         ("measure meshes combined:dense-16-1,combined:dense-8-1",
          "is for 1 rank: mpirun -n 8 or 16 would do"),
         ("predict --matmul 8 --zero 1", "--zero would do nothing here"),
         ("measure gpu --part gemm --graph", "--graph: it is of --part layer, and would do"),
         ("plan --rules --expert-top 3", "--expert-top 3: the rules of --rules overview say it"),
         ("doctor --gpu whole --out /tmp --variable A=b", "--variable would do nothing here"),
         ("doctor --ranks 0", "--ranks: '0': a whole number of at least 1 would do"),
         ("doctor --variable MEANT", "--variable: 'MEANT': give it as NAME=VALUE"),
         ("doctor --launcher srun'", "--launcher: No closing quotation"),
         ("report . --talk", "--talk would do nothing here: give --figures too"),
         ("plan --ranks 8 --hidden 64 --pictures /dev/null", "folder /dev/null cannot be written"),
         *((f"cube --{words}", said) for words, said in (
             ("shape 1", "some of the 8 ranks have nothing to multiply: sizes from 8"),
             ("grid=4x4x4", "--grid 4x4x4: 64 ranks are too many to be seen: 32 at most would do"),
             ("form=layer --shape=8", "--shape is that of a product: leave it out"),
             ("shape=65", "--shape 65,65,65: sizes to 64 would do"),
             ("scheme=1d-sp", "no products of plain matrices: the form up or down"),
             ("scheme=2d --grid=2x1", "needs a square grid"),
             ("out=a.jpg", "a.jpg: a picture's name ends in .png, .svg, .pdf or .gif"))),
         *((f"compare {words}", "name them all after --before and after --after") for words in (
             "a", "", "--before a", "a b --after c", "a b c")),
         ("compare a b --fail-on-regression -3", "regression: '-3': a number of at least 0"),
         ("report x.json --figures --talk", "--talk is for results: leave it out, x.json is a"),
         ("report . --format word", "'word' is unknown"),
         ("report . --figures --figure-format bmp", "'bmp' is unknown: choose one of png, svg"),
         ("reproduce --paper megablock", "paper 'megablock' is unknown: choose one of "),
         ("reproduce --paper megablock", "; did you mean megablocks"),
         ("reproduce --paper /no/such.toml", "such.toml: there is no such file; a file such as"),
         ("reproduce --paper zero --preset=tiny --fresh", "nothing: leave --preset, --fresh out")]


@pytest.mark.parametrize("words, said", WRONG)
def test_a_wrong_word_is_refused_in_one_line(words, said, capfd):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(words.split()))
    found = capfd.readouterr()
    assert ended.value.code == 2 and found.out == ""
    assert said in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize("name, said, words", [
    ("MM3D_NODE_SIZE", "give the number of ranks", []),
    ("MM3D_CLUSTER", "describes no cluster", []),
    ("MM3D_CLUSTER", "describes no cluster", ["--cluster", "2x1"])])
def test_a_wrong_variable_is_refused_in_one_line(name, said, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(name, "nonsense")
    assert main(["measure", "matmul", "--shape", "8", "--out", str(tmp_path), *words]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"error: {name}='nonsense'") and said in found
    assert found.count("\n") == 1


@pytest.mark.ranks(2)
def test_ranks_with_different_words_are_all_refused(comm, monkeypatch, capfd):
    monkeypatch.setattr(MPI, "COMM_WORLD", comm)
    monkeypatch.setattr(sys, "argv", ["bench", "run", f"--seed={comm.rank}"])
    with pytest.raises(SystemExit) as ended:
        refuse_different_words()
    said = capfd.readouterr().err
    assert ended.value.code == 2
    assert ("differ in word 2 (--seed=0 on rank 0, --seed=1 on rank 1)" in said) == (not comm.rank)
    monkeypatch.setattr(sys, "argv", ["bench", "run"])
    monkeypatch.setenv("MM3D_BACKEND", "numpy" * comm.rank)
    refuse_different_words()    # which by default is NumPy


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", ["collectives", "layer", "matmul --shape 8 --scheme 1d"])
def test_several_ranks_measure_no_arrays_without_contents(comm, shared_tmp_path, words):
    said = refused(comm, "measure", *words.split(), "--backend", "dry", "--out",
                   str(shared_tmp_path / "out"))
    assert said == "error: backend 'dry' is unknown: choose one of numpy, cupy\n"
    assert not list(shared_tmp_path.glob("out/*"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words, file", [
    ("train --model own.toml", "models/gpt-3-175b.toml"),
    ("predict --matmul 8 --machine own.toml", "machines/cpu.toml")])
def test_a_file_that_one_rank_does_not_see_lets_no_other_wait(words, file, comm, tmp_path,
                                                              monkeypatch, capfd):
    monkeypatch.setattr(MPI, "COMM_WORLD", comm)
    monkeypatch.chdir(tmp_path)
    if comm.rank:
        Path("own.toml").write_bytes((ROOT / "bench/prediction" / file).read_bytes())
    assert main(words.split()) == 2
    assert capfd.readouterr().err.count("own.toml: there is no such file") == (not comm.rank)


@pytest.mark.parametrize("words", [
    "measure pipeline --stages 1 --work wait --unit 1us --schedule gpipe --layers 1 "
    "--microbatches 1 --repetitions 1 --max-repetitions 1",
    "train --layers 1 --hidden 8 --heads 1 --batch 1 --seq 8 --steps 1 --checkpoints none"])
def test_a_picture_that_is_not_drawn_is_told_by_the_status(words, tmp_path, capsys):
    """As where a folder has its name."""
    def status(out):
        return main([*words.split(), "--pictures", str(tmp_path / "drawn"), "--out",
                     str(tmp_path / out)])
    assert status("0") == 0
    for picture in (tmp_path / "drawn").iterdir():
        picture.unlink()
        picture.mkdir()
    assert status("1") == 1 and "not drawn: " in capsys.readouterr().err


def test_an_empty_value_is_taken_where_an_option_means_it():
    assert parser().parse_args(["report", ".", "--figures="]).figures == ""


def test_an_interrupt_while_modules_are_imported_is_a_word(monkeypatch, capfd):
    monkeypatch.setattr(sys, "excepthook", None)
    mpi.expect_interrupt(True)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capfd.readouterr().err == "interrupted\n"


def test_an_interrupt_before_a_verb_is_a_word_and_errors_are_printed_at_once():
    """By the guard, which does that where nobody else prints errors."""
    done = run_python("-c", "import sys; from bench.__main__ import command\n"
                            "sys.excepthook = None\ndef interrupted():\n"
                            "    assert sys.excepthook is sys.__excepthook__\n"
                            "    raise KeyboardInterrupt\ncommand(interrupted)")
    assert done.returncode == 130 and done.stderr == "interrupted\n"


@pytest.mark.parametrize("words, name", [(["--help"], ""), ([], "MM3D_BACKEND")])
def test_the_self_test_refuses_in_one_line(words, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["selftest", *words])
    monkeypatch.setenv(name or "MM3D_TRANSPORT", "nonsense")
    assert selftest.main() == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ") and found.err.count("\n") == 1 and not found.out


def test_names_of_verbs_and_kinds_differ():
    assert len({*verbs.names(), *KINDS, *verbs.kinds()}) == len(verbs.names()) + 2 * len(KINDS)


@pytest.mark.parametrize("words, said", [
    (["reproduce"], "reproduce starts mpirun itself"), (["doctor"], "doctor starts the launcher"),
    (["measure", "start"], "start starts mpirun itself")])
def test_what_starts_ranks_is_not_for_mpirun(words, said, monkeypatch, capsys):
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert main(words) == 2
    found = capsys.readouterr()
    assert found.err.startswith(f"error: {said}") and not found.out


@pytest.mark.slow_but_first
@pytest.mark.parametrize("words", ["measure layer --scheme 3dd", "mesure",
                                   "measure layer --schem 3d", "dry --scheme 3dd"])
def test_ranks_say_once_what_is_wrong(words):
    done = run_ranks(2, "-m", "bench", *words.split())
    assert done.returncode != 0 and done.stderr.count("error: ") == 1, done.stderr


@pytest.mark.parametrize("words, name, value", [
    ("dry --ranks 8 --hidden 64 --scheme 2.5D", "scheme", "2.5d"),
    ("train --scheme 1D_SP --gate Sigmoid_Bias", "gate", "sigmoid-bias"),
    ("train --schedule Interleaved:3", "schedule", "interleaved:3"),
    ("draw schedule --schedule ZB_H1 --beside GPipe,zbv", "beside", ["gpipe", "zb-v"]),
    ("run --preset Emulated_Tiny", "preset", "emulated-tiny"),
    ("run --recompute Uniform:2+Selective", "recompute", "uniform:2+selective"),
    ("measure collectives --dtype Float64", "dtype", "float64"),
    ("measure matmul --shape 8 --scheme 3D,2D", "scheme", ["3d", "2d"])])
def test_names_are_taken_in_any_spelling(words, name, value):
    assert getattr(parser().parse_args(words.split()), name) == value


def test_the_library_takes_names_in_any_spelling():
    assert mm3d.scheme("Serial", MPI.COMM_SELF).name == "serial"
    assert build("ZB_H1", 2, 2) == build("zb-h1", 2, 2)
    assert select_rows("Weak", "3D") == select_rows("weak", "3d") != []
    assert load_machine("DGX_H100") == load_machine("dgx-h100")
    with pytest.raises(ValueError, match="scheme '4dd' is unknown: choose one of 1d, .*serial"):
        mm3d.scheme("4dd", MPI.COMM_SELF)


@pytest.mark.parametrize("program", ["bench", "jobs"])
def test_version(program, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{program}.__main__").main(["--version"])
    assert not ended.value.code and capsys.readouterr().out == f"mm3d {mm3d.__version__}\n"


@pytest.mark.parametrize("program, words", [
    ("bench", {"measure", "matmul", "--beside", "--print-completion"}),
    ("jobs", {"submit", "--test-only"})])
def test_shells_complete_words(program, words, capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{program}.__main__").main(["--print-completion", "bash"])
    assert not ended.value.code and words <= {*re.findall(r"[\w-]+", capsys.readouterr().out)}


def test_completion_without_its_package_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "--print-completion needs the package shtab: pip install 'mm3d[completion]'" in said


@pytest.mark.parametrize("program, words", [
    ("bench", ["x" * 100_000]),
    ("bench", ["run", "--dtype", "a b " * 20_000]), ("bench", ["plan", "--" + "z" * 100_000]),
    ("bench", ["cube", *["word"] * 20_000]), ("jobs", ["x" * 100_000]),
    ("bench", ["train", "--scheme", "y" * 100_000, "--checkpoints", "none"]),
    ("bench", ["dry", "--ranks", "8", "--hidden", "8", "--scheme", "y" * 100_000]),
    ("jobs", ["render", "--site", "cpu", "--table", "y" * 100_000])])
def test_long_texts_are_said_in_short(program, words, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(importlib.import_module(f"{program}.__main__").main(words))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "error: " in printed.err
    assert len(printed.err[printed.err.index("error: "):]) < 1100, len(printed.err)


# --- the verb that shows a product, or a layer, step by step ---------------------------------

def cube(capsys, *words):
    assert main(["cube", "--format", "json", *words]) == 0
    return [part for part in json.loads(capsys.readouterr().out) if "table" in part]


@pytest.mark.parametrize("words, shown", [
    (["--scheme=3d"], 8), (["--scheme=faces"], "0 on 4, 16 on 4 ranks")])
def test_words_of_a_rank_are_told_of_each(capsys, words, shown):
    """And why ranks differ, where they do."""
    assert main(["cube", "--format", "json", *words]) == 0
    steps, *others = json.loads(capsys.readouterr().out)
    assert steps["rows"][0][-2] == shown
    assert [one.get("notes") for one in others[:-1]] == ["Why ranks differ:"] * (shown != 8)


@pytest.mark.parametrize("words", [
    ["--scheme=3d"], ["--scheme=2.5d"], ["--scheme=2d"], ["--scheme=1d", "--form=down"],
    ["--grid=2x1x3", "--form=up", "--backward", "--shape=12,5,7"]])
def test_words_stand_beside_the_closed_form(capsys, words):
    steps, beside = cube(capsys, *words)
    kinds = [row[1] for row in steps["rows"]]
    assert "multiply" in kinds and len(kinds) > 1
    assert [row[1] for row in beside["rows"]] == [row[2] for row in beside["rows"]]
    assert sum(row[-1] for row in steps["rows"]) == sum(row[1] for row in beside["rows"]) > 0


def test_a_layer_is_shown_part_by_part(capsys):
    parts, beside = cube(capsys, "--scheme=1d-sp", "--grid=2", "--form=layer")
    assert [row[:3] for row in parts["rows"][:2]] == [["ln1", "outer", ",x,"],
                                                      ["attention.qkv", "inner", ",,x"]]
    assert {row[0] for row in beside["rows"]} == {"all-gather along x", "reduce-scatter along x"}
