"""`reproduce --paper`: verdicts of made-up cells, of every paper, and files that are refused."""
import itertools
import re
from collections import Counter
from fractions import Fraction

import msgspec
import pytest

from bench.__main__ import main
from bench.papers import formulas, paper, tables
from bench.papers.numbers import MEANINGS, Rounded, compute_reach, judge_number
from bench.reports.formats import render
from support import ROOT, run_python

SEARCHED = "zero-bubble"    # takes a minute; its rows are computed one by one
MADE = """
title = "Made up"
source = "nowhere"
constants = {per = 2}
[[tables]]
name = "Table 1"
columns = ["row", "count", "size", "all", "half"]
rows = [["a", 3, "1.4", "4.2", "2.10"], ["b", 3, "1.4", "4.3", ""]]
[[tables.cells]]
column = "all"
formula = "ratio"
given = {over = ["count", "size"]}
expect = "=~"
[[tables.cells]]
column = "half"
formula = "ratio"
given = {over = ["count", "size"], under = ["per"]}
expect = "=-"
"""


def evaluate(found: paper.Paper, rows: slice = slice(None), but: tuple[str, ...] = ()
             ) -> list[paper.Evaluated]:
    """A paper's columns but some, on some of its rows."""
    return [*paper.evaluate(msgspec.structs.replace(found, tables=[msgspec.structs.replace(
        table, rows=table.rows[rows], cells=[
            msgspec.structs.replace(one, expect=one.expect[rows])
            for one in table.cells if one.formula not in but]) for table in found.tables]))]


@pytest.fixture
def made(tmp_path):
    """Write the made-up paper, with a text in it replaced, and return its path."""
    def write(*change: str) -> str:
        assert not change or MADE.count(change[0]) == 1
        (tmp_path / "made.toml").write_text(MADE.replace(*change) if change else MADE)
        return str(tmp_path / "made.toml")
    return write


@pytest.mark.parametrize("printed, computed, low, high, verdict", [
    ("41.5", "41.54", "41.0", "42.0", "="), ("41.5", "41.45", "41.45", "41.45", "="),
    ("41.5", "41.55", "41.55", "41.55", "t"), ("4187", "4187.5", "4187.5", "4187.5", "t"),
    ("41.5", "41.6", "41.5", "41.7", "~"), ("41.5", "41.6", "41.549", "41.7", "~"),
    ("41.5", "41.6", "41.55", "41.7", "!"), ("41.5", "41.3", "41.2", "41.45", "~"),
    ("41.5", "41.3", "41.2", "41.449", "!"), ("41.5", "41.59", "41.56", "41.7", "t"),
    ("-3", "-3.06", "-3.06", "-3.06", "="), ("-3", "-3.5", "-3.5", "-3.5", "t"),
    ("-3", "-2.5", "-2.5", "-2.5", "="), ("-3", "-4", "-4.2", "-3.4", "~"),
    ("-3", "3", "3", "3", "!"),
    ("6e2", "618", "618", "618", "="), ("6e2", "650", "650", "650", "t"),
    ("600", "618", "618", "618", "!"), ("1.50e3", "1504", "1504", "1504", "="),
    ("0.12", "0.1171875", "0", "1", "=")])
def test_a_number_is_judged(printed, computed, low, high, verdict):
    reach = Fraction(low), Fraction(high)
    found = judge_number(Rounded.read(printed), Fraction(computed), lambda: reach)
    assert found == ((Fraction(computed),) * 2 if verdict == "=" else reach, verdict)


def test_less_is_better_only_where_it_was_searched_for():
    def verdict(computed: str, **how: bool) -> str:
        one = Fraction(computed)
        return judge_number(Rounded.read("0.5"), one, lambda: (one, one), **how)[1]
    assert verdict("0.3", searched=True) == "<"
    assert verdict("0.3") == verdict("0.7", searched=True) == "!"
    assert judge_number(None, Fraction(1), None) == ((1, 1), "-")


@pytest.mark.parametrize("text", ["1,000", "22B", "", "1e-3", ".5", "nan", "1 2", "--3", "4."])
def test_what_is_no_printed_number(text):
    assert Rounded.read(text) is None


def test_the_interval_is_that_of_all_inputs_between_their_halves():
    a, b = Rounded.read("2.0"), Rounded.read("4")
    assert compute_reach(formulas.ratio, {"over": [a, 3], "under": [b]}) == (
        Fraction("5.85") / Fraction("4.5"), Fraction("6.15") / Fraction("3.5"))
    assert compute_reach(formulas.ratio, {"over": [3, Fraction(1, 2)]}) == (Fraction(3, 2),) * 2


def test_an_input_that_is_used_twice_is_one_number():
    a, same = Rounded.read("2.0"), Rounded.read("2.0")
    assert compute_reach(formulas.percent_more, {"new": a, "old": a}) == (0, 0)
    assert compute_reach(formulas.percent_more, {"new": a, "old": same})[1] > 5


def test_too_many_rounded_inputs_are_refused():
    with pytest.raises(ValueError, match="9 inputs are rounded: 8 at most would do"):
        compute_reach(formulas.total, {"parts": [Rounded.read("1") for _ in range(9)]})


def test_a_difference_is_told_with_what_the_inputs_allow(made, capsys):
    path = made('"4.3"', '"5.0"')
    assert main(["reproduce", "--paper", path]) == 1
    told = capsys.readouterr()
    assert "b: 5.0 differs from its printed inputs by +0.80: they give 4.05 to 4.35" in told.out
    assert told.err.startswith("\n1 numbers are not as the files expect:")
    assert "Table 1, all, b: ! and not ~, as 4.20 is computed for 5.0" in told.err


@pytest.mark.parametrize("name", [name for name in paper.list_papers() if name != SEARCHED])
def test_every_verdict_is_as_expected(name):
    found = [*paper.evaluate(paper.load_paper(name))]
    assert found and tables.unexpected(found) == [] and tables.count(found)["="]


def test_rates_of_schedules_agree_in_every_digit():
    """The rows of up to 16 ranks; those of 32 are left to the verb."""
    found = evaluate(paper.load_paper(SEARCHED), slice(9), but=("searched_rate",))
    assert tables.unexpected(found) == [] and tables.count(found) == {"=": 36}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("row", [0, 4, 6])
def test_searched_rates_are_at_least_as_good(row):
    found = evaluate(paper.load_paper(SEARCHED), slice(row, row + 1))
    assert tables.unexpected(found) == []
    rates = {one.computed.column: one.cells[0] for one in found}
    for memory in "12":
        assert rates[f"ZB-{memory}p"].computed >= rates[f"least, {memory}p"].computed
    if row == 0:    # it is not only as good: none is better
        assert rates["ZB-2p"].printed.is_near(*rates["least, 2p"].reach)


def test_the_page_of_results_is_of_these_files():
    text = (ROOT / "results/papers/papers.txt").read_text("utf-8")
    for name in paper.list_papers():
        marks = Counter("".join(one.expect for table in paper.load_paper(name).tables
                                for one in table.cells))
        (line,) = re.findall(rf"^{name} +(.*) yes ", text, re.MULTILINE)
        assert [*map(int, line.split())] == [marks.total() - marks["-"],
                                             *(marks[mark] for mark in MEANINGS)], name


def test_the_page_of_findings_is_of_these_files():
    """But of the paper that takes a minute, whose numbers all follow."""
    found = {name: (text := paper.load_paper(name), [*paper.evaluate(text)])
             for name in paper.list_papers() if name != SEARCHED}
    page = render(tables.findings(found), "text")
    assert (ROOT / "results/papers/findings.txt").read_text("utf-8") == page.rstrip("\n") + "\n"
    assert f"`{page.partition(' ')[0]} do not follow" in (ROOT / "README.rst").read_text("utf-8")
    assert re.search("^Table 4, MFU % +16384 8192 +41  40.4 to 40.5 +[+]0.6$", page, re.MULTILINE)


def test_the_bubbles_of_deepseek_v3_hold_in_a_domain():
    """1F1B's always, ZB1P's where W <= F, DualPipeV's where B = F and W <= B (and once more)."""
    holds = {"1f1b": lambda f, b, w: True, "zb-h1": lambda f, b, w: w <= f,
             "dualpipe-v": lambda f, b, w: b == f and w <= b}
    for name, inside in holds.items():
        for p, *times in itertools.product((2, 4, 8), *[(1, 2, 3)] * 3):
            same = formulas.bubble(name, "bubble", p, 2 * p + 4, times) == (
                formulas.claimed_bubble(name, p, times))
            assert same == inside(*times) or (name, p, times) == ("dualpipe-v", 2, [1, 2, 3])


def test_bytes_of_rings_are_those_that_are_counted():
    """4 all-reduces of 7/8 of two an element, on 8 ranks."""
    assert formulas.tensor_bytes("1d", 8, 1, 12288, 2048) == 4 * 2 * 2 * 2048 * 12288 * 7 // 8


def test_a_file_of_ones_own_is_computed(made, capsys):
    assert main(["reproduce", "--paper", made()]) == 0
    out = capsys.readouterr().out
    assert "2 equal in all printed digits (=), 1 within the rounding of the printed inputs" in out


def test_papers_are_listed(capsys):
    assert main(["reproduce", "--paper", "list"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name}  ", out, re.MULTILINE) for name in paper.list_papers())
    assert main(["reproduce", "--paper", "list", "--format", "csv"]) == 0
    out = capsys.readouterr().out
    one = paper.list_papers()[0]
    assert f"{one}," in out and paper.load_paper(one).title.split(",")[0] in out


def test_all_are_one_line_each():
    found = {name: (text := paper.load_paper(name), list(paper.evaluate(text)))
             for name in ("llama3", "zero")}
    out = render(tables.all_papers(found), "text")
    assert re.search(r"^llama3 +11 +8 +0 +0 +0 +3 +yes", out, re.MULTILINE)
    assert re.search(r"^all +71 +60 +0 +8 +0 +3", out, re.MULTILINE)


@pytest.mark.parametrize("change, match", [
    (('title = "Made up"', ""), "made.toml: missing required field title"),
    (('name = "Table 1"', ""), r"tables\[0\]: missing required field name"),
    (('source = "nowhere"', 'sauce = "no"'), "field 'sauce' is unknown.*; did you mean source"),
    (("constants = {per = 2}", "constants = {per 2}"), "made.toml: "),
    (('formula = "ratio"\ngiven = {over = ["count", "size"]}', 'formula = "ratoi"'),
     "formula 'ratoi' is unknown.*did you mean ratio?"),
    (('{over = ["count", "size"]}', '{over = ["count", "sise"]}'),
     "Table 1, all, a: 'sise' is neither a number nor a column or constant of numbers"),
    (('{over = ["count", "size"]}', '{over = ["count", "row"]}'), "'row' is neither a number"),
    (('{over = ["count", "size"]}', '{above = ["count"]}'), "given 'above': over, under would do"),
    (('given = {over = ["count", "size"]}', ""), "ratio needs over: a column or a constant"),
    (('under = ["per"]', 'under = ["per", 0]'), "Made up, Table 1, half, a: a division by 0"),
    (('expect = "=~"', 'expect = "=~="'), "expect '=~=': one of = ~ t < ! or - for each of 2"),
    (('expect = "=~"', 'expect = "=x"'), "expect '=x'"), (('expect = "=~"', ""), "expect ''"),
    (('columns = ["row"', 'label = ["raw"]\ncolumns = ["row"'), "label 'raw': a name of a column"),
    (('"2.10"],', '"2.10", 7],'), "has 6 values: one for each of 5 columns would do"),
    (('"4.2"', "4.2"), "is no printed number: a text of digits would do"),
    (('"4.2"', "0"), "0 is no printed number"), (('"4.2"', '"1e9999"'), "'1e9999' is no printed"),
    (('"all", "half"]', '"all", "all"]'), "Table 1: 2 columns are called 'all': one would do"),
    (('"4.2"', '"4,2"'), "'4,2' is no printed number")])
def test_a_file_that_is_not_complete_is_refused_in_one_line(change, match, made, capsys):
    assert main(["reproduce", "--paper", made(*change)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and re.search(match, said.err), said.err
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


def test_measuring_does_not_import_what_papers_need():
    done = run_python("-c", "import sys; import bench.verbs.reproduce; print(*sys.modules)")
    found = done.stdout.split()
    assert "bench.verbs.reproduce" in found, done.stderr
    assert not [name for name in found if name.startswith(("mm3d.training", "bench.papers"))]
