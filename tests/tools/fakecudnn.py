"""A cuDNN frontend for `fakecupy`: attention on the side of kernels, with the real one's rules.

Graphs are described, built for one layout, and run with addresses.  What cuDNN 9.19 refuses for an
H200 (features not in packs of 8, gradients of one query of one key), so does this.
"""
import math
import types

import numpy as np

from fakecupy import Stream, at, kernel
from fakelibs import KINDS
from mm3d.model import functional
from mm3d.model.attention import windows

FLOAT, HALF, BFLOAT16 = 0, 2, 14


class NotSupported(RuntimeError):
    """Its `cudnnGraphNotSupportedError`."""


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=None, uid=None) -> None:
        self.dim, self.stride, self.data_type, self.uid, self.output = (
            dim, stride, data_type, uid, False)

    def __getattr__(self, name: str):
        def change(value):
            setattr(self, name.removeprefix("set_"), value)
            return self
        return change if name.startswith("set_") else object.__getattribute__(self, name)

    def array(self, pointers) -> np.ndarray:
        """By sequence, position, head and feature; every feature after its neighbour."""
        count = 1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride))
        flat = at(pointers[self.uid], KINDS[self.data_type], count, True)
        steps = [step * flat.itemsize for step in self.stride]
        assert self.stride[3] == 1 and pointers[self.uid] % 16 == 0
        return np.lib.stride_tricks.as_strided(flat, self.dim, steps).swapaxes(1, 2)


class Graph:
    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle) -> None:
        assert io_data_type in (HALF, BFLOAT16)
        assert intermediate_data_type == compute_data_type == FLOAT
        self.built = False

    def tensor(self, **what) -> Tensor:
        return Tensor(**what)

    def sdpa(self, q, k, v, generate_stats, **mask):
        assert generate_stats
        self.mask, self.read, self.made = mask, [q, k, v], [Tensor(), Tensor()]
        return self.made

    def sdpa_backward(self, q, k, v, o, do, stats, use_deterministic_algorithm, **mask):
        assert use_deterministic_algorithm
        self.mask, self.read = mask, [q, k, v, o, do, stats]
        self.made = [Tensor(), Tensor(), Tensor()]
        return self.made

    def build(self, modes) -> None:
        queries, keys, d = self.read[0].dim[2], self.read[1].dim[2], self.read[0].dim[3]
        backward = len(self.read) > 3
        if d % 8 or backward and d > 256:
            raise NotSupported("hidden_dim should be multiple of 8")
        if backward and queries == keys == 1:
            raise NotSupported("s_q = s_kv = 1 is not supported")
        assert all(t.output for t in self.made), "a result that nobody asked for"
        assert self.mask["attn_scale"] == 1 / math.sqrt(d)
        assert len({t.uid for t in self.read + self.made}) == len(self.read + self.made)
        corner = self.mask.get("diagonal_alignment")
        right = self.mask.get("diagonal_band_right_bound")
        self.causal = corner is not None
        assert right == (0 if self.causal else None)
        if queries > keys:
            raise NotSupported("only supported with max_s_q <= max_s_kv")
        self.first = keys - queries if corner == "BOTTOM_RIGHT" else 0
        self.pair, self.limit = (functional.attention_forward,
                                 functional.attention_backward), self.causal
        left = self.mask.get("diagonal_band_left_bound")
        if left is not None:    # a query sees so many keys, its own position's among them
            assert self.causal and left >= 1
            self.pair, self.limit = (windows.window_attention_forward,
                                     windows.window_attention_backward), left
        self.built = True

    def get_workspace_size(self) -> int:
        return 64

    def execute(self, pointers, workspace, handle) -> None:
        assert self.built and Stream.every[handle["stream"]] is Stream.computing
        at(workspace, np.uint8, 64, True)[...] = 0xEE
        read, made = ([t.array(pointers) for t in some] for some in (self.read, self.made))

        def work() -> None:
            wide = [a.astype(np.float64) for a in read]
            forward, backward = (one.__wrapped__ for one in self.pair)
            qkv, found = wide[:3], [np.empty(a.shape) for a in made]
            if len(read) == 3:
                _, lse = forward(*qkv, self.first, self.limit, found[0])
                found[1] = lse.swapaxes(1, 2)[..., None]
            else:
                out, do, lse = wide[3:]
                expected, same = np.empty(out.shape), lse[..., 0].swapaxes(1, 2)
                forward(*qkv, self.first, self.limit, expected)
                assert np.allclose(out, expected, atol=.05 * max(1, abs(expected).max())), "others"
                backward(do, *qkv, same, self.first, self.limit, *found)
            for a, b in zip(made, found):
                a[...] = b
        kernel(work)


def module(version: int = 91900) -> types.ModuleType:
    """What `import cudnn` gives."""
    cudnn = types.ModuleType("cudnn")
    cudnn.backend_version = lambda: version
    cudnn.create_handle = dict
    cudnn.set_stream = lambda handle, stream: handle.update(stream=stream)
    cudnn.data_type = types.SimpleNamespace(FLOAT=FLOAT, HALF=HALF, BFLOAT16=BFLOAT16)
    cudnn.diagonal_alignment = types.SimpleNamespace(TOP_LEFT="TOP_LEFT",
                                                     BOTTOM_RIGHT="BOTTOM_RIGHT")
    cudnn.heur_mode = types.SimpleNamespace(A=0, FALLBACK=1)
    cudnn.cudnnGraphNotSupportedError, cudnn.pygraph = NotSupported, Graph
    return cudnn
