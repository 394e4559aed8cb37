"""Lines on what is done now, where standard error is no terminal, and on what has failed."""
from mpi4py import MPI

from bench.command_line.progress import StatusLine
from bench.command_line.publish import publish
from records import matmul_record


def test_a_log_has_a_line_from_time_to_time(capsys):
    with StatusLine() as status:
        status.show("searching")    # too soon
    with StatusLine(every=0) as status:
        status.show("7B, TP 2: predicting")
    said = capsys.readouterr()
    assert said.err == "7B, TP 2: predicting\n" and not said.out


def test_a_file_that_cannot_be_written_is_told_with_all_other_errors(tmp_path, capsys):
    assert publish(matmul_record(), tmp_path / "none", "a", MPI.COMM_SELF) == 1
    said = capsys.readouterr()
    assert said.err.startswith("failed: a could not be written in ") and not said.out
