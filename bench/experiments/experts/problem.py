"""Make a layer of experts on a mesh, with an input that is routed in a stated way."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import mm3d
from bench.errors import UsageError, as_usage_error
from mm3d.arrays.backend import Array
from mm3d.model.builder import Builder
from mm3d.model.experts.token_order import capacity_of
from mm3d.model.experts.layer import ExpertsLayer
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.draws import MaskKey, draw_normal
from mm3d.model.parameters import Parameter
from mm3d.training.data_parallel import DataParallel
from mm3d.training.expert_parallel import check_experts, expert_ranks
from mm3d.training.mesh import Mesh

ROUTINGS = ("uniform", "skewed", "collapsed")
LAYER_NAME = "layers.0.experts"
FAR = 60.0    # a difference of logits that no random part makes up for


@dataclass(frozen=True)
class ExpertsCase:
    """Describe a layer of experts and its input.

    Attributes
    ----------
    hidden, wide : int
        Features of a token, and of an expert between its two products.
    batch, seq : int
        Global number of sequences, and tokens in each.
    dtype : str
        Type of parameters and activations.
    """

    experts: ExpertOptions
    hidden: int
    wide: int
    batch: int
    seq: int
    dtype: str = "float32"
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Return the global number of tokens."""
        return self.batch * self.seq

    @property
    def flops(self) -> int:
        """Return the operations of the experts' products in forward, where nothing is dropped."""
        return 4 * self.experts.top * self.tokens * self.hidden * self.wide

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of the parameters, by the end of their name."""
        E, h, f = self.experts.count, self.hidden, self.wide
        return {"router.weight": (E, h), "up.weight": (E, h, f), "up.bias": (E, f),
                "down.weight": (E, f, h), "down.bias": (E, h)}

    def draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a global array from N(0, 1), in float64."""
        return draw_normal(self.seed, name, shape, tuple(slice(0, n) for n in shape))

    def parameters(self) -> dict[str, np.ndarray]:
        """Draw all parameters but the router's, which depends on the routing."""
        found = {}
        for name, shape in self.shapes().items():
            if name != "router.weight":
                scale = 10 if name.endswith("bias") else math.sqrt(shape[1])
                found[name] = (self.draw(name, shape) / scale).astype(self.dtype)
        return found

    def router_weight(self, routing: str) -> np.ndarray:
        """Return the router's weight (E, h) that routes as one of `ROUTINGS` says.

        The first feature of every token is 1, so the first column adds to the logits: nothing for
        "uniform"; minus the logarithm of the expert's number n for "skewed", so that shares fall
        about as 1 / n; and much for the first k experts for "collapsed".
        """
        count, top = self.experts.count, self.experts.top
        weight = self.draw("router.weight", (count, self.hidden)) / math.sqrt(self.hidden)
        numbers = np.arange(count)
        weight[:, 0] = {"uniform": np.zeros(count), "skewed": -np.log(numbers + 1.0),
                        "collapsed": np.where(numbers < top, FAR, 0.0)}[routing]
        return weight.astype(self.dtype)

    def activations(self) -> dict[str, np.ndarray]:
        """Return the global input and output gradient, (batch, seq, hidden)."""
        shape = (self.batch, self.seq, self.hidden)
        found = {name: self.draw(name, shape).astype(self.dtype)
                 for name in ("input", "output gradient")}
        found["input"][..., 0] = 1
        return found


def routing_settings(experts: ExpertOptions, tokens: int, layers: int = 1) -> dict[str, Any]:
    """Return a router's settings for PyTorch's layers, without the names of conventions.

    The share of an expert in the balance loss is the number of tokens that have it among their
    first "counted choices", over "share divisor" times the number of tokens.  The capacity is a
    number of tokens, 0 where nothing is dropped.
    """
    if given := experts.design.given():
        raise UsageError(f"PyTorch's layer beside experts knows none with "
                         f"{', '.join(f'{k}={v!r}' for k, v in given.items())}: the default "
                         f"design would do")
    first = experts.convention == "deepspeed" and experts.top <= 2
    divisor = {"huggingface": 1, "megablocks": experts.top * layers}.get(
        experts.convention, experts.top)
    return {"top": experts.top, "gate": experts.gate, "balance": experts.balance, "z": experts.z,
            "by choice": experts.dropping_order == "choice",
            "capacity": capacity_of(experts, tokens) or 0, "bias rate": experts.bias_rate,
            "counted choices": 1 if first else experts.top,
            "share divisor": 1 if first else divisor}


class ExpertsSubject:
    """Hold a layer of experts on a mesh, and this rank's part of its input.

    The mesh has replicas of one stage; `expert_parallel` neighbouring ones divide the experts, by
    default all.  `place` is this rank's part of the global activations, `x` and `dy` its parts of
    the input and the output's gradient.

    Raises UsageError on all ranks alike, when the layer cannot be divided so.
    """

    def __init__(self, mesh: Mesh, case: ExpertsCase, expert_parallel: int | None = None) -> None:
        self.mesh, self.case, replicas = mesh, case, mesh.shape["d"]
        self.expert_parallel = replicas if expert_parallel is None else expert_parallel
        self.grid, self.data, self.data_grid = mesh.scheme.grid, None, None
        own = case.batch // replicas
        if case.batch % replicas:
            raise UsageError(f"--batch {case.batch} cannot be divided equally among {replicas} "
                             f"replicas: --batch {(own + 1) * replicas} would do")
        with as_usage_error():
            check_experts(case.experts, self.expert_parallel, replicas, case.tokens)
            self.layer = self._make_layer(own)
        rows, *rest = self.outer.layout().slices(self.grid, (own, case.seq, case.hidden))
        first = mesh.replica * own
        self.place = (slice(first + rows.start, first + rows.stop), *rest)
        arrays = case.activations()
        self.x, self.dy = (self.grid.backend.asarray(np.ascontiguousarray(arrays[name][
            self.place])) for name in ("input", "output gradient"))
        self.load({**case.parameters(), "router.bias": np.zeros(case.experts.count)})

    def _make_layer(self, batch: int) -> ExpertsLayer:
        """Build the layer, for `batch` sequences of this replica."""
        case, mesh, create = self.case, self.mesh, Parameter
        self.outer, inner = mesh.scheme.spaces(batch, case.seq)
        if mesh.data_grid is not None:
            self.data = DataParallel(mesh.data_grid)
            create = self.data.create_parameter
            self.data_grid = mesh.data_grid
            if self.expert_parallel > 1:
                self.data_grid = mesh.data_grid.with_experts(self.expert_parallel)
        dtype = getattr(self.grid.backend.xp, case.dtype)
        ranks = expert_ranks(self.data, self.data_grid, case.batch)
        builder = Builder(mesh.scheme, self.outer, inner, dtype, mask_key=MaskKey(case.seed),
                          parameter=create, expert_ranks=ranks)
        with builder.block("layers.0"):
            return ExpertsLayer(builder, "experts", case.experts, case.hidden, case.wide, 1)

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Set the parameters of these names from global arrays."""
        for p in self.layer.parameters:
            array = arrays.get(p.name.removeprefix(f"{LAYER_NAME}."))
            if array is not None:
                p.load(array)

    def set_routing(self, routing: str) -> None:
        """Set the router's weight."""
        self.load({"router.weight": self.case.router_weight(routing)})

    def step(self) -> tuple[Array, Array]:
        """Run forward and backward; return this rank's parts of the output and of dx."""
        y, saved = self.forward()
        return y, self.backward(saved)

    def forward(self) -> tuple[Array, Any]:
        """Compute the output; return it and the data that backward needs."""
        self.layer.routings.totals.clear()
        return self.layer.forward(self.x)

    def backward(self, saved: Any) -> Array:
        """Compute dx, and add to the gradients, without their sum over replicas."""
        return self.layer.backward(self.dy, saved)

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for p in self.layer.parameters:
            p.zero_gradient()

    def reset_traffic(self) -> None:
        """Set the counts of traffic to zero."""
        self.grid.reset_traffic()
        if self.data_grid is not None:
            self.data_grid.reset_traffic()

    def words(self) -> tuple[int, int]:
        """Return the words counted on this rank: between replicas, and inside its replica."""
        grids = self.data_grid, self.grid
        between, inside = (sum(traffic.words for traffic in grid.traffic().values()) if grid else 0
                           for grid in grids)
        return between, inside


def make_mesh(comm: Any, scheme: str, grid: Any, data: int, backend: str | None) -> mm3d.Mesh:
    """Arrange the ranks as `data` replicas, each on a grid; UsageError where that fails."""
    with as_usage_error():
        return mm3d.Mesh(comm, 1, scheme, grid, backend, data=data)
