"""What a test makes is freed after it."""
import functools
import os

import pytest

import mm3d
from mm3d import control_groups
from mm3d.grid.grid import Grid


@pytest.fixture
def have_cores(monkeypatch):
    """Let this process have some cores, its launcher others, and a quota of their time."""
    def have(own: int, launcher: int | None = None, quota: float | None = None):
        monkeypatch.setattr(control_groups, "cpu_quota", lambda: quota)
        found = {0: set(range(own)), os.getppid(): set(range(launcher or own))}
        monkeypatch.setattr(os, "sched_getaffinity", found.__getitem__, raising=False)
    return have


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Free what a test has made and not freed, the last first: MPI has few communicators.

    After a failure it stays, as the other ranks may not come.
    """
    made = {}

    def wrap(kind, name, act):
        original = getattr(kind, name)

        @functools.wraps(original)
        def call(self, *given, **options):
            original(self, *given, **options)
            act(self)
        patch.setattr(kind, name, call)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Grid, mm3d.Mesh, mm3d.Pipeline, mm3d.GPT):
            wrap(kind, "__init__", lambda one: made.setdefault(id(one), one))
            wrap(kind, "free", lambda one: made.pop(id(one), None))
        result = yield
        while made:
            made.popitem()[1].free()
    return result
