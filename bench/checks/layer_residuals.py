"""Check a step of the measured model where a serial model of its size is too large.

One forward and one backward are checked layer by layer while they run.  The output and gradients
of each layer are compared with those computed from its own input, so that no matrix is gathered:

- every distributed product, C = AB and both of its gradients, by a random vector in float64
  (Freivalds 1979), against a multiple of eps |A||B| as in `bench.checks.freivalds`;
- every gradient of a bias or of a norm's weight by its inner product with a random vector;
- layer norms, GELU and the sums of residual blocks in some rows, against NumPy in float64;
- attention as in `bench.checks.attention_identities`.

Where several ranks hold copies of an array, every copy is checked.  `bench.checks.tolerances` says
which errors pass.
"""

import math
from typing import Any

import numpy as np

from bench.checks import attention_identities
from bench.checks.sharded_matrices import ShardedMatrix, max_over_ranks, row_chunks
from bench.checks.tolerances import SOME_ROWS, layer_by_layer
from bench.records.measurements import Check
from bench.records.notes import RESIDUAL
from mm3d.arrays.elementwise import GELU_CUBIC, GELU_SCALE
from mm3d.grid.layout import Layout
from mm3d.model.attention.layer import Attention
from mm3d.model.chains import Residual
from mm3d.model.layers import Gelu, LayerNorm, Linear
from mm3d.tracing.events import ArrayObserver, LayerEvent
from mm3d.tracing.observe import observed

ROWS = 4
VECTORS = 3    # random vectors that each gradient of a bias is multiplied with


def check_step(model: Any, x: Any, dy: Any, seed: int) -> list[Check]:
    """Do one step of `model`, in float32 or float64, and check it.

    `x` and `dy` are this rank's blocks of the input and of the output's gradient; gradients are
    cleared first.  The checks, the same on every rank, have the worst error of all ranks and
    copies for each quantity.
    """
    model.stack.architecture.require_plain("a check layer by layer")
    found = LayerErrors(model, seed)
    model.zero_gradients()
    with observed(model.grid, found, model):
        _, saved = model.forward(x)
        model.backward(dy, saved)
    worst = max_over_ranks(np.array(list(found.errors.values())), model.grid.comm)
    limits = layer_by_layer(found.rounding, model.sizes.layers)
    return [Check(RESIDUAL + name, float(error), limits[RESIDUAL + name])
            for name, error in zip(found.errors, worst)]


class LayerErrors(ArrayObserver):
    """Observe the layers of one step, and keep the error of each over its bound.

    `errors` are the worst ones found on this rank, by layer and quantity; `rounding` is the
    precision of the products: the model's dtype, or "tf32".
    """

    kinds = (LayerEvent,)

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.grid = model, model.grid
        self.rounding = ("tf32" if getattr(self.grid.backend, "tf32", False)
                         and model.dtype == "float32" else model.dtype)
        self.random = np.random.default_rng(seed)
        self.errors: dict[str, float] = {}
        self.last: Any = None    # some rows of the result of the layer before
        self.rows = self._sample_rows()

    def _sample_rows(self) -> np.ndarray:
        """Draw the indices of some rows, at least one of each block that a rank holds."""
        shape = self.model.shape
        numbers = np.arange(math.prod(shape[:2])).reshape(shape[:2])
        rows = set(self.random.choice(numbers.size, min(ROWS, numbers.size), False).tolist())
        places = {str(place): place for coords in self.grid.shape.all_coordinates()
                  for place in [self.model.outer.layout().slices(self.grid, shape, coords)[:2]]}
        return np.array(sorted(rows | {int(self.random.choice(numbers[place].ravel()))
                                       for place in places.values() if numbers[place].size}))

    def note(self, layer: Any, what: str, difference: Any, bound: Any) -> None:
        """Keep the greatest difference as a multiple of its bound.

        A layer that is computed again is observed twice; the worse time counts.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(np.equal(difference, 0), 0.0, np.abs(difference) / bound)
        error = float(np.max(ratio, initial=0.0))
        name = f"{layer.name}, {what}"
        self.errors[name] = max(self.errors.get(name, 0.0),
                                error if math.isfinite(error) else math.inf)

    def random_signs(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a vector of -1 and 1."""
        return self.random.choice([-1.0, 1.0], shape)

    def activation(self, block: Any, space: Any, features: tuple[int, ...],
                   unit: int) -> ShardedMatrix:
        """Return an activation as a matrix with a row a token."""
        return ShardedMatrix(block, space.layout(len(features) - 1, unit),
                             (*self.model.shape[:2], *features), 2, self.grid)

    def parameter(self, block: Any, parameter: Any) -> ShardedMatrix:
        """Return a weight as a matrix, or a vector as a matrix of one row."""
        matrix = len(parameter.shape) > 1 and parameter.name.endswith("weight")
        if matrix:
            return ShardedMatrix(block, parameter.layout, parameter.shape, 1, self.grid)
        return ShardedMatrix(block, _row_layout(parameter.layout), (1, *parameter.shape), 1,
                             self.grid)

    def forward(self, layer: Any, x: Any, y: Any) -> Any:
        """Check the output `y` of `layer`; return the arrays that the check of backward needs."""
        if isinstance(layer, Residual):
            return self._sum(layer, SOME_ROWS[0], x, y)
        needed = {Linear: self._linear, LayerNorm: self._norm, Gelu: self._gelu,
                  Attention: self._attention}[type(layer)](layer, x, y)
        self.last = self._local_rows(y)
        return needed

    def again(self, layer: Any, x: Any) -> Any:
        """Return the array that the check of a linear layer's backward needs: its input."""
        return x

    def backward(self, layer: Any, dy: Any, dx: Any, note: Any) -> None:
        """Check the gradients that `layer` has computed from `dy`."""
        if isinstance(layer, Residual):
            return self._sum(layer, SOME_ROWS[1], dy, dx)
        {Linear: self._linear_backward, LayerNorm: self._norm_backward, Gelu: self._gelu_backward,
         Attention: self._attention_backward}[type(layer)](layer, dy, dx, note)
        self.last = self._local_rows(dx)

    def _sum(self, block: Any, what: str, a: Any, total: Any) -> None:
        """Check `total`, the sum of `a` and the result of the layer before."""
        a, total = self._local_rows(a), self._local_rows(total)
        self.note(block, what, total - a - self.last, np.abs(a) + np.abs(self.last))

    def _local_rows(self, a: Any) -> np.ndarray:
        """Return some rows of this rank's block, in float64."""
        host = self.grid.backend.to_host(a)
        host = host.reshape(math.prod(host.shape[:2]), math.prod(host.shape[2:]))
        here = (self.rows * len(host)) // math.prod(self.model.shape[:2])
        return host[here if len(host) else []].astype(np.float64)

    def _linear(self, layer: Linear, x: Any, y: Any) -> Any:
        A, C, B = self._product(layer, x, y)
        w = self.random_signs(C.shape[2:])
        expected = A.times(B.times(w)[0])[0]
        bound = A.times(B.times(np.abs(w), True)[0], True)[0]
        if layer.adds_bias:
            bias = self.parameter(layer.bias.value, layer.bias).vector()
            expected, bound = expected + np.vdot(bias, w), bound + np.abs(bias).sum()
        self.note(layer, "C", C.times(w) - expected, bound)
        return x

    def _linear_backward(self, layer: Linear, dy: Any, dx: Any, x: Any) -> None:
        A, dC, B = self._product(layer, x, dy)
        dA = ShardedMatrix(dx, A.layout, A.shape, 2, self.grid)
        u, w = self.random_signs(A.shape[2:]), self.random_signs(dC.shape[2:])
        self.note(layer, "dA", dA.times(u) - dC.times(B.left_times(u)[0])[0],
                  dC.times(B.left_times(np.abs(u), True)[0], True)[0])
        v, bound = dC.times(w)[0], dC.times(np.abs(w), True)[0]
        dB = self.parameter(layer.weight.grad, layer.weight)
        self.note(layer, "dB", dB.times(w) - A.left_times(v)[0], A.left_times(bound, True)[0])
        if layer.adds_bias:
            self._bias(layer, dC)

    def _product(self, layer: Linear, x: Any,
                 y: Any) -> tuple[ShardedMatrix, ShardedMatrix, ShardedMatrix]:
        """Return A, C and B of C = A B."""
        target, shape = layer.vector.space, layer.weight.shape
        source = self.model.inner if target is self.model.outer else self.model.outer
        units = layer.weight.layout.units
        return (self.activation(x, source, shape[:1], units.get(0, 1)),
                self.activation(y, target, shape[1:], units.get(len(shape) - 1, 1)),
                self.parameter(layer.weight.value, layer.weight))

    def _bias(self, layer: Any, dy: ShardedMatrix) -> None:
        """Compare a bias' gradient with the sum over the rows of `dy`, by a few inner products.

        An error that is nearly orthogonal to one random vector is not so to all.
        """
        for _ in range(VECTORS):
            w = self.random_signs(dy.shape[2:])
            self._inner_product(layer, "dbias", layer.bias, w, dy.times(w)[0].sum(),
                                dy.times(np.abs(w), True)[0].sum())

    def _inner_product(self, layer: Any, what: str, parameter: Any, w: np.ndarray, expected: Any,
                       bound: Any) -> None:
        """Compare the inner product of a vector's gradient and `w` with its expected value."""
        found = self.parameter(parameter.grad, parameter).times(w)
        self.note(layer, what, found - expected, bound)

    def _norm(self, layer: LayerNorm, x: Any, y: Any) -> Any:
        rows = self._norm_matrix(layer, x).rows(self.rows)[0]
        gamma, beta = (self.parameter(p.value, p).vector() for p in layer.parameters)
        mean, rstd = _moments(rows, layer.eps)
        self.note(layer, SOME_ROWS[0], self._norm_matrix(layer, y).rows(self.rows)
                  - (gamma * (rows - mean) * rstd + beta),
                  np.abs(gamma) * rstd * (np.abs(rows) + np.abs(mean)) + np.abs(beta))
        return y, rows

    def _norm_backward(self, layer: LayerNorm, dy: Any, dx: Any, needed: Any) -> None:
        y, rows = needed
        gamma, beta = (self.parameter(p.value, p).vector() for p in layer.parameters)
        mean, rstd = _moments(rows, layer.eps)
        xhat, size = (rows - mean) * rstd, (np.abs(rows) + np.abs(mean)) * rstd
        dY, Y = self._norm_matrix(layer, dy), self._norm_matrix(layer, y)
        g = dY.rows(self.rows)[0] * gamma

        def means(a: np.ndarray) -> np.ndarray:
            return a.mean(-1, keepdims=True)
        self.note(layer, SOME_ROWS[1], self._norm_matrix(layer, dx).rows(self.rows)
                  - rstd * (g - means(g) - xhat * means(g * xhat)),
                  rstd * (np.abs(g) + means(np.abs(g)) + size * means(np.abs(g) * size)))
        w = self.random_signs(gamma.shape)
        # y - beta is gamma xhat: no division by a gamma that may be small.
        offset, factor = (v[Y.place[2:]] for v in (beta, w))
        terms = np.array([[np.sum(a * (b - offset) * factor),
                           np.sum(np.abs(a) * (np.abs(b) + np.abs(offset)))]
                          for a, b in zip(row_chunks(dY.local()), row_chunks(Y.local()))]).sum(0)
        total, bound = self.grid.comm.allreduce(terms * (dY.copy == 0))    # of each block once
        self._inner_product(layer, "dweight", layer.weight, gamma * w, total, bound)
        self._bias(layer, dY)

    def _norm_matrix(self, layer: LayerNorm, a: Any) -> ShardedMatrix:
        return self.activation(a, layer.space, (layer.hidden,), 1)

    def _gelu(self, layer: Gelu, x: Any, y: Any) -> Any:
        u, size = self._gelu_input(layer, x)
        expected = u / 2 * (1 + np.tanh(GELU_SCALE * (u + GELU_CUBIC * u ** 3)))
        self.note(layer, SOME_ROWS[0], self._local_rows(y) - expected, size)
        return x

    def _gelu_backward(self, layer: Gelu, dy: Any, dx: Any, x: Any) -> None:
        (u, size), g = self._gelu_input(layer, x), self._local_rows(dy)
        t = np.tanh(GELU_SCALE * (u + GELU_CUBIC * u ** 3))
        slope = (1 + t) / 2 + u / 2 * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * u ** 2)
        self.note(layer, SOME_ROWS[1], self._local_rows(dx) - g * slope,
                  np.abs(g) * (1 + size))
        self._bias(layer, self._gelu_matrix(layer, dx))

    def _gelu_matrix(self, layer: Gelu, a: Any) -> ShardedMatrix:
        return self.activation(a, layer.vector.space, layer.vector.shape, 1)

    def _gelu_input(self, layer: Gelu, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return x + b in some rows, and |x| + |b|."""
        whole = self.parameter(layer.bias.value, layer.bias).vector()
        rows, bias = self._local_rows(x), whole[self._gelu_matrix(layer, x).place[2:]]
        return rows + bias, np.abs(rows) + np.abs(bias)

    def _attention(self, layer: Attention, x: Any, y: Any) -> Any:
        host = self.grid.backend.to_host
        attention_identities.check_forward(self, layer, host(x), host(y))
        return x, y

    def _attention_backward(self, layer: Attention, dy: Any, dx: Any, needed: Any) -> None:
        host = self.grid.backend.to_host
        attention_identities.check_backward(self, layer, *map(host, (*needed, dy, dx)))


def _moments(rows: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and 1 / standard deviation of each row."""
    return (rows.mean(-1, keepdims=True),
            1 / np.sqrt(rows.var(-1, keepdims=True) + eps))


def _row_layout(vector: Layout) -> Layout:
    """Return the layout of a vector as a matrix of one row, whose row is not divided."""
    return Layout(f",{vector.spec}", {dim + 1: n for dim, n in vector.units.items()})
