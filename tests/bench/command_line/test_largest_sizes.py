"""Sizes that no machine holds are refused in one line before any work, or take no time."""
import pytest
from mpi4py import MPI

from bench.__main__ import main
from bench.command_line.measuring import check_memory, check_model_memory
from bench.errors import UsageError
from bench.instruments.available_memory import total_memory

HUGE = str(10 ** 9)
MODEL = "--ranks 8 --hidden 64 --heads 4"


@pytest.mark.parametrize("words, said", [
    (f"dry --ranks 8 --hidden {HUGE} --heads 1000 --batch {HUGE} --seq {HUGE}",
     "too little memory"),
    (f"dry {MODEL} --layers {HUGE} --recompute uniform:100000", "1024 at most would do"),
    (f"dry {MODEL} --experts {HUGE}", "fewer experts would do"),
    (f"plan {MODEL} --experts {HUGE}", "fewer experts would do"),
    (f"measure start --ranks {HUGE}", "at most 4096 ranks")])
def test_what_no_machine_holds_is_refused_in_one_line(words, said, capsys):
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    line, = printed.err.splitlines()
    assert line.startswith("error: ") and said in line and not printed.out


@pytest.mark.parametrize("words", [
    f"dry {MODEL} --layers 2 --batch {HUGE}", f"dry {MODEL} --layers {HUGE}",
    f"dry {MODEL} --layers 2 --batch {HUGE} --seq 8 --machine cpu"])
def test_equal_pieces_of_work_are_played_once(words, capsys):
    assert main(words.split()) == 0


def test_arrays_that_exceed_the_nodes_memory_are_refused():
    room = total_memory()
    check_memory(room // 2, "numpy", MPI.COMM_SELF)
    with pytest.raises(UsageError, match="smaller sizes would do"):
        check_memory(10 ** 6 * room, "numpy", MPI.COMM_SELF)
    check_model_memory(2, 64, 8, None, MPI.COMM_SELF)
    with pytest.raises(UsageError, match="smaller sizes would do"):
        check_model_memory(2, 10 ** 9, 8, None, MPI.COMM_SELF)
