"""Say how fast both sides of a comparison multiply, and what remains of it at equal rates."""

from typing import Mapping

import numpy as np

from bench.records.measurements import Measurements


def equal_rate_notes(record: Measurements, sides: Mapping[str, tuple[float, float]],
                     busy: float = 1.0) -> list[str]:
    """Return a note of the rates and the remaining ratios; none for files without the rates.

    Parameters
    ----------
    record : Measurements
        Of a comparison with PyTorch.
    sides : mapping of str to (float, float)
        The seconds of a step of each of PyTorch's sides, and of mm3d; those that are NaN were
        not measured.
    busy : float
        The share of the time in which PyTorch's processes compute.
    """
    found = {name: variable.values for name, variable in record.variables.items()}
    if "product_samples" not in found:
        return []
    own, other = found["product_flops"] / np.median(found["product_samples"], axis=1)
    work = float(found["torch_flops"]) / int(found["torch_cores"]) / busy
    remaining = []
    for name, (seconds, mine) in sides.items():
        if np.isfinite(seconds):
            share = min(1.0, work / other / seconds)
            remaining.append(f"{seconds * (1 - share + share * other / own) / mine:.2f} instead "
                             f"of {seconds / mine:.2f} ({name})")
    return [f"Kernels: one thread multiplies at {own / 1e9:.1f} GFLOP/s with mm3d's library and "
            f"at {other / 1e9:.1f} GFLOP/s with PyTorch's: local products of a step, in turns. At "
            f"equal rates PyTorch / mm3d would be {', '.join(remaining)}, with PyTorch's "
            f"{found['torch_flops'] / 1e9:.3g} GFLOP of products a step on all "
            f"{int(found['torch_cores'])} cores."]
