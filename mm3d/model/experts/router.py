"""Define the router, and the shared expert, which every token goes to as well."""

from typing import Any

from mm3d.arrays.backend import Array, namespace
from mm3d.arrays.elementwise import as_rows
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.split import Split
from mm3d.model.architecture import Architecture
from mm3d.model.builder import Builder
from mm3d.model.chains import Chain
from mm3d.model.experts.options import ExpertDesign
from mm3d.model.functional import upcast
from mm3d.model.layers import perceptron_layers, sigmoid
from mm3d.model.vectors import Vector


class Router:
    """Compute logits = x W^T, in float32 at least.

    Ranks that share rows sum their terms, block by block, so that all of them have the same bits
    and choose the same experts.  `build` makes W, called `name` in the block, without "weight"; x
    is in its outer space.  The global `shape` of W is (experts, hidden); it is stored like vectors
    along the features.
    """

    def __init__(self, build: Builder, name: str, shape: tuple[int, int]) -> None:
        self.vector, space = Vector(build.outer, shape), build.outer
        self.weight = build.create_parameter(f"{name}.weight", self.vector.layout, shape)
        self._axes = [space.grid[c] for c in space.features if space.grid[c].size > 1]

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the logits, (tokens, experts), of this rank's rows, (tokens, features).

        Returns them with the gathered W, for `backward`.
        """
        weight = self.vector.gather_features(self.weight.value)
        return self.sum_features(matmul_nt(upcast(x), upcast(weight))), weight

    def backward(self, dlogits: Array, x: Array, saved: Any) -> Array:
        """Compute dx, in the type of the logits; add dW to the gradient."""
        dW, xp = matmul_tn(dlogits, upcast(x)), namespace(dlogits)
        self.weight.accumulate(self.vector.reduce_gradient(
            xp.astype(dW, self.weight.grad.dtype, copy=False)))
        return matmul(dlogits, upcast(saved))

    def sum_features(self, a: Array) -> Array:
        """Sum `a`, one row for each token, over the ranks that have other features of the rows."""
        for axis in self._axes:
            split = Split(axis, 0, a.shape[0])
            a = split.all_gather(split.reduce_scatter(a))
        return a


class SharedExpert:
    """Compute F(x), where F is a perceptron; or with a gate sigmoid(x w) F(x).

    Its weights are those of linear layers: divided by the scheme, and among replicas by ZeRO.  The
    design has its width, and says whether there is a gate; the architecture what F computes.
    """

    def __init__(self, build: Builder, name: str, design: ExpertDesign, hidden: int,
                 architecture: Architecture) -> None:
        self.chain = Chain(*perceptron_layers(build, name, hidden, design.shared,
                                              architecture.gates, architecture.biases == "all"))
        self.gate, self.parameters = None, self.chain.parameters
        if design.shared_gate:
            self.gate = Router(build, f"{name}.gate", (1, hidden))
            self.parameters = [*self.parameters, self.gate.weight]

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute this rank's block of the output; save what backward needs, but x."""
        y, saved = self.chain.forward(x)
        if self.gate is None:
            return y, (saved, None)
        xp = namespace(x)
        logits, weight = self.gate.forward(as_rows(x))
        share = sigmoid(xp, logits)
        out = xp.astype(share * upcast(as_rows(y)), y.dtype, copy=False)
        return xp.reshape(out, y.shape), (saved, (as_rows(y), share, weight))

    def backward(self, dy: Array, x: Array, saved: Any) -> Array:
        """Compute dx; add to the gradients of the perceptron and of the gate."""
        of_chain, of_gate = saved
        if of_gate is None:
            return self.chain.backward(dy, of_chain)
        (y, share, weight), xp, rows = of_gate, namespace(dy), upcast(as_rows(dy))
        dshare = self.gate.sum_features(xp.sum(rows * upcast(y), axis=-1, keepdims=True))
        dx = self.chain.backward(xp.reshape(
            xp.astype(share * rows, dy.dtype, copy=False), dy.shape), of_chain)
        more = self.gate.backward(dshare * share * (1 - share), as_rows(x), weight)
        dx += xp.reshape(xp.astype(more, dx.dtype, copy=False), dx.shape)
        return dx
