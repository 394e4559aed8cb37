"""What cannot be removed is a warning, and never the end of a save; what is written stays."""
import fcntl
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import mm3d
from checkpoint_models import names, saved, transformer


def link_old(folder: Path) -> None:
    (folder / "step-00000001").rename(folder.with_name("bulk"))
    (folder / "step-00000001").symlink_to(folder.with_name("bulk"))


def dangling(folder: Path) -> None:
    link_old(folder)
    shutil.rmtree(folder.with_name("bulk"))


def plain_file(folder: Path) -> None:
    shutil.rmtree(folder / "step-00000001")
    (folder / "step-00000001").write_text("notes")


def unfinished_link(folder: Path) -> None:
    folder.with_name("bulk").mkdir()
    (folder.with_name("bulk") / "index.h5").write_text("mine")
    (folder / ".step-00000003.writing").symlink_to(folder.with_name("bulk"))


@pytest.mark.parametrize("spoil, stays, word", [
    (link_old, [], ""), (dangling, [], ""), (plain_file, ["step-00000001"], ""),
    (lambda folder: (folder / "step-00000001/notes.txt").touch(), ["step-00000001"],
     "could not be removed: it also holds notes.txt"),
    (lambda folder: (folder / "step-00000001/blocks-00001.h5").mkdir(),
     [".step-00000001.deleting"], "step-00000001 could not be removed"),
    (lambda folder: (folder / ".step-00000003.writing").touch(), [".step-00000003.writing"],
     ".step-00000003.writing could not be removed"),
    (unfinished_link, [".step-00000003.writing"], "it is a link"),
    (lambda folder: (folder / ".step-00000003-abcd-ef.writing").symlink_to(folder / "nothing"),
     [".step-00000003-abcd-ef.writing"], "it is a link"),
    (lambda folder: (folder / ".step-00000000.deleting/index.h5").mkdir(parents=True),
     [".step-00000000.deleting"], "deleting could not be removed")])
def test_what_cannot_be_removed_is_a_warning_with_its_path(tmp_path, spoil, stays, word):
    folder, model = tmp_path / "run", transformer()
    for step in (1, 2):
        mm3d.save(folder, model, step=step)
    spoil(folder)
    text = [saved(folder, model, step, keep=2) for step in (3, 4, 5)]
    assert word in text[0] and bool(word) == bool(text[0])
    assert not word or str(folder) in text[0]
    found = [name for name in names(folder) if name not in ("step-00000004", "step-00000005")]
    assert [re.sub("(?<=step-00000001)-[0-9a-f]{8}", "", name) for name in found] == stays
    if spoil is link_old:
        assert names(folder.with_name("bulk")) == ["blocks-00000.h5", "index.h5"]
    if spoil is unfinished_link:
        assert names(folder.with_name("bulk")) == ["index.h5"]


@pytest.mark.parametrize("spoil", ("link", "dangling", "file"))
def test_a_name_that_is_taken_by_anything_is_taken(tmp_path, spoil):
    model = transformer()
    taken = tmp_path / "step-00000003"
    if spoil == "file":
        taken.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        taken.symlink_to(tmp_path / ("elsewhere" if spoil == "link" else "nothing"))
    assert mm3d.save(tmp_path, model, step=3).name == "step-00000003.1"


def test_a_link_that_leads_nowhere_is_not_passed_over(tmp_path):
    """The newest step is what was asked for: an older one in its place would go unnoticed."""
    model = transformer()
    mm3d.save(tmp_path, model, step=1)
    (tmp_path / "step-00000002").symlink_to(tmp_path / "unmounted")
    with pytest.raises(OSError, match="step-00000002 cannot be read, step=1 is there too"):
        mm3d.restore(tmp_path, model)
    assert mm3d.restore(tmp_path, model, step=1).step == 1


def test_names_that_are_alike_are_none_of_a_checkpoint(tmp_path):
    alike = ["step-00000001.bak", "step-1x", "xstep-00000001", "step-00000001.", "step--1",
             "step-\u0661", ".step-1.writings"]
    for name in alike:
        (tmp_path / name).mkdir()
    for step in (5, 6):
        assert saved(tmp_path, transformer(), step, keep=1) == ""
    assert names(tmp_path) == sorted([*alike, "step-00000006"])


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_a_folder_that_cannot_be_listed_is_refused_in_one_line(tmp_path):
    """What is written there could not be found again."""
    model, folder = transformer(), tmp_path / "run"
    saved(tmp_path / "mine", model, 1)    # all is imported while files of this user can be read
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    folder.chmod(0o300)
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_uid == os.geteuid() and len(path.parts) > 2:
            path.chmod(path.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        for call in (lambda: mm3d.save(folder, model, step=1),
                     lambda: mm3d.restore(folder, model)):
            with pytest.raises(OSError, match="who may not list .*run cannot find checkpoints "
                                              "there: chmod u.rwx") as caught:
                call()
            assert "\n" not in str(caught.value)
    finally:
        os.seteuid(0)
    assert names(folder) == []


# --- Of another machine ----------------------------------------------------------------------

def leave(folder: Path, name: str, age: float = 0, files=("index.h5", "blocks-00000.h5")) -> Path:
    """A folder that some job has written aside, last changed `age` seconds ago."""
    path = folder / name
    path.mkdir(parents=True)
    for file in files:
        (path / file).write_bytes(b"x")
    for entry in (*path.iterdir(), path):
        os.utime(entry, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("files", ((), ("index.h5",), ("blocks-00000.h5",)))
@pytest.mark.parametrize("name", (".step-00000007.writing", ".step-00000007-0-1.writing"))
def test_it_cannot_be_told_whether_another_machine_writes(tmp_path, name, files):
    """Neither of one whose name has no machine, as names had none before: not for a day."""
    model, path = transformer(), leave(tmp_path, name, files=files)
    text = saved(tmp_path, model, 8)
    assert str(path) in text and "cannot be told" in text and path.is_dir()
    shutil.rmtree(path)
    leave(tmp_path, name, age=25 * 3600, files=files)
    assert saved(tmp_path, model, 9) == "" and not path.exists()


def test_a_lock_that_is_seen_says_that_another_machine_writes(tmp_path):
    path = leave(tmp_path, ".step-00000007-0-1.writing", age=1e7)
    with open(path / "index.h5", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = saved(tmp_path, transformer(), 8)
    assert "another job is saving" in text and path.is_dir()
