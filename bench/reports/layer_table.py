"""Make the table of measured layers, and say of any comparison what equal kernels would leave."""

from typing import Mapping, Sequence

import numpy as np

from bench.records.measurements import Measurements
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell
from bench.reports.emulated import describe_cluster


def layer_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make the table of a layer beside its products and one process; a row for each layer."""
    columns = [Column("hidden"), Column("", "scheme, grid"), Column("layer", "(s)"),
               Column("rate", "(GFLOP/s)"), Column("products", "alone (s)"),
               Column("PyTorch", "(s)"), Column("median", "", "PyTorch / layer"),
               Column("low", "95 %", "PyTorch / layer"), Column("high", "95 %", "PyTorch / layer"),
               Column("time", "(s)", "with overlap"), Column("ratio", "", "with overlap"),
               Column("hidden", "share", "with overlap"),
               Column("counted", "(MB)", "peak memory of a rank"),
               Column("closed form", "(MB)", "peak memory of a rank"),
               Column("ratio", "", "peak memory of a rank"),
               Column("resident", "(MB)", "peak memory of a rank")]
    rows: Rows = []
    for record in sorted(records, key=lambda record: record.configuration["hidden"]):
        chosen = record.configuration
        found = {name: variable.values for name, variable in record.variables.items()}
        own, products, reference, overlapped = found["seconds"][:, 0]
        counted, resident = found["memory"].max(axis=1)
        expected = float(found["expected_memory"])
        rows.append([int(chosen["hidden"]), f"{chosen['scheme']} {chosen['grid']}",
                     number_cell(own, ".3f"), number_cell(found["flops"] / own / 1e9, ".1f"),
                     number_cell(products, ".3f"), number_cell(reference, ".3f"),
                     *(number_cell(value, ".3f") for value in found["ratio"][2, :3]),
                     number_cell(overlapped, ".3f"), number_cell(found["ratio"][3, 0], ".3f"),
                     number_cell(found["hidden"], ".2f"),
                     number_cell(counted / 1e6, ".1f"), number_cell(expected / 1e6, ".1f"),
                     number_cell(counted / expected, ".3f"), number_cell(resident / 1e6, ".1f")])
    return [Table("One Transformer layer, forward and backward, beside one process", columns,
                  rows), Notes("About these layers:", _notes(records))]


def _notes(records: Sequence[Measurements]) -> list[str]:
    found = []
    for record in records:
        chosen, env = record.configuration, record.environment
        cluster = describe_cluster(env)
        worst = max(check.share for check in record.checks)
        found.append(
            f"hidden {chosen['hidden']}: {chosen['batch']} sequences of {chosen['seq']}, "
            f"{chosen['heads']} heads, {chosen['dtype']}; {len(record.scales['repetition'])} "
            f"repetitions, ended by {chosen['ended_by']}; reference {chosen['reference']}; "
            f"transport {chosen['transport']}; {env['ranks']} ranks on {env['cores']} cores, "
            f"{cluster}{', ' * bool(cluster)}"
            f"{env['blas']} {env['blas_architecture']}; verified, errors at most "
            f"{100 * worst:.2g} % of the tolerance.")
        seconds = record.variables["seconds"].values[:, 0]
        found += equal_rate_notes(record, {"PyTorch": (seconds[2], seconds[0])})
    return found + [
        "Times are makespans.  Products alone: the local matrix products of the linear layers, "
        "without communication, attention's own and everything else.",
        "With overlap: sums of gradients over the ranks, gathers of weights, and those of inputs "
        "that backward repeats, go on while ranks multiply; ratio: to the layer without; hidden: "
        "of the time of these collectives.",
        "Rate: floating-point operations of all matrix products; scores that backward computes "
        "again are not counted."]


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
    found = {name: variable.values for name, variable in record.raw.items()}
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
