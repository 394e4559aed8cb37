"""The verb `schedule`, and its pictures' numbers."""
import pytest

from bench.__main__ import main
from bench.prediction.pipelines import schedule_costs
from bench.prediction.pipelines.schedule_costs import ComparedPipeline
from mm3d.training.schedules import build, format_schedule

SMALL = ["schedule", "--schedule", "zb-h1", "--stages", "3", "--microbatches", "4"]


def test_a_schedule_is_printed_and_read_again(tmp_path, capsys):
    assert main([*SMALL, "--beside", "1f1b,interleaved:3"]) == 0
    printed, _, tables = capsys.readouterr().out.partition("\n\n")
    assert printed + "\n" == format_schedule(build("zb-h1", 3, 4))
    assert "interleaved:3: " in tables and "pending" in tables
    file = tmp_path / "mine.txt"
    file.write_text(printed)
    assert main(["schedule", "--file", str(file), "--times", "1,1.3,0.7", "--hop", "1/10"]) == 0
    assert capsys.readouterr().out.startswith(printed)


def test_times_are_shared_among_the_chunks_of_a_rank():
    """All schedules have the same work, so that their costs can be compared."""
    pipeline = ComparedPipeline(4, 8)
    timelines = {name: schedule_costs.timed(name, pipeline)
                 for name in ("1f1b", "interleaved:3", "zb-v", "auto")}
    assert {one.work for one in timelines.values()} == {(24,) * 4}
    assert timelines["1f1b"].bubble == 9 and timelines["interleaved:3"].bubble == 3
    assert timelines["zb-v"].bubble == 0


@pytest.mark.parametrize("text, match", [
    ("F0 BW0\nBW0 F0\n", "rule 'order' of a schedule: rank 1, action 0, BW of micro-batch 0"),
    ("F0 Q0\n", "rule 'text' of a schedule: rank 0, action 1, 'Q0'")])
def test_a_wrong_file_is_refused_in_one_line(text, match, tmp_path, capsys):
    file = tmp_path / "mine.txt"
    file.write_text(text)
    assert main(["schedule", "--file", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {file}: {match}")
    assert said.err.count("\n") == 1


def test_a_file_that_is_no_text_is_refused(tmp_path, capsys):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"F0 \xff")
    assert main(["schedule", "--file", str(file)]) == 2
    said = capsys.readouterr().err
    assert "mine.txt: is no text in UTF-8, as its byte 3 shows; a schedule as" in said


@pytest.mark.parametrize("word", ["nan", "inf", "abc", "-1", "1/0"])
def test_a_hop_that_is_no_number_is_refused(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, f"--hop={word}"])
    assert f"--hop: '{word}': a number of at least 0 would do" in capsys.readouterr().err


@pytest.mark.parametrize("words, match", [
    (["--schedule", "zb", "--stages", "2", "--microbatches", "2"], "'zb' is unknown"),
    (["--schedule", "1f1b", "--stages", "2"], "give --microbatches too"),
    (["--schedule", "dualpipe-v", "--stages", "2", "--microbatches", "3"], "at least 4 micro"),
    ([*SMALL[1:], "--kept", "2"], "--kept 2: a share"),
    ([*SMALL[1:], "--beside", "auto", "--max-activations", "1/2"], "memory for one micro-batch"),
    ([*SMALL[1:], "--picture", "a.bmp"], "ends in .png, .svg or .pdf"),
    (["--file", "/no/such/file"], "no such file"), (["--file", "/"], "Is a directory"),
    ([*SMALL[1:], "--beside", "interleaved:0"], "a number of chunks of at least 1"),
    (["--schedule", "1f1b", "--stages", "8", "--microbatches", "1000000000"], "at most 262144"),
    (["--schedule", "auto", "--stages", "1000000000", "--microbatches", "1"], "at most 262144"),
    (["--schedule", "auto", "--stages", "512", "--microbatches", "512"], "at most 32768 would do"),
    (["--schedule", "1f1b", "--beside", "auto", "--stages", "512", "--microbatches", "512"],
     "at most 32768 would do"),
    (["--schedule", "interleaved:1000000000", "--stages", "2", "--microbatches", "2"],
     "at most 262")])
def test_what_cannot_be_meant_is_refused(words, match, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["schedule", *words]))
    assert ended.value.code == 2
    assert match in capsys.readouterr().err


def test_more_than_the_memory_is_named(capsys):
    assert main([*SMALL, "--max-activations", "2"]) == 0
    assert "MEMORY: zb-h1 holds the activations of 3 micro-batches, more than 2" in (
        capsys.readouterr().out)
