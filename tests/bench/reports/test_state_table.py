"""Bytes of a rank's state by stage of ZeRO, as ``bench dry --data`` prints them."""
from bench.__main__ import main


def test_figure_1_of_zero(capsys):
    """120, 31.4, 16.6 and 1.9 GB: 25 x 12 x 5000^2 = 7.5 billion parameters, 64 replicas."""
    assert main(["dry", "--ranks", "64", "--layers", "25", "--hidden", "5000", "--heads", "50",
                 "--batch", "64", "--seq", "8", "--dtype", "float16", "--data", "64"]) == 0
    rows = [line.replace(",", "").split() for line in capsys.readouterr().out.splitlines()
            if line[:2] in ("0:", "1:", "2:", "3:")]
    assert [round(int(row[-2]) / 1e9, 1) for row in rows] == [120, 31.4, 16.6, 1.9]


def test_copies_of_weights_count_in_the_state(capsys):
    common = ["--hidden", "48", "--heads", "4", "--layers", "2", "--batch", "16", "--seq", "8",
              "--data", "2", "--dtype", "float32", "--format", "csv"]
    values = {}
    for scheme, ranks in (("serial", 1), ("2d", 4), ("2.5d", 8)):
        more = ["--grid", "2x2x2"] if scheme == "2.5d" else []
        assert main(["dry", "--scheme", scheme, "--ranks", str(2 * ranks), *more, *common]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if "0: replicas" in one]
        values[scheme] = int(line.partition("0: replicas,")[2].split(",")[0])
    assert values["2.5d"] == values["2d"] < values["serial"] / 3
