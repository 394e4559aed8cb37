"""Change the parameters of a model by their gradients: SGD with momentum, and AdamW.

Each rank changes its own blocks, in place and in pieces that stay in cache.  All arithmetic is
elementwise but the norm, which has the same bits on every grid (`mm3d.training.norms`).  So equal
gradients give equal parameters, to the bit, however arrays are divided.
"""

import math
import weakref
from abc import ABC, abstractmethod
from typing import Any, Callable, Collection

from mm3d.arrays.backend import Array, backend_of
from mm3d.arrays.elementwise import pieces
from mm3d.arrays.plain_numbers import PlainNumbers, check_range
from mm3d.grid.agreement import same_arguments, text_of
from mm3d.model.parameters import comm_of
from mm3d.training.learning_rates import check_rate
from mm3d.training.loss_scaling import LossScaling, check_masters
from mm3d.training.norms import largest_magnitude, reproducible_norm

PIECE = 1 << 22    # elements on a device, where a piece is as large as its scratch memory
# Elements changed at a time, in units of a backend's `block`: they are not in cache before.
BLOCKS = 2


def decays(trained: Any) -> bool:
    """Return whether a parameter decays by default: matrices do, embeddings among them.

    Biases, and weights and biases of norms do not: what has one dimension in `Transformer.state`.
    """
    return trained.name.endswith("weight") and len(trained.public_shape) > 1


class Optimizer(PlainNumbers, ABC):
    """Change the parameters of a model after each computation of its gradients.

    Parameters
    ----------
    model : Transformer, Pipeline, GPT or any other
        Has `trained`, a list of `Parameter` or objects with the same attributes; `comm`, all
        ranks; and `refresh`, called after a change with the parameters that are rounded already.
        `update_biases`, if it has that, is called before, to change what no gradient changes.
    lr : float
        The learning rate; ``optimizer.lr`` may be set before each step, to the same on all ranks.
    weight_decay : float
        Decoupled: parameters that decay are multiplied by ``1 - lr * weight_decay`` first.
    clip : float, optional
        Gradients are multiplied by ``min(1, clip / (norm + 1e-6))`` with the norm of all of them.
        None or 0 clips nothing.
    loss_scaling : LossScaling, optional
        For float16: gradients of the loss times ``loss_scaling.scale`` are divided by the scale.
        It is set as ``model.loss_scale``, which a model with a loss of its own applies; without
        loss scaling that is 1.
    decays : callable
        Tells for one of `model.trained` whether it decays; by default `decays` of this module.

    Attributes
    ----------
    state : dict of str to list of Array
        By the name of a moment, this rank's blocks, in the order of ``model.trained``.
    steps : int
        Steps that were not skipped.
    norm : float or None
        The norm of the last step's gradients before clipping; None where nothing is clipped.

    Raises
    ------
    ValueError
        For numbers out of range, and for loss scaling of a model trained in a type of 16 bits,
        in which gradients divided by the factor vanish; on every rank alike.
    """

    moments: tuple[str, ...] = ()

    def __init__(self, model: Any, lr: float, weight_decay: float = 0.0,
                 clip: float | None = None, loss_scaling: LossScaling | None = None,
                 decays: Callable[[Any], bool] = decays) -> None:
        self.model, self.lr, self.weight_decay, self.clip = model, lr, weight_decay, clip or None
        self.loss_scaling, self.decays = loss_scaling, decays
        with same_arguments(comm_of(model, type(self).__name__), type(self).__name__) as given:
            given |= {name: value for name, value in vars(self).items()
                      if name not in ("model", "loss_scaling")}
            check_range("loss_scaling", loss_scaling, lambda one: one is None or isinstance(
                one, LossScaling), "mm3d.LossScaling(), or None")
            check_range("decays", decays, callable, "a function of a parameter")
            given["loss_scaling"] = loss_scaling and vars(loss_scaling)
            self._check()
        self.steps, self.norm = 0, None
        self.state = {name: [_zeros_like(t.master) for t in model.trained]
                      for name in self.moments}
        if hasattr(model, "loss_scale"):
            model.loss_scale = 1.0    # an earlier optimizer may have set another
            model.optimizer = weakref.ref(self)    # whose numbers a step compares over all ranks
        self._announce_scale()

    def __repr__(self) -> str:
        said = {"lr": self.lr} | self.options() | {"steps": self.steps}
        elements = sum(math.prod(t.master.shape) for t in self.model.trained)
        return (f"{type(self).__name__}({', '.join(f'{name}={said[name]}' for name in said)}) of "
                f"{len(self.model.trained)} parameters, {elements} elements here")

    def _check(self) -> None:
        """Raise ValueError for numbers out of range, and for models that it cannot train."""
        check_rate(self.lr)
        check_range("weight_decay", self.weight_decay, lambda decay: 0 <= decay < math.inf,
                    "at least 0")
        check_range("clip", self.clip, lambda clip: clip is None or clip >= 0,
                    "at least 0, or None")
        if self.loss_scaling is not None:
            check_masters(self.model, "loss_scaling", "gradients divided by the factor")

    def step(self) -> bool:
        """Change all parameters by their gradients; return whether the step was not skipped.

        Every rank must call it.  Ranks that clip or scale compare their numbers as they exchange
        the largest gradient; without, the next `GPT.step` finds what differs.

        Raises
        ------
        ValueError
            On every rank alike and before anything changes, when ranks that clip or scale have
            other numbers, or make another call; and for numbers that were set out of range.
        FloatingPointError
            On every rank alike, when gradients to be clipped, or their norm, are infinite or NaN,
            without `loss_scaling`, or with its smallest factor; no parameter has changed then.
        RuntimeError
            When the model was freed; while a CUDA graph is recorded: it would repeat its numbers.
        """
        comm_of(self.model, f"{type(self).__name__}.step")
        for t in self.model.trained[:1]:
            if backend_of(t.master).recording:
                raise RuntimeError("a CUDA graph would repeat the learning rate and the count of "
                                   "this step: record forward and backward alone")
        factor = self._gradient_factor()
        if factor is None:
            return False
        self.steps += 1
        changed, rounded = self._update_together(factor)
        for index, t in enumerate(self.model.trained):
            if index in changed:
                continue
            library = backend_of(t.master)
            block = min(BLOCKS * library.block, PIECE)
            moments = (self.state[name][index] for name in self.moments)
            scratch = library.empty((min(block, t.master.size),), t.master.dtype)
            rate = self.lr * self.weight_decay if self.decays(t) else 0.0
            for w, *others in pieces(library, t.master, t.grad, *moments, block=block):
                free = library.xp.reshape(scratch[:w.size], w.shape)
                self._update(library.xp, (factor, 1 - rate), free, w, *others)
        if hasattr(self.model, "update_biases"):
            self.model.update_biases()
        self.model.refresh(*(self.model.trained[index] for index in rounded))
        return True

    def numbers(self) -> dict[str, float | int]:
        """Return the numbers that resume a training beside moments: counts, rate, loss scaling."""
        scaling = self.loss_scaling
        return {"steps": self.steps, "lr": self.lr} | ({} if scaling is None else {
            f"loss_scaling.{name}": getattr(scaling, name) for name in scaling.numbers})

    def options(self) -> dict[str, float | int | str]:
        """Return the options that define the steps; a training may be resumed with others."""
        scaling = self.loss_scaling
        return {"weight_decay": self.weight_decay, "clip": self.clip or 0.0,
                "decays": text_of(self.decays),
                "loss_scaling": "none" if scaling is None else scaling.rule()}

    def set_numbers(self, numbers: dict[str, float | int]) -> None:
        """Set the numbers that `numbers` returned; loss scaling where this optimizer has one."""
        for name in self.numbers():
            owner, _, attribute = name.rpartition(".")
            if name in numbers:
                setattr(getattr(self, owner) if owner else self, attribute, numbers[name])
        self._announce_scale()

    def _gradient_factor(self) -> float | None:
        """Return the factor of the gradients; None where the step is skipped."""
        scaling, self.norm = self.loss_scaling, None
        nothing_to_see = not all(backend_of(t.grad).has_contents for t in self.model.trained)
        if scaling is None and self.clip is None or nothing_to_see:
            self._check()
            return 1.0
        counted = [t.grad for t in self.model.trained if t.counted]
        largest = largest_magnitude(counted, self.model.comm, f"{type(self).__name__}.step",
                                    self.numbers() | self.options())
        self._check()    # after ranks with other numbers are named
        factor = 1.0
        if scaling is not None:
            factor = 1 / scaling.scale
            scaling.update(overflow := largest == math.inf)
            self._announce_scale()
            if overflow:
                return None
        if self.clip is not None:
            norm = reproducible_norm(counted, self.model.comm, largest) * factor
            if norm == math.inf:
                raise FloatingPointError(
                    f"the gradients are not finite after {self.steps} steps: a smaller learning "
                    f"rate would do, or loss_scaling=LossScaling() for float16")
            self.norm = norm
            factor *= min(1.0, self.clip / (self.norm + 1e-6))
        return factor

    def _announce_scale(self) -> None:
        """Set the model's `loss_scale` to the factor of the loss."""
        if self.loss_scaling is not None:
            self.model.loss_scale = self.loss_scaling.scale

    def _update_together(self, factor: float) -> tuple[Collection[int], Collection[int]]:
        """Change parameters by one kernel; return which, by number, and whose values it rounds."""
        return (), ()

    @abstractmethod
    def _update(self, xp: Any, factors: tuple[float, float], scratch: Array, w: Array, g: Array,
                *moments: Array) -> None:
        """Change a piece `w` by its gradient `g` and `moments`.

        `factors` are those of the gradient, and of `w` before: weight decay.
        """


class SGD(Optimizer):
    """Change parameters by stochastic gradient descent, w -= lr b with b = momentum b + g.

    Parameters
    ----------
    model, lr, **options
        See `Optimizer`.
    momentum : float
        0 keeps no moment.
    """

    def __init__(self, model: Any, lr: float, momentum: float = 0.0, **options: Any) -> None:
        self.momentum = momentum
        self.moments = ("momentum",) if momentum else ()
        super().__init__(model, lr, **options)

    def _check(self) -> None:
        super()._check()
        check_range("momentum", self.momentum, lambda momentum: 0 <= momentum < 1,
                    "at least 0 and below 1")

    def options(self) -> dict[str, float | int | str]:
        return super().options() | {"momentum": self.momentum}

    def _update(self, xp: Any, factors: tuple[float, float], scratch: Array, w: Array, g: Array,
                *moments: Array) -> None:
        factor, kept = factors
        if kept != 1:
            xp.multiply(w, kept, out=w)
        if not moments:
            xp.multiply(g, self.lr * factor, out=scratch)
        else:
            (b,) = moments
            xp.multiply(b, self.momentum, out=b)
            if factor != 1:
                xp.multiply(g, factor, out=scratch)
                g = scratch
            xp.add(b, g, out=b)
            xp.multiply(b, self.lr, out=scratch)
        xp.subtract(w, scratch, out=w)


class AdamW(Optimizer):
    """Change parameters by AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    Weight decay is decoupled.  After t steps m and v are averages of the gradients and squares,
    m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2, and
    w -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    Parameters
    ----------
    model, lr, weight_decay, **options
        See `Optimizer`.
    betas : tuple of float
        beta1 and beta2.
    eps : float
        Keeps the divisor from zero.

    Raises
    ------
    ValueError
        For numbers out of range, and for a model trained in a type of 16 bits, in which v of small
        gradients is zero.
    """

    moments = ("first_moment", "second_moment")

    def __init__(self, model: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, **options: Any) -> None:
        self.betas, self.eps = tuple(betas) if hasattr(betas, "__iter__") else (betas,), eps
        super().__init__(model, lr, weight_decay, **options)

    def _check(self) -> None:
        super()._check()
        check_range("betas", self.betas,
                    lambda betas: len(betas) == 2 and all(0 <= b < 1 for b in betas),
                    "two numbers of at least 0 and below 1")
        check_range("eps", self.eps, lambda eps: 0 < eps < math.inf, "above 0")
        check_masters(self.model, "AdamW", "squares of gradients")

    def options(self) -> dict[str, float | int | str]:
        beta1, beta2 = map(float, self.betas)
        return super().options() | {"beta1": beta1, "beta2": beta2, "eps": self.eps}

    def _numbers(self, factors: tuple[float, float]) -> tuple[float, ...]:
        """Return the numbers of a step; few, since factors are joined."""
        beta1, beta2 = map(float, self.betas)    # also of a list or an array
        root = math.sqrt(1 - beta2 ** self.steps)
        return ((1 - beta1) * factors[0], beta1, (1 - beta2) / (1 - beta1) ** 2, beta2,
                self.eps * root, self.lr * root / (1 - beta1 ** self.steps), factors[1])

    def _update_together(self, factor: float) -> tuple[Collection[int], Collection[int]]:
        trained, factors = self.model.trained, (factor, 1 - self.lr * self.weight_decay)
        change = trained and getattr(backend_of(trained[0].master).kernels, "adamw_of_all", None)
        if not change or type(self)._update is not AdamW._update:    # a rule of its own
            return (), ()
        parameters = [(t.master, t.grad, m, v, getattr(t, "rounded", None))
                      for t, m, v in zip(trained, *map(self.state.get, self.moments))]
        decay = [bool(self.decays(t)) for t in trained]    # of any truth value, such as a match
        return change(parameters, decay, self._numbers(factors))

    def _update(self, xp: Any, factors: tuple[float, float], scratch: Array, w: Array, g: Array,
                *moments: Array) -> None:
        (m, v), numbers = moments, self._numbers(factors)
        fused = getattr(backend_of(w).kernels, "adamw", None)
        if fused and fused((w, g, m, v), numbers):
            return
        if factors[1] != 1:
            xp.multiply(w, factors[1], out=w)
        xp.multiply(g, numbers[0], out=scratch)
        xp.multiply(m, numbers[1], out=m)
        xp.add(m, scratch, out=m)
        xp.multiply(scratch, scratch, out=scratch)
        xp.multiply(scratch, numbers[2], out=scratch)
        xp.multiply(v, numbers[3], out=v)
        xp.add(v, scratch, out=v)
        xp.sqrt(v, out=scratch)
        xp.add(scratch, numbers[4], out=scratch)
        xp.divide(m, scratch, out=scratch)
        xp.multiply(scratch, numbers[5], out=scratch)
        xp.subtract(w, scratch, out=w)


def _zeros_like(a: Array) -> Array:
    """Allocate an array of zeros like `a`, contiguous and of the backend's memory."""
    zeros = backend_of(a).empty(tuple(a.shape), a.dtype)
    zeros[...] = 0
    return zeros
