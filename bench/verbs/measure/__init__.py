"""Measure a part alone, under mpirun; write a file of all samples, and print them."""

GROUP = "Measure the parts alone"
