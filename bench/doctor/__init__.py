"""Checks of this environment: launcher, MPI, GPUs, memory, files."""
