"""Write checkpoints by all ranks, and read them on any other grid: see ``README.rst``."""
