"""Attributes, steps and numbers: refused before anything is written, or there to the bit."""
import enum
import fcntl
import math
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

import mm3d
from mm3d.checkpoints.index_file import CHECKSUM_LINE, read_index
from checkpoint_models import as_before, everything, same, transformer
from reference import all_refuse


def refused(model, folder, **options) -> str:
    """The one line that all ranks raise, with nothing written."""
    with pytest.raises(ValueError) as caught:
        mm3d.save(folder, model, **options)
    lines = model.comm.allgather(str(caught.value))
    assert len(set(lines)) == 1 and "\n" not in lines[0] and not os.listdir(folder)
    return lines[0]


class Name(str, enum.Enum):
    FIRST = "first"


# Attributes that would be lost; steps and numbers to keep that are not whole.
LOST = [
    ("note", None), ("note", Path("x")), ("note", {}), ("note", {"a": {"b": 1}}),
    ("tags", ["a", "b"]), ("seed", 2 ** 64), ("seed", -2 ** 63 - 1), ("text", "a\0b"),
    ("text", "\ud800"), ("text", "\udc80"), ("text", b"bytes"), ("rate", 1j),
    ("rate", np.longdouble(1) / 3), ("all", np.arange(3)),
    ("comment", "mine"), ("format", "mine"), ("dropout_step", 7),
    ("step", -1), ("step", 10.0), ("step", True), ("step", "10"), ("step", 2 ** 70),
    ("step", np.float64(3)), ("step", math.nan), ("keep", 0), ("keep", -1), ("keep", 2.0),
    ("keep", None), ("keep", True), ("keep", "3")]


@pytest.mark.ranks(1, 4)
def test_what_would_be_lost_is_refused(comm, shared_tmp_path):
    """On every rank and before anything is written; others would wait for rank 0."""
    model = transformer(comm)
    for name, value in LOST:
        assert refused(model, shared_tmp_path, **{name: value}).startswith(f"{name}={value!r}")


def test_a_seed_of_any_length_of_masks_is_kept(tmp_path):
    """Which the generator of masks takes; in a text beyond the numbers of 64 bits of a file."""
    for seed in (-2 ** 63, 2 ** 64 - 1, 2 ** 64, -2 ** 70):
        model = transformer(dropout=0.5, seed=seed)
        mm3d.save(tmp_path, model)
        kept = read_index(mm3d.restore(tmp_path, model).path).training["mask_seed"]
        assert int(kept) == seed and isinstance(kept, str) == (seed in (2 ** 64, -2 ** 70))


@pytest.mark.parametrize("name", ("", "a\0b", "\ud800", "n" * 70000))
def test_names_that_hdf5_does_not_have(tmp_path, name):
    refused(transformer(), tmp_path, **{name: 1})


@pytest.mark.ranks(4)
def test_ranks_that_differ_are_named(comm, shared_tmp_path):
    """Before anything is written, and before anything is read; no rank waits for another."""
    model, last = transformer(comm), comm.rank == 3

    def check(act, said: str) -> None:
        with all_refuse(comm, said):
            act()
        assert not os.listdir(shared_tmp_path)
    for name, other in dict(folder=shared_tmp_path / "other", step=2, keep=4, note=None).items():
        options = dict(folder=shared_tmp_path, step=1, keep=3, note="a")
        if last and other is None:
            del options[name]
        elif last:
            options[name] = other
        both = {key: options[key] for key in ("folder", "step")}
        said = rf"the ranks differ in (attribute )?{name} \("
        check(lambda: mm3d.save(model=model, **options), said)
        if name in both:
            check(lambda: mm3d.restore(model=model, **both), said)
    both = dict(folder=shared_tmp_path, step=1, model=model)
    for name, value, said in (("", None, r"optimizer(.name)? \("), ("lr", 0.2, r"optimizer.lr \("),
                              ("weight_decay", 0.5, r"optimizer.weight_decay \(")):
        options = both | {"optimizer": mm3d.SGD(model, lr=0.1)}
        if last and name:    # after the ranks have compared what they gave
            setattr(options["optimizer"], name, value)
        elif last:
            options["optimizer"] = value
        check(lambda: mm3d.save(**options), f"the ranks differ in {said}")
        if name != "lr":    # which is restored
            check(lambda: mm3d.restore(**options), f"the ranks differ in {said}")
    own, other = (mm3d.SGD(one, lr=0.1) for one in (model, transformer(comm, layers=2)))
    for call in mm3d.save, mm3d.restore:
        check(lambda: call(**both, optimizer=other if last else own),
              "refused on rank 3: .* another model")
    model.dropout_step = 4 + last
    check(lambda: mm3d.save(**both), r"the ranks differ in dropout_step \(4 on ranks 0 to 2, 5 on")
    del model.dropout_step
    for options in dict(step=2.5), dict(keep=0), dict(note="\0"):
        given = dict(step=1) | (options if last else {})
        check(lambda: mm3d.save(shared_tmp_path, model, **given),
              "refused on rank 3: .* (should|would do)")


def test_numbers_of_the_optimizer_are_checked_too(tmp_path):
    model = transformer()
    optimizer = mm3d.SGD(model, 0.1)
    optimizer.lr = 2 ** 70
    with pytest.raises(ValueError, match="^lr="):
        mm3d.save(tmp_path / "new", model, optimizer)
    assert not os.listdir(tmp_path)


def test_a_step_is_restored_by_a_whole_number(tmp_path):
    model = transformer()
    mm3d.save(tmp_path, model, step=np.int64(1), keep=np.int8(2))
    assert mm3d.restore(tmp_path, model, step=np.int32(1)).step == 1
    with pytest.raises(ValueError, match="step=True"):
        mm3d.restore(tmp_path, model, step=True)


def test_attributes_come_back(tmp_path):
    kept = dict(text="moby-dick", loss=0.5, seed=2 ** 64 - 1, low=-2 ** 63, flag=True, none="",
                long="x" * 100000, least=5e-324, infinite=-math.inf, zero=-0.0)
    given = kept | dict(rate=np.float32(0.5), small=np.float16(0.1), done=np.bool_(False),
                        name=np.str_("né"), first=Name.FIRST, count=np.uint64(2 ** 64 - 1))
    expected = kept | dict(rate=0.5, small=float(np.float16(0.1)), done=False, name="né",
                           first="first", count=2 ** 64 - 1)
    model = transformer()
    mm3d.save(tmp_path, model, **given, undefined=math.nan)
    found = mm3d.restore(tmp_path, model).attributes
    assert math.isnan(found.pop("undefined"))
    assert repr(sorted(found.items())) == repr(sorted(expected.items()))


# --- What the index says ---------------------------------------------------------------------

def test_a_flipped_bit_anywhere_in_the_index_is_found(tmp_path):
    """Texts, numbers, and the checksum itself; a bit of the text, the end, and every 29th byte."""
    model = transformer()
    path = mm3d.save(tmp_path, model, text="hello") / "index.h5"
    whole = path.read_bytes()
    text, length = whole.index(b"hello"), len(whole)
    for place in {*range(0, length, 29), *range(text, text + 5), *range(length - 40, length)}:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(OSError, match="index.h5 is "):
            read_index(path.parent)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(OSError, match="index.h5 is damaged"):
            read_index(path.parent)
    path.write_bytes(whole)
    assert mm3d.restore(tmp_path, model).attributes == {"text": "hello"}


def test_an_index_is_read_while_another_program_has_locked_it(tmp_path):
    """As HDF5 locks what it opens."""
    model = transformer()
    path = mm3d.save(tmp_path, model, step=1)
    with open(path / "index.h5", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert mm3d.restore(tmp_path, model).step == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_of_the_version_before_are_read(tmp_path):
    """Without a checksum of the whole index, but with one of the table of blocks."""
    model = transformer()
    optimizer = mm3d.AdamW(model, 0.1)
    path = mm3d.save(tmp_path, model, optimizer, step=3, text="hello")
    as_before(path)
    other = transformer(seed=1)
    again = mm3d.AdamW(other, 0.2)
    found = mm3d.restore(tmp_path, other, again)
    assert (found.step, found.attributes, again.lr) == (3, {"text": "hello"}, 0.1)
    assert same(everything(other, again), everything(model, optimizer))
    data = (path / "index.h5").read_bytes()
    (path / "index.h5").write_bytes(data.replace(b'"offset":', b'"offsft":'))
    with pytest.raises(OSError, match="damaged"):
        mm3d.restore(tmp_path, other)


def test_an_index_of_a_later_version_is_not_damaged(tmp_path):
    model = transformer()
    path = mm3d.save(tmp_path, model, step=1) / "index.h5"
    data = CHECKSUM_LINE.sub(b"", path.read_bytes()).replace(b"version 2", b"version 3")
    path.write_bytes(data + f"\nCRC-32 of what is before: {zlib.crc32(data):08x}\n".encode())
    with pytest.raises(OSError, match="version 3") as caught:
        mm3d.restore(tmp_path, model)
    assert "damaged" not in str(caught.value)
