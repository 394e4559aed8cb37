"""Ways to spoil a file of results: one attribute or dataset, or some of its numbers."""
from pathlib import Path
from typing import Any, Callable, Iterator

import h5py
import numpy as np

SCALE = ("CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST")
VALUES = {"text": "nonsense", "empty": "", "zero": 0, "negative": -3, "huge": 2 ** 62,
          "fraction": 1e-300, "nan": np.nan, "inf": np.inf, "truth": True, "list": np.arange(3),
          "texts": ["a", "b"], "bytes": np.bytes_(b"x\xff"), "complex": 1j,
          "nothing": h5py.Empty("f8")}
Damage = Callable[[str | Path], None]    # of the file with this path


def edit(change: Callable[[h5py.File], object]) -> Damage:
    """A way to damage a file: `change` is given the open file."""
    def damage(path: str | Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)
    return damage


def sets(place: str, **attributes: Any) -> Damage:
    """Other attributes of a group or dataset."""
    return edit(lambda file: file[place].attrs.update(attributes))


def writes(place: str, value: Any, where: Any = ...) -> Damage:
    """Other numbers in a dataset, or at `where` in it."""
    return edit(lambda file: file[place].__setitem__(where, value))


def spoils(place: str, how: str = "missing", key: str = "") -> Damage:
    """A dataset or group that is spoiled by `mutate`, or an attribute of it."""
    return edit(lambda file: mutate(file, place, key, how))


def places(file: h5py.File) -> list[tuple[str, str]]:
    """All (object, attribute) of a file, and (object, "") for each dataset and group."""
    found = []

    def visit(name: str, item: h5py.HLObject) -> None:
        found.append((name, ""))
        found.extend((name, key) for key in item.attrs if key not in SCALE)
    found.extend(("/", key) for key in file.attrs)
    file.visititems(visit)
    return found


def mutations(file: h5py.File, name: str, key: str) -> Iterator[str]:
    """The ways to spoil what is at this place."""
    yield from ("missing", "reference", *VALUES)
    if not key and isinstance(file[name], h5py.Dataset):
        yield from ("fewer", "one number")
        if file[name].dtype.kind in "iuf":
            yield from (f"all {what}" for what in ("nan", "inf", "negative", "zero", "huge"))


def mutate(file: h5py.File, name: str, key: str, how: str) -> None:
    """Spoil one place of a file that is open for writing."""
    if key:
        del file[name].attrs[key]
        if how != "missing":
            file[name].attrs[key] = file.ref if how == "reference" else VALUES[how]
        return
    if how.startswith("all "):
        values = np.empty(file[name].shape, file[name].dtype)
        with np.errstate(all="ignore"):
            values[...] = np.array(VALUES[how[4:]]).astype(values.dtype)
        file[name][...] = values
        return
    values: Any = file[name][...] if isinstance(file[name], h5py.Dataset) else None
    kept = {k: v for k, v in file[name].attrs.items() if k not in SCALE}
    del file[name]
    if how != "missing":
        file[name] = {"reference": lambda: file.ref, "one number": lambda: 1.5,
                      "fewer": lambda: values[:1] if values.ndim else 7}.get(
                          how, lambda: VALUES[how])()
        file[name].attrs.update(kept)
