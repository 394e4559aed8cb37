"""The paper's three products on matrices of integers: distributed blocks, serial results."""
from typing import Callable, NamedTuple

import mm3d
from mm3d.schemes import cube
from reference import integers


class Form(NamedTuple):
    """One of the three products: layouts and directions of A, B and C in the paper's letters,
    and the serial computation of C and of (dA, dB) on matrices."""

    shapes: Callable
    layouts: tuple[str, str, str]
    directions: str
    serial: Callable
    backward: Callable


FORMS = {
    "ab": Form(lambda m, n, k: ((m, n), (n, k), (m, k)), ("xy,z", "z,yx", "xz,y"), "yxz",
               lambda A, B: A @ B, lambda dC, A, B: (dC @ B.T, A.T @ dC)),
    "abt": Form(lambda m, n, k: ((m, n), (k, n), (m, k)), ("xy,z", "y,zx", "xz,y"), "yxz",
                lambda A, B: A @ B.T, lambda dC, A, B: (dC @ B, dC.T @ A)),
    "atb": Form(lambda m, n, k: ((n, m), (n, k), (m, k)), ("xz,y", "xy,z", "y,zx"), "zyx",
                lambda A, B: A.T @ B, lambda dC, A, B: (B @ dC.T, A @ dC)),
}


class Case:
    """A, B and dC of one form in one order of the directions, and this rank's blocks of them."""

    def __init__(self, name, order, grid, sizes, dtype="float64"):
        rename = str.maketrans("xyz", order)
        form, self.grid, self.forms = FORMS[name], grid, (getattr(cube, name),
                                                          getattr(cube, f"{name}_backward"))
        self.shapes = form.shapes(*sizes)
        self.specs = [spec.translate(rename) for spec in form.layouts]
        self.letters = form.directions.translate(rename)
        self.layouts = [mm3d.Layout(spec) for spec in self.specs]
        self.A, self.B, self.dC = (integers(s, seed) for seed, s in enumerate(self.shapes))
        self.a, self.b, self.c = (layout.split(grid, shape, letter) for layout, shape, letter
                                  in zip(self.layouts, self.shapes, self.letters))
        self.C = form.serial(self.A, self.B)
        self.dA, self.dB = form.backward(self.dC, self.A, self.B)

    def local(self, which):
        return self.layouts[which].shard((self.A, self.B, self.dC)[which], self.grid)

    def run(self):
        """C, dA and dB of the distributed form, as blocks."""
        forward, backward = self.forms
        A, B, dC = map(self.local, range(3))
        C = forward(A, B, self.a, self.b, self.c)
        return C, *backward(dC, A, B, self.a, self.b, self.c)

    def expected(self):
        """The blocks of the serial C, dA and dB."""
        return [layout.shard(a, self.grid) for layout, a
                in zip([self.layouts[2], *self.layouts[:2]], (self.C, self.dA, self.dB))]
