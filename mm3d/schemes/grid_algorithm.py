"""Define what all algorithms on a grid of ranks state: a name, directions, and grids that fit."""

from abc import ABC, abstractmethod
from typing import Sequence

from mm3d.grid.shape import GridShape
from mm3d.schemes.matrix_product import MatrixProduct


class GridAlgorithm(ABC):
    """Name an algorithm, and state the grids that it runs on.

    `mm3d.schemes.scheme.Scheme` has layers as well; `ProductAlone` multiplies plain matrices only.

    Attributes
    ----------
    name : str
        Name by which users choose it.
    title : str
        Name in tables and figures.
    directions : str
        Letters of the grid's directions.
    matrix_product : type of MatrixProduct, optional
        Products of plain matrices by the algorithm; None if it has none of its own.
    """

    name: str
    title: str
    directions: str
    matrix_product: type[MatrixProduct] | None = None

    @classmethod
    @abstractmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        """Return the default sizes of the directions for `ranks` ranks.

        Raises
        ------
        ValueError
            When there are none.
        """

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        """Raise ValueError for a grid that it cannot use."""

    @classmethod
    def grid_shape(cls, sizes: Sequence[int] | GridShape) -> GridShape:
        """Return the shape of the grid with these sizes of its directions.

        Raises
        ------
        ValueError
            When these are other directions, or a size is less than 1.
        """
        given = sizes
        directions, sizes = ((given.directions, given.sizes) if isinstance(given, GridShape)
                             else (cls.directions, tuple(given)))
        if directions != cls.directions or len(sizes) != len(cls.directions):
            raise ValueError(f"the grid of scheme {cls.name!r} has the directions "
                             f"{', '.join(cls.directions) or '(none)'}, so grid={given!r} should "
                             f"have {len(cls.directions)} sizes, one for each")
        return GridShape(cls.directions, sizes)


PRODUCTS_ALONE: dict[str, type["ProductAlone"]] = {}    # by name


class ProductAlone(GridAlgorithm):
    """Multiply plain matrices over a grid by an algorithm without layers: the base class.

    Defining a subclass registers it under its `name`; it has a `matrix_product`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        PRODUCTS_ALONE[cls.name] = cls
