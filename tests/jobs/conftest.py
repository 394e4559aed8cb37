"""A Slurm for the tests of jobs, and programs that play its commands."""
import pytest

import slurm_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as started:
        yield started
    assert all(daemon.poll() is not None for daemon in started.daemons)


class Commands:
    """A PATH with programs that answer as told, and write down their arguments and variables."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.said = folder / "bin", folder / "said"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", f"{self.folder}:/usr/bin:/bin")
        for name in ("sbatch", "squeue", "sacct", "scontrol"):
            self.answer(name, "exit 1")

    def answer(self, name, body):
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "$(basename "$0") $*" >> {self.said}\n'
                        f"env >> {self.said}.env\n{body}\n")
        path.chmod(0o755)

    def asked(self, name):
        return [line for line in self.said.read_text().splitlines() if line.startswith(name)]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    return Commands(tmp_path, monkeypatch)
