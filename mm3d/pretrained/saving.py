"""Save a model in the format of Hugging Face, such that transformers reads it."""

import itertools
import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mm3d.arrays.backend import host_dtype
from mm3d.arrays.plain_numbers import check_whole
from mm3d.checkpoints.folder import remove_files, sync
from mm3d.checkpoints.together import on_each, on_root
from mm3d.grid.agreement import same_arguments
from mm3d.hugging_face.config_file import CONFIG, config_of
from mm3d.hugging_face.names import Piece, Shape, Slices, tensor_shapes
from mm3d.model.parameters import Parameter
from mm3d.pretrained.files import INDEX, ONE, safetensors
from mm3d.pretrained.loading import model_pieces
from mm3d.training.gpt import GPT

SHARD = 5 * 10 ** 9    # bytes


def save_pretrained(model: GPT, folder: str | Path, shard_bytes: int = SHARD) -> Path:
    """Save the parameters of a model so that transformers and `mm3d.load_pretrained` read them.

    Every rank must call it.  Tensors are gathered one after another on the rank that writes their
    file, the ranks in turn, so that one of them holds at most a file at a time.  The folder gets
    its name when all of it is on the disk.

    Parameters
    ----------
    model : GPT
        The model.  Its masters are saved, in their type.
    folder : path
        The folder, which is not there yet.
    shard_bytes : int
        The most bytes of a file, unless a single tensor has more.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ImportError
        On every rank alike, without the package safetensors.
    ValueError
        On every rank alike, when no family of Hugging Face computes the same, or `shard_bytes`
        is no whole number of at least 1.
    OSError
        On every rank alike, when the folder is there already, or something could not be written
        on any rank.
    """
    if not isinstance(model, GPT):
        raise TypeError(f"save_pretrained: {type(model).__name__} is no mm3d.GPT")
    folder, comm = Path(folder), model.comm
    with same_arguments(comm, "save_pretrained") as given:
        given |= {"folder": str(folder), "shard_bytes": shard_bytes}
        check_whole("shard_bytes", shard_bytes)
        safetensors()
        config = config_of(model.config.model)
        pieces = model_pieces(config["model_type"], model.config.model)
        dtype = host_dtype(model.trained[0].master)
        files = _divide(tensor_shapes(pieces), dtype.itemsize, shard_bytes)
    problem = f"no model was written in {folder}"
    aside = on_root(comm, problem, lambda: _begin(folder))
    try:
        for number, (file, shapes) in enumerate(files.items()):
            writer = number % comm.size
            arrays = _gather(model, pieces, shapes, writer)
            on_each(comm, problem, lambda: arrays and _write(aside / file, arrays))
        on_root(comm, problem, lambda: _finish(aside, folder, files, config | {
            "dtype": str(dtype)}))
    except OSError:
        if comm.rank == 0:
            remove_files(aside)
        raise
    return folder


def _divide(shapes: Mapping[str, Shape], itemsize: int,
            most: int) -> dict[str, dict[str, Shape]]:
    """Divide tensors among files of at most so many bytes; return their shapes by file."""
    groups: list[dict[str, Shape]] = [{}]
    left = most
    for name, shape in shapes.items():
        size = itemsize * math.prod(shape)
        if size > left and groups[-1]:
            groups.append({})
            left = most
        groups[-1][name] = shape
        left -= size
    if len(groups) == 1:
        return {ONE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
            for number, group in enumerate(groups, 1)}


def _begin(folder: Path) -> Path:
    """Create a folder aside, and return it."""
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} is there already: another name would do")
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.writing")
    aside.mkdir(parents=True)
    return aside


def _gather(model: GPT, pieces: Mapping[str, list[Piece]], shapes: Mapping[str, Shape],
            writer: int) -> dict[str, np.ndarray]:
    """Gather tensors on the rank `writer`, one after another; nothing on the others."""
    parts: dict[str, list[tuple[Slices, Parameter, tuple, bool]]] = {name: [] for name in shapes}
    for p in model.trained:
        place = p.layout.slices(p.grid, p.shape)
        for piece in pieces[p.name] if p.counted else ():
            if piece.tensor in parts and (found := piece.within(place)):
                index, box = found
                parts[piece.tensor].append((box, p, index, piece.transposed))
    arrays = {}
    for name, own in parts.items():
        blocks = []
        for box, p, index, transposed in own:
            part = p.grid.backend.to_host(p.master)[index]
            blocks.append((box, np.ascontiguousarray(part.T if transposed else part)))
        every = model.comm.gather(blocks, root=writer)
        if every is not None:
            every = [*itertools.chain(*every)]
            whole = arrays[name] = np.empty(shapes[name], every[0][1].dtype)
            for box, block in every:
                whole[box] = block
    return arrays


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file of tensors."""
    safetensors().numpy.save_file(arrays, path, metadata={"format": "pt"})
    sync(path)


def _finish(aside: Path, folder: Path, files: Mapping[str, Mapping[str, Shape]],
            config: dict[str, Any]) -> None:
    """Write the configuration, and the index of several files; give the folder its name."""
    texts = {CONFIG: config}
    if len(files) > 1:
        size = np.dtype(config["dtype"]).itemsize
        total = sum(size * math.prod(shape) for some in files.values() for shape in some.values())
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": {
            name: file for file, shapes in files.items() for name in shapes}}
    for name, content in texts.items():
        (aside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync(aside / name)
    sync(aside)
    aside.rename(folder)
    sync(folder.parent)
