"""Measure this machine, and fit a machine model to all samples."""
