"""Names are private where text came from outside, and never in what the program wrote."""
import os
import socket
from itertools import cycle

import h5py
import pytest

from bench.cases.selection import select_rows
from bench.records import run_file
from bench.validation.files import find_private_text
from records import made_up

COMMAND = "python -m bench run --preset laptop --out results --machine here.toml"


def private(tmp_path, **environment) -> list[str]:
    """What is found in a made-up run of this environment."""
    run = made_up(select_rows("weak", "3d")[0])
    run.environment.update({"command": COMMAND, "cpu_model": "AMD EPYC", "slurm": "JOB_ID=7",
                            "tuning_variables": "OMP_NUM_THREADS=1"} | environment)
    path = run_file.write_run(run, tmp_path, "a")
    with h5py.File(path) as file:
        return list(find_private_text(file))


def called(monkeypatch, host: str, user: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(os, "getuid", lambda: 2 ** 31 - 7)    # without an entry in passwd
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    if user:
        monkeypatch.setenv("USER", user)


@pytest.mark.parametrize("host, user", [*zip(
    ["laptop", "run", "numpy", "EPYC", "epyc", "results", "h5", "toml", "gemm", "AMD", "localhost",
     "laptop.cluster.org"], cycle(["", "bench", "root", "python", "mm3d"]))])
def test_what_the_program_writes_names_nobody(tmp_path, monkeypatch, host, user):
    called(monkeypatch, host, user)
    assert private(tmp_path) == []


@pytest.mark.parametrize("name, text", [
    ("command", "python -m bench run --out alice"),
    ("command", "python -m bench run --out=node17"),
    ("command", "python -m bench alice.toml --out node17.example.org"),
    ("tuning_variables", "UCX_NET_DEVICES=node17:1"), ("slurm", "JOB_ID=alice")])
def test_a_name_in_text_from_outside_is_found(tmp_path, monkeypatch, name, text):
    called(monkeypatch, "node17.example.org", "alice")
    line, = private(tmp_path, **{name: text})
    assert f"attribute {name} names this user or host" in line


def test_the_name_of_a_processor_is_no_address(tmp_path):
    assert private(tmp_path, cpu_model="ARMv8@1.5GHz") == []
    assert "an address" in private(tmp_path, mpi="Open MPI someone@node17")[0]
