"""Two jobs, or a job and a reader, in one folder: what has a name is whole at any moment."""
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import mm3d
from mm3d.checkpoints.folder import checkpoints
from checkpoint_models import Calls, names, saved, transformer


def small(seed: int = 0):
    """A model of two arrays, of which a hundred saves do not take long."""
    model = transformer(seed=seed)
    model.trained = model.trained[:2]
    return model


def filled(value: float):
    model = small()
    for t in model.trained:
        t.master[...] = value
    return model


@pytest.mark.slow_but_first
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("other_step, keep", [(3, 1), (4, 1), (2, 3)])
def test_another_job_saves_at_any_moment_of_a_save(tmp_path, monkeypatch, other_step, keep):
    """The whole save of the other, before each call of the system of this one: what has a name
    afterwards is whole, both are there if the step is the same, and nothing else."""
    one, other, probe = filled(1), filled(2), small(seed=1)
    for at in range(1, 200):
        folder = tmp_path / str(at)
        mm3d.save(folder, filled(0), step=1)
        with monkeypatch.context() as patch:
            calls = Calls(patch, at, lambda: mm3d.save(
                folder, other, step=other_step, keep=keep), "close")
            mm3d.save(folder, one, step=3, keep=keep)
            count = calls.count
        found = {}
        for path in checkpoints(folder):
            values = np.unique(restored_values(path, probe))
            assert len(values) == 1, (at, path)
            found[path.name] = values[0]
        assert sorted(found) == names(folder), at
        if other_step == 3 and count >= at:
            assert {1, 2} <= {*found.values()} and len(found) == 2 + (keep == 3)
        elif (other_step, keep) != (4, 1):    # which makes step 3 an old one
            assert 1 in found.values()
        if count < at:
            break
    else:
        raise AssertionError("it never ended")
    assert at > 20


def restored_values(path: Path, model) -> np.ndarray:
    """All elements of one checkpoint, read as the only one of a folder."""
    alone = path.parent.with_name(f"{path.parent.name}-alone")
    shutil.rmtree(alone, ignore_errors=True)
    alone.mkdir()
    shutil.copytree(path, alone / path.name)
    mm3d.restore(alone, model)
    return np.concatenate([np.ravel(t.master) for t in model.trained])


def test_the_second_writer_is_told(tmp_path, monkeypatch):
    """While the first writes, and when the step is there by the time that it is done."""
    told = []
    with monkeypatch.context() as patch:
        Calls(patch, 12, lambda: told.append(saved(tmp_path, filled(2), 3)), "close")
        with pytest.warns(UserWarning, match="another job saved step 3 .* is step-00000003.1$"):
            mm3d.save(tmp_path, filled(1), step=3)
    assert "another job is saving in" in told[0] and names(tmp_path) == [
        "step-00000003", "step-00000003.1"]


@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_reader_while_a_writer_removes(tmp_path, monkeypatch):
    """At any moment: the newest that is there when the reader comes to it."""
    for at in range(1, 200):
        folder = tmp_path / str(at)
        mm3d.save(folder, filled(1), step=1)
        with monkeypatch.context() as patch:
            model = small(seed=1)
            calls = Calls(patch, at, lambda: mm3d.save(folder, filled(2), step=2, keep=1),
                          "close", "preadv")
            step = mm3d.restore(folder, model).step
        assert all((t.master == step).all() for t in model.trained)
        if calls.count < at:
            break
    assert 5 < at < 199


@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_jobs_of_which_neither_is_done_before_the_other_begins(tmp_path, monkeypatch):
    """One stops before a call, the other goes up to one of its own, and both go on in turn."""
    probe, arrived, go = small(seed=1), threading.Event(), threading.Event()
    for number, (first, second) in enumerate((a, b) for a in range(2, 24, 6)
                                             for b in range(2, 24, 6)):
        folder, count, threads = tmp_path / str(number), {}, []

        def other():
            mm3d.save(folder, filled(2), step=3)

        def watched(original):
            def call(*given, **options):
                me = threading.current_thread().name
                count[me] = count.get(me, 0) + 1
                if (me, count[me]) == ("MainThread", first):
                    threads.append(threading.Thread(target=other, name="other"))
                    threads[0].start()
                    assert arrived.wait(60)
                elif (me, count[me]) == ("other", second):
                    arrived.set()
                    assert go.wait(60)
                return original(*given, **options)
            return call

        arrived.clear(), go.clear()
        with monkeypatch.context() as patch:
            for name in (*Calls.NAMES, "close"):
                patch.setattr(os, name, watched(getattr(os, name)))
            mm3d.save(folder, filled(1), step=3)
            go.set()
            threads[0].join(60)
        assert names(folder) == ["step-00000003", "step-00000003.1"], (first, second)
        values = [np.unique(restored_values(path, probe)) for path in checkpoints(folder)]
        assert sorted(map(list, values)) == [[1], [2]], (first, second)
