"""Messages of the library, as the command line prints them."""
import pytest

from bench.__main__ import main as bench_main, parser, run_verb
from bench.errors import UsageError, in_options
from jobs.__main__ import main as jobs_main
from support import status_of

NAMES = {"grid", "data", "recompute", "experts", "expert_top", "expert_parallel", "capacity"}


@pytest.mark.parametrize("text, printed", [
    ("name a grid of 2, such as grid=(2, 1, 1)", "name a grid of 2, such as --grid 2x1x1"),
    ("so grid=(2,) should have 3 sizes", "so --grid 2 should have 3 sizes"),
    ("data=3 does not divide", "--data 3 does not divide"),
    ("recompute='some' is unknown: choose", "--recompute some is unknown: choose"),
    ("top=9 experts, count=8: expert_parallel=3",
     "--expert-top 9 experts, --experts 8: --expert-parallel 3"),
    ("capacity=None would do", "--capacity none would do"),
    ("--grid 2x2: MM3D_ABORT=0 and --data=3", "--grid 2x2: MM3D_ABORT=0 and --data=3"),
    ("a == b, zero=1", "a == b, zero=1"),
])
def test_arguments_become_options(text, printed):
    assert in_options(text, NAMES) == printed


@pytest.mark.parametrize("main, verb", [(bench_main, "run"), (jobs_main, "render")])
def test_a_policy_is_refused_as_it_is_typed(main, verb, capsys):
    assert status_of(main, [verb, "--recompute", "some"]) == 2
    assert "--recompute some is unknown" in capsys.readouterr().err


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [["measure", "collectives"], ["train", "--steps", "1"]])
def test_a_grid_is_advised_as_it_is_typed(comm, shared_tmp_path, words):
    arguments = parser(words[:2]).parse_args([*words, "--out", str(shared_tmp_path)])
    with pytest.raises(UsageError, match="such as --grid 2x1x1") as caught:
        run_verb(arguments.verb_file.run, arguments, comm)
    assert "grid=" not in str(caught.value)


@pytest.mark.parametrize("program, verb", [
    ("bench", ["merge", "a.h5", "b"]), ("bench", ["measure", "gemm"]),
    ("jobs", ["render", "--site", "gpu4"])])
def test_an_interrupt_is_a_word(program, verb, capsys, monkeypatch):
    """On this machine alone, on ranks, and of jobs: Ctrl-C leaves no traceback."""
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(f"{program}.__main__.run_verb", interrupted)
    assert status_of({"bench": bench_main, "jobs": jobs_main}[program], verb) == 130
    assert capsys.readouterr().err == "interrupted\n"
