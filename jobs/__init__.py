"""Run the rows of both tables as batch jobs under Slurm: ``python -m jobs``.

A site file (``jobs/sites/*.toml``) describes a cluster; templates turn it into one script a row,
which measures that row with ``python -m bench run``.
"""

from bench import mpi

# MPI libraries that only start under a launcher, such as Cray's, end a process on a login node.
mpi.defer_start()

import mm3d  # noqa: E402, F401 (it says what this Python lacks, before another import fails)
