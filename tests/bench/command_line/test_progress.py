"""Lines on what is done now, where standard error is no terminal."""
from bench.command_line.progress import StatusLine


def test_a_log_has_a_line_from_time_to_time(capsys):
    with StatusLine() as status:
        status.show("searching")    # too soon
    with StatusLine(every=0) as status:
        status.show("7B, TP 2: predicting")
    said = capsys.readouterr()
    assert said.err == "7B, TP 2: predicting\n" and not said.out
