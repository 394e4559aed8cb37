"""State the layers of a row; apart from `variants`, which all that read records load."""

from typing import Mapping

from bench.cases.variants import Variant
from mm3d.model.stack import Stack


def row_stack(variant: Variant, sizes: Mapping[str, int], recompute: str = "none",
              seed: int = 0) -> Stack:
    """Return layers of these sizes, in the variant's types and with its mask."""
    return Stack(**sizes, seed=seed, dtype=variant.dtype, causal=variant.causal,
                 recompute=recompute)
