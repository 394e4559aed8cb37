"""Say which tensors of Hugging Face's files hold the parameters of this library.

A tensor of a linear layer is (out, in) there, and (in, out) here and in GPT-2's.  Here queries,
keys and values are one array, the two products up of a gated perceptron another, and all experts
of a layer one; there each has a tensor of its own, but for GPT-2's c_attn.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mm3d.model.sizes import ModelSizes

Slices = tuple[slice, ...]
Shape = tuple[int, ...]

# Of GPT-2, and of Llama and its relatives: the prefix of all tensors but the head's, which files
# may leave out, and of those of a layer.
GPT2_PREFIXES = ("transformer.", "h.")
LLAMA_PREFIXES = ("model.", "layers.")
HEAD = {"head.weight": ("lm_head.weight",)}
GPT2 = {
    "embedding.weight": ("wte.weight",), "positions.weight": ("wpe.weight",),
    "ln1": ("ln_1",), "attention.qkv": ("attn.c_attn",), "attention.proj": ("attn.c_proj",),
    "ln2": ("ln_2",), "mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",), "norm": ("ln_f",)}
LLAMA = {
    "embedding.weight": ("embed_tokens.weight",), "ln1": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.proj": ("self_attn.o_proj",), "ln2": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",),
    "experts.router.weight": ("block_sparse_moe.gate.weight",),
    "experts.up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "experts.down": ("block_sparse_moe.experts.{}.w2",), "norm": ("norm",)}
TABLES = {"gpt2": GPT2, "qwen2_moe": LLAMA | {
    "experts.router.weight": ("mlp.gate.weight",),
    "experts.up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.down": ("mlp.experts.{}.down_proj",),
    "experts.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "experts.shared.down": ("mlp.shared_expert.down_proj",),
    "experts.shared.gate.weight": ("mlp.shared_expert_gate.weight",)}}
ROUTED = ("experts.up", "experts.down")
# Beginnings of the names of buffers, which older files have beside the parameters.
BUFFERS = ("attn.bias", "attn.masked_bias", "self_attn.rotary_emb.inv_freq")


@dataclass(frozen=True)
class Piece:
    """State that a part of a tensor in a file is a part of a parameter."""

    tensor: str    # name of the tensor
    transposed: bool    # whether the tensor's dimensions are in the opposite order
    # The part of the global array as stored here; a number for a dimension that the tensor does
    # not have.
    target: tuple[int | slice, ...]
    # Where the part begins in the tensor, in the order of the dimensions here.
    origin: tuple[int, ...]

    @property
    def end(self) -> Shape:
        """Return where the part ends in the tensor, in the tensor's order."""
        kept = [one for one in self.target if isinstance(one, slice)]
        ends = tuple(start + one.stop - one.start for start, one in zip(self.origin, kept))
        return ends[::-1] if self.transposed else ends

    def within(self, place: Slices) -> tuple[tuple[int | slice, ...], Slices] | None:
        """Return two indices: of this piece in a block, `place` in the global array, and of the
        same elements in the tensor, in the tensor's order; None if the block has none of them.
        """
        index: list[int | slice] = []
        box = []
        origins = iter(self.origin)
        for here, block in zip(self.target, place, strict=True):
            if isinstance(here, int):
                if not block.start <= here < block.stop:
                    return None
                index.append(here - block.start)
                continue
            start, stop = max(here.start, block.start), min(here.stop, block.stop)
            if start >= stop:
                return None
            index.append(slice(start - block.start, stop - block.start))
            shift = next(origins) - here.start
            box.append(slice(start + shift, stop + shift))
        return tuple(index), tuple(box[::-1] if self.transposed else box)


def pieces_of(kind: str, name: str, shape: Shape, sizes: ModelSizes) -> list[Piece]:
    """Return the pieces of tensors that a parameter of global `shape`, as stored, consists of.

    Raises ValueError when the family `kind`, such as "llama", has no such parameter.
    """
    root, layers = GPT2_PREFIXES if kind == "gpt2" else LLAMA_PREFIXES
    table = TABLES.get(kind, LLAMA)
    local, prefix = name, root
    if name.startswith("layers."):
        _, number, local = name.split(".", 2)
        prefix = f"{root}{layers}{number}."
    part, _, what = local.rpartition(".")
    if local in HEAD:
        return [Piece(*HEAD[local], True, _whole(shape), (0, 0))]
    if local in table:
        return [Piece(prefix + table[local][0], False, _whole(shape), (0,) * len(shape))]
    if part not in table:
        raise ValueError(f"{kind} of Hugging Face has no tensor for {name!r}")
    tensors = [f"{prefix}{one}.{what}" for one in table[part]]
    experts = part in ROUTED
    rows = what == "weight" and len(shape) > 1
    transposed, lead = rows and kind != "gpt2", shape[1:2] if experts else shape[:1]
    inner = shape[experts + rows:]
    found = []
    for expert in range(shape[0]) if experts else [None]:
        for tensor, start, target in _columns(tensors, inner, sizes):
            ahead = () if expert is None else (expert,)
            whole = _whole(lead) if rows else ()
            found.append(Piece(tensor.format(expert), transposed, (*ahead, *whole, *target),
                               (*(0 for _ in whole), *start)))
    return found


def _columns(tensors: list[str], shape: Shape, sizes: ModelSizes
             ) -> Iterator[tuple[str, tuple[int], tuple[int | slice, ...]]]:
    """Yield the pieces of a layer's outputs: tensor, where they begin in it, and their part here.

    The outputs are (out,), or (products, out) of several products in one array.  There the queries
    of a group that share a key are products of their own; in the tensor they are neighbours.
    """
    if len(shape) == 1:
        yield tensors[0], (0,), _whole(shape)
        return
    whole = slice(0, shape[1])
    if len(tensors) == 1:    # side by side in one tensor
        for number in range(shape[0]):
            yield tensors[0], (number * shape[1],), (number, whole)
        return
    own = shape[0] - len(tensors) + 1    # of the first tensor, such as queries of a group
    if own == 1:
        yield tensors[0], (0,), (0, whole)
    else:
        for key, number in itertools.product(range(sizes.kv_heads), range(own)):
            columns = slice(key * sizes.head, (key + 1) * sizes.head)
            yield tensors[0], ((key * own + number) * sizes.head,), (number, columns)
    for number, tensor in enumerate(tensors[1:], own):
        yield tensor, (0,), (number, whole)


def _whole(shape: Shape) -> Slices:
    """Return the slices of a whole array."""
    return tuple(slice(0, n) for n in shape)


def tensor_shapes(pieces: Mapping[str, list[Piece]]) -> dict[str, Shape]:
    """Return the shape of every tensor, from the pieces of all parameters."""
    found: dict[str, Shape] = {}
    for piece in itertools.chain(*pieces.values()):
        before = found.get(piece.tensor, (0,) * len(piece.end))
        found[piece.tensor] = tuple(map(max, before, piece.end))
    return found


def canonical(kind: str, tensor: str) -> str | None:
    """Return a tensor's name with the prefix of the family; None for a buffer."""
    root, layers = GPT2_PREFIXES if kind == "gpt2" else LLAMA_PREFIXES
    own = tensor.removeprefix(root)
    if own.startswith(layers) and own.split(".", 2)[-1] in BUFFERS:
        return None
    return own if own in HEAD["head.weight"] else root + own
