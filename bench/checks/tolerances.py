"""Bound the errors that checks of a step let pass, without what computes the errors."""

import math

from bench.checks import attention_identities
from bench.records.notes import RESIDUAL

# Distances of one from the next number; TensorFloat-32 rounds the factors of a product.
EPS = {"float64": 2.0 ** -52, "float32": 2.0 ** -23, "tf32": 2.0 ** -10, "float16": 2.0 ** -10,
       "bfloat16": 2.0 ** -7}

# Relative Frobenius errors that rounding alone stays below: (outputs, gradients).  They hold for
# the presets' sizes, where sums have up to some ten thousand terms: the error of a blocked sum
# grows slowly with its length, and is hundreds of eps for the deepest gradient.  A wrong or
# missing collective gives errors of order one.
SERIAL = {"float64": (1e-12, 1e-11), "float32": (1e-5, 5e-5)}

# In types of few digits the serial scheme rounds in the same places, except for partial sums, so
# that few roundings differ.  The tolerance is `ROUNDINGS` times the distance of one from the next
# number times the square root of the layers.  With up to two layers in bfloat16 it still finds a
# factor of 1.02.
ROUNDINGS = 1.75

# Multiples of eps that pass in a check layer by layer: of |A||B| in products; of the rounding
# errors of each number in layers that work by rows, or of each term of a sum over all rows.
# TensorFloat-32 rounds only the factors of products, so only products and attention have its eps.
PRODUCT, ROW = 8, 32
SOME_ROWS = ("y in some rows", "dx in some rows")


def beside_serial(rounding: str, layers: int) -> tuple[float, float]:
    """Return the relative errors that outputs and gradients may have beside the serial scheme.

    `rounding` is the precision of the numbers: the dtype, or "tf32" where products of float32
    round to it, KeyError for an unknown one.  Roundings add up through the layers.
    """
    if rounding in SERIAL:
        return SERIAL[rounding]
    return (ROUNDINGS * EPS[rounding] * math.sqrt(layers),) * 2


def layer_by_layer(rounding: str, layers: int) -> dict[str, float]:
    """Return the errors that pass, by the names of the checks of a step of a Transformer.

    `rounding` is the precision of the products: the model's dtype, or "tf32".  Tolerances of an
    unknown one are NaN, which no error passes.
    """
    eps = EPS.get(rounding, math.nan)
    row = ROW * (EPS["float32"] if rounding == "tf32" else eps)
    bias, sums = {"dbias": row}, dict.fromkeys(SOME_ROWS, row)
    norm, product = sums | bias | {"dweight": row}, dict.fromkeys(("C", "dA", "dB"), PRODUCT * eps)
    attention = {name: multiple * eps
                 for name, multiple in attention_identities.multiples(rounding).items()}
    of_layer = {"attention": sums, "ln1": norm, "attention.qkv": product | bias,
                "attention.attention": attention, "attention.proj": product | bias,
                "mlp": sums, "ln2": norm, "mlp.up": product,    # its bias is added by GELU
                "mlp.gelu": sums | bias, "mlp.down": product | bias}
    return {f"{RESIDUAL}layers.{number}.{name}, {what}": limit for number in range(layers)
            for name, passing in of_layer.items() for what, limit in passing.items()}
