"""Make the table of checkpoints and the disk."""

from bench.records.measurements import Measurements
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell

OF_THE_DISK = {"save": "disk write", "restore": "disk read"}


def checkpoint_parts(record: Measurements) -> list[Part]:
    """Make the table of rates, and of shares of the disk's own."""
    names = list(record.scales["operation"])
    seconds, rate = (record.variables[name].values for name in ("seconds", "rate"))
    rows: Rows = []
    for number, name in enumerate(names):
        other = OF_THE_DISK.get(name)
        share = rate[number] / rate[names.index(other)] if other else float("nan")
        rows.append([name, *(number_cell(value, ".3g") for value in seconds[number, :3]),
                     number_cell(rate[number] / 1e9, ".3g"), number_cell(share, ".0%")])
    chosen, total = record.configuration, float(record.variables["bytes"].values)
    columns = [Column(""), *(Column(part, "(s)") for part in ("median", "low", "high")),
               Column("rate", "(GB/s)"), Column("of the disk's own")]
    return [Table(f"A checkpoint of {total / 1e9:.3g} GB, {chosen['ranks']} ranks", columns, rows),
            Notes("About these times:", [
                "Parameters and moments of AdamW; a sample is the slowest rank's. Save ends when "
                "all is on the disk, and the one before is removed; restore compares checksums "
                "and copies. The disk: as many bytes of each rank to one plain file, "
                "synchronised, and read. Files are dropped from the cache first, where the "
                f"system does so. {record.environment.get('cpu', '')}"])]
