"""Compute a Transformer layer by ColossalAI's 3-D layers, in one of its processes.

These are the layers that the paper's authors published (``colossalai.legacy``, Apache-2.0): the
package is the user's, and nothing of it is copied.  ``serve.py`` calls the methods by name, after
all processes have met by gloo.  Attention and GELU are PyTorch's.  Nothing here needs mm3d.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
import time
import types
import warnings
from typing import Any, Callable, Iterator

import numpy as np

# Modules that the package imports for other purposes, and that may be missing.
UNUSED = ("apex", "bitsandbytes", "diffusers", "fabric", "galore_torch", "google", "ninja", "peft",
          "ray", "rpyc", "sentencepiece", "tensornvme")
# Words that each of n ranks receives or sends by a bucket algorithm, over those of its argument.
WORDS: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n}


class _CollectiveCounter:
    """Count the collectives that a library calls through `torch.distributed`, and their words.

    They are counted from now on: before a library that keeps them is imported.  Since `reset`,
    there were so many `calls`, and `words` that this rank receives (gathers) or sends (sums).
    """

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self.reset()
        for name, words in WORDS.items():
            setattr(dist, name, self._counted(getattr(dist, name), words))
        for name in ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all_single"):
            setattr(dist, name, self._refused(name))

    def reset(self) -> None:
        """Forget what was counted."""
        self.calls, self.words, self.counting = 0, 0.0, False

    def _counted(self, collective: Callable, words: Callable[[int], float]) -> Callable:
        def call(*given, group=None, **more):
            if self.counting:
                self.calls += 1
                own = more.get("input_tensor", more.get("input", given[-1] if given else None))
                own = more.get("tensor", own)
                self.words += words(self._dist.get_world_size(group)) * own.numel()
            return collective(*given, group=group, **more)
        return call

    def _refused(self, name: str) -> Callable:
        collective = getattr(self._dist, name)

        def call(*given, **more):
            if self.counting:
                raise RuntimeError(f"torch.distributed.{name} is not counted")
            return collective(*given, **more)
        return call


class _Missing:
    """Find empty modules in the place of `UNUSED` ones that are missing, and of their parts."""

    def __init__(self) -> None:
        self._names = [name for name in UNUSED if importlib.util.find_spec(name) is None]

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return how to make such a module; None for all others."""
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        """Make a module that has a class of any name."""
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})
        module = types.ModuleType(spec.name)
        module.__getattr__ = attribute
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing: it is empty."""


@contextlib.contextmanager
def _on_host(torch: Any) -> Iterator[None]:
    """Let ColossalAI keep the states of its random numbers on the host, as there is no GPU."""
    own = torch.cuda.is_available, torch.distributed.init_process_group
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    torch.distributed.init_process_group = lambda **told: None    # they have met already
    try:
        yield
    finally:
        torch.cuda.is_available, torch.distributed.init_process_group = own


class ColossalLayer:
    """One rank of a layer, x + Attention(LN(x)), then y + MLP(LN(y)), as in `mm3d.Transformer`.

    Ranks i, j, k of the directions in which weights, inputs and outputs are gathered: activations
    outside a pair of linear layers are divided by sequences (i, j) and features k, and inside by
    sequences (i, k) and features j; weights by rows (k, i) and columns j, and (j, i) and k.

    `case` has "heads", "dtype", and "rank" and "ranks"; `arrays` "input", "output gradient", and
    the parameters of the layer, all global.
    """

    def __init__(self, torch: Any, case: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.torch, self.heads, self.ranks = torch, case["heads"], case["ranks"]
        self.depth = round(self.ranks ** (1 / 3))
        self.counts = _CollectiveCounter(torch.distributed)
        self.place = self._launch(case)
        self.hidden = arrays["input"].shape[-1]
        self.p = {name.removeprefix("layers.0."): a for name, a in arrays.items()}
        self.shape = arrays["input"].shape
        self.x, self.dy = (self._tensor(arrays[name][self._sequences()][..., self._part("k")])
                           for name in ("input", "output gradient"))
        self.x.requires_grad_()
        self.layers = self._make_layers()
        self.y: Any = None

    def _launch(self, case: dict[str, Any]) -> dict[str, int]:
        """Start ColossalAI on the ranks; return this rank's place in its directions."""
        torch = self.torch
        sys.meta_path.append(_Missing())
        warnings.filterwarnings("ignore", category=FutureWarning)    # of names in PyTorch
        with _on_host(torch):
            from colossalai import __version__
            from colossalai.legacy.context import ParallelMode
            from colossalai.legacy.core import global_context
            from colossalai.legacy.initialize import launch
            torch.cuda.is_available = lambda: False
            launch(dict(parallel=dict(tensor=dict(mode="3d", size=self.ranks))), case["rank"],
                   self.ranks, "localhost", 0, backend="gloo", verbose=False)
            torch.cuda.is_available = lambda: True    # else it has no seeds for its layers
            global_context.set_seed(0)
        self.about = {"colossal": __version__}
        return {letter: global_context.get_local_rank(getattr(ParallelMode, f"PARALLEL_3D_{name}"))
                for letter, name in (("i", "WEIGHT"), ("j", "INPUT"), ("k", "OUTPUT"))}

    def _make_layers(self) -> dict[str, Any]:
        """Make the norms and linear layers, in the order in which they compute."""
        from colossalai.legacy.nn.layer.parallel_3d import LayerNorm3D, Linear3D
        dtype, h, found = self.x.dtype, self.hidden, {}
        for name, columns in (("ln1", 0), ("attention.qkv", 3 * h), ("attention.proj", h),
                              ("ln2", 0), ("mlp.up", 4 * h), ("mlp.down", h)):
            found[name] = (LayerNorm3D(h, eps=1e-5, dtype=dtype) if not columns else
                           Linear3D(4 * h if name == "mlp.down" else h, columns, dtype=dtype))
            with self.torch.no_grad():
                for part, own in found[name].named_parameters():
                    whole = self._ordered(name, self.p[f"{name}.{part}"])
                    own.copy_(self._tensor(whole[self._block(name, part)]))
        return found

    def _ordered(self, name: str, a: np.ndarray, back: bool = False) -> np.ndarray:
        """Order the columns of queries, keys and values head by head, or `back`."""
        if name != "attention.qkv":
            return a
        first, second = (self.heads, 3) if back else (3, self.heads)
        parts = a.reshape(*a.shape[:-1], first, second, self.hidden // self.heads)
        return np.swapaxes(parts, -3, -2).reshape(a.shape)

    def _tensor(self, a: np.ndarray) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(a))

    def _part(self, letters: str, place: dict[str, int] | None = None,
              size: int | None = None) -> slice:
        """Return the part of `size` elements, by default features, that ranks `letters` have."""
        number = 0
        for letter in letters:
            number = number * self.depth + (place or self.place)[letter]
        length = (size or self.hidden) // self.depth ** len(letters)
        return slice(number * length, (number + 1) * length)

    def _sequences(self, place: dict[str, int] | None = None) -> slice:
        return self._part("ij", place, self.shape[0])

    def _block(self, name: str, part: str, place: dict[str, int] | None = None) -> tuple:
        """Return the block of a parameter, with its columns ordered, that a rank has."""
        columns = {"attention.qkv": 3, "mlp.up": 4}.get(name, 1) * self.hidden
        rows, wide = ("ji", "k") if name in ("attention.proj", "mlp.down") else ("ki", "j")
        if name.startswith("ln"):
            return (self._part("k", place),)
        if part == "bias":
            return (self._part(wide, place, columns),)
        height = (4 if name == "mlp.down" else 1) * self.hidden
        return self._part(rows, place, height), self._part(wide, place, columns)

    def _forward(self) -> Any:
        F, layers, x = self.torch.nn.functional, self.layers, self.x
        qkv = layers["attention.qkv"](layers["ln1"](x))
        q, k, v = qkv.unflatten(-1, (-1, 3, self.hidden // self.heads)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = x + layers["attention.proj"](mixed)
        wide = F.gelu(layers["mlp.up"](layers["ln2"](y)), approximate="tanh")
        return y + layers["mlp.down"](wide)

    def step(self) -> dict[str, float]:
        """Run forward and backward from no gradients; return begin and end."""
        self.x.grad = None
        for layer in self.layers.values():
            layer.zero_grad(set_to_none=True)
        self.torch.distributed.barrier()
        begin = time.perf_counter()
        self.y = self._forward()
        self.y.backward(self.dy)
        return {"begin": begin, "end": time.perf_counter()}

    def count(self) -> dict[str, Any]:
        """Return this rank's collective calls and words in a step, and bytes saved for backward.

        Tensors that share their memory count once, and parameters not at all.
        """
        own = {p.untyped_storage().data_ptr() for layer in self.layers.values()
               for p in layer.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in own:
                saved[memory.data_ptr()] = memory.nbytes()
            return tensor
        self.counts.reset()
        self.counts.counting = True
        with self.torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.step()
        found = {"calls": self.counts.calls, "words": self.counts.words,
                 "saved": sum(saved.values())}
        self.counts.reset()
        return found

    def check(self) -> dict[str, np.ndarray]:
        """Return the global results of a step on rank 0, by the names that checks use."""
        self.step()
        own = {"output": self.y.detach(), "input gradient": self.x.grad}
        for name, layer in self.layers.items():
            own |= {f"{name}.{part}": p.grad for part, p in layer.named_parameters()}
        everyone: list[Any] = [None] * self.ranks
        self.torch.distributed.all_gather_object(
            everyone, (self.place, {name: a.numpy() for name, a in own.items()}))
        return {} if self.torch.distributed.get_rank() else self._assemble(everyone)

    def _assemble(self, everyone: list[Any]) -> dict[str, np.ndarray]:
        """Put the blocks of all ranks together."""
        found: dict[str, np.ndarray] = {}
        for place, blocks in everyone:
            for name, a in blocks.items():
                layer, _, part = name.rpartition(".")
                if not layer:
                    at: tuple = (self._sequences(place), slice(None), self._part("k", place))
                    shape: tuple[int, ...] = self.shape
                else:
                    at, shape = self._block(layer, part, place), self._ordered(
                        layer, self.p[name]).shape
                found.setdefault(name, np.full(shape, np.nan, a.dtype))[at] = a
        named = {}
        for name, a in found.items():
            layer, _, part = name.rpartition(".")
            named[f"gradient of layers.0.{name}" if layer else name] = (
                self._ordered(layer, a, back=True) if layer else a)
        return named
