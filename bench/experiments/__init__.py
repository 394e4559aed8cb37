"""Experiments: each measures, verifies, returns a record and prints nothing."""
