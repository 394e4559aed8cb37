"""Implement the paper's 3-D tensor parallelism, on any X x Y x Z grid.

Algorithms 1 to 6 of arXiv 2105.14450, corrected: Algorithm 5 is consistent in the directions
z, y, x only, Algorithm 6 is dA = B dC^T in y, x, z and dB = A dC in z, x, y, and the
reduce-scatter divides rows in C = AB and C = AB^T but columns in C = A^T B.

In each of them a, b and c are the `Split`\\ s of A, B and C, along the directions that it lists.
Indices are the paper's: i along x, j along y, l along z; A_il is the block that the ranks
(i, 0..Y-1, l) hold together, A_ijl the part of it on the rank (i, j, l).  Gradients are the same
three forms with the directions permuted; both have dC, which is gathered once.
"""

from typing import Any, Mapping

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.grid.shape import divides
from mm3d.grid.split import Gathered, Operand, Split, gather
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.matrix_product import MatrixProduct, element_counts
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import Option, Scheme, SpaceLayout


def ab(A: Operand, B: Operand, a: Split, b: Split, c: Split) -> Array:
    """Compute C = A B along y, x, z (Algorithm 1): A_ijl, B_lji -> C_ilj."""
    A_il = gather(A, a)
    B_lj = gather(B, b)
    return c.reduce_scatter(matmul(A_il, B_lj, c.term))


def ab_backward(dC: Operand, A: Operand, B: Operand,
                a: Split, b: Split, c: Split) -> tuple[Array, Array]:
    """Compute dA = dC B^T along z, x, y and dB = A^T dC along y, z, x (Algorithm 2)."""
    dC = Gathered(gather(dC, c))
    return abt(dC, B, c, b, a), atb(A, dC, a, c, b)


def abt(A: Operand, B: Operand, a: Split, b: Split, c: Split) -> Array:
    """Compute C = A B^T along y, x, z (Algorithm 3): A_ijl, B_jli -> C_ilj."""
    A_il = gather(A, a)
    B_jl = gather(B, b)
    return c.reduce_scatter(matmul_nt(A_il, B_jl, c.term))


def abt_backward(dC: Operand, A: Operand, B: Operand,
                 a: Split, b: Split, c: Split) -> tuple[Array, Array]:
    """Compute dA = dC B along z, x, y and dB = dC^T A along z, y, x (Algorithm 4)."""
    dC = Gathered(gather(dC, c))
    return ab(dC, B, c, b, a), atb(dC, A, c, a, b)


def atb(A: Operand, B: Operand, a: Split, b: Split, c: Split,
        accumulate_float32: bool = False) -> Array:
    """Compute C = A^T B along z, y, x (Algorithm 5): A_ilj, B_ijl -> C_jli; c divides columns.

    With `accumulate_float32` C is computed, and summed over the ranks, in float32 at least.
    """
    A_ij = gather(A, a)
    B_il = gather(B, b)
    return c.reduce_scatter(matmul_tn(A_ij, B_il, c.term, accumulate_float32))


def atb_backward(dC: Operand, A: Operand, B: Operand,
                 a: Split, b: Split, c: Split) -> tuple[Array, Array]:
    """Compute dA = B dC^T along y, x, z and dB = A dC along z, x, y (Algorithm 6)."""
    dC = Gathered(gather(dC, c))
    return abt(B, dC, b, c, a), ab(A, dC, a, c, b)


class CubeProduct(Product):
    """Compute C = A B of a linear layer, communicating A, B and C along three directions.

    `a`, `b` and `c` divide A, B and C along y, x, z, in a product down along z, x, y (A_ij for
    A_il).  `keep` says which gathered operands are saved from forward to backward; others are
    gathered again.  `overlap` is the panels of rows in `mm3d.schemes.overlap`, 0 for no overlap.
    """

    def __init__(self, a: Split, b: Split, c: Split, weight: Layout, keep: str,
                 overlap: int = 0) -> None:
        self.a, self.b, self.c, self.weight, self.keep = a, b, c, weight, keep
        self.overlap = overlap
        self.gathered_along = b

    def ab(self, A: Operand, B: Operand) -> Array:
        return ab(A, B, self.a, self.b, self.c)

    def abt(self, dC: Operand, B: Operand) -> Array:
        return abt(dC, B, self.c, self.b, self.a)

    def atb(self, A: Operand, dC: Operand) -> Array:
        return atb(A, dC, self.a, self.c, self.b, self.accumulate_float32)

    def forward(self, A: Array, B: Array) -> tuple[Array, Any]:
        A_il, B_lj = gather(A, self.a), gather(B, self.b)
        return self.ab(Gathered(A_il), Gathered(B_lj)), self.kept(A, A_il, B, B_lj)

    def kept(self, A: Array, A_il: Array | None, B: Operand,
             B_lj: Array) -> tuple[Operand, Gathered | None]:
        """Return A and B as saved for backward; None for B itself, which is the weight."""
        keep_B = self.keep != "none" and B_lj is not B
        return (Gathered(A_il) if self.keep == "both" else A, Gathered(B_lj) if keep_B else None)

    def backward_input(self, dC: Array, B: Array, saved: Any) -> tuple[Array, Any]:
        A, B_lj = saved
        return super().backward_input(dC, B if B_lj is None else B_lj, A)

    def recompute_saved(self, A: Array) -> Any:
        return A, None    # backward gathers them


class CubeMatrixProduct(MatrixProduct):
    """Compute C = A B, A B^T or A^T B of matrices by Algorithms 1 to 6."""

    LAYOUTS = {"ab": ("xy,z", "z,yx", "xz,y"), "abt": ("xy,z", "y,zx", "xz,y"),
               "atb": ("xz,y", "xy,z", "y,zx")}
    DIRECTIONS = {"ab": "yxz", "abt": "yxz", "atb": "zyx"}
    ALGORITHMS = {"ab": (ab, ab_backward), "abt": (abt, abt_backward), "atb": (atb, atb_backward)}

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the gathers of A and B and the scatter of C, each along its direction."""
        kinds = ("all_gather", "all_gather", "reduce_scatter")
        return [Move(direction, kind, (sizes[direction] - 1) * count) for direction, kind, count
                in zip(cls.DIRECTIONS[form], kinds, element_counts(form, shape).values())]

    def forward(self, A: Array, B: Array) -> Array:
        return self.ALGORITHMS[self.form][0](A, B, *map(self.split, "ABC"))

    def backward(self, dC: Array, A: Array, B: Array) -> tuple[Array, Array]:
        return self.ALGORITHMS[self.form][1](dC, A, B, *map(self.split, "ABC"))


class Cube(Scheme):
    """Divide matrices over an X x Y x Z grid, with perfect load balance.

    The outer space has the layout of A_ijl, the inner space the layout of C_ilj.  A product *up*
    into the inner space has the directions y, x, z, a product *down* z, x, y.  Rows are divided by
    whole sequences, or by batch and position as in the paper's [b/p, s/p, h/p]; attention then
    gathers keys and values along the sequence.

    X = P is fully sharded data parallelism (ZeRO-3), Y = P Megatron-LM with sequence
    parallelism, Z = 1 the two combined.

    Parameters
    ----------
    comm, grid, backend
        See `Scheme`; by default a cube.
    keep : {"none", "weight", "both"}
        Gathered operands that are saved from forward to backward, see `CubeProduct`.
    rows : {"auto", "sequences", "positions"}
        Whether rows are divided by whole sequences, or also by position; "auto" chooses sequences
        where X Y and X Z divide the batch.
    vectors : {"diagonal", "copied"}
        Whether one rank of a line along y or z stores a block of a vector, or each: fewer calls.
    overlap : {"auto", False, True, 2, 4, 8}
        Whether communication overlaps with products, with a number also in that many panels of
        rows: see `mm3d.schemes.overlap`.  "auto" is True where the ranks are on several nodes.
    """

    name = "3d"
    title = "3-D"
    directions = "xyz"
    down_weight = "yx,z"
    # The paper's B_lji has its columns divided by x.  Rows travel without being copied first.
    layer_weight = "{of_A}x{commas}{of_C}"    # of B: what divides columns of A, and those of C
    matrix_product = CubeMatrixProduct
    keep, overlap = "none", False    # unless options say other

    options = {
        "keep": Option("none", ("none", "weight", "both"),
                       "gathered operands kept from forward to backward"),
        "rows": Option("auto", ("auto", "sequences", "positions"),
                       "rows are divided in whole sequences, or also by position"),
        "vectors": Option("diagonal", ("diagonal", "copied"),
                          "where blocks of vectors are stored: on a diagonal, or on its lines"),
        "overlap": Option("auto", ("auto", False, True, 2, 4, 8),
                          "communicate while ranks multiply, in panels of rows")}

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        if self.overlap == "auto":
            self.overlap = self.grid.nodes > 1

    @classmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        p = round(ranks ** (1 / 3))
        p -= p ** 3 > ranks
        if p ** 3 != ranks:
            raise ValueError(f"{ranks} ranks are no cube: start {p ** 3} or {(p + 1) ** 3}, or "
                             f"name a grid of {ranks}, such as grid=({ranks}, 1, 1)")
        return (p, p, p)

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int, rows: str = "auto",
                vectors: str = "diagonal", **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        X, Y, Z = (sizes[c] for c in "xyz")
        if rows == "auto":
            rows = "sequences" if divides(X * Y, batch) and divides(X * Z, batch) else "positions"
        divided = "x{}," if rows == "sequences" else "x,{}"
        outer, inner = ("zx@y", "yx@z") if vectors == "diagonal" else ("zx", "yx")
        return (divided.format("y"), "z", outer, "y"), (divided.format("z"), "y", inner, "z")

    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        # Up, z divides the columns of A and y those of C.  Ranks along y make other columns of C
        # from the same A_il: each stores some of its rows, and y gathers them.  Ranks along z have
        # terms of the same C_ij, for other l: z reduce-scatters its rows.
        y, z = target.features, source.features    # down, they are exchanged
        last = len(shape) - 1
        weight = Layout(self.layer_weight.format(of_A=z, commas="," * last, of_C=y),
                        {0: units[0], last: units[1]})
        return CubeProduct(source.rows_split(y), weight.split(self.grid, shape, "x"),
                           target.rows_split(z), weight, self.keep, self.overlap)

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      recomputed: bool = False, keep: str = "none",
                      **options: Any) -> tuple[list[Move], list[Move]]:
        """List the collectives: A along y, B along x, C along z (on the way down, z, x, y).

        A rank moves w(Y) MN/(XZ) + w(X) NK/(ZY) + w(Z) MK/(XY) forward, w(n) = (n-1)/n.
        """
        (y, z), (M, N, K) = "yz" if product.way == "up" else "zy", product.extents
        A, B, C = (sizes[y] - 1) * M * N, (sizes["x"] - 1) * N * K, (sizes[z] - 1) * M * K
        forward = [Move(y, "all_gather", A), Move("x", "all_gather", B),
                   Move(z, "reduce_scatter", C)]
        backward = [Move(z, "all_gather", C), Move("x", "reduce_scatter", B),
                    Move(y, "reduce_scatter", A)]
        if recomputed or keep == "none":
            backward.append(Move("x", "all_gather", B))
        if recomputed or keep != "both":
            backward.append(Move(y, "all_gather", A))
        return forward, backward
