"""Load a model of Hugging Face onto a mesh: each rank reads its own blocks."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mm3d.arrays.backend import host_dtype
from mm3d.checkpoints.together import on_each
from mm3d.config import Config, Model, refuse_of_mesh
from mm3d.grid.agreement import same_arguments
from mm3d.hugging_face.config_file import model_from_config, read_config
from mm3d.hugging_face.families import FAMILIES
from mm3d.hugging_face.names import HEAD, Piece, pieces_of, tensor_shapes
from mm3d.model.parameters import Parameter
from mm3d.model.sizes import SIZES, ModelSizes
from mm3d.pretrained.files import Tensor, check_tensors, find_tensors, safetensors
from mm3d.pretrained.shapes import parameter_shapes
from mm3d.training.gpt import GPT
from mm3d.training.mesh import Mesh, check_mesh

TABLE = "positions.weight"


def load_pretrained(folder: str | Path, mesh: Mesh, *, batch: int, seq: int,
                    **fields: Any) -> GPT:
    """Load a model that transformers saved, or that was published in this format.

    Every rank of the mesh must call it.  A rank reads the headers of all files, and of the tensors
    the parts that its blocks consist of.

    Parameters
    ----------
    folder : path
        Has ``config.json``, and ``model.safetensors`` or several such files with an index.
    mesh : Mesh
        The ranks.
    batch, seq : int
        As for `mm3d.GPT`.  Of a table of positions the first `seq` rows are read.
    **fields
        Further fields of `mm3d.config.Model` and `mm3d.config.Division`, such as dtype and zero.

    Returns
    -------
    GPT
        The model, in `dtype`, by default float32, whatever the type in the files is.

    Raises
    ------
    ImportError
        On every rank alike, without the package safetensors.
    OSError
        On every rank alike, when a file is missing or damaged.
    ValueError
        On every rank alike, for a model that nothing here computes, and for tensors that are
        missing, too many, there twice, or of another shape or an unknown type.

    Examples
    --------
    On 4 ranks, from a folder "gpt2"::

        mesh = mm3d.Mesh(comm, stages=2, grid=(2, 1, 1))
        gpt = mm3d.load_pretrained("gpt2", mesh, batch=8, seq=128, dtype="bfloat16")
    """
    folder = Path(folder)
    refuse_of_mesh(fields)
    check_mesh(mesh, "load_pretrained")
    with same_arguments(mesh.comm, "load_pretrained") as given:
        given |= {"folder": str(folder), "batch": batch, "seq": seq} | fields
        config = Config.of(vars(model_from_config(folder, batch=batch, seq=seq)) | fields)
        keys = given["keys"] = read_config(folder)
        kind = keys["model_type"]
        tensors = find_tensors(folder, kind)
        pieces = model_pieces(kind, config.model, len(tensors))
        if config.model.tied:    # some files have the table twice
            tensors.pop(*HEAD["head.weight"], None)
        rows = keys[FAMILIES[kind].sizes["positions"]]
        check_tensors(folder, tensors, tensor_shapes(pieces),
                      {one.tensor: rows for one in pieces.get(TABLE, ())})
    model = GPT(mesh, drawn=False, **vars(config.model), **config.division.given())
    try:
        on_each(mesh.comm, f"{folder} cannot be read",
                lambda: _read_blocks(model.trained, pieces, tensors))
    except OSError:
        model.free()
        raise
    model.refresh()
    return model


def model_pieces(kind: str, model: Model, tensors: float = math.inf) -> dict[str, list[Piece]]:
    """Return the pieces of tensors that each parameter of a model is, by name.

    Raises ValueError for more layers than there are `tensors`, before it lists them.
    """
    if model.layers > tensors:
        raise ValueError(f"layers={model.layers}, but only {tensors} tensors are there: a "
                         f"configuration with no more layers than tensors would do")
    sizes = ModelSizes(*(getattr(model, name) for name in SIZES), model.architecture)
    return {name: pieces_of(kind, name, shape, sizes)
            for name, shape in parameter_shapes(model).items()}


def _read_blocks(parameters: list[Parameter], pieces: Mapping[str, list[Piece]],
                 tensors: Mapping[str, Tensor]) -> None:
    """Read this rank's blocks into the masters."""
    with ExitStack() as closing:
        opened = cache(lambda file: closing.enter_context(safetensors().safe_open(file, "np")))
        for p in parameters:
            place = p.layout.slices(p.grid, p.shape)
            block = np.empty([s.stop - s.start for s in place], host_dtype(p.master))
            for piece in pieces[p.name]:
                if part := piece.within(place):
                    index, box = part
                    tensor = tensors[piece.tensor]
                    found = opened(tensor.file).get_slice(tensor.name)[box]
                    block[index] = found.T if piece.transposed else found
            if block.size:
                p.grid.backend.copy_from_host(block, p.master)
