"""Gather vectors stored on the diagonal of the grid: Algorithms 7 and 8 of the paper.

The vectors are biases and weights of layer norms.  Algorithm 7 gathers this rank's part of a
vector from the ranks that store it; Algorithm 8 reduces the gradient onto them, with the reduction
that its printed form lacks.
"""

from mm3d.arrays.backend import Array
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout, divided_directions


class Vector:
    """Describe a vector along the features of a space, stored once and gathered for use.

    This is the paper's balanced storage, for any scheme.  The vector's layout divides it like the
    features, and then once more by directions that divide rows.  On the side of A the layout is
    ``"zx@y"``, which stores b_li on the diagonal j = l; on the side of C it is ``"yx@z"``, which
    stores b_ji on the same diagonal.

    Its global `shape` ends with the features of `space`; `unit` neighbouring features stay on one
    rank.  The `layout` is of the stored blocks; `sub`, a list of `Split`, says how further
    directions divide this rank's features of it; ranks along `copies`, a list of `Axis`, have
    other rows, and store the same block.  The direction `line` is that after '@' in the layout, or
    None; its rank `root`, None without a line, is on the diagonal, where a block of the shape
    `block` is stored.
    """

    def __init__(self, space: Space, shape: tuple[int, ...], unit: int = 1) -> None:
        self.space, self.shape, grid = space, tuple(shape), space.grid
        spec = "," * (len(shape) - 1) + space.vector
        self.layout = Layout(spec, {len(shape) - 1: unit})
        self.line = grid[self.layout.diagonal] if self.layout.diagonal else None
        self.root = None if self.line is None else self.layout.diagonal_rank(grid)
        further = self.layout.letters[len(space.features):]
        self.sub = [self.layout.split(grid, self.shape, letter) for letter in further]
        self.copies = [grid[c] for c in divided_directions(space.rows)
                       if c not in self.layout.named]
        coords = dict(grid.coords)
        if self.line is not None:
            coords[self.line.name] = self.root
        self.block = self.layout.local_shape(grid, self.shape, coords)

    @property
    def travels(self) -> bool:
        """Return whether gathers or sums of gradients call any collective."""
        axes = [*self.copies, self.line, *(split.axis for split in self.sub)]
        return any(axis is not None and axis.size > 1 for axis in axes)

    def gather_features(self, b: Array) -> Array:
        """Gather the features of this rank, b_l or b_j, from the stored blocks (Algorithm 7).

        `b` is this rank's stored block, empty on ranks that store none.  Every rank must call it.
        """
        if self.line is not None:
            if self.line.rank != self.root:
                b = self.space.grid.backend.empty(self.block, b.dtype)
            b = self.line.broadcast(b, self.root)
        for split in reversed(self.sub):
            b = split.all_gather(b)
        return b

    def reduce_gradient(self, db: Array) -> Array | None:
        """Sum `db` over all ranks that share these features, onto the ranks that store blocks.

        This is Algorithm 8 with the reduction that it lacks: a reduce-scatter along x *and* a
        reduction along y (z on the side of C) onto the diagonal.  Every rank must call it.

        `db` is this rank's term, the sum over its rows, with the shape that `gather_features`
        returns.  The result is the stored block of the sum; None on ranks that store none.
        """
        for split in self.sub:
            db = split.reduce_scatter(db)
        for axis in self.copies:    # of the part that is left, so the fewest words
            db = axis.all_reduce(db)
        if self.line is not None:
            db = self.line.reduce(db, self.root)
        return db
