"""The preset that `reproduce` chooses where none is named."""
import json

import pytest

from bench.__main__ import main, parser
from bench.cluster.run import mpi_refusal, refusal
from bench.cluster.spec import CLUSTER_ENV, Cluster
from bench.command_line.best_preset import choose_preset
from bench.records import journal
from bench.verbs import reproduce
from mm3d import launcher

REFUSED = "this kernel does not let this user make namespaces"


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """No rank of mpirun, and in no cluster."""
    for name in (*launcher.RANK_VARIABLES, *launcher.LOCAL_SIZE_VARIABLES, "PMI_SIZE", CLUSTER_ENV,
                 "MM3D_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def choose(tmp_path, *words, why=""):
    tried = []
    given = ["reproduce", "--out", str(tmp_path), *words]
    chosen = choose_preset(parser(given).parse_args(given),
                           lambda cluster: tried.append(cluster) or why)
    return *chosen, tried


def test_the_best_is_what_the_machine_can(tmp_path):
    preset, why, tried = choose(tmp_path)
    assert preset == "emulated" and "MPI works" in why and tried == [Cluster(2, 1, 5e7)]
    preset, why, _ = choose(tmp_path, why=REFUSED)
    assert preset == "laptop" and why.endswith(f"cannot emulate a cluster: {REFUSED}")


@pytest.mark.parametrize("words, why", [
    (["--work", "compute"], "because of --work"), (["--backend=cupy"], "--backend cupy"),
    (["--work=wait", "--machine=longhorn"], "because of --work and --machine"),
    (["--ranks=8,128", "--scheme=1d-sp"], "as 128 ranks do not fit into an emulated cluster, 16 "),
])
def test_nothing_is_tried_where_ranks_are_told_what_to_do(tmp_path, words, why):
    preset, said, tried = choose(tmp_path, *words)
    assert preset == "laptop" and why in said and not tried


def test_in_a_cluster_ranks_compute(tmp_path, monkeypatch):
    monkeypatch.setenv(CLUSTER_ENV, Cluster(4, 2).to_environment())
    assert choose(tmp_path)[0] == "laptop"


@pytest.mark.parametrize("preset", ["emulated", "laptop"])
def test_what_was_begun_goes_on_with_its_choice(tmp_path, preset):
    begun = {"event": "begin", "at": "2030-01-01T00:00:00+00:00", "order": 1, "rows": ["a"],
             "settings": {"preset": preset}}
    log = tmp_path / journal.JOURNAL
    log.write_text(json.dumps(begun) + "\n")
    other = {"emulated": (REFUSED, "laptop"), "laptop": ("", "emulated")}[preset]
    found, why, tried = choose(tmp_path, why=other[0])
    assert found == preset and f"with which {tmp_path} was begun" in why and not tried
    assert choose(tmp_path, "--fresh", why=other[0])[0] == other[1]
    with log.open("a") as file:
        file.write(json.dumps({"event": "end", "outcome": "complete"}) + "\n")
    assert choose(tmp_path, why=other[0])[0] == other[1]
    log.write_text(json.dumps(begun | {"settings": {"preset": "tiny"}}) + "\n")
    assert choose(tmp_path, why=other[0])[0] == other[1]


def test_the_choice_and_its_time_are_one_line_and_its_words_go_inside(tmp_path, monkeypatch,
                                                                      capsys):
    inside = []
    monkeypatch.setattr(reproduce, "choose_preset", lambda arguments: ("emulated", "for a reason"))
    monkeypatch.setattr(reproduce, "run_verb_inside",
                        lambda cluster, words, on_all: inside.append((str(cluster), words)) or 0)
    assert main(["reproduce", "--ranks=8", f"--out={tmp_path}"]) == 0
    assert inside == [("16x4:50Mbit", ["reproduce", "--ranks=8", f"--out={tmp_path}",
                                       "--preset=emulated", "--equal-tokens"])]
    (line,) = capsys.readouterr().out.splitlines()
    assert line == ("preset emulated, for a reason; 8 rows, about 2 minutes on two cores, "
                    "as 26 take 23")
    assert main(["reproduce", "--preset=emulated", "--equal-tokens", f"--out={tmp_path}"]) == 0
    assert inside[-1][1] == ["reproduce", "--preset=emulated", "--equal-tokens",
                             f"--out={tmp_path}"]
    assert capsys.readouterr().out == "preset emulated; 26 rows, about 23 minutes on two cores\n"


@pytest.mark.slow
def test_a_real_cluster_is_tried():
    if why := refusal(Cluster(1, 1, 1e8)):
        pytest.skip(why)
    assert mpi_refusal(Cluster(2, 1, 5e7)) == ""
    said = refusal(Cluster(2, 1, 5e7), ["sh", "-c", "echo first; echo no luck >&2; exit 3"])
    assert said == "sh in it ended with status 3: no luck"


def test_a_precise_reproduction_has_less_software_and_more_rounds_of_64_ranks(tmp_path,
                                                                              monkeypatch):
    rounds = []
    monkeypatch.setenv(CLUSTER_ENV, Cluster(16, 4, 5e7).to_environment())
    monkeypatch.setattr(reproduce, "measure_round", lambda arguments, cases, wanted, log: (
        rounds.append((wanted["round"], len(cases), reproduce.run_options(
            arguments, tmp_path, 1).count("--software-share=0.1"))) or 0))
    words = ["reproduce", "--preset=emulated", "--table=weak", "--ranks=8,64", "--precise"]
    assert main([*words, f"--out={tmp_path / 'a'}"]) == 0
    assert rounds == [(1, 5, 1), (2, 3, 1), (3, 3, 1)]
    rounds.clear()
    assert main([*words, "--software-share=none", f"--out={tmp_path / 'b'}"]) == 0
    assert [share for *_, share in rounds] == [0, 0, 0]
