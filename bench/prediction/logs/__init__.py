"""Logs of other benchmarks, of which a machine file is made."""
