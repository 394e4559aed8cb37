"""Define the interface of a scheme (a tensor parallelism), which the layers use.

A scheme divides the outer and the inner `Space` of activations, each in its own way, and creates a
`Product` up into the inner space and one down into the outer: in Megatron-LM the column- and the
row-parallel layer, in the paper two products with the directions y and z exchanged.  A new
parallelism is one new file in ``mm3d/schemes/``.
"""

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from mpi4py import MPI

from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.grid.activations import Space
from mm3d.grid.agreement import same_arguments
from mm3d.grid.grid import Grid
from mm3d.grid.layout import divided_directions
from mm3d.grid.shape import GridShape
from mm3d.schemes.closed_form import LocalProduct, Move, ProductShape, factorizations
from mm3d.schemes.matrix_product import MatrixProduct
from mm3d.schemes.product import Product


class GridAlgorithm(ABC):
    """Name an algorithm, and state the grids that it runs on.

    A `Scheme` has layers as well; other subclasses multiply plain matrices only.
    """

    name: str    # by which users choose it
    title: str    # in tables and figures
    directions: str    # letters of the grid's directions
    # Products of plain matrices by the algorithm; None if it has none of its own.
    matrix_product: type[MatrixProduct] | None = None

    @classmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        """Return the default sizes of the directions for `ranks` ranks, a line of all.

        Raises ValueError when there are none.
        """
        return (ranks,)

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        """Raise ValueError for a grid that it cannot use."""

    @classmethod
    def grid_shape(cls, sizes: Sequence[int] | GridShape) -> GridShape:
        """Return the shape of the grid with these sizes of its directions.

        Raises ValueError when these are other directions, or a size is less than 1.
        """
        if isinstance(sizes, GridShape) and sizes.directions == cls.directions:
            return sizes
        if isinstance(sizes, GridShape) or len(sizes) != len(cls.directions):
            raise ValueError(f"the grid of scheme {cls.name!r} has the directions "
                             f"{', '.join(cls.directions) or '(none)'}, so grid={sizes!r} should "
                             f"have {len(cls.directions)} sizes, one for each")
        return GridShape(cls.directions, sizes)


SpaceLayout = tuple[str, str, str, str]    # rows, features, vector, gathered_along of a `Space`


@dataclass(frozen=True)
class Option:
    """Describe an option of a scheme: its default, its allowed values, and its meaning."""

    default: Any
    choices: tuple
    meaning: str


REGISTERED: dict[str, type["Scheme"]] = {}    # in alphabetical order; see `registry`


class Scheme(GridAlgorithm):
    """Divide a model over a grid of ranks: the base class of all schemes.

    Defining a subclass with a `name` registers it.  The attributes and the abstract methods are
    the interface to implement.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks.
    grid : tuple of int or GridShape, optional
        Sizes of the directions; the scheme's own choice when not given.
    backend : str or Backend, optional
        The array library, see `mm3d.arrays.backend.get`.
    **options
        Values of some of the class' `options`; each option becomes an attribute of the scheme.

    Attributes
    ----------
    name, title, directions, matrix_product
        See `GridAlgorithm`; the title is by default the name, the directions are among x, y, z.
    options : mapping of str to Option
        The options of the scheme beside the grid, by name.
    down_weight : str
        Layout of the weight of a product down, and of an embedding's table (vocabulary,
        features).  What divides its features first divides those of outer activations first.
    divides_work : bool
        Whether the work is divided over the ranks; False if each rank does all of it.
    grid : Grid
        The ranks.
    """

    down_weight: str
    divides_work = True
    options: Mapping[str, Option] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            return
        if "title" not in cls.__dict__:
            cls.title = cls.name    # instead of the base class'
        REGISTERED[cls.name] = cls
        ordered = sorted(REGISTERED.items())
        REGISTERED.clear()
        REGISTERED.update(ordered)

    def __init__(self, comm: MPI.Intracomm, grid: tuple[int, ...] | GridShape | None = None,
                 backend: str | Backend | None = None, **options: Any) -> None:
        with same_arguments(comm, "scheme") as given:
            given["name"] = self.name
            vars(self).update(complete := self.complete_options(options))
            given |= complete
            if grid is not None and not isinstance(grid, (tuple, list, GridShape)):
                raise ValueError(f"grid={grid!r} should be a tuple of sizes, one for each of the "
                                 f"directions {', '.join(self.directions)}")
            shape = self.grid_shape(grid if grid is not None else self.default_grid(comm.size))
            given["grid"] = shape
            self.check_grid(shape)
            backend = backends.get(backend)
            given["backend"] = backend.name
        self.grid = Grid(comm, backend, **shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.grid!r})"

    @classmethod
    def complete_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of the scheme: the given ones, and the defaults of the others.

        Raises ValueError when an option is unknown, or has a value that is not among its choices.
        """
        found = {name: option.default for name, option in cls.options.items()}
        for name, value in sorted(options.items()):
            if name not in cls.options:
                raise ValueError(f"scheme {cls.name!r} has no option {name!r}: "
                                 f"it has {', '.join(sorted(cls.options)) or 'none'}")
            choices = cls.options[name].choices
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown: choose one of "
                                 f"{', '.join(map(str, choices))}")
            found[name] = choices[choices.index(value)]    # of 1 and 2.0: True and 2
        return found

    @classmethod
    @abstractmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        """Return the layouts of the outer and the inner space for these activations.

        Parameters
        ----------
        sizes : mapping of str to int
            Sizes of the grid's directions.
        batch, seq : int
            Global number of sequences, and positions in each.
        **options
            Options of the scheme.

        Returns
        -------
        outer, inner : tuple of str
            rows, features, vector and gathered_along of each `Space`.
        """

    @abstractmethod
    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        """Create the product C = A B of a linear layer.

        Parameters
        ----------
        source, target : Space
            Spaces of A and of C.
        shape : tuple of int
            Global shape of B: (in, ..., out).
        units : tuple of int
            Numbers of features that stay together where the first and the last dimension of B
            are divided.
        """

    # Closed forms, which depend on the sizes of the grid's directions and on the options alone.
    # `bench plan` counts many grids at once where a form works with vectors of sizes, too.

    @classmethod
    def grids(cls, ranks: int) -> list[GridShape]:
        """List all grids that the scheme can use on `ranks` ranks, by ascending sizes.

        Raises the ValueError of `default_grid` or `check_grid` when there are none.
        """
        found = []
        for shape in map(cls.grid_shape, factorizations(ranks, len(cls.directions))):
            with suppress(ValueError):
                cls.check_grid(shape)
                found.append(shape)
        if not found:
            found = [cls.grid_shape(cls.default_grid(ranks))]
            cls.check_grid(found[0])
        return found

    @classmethod
    def local_products(cls, sizes: Mapping[str, int], product: ProductShape,
                       **options: Any) -> list[LocalProduct]:
        """List the local matrix products of one forward on rank 0, which has the largest blocks.

        They follow from the layouts of A and C.  Rows of A are gathered along directions that
        divide the features of C; directions that divide the features of both are looped over.
        Backward has the same number for each of its two gradients, with rows, inner and columns
        exchanged.
        """
        outer, inner = cls.layouts(sizes, 1, 1, **options)
        A, C = (outer, inner) if product.way == "up" else (inner, outer)
        (A_rows, A_features), C_features = A[:2], C[1]
        rows = [c for c in divided_directions(A_rows) if c not in C_features]
        looped = {*A_features} & {*C_features}
        *blocks, count = (math.prod(sizes[c] for c in letters)
                          for letters in (rows, A_features, C_features, looped))
        return [LocalProduct(*product.largest_blocks(*blocks), count)]

    @classmethod
    @abstractmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        """List the collectives of one product, forward and backward.

        Among the options of the scheme may be ``recomputed=True``: backward then follows
        `mm3d.schemes.product.Product.recompute_saved`, which saves no gathered operand.
        """

    @classmethod
    def transposed_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                         **options: Any) -> tuple[list[Move], list[Move]]:
        """List those of A = C B^T of a product down; by default they are a product up of C."""
        up = product._replace(way="up", N=product.K, K=product.N)
        return cls.product_moves(sizes, up, **options, recomputed=True)

    def spaces(self, batch: int, seq: int) -> tuple[Space, Space]:
        """Create the outer and the inner space for `batch` sequences of `seq` positions."""
        options = {name: getattr(self, name) for name in self.options}
        outer, inner = self.layouts(self.grid.shape, batch, seq, **options)
        return (Space(self.grid, batch, seq, *outer), Space(self.grid, batch, seq, *inner))
