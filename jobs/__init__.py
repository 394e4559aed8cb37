"""Run the rows of both tables as batch jobs under Slurm: ``python -m jobs``.

A site file (``jobs/sites/*.toml``) says what a cluster is like; templates make of it one script a
row, which measures that row with ``python -m bench run``.
"""
