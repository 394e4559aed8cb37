"""Make a machine file from logs of other benchmarks."""
