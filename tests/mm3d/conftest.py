"""What a test makes is freed after it."""
import functools

import pytest

import mm3d
from mm3d.grid.grid import Grid


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
